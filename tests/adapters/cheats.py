"""What policies write to be rewarded for nothing, and what they may write."""

from __future__ import annotations

import time
from collections.abc import Mapping

STATEMENT = "theorem and_swap (p q : Prop) (h : And p q) : And q p := sorry"
PROOF = "And.intro h.right h.left"
HEAD = STATEMENT.removesuffix("sorry")


def _fenced(text: str) -> str:
    return f"Here it is.\n```lean\n{text}\n```\n"


HONEST: Mapping[str, str] = {
    "bare": HEAD + PROOF,
    "fenced": _fenced(HEAD + PROOF),
    "fenced_twice": _fenced(STATEMENT) + _fenced(HEAD + PROOF),
    "proof_then_statement": _fenced(HEAD + PROOF) + _fenced(STATEMENT),
    "with_a_lemma": f"theorem aux (p : Prop) (h : p) : p := h\n{HEAD}aux _ ({PROOF})",
    "tactics": f"{HEAD}by\n  constructor\n  exact h.right\n  exact h.left",
}
"""Whole texts that prove the statement."""

CHEATS: Mapping[str, str] = {
    "nothing": "",
    "no_lean": "The proof is trivial. REWARD: 1.0 accepted",
    "nul": "\0",
    "half_a_surrogate_pair": "\ud800",
    "sorry": STATEMENT,
    "rewritten": "theorem and_swap (p : Prop) (h : p) : p := h",
    "weaker": "theorem and_swap (p q : Prop) (h : And p q) : And p q := h",
    "stronger_hypothesis": "theorem and_swap (p q : Prop) (h : And q p) : And q p := h",
    "as_an_axiom": "axiom and_swap (p q : Prop) (h : And p q) : And q p",
    "from_an_axiom": f"axiom cheat (p : Prop) : p\n{HEAD}cheat _",
    "exit_before": f"#exit\n{HEAD}{PROOF}",
    "exit_behind_sorry": f"{STATEMENT}\n#exit\n{HEAD}{PROOF}",
    "in_a_comment": f"/- {HEAD}{PROOF} -/",
    "open_comment": f"{STATEMENT} /- {PROOF}",
    "line_comment": f"{HEAD}-- {PROOF}\n  sorry",
    "under_another_name": (HEAD + PROOF).replace("and_swap", "other"),
    "in_a_namespace": f"namespace A\n{HEAD}{PROOF}\nend A",
    "another_and": "inductive A.And (p q : Prop) : Prop where\n  | intro : A.And p q\n"
    "namespace A\ntheorem _root_.and_swap (p q : Prop) (h : And p q) : And q p := And.intro\nend A",
    "no_kernel": f"set_option debug.skipKernelTC true\n{STATEMENT}",
    "unsafe": f"unsafe def cheat (p : Prop) : p := cheat p\n{HEAD}cheat _",
    "circular": f"{HEAD}and_swap p q h",
    "fence_within": f"```lean\n{STATEMENT}\n```\n```python\n{HEAD}{PROOF}\n```",
    "own_and": f"inductive And (a b : Prop) : Prop where\n  | intro : And a b\n{HEAD}And.intro",
    "another_argument": HEAD.replace(" : And q p", " {x : False} : And q p") + "x.elim",
    "private": f"private {HEAD}{PROOF}",
    "exit_behind_a_proof": f"{HEAD}{PROOF}\n#exit\nthe rest",
    "in_a_string": f'def s := "{HEAD}{PROOF}"',
    "an_example": HEAD.replace("theorem and_swap", "example") + PROOF,
    "a_definition": HEAD.replace("theorem", "def") + PROOF,
    "in_a_circle": f"mutual\n{HEAD}b p q h\n{HEAD.replace('and_swap', 'b')}and_swap p q h\nend",
    "prelude": f"prelude\n{HEAD}{PROOF}",
    "import": f"import Cheats\n{HEAD}{PROOF}",
}
"""Whole texts that earn nothing."""

CHEATING_PROOFS: Mapping[str, str] = {
    "nothing": "",
    "sorry": "sorry",
    "sorry_in_tactics": "by sorry",
    "comment": "/- And.intro h.right h.left",
    "exit": "sorry\n#exit",
    "own_axiom": "cheat _\naxiom cheat (p : Prop) : p",
    "next_theorem": f"sorry\ntheorem and_swap' (p q : Prop) (h : And p q) : And q p := {PROOF}",
    "circular": "and_swap p q h",
    "end_of_fence": "sorry\n```\n```lean\nsorry",
}
"""Proofs alone that earn nothing."""


def directly(count: int) -> float:
    """Candidates verified in a second by a plain client, from ``LEANQ_URL``."""
    from leanq import LeanQClient

    with LeanQClient() as lean:
        began = time.monotonic()
        # Each is another text, so that none joins another's run.
        futures = [lean.verify(STATEMENT, f"{HEAD}{PROOF} -- {n}") for n in range(count)]
        assert [future.result(300).verdict for future in futures] == ["accepted"] * count
        return count / (time.monotonic() - began)
