"""Names for the examples of a text, held against what Lean makes of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lean.images import Lean

from leanq.errors import AuditError
from leanq.lean.audit.olean import open_image, read_parts
from leanq.lean.audit.survey import places
from leanq.lean.environment import Environment
from leanq.lean.examples import NAME, Examples, examples_in, may_have_examples, names_sorry
from leanq.lean.syntax import may_be_keyword, string_contents


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


# What is behind an example must not move by a column, and by no line where a line is free.
PLACED = [
    ("a\n\nexample : p := h\nb\n", "a\ndef _example\n        : p := h\nb\n", 2),
    ("a\n-- why\nexample:p", "a\ndef _example -- why\n       :p", 2),
    ("a\n\n  example : p", "a\n  def _example\n          : p", 2),
    ("a\n  -- why -/\nexample : p", "a\n  -- why -/\ndef _example\n        : p", 3),
    ("a\nexample : p := h", "a\ndef _example\n        : p := h", 2),
    ("example : p := h", "def _example\n        : p := h", 1),
    ("open Foo in example : p", "open Foo in def _example\n                    : p", 1),
    ("a\n\n@[simp] example : p", "a\n\n@[simp] def _example\n                : p", 3),
]


@pytest.mark.parametrize(("code", "named", "line"), PLACED)
def test_an_example_gets_its_name_and_the_rest_stays_in_place(
    code: str, named: str, line: int
) -> None:
    found = Examples(code, "salt").named(0)
    assert (found.text, found.line) == (named, line)
    assert found.text.split("\n")[line - 1][found.column :].startswith(NAME)


def test_the_examples_before_one_stay_and_those_behind_get_other_names() -> None:
    examples = Examples("example : a\n\nexample : b\n\nexample : c\n", "salt")
    first, second, third = (examples.named(number).text for number in range(examples.count))
    assert [text.count("example : ") for text in (first, second, third)] == [0, 1, 2]
    assert [text.count(f"def {NAME}") for text in (first, second, third)] == [1, 1, 1]
    assert second.startswith("example : a\ndef _example\n        : b\n\ndef ")


@pytest.mark.parametrize(
    ("code", "may_be"),
    [
        ("-- an |example", True),
        ('"an |example"', True),
        ("#version|example", True),
        ("«a»|example", True),
        ("0|example", True),
        ("(f x).|example", True),
        ("λ|example", True),
        ('infix "⋆." => f\n#check ⋆.|example', True),
        ('infix "⋆\\x2e" => f\n#check ⋆.|example', True),
        ('infix "(a." => f\n#check (a.|example', True),
        ('infix "(a\\u002e" => f\n#check (a.|example', True),
        # To Lean a no-break space is no blank.
        ('infix "⋆\u00a0x." => f\n#check ⋆\u00a0x.|example', True),
        ('infix "\u00a0(x." => f\n#check \u00a0(x.|example', True),
        ("x.|example", False),
        ("(x.|example", False),
        ("[my_|example]", False),
        ("`_|example", False),
        ("«a».|example", False),
        ("αβ|example", False),
    ],
)
def test_which_words_may_be_tokens_of_their_own(code: str, may_be: bool) -> None:
    offset = code.index("|")
    code = code.replace("|", "")
    assert may_be_keyword(code, offset, string_contents(code)) is may_be


def test_a_word_that_is_no_example_by_our_reading_is_probed() -> None:
    code = 'def s := "an example"\n-- an example\nexample : p\n'
    examples = Examples(code, "salt")
    assert examples.count == 1
    assert examples.probes == [code.replace("an example", f"an def {examples.probe_name}")]
    assert Examples("def my_example := 1", "salt").probes == []


def test_in_a_text_with_tokens_of_its_own_each_word_is_probed_alone() -> None:
    # Where the first word is another one, Lean takes all behind it for a comment.
    code = 'notation "/-!\\x65xample" => True\n#check Not /-!example\nexample : p := h\n-- -/\n'
    examples = Examples(code, "salt")
    before, first, second = code.split("example :")[0], *examples.probes
    assert examples.count == 0
    assert f"#check Not /-!def {examples.probe_name}\nexample : p" in first
    assert second.startswith(f"{before}def {examples.probe_name} : p")


PIECES = ["example", "\n", " ", "--", "/-", "-/", '"', "«", "»", ".", "a", "(", "#"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=30).map("".join))
def test_any_text_keeps_what_stands_behind_an_example(code: str) -> None:
    examples = Examples(code, "salt")
    assert not examples.count or may_have_examples(code)
    for number in range(examples.count):
        named = examples.named(number)
        assert named.text.split("\n")[named.line - 1][named.column :].startswith(NAME)
        last = code[code.rfind("example") + len("example") :]
        assert named.text.endswith(last)
        assert len(named.text.rsplit("\n", 1)[-1]) == len(code.rsplit("\n", 1)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["example ", "x.example", "(example", 'r#"', "«", 's!"{'])
def test_time_is_linear(piece: str) -> None:
    examples = Examples(piece * 100_000, "salt")
    if examples.count:
        examples.named(examples.count - 1)


# What Lean notes


def noted(lean: Lean, folder: Path, code: str) -> bytes:
    command = [*lean.environment.toolchain.command, "-i", "notes.ilean", "--stdin"]
    env = lean.environment.process_env()
    done = subprocess.run(
        command, input=code.encode(), cwd=folder, env=env, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    return (folder / "notes.ilean").read_bytes()


@pytest.mark.slow
def test_lean_notes_its_examples(lean: Lean, tmp_path: Path) -> None:
    code = "prelude\nimport Core\n-- an example\ntheorem t : True := True.intro\n"
    assert examples_in(noted(lean, tmp_path, code)) == ()
    code += "example : True := True.intro\nnamespace «a b»\nexample := True\nend «a b»\n"
    assert examples_in(noted(lean, tmp_path, code)) == ("_example", "«a b»._example")


@pytest.mark.slow
def test_lean_notes_a_sorry_by_which_it_drops_a_declaration(lean: Lean, tmp_path: Path) -> None:
    code = "prelude\nimport Core\n-- no sorryAx\ntheorem t : True := True.intro\n"
    assert not names_sorry(noted(lean, tmp_path, code), [b"compiled"])
    code += "theorem u : sorryAx Nat true := missing\n"
    assert names_sorry(noted(lean, tmp_path, code), [b"compiled"])


def test_notation_with_a_sorry_has_its_name_in_the_compiled_file() -> None:
    assert names_sorry(b'{"references": {}}', [b"olean", b"\0sorryAx\0"])


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text(max_size=3), st.lists).map(
        lambda each: json.dumps({"references": each}).encode()
    )
)
def test_damaged_notes_end_in_order(data: bytes) -> None:
    with contextlib.suppress(AuditError):
        examples_in(data)
    with contextlib.suppress(AuditError):
        names_sorry(data, [])


CORPUS = """prelude
import Core
set_option linter.all false
axiom p : Prop
axiom h : p
axiom n : Nat
class K (α : Type) where
  k : α

