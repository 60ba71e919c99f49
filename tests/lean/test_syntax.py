"""The little lexer, held against what Lean itself makes of the same text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lean.images import Lean

from leanq.lean.environment import Environment
from leanq.lean.judge.examples import name_examples
from leanq.lean.run.olean import read_module
from leanq.lean.text import Header, can_act, header_statements, split_header

NAMED = re.compile("def [𝕬-𝖟]{3}")


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


# The header


@pytest.mark.parametrize(
    ("code", "text", "imports", "is_module", "is_prelude"),
    [
        ("", "", (), False, False),
        ("theorem t : True := trivial", "", (), False, False),
        ("import A\ndef x := 1", "import A", ("A",), False, False),
        ("import A.B import C -- c\n\n", "import A.B import C", ("A.B", "C"), False, False),
        ("prelude\nimport A", "prelude\nimport A", ("A",), False, True),
        ("/- a /- b -/ -/ -- c\nimport A", "/- a /- b -/ -/ -- c\nimport A", ("A",), False, False),
        ("/-- doc -/ import A", "", (), False, False),
        ("/-! doc -/\nimport A", "", (), False, False),
        ("import A /-! doc -/ import B", "import A", ("A",), False, False),
        ("module\nimport A", "module\nimport A", ("A",), True, False),
        ("module prelude import A", "module prelude import A", ("A",), True, True),
        (
            "module public import A meta import B public meta import C import all D",
            "module public import A meta import B public meta import C import all D",
            ("A", "B", "C", "D"),
            True,
            False,
        ),
        ("import A public section", "import A", ("A",), False, False),
        ("import A meta def x := 1", "import A", ("A",), False, False),
        ("import/- c -/A", "import/- c -/A", ("A",), False, False),
        ("import «a b».C.«D»", "import «a b».C.«D»", ("«a b».C.D",), False, False),
        ("import «a\nb»", "", (), False, False),
        ("imports A", "", (), False, False),
        ("import", "", (), False, False),
        ("import A import", "import A", ("A",), False, False),
        (
            "import A -- import B\nimport C",
            "import A -- import B\nimport C",
            ("A", "C"),
            False,
            False,
        ),
        ("/-/ import A -/ import B", "/-/ import A -/ import B", ("B",), False, False),
        ("/- open", "", (), False, False),
    ],
)
def test_split_header(
    code: str, text: str, imports: tuple[str, ...], is_module: bool, is_prelude: bool
) -> None:
    assert split_header(code) == Header(text, len(text), imports, is_module, is_prelude)


@pytest.mark.slow
def test_lean_reads_the_same_imports(lean: Lean) -> None:
    for module in ("A", "B", "C", "«a b»"):
        lean.compile("prelude\n", name=module.strip("«»"))
    code = "/- /- import X -/ -/prelude--import Y\nimport A/-/import Z-/\nimport«a b» import\n C\n"
    imports = split_header(code).imports
    assert imports == ("A", "«a b»", "C")
    compiled = read_module(lean.compile(code))
    assert [each.module for each in compiled.imports] == [("A",), ("a b",), ("C",)]


# Examples

NOT_EXAMPLES = [
    "-- example\n",
    "/- example /- example -/ example -/",
    "/-- example -/ def x := 1",
    "/-! example -/",
    'def s := "example \\" example"',
    'def s := "\\\\" ++ "example"',
    'def s := r"example \\" ++ r#"a " example"# ++ r##""# example"##',
    'def s := s!"{f "a"} example"',
    'def s := s!"{f "--"} example" ++ s!"{ {x := "}"} } example {s!"{1} example"}"',
    "def c := ['\"', 'e', '\\'', '\\x41', '\\u0041', '\\\\'] -- example",
    "def h' := h'' 'a' -- example",
    "def «example» := «a example b».«example»",
    "def my.example := Foo.example",
    "def example' := example_ + anexample + example? + αexample",
    "def x := (f y).example",
    "def x := `example ++ ``Foo.example",
    "open Foo.Bar example.Baz",
    "def f := fun x ↦ '' '\"' x -- '\" example",
    "example₁",
]

EXAMPLES = [
    ("example : p := h", 1),
    ("example:p := h\nexample(h:p):p:=h", 2),
    ("@[simp]example : p := h", 1),
    ("noncomputable example : p := h", 1),
    ("open Foo in example : p := h", 1),
    ("«foo»example : p := h", 1),
    ("λexample", 1),
    ("example.{u} (α : Sort u) : p := h", 1),
    ("def x := 5 example : p := h", 1),
    ("def x := 1.5e3 example : p := h", 1),
    ("def x := 0b1example : p := h", 1),
    ("def x := y.1 example : p := h", 1),
    ("def x := [a..example]", 1),
    ("/- -/example/--/ -/", 1),
    ("/-/- -/ example : p := h", 1),
    ("/-- -- -/ x\n-/ example : p := h", 1),
    ('def s := "\\\\" example : p := h', 1),
    ('def s := r"\\" example : p := h', 1),
    ("def c := '\"' example : p := h --\"", 1),
    ("theorem t (h' : p) : p := h' example : f '' s = s' := h", 1),
    ("def s := f ⁻¹' t example : p := h'", 1),
    ('def s := s!"{"}"}" example : p := h', 1),
    ('def s := s!"{" example', 0),
]


@pytest.mark.parametrize("code", NOT_EXAMPLES)
def test_what_is_no_example_is_left_alone(code: str) -> None:
    assert name_examples(code, "salt") is None


@pytest.mark.parametrize(("code", "count"), EXAMPLES)
def test_examples_get_a_name(code: str, count: int) -> None:
    named = name_examples(code, "salt") or code
    assert len(NAMED.findall(named)) == count
    assert NAMED.sub("example", named) == code


def test_names_differ_and_follow_the_salt() -> None:
    code = "example : p := h\n" * 100
    named = name_examples(code, "salt")
    assert named is not None
    assert len(set(NAMED.findall(named))) == 100
    assert name_examples(code, "salt") == named
    assert name_examples(code, "pepper") != named


@pytest.mark.slow
@pytest.mark.parametrize("code", ["/-/- -/ {}", "/-- -- -/ x\n-/ {}", "/-!/- -/ -/ {}", "/---/ {}"])
def test_lean_sees_what_stands_behind_odd_comments(lean: Lean, tmp_path: Path, code: str) -> None:
    source = "prelude\n" + code.format("axiom visible : Prop")
    names = {each.name for each in read_module(lean.compile(source, folder=tmp_path)).constants}
    assert ("visible",) in names
    assert name_examples(code.format("example"), "salt") is not None


# Any text at all

PIECES = "example import prelude module all public s! r# \" ' /- -/ -- « » { } # ` . .. 0x 1e \\ a"
TEXT = st.lists(
    st.sampled_from([*PIECES.split(), " ", "\n"]) | st.text(max_size=2), max_size=30
).map("".join)


@pytest.mark.slow
@given(TEXT)
def test_any_text_has_a_header(code: str) -> None:
    header = split_header(code)
    assert header.text == code[: header.end_offset]
    assert not any("\n" in module for module in header.imports)
    assert split_header(header.text) == header


@pytest.mark.slow
@given(TEXT)
def test_naming_examples_changes_nothing_else(code: str) -> None:
    named = name_examples(code, "salt")
    if named is not None:
        assert "example" in code
        assert len(named) == len(code)
        assert [len(line) for line in named.split("\n")] == [len(line) for line in code.split("\n")]
        assert NAMED.sub("example", named) == NAMED.sub("example", code)


@pytest.mark.slow
@pytest.mark.parametrize("piece", ['r#"', "«", "/-", "`«", '"', 's!"{', "'", "a.", "-", "\\", "1."])
def test_time_is_linear(piece: str) -> None:
    # Quadratic time would be hours here; the timeout of the suite is what fails then.
    assert name_examples(piece * 200_000, "salt") is None
    split_header(piece * 200_000)


# Statements of a header, and words that act


@pytest.mark.parametrize(
    ("code", "statements"),
    [
        ("theorem t : True", []),
        ("prelude\nimport  A.B -- x\nimport «a b».C", ["prelude", "import A.B", "import «a b».C"]),
        (
            "module public\n import all A /- y -/ public meta import B meta import C def module",
            ["module", "public import all A", "public meta import B", "meta import C"],
        ),
    ],
)
def test_statements_of_a_header(code: str, statements: list[str]) -> None:
    header = split_header(code)
    found = header_statements(header)
    assert [text for text, _ in found] == statements
    assert [code[start:].split()[0] for _, start in found] == [s.split()[0] for s in statements]
    # They say the same.
    assert split_header("\n".join(statements)).imports == header.imports


ACTING = (
    "#eval 1|#eval! 1|run_cmd x|open Lean in x|IO.println|@[extern x]|elab_rules : tactic"
    "|initialize x|unsafe def f|`IO|«IO».x|builtin_simproc x"
)


@pytest.mark.parametrize("code", ACTING.split("|"))
def test_what_may_act(code: str) -> None:
    assert can_act(f"theorem t : p := h\n{code}")


def test_what_cannot_act() -> None:
    assert not can_act('theorem t : Polynomial.eval x p = 0 := by simp -- IO "#eval" Lean')
    assert not can_act('def s := "run_cmd" ++ "IO"')
