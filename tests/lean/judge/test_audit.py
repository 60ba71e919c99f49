"""The audit, end to end with real Lean: what a candidate can hide, and what it must not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path

import pytest
from support.lean.images import Image, Lean

from leanq.errors import AuditError
from leanq.lean.environment import STANDARD_AXIOMS, Environment
from leanq.lean.judge.declarations import Findings, ImportedAxioms, audit, print_axioms_source
from leanq.lean.judge.examples import name_examples
from leanq.lean.run.image import Name
from leanq.lean.run.olean import Survey, open_image, reachable, read_parts, survey
from leanq.lean.text import split_header

PRELUDE = "prelude\nimport Core\nset_option linter.all false\n"
CLEAN = Findings((), False, ())


def surveyed(path: Path) -> Survey:
    image = open_image(read_parts(path))
    return survey(image, image.constants(), {})


class Auditor:
    """Compiles candidates where nothing can import them, and audits them."""

    def __init__(self, lean: Lean, folder: Path) -> None:
        self.lean = lean
        self.folder = folder
        self.asked: list[str] = []

    async def ask(self, source: str) -> str:
        self.asked.append(source)
        name = f"Ask{len(self.asked)}"
        messages = await asyncio.to_thread(self.lean.run, source, name=name, folder=self.folder)
        return "\n".join(["a library says hello", "[1]", *map(json.dumps, messages)])

    def imported(self, code: str) -> ImportedAxioms:
        return ImportedAxioms(split_header(code), self.ask, self.lean.find_olean)

    async def __call__(
        self,
        code: str,
        *,
        allowed: Collection[str] = (),
        environment_allowed: Collection[str] = STANDARD_AXIOMS,
        imported: ImportedAxioms | None = None,
    ) -> Findings:
        path = await asyncio.to_thread(self.lean.compile, code, folder=self.folder)
        return await audit(
            surveyed(path),
            allowed=allowed,
            environment_allowed=environment_allowed,
            imported=imported or self.imported(code),
        )


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    made = Lean(core, tmp_path_factory.mktemp("lean"))
    made.compile(LIBRARY, name="Library")
    made.compile(BASE, name="Base")
    return made


@pytest.fixture
def auditor(lean: Lean, tmp_path: Path) -> Auditor:
    return Auditor(lean, tmp_path)


LIBRARY = f"""{PRELUDE}
axiom assumed : False
axiom «we ird».«axiom, [b]» : False
theorem «a b».«theorem» (p : Prop) : p := False.elim assumed
theorem «q"\\».«#x» (p : Prop) : p := False.elim «we ird».«axiom, [b]»
theorem unfinished : False := sorry
def alias : Nat := Nat.zero
namespace Inner
theorem truth : True := True.intro
theorem alias : False := assumed
end Inner
export Inner (truth)
private def Hidden (p : Prop) : Prop := p
theorem honest : Hidden True := True.intro
private def Unfinished : Prop := sorry
theorem given (h : Unfinished) : Unfinished := h
theorem longer : And False (And False False) :=
  And.intro assumed (And.intro «we ird».«axiom, [b]» unfinished)
"""

# A file of the module system, which can import no other.
BASE = """module
prelude
public axiom assumed (p : Prop) : p
axiom secret (p : Prop) : p
theorem viaPublic (p : Prop) : p := assumed p
theorem viaSecret (p : Prop) : p := viaTwo p where
  viaTwo (q : Prop) : q := secret q
