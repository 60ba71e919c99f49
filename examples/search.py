"""Best-first proof search over a fleet: `leanq up` in one terminal, this in another.

A real search asks a model for tactics, and for how promising a state is. Here every tactic of a
list is tried on every state, and the state whose goals are shortest comes first.
"""

import heapq

from leanq import LeanQClient, UsageError

THEOREMS = [
    "theorem and_swap (p q : Prop) (h : And p q) : And q p",
    "theorem three (p q r : Prop) (hp : p) (hq : q) (hr : r) : And p (And q (And r p))",
    "theorem curry (p q r : Prop) (f : And p q → r) : p → q → r",
    "theorem compose (p q r : Prop) (f : p → q) (g : q → r) : p → r",
]
TACTICS = ["assumption", "constructor", "intro h", "intro k", "apply f", "apply g"]
TACTICS += ["exact h.left", "exact h.right"]


def prove(lean: LeanQClient, theorem: str, most: int = 100) -> tuple[list[str] | None, str]:
    """The tactics that prove ``theorem``, if they are found, and the tree of all states."""
    (start,) = lean.check(f"prelude\nimport Core\n{theorem} := sorry\n").result().sorries
    paths: dict[str, list[str]] = {start.state: []}
    children: dict[str, list[str]] = {}
    frontier = [(0, start.state)]
    proof = None
    while frontier and proof is None and len(paths) < most:
        _, state = heapq.heappop(frontier)
        steps = {tactic: lean.step(state, tactic) for tactic in TACTICS}
        for tactic, future in steps.items():
            reply = future.result()
            if reply.verdict == "accepted":
                proof = [*paths[state], tactic]
                children.setdefault(state, []).append(f"{tactic}: proved")
            elif reply.state and reply.state not in paths:
                paths[reply.state] = [*paths[state], tactic]
                children.setdefault(state, []).append(reply.state)
                heapq.heappush(frontier, (sum(map(len, reply.goals)), reply.state))
    return proof, tree(start.state, 1, paths, children)


def tree(node: str, depth: int, paths: dict[str, list[str]], children: dict[str, list[str]]) -> str:
    """A line for each tactic that worked, below the one before it."""
    lines = []
    for child in children.get(node, ()):
        lines.append("  " * depth + (paths[child][-1] if child in paths else child))
        lines.append(tree(child, depth + 1, paths, children))
    return "\n".join(filter(None, lines))


if __name__ == "__main__":
    try:
        client = LeanQClient()
    except UsageError as error:
        raise SystemExit(str(error)) from None
    with client:
        for theorem in THEOREMS:
            found, shown = prove(client, theorem)
            print(f"{theorem}\n{shown}\n{'; '.join(found) if found else 'not proved'}\n")
