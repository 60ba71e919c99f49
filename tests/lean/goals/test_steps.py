"""Goals, states and steps: real Lean, through the driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from support.lean.sites import Site, sample

from leanq.lean.driver import LeanDriver
from leanq.lean.goals.holes import find_holes
from leanq.lean.goals.recipes import (
    MAX_LEVELS,
    Hole,
    Recipe,
    Source,
    Tactic,
    pack_export,
    text_hash,
)
from leanq.lean.judge.examples import example_names
from leanq.lean.run.fork_server import ForkRules
from leanq.queue.requests import Reply, Request, Sorry

HEAD = "prelude\nimport Core\n"
CONTEXT = "p q : Prop\nhp : p\nhq : q\n⊢ "
THEOREM = f"{HEAD}theorem t (p q : Prop) (hp : p) (hq : q) : And p (And q p) :=\n  sorry\n"


class Lean:
    """Asks one driver."""

    def __init__(self, driver: LeanDriver) -> None:
        self.driver = driver

    async def check(self, code: str) -> Reply:
        return await self.driver.run(Request("check", code=code))

    async def open(self, code: str) -> Sorry:
        """The only hole of a text."""
        reply = await self.check(code)
        assert reply.verdict == "incomplete"
        (sorry,) = reply.sorries
        return sorry

    async def step(self, state: str | None, tactic: str, **options: Any) -> Reply:
        assert state is not None
        return await self.driver.run(Request("step", state=state, tactic=tactic, **options))

    async def walk(self, state: str | None, *tactics: str) -> Reply:
        """Several steps, all but the last of which leave something to prove."""
        *before, last = tactics
        for tactic in before:
            reply = await self.step(state, tactic)
            assert reply.verdict == "incomplete", reply
            state = reply.state
        return await self.step(state, last)


@pytest.fixture
async def lean(either: Site) -> Lean:
    return Lean(await either.one())


@pytest.mark.parametrize("kind", ["lean", "server"])
async def test_a_step_that_is_trusted_is_unjudged(site: Site, kind: str) -> None:
    forks = None if kind == "server" else ForkRules()
    lean = Lean(await site.driver(trust_steps=True, forks=forks))
    sorry = await lean.open(THEOREM)
    closed = await lean.step(sorry.state, "exact And.intro hp (And.intro hq hp)")
    assert (closed.verdict, closed.reason) == ("unjudged", "trusted_step")
    assert (await lean.step(sorry.state, "constructor")).verdict == "incomplete"


# Goals


@pytest.mark.slow
async def test_every_sorry_has_its_place_its_goal_and_its_state(lean: Lean) -> None:
    reply = await lean.check(f"""{HEAD}theorem t (p q : Prop) (hp : p) (hq : q) :
    And p (And q p) := by
  constructor
  exact sorry
  exact And.intro sorry (by exact sorry)
theorem u (a : Prop) (h : a) : And a a :=
  And.intro
    sorry -- not this sorry
    h
theorem v (p q : Prop) (hp : p) (hq : q) : p :=
  have h : And q p := sorry
  have k : q → p := fun (_ : q) =>
    sorry
  k h.left
""")
    assert reply.verdict == "incomplete"
    assert [(s.line, s.column, s.goal) for s in reply.sorries] == [
        (6, 8, f"{CONTEXT}p"),
        (7, 18, f"{CONTEXT}q"),
        (7, 34, f"{CONTEXT}p"),
        (10, 4, "a : Prop\nh : a\n⊢ a"),
        (13, 22, f"{CONTEXT}q ∧ p"),
        (15, 4, "p q : Prop\nhp : p\nhq : q\nh : q ∧ p\nx✝ : q\n⊢ p"),
    ]
    assert len({sorry.state for sorry in reply.sorries}) == 6
    closing = ["exact hp", "exact hq", "exact hp", "exact h", "exact And.intro hq hp", "exact hp"]
    for sorry, tactic in zip(reply.sorries, closing, strict=True):
        step = await lean.step(sorry.state, tactic)
        assert (step.verdict, step.state, step.goals) == ("accepted", None, ())
        # The others are still open, and a step on one of them says so.
        assert step.axioms == ("sorryAx",)


@pytest.mark.slow
async def test_only_incomplete_texts_have_states(lean: Lean) -> None:
    assert (await lean.check(sample("and_swap"))).sorries == ()
    broken = await lean.check(THEOREM + "theorem u : False := nothing\n")
    assert (broken.verdict, broken.sorries) == ("rejected", ())
    # There is no place to put a tactic.
    hidden = await lean.check(f"{HEAD}theorem t (p : Prop) : p := sorryAx p false\n")
    assert (hidden.verdict, hidden.sorries) == ("incomplete", ())
    # It hides its warning, and not its place.
    assert (await lean.open(sample("silent_sorry"))).goal == "p : Prop\n⊢ p"


@pytest.mark.slow
async def test_a_sorry_whose_place_looks_like_another_kind(lean: Lean) -> None:
    """An argument on a line of its own, where a tactic could begin."""
    sorry = await lean.open(f"""{HEAD}theorem t (p q : Prop) (hp : p) (hq : q) : And p q := by
  exact And.intro hp
    sorry