theorem honest (p : Prop) (h : p) : p := h
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "theorem t (p q : Prop) : And p q → And q p := by\n"
            "  intro h\n  constructor\n  exact h.right\n  exact h.left\n",
            CLEAN,
        ),
        ("", CLEAN),
        ("theorem t (p : Prop) : p := sorry", Findings(("sorryAx",), True, ())),
        (
            "set_option warn.sorry false\ntheorem t (p : Prop) : p := sorry",
            Findings(("sorryAx",), True, ()),
        ),
        ("theorem t (p : Prop) : p := sorryAx p false", Findings(("sorryAx",), True, ())),
        (
            "private theorem lemma (p : Prop) : p := sorryAx p false\n"
            "theorem t (p : Prop) : p := lemma p",
            Findings(("sorryAx",), True, ()),
        ),
        (
            "axiom cheat : False\ntheorem t (p : Prop) : p := cheat.elim",
            Findings(("cheat",), False, ("cheat",)),
        ),
        ("axiom cheat : False", Findings(("cheat",), False, ("cheat",))),
        ("namespace Foo\naxiom cheat : False", Findings(("Foo.cheat",), False, ("Foo.cheat",))),
        ("axiom «a b» : False", Findings(("«a b»",), False, ("«a b»",))),
        # This one only looks like a standard axiom.
        (
            "axiom «Classical.choice» : False",
            Findings(("«Classical.choice»",), False, ("«Classical.choice»",)),
        ),
        (
            "namespace N\nprivate axiom propext : False\nend N",
            Findings(
                ("_private.Candidate.0.N.propext",), False, ("_private.Candidate.0.N.propext",)
            ),
        ),
        ("unsafe axiom cheat : False", Findings(("cheat",), False, ("cheat",))),
        (
            "theorem t (p q : Prop) (h : p ↔ q) : p = q := propext h",
            Findings(("propext",), False, ()),
        ),
        # Unsafe code proves nothing, whatever it rests on; a sorry in it is still one.
        ("unsafe def u (p : Prop) : p := lcProof", CLEAN),
        ("unsafe def u (p : Prop) : p := sorryAx p false", Findings(("sorryAx",), True, ())),
        (
            "noncomputable def wrong : Nat := sorryAx Nat false\n"
            "structure S where\n  x : Eq wrong wrong",
            Findings(("sorryAx",), True, ()),
        ),
        # The file's own syntax never comes alive where Lean is asked.
        (
            'syntax (name := mine) "#print" : command\nsyntax "axioms" : term\n'
            "open Bool List Nat\nnamespace Core\naxiom cheat : False\n"
            "theorem t (p : Prop) : p := cheat.elim",
            Findings(("Core.cheat",), False, ("Core.cheat",)),
        ),
    ],
)
async def test_candidates(auditor: Auditor, code: str, expected: Findings) -> None:
    assert await auditor(PRELUDE + code) == expected


@pytest.mark.slow
async def test_what_is_allowed_by_whom(auditor: Auditor) -> None:
    code = f"{PRELUDE}axiom mine : False\ntheorem t (p : Prop) : p := mine.elim"
    assert (await auditor(code, allowed=["mine"])).forbidden == ()
    # The environment speaks for what comes from imports only.
    assert (await auditor(code, environment_allowed=["mine"])).forbidden == ("mine",)
    code = f"{PRELUDE}theorem t (p q : Prop) (h : p ↔ q) : p = q := propext h"
    assert (await auditor(code, environment_allowed=[])).forbidden == ("propext",)
    assert (await auditor(code, environment_allowed=[], allowed=["propext"])).forbidden == ()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("theorem t (p : Prop) (h : p) : p := h", CLEAN),
        ("axiom propext (p : Prop) : p", Findings(("propext",), False, ("propext",))),
        # Whatever it means to its author, it is an axiom of the file's own.
        ("axiom sorryAx (p : Prop) : p", Findings(("sorryAx",), True, ("sorryAx",))),
        ("theorem sorryAx (p : Prop) (h : p) : p := h", CLEAN),
    ],
)
async def test_files_without_imports(auditor: Auditor, code: str, expected: Findings) -> None:
    assert await auditor(f"prelude\n{code}\n") == expected
    assert auditor.asked == []


