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
from leanq.lean.environment import Environment
from leanq.lean.judge.examples import Examples, examples_in, may_have_examples, names_sorry
from leanq.lean.run.olean import open_image, places, read_parts


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


def test_examples_get_names_and_nothing_moves() -> None:
    code = (
        "example : a\n\n  -- an example\n  @[simp] theorem example.t : b := example.s\nexample : c"
    )
    found = Examples.of(code, "salt")
    first, second = found.names
    assert found.text == code.replace("example : a", f"def {first} : a").replace(
        "example : c", f"def {second} : c"
    )
    assert (found.places, found.doubt) == (((1, 4), (5, 4)), "")
    assert all(len(name) == 3 and name[0] == "_" for name in found.names)


def test_no_text_has_the_names_of_its_examples() -> None:
    names = Examples.of("example : a\n" * 3, "salt").names
    again = Examples.of("-- " + " ".join(names) + "\n" + "example : a\n" * 3, "salt").names
    assert set(again).isdisjoint(names)
    assert len(set(again)) == 3
    assert Examples.of("example : a\n" * 6000, "salt").doubt == "there are too many"


@pytest.mark.parametrize(
    "code",
    [
        "@[instance] example : A := a",
        "@[simp] private noncomputable example : a = b := h",
        "@[simp] /-- A doc. -/ example : a = b := h",
        "example : a := f where\n  @[instance] f : A := a",
        "example : a := by let rec @[simp] f : A := a; exact f",
        "example : a := by exact?",
        "example : a := by simp +locals",
        "example : decl_name% = n := rfl",
        'notation "⟪-" => a\nexample : b := ⟪-- example : c',
        'def f (s! : String) := s! "{"\nexample : a := sorry\ndef g := "}"',
        'notation "⟪" a ")." => a\ndef b := ⟪ 1 ).example : c',
        'example : a := "',
    ],
)
def test_texts_that_could_tell_or_hide_an_example(code: str) -> None:
    assert Examples.of(code, "salt").doubt


@pytest.mark.parametrize(
    "code",
    [
        "@[simp] theorem t : a := h\nexample : a := h",
        "@[simp, inherit_doc f] private def g (x : A[1]) := x\nattribute [simp] g in\nexample := g",
        "-- exact? finds it\nexample : xs[0]? = none := by simp",
        'def s := "an example" ++ s!"{x}" -- an example',
    ],
)
def test_texts_that_could_not(code: str) -> None:
    assert Examples.of(code, "salt").doubt == ""


def test_a_librarys_token_can_hide_an_example() -> None:
    code = "example : a := b +-- example : c\n"
    assert Examples.of(code, "salt").doubt == ""
    assert Examples.of(code, "salt", ["+-"]).doubt


PIECES = ["example", "\n", " ", "--", "/-", "-/", '"', "«", "»", ".", "a", "(", "#"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=30).map("".join))
def test_in_any_text_nothing_moves(code: str) -> None:
    found = Examples.of(code, "salt")
    assert not found.names or may_have_examples(code)
    assert len(found.text) == len(code)
    lines = found.text.split("\n")
    for name, (line, column) in zip(found.names, found.places, strict=True):
        assert lines[line - 1][column:].startswith(name)


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["example ", "x.example", "(example", 'r#"', "«", 's!"{'])
def test_time_is_linear(piece: str) -> None:
    Examples.of(piece * 100_000, "salt")


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
    found = Examples.of(code, "salt")
    # Lean may advise against a definition of this type; that is no error.
    image = open_image(read_parts(lean.compile(found.text, folder=tmp_path)))
    [place] = found.places
    here = [name for name, (_, selection) in places(image).items() if selection[:2] == place]
    assert [name[-1:] for name in here] == [found.names]
    assert bool(found.doubt) == ("@[" in example)
