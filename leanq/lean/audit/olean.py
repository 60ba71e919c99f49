"""Reads what Lean compiled, as data: which constants a module declares and what they refer to.

An ``.olean`` file is a memory image. Behind a header that names the address at which it wants to
be mapped lie Lean objects, little-endian and aligned to eight bytes, that point to each other by
absolute addresses::

    header       "olean", version, … , base address of the file
    object       word 0: reference count (32 bits), size in bytes (16), fields (8), tag (8)
      constructor  tag = its number, then the pointers to its fields, then its scalars
      array        tag 246, size, capacity, pointers
      string       tag 249, size with the NUL, capacity, length, UTF-8
    pointer      to an object, or a small number n as 2n + 1

The root is a `Lean.ModuleData`. A file of the module system comes in three parts that lie behind
each other in memory; only the last, private one knows the proofs.

The bytes may come from a hostile program. Nothing in them is believed before it is checked, no
walk recurses or follows more than `_MAX_STEPS` pointers, and memory stays within a small multiple
of the file's size. Whatever is wrong is an `AuditError`.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from leanq.errors import AuditError
from leanq.lean.syntax import quote

Name = tuple[str | int, ...]
Kind = Literal[
    "axiom", "definition", "theorem", "opaque", "quotient", "inductive", "constructor", "recursor"
]

# Some seconds, and more than the largest files of Mathlib need.
_MAX_STEPS = 1 << 24
_MAX_NAME_PARTS = 1000

_ASTRAY = "a pointer leads nowhere"

_ARRAY, _STRING = 246, 249
_BOXED_ZERO = 1


def _shape(tag: int, fields: int) -> int:
    """The tag and the number of fields as they stand beside each other in an object's word 0."""
    return tag << 8 | fields


_MODULE_DATA, _IMPORT, _CONSTANT_VAL = _shape(0, 5), _shape(0, 1), _shape(0, 3)
_NAME_STR, _NAME_NUM, _CONS = _shape(1, 2), _shape(2, 2), _shape(1, 2)
_CONST, _APP, _PROJ = _shape(4, 2), _shape(5, 2), _shape(11, 3)

# The constructors of `Lean.Expr`, and which words of each point to expressions.
_EXPR_PARTS: dict[int, tuple[int, ...]] = {
    _shape(0, 1): (),  # bvar
    _shape(1, 1): (),  # fvar
    _shape(2, 1): (),  # mvar
    _shape(3, 1): (),  # sort
    _CONST: (),  # name, levels
    _APP: (1, 2),
    _shape(6, 3): (2, 3),  # lam: name, type, body
    _shape(7, 3): (2, 3),  # forallE: name, type, body
    _shape(8, 4): (2, 3, 4),  # letE: name, type, value, body
    _shape(9, 1): (),  # lit
    _shape(10, 2): (2,),  # mdata: data, expression
    _PROJ: (3,),  # name of the structure, index, expression
}
_NAMING = frozenset({_CONST, _PROJ})


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the value of a `Lean.ConstantInfo` keeps what we want.

    ``value`` and ``constructors`` count its fields from 0, where the `ConstantVal` stands;
    ``unsafe_scalar`` counts the bytes behind the fields.
    """

    kind: Kind
    shapes: frozenset[int]
    value: int | None = None
    constructors: int | None = None
    unsafe_scalar: int | None = None
    unsafe_if: int = 1


def _fields(*counts: int) -> frozenset[int]:
    return frozenset(_shape(0, count) for count in counts)


# The constructors of `Lean.ConstantInfo`, in their order.
_LAYOUTS = (
    _Layout("axiom", _fields(1), unsafe_scalar=0),
    _Layout("definition", _fields(4), value=1, unsafe_scalar=0, unsafe_if=0),
    _Layout("theorem", _fields(3), value=1),
    _Layout("opaque", _fields(3), value=1, unsafe_scalar=0),
    _Layout("quotient", _fields(1)),
    # Older versions do not count the nested types.
    _Layout("inductive", _fields(5, 6), constructors=4, unsafe_scalar=1),
    _Layout("constructor", _fields(5), unsafe_scalar=0),
    _Layout("recursor", _fields(7), unsafe_scalar=1),
)


@dataclass(frozen=True, slots=True)
class Import:
    """An import of a module. Before the module system every import is exported."""

    module: Name
    is_all: bool = False
    is_exported: bool = True
    is_meta: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant and the names of all that its type and its value refer to.

    An inductive type refers to its constructors, a projection to the structure it looks into.
    """

    name: Name
    kind: Kind
    unsafe: bool
    references: frozenset[Name]


