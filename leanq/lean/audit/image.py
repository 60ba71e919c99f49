"""A compiled module as data: the memory image in an ``.olean`` file, read without being believed.

Behind a header that names the address at which the image wants to be mapped lie Lean objects,
little-endian and aligned to eight bytes, that point to each other by absolute addresses::

    header       "olean", version, … , base address of the file
    object       word 0: reference count (32 bits), size in bytes (16), fields (8), tag (8)
      constructor  tag = its number, then the pointers to its fields, then its scalars
      array        tag 246, size, capacity, pointers
      string       tag 249, size with the NUL, capacity, length, UTF-8
      number       tag 250, allocated and used limbs (32 bits each), pointer to the limbs
    pointer      to an object, or a small number n as 2n + 1

The root is a `Lean.ModuleData`. A file of the module system comes in three parts that lie behind
each other in memory; only the last, private one knows the proofs.

The bytes may come from a hostile program. Nothing in them is believed before it is checked, no
walk recurses or follows more than `_MAX_STEPS` pointers, and memory stays within a small multiple
of the file's size. Lean writes what an object points to in front of it, so a pointer that leads
ahead is refused, and what is left cannot be circular. Whatever is wrong is a `Damaged` or an
`IndexError`.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

Name = tuple[str | int, ...]
Kind = Literal[
    "axiom", "definition", "theorem", "opaque", "quotient", "inductive", "constructor", "recursor"
]

# Some seconds, and more than the largest files of Mathlib need.
_MAX_STEPS = 1 << 24
_MAX_NAME_PARTS = 1000
_MAX_NUMBER_BITS = 1 << 23

ASTRAY = "a pointer leads nowhere"
AHEAD = "an object points ahead"

_ARRAY, _STRING, _NUMBER = 246, 249, 250
BOXED_ZERO = 1


class Damaged(Exception):  # noqa: N818 - a finding about the bytes, no fault of the program
    """The bytes are not what Lean writes."""


def shape(tag: int, fields: int) -> int:
    """The tag and the number of fields as they stand beside each other in an object's word 0."""
    return tag << 8 | fields


_MODULE_DATA, _IMPORT, _CONSTANT_VAL = shape(0, 5), shape(0, 1), shape(0, 3)
_NAME_STR, _NAME_NUM, _CONS = shape(1, 2), shape(2, 2), shape(1, 2)

# The constructors of `Lean.Expr`; those of free and meta variables stand in no honest file.
BVAR, SORT, CONST, APP = shape(0, 1), shape(3, 1), shape(4, 2), shape(5, 2)
LAM, FORALL, LET, LIT = shape(6, 3), shape(7, 3), shape(8, 4), shape(9, 1)
MDATA, PROJ = shape(10, 2), shape(11, 3)
NUMBER_LIT, STRING_LIT = shape(0, 1), shape(1, 1)
# The constructors of `Lean.Level`; zero is the boxed 0.
LEVEL_SUCC, LEVEL_MAX, LEVEL_IMAX, LEVEL_PARAM = shape(1, 1), shape(2, 2), shape(3, 2), shape(4, 1)

# Which words of each expression point to expressions.
EXPRESSION_PARTS: dict[int, tuple[int, ...]] = {
    BVAR: (),
    SORT: (),
    CONST: (),  # name, levels
    APP: (1, 2),
    LAM: (2, 3),  # name, type, body
    FORALL: (2, 3),
    LET: (2, 3, 4),  # name, type, value, body
    LIT: (),
    MDATA: (2,),  # data, expression
    PROJ: (3,),  # name of the structure, index, expression
}
_NAMING = frozenset({CONST, PROJ})


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the value of a `Lean.ConstantInfo` keeps what we want.

    ``body`` counts its fields from 0, where the `ConstantVal` stands; ``unsafe_scalar`` counts the
    bytes behind the fields.
    """

    kind: Kind
    shapes: frozenset[int]
    body: int | None = None
    unsafe_scalar: int | None = None
    unsafe_if: int = 1


def _fields(*counts: int) -> frozenset[int]:
    return frozenset(shape(0, count) for count in counts)


# The constructors of `Lean.ConstantInfo`, in their order.
_LAYOUTS = (
    _Layout("axiom", _fields(1), unsafe_scalar=0),
    _Layout("definition", _fields(4), body=1, unsafe_scalar=0, unsafe_if=0),
    _Layout("theorem", _fields(3), body=1),
    _Layout("opaque", _fields(3), body=1, unsafe_scalar=0),
    _Layout("quotient", _fields(1)),
    # Older versions do not count the nested types.
    _Layout("inductive", _fields(5, 6), unsafe_scalar=1),
    _Layout("constructor", _fields(5), unsafe_scalar=0),
    _Layout("recursor", _fields(7), unsafe_scalar=1),
)
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
    """A constant where it lies in the image.

    Attributes:
        head: the index of its `ConstantVal`.
        value: the index of its `AxiomVal`, `DefinitionVal`, ….
        type_: the address of its type.
        body: the address of its value or proof, None where it has none.
        unsafe: whether the kernel keeps it out of safe constants.
        partial: whether it is a definition that need not end, which the kernel keeps out as well.
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
        """Whether the kernel has it in its environment, so that it may prove something."""
        return not (self.unsafe or self.partial)


