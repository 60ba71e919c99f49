"""Reads the memory image in an ``.olean`` file as data, without trusting it.

:mod:`leanq.lean.run.layouts` has the layouts that versions of Lean write. A header names the
address for mapping the image. Behind it lie Lean objects, little-endian and aligned to eight bytes,
which point to each other by absolute addresses::

    header       "olean", version, … , base address of the file
    object       word 0: reference count (32 bits), size in bytes (16), fields (8), tag (8)
      constructor  tag = its number, then the pointers to its fields, then its scalars
      array        tag 246, size, capacity, pointers
      string       tag 249, size with the NUL, capacity, length, UTF-8
      number       tag 250, allocated and used limbs (32 bits each), pointer to the limbs
    pointer      to an object, or a small number n as 2n + 1

The root is a `Lean.ModuleData`. A file of the module system comes in three parts that lie behind
each other in memory; only the last, private one has the proofs.

A hostile program may have made the bytes, so everything is checked before it is believed. No walk
recurses or follows more than `_MAX_STEPS` pointers, and memory stays within a small multiple of the
file's size. Lean writes an object behind everything that it points to. So pointers that lead ahead
are refused, and no circle remains. Any fault raises a `Damaged` or an `IndexError`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leanq.lean.run import layouts
from leanq.lean.run.layouts import (
    INDUCTIVE_WITHOUT_NESTED,
    Damaged,
    Kind,
    constant_layout,
    has_module_mark,
    header,
    shape,
)

Name = tuple[str | int, ...]

# Some seconds, and more than the largest files of Mathlib need.
_MAX_STEPS = 1 << 24
_MAX_NAME_PARTS = 1000
_MAX_NUMBER_BITS = 1 << 23
_MAX_LEVELS = 1 << 16

ASTRAY = "a pointer leads nowhere"
AHEAD = "an object points ahead"

_ARRAY, _STRING, _NUMBER = 246, 249, 250
BOXED_ZERO = 1


_IMPORT, _CONSTANT_VAL, _RECURSOR_RULE = shape(0, 1), shape(0, 3), shape(0, 3)
_NAME_STR, _NAME_NUM, _CONS = shape(1, 2), shape(2, 2), shape(1, 2)

_NAMING = frozenset({layouts.CONST, layouts.PROJ})


_PARTIAL = 2


@dataclass(frozen=True, slots=True)
class Import:
    """An import of a module. Before the module system every import is exported."""

    module: Name
    is_all: bool = False
    is_exported: bool = True
    is_meta: bool = False


@dataclass(frozen=True, slots=True)
class Raw:
    """A constant in the image.

    Attributes:
        head: the index of its `ConstantVal`.
        value: the index of its `AxiomVal`, `DefinitionVal`, ….
        type_: the address of its type.
        body: the address of its value or proof; None if it has none.
        unsafe: whether the kernel keeps it out of safe constants.
        partial: whether it is a definition that need not end; the kernel keeps these out as well.
    """

    name: Name
    kind: Kind
    head: int
    value: int
    type_: int
    body: int | None
    unsafe: bool
    partial: bool

    @property
    def safe(self) -> bool:
        """True if the kernel has it in its environment, so that it may prove something."""
        return not (self.unsafe or self.partial)

    @property
    def meant(self) -> tuple[int, ...]:
        """The addresses of its type and its value; without a theorem's proof, since all proofs are
        equal."""
        return (self.type_,) if self.kind == "theorem" else self.parts

    @property
    def parts(self) -> tuple[int, ...]:
        """The addresses of its type and of its value or proof."""
        return (self.type_,) if self.body is None else (self.type_, self.body)


class Walk(NamedTuple):
    """The expressions in some, in no order.

    Attributes:
        addresses: of each.
        repeated: of those that stand in several places.
        named: the addresses of the names of all constants in them.
    """

    addresses: list[int]
    repeated: list[int]
    named: set[int]


class Image:
    """The parts of a module as they lie in memory, and the objects in them.

    An address is a pointer's value; an index counts words of eight bytes from the start.

    Attributes:
        words: the image, a word at each index.
        base: the address of its first byte.
        is_module: whether the file is one of the module system, of which all parts are needed.
        steps: how many pointers may still be followed.
    """

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._bytes = b""
        for part in parts:
            start = header(part).size_bytes
            if len(part) % 8 or len(part) < start + 8:
                raise Damaged("it is cut off")
            base = int.from_bytes(part[start - 8 : start], "little")
            if base % 8:
                raise Damaged("its base address is no multiple of eight")
            if not self._bytes:
                self.base = base
            # Lean begins each part at a multiple of 64 KiB.
            gap = base - self.base - len(self._bytes)
            if not 0 <= gap < 1 << 16:
                raise Damaged("its parts do not belong together")
            self._bytes = self._bytes + bytes(gap) + part if self._bytes else part
            # A part that adds nothing has its root in an earlier one.
            root = int.from_bytes(part[start : start + 8], "little")
        if not self._bytes:
            raise Damaged("it is empty")
        self.words = memoryview(self._bytes).cast("Q")
        self._root = self.index(root)
        has_mark = has_module_mark(self.words[self._root])
        self.is_module = has_mark and self.scalar(self._root, 0) == 1
        self.steps = _MAX_STEPS
        self._names: dict[int, Name] = {BOXED_ZERO: ()}
        self._visit = 0
        self._last_visit = array("I")

    def imports(self) -> tuple[Import, ...]:
        """Returns the module's imports, in the file's order."""
        found = []
        for address in self._root_array(1):
            index = self.object(address, _IMPORT)
            flags = [self.scalar(index, n) == 1 for n in range(3)] if self.is_module else []
            found.append(Import(self.name(self.words[index + 1]), *flags))
        return tuple(found)

    def constants(self, only: Container[Name] | None = None) -> dict[Name, Raw]:
        """Returns the declared constants, in the file's order; with ``only``, those of these
        names."""
        names, infos = self._root_array(2), self._root_array(3)
        declared = [self.name(address) for address in names]
        if len(declared) != len(infos) or len(declared) != len(set(declared)):
            raise Damaged("its constants are not the ones that it names")
        return {
            name: self._constant(name, address)
            for name, address in zip(declared, infos, strict=True)
            if only is None or name in only
        }

    def entries(self) -> dict[Name, int]:
        """Returns the address of each environment extension's entries."""
        found = {}
        for address in self._root_array(5):
            pair = self.object(address, shape(0, 2))
            found[self.name(self.words[pair + 1])] = self.words[pair + 2]
        return found

    def levels(self, raw: Raw) -> list[Name]:
        """Returns the universe parameters of a constant."""
        return self.names(self.words[raw.head + 2])

    def references(self, raw: Raw) -> set[Name]:
        """Returns the names of all constants in its type and its value.

        An inductive type refers to its constructors, a projection to its structure.
        """
        names = self.constants_in(*raw.parts)
        if raw.kind == "inductive":
            names.update(self.names(self.words[raw.value + 5]))
        return names

    def counts_nested(self, raw: Raw) -> bool:
        """Returns whether an inductive type says how many types are nested in it."""
        return self.words[raw.value] >> 48 != INDUCTIVE_WITHOUT_NESTED

    def rules(self, raw: Raw) -> Iterator[tuple[int, int, int]]:
        """Yields a recursor's rules: the address of the constructor's name, the number of its
        fields, and the address of the right side."""
        words = self.words
        for address in self.linked(words[raw.value + 7]):
            at = self.object(address, _RECURSOR_RULE)
            yield words[at + 1], self.small(words[at + 2]), words[at + 3]

    def _root_array(self, field: int) -> list[int]:
        return self.array(self.words[self._root + field])

    def _constant(self, name: Name, address: int) -> Raw:
        words = self.words
        info = self.index(address)
        if words[info] >> 48 & 0xFF != 1:
            raise Damaged("it holds a malformed constant")
        value = self.index(words[info + 1])
        layout = constant_layout(words[info] >> 56, words[value])
        head = self.object(words[value + 1], _CONSTANT_VAL)
        if not name or self.name(words[head + 1]) != name:
            raise Damaged("its constants are not the ones that it names")
        flag = None if layout.unsafe_scalar is None else self.scalar(value, layout.unsafe_scalar)
        if layout.kind == "definition" and flag is not None and flag > _PARTIAL:
            raise Damaged("it holds a malformed definition")
        return Raw(
            name,
            layout.kind,
            head,
            value,
            type_=words[head + 3],
            body=None if layout.body is None else words[value + 1 + layout.body],
            unsafe=flag is not None and flag == layout.unsafe_if,
            partial=layout.kind == "definition" and flag == _PARTIAL,
        )

    def walk(self, *expressions: int) -> Walk:
        """Visits these expressions and all in them, each once."""
        if not self._last_visit:
            self._last_visit = array("I", [0]) * len(self.words)
        words, base, last_visit, limit = self.words, self.base, self._last_visit, self.steps
        self._visit = visit = self._visit + 1
        app, parts = layouts.APP, layouts.PARTS
        addresses: list[int] = []
        repeated: list[int] = []
        named: set[int] = set()
        todo = [*expressions]
        while todo:
            at = todo.pop()
            offset = at - base
            if offset < 0 or offset & 7:
                raise Damaged(ASTRAY)
            index = offset >> 3
            if last_visit[index] == visit:
                repeated.append(at)
                continue
            last_visit[index] = visit
            addresses.append(at)
            kind = words[index] >> 48
            if kind == app:  # more than half of all
                todo.append(words[index + 1])
                todo.append(words[index + 2])
                continue
            if kind not in parts:
                raise Damaged("it holds a malformed expression, or a free or meta variable")
            if len(addresses) > limit:
                raise Damaged("it takes too long to read")
            todo += (words[index + part] for part in parts[kind])
            if kind in _NAMING:
                named.add(words[index + 1])
        self.spend(len(addresses))
        return Walk(addresses, repeated, named)

    def constants_in(self, *expressions: int) -> set[Name]:
        """Returns the names of all constants in some expressions."""
        return set(map(self.name, self.walk(*expressions).named))

    def levels_behind(
        self, level: int, known: Collection[int]
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yields a universe level and all in it that are not ``known``, each behind its parts: its
        address, its kind, and its fields.

        The caller adds each to the known ones.
        """
        todo = [level]
        while todo:
            at = todo[-1]
            if at in known:
                todo.pop()
                continue
            self.spend(1)
            if len(known) + len(todo) > _MAX_LEVELS:
                raise Damaged("it holds too many universe levels")
            index = self.index(at)
            kind = self.words[index] >> 48
            if kind not in layouts.LEVELS:
                raise Damaged("it holds a malformed universe level")
            fields = tuple(self.words[index + 1 + number] for number in range(kind & 0xFF))
            missing = [each for each in fields if kind != layouts.LEVEL_PARAM and each not in known]
            if missing:
                if max(missing) >= at:
                    raise Damaged(AHEAD)
                todo += missing
            else:
                yield at, kind, fields

    def literal(self, address: int) -> int | str:
        """Returns the value of a literal."""
        index = self.index(address)
        kind, value = self.words[index] >> 48, self.words[index + 1]
        if kind == layouts.NUMBER_LIT:
            return self.natural(value)
        if kind == layouts.STRING_LIT:
            return self.string(value)
        raise Damaged("it holds a malformed literal")

    def name(self, address: int) -> Name:
        """Returns the name there; () is the anonymous one."""
        names = self._names
        name = names.get(address)
        if name is not None:
            return name
        chain: list[int] = []
        at = address
        while at not in names:
            chain.append(at)
            if len(chain) > _MAX_NAME_PARTS:
                raise Damaged("it holds an endless name")
            at = self.words[self.index(at) + 1]
        name = names[at]
        # Names share their beginnings, so these are kept as well.
        for at in reversed(chain):
            index = self.index(at)
            kind, last = self.words[index] >> 48, self.words[index + 2]
            if kind == _NAME_STR:
                name = (*name, self.string(last))
            elif kind == _NAME_NUM and last & 1:
                name = (*name, last >> 1)
            else:
                raise Damaged("it holds a malformed name")
            self.spend(len(name))
            names[at] = name
        if len(name) > _MAX_NAME_PARTS:
            raise Damaged("it holds an endless name")
        return name

    def names(self, address: int) -> list[Name]:
        """Returns a list of names."""
        return [self.name(each) for each in self.linked(address)]

    def linked(self, address: int) -> list[int]:
        """Returns the addresses in a linked list."""
        items: list[int] = []
        while address != BOXED_ZERO:
            index = self.object(address, _CONS)
            items.append(self.words[index + 1])
            self.spend(1)
            address = self.words[index + 2]
        return items

    def array(self, address: int) -> list[int]:
        """Returns the addresses in an array."""
        index = self.index(address)
        size = self.words[index + 1]
        if self.words[index] >> 56 != _ARRAY or index + 3 + size > len(self.words):
            raise Damaged("it holds a malformed array")
        self.spend(size)
        return [*self.words[index + 3 : index + 3 + size]]

    def string(self, address: int) -> str:
        """Returns a text."""
        index = self.index(address)
        start, size = 8 * (index + 4), self.words[index + 1]
        if self.words[index] >> 56 != _STRING or not 0 < size <= len(self._bytes) - start:
            raise Damaged("it holds a malformed string")
        self.spend(size >> 3)
        try:
            return self._bytes[start : start + size - 1].decode()
        except UnicodeDecodeError:
            raise Damaged("it holds a malformed string") from None

    def natural(self, address: int) -> int:
        """Returns a natural number of any size; refuses all forms but Lean's own."""
        if address & 1:
            return address >> 1
        words, index = self.words, self.index(address)
        if words[index] >> 56 != _NUMBER:
            raise Damaged("it holds a malformed number")
        limbs = words[index + 1] >> 32  # GMP counts the limbs of a negative number below zero
        if not 0 < limbs < 1 << 31 or limbs * 64 > _MAX_NUMBER_BITS:
            raise Damaged("it holds a number that is negative or too large")
        at = self.index(words[index + 2])
        if at + limbs > len(words):
            raise Damaged("it holds a malformed number")
        self.spend(limbs)
        found = int.from_bytes(self._bytes[8 * at : 8 * (at + limbs)], "little")
        if found < 1 << 63:
            raise Damaged("it holds a malformed number")
        return found

    def small(self, address: int) -> int:
        """Returns a small natural number, such as a count."""
        if not address & 1 or address >> 1 >= 1 << 32:
            raise Damaged("it holds a malformed number")
        return address >> 1

    def object(self, address: int, expected: int) -> int:
        """Returns the index of the object there, which must have this tag and number of fields."""
        index = self.index(address)
        if self.words[index] >> 48 != expected:
            raise Damaged("an object is not what it should be")
        return index

    def index(self, address: int) -> int:
        """Returns the index of an address; beyond the end, reading there raises `IndexError`."""
        offset = address - self.base
        if offset < 0 or offset & 7:
            raise Damaged(ASTRAY)
        return offset >> 3

    def scalar(self, index: int, number: int) -> int:
        """Returns the byte of this number behind the fields of the object at an index."""
        fields = self.words[index] >> 48 & 0xFF
        offset = 8 + 8 * fields + number
        if offset >= self.words[index] >> 32 & 0xFFFF:
            raise Damaged("an object is not what it should be")
        return self._bytes[8 * index + offset]

    def flag(self, index: int, number: int) -> int:
        """Returns a scalar that is a Bool."""
        found = self.scalar(index, number)
        if found > 1:
            raise Damaged("it holds a malformed flag")
        return found

    def spend(self, steps: int) -> None:
        """Counts followed pointers."""
        self.steps -= steps
        if self.steps < 0:
            raise Damaged("it takes too long to read")
