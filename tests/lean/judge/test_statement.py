"""The comparison of two files: equal if they mean the same, whatever Lean calls it.

A second reader of the format says what a theorem means: a tree in which each constant that Lean has
made stands for its own tree.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.lean.images import Image as Writer
from support.lean.images import Lean
from support.lean.mutations import MUTATIONS, Sample, mutated
from support.lean.second_reader import SecondReader, Tree, Trees

from leanq.lean.environment import Environment
from leanq.lean.judge.statement import compare, own_constants, what_is_open
from leanq.lean.run.image import Image, Raw
from leanq.lean.run.layouts import Damaged, shape
from leanq.lean.run.olean import places

OWN = "prelude\nimport Core\n"
SMALL = "structure Small where\n  n : Nat\n  h : ¬ n = 5\n"
TARGET = f"""{OWN}{SMALL}
opaque hidden : Nat := 7
def small : Small := ⟨3, by decide⟩
def twice (n : Nat) : Nat := match n with | 0 => 0 | Nat.succ m => Nat.succ (Nat.succ (twice m))
def word (b : Bool) : String := match b with | true => "yes" | false => "no"
private def secret.{{u}} (α : Sort u) (a : α) : α := a
theorem t.{{u, v}} (α : Sort u) (β : Sort v) (a : α) (n : Nat) :
    (match n with | 0 => small.n = 3 | Nat.succ m => secret Nat (twice m) = hidden)
      → word true = "yes" → (PProd α β → a = a) := fun _ _ _ => rfl
"""
# Whatever Lean makes for the target's text it has made for these before.
HELPERS = """
def helperSmall : Small := ⟨3, by decide⟩
def helperSmaller : Small := ⟨2, by decide⟩
theorem helper (n : Nat) : (match n with | 0 => True | Nat.succ m => m = m) :=
  match n with | 0 => True.intro | Nat.succ _ => rfl
theorem helperBool (b : Bool) : (match b with | true => True | false => True) :=
  match b with | true => True.intro | false => True.intro
"""
# Those that count by their names; in the second reader's spelling.
NAMED = {"t", "small", "twice", "word", "Small.n", "Small.h", "helperSmall", "helperSmaller"}
NAMED |= {"helper", "helperBool"}


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


@pytest.fixture(scope="module")
def target(lean: Lean) -> bytes:
    return lean.compile(TARGET, name="Target").read_bytes()


@pytest.fixture(scope="module")
def sample(lean: Lean) -> Sample:
    """A candidate whose matchers and proofs bear other names than the target's."""
    text = TARGET.replace("opaque", f"{HELPERS}opaque")
    return Sample.of("candidate", OWN, ("no", "ending"), lean.compile(text).read_bytes())


def differences(target: bytes, candidate: bytes) -> list[str]:
    """The rules by which they differ; one word for files that are none of Lean's."""
    try:
        return [each.rule for each in compare(Image([target]), Image([candidate])).differences]
    except (Damaged, IndexError):
        return ["damaged"]


class Reader(SecondReader):
    """One that does not read proofs."""

    def _part(self, kind: str, number: int, address: int) -> Tree:
        return None if kind == "theorem" else super()._part(kind, number, address)


class Meaning:
    """What the second reader takes a theorem of one file to mean."""

    def __init__(self, data: bytes, trees: Trees) -> None:
        self._reader, self._make = Reader(data, trees), trees.make
        self._addresses = self._reader.addresses()
        self._told: dict[int, tuple[Tree, Tree]] = {}
        self._names: set[Tree] = set()

    def of(self, theorem: Tree) -> Mapping[Tree, Any]:
        """Its type, and all constants behind it that count by their names."""
        found: dict[Tree, Any] = {}
        self._names = {theorem}
        while fresh := self._names & self._addresses.keys() - found.keys():
            for name in fresh:
                found[name] = self._constant(name)
        return found

    def _constant(self, name: Tree) -> Any:
        kind, own, levels, type_, *rest, scalars = self._reader.constant(self._addresses[name])
        assert own == name
        if kind in ("definition", "opaque"):
            rest = [self._tell(rest[0])]
        elif kind == "inductive":
            self._names |= {*rest[2], *rest[3]}
        elif kind == "constructor":
            self._names.add(rest[0])
        elif kind == "recursor":
            self._names |= {*rest[0]}
            rest[5] = [(owner, fields, self._tell(right)) for owner, fields, right in rest[5]]
        return kind, levels, self._tell(type_), rest, scalars

    def _tell(self, tree: Tree) -> Tree:
        """An expression with what Lean has made put in place of its names."""
        if id(tree) not in self._told:
            self._told[id(tree)] = tree, self._changed(*tree)
        return self._told[id(tree)][1]

    def _changed(self, what: str, says: Tree, parts: Tree) -> Tree:
        if what == "const":
            if (made := self._made(says[0])) is not None:
                return self._make("made", (), made, *parts)
            self._names.add(says[0])
        elif what == "proj":
            self._names.add(says[0])
        return self._make(what, says, *map(self._tell, parts))

    def _made(self, name: Tree) -> Tree | None:
        """What Lean has made under this name, if that is no name of the text's."""
        if name not in self._addresses or ".".join(map(str, name)) in NAMED:
            return None
        kind, _, levels, type_, *rest, scalars = self._reader.constant(self._addresses[name])
        if kind == "theorem":
            return self._make(kind, (levels,), self._tell(type_))
        if kind == "definition" and scalars == b"\1":
            return self._make(kind, (levels,), self._tell(type_), self._tell(rest[0]))
        return None


