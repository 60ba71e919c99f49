"""Which syntax of libraries is found to evaluate what a text wrote."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lean.images import Lean
from support.lean.search_paths import with_folders
from support.lean.sites import Site, check

from leanq.errors import SandboxError
from leanq.lean.environment import Environment, open_environment
from leanq.lean.run.evaluators import evaluators, scan
from leanq.lean.run.library_syntax import Evaluators

# What Lean's own library brings, by the names that its functions have.
BASE = """prelude
import Core
instance : Inhabited Lean.Macro.Result := ⟨.none⟩
def IO (α : Type) : Type := Unit → α
instance : Inhabited (IO Unit) := ⟨fun _ => Unit.unit⟩
namespace Lean
def IO.RealWorld : Type := Unit
opaque Meta.evalExpr : Nat → Nat
opaque Syntax.atom : Nat → String → Macro.Result
opaque Syntax.node1 : Nat → Name → Macro.Result → Macro.Result
structure AttributeImplCore where
  ref : Name
  name : Name
  descr : String
structure AttributeImpl extends AttributeImplCore where
  add : Nat → Nat
opaque registerBuiltinAttribute : AttributeImpl → IO Unit
abbrev Elab.Tactic.Tactic : Type := Macro
inductive Expr where | mk : Expr
inductive TermElabM (α : Type) where | mk : TermElabM α
end Lean
"""
# A library that evaluates as Mathlib and Aesop do: through functions of another module, by another
# implementation, in a macro, in a macro of another's word, and where an attribute is given.
HELPERS = """prelude
import Base
def evaluate (n : Nat) : Nat := Lean.Meta.evalExpr n
@[implemented_by evaluate] opaque helper : Nat → Nat
def stringOf (n : Nat) : Nat := helper n
"""
OWN = """prelude
import Helpers
open Lean Elab.Tactic Parser.Tactic
syntax (name := traced) "trace " term : tactic
@[tactic traced] def evalTraced : Tactic := fun _ _ _ => cond (Nat.beq (stringOf 1) 1) .none .none
syntax (name := harmless) "harmless " term : tactic
@[tactic harmless] def evalHarmless : Tactic := fun _ _ _ => .none
syntax (name := expanded) optional("perhaps ") " at " "expanded_tac" : tactic
@[macro expanded] def expand : Macro := fun _ _ _ => Syntax.atom 1 "run_tac"
syntax (name := twiceExpanded) "twice " : term
@[macro twiceExpanded] def expandTwice : Macro := fun _ _ _ =>
  Syntax.node1 1 `expanded (Syntax.atom 1 "expanded_tac")
syntax (name := applied) "applied " "(" &"config" " := " term ")" term : tactic
@[tactic applied] def evalApplied : Tactic := fun _ _ _ => cond (Nat.beq (stringOf 1) 1) .none .none
syntax (name := usesAWord) "uses " term : tactic
@[macro usesAWord] def expandUsesAWord : Macro := fun _ _ _ =>
  Syntax.node1 1 `Lean.Parser.Tactic.apply (Syntax.atom 1 "applied")
syntax (name := sign) "⊞" term : term
@[macro sign] def expandSign : Macro := fun _ _ _ => Syntax.atom 1 "run_tac"
syntax (name := bracket) "(" "[" term : term
@[macro bracket] def expandBracket : Macro := fun _ _ _ => Syntax.atom 1 "run_tac"
structure Parent where
  depth : Nat
structure Config extends Parent where
  speed : Nat
def evalUnsafe (_ : Expr) : TermElabM Config := cond (Nat.beq (Meta.evalExpr 1) 1) .mk .mk
@[implemented_by evalUnsafe] def eval (_ : Expr) : TermElabM Config := .mk
syntax (name := configured) "configured! " optConfig : tactic
@[tactic configured] def evalConfigured : Tactic := fun _ _ _ => match eval .mk with
  | .mk => .none
theorem own : True := True.intro
"""
# Its attributes, in a module that no text imports: their functions are none that Lean could run.
RULES = """prelude
import Helpers
open Lean
def initRules : IO Unit := registerBuiltinAttribute
  { ref := .anonymous, name := `rules, descr := "x", add := stringOf }
attribute [init] initRules
def initLabel : IO Unit := registerBuiltinAttribute
  { ref := .anonymous, name := `label, descr := "x", add := fun n => n }
