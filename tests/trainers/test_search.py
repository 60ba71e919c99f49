"""Proof search: on real Lean, and on made-up calculi against a plain walk of the graph."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainers.provers import QED, TableProver

from leanq.client import LeanQClient
from leanq.errors import DataError, UnavailableError, UsageError
from leanq.local import Pool
from leanq.queue.requests import Message, Reply, Verdict
from leanq.queue.settings import Settings
from leanq.trainers.search import ProofSearch, Suggestion
from leanq.trainers.strategies import Beam, BestFirst, MonteCarlo, SearchNode, Strategy

STATEMENT = "theorem t : p := sorry"
STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "best first": BestFirst,
    "beam": lambda: Beam(width=1000),
    "tree": MonteCarlo,
}
TACTICS = ("a", "b", "c")
Moves = dict[tuple[str, str], str]

moves = st.dictionaries(
    st.tuples(st.integers(0, 12).map(str), st.sampled_from(TACTICS)),
    st.one_of(st.integers(0, 12).map(str), st.sampled_from([QED, "rejected", "timeout"])),
    max_size=40,
)
strategies = st.sampled_from(sorted(STRATEGIES))


async def everything(nodes: Sequence[SearchNode]) -> list[list[Suggestion]]:
    """A policy that has an opinion of every tactic, the same each time."""
    chance = random.Random
    return [
        [Suggestion(each, -chance(f"{node.state}{each}").random()) for each in TACTICS]
        for node in nodes
    ]


def reachable(table: Moves) -> tuple[set[str], bool]:
    """By a plain walk: all states, and whether a proof is among them."""
    seen, waiting, proved = {"0"}, ["0"], False
    while waiting:
        state = waiting.pop()
        for tactic in TACTICS:
            following = table.get((state, tactic), "rejected")
            proved |= following == QED
            if following.isdigit() and following not in seen:
                seen.add(following)
                waiting.append(following)
    return seen, proved


def replay(table: Moves, tactics: Sequence[str]) -> str:
    """Where tactics lead from the root."""
    state = "0"
    for tactic in tactics:
        state = table.get((state, tactic), "rejected")
    return state


@given(moves, strategies, st.integers(1, 5), st.integers(1, 3))
def test_what_can_be_proved_is_and_nothing_is_expanded_twice(
    table: Moves, name: str, batch: int, batches: int
) -> None:
    prover = TableProver(table)
    search = ProofSearch(
        STATEMENT, everything, strategy=STRATEGIES[name](), batch=batch, batches=batches
    )
    found = asyncio.run(search.run(prover))
    states, provable = reachable(table)
    assert (found.ended == "proved") == provable
    assert not prover.asked or set(prover.asked.values()) == {1}
    if provable:
        assert replay(table, found.tactics) == QED
        assert found.code in prover.verified
    else:
        assert found.ended == "exhausted"
        assert {node.state for node in search.nodes} == states
        assert found.progress.steps == len(TACTICS) * len(states)
        assert found.progress.unanswered.total() == sum(
            table.get((state, tactic)) == "timeout" for state in states for tactic in TACTICS
        )


@given(moves, strategies, st.lists(st.integers(0, 12), max_size=6), st.booleans())
def test_a_search_goes_on_from_where_it_was_saved(
    table: Moves, name: str, budgets: list[int], cut: bool
) -> None:
    """Ended by its budget, or by a fleet that goes away in the middle of a batch."""
    search = ProofSearch(STATEMENT, everything, strategy=STRATEGIES[name](), batch=2)
    for budget in budgets:
        prover = TableProver(table, fails_after=budget if cut else None)
        try:
            limit = None if cut else search.progress.steps + budget
            found = asyncio.run(search.run(prover, max_steps=limit))
            assert prover.asked.total() <= budget or cut
            if found.ended != "steps":
                break
        except UnavailableError:
            assert cut
        search = ProofSearch.resume(search.save(), everything, strategy=STRATEGIES[name](), batch=2)
    found = asyncio.run(search.run(TableProver(table)))
    states, provable = reachable(table)
    assert (found.ended == "proved") == provable
    if provable:
        assert replay(table, found.tactics) == QED
    else:
        assert {node.state for node in search.nodes} == states


async def test_the_likelier_is_tried_first() -> None:
    table = {("0", "a"): "1", ("0", "b"): "2", ("1", "a"): QED, ("2", "b"): "3", ("3", "b"): QED}

    async def prefers_b(nodes: Sequence[SearchNode]) -> list[list[Suggestion]]:
        return [[Suggestion("a", -9.0), Suggestion("b", -0.1)] for _ in nodes]

    search = ProofSearch(STATEMENT, prefers_b, batch=1, batches=1)
    assert (await search.run(TableProver(table))).tactics == ("b", "b", "b")

    async def value(nodes: Sequence[SearchNode]) -> list[float]:
        return [float(node.state == "1") for node in nodes]

    search = ProofSearch(STATEMENT, prefers_b, value=value, batch=1, batches=1)
    assert (await search.run(TableProver(table))).tactics == ("a", "a")


async def test_a_beam_drops_what_does_not_fit() -> None:
    table = {("0", "a"): "1", ("0", "b"): "2", ("2", "c"): QED}

    async def prefers_a(nodes: Sequence[SearchNode]) -> list[list[Suggestion]]:
        return [[Suggestion("a", -0.1), Suggestion("b", -1.0), Suggestion("c")] for _ in nodes]

    narrow = ProofSearch(STATEMENT, prefers_a, strategy=Beam(width=1))
    assert (await narrow.run(TableProver(table))).ended == "exhausted"
    assert [node.status for node in narrow.nodes] == ["expanded", "expanded", "dropped"]
    wide = ProofSearch(STATEMENT, prefers_a, strategy=Beam(width=2))
    assert (await wide.run(TableProver(table))).tactics == ("b", "c")


async def test_a_tree_search_visits_what_has_value_more_often() -> None:
    table = {
        (f"{side}{'x' * depth}", tactic): f"{side}{'x' * (depth + 1)}{'' if tactic == 'a' else 'y'}"
        for side in "gb"
        for depth in range(12)
        for tactic in "ab"
    } | {("0", "a"): "g", ("0", "b"): "b"}

    async def both(nodes: Sequence[SearchNode]) -> list[list[str]]:
        return [["a", "b"] for _ in nodes]

    async def value(nodes: Sequence[SearchNode]) -> list[float]:
        return [0.9 if node.state.startswith("g") else 0.1 for node in nodes]

    search = ProofSearch(STATEMENT, both, strategy=MonteCarlo(0.5), value=value, batch=1, batches=1)
    await search.run(TableProver(table), max_steps=24)
    visits = {node.state: node.visits for node in search.nodes}
    assert visits["g"] > 2 * visits["b"]


async def test_no_more_steps_are_outstanding_than_allowed() -> None:
    table = {
        (str(number), each): str(3 * number + place + 1)
        for number in range(40)
        for place, each in enumerate(TACTICS)
    }
    prover = TableProver(table)
    search = ProofSearch(STATEMENT, everything, batch=8, batches=3, outstanding=5)
    found = await search.run(prover)
    assert prover.most_at_once == 5
    assert found.progress.states == len(search.nodes) == 121


async def test_a_proof_that_is_not_accepted_is_none() -> None:
    search = ProofSearch(STATEMENT, everything)
    found = await search.run(TableProver({("0", "a"): QED}, checks="unverified"))
    assert (found.ended, found.code) == ("exhausted", None)
    assert dict(found.progress.refused) == {"unverified": 1}


@pytest.mark.parametrize(
    ("verdicts", "ended", "refused"),
    [
        (("timeout", "accepted"), "proved", {}),
        (("timeout", "rejected"), "exhausted", {"timeout": 1}),
        (("rejected", "crashed"), "exhausted", {"crashed": 1}),
    ],
)
async def test_a_text_without_a_verdict_of_leans_does_not_end_a_verification(
    verdicts: tuple[Verdict, Verdict], ended: str, refused: dict[str, int]
) -> None:
    class Prover(TableProver):
        async def verify(self, target: str | None, code: str, **_: object) -> Reply:
            self.verified.append(code)
            return Reply(verdicts[len(self.verified) - 1])

    prover = Prover({("0", "a"): QED})
    found = await ProofSearch(STATEMENT, everything).run(prover)
    assert (found.ended, dict(found.progress.refused)) == (ended, refused)
    assert len(prover.verified) == 2
    assert found.code == (prover.verified[1] if ended == "proved" else None)


async def test_time_is_a_budget_and_a_policys_own_timeout_is_not() -> None:
    async def thinks(_: Sequence[SearchNode]) -> list[list[str]]:
        await asyncio.Event().wait()
        return []

    found = await ProofSearch(STATEMENT, thinks).run(TableProver({}), max_s=0.01)
    assert found.ended == "time"
    assert found.progress.elapsed_s > 0

    async def fails(_: Sequence[SearchNode]) -> list[list[str]]:
        raise TimeoutError("the model")

    with pytest.raises(TimeoutError, match="the model"):
        await ProofSearch(STATEMENT, fails).run(TableProver({}), max_s=60)


async def test_a_policy_that_forgets_a_state_is_told() -> None:
    async def forgets(_: Sequence[SearchNode]) -> list[list[str]]:
        return []

    with pytest.raises(UsageError, match="asked about 1 states and answered for 0"):
        await ProofSearch(STATEMENT, forgets).run(TableProver({}))


@pytest.mark.parametrize(
    ("statement", "count"), [("theorem t : p := h", 0), ("def a := sorry\ndef b := sorry", 2)]
)
def test_a_statement_has_one_sorry(statement: str, count: int) -> None:
    with pytest.raises(UsageError, match=f"one sorry, got {count}"):
        ProofSearch(statement, everything)


async def test_what_lean_says_of_a_statement_is_cut_short() -> None:
    class Prover(TableProver):
        async def check(self, code: str, **_: object) -> Reply:
            return Reply("rejected", (Message("error", 1, 0, 600 * "x"),), reason="lean_error")

    with pytest.raises(UsageError, match=r"rejected \(lean_error\): x{500}… \(100 more"):
        await ProofSearch(STATEMENT, everything).run(Prover({}))


@given(
    st.binary()
    | st.builds(
        lambda at, b: _saved()[:at] + b + _saved()[at:],
        st.integers(0, 90),
        st.binary(min_size=1, max_size=3),
    )
)
def test_what_is_no_saved_search_is_refused(data: bytes) -> None:
    try:
        search = ProofSearch.resume(data, everything)
    except (DataError, UsageError):
        return
    assert len(search.statement) < 1000


def test_a_saved_search_without_a_part_is_refused() -> None:
    whole = msgspec.msgpack.decode(_saved())
    for name in whole:
        rest = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(DataError, match=f"missing required field `{name}`"):
            ProofSearch.resume(msgspec.msgpack.encode(rest), everything)


def _saved() -> bytes:
    search = ProofSearch(STATEMENT, everything)
    search.nodes[:] = [SearchNode("0", ("g",)), SearchNode("1", ("h",), "a", 0, 1, -1.0)]
    return search.save()


# Real Lean

HARDER = [
    "theorem and_swap (p q : Prop) (h : And p q) : And q p := sorry",
    "theorem curry (p q r : Prop) (f : And p q → r) : p → q → r := by\n  sorry",
    "theorem inner (p q : Prop) (hp : p) (hq : q) : And p q := And.intro (sorry) hq",
    "theorem compose (p q r : Prop) (f : p → q) (g : q → r) : p → r := by sorry",
]
LEAN_TACTICS = ["assumption", "constructor", "intro h", "intro k", "apply f", "apply g"]
LEAN_TACTICS += ["exact h.left", "exact h.right", "·\n  skip\n  exact h.2"]


async def lean_tactics(nodes: Sequence[SearchNode]) -> list[list[str]]:
    """Every tactic, everywhere."""
    return [LEAN_TACTICS for _ in nodes]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_it_proves_theorems(fleet: Settings, name: str) -> None:
    with LeanQClient(fleet) as lean:
        for statement in HARDER:
            search = ProofSearch(statement, lean_tactics, strategy=STRATEGIES[name]())
            found = asyncio.run(search.run(lean, max_steps=2000))
            assert found.ended == "proved", statement
            assert found.code
            assert lean.check(found.code).result().verdict == "accepted"


@pytest.mark.slow
def test_it_proves_a_theorem_without_a_queue(pool: Pool) -> None:
    found = asyncio.run(ProofSearch(HARDER[0], lean_tactics).run(pool))
    assert found.ended == "proved"
    assert found.code
    assert found.code.startswith("theorem and_swap (p q : Prop) (h : And p q) : And q p := by\n  ")


def test_a_statement_with_an_error_is_told(pool: Pool) -> None:
    with pytest.raises(UsageError, match="it says rejected"):
        asyncio.run(ProofSearch("theorem t : nonsense := sorry", lean_tactics).run(pool))


async def test_a_suggestion_without_a_tactic_ends_no_search(pool: Pool) -> None:
    async def policy(nodes: Sequence[SearchNode]) -> list[list[str]]:
        tactics = ["-- swap", "/- both -/", " ; ", "", "exact And.intro h.right h.left"]
        return [tactics for _ in nodes]

    search = ProofSearch("theorem t (p q : Prop) (h : And p q) : And q p := sorry", policy)
    assert (await search.run(pool, max_s=60)).ended == "proved"
    assert search.progress.unanswered["invalid"] == 4