def meaning(data: bytes, trees: Trees) -> Any:
    try:
        return Meaning(data, trees).of(("t",))
    except (AssertionError, KeyError, IndexError, ValueError, RecursionError, struct.error):
        return None  # no file of Lean's


def test_what_lean_makes_may_have_other_names(target: bytes, sample: Sample) -> None:
    ours, theirs = Image([target]).constants(), Image([sample.data]).constants()
    assert ("small", "_proof_1") in ours
    assert ("small", "_proof_1") not in theirs
    assert differences(target, sample.data) == []
    assert differences(sample.data, sample.data) == []
    trees = Trees()
    assert meaning(target, trees) == meaning(sample.data, trees) is not None


CHANGES: Mapping[str, tuple[str, str]] = {
    "a matcher's pattern": ("| 0 => small.n = 3 | Nat.succ m", "| 1 => small.n = 3 | m"),
    "what a branch says": ("| 0 => small.n = 3", "| 0 => small.n = 4"),
    "a definition": ("⟨3, by decide⟩\ndef twice", "⟨2, by decide⟩\ndef twice"),
    "the body of a recursion": ("0 | Nat.succ m => Nat.succ (", "0 | Nat.succ m => ("),
    "a text": ('"yes" | false', '"yes!" | false'),
    "a private definition": ("a : α) : α := a", "a : α) : α := id a"),
    "an opaque value": ("opaque hidden : Nat := 7", "opaque hidden : Nat := 8"),
    "a field": ("h : ¬ n = 5", "h : ¬ n = 6"),
    "levels": ("(PProd α β", "(PProd β α"),
    "the order of levels": ("t.{u, v}", "t.{v, u}"),
    "the number of levels": ("t.{u, v} (α : Sort u) (β : Sort v)", "t.{u} (α β : Sort u)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_another_text_is_told_apart(lean: Lean, target: bytes, change: str) -> None:
    old, new = CHANGES[change]
    assert old in TARGET
    text = TARGET.replace("opaque", f"{HELPERS}opaque").replace(old, new)
    other = lean.compile(text, name="Other").read_bytes()
    assert differences(target, other)
    assert differences(other, target)


@pytest.mark.slow
def test_levels_may_have_other_names(lean: Lean, target: bytes) -> None:
    text = TARGET.replace("t.{u, v}", "t.{a, b}").replace(
        "Sort u) (β : Sort v", "Sort a) (β : Sort b"
    )
    assert differences(target, lean.compile(text, name="Levels").read_bytes()) == []


@pytest.mark.slow
def test_a_private_name_may_have_another_module(lean: Lean, target: bytes) -> None:
    """As where the target is a module of the environment."""
    text = TARGET.replace("private def secret", "private def mine").replace("secret", "mine")
    assert differences(target, lean.compile(text, name="Mine").read_bytes()) == []
    text = text.replace("a : α) : α := a", "a : α) : α := id a")
    assert differences(target, lean.compile(text, name="Mine").read_bytes()) == ["type_differs"]


def put(data: bytes, at: int, word: int) -> bytes:
    return data[: 8 * at] + struct.pack("<Q", word) + data[8 * at + 8 :]


def changes_of(image: Image, raw: Raw, others: list[Raw]) -> list[tuple[int, int]]:
    """Other types, values, levels and kinds for a constant: where to put which word."""
    words, found = image.words, []
    for other in others:
        found += [(raw.head + 3, other.type_), (raw.head + 2, words[other.head + 2])]
        if raw.body is not None and other.body is not None:
            found.append((raw.value + 2, other.body))
    fields = words[raw.value] >> 48 & 0xFF
    if raw.kind in ("definition", "opaque"):
        scalars = raw.value + 1 + fields
        found += [(scalars, words[scalars] ^ bit) for bit in (1, 2)]
    return found


@pytest.mark.slow
def test_each_change_to_a_constant_that_is_reached_is_seen(target: bytes, sample: Sample) -> None:
    image, trees, rng = Image([sample.data]), Trees(), random.Random(5)
    constants = image.constants()
    expected = meaning(target, trees)
    seen = 0
    for raw in constants.values():
        for at, word in changes_of(image, raw, rng.sample(list(constants.values()), 6)):
            if image.words[at] == word:
                continue
            changed = put(sample.data, at, word)
            if meaning(changed, trees) != expected:
                seen += 1
                assert differences(target, changed), (raw.name, at - raw.head)
    assert seen > 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", MUTATIONS)
def test_what_is_equal_means_the_same(target: bytes, sample: Sample, kind: str) -> None:
    rng, trees = random.Random(f"{kind} 1"), Trees()
    expected = meaning(target, trees)
    for _ in range(150):
        changed = mutated(sample, kind, rng)
        if not differences(target, changed):
            assert meaning(changed, trees) == expected


@pytest.mark.slow
def test_what_a_target_leaves_open(lean: Lean) -> None:
    text = f"""{OWN}
noncomputable def one : Nat := sorry
def two (n : Nat) : Nat := match n with | 0 => 0 | Nat.succ m => Nat.succ (two m)
noncomputable def three (n : Nat) : Nat := match n with | 0 => 0 | Nat.succ m => sorry
theorem four : True := sorry
"""

    def told(text: str) -> tuple[bool, list[str]]:
        has_theorem, names = what_is_open(Image([lean.compile(text, name="Open").read_bytes()]))
        return has_theorem, [".".join(map(str, name)) for name in names]

    assert told(text) == (True, ["one", "three"])
    assert told(text.replace("theorem four : True", "def four : Nat")) == (
        False,
        ["one", "three", "four"],
    )


@pytest.mark.parametrize(
    ("rule", "target", "candidate"),
    [
        (
            "levels_differ",
            "theorem t.{u} (α : Sort u) (a : α) : True := sorry",
            "theorem t.{u, v} (α : Sort u) (a : α) (β : Sort v) : True := True.intro",
        ),
        ("safety_differs", "def answer : Nat := sorry", "unsafe def answer : Nat := 1"),
        ("target_lacks", "def other : Nat := 1", "def other : Nat := 1"),
        (
            "overridden",
            "def answer : Nat := sorry",
            "def fast : Nat := 1\n@[implemented_by fast] def answer : Nat := 2",
        ),
    ],
)
def test_the_rule_says_in_what_a_candidate_differs(
    lean: Lean, rule: str, target: str, candidate: str
) -> None:
    files = [
        Image([lean.compile(f"{OWN}{text}", name="Rule").read_bytes()])
        for text in (target, candidate)
    ]
    found = compare(*files, holes=["answer"]).differences
    assert rule in {each.rule for each in found}


@pytest.mark.parametrize("way", ["one", "helper", "other"])
def test_what_fills_a_hole_leads_to_no_theorem_of_the_target(lean: Lean, way: str) -> None:
    target = f"""{OWN}theorem one : True := sorry
def answer : Prop := sorry
theorem two : answer := sorry
"""
    candidate = f"""{OWN}theorem one : True := True.intro
theorem helper : True := one
theorem other : True := helper
def answer : Prop := (fun _ : True => True) {way}
theorem two : answer := True.intro
"""
    files = [
        Image([lean.compile(text, name="Hole").read_bytes()])
        for text in (target, candidate, candidate.replace(f") {way}", ") True.intro"))
    ]
    said = [
        [each.rule for each in compare(files[0], other, holes=["answer"]).differences]
        for other in files[1:]
    ]
    assert said == [["hole_uses_theorem"], []]


def test_what_is_open_in_a_target_is_told_in_few_steps(tmp_path: Path) -> None:
    writer = Writer()
    value = writer.const(writer.name("sorryAx"))
    for _ in range(8000):
        value = writer.app(value, value)
    type_, constants = writer.object(3, 1, scalars=bytes(8)), {}
    for number in range(300):
        name = writer.name(f"d{number}")
        head = writer.object(0, name, 1, type_)
        definition = writer.object(0, head, value, 1, 1, scalars=b"\1" + bytes(7))
        constants[name] = writer.object(1, definition)
    data = writer.write(tmp_path / "Large.olean", constants).read_bytes()
    with pytest.raises(Damaged, match="too long"):
        what_is_open(Image([data]))


@pytest.mark.parametrize("what", ["the end", "the place of the name"])
def test_a_damaged_range_hides_no_declaration(target: bytes, what: str) -> None:
    image, data = Image([target]), bytearray(target)
    for address in image.array(image.entries()["Lean", "declRangeExt"]):
        pair = image.object(address, shape(0, 2))
        ranges = image.object(image.words[pair + 2], shape(0, 2))
        whole = image.object(image.words[ranges + 1], shape(0, 4))
        struct.pack_into("<Q", data, 8 * (whole + 3 if what == "the end" else ranges + 2), 8)
    damaged = Image([bytes(data)])
    before, after = places(image), places(damaged)
    assert before != after
    assert before.keys() == after.keys()
    assert all(after[name][0][:2] == whole[:2] for name, (whole, _) in before.items())
    own, constants = own_constants(image, image.constants()), damaged.constants()
    assert own_constants(damaged, constants) == own
