"""The text with which Lean tries a tactic: holes, blocks, and what belongs to which."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.errors import InvalidRequestError
from leanq.lean.goals.holes import (
    draft_beside,
    draft_claims,
    draft_probe,
    draft_trial,
    find_holes,
    is_genuine,
    misfit,
    read_tactic,
    reads_blocks,
)
from leanq.lean.goals.recipes import Form, Hole, Recipe, Source, Tactic
from leanq.lean.judge.closing import Marks
from leanq.queue.requests import Message


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("theorem t : a := sorry", ["term"]),
        ("theorem t : a :=\n  sorry", ["term"]),
        ("theorem t : a := by sorry", ["tactic"]),
        ("theorem t : a := by\n  sorry", ["tactic"]),
        ("by\n  intro h\n  sorry", ["tactic"]),
        ("by\n  constructor\n  · sorry\n  · exact sorry", ["tactic", "term"]),
        ("⟨sorry, sorry⟩", ["term", "term"]),
        ("by\n  cases h with\n  | inl h => sorry", ["term"]),
        ("by\n  have h : a := sorry\n  sorry", ["term", "tactic"]),
        ("by exact f x; sorry", ["tactic"]),
        ("by\n  rw [h]\n  sorry", ["tactic"]),
        ("exact f\n    (g\n     sorry)", ["tactic"]),
        ("by\n  try sorry\n  first | sorry | admit", ["tactic", "tactic"]),
        ("by\n  admit\n  cases h with\n  | inl admit => admit", ["tactic", "tactic"]),
        ("theorem t (admit : a) : b := f admit h.admit", []),
        ("-- sorry\n/- sorry -/ x /-- sorry -/", []),
        ('"sorry" \'s\' r#"sorry"#', []),
        ('s!"a {sorry} b"', ["tactic"]),
        ("sorry' sorryAx h.sorry «sorry» sorry.1", ["term"]),
    ],
)
def test_holes_are_found_with_a_first_guess(text: str, forms: list[str]) -> None:
    holes = find_holes(text)
    assert [hole.form for hole in holes] == forms
    assert all(text.startswith(("sorry", "admit"), hole.offset) for hole in holes)


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("by\n  (admit)", ["unknown"]),
        ("by\n  focus admit\n  sorry", ["unknown", "tactic"]),
        ("theorem t (admit : a) : b := f admit h.admit admit' `admit", ["unknown"] * 2),
    ],
)
def test_words_that_may_be_holes(text: str, forms: list[str]) -> None:
    assert [hole.form for hole in find_holes(text, doubtful=True)] == forms


@pytest.mark.parametrize(
    ("given_", "text", "line", "moved"),
    [
        ("exact h", "exact h", 0, (0,)),
        ("\n\n  exact h  \n", "exact h", 2, (2,)),
        ("exact h ; ;\n", "exact h", 0, (0,)),
        ("-- first\n  exact h -- last", "exact h", 1, (2,)),
        ("  constructor\n  · exact a\n      b\n", "constructor\n· exact a\n    b", 0, (2, 2, 2)),
        ("  a\n b", "a\nb", 0, (2, 1)),
        ('  exact "x\n    y"\n  b', 'exact "x\n    y"\nb', 0, (2, 0, 2)),
        ("/- c -/ a\n    b", "a\nb", 0, (8, 4)),
    ],
)
def test_what_differs_in_blanks_is_one_tactic(
    given_: str, text: str, line: int, moved: tuple[int, ...]
) -> None:
    read = read_tactic(given_)
    assert (read.text, read.line, read.moved) == (text, line, moved)
    assert read_tactic(text).text == text


@given(st.text(' ab\n"', max_size=30))
def test_places_lead_back_to_what_was_given(text: str) -> None:
    with contextlib.suppress(InvalidRequestError):
        read = read_tactic(text)
        lines = text.split("\n")
        for number, line in enumerate(read.text.split("\n"), 1):
            for column, sign in enumerate(line):
                row, place = read.place(number, column)
                assert lines[row - 1][place] == sign


@pytest.mark.parametrize("text", ["", "  \n", "-- only a comment", "/- c -/", ";", " ; ;"])
def test_no_tactic(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="no tactic"):
        read_tactic(text)


@pytest.mark.parametrize(
    "tactic",
    [
        "exact h",
        "exact ⟨a, b⟩",
        "simp only [a, b] at h ⊢",
        "{ exact h }",
        "· { intro x\n    exact x }",
        'exact "}"',
        "exact '}'",
        "exact /- } -/ h",
        "exact h -- }",
        'exact s!"{a}{{b}}"',
        "exact «}»",
        "exact h)",  # cannot leave the block, and Lean says what is wrong
    ],
)
def test_what_stays_in_its_hole(tactic: str) -> None:
    assert misfit(tactic) is None


@pytest.mark.parametrize(
    ("tactic", "line", "column"),
    [
        ("exact h }", 1, 8),
        ("exact h\n})\n\naxiom cheat : False\ntheorem x : True := (by {\nexact trivial", 2, 0),
        ('exact s!"{a}" }', 1, 14),
        ("exact '{' }", 1, 10),
        ("{ exact h", 1, 9),
        ("exact /- h", 1, 0),
        ('exact "h', 1, 6),
        ("exact «h", 1, 6),
        ("exact h\n-/ } /-", 2, 3),
    ],
)
def test_what_could_leave_its_hole(tactic: str, line: int, column: int) -> None:
    message = misfit(tactic)
    assert message is not None
    assert (message.severity, message.line, message.column) == ("error", line, column)
    assert "must stay in its hole" in message.text


@pytest.mark.parametrize(
    ("code", "symbol"),
    [
        ('notation "(" x "⟩" => x', "("),
        ('local notation (priority := high) "by" "{" x "}" => f x', "by"),
        ('infixl:65 " ⟨( " => f', "⟨("),
        ('notation /- => -/ " ?_" => x', "?_"),
        ('-- "\nprefix:max "@" => f', "@"),
        ('postfix "\\x7d" => f', "\\x7d"),
        # Lean reads these as one sign where leanq reads a string, a comment or a brace.
        ('notation r#"q""# => x', 'r#"'),
        ('notation "a--" => x', "a--"),
        ('notation "a/-" => x', "a/-"),
        ('notation "a}" => x', "a}"),
        ('infix:50 " ∼\' " => f', "∼'"),
        ('notation:max "|" x "|" => f x\ninfix:50 " ≈_ " => g', None),
        ('infixl:65 " ⊕ " => f -- the "sum"\ninfix:50 " ≈ " => g', None),
        ('def s := "(by {"', None),
    ],
)
def test_notation_that_could_read_a_block(code: str, symbol: str | None) -> None:
    assert reads_blocks(code) == symbol


def axioms(*ends: str) -> str:
    """The declarations of the markers whose names end so, and of what is open."""
    attributes = '@[extern "lean_sorry", never_extract]'
    markers = [
        f"{attributes} axiom _leanq_hole{end}.{{u}} {{α : Sort u}} (a : α) : α\n" for end in ends
    ]
    return "".join(markers) + f"{attributes} axiom _leanq_holeopen.{{u}} {{α : Sort u}} : α\n"


CODE = "theorem t : a := f sorry (by exact sorry)\ntheorem u : b := sorry"
HOLES = tuple(find_holes(CODE))


def test_the_blocks_stand_in_the_holes() -> None:
    draft = draft_probe(CODE, HOLES, {0: "term", 2: "tactic"})
    term, tactic = f"(by {{\n{' ' * 22}}})", "({ })"
    assert draft.text == f"theorem t : a := f {term} (by exact sorry)\ntheorem u : b := {tactic}"
    assert {n: draft.text[s.start : s.end] for n, s in draft.probes.items()} == {
        0: term,
        2: tactic,
    }


@pytest.mark.parametrize("form", ["term", "tactic"])
def test_what_stands_behind_a_hole_stays_in_its_column(form: Form) -> None:
    """Lines below may have to begin where it does."""
    code = "x := f sorry (by a\n              b)"
    recipe = Recipe(Source("f", code, (Hole(7, form),)), 0)
    draft, (claim,) = draft_claims(recipe, Tactic("h"), -1)
    probe, trial = draft_probe(code, recipe.source.holes, {0: form}), Tactic("h")
    for text in (probe.text, draft_trial(recipe, trial).text, draft.text, claim.opened):
        line, last = text.split("\n")[-2:]
        assert (line.index(" (by a") + 1, last) == (code.index("(by a"), " " * 14 + "b)")


def test_tactics_stand_at_the_margin_in_the_order_in_which_they_worked() -> None:
    recipe = Recipe(Source("f", CODE, HOLES), 1, (Tactic("constructor"), Tactic("exact a\n  b")))
    draft = draft_trial(recipe, Tactic("exact c"))
    assert draft.text == (
        "theorem t : a := f sorry (by exact (by {\nconstructor\n;\nexact a\n  b\n;\nexact c\n"
        f"{' ' * 38}}}))\n"
        "theorem u : b := sorry"
    )
    assert draft.text[draft.trial.start : draft.trial.end] == "exact c"
    assert draft.text[draft.blocks[-1].start : draft.blocks[-1].end].startswith(
        "(by {\nconstructor"
    )


def test_a_hole_of_a_tactic_is_a_hole_in_a_hole() -> None:
    inner = Tactic("exact f sorry sorry", tuple(find_holes("exact f sorry sorry")), 1)
    recipe = Recipe(Source("f", "x := sorry", find_holes("x := sorry")), 0, (inner,))
    draft, claims = draft_claims(recipe, Tactic("exact h"), -1)
    sibling = f"(by {{refine @_leanq_hole0_0 _ ?_; ({{exact @_leanq_holeopen _\n{' ' * 9}}})}})"
    head = (
        f"{axioms('_0', '0_0', '0_1', 'rest0', 'rest1')}"
        f"x := (by {{refine @_leanq_hole_0 _ ?_; ({{\nexact f {sibling} "
    )
    inner = "(by {refine @_leanq_hole0_1 _ ?_; ({"
    rest = "all_goals exact @_leanq_holerest0 _ (@_leanq_holeopen _)"
    column, end = len("exact f sorry "), f"{' ' * 6}}})}})"
    assert draft.text == (f"{head}{inner}\nexact h\n{' ' * (column + 1)}}})}})\n;\n{rest}\n{end}")
    inside, outside = claims
    assert inside.marks == Marks(
        "_leanq_hole0_1",
        True,
        ["_leanq_hole_0", "_leanq_hole0_1"],
        [],
        ["_leanq_holerest0", "_leanq_holerest1", "_leanq_hole0_0"],
        ["_leanq_hole0_0", "_leanq_holerest0"],
        "_leanq_holeopen",
    )
    assert f"{inner}exact @_leanq_holeopen _" in inside.opened
    assert outside.marks is not None
    assert (outside.marks.hole, outside.marks.compared) == ("_leanq_hole_0", [])
    # It may use what its own tactics leave open.
    assert outside.marks.open_ == ["_leanq_hole0_0"]
    assert outside.opened == (
        f"{axioms('_0', 'rest0')}x := (by {{refine @_leanq_hole_0 _ ?_; ({{"
        f"exact @_leanq_holeopen _\n{end}"
    )


def test_what_stands_beside_a_value_sees_it_without_a_marker() -> None:
    code = "def f : a := sorry\ntheorem t : b := sorry"
    recipe = Recipe(Source("f", code, find_holes(code)), 0)
    _, claims = draft_claims(recipe, Tactic("exact h"), -1)
    draft, claim = draft_beside(recipe, Tactic("exact h"), claims[-1])
    head = axioms("_0", "_1", "rest0")
    assert draft.text.startswith(f"{head}def f : a := (by {{\nexact h\n")
    assert (
        "theorem t : b := (by {refine @_leanq_hole_1 _ ?_; ({exact @_leanq_holeopen _" in draft.text
    )
    assert claim.opened == claims[-1].opened
    assert claim.marks is not None
    assert (claim.marks.hole, claim.marks.is_seen, claim.marks.compared) == (
        "_leanq_hole_0",
        True,
        ["_leanq_hole_1"],
    )


def test_a_hole_with_goals_left_around_it_changes_none_of_them() -> None:
    text = "refine ⟨?_, sorry⟩"
    inner = Tactic(text, tuple(find_holes(text)), 0)
    recipe = Recipe(Source("f", "x := sorry", find_holes("x := sorry")), 0, (inner,))
    _, claims = draft_claims(recipe, Tactic("exact h"), 0)
    assert [(claim.marks.hole, claim.marks.compared) for claim in claims if claim.marks] == [
        ("_leanq_hole0_0", ["_leanq_holerest0"]),
        ("", []),
    ]


@pytest.mark.slow
@given(st.lists(st.sampled_from(["a", "b\nc", "· d"]), max_size=4), st.integers(0, 2))
def test_a_message_belongs_to_the_tactic_exactly_where_it_is_in_it(
    before: list[str], opened: int
) -> None:
    recipe = Recipe(Source("f", CODE, HOLES), opened, tuple(map(Tactic, before)))
    trial = Tactic("first\n second")
    draft = draft_trial(recipe, trial)
    lines = draft.text.split("\n")
    for number, line in enumerate(lines, 1):
        for column in range(len(line) + 1):
            message = Message("error", number, column, "unsolved goals\n⊢ a")
            inside = line in ("first", " second")
            assert draft.is_trial(message) == inside
            if inside:
                told = draft.of_trial(message)
                assert trial.text.split("\n")[told.line - 1] == line
            assert not (inside and draft.is_left(message))
    end = draft.text[: draft.blocks[-1].end].count("\n")
    assert draft.is_left(Message("error", end + 1, 0, "unsolved goals\n⊢ a"))
    assert not draft.is_left(Message("error", 1, 0, "unsolved goals\n⊢ a"))


def test_goals_of_one_block_come_together() -> None:
    draft = draft_probe(CODE, HOLES, {0: "term"})
    places = [(1, 18), (1, 19), (1, 23), (2, 22), (2, 24), (3, 0)]
    messages = [Message("error", *each, f"unsolved goals\n⊢ {each}") for each in places]
    assert draft.goals(messages) == {0: "⊢ (1, 19)\n\n⊢ (1, 23)\n\n⊢ (2, 22)"}


def test_markers_come_after_the_imports() -> None:
    code = "import A\nimport B\n\ntheorem t : a := by sorry"
    recipe = Recipe(Source("f", code, find_holes(code)), 0, (Tactic("constructor"),))
    head = f"import A\nimport B\n{axioms('_0', 'rest0')}\n\ntheorem t : a := by "
    draft, (claim,) = draft_claims(recipe, Tactic("h"), -1)
    block, end = "({refine @_leanq_hole_0 _ ?_; ({", f"\n{' ' * 21}}})}})"
    assert draft.text == f"{head}{block}\nconstructor\n;\nh{end}"
    assert claim.opened == f"{head}{block}exact @_leanq_holeopen _{end}"


def test_a_module_shows_markers_under_names_that_it_does_not_use() -> None:
    code = "module\ntheorem _leanq_hole : a := sorry"
    draft, _ = draft_claims(Recipe(Source("f", code, find_holes(code)), 0), Tactic("h"), -1)
    assert "never_extract] public axiom _leanq_hole__0.{u}" in draft.text


@pytest.mark.parametrize(
    ("tactic", "genuine"),
    [
        (Tactic("exact h"), True),
        (Tactic("exact sorry", (Hole(6, "term"),), 0), True),
        (Tactic("exact sorry\n})\ntheorem u : True := (by {\nskip", (Hole(6, "term"),)), False),
        (Tactic("  exact h"), False),
        (Tactic("exact sorryAx", (Hole(6, "term"),)), False),
        (Tactic("exact sorry"), False),
        (Tactic("focus admit", (Hole(6, "tactic"),), 0), True),
        (Tactic("exact admit"), True),
        (Tactic("exact admit sorry", (Hole(6, "tactic"),), 0), False),
    ],
)
def test_recipes_to_which_no_steps_lead(tactic: Tactic, genuine: bool) -> None:
    assert is_genuine(Recipe(Source("f", CODE, HOLES), 0, (tactic,))) == genuine