async def test_an_example_is_audited_under_a_name_of_ours(auditor: Auditor) -> None:
    code = f"{PRELUDE}example : False := sorryAx False false\n"
    assert await auditor(code) == CLEAN
    named = name_examples(code, "salt")
    assert named is not None
    assert await auditor(named) == Findings(("sorryAx",), True, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "axioms"),
    [
        ("theorem t : And False True := «a b».«theorem» _", {"assumed"}),
        ('theorem t : And False True := «q"\\».«#x» _', {"«we ird».«axiom, [b]»"}),
        ("theorem t : False := longer.left", {"assumed", "sorryAx", "«we ird».«axiom, [b]»"}),
        ("theorem t : Eq alias Nat.zero := rfl", set()),
        ("theorem t : True := truth", set()),
        ("theorem t : False := Inner.alias", {"assumed"}),
        # Their inferred types hold private names, which no source can speak.
        ("theorem t : True := True.intro\ndef d := honest", set()),
        ("def d := @given", {"sorryAx"}),
    ],
)
async def test_imported_constants(auditor: Auditor, code: str, axioms: set[str]) -> None:
    findings = await auditor(f"prelude\nimport Library\nset_option linter.all false\n{code}\n")
    forbidden = tuple(sorted(axioms - {"sorryAx"}))
    leads = ("t", forbidden[0]) if forbidden else ()
    assert findings == Findings(tuple(sorted(axioms)), "sorryAx" in axioms, forbidden, leads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axioms"),
    [
        ("viaPublic", ("assumed",)),
        ("viaSecret", ("_private.Base.0.secret",)),
        ("secret", ("_private.Base.0.secret",)),
        ("assumed", ("assumed",)),
    ],
)
async def test_files_of_the_module_system(
    auditor: Auditor, name: str, axioms: tuple[str, ...]
) -> None:
    header = "module\nprelude\npublic import Base\nimport all Base\n"
    code = f"{header}theorem t (p : Prop) : p := {name} p\n"
    assert await auditor(code) == Findings(axioms, False, axioms, ("t", axioms[0]))
    assert await auditor(f"{header}theorem t (p : Prop) (h : p) : p := honest p h\n") == CLEAN


async def test_answers_are_remembered(auditor: Auditor) -> None:
    code = f"{PRELUDE}theorem t (p q : Prop) (h : p ↔ q) : p = q := propext h\n"
    imported = auditor.imported(code)
    first = await auditor(code, imported=imported)
    assert len(auditor.asked) == 1
    assert await auditor(code, imported=imported) == first
    assert len(auditor.asked) == 1
    await auditor(f"{code}theorem u : True := True.intro\n", imported=imported)
    assert auditor.asked[1].splitlines()[2:] == [
        "#print axioms _root_.«True»",
        "#print axioms _root_.«True».«intro»",
    ] or auditor.asked[1].splitlines()[2:] == [
        "#print axioms _root_.«True».«intro»",
        "#print axioms _root_.«True»",
    ]


async def test_overlapping_audits_agree(auditor: Auditor) -> None:
    path = auditor.lean.compile(
        f"{PRELUDE}theorem t (p : Prop) : p := sorry\ndef n := Nat.zero\n", folder=auditor.folder
    )
    found = surveyed(path)
    imported = auditor.imported(PRELUDE)
    together = await asyncio.gather(
        *(audit(found, allowed=(), environment_allowed=(), imported=imported) for _ in range(3))
    )
    assert together == 3 * [Findings(("sorryAx",), True, ())]


# What is made up, since no Lean at hand makes it


def module(*references: Name) -> Survey:
    return Survey(frozenset(), ((("t",), frozenset(references)),), frozenset(references))


async def audit_module(made: Survey, imported: ImportedAxioms) -> Findings:
    return await audit(made, allowed=(), environment_allowed=(), imported=imported)


async def test_unknown_constants_are_an_error(auditor: Auditor) -> None:
    imported = auditor.imported(PRELUDE)
    # `true` is an alias that Core exports, and no constant.
    for name in [("nowhere",), ("true",), ("_private", "Core", 0, "x"), ("x", 7), ()]:
        with pytest.raises(AuditError):
            await audit_module(module(name), imported)
    assert await audit_module(module(("True",)), imported) == CLEAN


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "not JSON",
        '{"data": "\'a\' does not depend on any axioms"}',
        '{"severity": "information", "data": "hello", "pos": {"line": 3, "column": 0}}',
        '{"severity": "information", "data": "\'a\' does not depend on any axioms",'
        ' "pos": {"line": 2, "column": 0}}',
        '{"severity": "error", "data": "no such module", "pos": {"line": 2, "column": 0}}',
    ],
)
async def test_an_answer_that_answers_nothing_is_an_error(answer: str) -> None:
    async def ask(source: str) -> str:
        assert source.splitlines()[2:] == ["#print axioms _root_.«a»"]
        return answer

    imported = ImportedAxioms(split_header(PRELUDE), ask, lambda _: None)
    with pytest.raises(AuditError):
        await audit_module(module(("a",)), imported)