""")
    assert sorry.goal == f"{CONTEXT}q"
    assert (await lean.step(sorry.state, "exact hq")).verdict == "accepted"


@pytest.mark.slow
async def test_a_sorry_whose_errors_the_text_catches(lean: Lean) -> None:
    reply = await lean.check(f"""{HEAD}theorem t (p q : Prop) (hp : p) (hq : q) :
    And p (And p q) := by
  constructor
  try sorry
  first | sorry | exact And.intro hp hq
theorem u (p : Prop) (h : p) : And p p := by
  constructor
  repeat sorry
""")
    caught, first, repeated = reply.sorries
    assert (caught.goal, first.goal) == (f"{CONTEXT}p", f"{CONTEXT}p ∧ q")
    assert repeated.goal == "\n\n".join(["p : Prop\nh : p\n⊢ p"] * 2)
    wrong = await lean.step(caught.state, "exact hq")
    assert (wrong.verdict, wrong.reason, wrong.messages[0].line) == ("rejected", "lean_error", 1)
    left = await lean.step(first.state, "constructor")
    assert (left.verdict, left.goals) == (
        "incomplete",
        (f"case left\n{CONTEXT}p", f"case right\n{CONTEXT}q"),
    )
    assert (
        await lean.walk(first.state, "constructor", "exact hp", "exact hq")
    ).verdict == "accepted"
    assert (await lean.step(caught.state, "exact hp")).verdict == "accepted"
    assert (await lean.step(repeated.state, "exact h")).verdict == "accepted"


@pytest.mark.slow
async def test_a_word_in_a_comment_says_nothing_of_a_sorry(lean: Lean) -> None:
    for before in ("exact -- shown by", "id -- follows by", "id /- exact -/"):
        block = ":= by\n  " if before.startswith("exact") else ":=\n  "
        sorry = await lean.open(f"""{HEAD}theorem t (p : Prop) (h : p) : p {block}{before}
    sorry
""")
        assert (await lean.step(sorry.state, "exact h")).verdict == "accepted", before


@pytest.mark.slow
async def test_arguments_do_not_go_on_in_the_next_line(lean: Lean) -> None:
    state = (await lean.open(THEOREM)).state
    for tactic in (
        "apply And.intro\nexact hp\nexact And.intro hq hp",
        "refine And.intro ?_ ?_\nexact hp\nexact And.intro hq hp",
        "exact And.intro\n  hp\n  (And.intro hq hp)",
    ):
        assert (await lean.step(state, tactic)).verdict == "accepted", tactic


@pytest.mark.slow
async def test_a_sorry_that_lean_shows_no_goal_of(lean: Lean) -> None:
    reply = await lean.check(f"""{HEAD}theorem t (p : Prop) (h : p) : p :=
  (fun (_ : Prop) => h) (@id _ sorry)
theorem u (p : Prop) (h : p) : p := sorry
""")
    assert reply.verdict == "incomplete"
    assert [sorry.line for sorry in reply.sorries] == [4, 5]
    assert (await lean.step(reply.sorries[1].state, "exact h")).verdict == "accepted"


@pytest.mark.slow
async def test_more_sorries_than_lean_reports_errors(lean: Lean) -> None:
    lines = "".join(f"theorem t{n} (p : Prop) (h : p) : p := sorry\n" for n in range(150))
    reply = await lean.check(HEAD + lines)
    assert [sorry.goal for sorry in reply.sorries] == ["p : Prop\nh : p\n⊢ p"] * 150


# Steps


@pytest.mark.slow
async def test_a_proof_step_by_step(lean: Lean) -> None:
    start = await lean.open(THEOREM)
    assert start.goal == f"{CONTEXT}p ∧ q ∧ p"
    first = await lean.step(start.state, "constructor")
    assert first.verdict == "incomplete"
    assert first.goals == (f"case left\n{CONTEXT}p", f"case right\n{CONTEXT}q ∧ p")
    second = await lean.step(first.state, "exact hp")
    assert (second.verdict, second.goals) == ("incomplete", (f"case right\n{CONTEXT}q ∧ p",))
    third = await lean.step(second.state, "constructor\nexact hq")
    assert (third.verdict, third.goals) == ("incomplete", (f"case right.right\n{CONTEXT}p",))
    last = await lean.step(third.state, "exact hp")
    assert (last.verdict, last.state, last.goals, last.axioms) == ("accepted", None, (), ())
    assert last.audit_s > 0
    assert len({start.state, first.state, second.state, third.state}) == 4
    # A state is no process: it can be left, and come back to.
    assert (await lean.walk(first.state, "exact hp", "exact And.intro hq hp")).verdict == "accepted"


@pytest.mark.slow
async def test_blanks_make_no_other_state(lean: Lean) -> None:
    state = (await lean.open(THEOREM)).state
    plain = await lean.step(state, "constructor\nexact hp")
    indented = await lean.step(state, "\n    constructor\n    exact hp  -- so far\n")
    assert plain.state == indented.state != state


@pytest.mark.slow
async def test_a_tactic_of_several_lines(lean: Lean) -> None:
    state = (await lean.open(THEOREM)).state
    tactic = """
  constructor
  { exact hp }
  exact And.intro
    hq
    hp