class Image:
    """The parts of a module laid out as in memory, and the objects in them.

    An address is what a pointer holds; an index counts the words of eight bytes from the start.

    Attributes:
        words: the image, a word at each index.
        base: the address of its first byte.
        is_module: whether it is a file of the module system, of which there must be all parts.
        steps: how many pointers may still be followed.
    """

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._bytes = b""
        for part in parts:
            start = _header_bytes(part)
            if len(part) % 8 or len(part) < start + 8:
                raise Damaged("it is cut off")
            base = int.from_bytes(part[start - 8 : start], "little")
            if not self._bytes:
                self.base = base
            # Lean begins each part at a multiple of 64 KiB.
            gap = base - self.base - len(self._bytes)
            if not 0 <= gap < 1 << 16:
                raise Damaged("its parts do not belong together")
            self._bytes += bytes(gap) + part
            # Newer versions write the root in front of the objects, older ones behind them.
            root = int.from_bytes(part[start : start + 8], "little")
            if not base <= root < base + len(part):
                root = int.from_bytes(part[-8:], "little")
        if not self._bytes:
            raise Damaged("it is empty")
        self.words = memoryview(self._bytes).cast("Q")
        self._root = self.object(root, _MODULE_DATA)
        # Before there was a module system the object had no scalars.
        self.is_module = self._size_bytes(self._root) > 48 and self.scalar(self._root, 0) == 1
        self.steps = _MAX_STEPS
        self._names: dict[int, Name] = {}
        self._visit = 0
        self._last_visit = array("I", [0]) * len(self.words)

    def imports(self) -> tuple[Import, ...]:
        """What the module imports, in the file's order."""
        return tuple(map(self._import, self._root_array(1)))

    def constants(self, only: Container[Name] | None = None) -> dict[Name, Raw]:
        """What the module declares, in the file's order; of ``only`` these names, if given."""
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
        """The address of what each extension of the environment has written into the file."""
        found = {}
        for address in self._root_array(5):
            pair = self.object(address, shape(0, 2))
            found[self.name(self.words[pair + 1])] = self.words[pair + 2]
        return found

    def levels(self, raw: Raw) -> list[Name]:
        """The universe parameters of a constant."""
        return self.names(self.words[raw.head + 2])

    def references(self, raw: Raw) -> set[Name]:
        """The names of all constants in its type and its value; shared parts are visited once.

        An inductive type refers to its constructors, a projection to the structure it looks into.
        """
        found = self._constants_in([raw.type_] if raw.body is None else [raw.type_, raw.body])
        names = set(map(self.name, found))
        if raw.kind == "inductive":
            names.update(self.names(self.words[raw.value + 5]))
        return names

    def _root_array(self, field: int) -> list[int]:
        return self.array(self.words[self._root + field])

    def _import(self, address: int) -> Import:
        index = self.object(address, _IMPORT)
        module = self.name(self.words[index + 1])
        if not self.is_module:
            return Import(module)
        flags = [self.scalar(index, number) == 1 for number in range(3)]
        return Import(module, is_all=flags[0], is_exported=flags[1], is_meta=flags[2])

    def _constant(self, name: Name, address: int) -> Raw:
        words = self.words
        info = self.index(address)
        tag = words[info] >> 56
        if tag >= len(_LAYOUTS) or words[info] >> 48 & 0xFF != 1:
            raise Damaged("it holds a constant of an unknown kind")
        layout = _LAYOUTS[tag]
        value = self.index(words[info + 1])
        if words[value] >> 48 not in layout.shapes:
            raise Damaged(f"it holds a malformed {layout.kind}")
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

    def _constants_in(self, expressions: list[int]) -> set[int]:
        """The addresses of the names of all constants in them."""
        words, base, last_visit, steps = self.words, self.base, self._last_visit, self.steps
        self._visit = visit = self._visit + 1
        found: set[int] = set()
        todo = expressions
        while todo:
            offset = todo.pop() - base
            if offset < 0 or offset & 7:
                raise Damaged(ASTRAY)
            index = offset >> 3
            if last_visit[index] == visit:
                continue
            last_visit[index] = visit
            steps -= 1
            if steps < 0:
                raise Damaged("it takes too long to read")
            kind = words[index] >> 48
            if kind == APP:  # more than half of all
                todo.append(words[index + 1])
                todo.append(words[index + 2])
                continue
            if kind not in EXPRESSION_PARTS:
                raise Damaged("it holds a malformed expression")
            for part in EXPRESSION_PARTS[kind]:
                todo.append(words[index + part])
            if kind in _NAMING:
                found.add(words[index + 1])
        self.steps = steps
        return found

    def name(self, address: int) -> Name:
        """The name there; () is the anonymous one."""
        name = self._names.get(address)
        if name is None:
            parts: list[str | int] = []
            at = address
            while at != BOXED_ZERO:
                index = self.index(at)
                kind, last = self.words[index] >> 48, self.words[index + 2]
                if kind == _NAME_STR:
                    parts.append(self.string(last))
                elif kind == _NAME_NUM and last & 1:
                    parts.append(last >> 1)
                else:
                    raise Damaged("it holds a malformed name")
                if len(parts) > _MAX_NAME_PARTS:
                    raise Damaged("it holds an endless name")
                self.spend(1)
                at = self.words[index + 1]
            name = self._names[address] = tuple(reversed(parts))
        return name

    def names(self, address: int) -> list[Name]:
        """A list of names."""
        return [self.name(each) for each in self.linked(address)]

    def linked(self, address: int) -> list[int]:
        """The addresses in a linked list."""
        items: list[int] = []
        while address != BOXED_ZERO:
            index = self.object(address, _CONS)
            items.append(self.words[index + 1])
            self.spend(1)
            address = self.words[index + 2]
        return items

    def array(self, address: int) -> list[int]:
        """The addresses in an array."""
        index = self.index(address)
        size = self.words[index + 1]
        if self.words[index] >> 56 != _ARRAY or index + 3 + size > len(self.words):
            raise Damaged("it holds a malformed array")
        self.spend(size)
        return [*self.words[index + 3 : index + 3 + size]]

    def string(self, address: int) -> str:
        """A text."""
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
        """A natural number of any size, in the one form that Lean has for it."""
        if address & 1:
            return address >> 1
        words, index = self.words, self.index(address)
        if words[index] >> 56 != _NUMBER:
            raise Damaged("it holds a malformed number")
        limbs = words[index + 1] >> 32  # as GMP counts them: of a negative number, less than zero
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
        """A natural number such as a count, which has to be small."""
        if not address & 1 or address >> 1 >= 1 << 32:
            raise Damaged("it holds a malformed number")
        return address >> 1

    def object(self, address: int, expected: int) -> int:
        """The index of the object there, which must have this tag and number of fields."""
        index = self.index(address)
        if self.words[index] >> 48 != expected:
            raise Damaged("an object is not what it should be")
        return index

    def index(self, address: int) -> int:
        """Where an address leads; beyond the end, reading there raises `IndexError`."""
        offset = address - self.base
        if offset < 0 or offset & 7:
            raise Damaged(ASTRAY)
        return offset >> 3

    def scalar(self, index: int, number: int) -> int:
        """The byte of this number behind the fields of the object at an index."""
        fields = self.words[index] >> 48 & 0xFF
        offset = 8 + 8 * fields + number
        if offset >= self._size_bytes(index):
            raise Damaged("an object is not what it should be")
        return self._bytes[8 * index + offset]

    def flag(self, index: int, number: int) -> int:
        """A scalar that is a Bool."""
        found = self.scalar(index, number)
        if found > 1:
            raise Damaged("it holds a malformed flag")
        return found

    def spend(self, steps: int) -> None:
        """Counts pointers that are followed."""
        self.steps -= steps
        if self.steps < 0:
            raise Damaged("it takes too long to read")

    def _size_bytes(self, index: int) -> int:
        return self.words[index] >> 32 & 0xFFFF


def _header_bytes(data: bytes) -> int:
    """The length of the header, after the version that it claims."""
    if data[:5] != b"olean" or len(data) < 6:
        raise Damaged("it does not begin like one")
    version = data[5]
    if version == 1:
        return 5 + 1 + 42 + 8  # magic, version, commit, base
    if version == 2:
        return 5 + 1 + 1 + 33 + 40 + 8  # magic, version, flags, Lean's version, commit, base
    raise Damaged(f"version {version} of the format is unknown")