attribute [init] initLabel
"""


# Terms that could be such tactics by their words.
NAMED_AS_A_TACTIC = "def f (trace : Nat → Nat) (x : Nat) : Nat := (trace x)"
CONFIGURED = "def configured! (speed : Bool) : Bool := speed\ndef g (f : Bool) : Bool :="


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


@pytest.fixture(scope="module")
def library(lean: Lean, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules of a library."""
    folder = tmp_path_factory.mktemp("library")
    for name, source in (("Base", BASE), ("Helpers", HELPERS), ("Own", OWN), ("Rules", RULES)):
        compiled = lean.compile(source, name=name)
        folder.joinpath(compiled.name).write_bytes(compiled.read_bytes())
    return folder


@pytest.mark.slow
def test_words_are_those_of_syntax_that_evaluates(library: Path) -> None:
    assert scan((library / "nowhere", library)) == Evaluators(
        words={
            "applied ( config := … ) …": "tactic applied (Own)",
            "trace …": "tactic traced (Own)",
            "twice": "term twiceExpanded (Own)",
            "… at expanded_tac": "tactic expanded (Own)",
            "⊞ …": "term sign (Own)",
        },
        attributes={"rules": "Rules"},
        heads=["applied", "configured!"],
        fields=["depth", "speed"],
        wordless=["term bracket (Own)"],
    )


def test_a_module_that_cannot_be_looked_into(library: Path, tmp_path: Path) -> None:
    for path in library.iterdir():
        tmp_path.joinpath(path.name).write_bytes(path.read_bytes())
    (tmp_path / "Helpers.olean").write_bytes(b"olean\x02")
    found = scan((tmp_path,))
    assert found.unseen.keys() == {"Helpers", "Own", "Rules"}
    assert found.unseen["Own"].startswith("Helpers: ")


def test_modules_are_those_that_lean_finds(lean: Lean, library: Path, tmp_path: Path) -> None:
    """The first folder that knows a library decides; and links are followed."""
    found = scan((library,))
    other = tmp_path / "other"
    other.mkdir()
    path = lean.compile("prelude\nimport Helpers\n", name="Own", folder=other)
    assert scan((library, other)) == found
    assert "trace …" not in scan((other, library)).words
    inner = tmp_path / "inner"
    (inner / "Deep").mkdir(parents=True)
    for each in ("Base", "Helpers"):
        inner.joinpath(f"{each}.olean").symlink_to(library / f"{each}.olean")
    (tmp_path / "elsewhere").mkdir()
    path = lean.compile(OWN, name="Own", folder=tmp_path / "elsewhere")
    (inner / "Deep" / "More").symlink_to(path.parent)
    assert scan((inner,)).words["trace …"] == "tactic traced (Deep.More.Own)"


@pytest.mark.slow
def test_a_library_named_core_is_not_leanqs_own(library: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "Core").mkdir(parents=True)
    for place in ("Base", "Helpers", "Core/Own"):
        path = folder / f"{place}.olean"
        path.symlink_to(library / path.name)
    environment = open_environment("core", folder, cache=cache, environ={})
    assert "trace …" in evaluators(environment).words


def test_a_library_named_as_one_of_leans_own_is_looked_into(
    lean: Lean, library: Path, tmp_path: Path
) -> None:
    for name in ("Base", "Helpers"):
        (tmp_path / f"{name}.olean").symlink_to(library / f"{name}.olean")
    compiled = lean.compile(OWN, name="Lake")
    (tmp_path / "Lake.olean").write_bytes(compiled.read_bytes())
    assert scan((tmp_path,)).words["trace …"] == "tactic traced (Lake)"
    (tmp_path / "Init.olean").symlink_to(library / "Base.olean")
    assert scan((tmp_path,)).words == {}