"""
    assert (await lean.step(state, tactic)).verdict == "accepted"


@pytest.mark.slow
async def test_a_rejected_step_says_where_in_the_tactic(lean: Lean) -> None:
    state = (await lean.open(THEOREM)).state
    reply = await lean.step(state, "\n  constructor\n  exact hq")
    assert (reply.verdict, reply.state, reply.goals) == ("rejected", None, ())
    (message,) = reply.messages
    assert message.severity == "error"
    assert (message.line, message.column) == (3, 2)
    assert message.text.startswith("Type mismatch\n  hq\nhas type\n  q")
    unknown = (await lean.step(state, "frobnicate")).messages[0]
    assert (unknown.line, unknown.text) == (1, "unknown tactic")


@pytest.mark.slow
@pytest.mark.parametrize(
    "tactic",
    [
        "exact hp\n\naxiom cheat : False",
        "exact (And.intro hp",
        "exact",
        ")",
        "constructor ; ; exact hp",
        "exact And.intro hp (And.intro hq hp)\ntheorem x : True := True.intro",
        "end",
        "#exit",
        "exact hp)\n})\n\naxiom cheat : False\n\ntheorem x : True := (by {\n(exact True.intro",
    ],
)
async def test_what_does_not_parse_as_tactics_is_rejected(lean: Lean, tactic: str) -> None:
    state = (await lean.open(THEOREM)).state
    reply = await lean.step(state, tactic)
    assert (reply.verdict, reply.state) == ("rejected", None)
    assert "error" in {message.severity for message in reply.messages}


@pytest.mark.slow
async def test_a_tactic_with_holes_of_its_own(lean: Lean) -> None:
    state = (await lean.open(THEOREM)).state
    reply = await lean.step(state, "  exact And.intro sorry\n    (And.intro hq sorry)")
    assert reply.verdict == "incomplete"
    assert [(s.line, s.column, s.goal) for s in reply.sorries] == [
        (1, 18, f"{CONTEXT}p"),
        (2, 18, f"{CONTEXT}p"),
    ]
    # Nothing else is left, so the search goes on in the first of them.
    assert (reply.state, reply.goals) == (reply.sorries[0].state, (f"{CONTEXT}p",))
    for sorry in reply.sorries:
        assert (await lean.step(sorry.state, "exact hp")).verdict == "accepted"
        assert (await lean.step(sorry.state, "exact hq")).verdict == "rejected"
    deeper = await lean.step(reply.state, "exact (by exact sorry)")
    assert deeper.goals == (f"{CONTEXT}p",)
    assert (await lean.step(deeper.state, "exact hp")).verdict == "accepted"


@pytest.mark.slow
async def test_a_tactic_that_settles_a_goal_around_its_hole_beside_another(lean: Lean) -> None:
    code = f"""{HEAD}inductive Any (a : Type) (p : a → Prop) : Prop where
  | of (w : a) (h : p w) : Any a p
theorem t : Any Nat (fun n => n = 5) := sorry
theorem u : 1 = 1 := sorry
"""
    opened = await lean.step((await lean.check(code)).sorries[0].state, "refine Any.of ?w sorry")
    assert opened.goals == ("case w\n⊢ Nat",)
    reply = await lean.step(opened.sorries[0].state, "exact rfl")
    assert (reply.verdict, reply.reason) == ("rejected", "hole_open")


@pytest.mark.slow
async def test_a_tactic_that_closes_several_goals_beside_another_hole(lean: Lean) -> None:
    reply = await lean.check(f"""{HEAD}theorem t (p q : Prop) (hp : p) (hq : q) :
    And (And p q) q := And.intro sorry sorry