@dataclass(frozen=True, slots=True)
class Module:
    """What a module imports and declares, each in the file's order."""

    imports: tuple[Import, ...]
    constants: tuple[Constant, ...]


def display(name: Name) -> str:
    """The name as Lean writes it; different names never look the same."""
    if not name:
        return "[anonymous]"
    return ".".join(quote(part) if isinstance(part, str) else str(part) for part in name)


def read_module(
    path: Path, *, limit_bytes: int = 256 << 20, only: Container[Name] | None = None
) -> Module:
    """Reads ``path`` and, for a file of the module system, its parts beside it.

    With ``only``, the constants of other names are left out and cost next to nothing.

    Raises `AuditError` if a file is missing, no regular file, larger than ``limit_bytes`` (all
    parts together), of an unknown version or damaged.
    """
    data = _read_file(path, limit_bytes)
    try:
        module = _Image([data])
        if module.is_module:
            # The public part shows theorems as axioms, so without the others there is no audit.
            parts = [data]
            for suffix in (".server", ".private"):
                limit_bytes -= len(parts[-1])
                parts.append(_read_file(path.with_name(path.name + suffix), limit_bytes))
            module = _Image(parts)
        return module.read(only)
    except _Damaged as error:
        why = str(error)
    except IndexError:
        why = _ASTRAY
    raise AuditError(f"{path.name} is no readable .olean file: {why}")


class _Damaged(Exception):  # noqa: N818 - internal, and never leaves this file
    """The bytes are not what Lean writes."""


def _read_file(path: Path, limit_bytes: int) -> bytes:
    try:
        # O_NONBLOCK: a pipe in the file's place must not make us wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise AuditError(f"{path.name} is no regular file")
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise AuditError(f"{path.name} cannot be read: {error.strerror}") from None
    if len(data) > limit_bytes:
        raise AuditError(f"{path.name} is larger than {limit_bytes} bytes")
    return data