async def test_unsafe_constants_do_not_hide_what_a_safe_one_rests_on() -> None:
    async def ask(source: str) -> str:
        text = "'a' depends on axioms: [cheat,\n sorryAx]"
        return json.dumps({"severity": "information", "data": text, "pos": {"line": 3}})

    imported = ImportedAxioms(split_header(PRELUDE), ask, lambda _: None)
    only_unsafe = Survey(frozenset(), (), frozenset({("a",)}))
    assert await audit_module(only_unsafe, imported) == Findings(("sorryAx",), True, ())
    references = {("s",): {("t",)}, ("t",): {("a",)}}
    assert reachable([("s",)], references) == {("s",), ("t",), ("a",)}
    assert await audit_module(module(("a",)), imported) == Findings(
        ("cheat", "sorryAx"), True, ("cheat",), ("t", "cheat")
    )


async def test_hidden_names_are_found_behind_imports(tmp_path: Path) -> None:
    """``x.7`` says nowhere where it is from; it is in a module that Core imports."""
    deep = Image()
    hidden, other = deep.name("x", 7), deep.name("y", 8)
    deep.write(
        tmp_path / "Deep.olean",
        {
            hidden: deep.axiom(hidden, deep.app(deep.const(other), deep.const(deep.name("b")))),
            other: deep.axiom(other, deep.const(hidden)),
        },
    )
    Image().write(tmp_path / "Core.olean", {}, imports=("Absent", "Deep", "Core"))

    async def ask(source: str) -> str:
        assert source.splitlines()[2:] == ["#print axioms _root_.«b»"]
        text = "'b' depends on axioms: [c]"
        return json.dumps({"severity": "information", "data": text, "pos": {"line": 3}})

    def find_olean(name: str) -> Path | None:
        path = tmp_path / f"{name}.olean"
        return path if path.exists() else None

    imported = ImportedAxioms(split_header(PRELUDE), ask, find_olean)
    axioms = ("c", "x.7", "y.8")
    assert await audit_module(module(("x", 7)), imported) == Findings(
        axioms, False, axioms, ("t", "c")
    )


@pytest.mark.slow
async def test_hidden_theorems_of_several_modules_do_not_prove_each_other(
    core: Environment, tmp_path: Path
) -> None:
    """Their names have a tab, so that Lean cannot be asked about them."""
    lean = Lean(core, tmp_path)
    texts = {
        "A": "theorem «a\t» : False := sorry",
        "B": "theorem «b\t» : False := sorry",
        "OfA": "import A\ntheorem «b\t» : False := «a\t»",
        "OfB": "import B\ntheorem «a\t» : False := «b\t»",
    }
    for name, text in texts.items():
        lean.compile(f"prelude\nimport Core\n{text}\n", name=name)
    (tmp_path / "candidate").mkdir()
    auditor = Auditor(lean, tmp_path / "candidate")
    header = "prelude\nimport Core\n"
    with pytest.raises(AuditError, match=r"the imports prove «.\t» by itself"):
        await auditor(f"{header}import OfA\nimport OfB\ntheorem t : False := «a\t»\n")
    found = await auditor(f"{header}import OfA\ntheorem t : False := «b\t»\n")
    assert found.incomplete


def test_print_axioms_source() -> None:
    header = split_header("module\npublic import A.«b c» meta import D\ntheorem t")
    names: list[Name] = [("x", "y z"), ("theorem",)]
    assert print_axioms_source(header, names) == (
        "import A.«b c»\nimport D\n#print axioms _root_.«x».«y z»\n#print axioms _root_.«theorem»\n"
    )
    assert print_axioms_source(split_header("prelude"), []) == "prelude\n"