""")
    reply = await lean.walk(reply.sorries[0].state, "constructor", "exact hp\nexact hq")
    assert (reply.verdict, reply.axioms) == ("accepted", ("sorryAx",))


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["", "theorem v : 1 = 1 := sorry\n"])
async def test_a_tactic_that_uses_what_its_declaration_does_not_take(lean: Lean, rest: str) -> None:
    code = f"{HEAD}theorem t (p : Prop) (h : p) : p := go\nwhere go : p := sorry\n{rest}"
    reply = await lean.step((await lean.check(code)).sorries[0].state, "exact h")
    assert (reply.verdict, reply.reason) == ("rejected", "statement_differs")
    assert "make it an argument of the declaration in the source" in reply.messages[0].text


@pytest.mark.slow
async def test_a_tactic_with_a_hole_and_a_goal_left(lean: Lean) -> None:
    state = (await lean.open(THEOREM)).state
    reply = await lean.step(state, "constructor\nexact sorry")
    assert (reply.verdict, reply.goals) == ("incomplete", (f"case right\n{CONTEXT}q ∧ p",))
    assert [sorry.goal for sorry in reply.sorries] == [f"{CONTEXT}p"]
    assert reply.sorries[0].state != reply.state
    # Whichever comes first, the other stays open.
    hole = await lean.step(reply.sorries[0].state, "exact hp")
    assert (hole.verdict, hole.axioms) == ("accepted", ("sorryAx",))
    assert (await lean.step(reply.sorries[0].state, "exact hq")).verdict == "rejected"
    rest = await lean.step(reply.state, "exact And.intro hq hp")
    assert (rest.verdict, rest.axioms) == ("accepted", ("sorryAx",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tactic", ["exact sorryAx _ false", "set_option warn.sorry false in exact sorryAx _ false"]
)
async def test_a_hidden_sorry_closes_nothing(lean: Lean, tactic: str) -> None:
    state = (await lean.open(THEOREM)).state
    reply = await lean.step(state, tactic)
    assert (reply.verdict, reply.state, reply.goals) == ("incomplete", None, ())
    assert [message.text for message in reply.messages] == [
        "leanq: the proof, or what stands before it, rests on sorryAx"
    ]
    # Nor where other holes are open, from which it must be told.
    two = f"{HEAD}theorem t (p q : Prop) : And p q := And.intro sorry sorry\n"
    for sorry in (await lean.check(two)).sorries:
        assert (await lean.step(sorry.state, tactic)).verdict == "incomplete"


@pytest.mark.slow
async def test_an_axiom_of_the_source_closes_nothing_unless_it_is_allowed(lean: Lean) -> None:
    code = f"{HEAD}axiom cheat (p : Prop) : p\ntheorem t (p : Prop) : p := sorry\n"
    state = (await lean.open(code)).state
    reply = await lean.step(state, "exact cheat p")
    assert reply.verdict == "rejected"
    assert reply.messages[0].text.endswith("axioms not allowed: cheat")
    allowed = await lean.step(state, "exact cheat p", allow_axioms=("cheat",))
    assert (allowed.verdict, allowed.axioms) == ("accepted", ("cheat",))
    assert (await lean.step(state, "exact cheat p", audit=False)).verdict == "unjudged"


@pytest.mark.slow
async def test_no_tactic_proves_by_the_name_of_an_example(lean: Lean) -> None:
    """An example has no name, and gets one while a step is judged."""
    code = f"{HEAD}example : 1 = 1 := rfl\ntheorem t : 1 = 1 := sorry\n"
    hole = await lean.open(code)
    salt, names = code, []
    for _ in range(3):
        salt = text_hash(salt).hex()
        names += example_names(code, salt)
    by_name = " | ".join(f"exact {name}" for name in names)
    reply = await lean.step(hole.state, f"first | {by_name} | exact sorryAx _ true")
    assert (reply.verdict, reply.reason) == ("incomplete", "sorry")
    assert (await lean.step(hole.state, f"first | {by_name} | rfl")).verdict == "accepted"


@pytest.mark.slow
async def test_holes_in_definitions_and_examples(lean: Lean) -> None:
    code = f"""{HEAD}def f (p : Prop) (h : p) : p := sorry