class _Image:
    """The parts of a module laid out as in memory, and the objects in them.

    An address is what a pointer holds; an index counts the words of eight bytes from the start.
    """

    def __init__(self, parts: list[bytes]) -> None:
        self._bytes = b""
        for part in parts:
            start = _header_bytes(part)
            if len(part) % 8 or len(part) < start + 8:
                raise _Damaged("it is cut off")
            base = int.from_bytes(part[start - 8 : start], "little")
            if not self._bytes:
                self._base = base
            # Lean begins each part at a multiple of 64 KiB.
            gap = base - self._base - len(self._bytes)
            if not 0 <= gap < 1 << 16:
                raise _Damaged("its parts do not belong together")
            self._bytes += bytes(gap) + part
            # Newer versions write the root in front of the objects, older ones behind them.
            root = int.from_bytes(part[start : start + 8], "little")
            if not base <= root < base + len(part):
                root = int.from_bytes(part[-8:], "little")
        self._words = memoryview(self._bytes).cast("Q")
        self._root = self._object(root, _MODULE_DATA)
        # Before there was a module system the object had no scalars.
        self.is_module = self._size_bytes(self._root) > 48 and self._scalar(self._root, 0) == 1
        self._steps = _MAX_STEPS
        self._names: dict[int, Name] = {}
        self._visit = 0
        self._last_visit = array("I", [0]) * len(self._words)

    def read(self, only: Container[Name] | None) -> Module:
        imports, names, constants = (
            self._array(self._words[self._root + field]) for field in (1, 2, 3)
        )
        declared = [self._name(address) for address in names]
        if len(declared) != len(constants) or len(declared) != len(set(declared)):
            raise _Damaged("its constants are not the ones that it names")
        return Module(
            imports=tuple(map(self._import, imports)),
            constants=tuple(
                self._constant(name, address)
                for name, address in zip(declared, constants, strict=True)
                if only is None or name in only
            ),
        )

    def _import(self, address: int) -> Import:
        index = self._object(address, _IMPORT)
        module = self._name(self._words[index + 1])
        if not self.is_module:
            return Import(module)
        flags = [self._scalar(index, number) == 1 for number in range(3)]
        return Import(module, is_all=flags[0], is_exported=flags[1], is_meta=flags[2])

    def _constant(self, name: Name, address: int) -> Constant:
        words = self._words
        info = self._index(address)
        tag = words[info] >> 56
        if tag >= len(_LAYOUTS):
            raise _Damaged("it holds a constant of an unknown kind")
        layout = _LAYOUTS[tag]
        value = self._index(words[info + 1])
        if words[value] >> 48 not in layout.shapes:
            raise _Damaged(f"it holds a malformed {layout.kind}")
        head = self._object(words[value + 1], _CONSTANT_VAL)
        if self._name(words[head + 1]) != name:
            raise _Damaged("its constants are not the ones that it names")
        expressions = [words[head + 3]]
        if layout.value is not None:
            expressions.append(words[value + 1 + layout.value])
        references = self._constants_in(expressions)
        if layout.constructors is not None:
            references.update(self._list(words[value + 1 + layout.constructors]))
        return Constant(
            name,
            layout.kind,
            unsafe=layout.unsafe_scalar is not None
            and self._scalar(value, layout.unsafe_scalar) == layout.unsafe_if,
            references=frozenset(map(self._name, references)),
        )

    def _constants_in(self, expressions: list[int]) -> set[int]:
        """The addresses of the names of all constants in them; shared parts are visited once."""
        words, base, last_visit, steps = self._words, self._base, self._last_visit, self._steps
        self._visit = visit = self._visit + 1
        found: set[int] = set()
        todo = expressions
        while todo:
            offset = todo.pop() - base
            if offset < 0 or offset & 7:
                raise _Damaged(_ASTRAY)
            index = offset >> 3
            if last_visit[index] == visit:
                continue
            last_visit[index] = visit
            steps -= 1
            if steps < 0:
                raise _Damaged("it takes too long to read")
            shape = words[index] >> 48
            if shape == _APP:  # more than half of all
                todo.append(words[index + 1])
                todo.append(words[index + 2])
                continue
            if shape not in _EXPR_PARTS:
                raise _Damaged("it holds a malformed expression")
            for part in _EXPR_PARTS[shape]:
                todo.append(words[index + part])
            if shape in _NAMING:
                found.add(words[index + 1])
        self._steps = steps
        return found

    def _name(self, address: int) -> Name:
        name = self._names.get(address)
        if name is None:
            parts: list[str | int] = []
            at = address
            while at != _BOXED_ZERO:
                index = self._index(at)
                shape, last = self._words[index] >> 48, self._words[index + 2]
                if shape == _NAME_STR:
                    parts.append(self._string(last))
                elif shape == _NAME_NUM and last & 1:
                    parts.append(last >> 1)
                else:
                    raise _Damaged("it holds a malformed name")
                if len(parts) > _MAX_NAME_PARTS:
                    raise _Damaged("it holds an endless name")
                self._spend(1)
                at = self._words[index + 1]
            name = self._names[address] = tuple(reversed(parts))
        return name

    def _list(self, address: int) -> list[int]:
        items = []
        while address != _BOXED_ZERO:
            index = self._object(address, _CONS)
            items.append(self._words[index + 1])
            self._spend(1)
            address = self._words[index + 2]
        return items

    def _array(self, address: int) -> list[int]:
        index = self._index(address)
        size = self._words[index + 1]
        if self._words[index] >> 56 != _ARRAY or index + 3 + size > len(self._words):
            raise _Damaged("it holds a malformed array")
        self._spend(size)
        return self._words[index + 3 : index + 3 + size].tolist()

    def _string(self, address: int) -> str:
        index = self._index(address)
        start, size = 8 * (index + 4), self._words[index + 1]
        if self._words[index] >> 56 != _STRING or not 0 < size <= len(self._bytes) - start:
            raise _Damaged("it holds a malformed string")
        self._spend(size >> 3)
        try:
            return self._bytes[start : start + size - 1].decode()
        except UnicodeDecodeError:
            raise _Damaged("it holds a malformed string") from None

    def _object(self, address: int, shape: int) -> int:
        """The index of the object there, which must have this tag and number of fields."""
        index = self._index(address)
        if self._words[index] >> 48 != shape:
            raise _Damaged("an object is not what it should be")
        return index

    def _index(self, address: int) -> int:
        offset = address - self._base
        if offset < 0 or offset & 7:
            raise _Damaged(_ASTRAY)
        return offset >> 3

    def _size_bytes(self, index: int) -> int:
        return self._words[index] >> 32 & 0xFFFF

    def _scalar(self, index: int, number: int) -> int:
        fields = self._words[index] >> 48 & 0xFF
        offset = 8 + 8 * fields + number
        if offset >= self._size_bytes(index):
            raise _Damaged("an object is not what it should be")
        return self._bytes[8 * index + offset]

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise _Damaged("it takes too long to read")


def _header_bytes(data: bytes) -> int:
    """The length of the header, after the version that it claims."""
    if data[:5] != b"olean" or len(data) < 6:
        raise _Damaged("it does not begin like one")
    version = data[5]
    if version == 1:
        return 5 + 1 + 42 + 8  # magic, version, commit, base
    if version == 2:
        return 5 + 1 + 1 + 33 + 40 + 8  # magic, version, flags, Lean's version, commit, base
    raise _Damaged(f"version {version} of the format is unknown")