@pytest.mark.slow
def test_what_was_found_in_files_that_changed_is_not_kept(
    lean: Lean, library: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    for path in library.glob("*.olean"):
        folder.joinpath(path.name).write_bytes(path.read_bytes())
    cache, own = tmp_path / "cache", folder / "Own.olean"
    environment = open_environment("own", folder, cache=cache, environ={})
    whole = own.read_bytes()
    lean.compile("prelude\nimport Helpers\n", name="Own", folder=folder)
    assert "trace …" not in evaluators(environment).words
    own.write_bytes(whole)
    again = open_environment("own", folder, cache=cache, environ={})
    assert again.fingerprint == environment.fingerprint
    assert "trace …" in evaluators(again).words


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files_end_the_scan_of_their_module_alone(
    library: Path, data: st.DataObject
) -> None:
    body = bytearray((library / "Own.olean").read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    folder = library / "damaged"
    folder.mkdir(exist_ok=True)
    try:
        (folder / "Own.olean").write_bytes(body)
        found = scan((folder,))
        assert found.unseen.keys() <= {"Own"}
    finally:
        (folder / "Own.olean").unlink()
        folder.rmdir()


def test_what_was_found_is_kept_under_the_fingerprint(
    core: Environment, library: Path, cache: Path, tmp_path: Path
) -> None:
    opened = open_environment("own", library, cache=cache, environ={})
    environment = replace(opened, cache=tmp_path)
    found = evaluators(environment)
    assert found.words.keys() == {
        "applied ( config := … ) …",
        "trace …",
        "twice",
        "… at expanded_tac",
        "⊞ …",
    }
    [kept] = (environment.cache / "evaluators").iterdir()
    assert kept.name.startswith(environment.fingerprint)
    assert json.loads(kept.read_bytes().partition(b"\n")[2])["attributes"] == {"rules": "Rules"}
    # Lean's own library is not looked into.
    assert evaluators(core) == Evaluators()


def test_a_library_in_leans_own_folder_is_looked_into(
    core: Environment, library: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lib" / "lean"
    (folder / "Lean").mkdir(parents=True)
    for path in library.glob("*.olean"):
        (folder / path.name).symlink_to(path)
    (folder / "Lean" / "Damaged.olean").write_bytes(b"olean")
    (folder / "Init.olean").symlink_to(library / "Base.olean")
    toolchain = replace(core.toolchain, source="option", prefix=tmp_path)
    found = evaluators(replace(core, toolchain=toolchain, search_path=(), cache=tmp_path))
    assert ("trace …" in found.words, found.unseen) == (True, {})


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["KILL", "TERM", "INT"])
def test_a_scan_that_is_ended_from_outside_tells_nothing_of_the_libraries(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    """As by a machine that is short of memory, or by whoever stops the worker."""
    environment = open_environment("own", library, cache=tmp_path / "cache", environ={})
    ended = tmp_path / "python"
    # Whoever runs the tests may ignore SIGINT, and a shell cannot undo that.
    default = "" if signal == "KILL" else f"signal.signal(signal.SIG{signal}, signal.SIG_DFL)\n"
    kill = f"import os, signal\n{default}os.kill(os.getpid(), signal.SIG{signal})\n"
    ended.write_text(f"#!{sys.executable}\n{kill}")
    ended.chmod(0o755)
    with monkeypatch.context() as short:
        short.setattr(sys, "executable", str(ended))
        with pytest.raises(SandboxError, match="came to no end"):
            evaluators(environment)
    found = evaluators(environment)
    assert (found.unseen, "trace …" in found.words) == ({}, True)


@pytest.mark.slow
async def test_no_hidden_module_tells_what_a_text_may_do(
    core: Environment, lean: Lean, site: Site, library: Path, tmp_path: Path
) -> None:
    """Two folders have a library, and Lean takes it from the first."""
    source = "prelude\nimport Helpers\ntheorem own : True := True.intro\n"
    lean.compile(source, name="Own", folder=tmp_path)
    environment = with_folders(core, (library, tmp_path, *core.search_path))
    driver = await site.driver(environment, forks=None)
    code = f"prelude\nimport Own\n{NAMED_AS_A_TACTIC}\ntheorem t : True := own\n"
    reply = await driver.run(check(code))
    assert reply.verdict == "unverified", reply.messages


@pytest.mark.slow
async def test_a_text_with_such_a_word_is_unverified(
    cache: Path, site: Site, library: Path
) -> None:
    # Where nobody sees what Lean evaluates.
    environment = open_environment("own", library, cache=cache, environ={})
    driver = await site.driver(environment, forks=None)
    for text, verdict in (
        (NAMED_AS_A_TACTIC, "unverified"),
        ("-- trace x", "accepted"),
        ("-- @[rules] x", "accepted"),
        (f"{CONFIGURED} configured! (speed := f)", "unverified"),
        (f"{CONFIGURED} configured! (speed := true)", "accepted"),
        ("-- configured! (speed := f)", "accepted"),
        ("def f (harmless : Nat → Nat) (x : Nat) : Nat := (harmless x)", "accepted"),
        ("def trace : Prop := True", "accepted"),
        ("def named (trace : Prop) : Prop := trace", "accepted"),
        ("def d.trace : Prop := True", "accepted"),
    ):
        code = f"prelude\nimport Own\n{text}\ntheorem t : True := own\n"
        reply = await driver.run(check(code))
        assert reply.verdict == verdict, (text, reply.messages)


@pytest.mark.slow
async def test_where_it_is_seen_what_ran_no_word_alone_is_a_program(
    cache: Path, site: Site, library: Path
) -> None:
    driver = await site.driver(open_environment("own", library, cache=cache, environ={}))
    for text in (NAMED_AS_A_TACTIC, f"{CONFIGURED} configured! (speed := f)"):
        reply = await driver.run(check(f"prelude\nimport Own\n{text}\ntheorem t : True := own\n"))
        assert reply.verdict == "accepted", (text, reply.messages)
