"""The reader of compiled files: what real Lean writes, older layouts, and whatever is damaged."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lean.images import Image, Lean

from leanq.errors import AuditError, SandboxError
from leanq.lean.environment import Environment
from leanq.lean.run import image as image_module
from leanq.lean.run.image import Import, Name
from leanq.lean.run.olean import Constant, Module, display, read_bytes, read_module


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


def named(module: Module) -> dict[str, Constant]:
    return {display(constant.name): constant for constant in module.constants}


def shown(names: frozenset[Name]) -> set[str]:
    return set(map(display, names))


KINDS = """prelude
import Core
set_option genCtorIdx false
universe u v
namespace Foo
private theorem priv (p : Prop) (h : p) : p := h
theorem «weird name».«x.y» (p : Prop) (h : p) : p := priv p h
structure S (α : Type u) where
  a : α
  b : α
mutual
inductive Ev : Nat → Prop where
  | zero : Ev Nat.zero
  | succ : Od n → Ev (Nat.succ n)
inductive Od : Nat → Prop where
  | succ : Ev n → Od (Nat.succ n)
end
opaque hidden : Nat := Nat.zero
unsafe opaque hiddenToo : Nat := Nat.zero
unsafe def loop : Nat := loop
unsafe axiom anything : False
unsafe inductive Bad where | mk : (Bad → Nat) → Bad
axiom cheat : False
def projected (s : S Nat) : Nat := s.1
def bound : Nat := let x := Nat.zero; x
def big : Nat := 123456789012345678901234567890
def text : String := "héllo"
theorem poly.{w} (α : Sort w) (a : α) : Eq a a := rfl
end Foo
"""


@pytest.mark.slow
def test_reads_every_kind_of_constant(lean: Lean) -> None:
    module = read_module(lean.compile(KINDS, name="Kinds"))
    constants = named(module)
    assert module.imports == (Import(("Core",)),)
    expected = {
        "_private.Kinds.0.Foo.priv": ("theorem", False, set()),
        "Foo.«weird name».«x.y»": ("theorem", False, {"_private.Kinds.0.Foo.priv"}),
        "Foo.S": ("inductive", False, {"Foo.S.mk"}),
        "Foo.S.mk": ("constructor", False, {"Foo.S"}),
        "Foo.S.rec": ("recursor", False, {"Foo.S", "Foo.S.mk"}),
        "Foo.S.a": ("definition", False, {"Foo.S"}),
        "Foo.Ev": ("inductive", False, {"Nat", "Foo.Ev.zero", "Foo.Ev.succ"}),
        "Foo.Od.succ": ("constructor", False, {"Nat", "Nat.succ", "Foo.Ev", "Foo.Od"}),
        "Foo.hidden": ("opaque", False, {"Nat", "Nat.zero"}),
        "Foo.hiddenToo": ("opaque", True, {"Nat", "Nat.zero"}),
        "Foo.loop": ("definition", True, {"Nat", "Foo.loop"}),
        "Foo.anything": ("axiom", True, {"False"}),
        "Foo.Bad": ("inductive", True, {"Foo.Bad.mk"}),
        "Foo.Bad.mk": ("constructor", True, {"Nat", "Foo.Bad"}),
        "Foo.Bad.rec": ("recursor", True, {"Nat", "Foo.Bad", "Foo.Bad.mk"}),
        "Foo.cheat": ("axiom", False, {"False"}),
        "Foo.projected": ("definition", False, {"Nat", "Foo.S", "Foo.S.a"}),
        "Foo.bound": ("definition", False, {"Nat", "Nat.zero"}),
        "Foo.big": ("definition", False, {"Nat", "OfNat.ofNat", "instOfNatNat"}),
        "Foo.text": ("definition", False, {"String"}),
        "Foo.poly": ("theorem", False, {"Eq", "rfl"}),
    }
    read = {
        name: (constants[name].kind, constants[name].unsafe, shown(constants[name].references))
        for name in expected
    }
    assert read == expected


@pytest.mark.slow
def test_reads_all_of_core(lean: Lean) -> None:
    path = lean.find_olean("Core")
    assert path is not None
    module = read_module(path)
    constants = named(module)
    assert module.imports == ()
    assert {
        name for name, each in constants.items() if each.kind == "axiom" and not each.unsafe
    } == {
        "lcErased",
        "sorryAx",
        "propext",
        "Quot.sound",
        "Classical.choice",
    }
    unknown = {name for each in module.constants for name in each.references} - {
        each.name for each in module.constants
    }
    assert not unknown


def test_reads_quotients(lean: Lean) -> None:
    source = "prelude\ninductive Eq : α → α → Prop where | refl (a : α) : Eq a a\ninit_quot\n"
    constants = named(read_module(lean.compile(source, name="Quotients")))
    assert {name for name, each in constants.items() if each.kind == "quotient"} == {
        "Quot",
        "Quot.mk",
        "Quot.lift",
        "Quot.ind",
    }


def test_only_reads_the_constants_asked_for(lean: Lean) -> None:
    path = lean.compile("prelude\naxiom a : Prop\naxiom b : a\n")
    assert [each.name for each in read_module(path, only={("b",)}).constants] == [("b",)]


# The module system


def test_the_private_part_of_a_module_is_the_truth(lean: Lean) -> None:
    lean.compile(
        "module\nprelude\npublic theorem a (p : Prop) (h : p) : p := h\n"
        "theorem b (p : Prop) (h : p) : p := h\n",
        name="Base",
    )
    path = lean.compile(
        "module\nprelude\npublic import Base\nmeta import Base\nimport all Base\n"
        "public theorem c (p : Prop) (h : p) : p := a p (b p h)\n",
        name="Above",
    )
    module = read_module(path)
    assert module.imports == (
        Import(("Base",)),
        Import(("Base",), is_exported=False, is_meta=True),
        Import(("Base",), is_exported=False, is_all=True),
    )
    (constant,) = module.constants
    assert (constant.kind, shown(constant.references)) == ("theorem", {"a", "_private.Base.0.b"})


@pytest.mark.parametrize("part", [".server", ".private"])
def test_a_module_without_all_its_parts_is_refused(lean: Lean, tmp_path: Path, part: str) -> None:
    source = "module\nprelude\npublic theorem a (p : Prop) (h : p) : p := h\n"
    path = lean.compile(source, folder=tmp_path)
    path.with_name(path.name + part).unlink()
    with pytest.raises(AuditError, match=part):
        read_module(path)


def test_the_parts_of_two_modules_are_not_mixed(lean: Lean, tmp_path: Path) -> None:
    source = "module\nprelude\npublic theorem a (p : Prop) (h : p) : p := h\n"
    path = lean.compile(source, folder=tmp_path)
    other = lean.compile(source, name="Other", folder=tmp_path)
    other.with_name("Other.olean.private").rename(tmp_path / "Candidate.olean.private")
    with pytest.raises(AuditError, match="do not belong together"):
        read_module(path)


@pytest.mark.parametrize("part", ["", ".server", ".private"])
def test_a_part_that_begins_within_a_word_is_refused(lean: Lean, tmp_path: Path, part: str) -> None:
    source = "module\nprelude\npublic theorem a (p : Prop) (h : p) : p := h\n"
    path = lean.compile(source, folder=tmp_path)
    file = path.with_name(path.name + part)
    data = bytearray(file.read_bytes())
    data[80] += 3  # the base address
    file.write_bytes(data)
    with pytest.raises(AuditError, match="multiple of eight"):
        read_module(path)


# Layouts of other versions, and images that Lean never writes


@pytest.mark.parametrize("magic", [Image.V1, Image.V2])
@pytest.mark.parametrize("scalars", [b"", bytes(8)])
def test_reads_older_layouts(tmp_path: Path, magic: bytes, scalars: bytes) -> None:
    image = Image(magic)
    name = image.name("a", "b")
    axiom = image.axiom(name, image.const(image.name("False")))
    path = image.write(tmp_path / "old.olean", {name: axiom}, scalars=scalars)
    (constant,) = read_module(path).constants
    assert constant == Constant(("a", "b"), "axiom", False, frozenset({("False",)}))


def test_shared_parts_are_visited_once(tmp_path: Path) -> None:
    image = Image()
    term = image.const(image.name("False"))
    for _ in range(200):
        term = image.app(term, term)
    name = image.name("a")
    path = image.write(tmp_path / "shared.olean", {name: image.axiom(name, term)})
    assert read_module(path).constants[0].references == {("False",)}


def test_work_over_all_constants_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image()
    term = image.const(image.name("False"))
    for _ in range(100):
        term = image.app(term, term)
    names = [image.name(f"a{number}") for number in range(20)]
    path = image.write(tmp_path / "x.olean", {name: image.axiom(name, term) for name in names})
    assert len(read_module(path).constants) == 20
    monkeypatch.setattr(image_module, "_MAX_STEPS", 1000)
    with pytest.raises(AuditError, match="too long"):
        read_module(path)


def test_cycles_end(tmp_path: Path) -> None:
    image = Image()
    term = image.app(image.const(image.name("False")), 0)
    image.data[-16:-8] = struct.pack("<Q", term)
    name = image.name("a")
    path = image.write(tmp_path / "cycle.olean", {name: image.axiom(name, term)})
    assert read_module(path).constants[0].references == {("False",)}

    endless = Image()
    name = endless.name("a")
    here = endless.data.rindex(struct.pack("<Q", 1))
    endless.data[here : here + 8] = struct.pack("<Q", name)
    path = endless.write(tmp_path / "endless.olean", {name: endless.axiom(name, name)})
    with pytest.raises(AuditError, match="endless name"):
        read_module(path)


def test_refuses_constants_that_are_not_what_the_file_says(tmp_path: Path) -> None:
    image = Image()
    name, other = image.name("a"), image.name("b")
    axiom = image.axiom(name, image.const(image.name("False")))
    image.write(tmp_path / "misnamed.olean", {other: axiom})
    twice = Image()
    same, again = twice.name("a"), twice.name("a")
    term = twice.const(twice.name("False"))
    both = {same: twice.axiom(same, term), again: twice.axiom(again, term)}
    twice.write(tmp_path / "twice.olean", both)
    for file in ("misnamed", "twice"):
        with pytest.raises(AuditError, match="constants are not the ones"):
            read_module(tmp_path / f"{file}.olean")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "does not begin"),
        (b"olean", "does not begin"),
        (b"theorem x : True := trivial", "does not begin"),
        (b"olean\x03" + bytes(200), "version 3"),
        (Image.V2, "cut off"),
        (Image.V2 + bytes(8), "cut off"),
        (Image.V2 + bytes(16), "its `ModuleData` has 1 fields"),
        (Image.V2 + bytes(8) + b"\xf0" * 64, "leads nowhere"),
    ],
)
def test_refuses_what_is_no_olean(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "bad.olean"
    path.write_bytes(data)
    with pytest.raises(AuditError, match=why):
        read_module(path)


def test_opens_only_regular_files_of_a_decent_size(lean: Lean, tmp_path: Path) -> None:
    real = lean.compile("prelude\naxiom a : Prop\n", folder=tmp_path)
    link = tmp_path / "link.olean"
    link.symlink_to(real)
    pipe = tmp_path / "pipe.olean"
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path, tmp_path / "absent.olean"):
        with pytest.raises(AuditError):
            read_module(path)
    size = real.stat().st_size
    assert read_module(real, limit_bytes=size).constants
    with pytest.raises(AuditError, match="larger than"):
        read_module(real, limit_bytes=size - 1)


@pytest.fixture(scope="module")
def files(lean: Lean) -> list[bytes]:
    small = lean.compile("prelude\nimport Core\ntheorem t (p : Prop) (h : p) : p := h\n")
    large = lean.compile(KINDS, name="Fuzzed")
    return [small.read_bytes(), large.read_bytes()]


@pytest.mark.slow
@settings(max_examples=400)
@given(data=st.data())
def test_damage_gives_a_module_or_an_audit_error(
    files: list[bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(data.draw(st.sampled_from(files)))
    offsets = st.integers(0, len(damaged) - 1)
    if data.draw(st.booleans()):
        del damaged[data.draw(offsets) :]
    for offset, value in data.draw(st.lists(st.tuples(offsets, st.integers(0, 255)), max_size=8)):
        damaged[offset : offset + 1] = bytes([value])
    # Whole words are where pointers go astray.
    for offset, to in data.draw(st.lists(st.tuples(offsets, offsets), max_size=8)):
        base = damaged[80:88]
        if len(base) == 8:
            address = int.from_bytes(base, "little") + to // 8 * 8
            damaged[offset // 8 * 8 : offset // 8 * 8 + 8] = (address % 2**64).to_bytes(8, "little")
    path = tmp_path_factory.getbasetemp() / "damaged.olean"
    path.write_bytes(damaged)
    with contextlib.suppress(AuditError):
        assert isinstance(read_module(path), Module)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ((), "[anonymous]"),
        (("Nat", "add"), "Nat.add"),
        (("h'", "α₁", "_x!?"), "h'.α₁._x!?"),
        (("a b",), "«a b»"),
        (("a.b", "c"), "«a.b».c"),
        (("1",), "«1»"),
        (("",), "«»"),
        (("_private", "A", 0, "x"), "_private.A.0.x"),
        (("a»b",), "«a»»b»"),
        (("a», «b",), "«a»», «b»"),
        (("λx",), "«λx»"),
    ],
)
def test_display(name: Name, text: str) -> None:
    assert display(name) == text


@given(*(2 * [st.lists(st.text("a.«»0", max_size=4) | st.integers(0, 9), max_size=3)]))
def test_different_names_never_look_the_same(one: list[str | int], two: list[str | int]) -> None:
    assert (display(tuple(one)) == display(tuple(two))) == (one == two)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "it is no regular file"),
        (lambda path: path.symlink_to("/etc/passwd"), "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_refused_and_keeps_no_descriptor(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    path = tmp_path / "Candidate.olean"
    make(path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(AuditError, match=rf"Candidate\.olean cannot be read: {why}"):
        read_bytes(path, 1)
    assert os.listdir("/proc/self/fd") == before


def test_a_machine_without_descriptors_says_nothing_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "Fine.olean"
    path.write_bytes(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(SandboxError, match=r"Fine\.olean cannot be read: Too many open files"):
            read_bytes(path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert read_bytes(path, 1) == b"x"
