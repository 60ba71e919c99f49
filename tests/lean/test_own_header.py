"""Texts without a header, in an environment that has one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.lean.sites import Site, check

from leanq.lean.environment import Environment, open_environment
from leanq.queue.wire import Request

HEADER = "prelude\nimport Core\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "theorem t (p : Prop) (h : p) : p := h",
        "\n\n-- a comment\ntheorem t (p : Prop) (h : p) : p := h\n",
        "/-! What this is about. -/\nexample (p : Prop) (h : p) : p := h",
    ],
)
async def test_a_text_without_a_header_is_checked_behind_the_environments(
    either: Site, code: str
) -> None:
    reply = await either.check(code)
    assert (reply.verdict, reply.messages) == ("accepted", ())


@pytest.mark.slow
async def test_places_are_those_of_the_text_as_it_was_given(either: Site) -> None:
    driver = await either.one()
    errors = (await driver.run(check("theorem t (p q : Prop) (h : p) : q :=\n  h"))).messages
    assert [(m.line, m.column, m.end_line, m.end_column) for m in errors] == [(2, 2, 2, 3)]
    errors = (await driver.run(check("theorem t (p q : Prop) (h : p) : q := h"))).messages
    assert [(m.line, m.column, m.end_line, m.end_column) for m in errors] == [(1, 38, 1, 39)]
    reply = await driver.run(check("theorem t (p q : Prop) (h : p) (k : q) :\n  And p q := sorry"))
    assert [(m.line, m.column) for m in reply.messages] == [(1, 8)]
    assert [(s.line, s.column, s.goal) for s in reply.sorries] == [
        (2, 13, "p q : Prop\nh : p\nk : q\n⊢ p ∧ q")
    ]


@pytest.mark.slow
async def test_what_leanq_says_of_the_whole_text_stands_at_its_beginning(either: Site) -> None:
    reply = await either.check("axiom a (p : Prop) : p\ntheorem t (p : Prop) : p := a p")
    assert reply.verdict == "rejected"
    assert [(m.line, m.column) for m in reply.messages] == [(1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "theorem t (n : Nat) : n < n + 1 := by omega",
        "theorem t (n : Nat) : n - 1 ≤ n := Nat.sub_le n 1",
        "open Finset\ntheorem t (n : Nat) : n = n := rfl",
        "#eval 1 + 1",
    ],
)
async def test_what_the_small_core_lacks_is_explained(either: Site, code: str) -> None:
    driver = await either.one()
    reply = await driver.run(check(code))
    assert reply.verdict == "rejected"
    assert reply.messages[-1].severity == "information"
    assert "leanq up --env NAME=FOLDER" in reply.messages[-1].text
    # A byte order mark, or a text that is no Lean, lacks nothing of a library.
    for other in ("\ufeffprelude\nimport Core\n", "Dear reader, this is no Lean.\n"):
        said = (await driver.run(check(other))).messages
        assert not any("leanq up --env NAME=FOLDER" in message.text for message in said)
    # Who writes a header knows what is behind it.
    reply = await driver.run(check(HEADER + code))
    assert all(message.severity == "error" for message in reply.messages)


@pytest.mark.parametrize("explicit", ["prelude", "import Core", "module", "prelude import Core"])
async def test_an_explicit_header_is_taken_as_it_is(core: Environment, explicit: str) -> None:
    assert core.header_for(f"-- first\n{explicit}\ntheorem t : Nat := 1") == ""
    assert core.header_for(f"def x := 1\n{explicit}") == core.header == HEADER


@pytest.mark.slow
async def test_a_state_is_that_of_the_same_text_with_the_header_written_out(either: Site) -> None:
    driver = await either.one()
    code = "theorem t (p q : Prop) (h : p) (k : q) : And p q := sorry\n"
    (sorry,) = (await driver.run(check(code))).sorries
    (again,) = (await driver.run(check(code))).sorries
    (explicit,) = (await driver.run(check(HEADER + code))).sorries
    assert sorry == again == replace(explicit, line=1, end_line=1)


@pytest.mark.slow
async def test_steps_lead_on_from_there_to_an_end(either: Site) -> None:
    driver = await either.one()
    code = "theorem t (p q : Prop) (h : p) (k : q) : And p q := sorry"
    (sorry,) = (await driver.run(check(code))).sorries
    state = sorry.state
    assert state is not None
    failed = await driver.run(Request("step", state=state, tactic="exact h"))
    assert failed.verdict == "rejected"
    assert [(m.line, m.column) for m in failed.messages] == [(1, 0)]
    reply = await driver.run(Request("step", state=state, tactic="constructor"))
    assert (reply.verdict, len(reply.goals)) == ("incomplete", 2)
    assert reply.state is not None
    reply = await driver.run(Request("step", state=reply.state, tactic="exact h\nexact k"))
    assert (reply.verdict, reply.axioms) == ("accepted", ())


@pytest.mark.slow
async def test_the_tactic_sorry_is_a_hole_like_the_term(either: Site) -> None:
    driver = await either.one()
    (sorry,) = (await driver.run(check("theorem t (p : Prop) (h : p) : p := by\n  sorry"))).sorries
    assert (sorry.line, sorry.column, sorry.goal) == (2, 2, "p : Prop\nh : p\n⊢ p")
    assert sorry.state is not None
    reply = await driver.run(Request("step", state=sorry.state, tactic="exact h"))
    assert (reply.verdict, reply.axioms) == ("accepted", ())


@pytest.mark.slow
async def test_a_state_can_be_exported_and_stepped_on_elsewhere(either: Site) -> None:
    driver, other = await either.one(), await either.one()
    (sorry,) = (await driver.run(check("theorem t (p : Prop) (h : p) : p := sorry"))).sorries
    assert sorry.state is not None
    exported = await driver.run(Request("export", state=sorry.state))
    assert exported.payload is not None
    imported = await other.run(Request("import", payload=exported.payload))
    assert imported.state == sorry.state
    reply = await other.run(Request("step", state=sorry.state, tactic="exact h"))
    assert reply.verdict == "accepted"


def test_an_environment_with_an_init_needs_no_header(
    core: Environment, cache: Path, tmp_path: Path
) -> None:
    library = core.find_olean("Core")
    assert library is not None
    (tmp_path / "Other.olean").write_bytes(library.read_bytes())
    assert open_environment("mine", tmp_path, cache=cache, environ={}).header == HEADER
    (tmp_path / "Init.olean").write_bytes(library.read_bytes())
    with_init = open_environment("mine", tmp_path, cache=cache, environ={})
    assert with_init.header == ""