example (p : Prop) (h : p) : And p p := And.intro h sorry
"""
    reply = await lean.check(code)
    assert [sorry.goal for sorry in reply.sorries] == ["p : Prop\nh : p\n⊢ p"] * 2
    for sorry in reply.sorries:
        assert (await lean.step(sorry.state, "exact h")).verdict == "accepted"


@pytest.mark.slow
async def test_a_step_has_budgets(lean: Lean) -> None:
    bounded = sample("heartbeats").replace("exact rfl", "exact sorry")
    state = (await lean.open(bounded)).state
    assert (await lean.step(state, "exact rfl")).verdict == "exhausted"
    assert (await lean.step(state, "exact nothing")).verdict == "rejected"
    endless = bounded.replace("maxHeartbeats 2000", "maxHeartbeats 0")
    state = (await lean.open(endless)).state
    assert (await lean.step(state, "exact rfl", timeout_s=0.3)).verdict == "timeout"
    assert (await lean.step(state, "exact nothing")).verdict == "rejected"


# States


@pytest.mark.slow
async def test_ids_are_equal_across_drivers(site: Site) -> None:
    one, other = [Lean(await site.driver()) for _ in range(2)]
    states = [(await lean.open(THEOREM)).state for lean in (one, other)]
    assert states[0] == states[1]
    steps = [await lean.step(states[0], "constructor") for lean in (one, other)]
    assert steps[0].state == steps[1].state
    different = await one.open(THEOREM.replace("theorem t", "theorem s"))
    assert different.state != states[0]


@pytest.mark.slow
async def test_an_unknown_state(lean: Lean) -> None:
    reply = await lean.step("0" * 64, "exact h")
    assert reply.verdict is None
    assert reply.error is not None
    assert "not known here" in reply.error


@pytest.mark.slow
async def test_export_and_import(site: Site) -> None:
    here, there = [Lean(await site.driver()) for _ in range(2)]
    start = await here.open(THEOREM)
    state = (await here.step(start.state, "constructor")).state
    assert state is not None
    exported = await here.driver.run(Request("export", state=state))
    assert exported.payload is not None
    assert (await there.step(state, "exact hp")).error is not None
    imported = await there.driver.run(Request("import", payload=exported.payload))
    assert imported.state == state
    assert (await there.walk(state, "exact hp", "exact And.intro hq hp")).verdict == "accepted"
    # Its ancestors came with it.
    assert (await there.step(start.state, "constructor")).state == state


@pytest.mark.slow
async def test_places_in_a_tactic_are_those_that_were_given(lean: Lean) -> None:
    state = (await lean.open(THEOREM)).state
    for tactic, line, column in (
        ("/- abcdefg -/ constructor\nexact bad", 2, 6),
        ("    constructor\n  exact bad", 2, 8),
        ("\n  constructor\n    ; exact bad", 3, 12),
    ):
        (message,) = (await lean.step(state, tactic)).messages
        assert (message.line, message.column) == (line, column), tactic
    cut = (await lean.step(state, "constructor\nexact hp\nexact")).messages
    assert all(message.end_line is None or message.end_line <= 3 for message in cut)


@pytest.mark.slow
async def test_holes_in_holes_come_to_an_end(lean: Lean) -> None:
    source = Source(
        lean.driver.opened.lean.environment.fingerprint,
        f"{HEAD}theorem t (p : Prop) (h : p) : p := sorry\n",
        find_holes(f"{HEAD}theorem t (p : Prop) (h : p) : p := sorry\n"),
    )
    inner = Tactic("exact id sorry", (Hole(9, "term"),), 0)
    deep = Recipe(source, 0, (inner,) * MAX_LEVELS)
    reply = await lean.driver.run(Request("import", payload=pack_export(deep)))
    assert reply.state == deep.id
    last = await lean.step(deep.id, "exact id sorry")
    assert (last.verdict, last.state) == ("incomplete", None)
    assert (await lean.step(deep.id, "exact h")).verdict == "accepted"
    deeper = structs.replace(deep, tactics=(inner,) * (MAX_LEVELS + 1))
    refused = await lean.driver.run(Request("import", payload=pack_export(deeper)))
    assert refused.error is not None


@pytest.mark.slow
async def test_what_cannot_be_imported(site: Site) -> None:
    lean = Lean(await site.driver())
    state = (await lean.open(THEOREM)).state
    assert state is not None
    payload = (await lean.driver.run(Request("export", state=state))).payload
    assert payload is not None
    damaged = await lean.driver.run(Request("import", payload=payload[:-1] + b"x"))
    assert damaged.error == "the exported state is damaged: its checksum is wrong"
    elsewhere = replace(site.core, fingerprint="0" * 64)
    other = Lean(await site.driver(elsewhere))
    error = (await other.driver.run(Request("import", payload=payload))).error
    assert error is not None
    assert "of an environment with the fingerprint" in error