"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        "example : p := h",
        "example (q : Prop) : q → q := by intro x\n                                 exact x",
        "example (q : Prop) : q → q := by\n  intro x\n  exact x",
        "private example : p := h",
        "noncomputable example : Nat := n",
        "private noncomputable example : Nat := n",
        "noncomputable section\n-- one\nexample : Nat := n\nend",
        "open Bool in example : Bool := true",
        "set_option pp.all true in\nexample : Bool := true",
        "@[reducible] example : Bool := true",
        "/-- A doc. -/ example : Bool := true",
        "/-- A doc. -/\nexample : Bool := true",
        "namespace Foo\nvariable (q : Prop) (x : q)\n\nexample : q := x\nend Foo",
        "example : K Nat where\n  k := Nat.zero",
        "example := Nat.zero",
        "section\nuniverse u\nexample (α : Sort u) : α → α := fun x => x\nend",
        "unsafe example : Nat := Nat.zero",
        "partial example : Nat := Nat.zero",
        "example : p := x where\n  x : p := h",
        "def x : Nat := Nat.zero example : p := h",
        "def x : Nat := Nat.zero\nexample : p := h",
        "/-/- -/ example : p := h",
        "/-- -- -/ x\n-/ example : p := h",
    ],
)
def test_a_definition_does_for_every_example(lean: Lean, tmp_path: Path, example: str) -> None:
    code = CORPUS + example
    assert lean.run(code, folder=tmp_path) == []
    named = Examples(code, "salt").named(0)
    # Lean may advise against a definition of this type; that is no error.
    image = open_image(read_parts(lean.compile(named.text, folder=tmp_path)))
    here = [
        name
        for name, (_, selection) in places(image).items()
        if selection[:2] == (named.line, named.column)
    ]
    assert [name[-1] for name in here] == [NAME]
