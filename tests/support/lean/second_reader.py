"""A second reader of compiled files, written against the format alone and for honest files mostly.

It shares nothing with leanq's, so that the two can be held against each other. It believes what it
reads, is slow, and raises whatever it comes upon.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

_HEADER = {1: 48, 2: 80}  # bytes in front of the base address, by version
# Of `ConstantInfo`, by tag: which fields of the value say what it is, and how many scalar bytes.
# Left out: the hints (0 of definitions), and which constants were declared together (`all`).
_CONSTANTS: dict[int, tuple[str, tuple[int, ...], int]] = {
    0: ("axiom", (), 1),
    1: ("definition", (1,), 1),
    2: ("theorem", (1,), 0),
    3: ("opaque", (1,), 1),
    4: ("quotient", (), 1),
    5: ("inductive", (1, 2, 3, 4, 5), 3),
    6: ("constructor", (1, 2, 3, 4), 1),
    7: ("recursor", (1, 2, 3, 4, 5, 6), 2),
}
# Of `Expr`, by tag: those made of expressions alone, and which of their fields count. Left out:
# names and kinds of binders, and whether a `let` is a `have`.
_MADE_OF_EXPRESSIONS = {
    5: ("app", (0, 1)),
    6: ("lam", (1, 2)),
    7: ("pi", (1, 2)),
    8: ("let", (1, 2, 3)),
}
_LEVELS = {1: ("succ", 1), 2: ("max", 2), 3: ("imax", 2)}
_MDATA, _PROJ = 10, 11

Tree = Any
"""An expression or a level: what it is, what it says, and its parts; equal ones are one object."""


class Trees:
    """Makes trees, of each one."""

    def __init__(self) -> None:
        self._made: dict[Tree, Tree] = {}

    def make(self, what: str, says: tuple[Any, ...] = (), *parts: Tree) -> Tree:
        """The tree with these parts."""
        key = (what, says, *map(id, parts))
        return self._made.setdefault(key, (what, says, parts))


class SecondReader:
    """One file's constants, as trees that can be compared.

    Args:
        trees: one for all files that are compared.
        renamed: names that are read as other ones.

    Universe parameters are read as their places among those of their constant.
    """

    def __init__(self, data: bytes, trees: Trees, renamed: dict[Tree, Tree] | None = None) -> None:
        start = _HEADER[data[5]]
        self._data, self._make = data, trees.make
        self._base, root = struct.unpack_from("<QQ", data, start)
        self._start = start + 16
        self._renamed = renamed or {}
        self._parameters: tuple[Tree, ...] = ()
        self._trees: dict[tuple[tuple[Tree, ...], int], Tree] = {}
        self._root = root

    def constants(self) -> dict[Tree, Tree]:
        """By their names; in what they say, and how."""
        return {name: self.constant(address) for name, address in self.addresses().items()}

    def addresses(self) -> dict[Tree, int]:
        """Where each constant stands, for :meth:`constant`."""
        names, infos = (list(self._array(self._field(self._root, n))) for n in (1, 2))
        assert len(names) == len(infos)
        return {self._name(n): i for n, i in zip(names, infos, strict=True)}

    def objects(self) -> Iterator[tuple[int, int, int]]:
        """Offset, tag and size in bytes of all objects, in the order of the file."""
        at = self._start
        while at + 8 <= len(self._data):
            _, size, _, tag = struct.unpack_from("<iHBB", self._data, at)
            if tag == 246:
                size = 24 + 8 * struct.unpack_from("<Q", self._data, at + 16)[0]
            elif tag == 248:
                size = 24 + struct.unpack_from("<Q", self._data, at + 16)[0]
            elif tag == 249:
                size = 32 + struct.unpack_from("<Q", self._data, at + 16)[0]
            elif tag == 250:
                size = 24 + 8 * struct.unpack_from("<I", self._data, at + 8)[0]
            if size <= 0:
                return
            size += -size % 8
            yield at, tag, size
            at += size

    def _at(self, address: int) -> int:
        offset = address - self._base
        assert 0 < offset < len(self._data), "astray"
        assert not offset % 8, "astray"
        return offset

    def _tag(self, address: int) -> int:
        return address >> 1 if address & 1 else self._data[self._at(address) + 7]

    def _field(self, address: int, number: int) -> int:
        found: int = struct.unpack_from("<Q", self._data, self._at(address) + 8 + 8 * number)[0]
        return found

    def _scalars(self, address: int, count: int) -> bytes:
        at = self._at(address)
        start = at + 8 + 8 * self._data[at + 6]
        return self._data[start : start + count]

    def _array(self, address: int) -> Iterator[int]:
        assert self._tag(address) == 246, "no array"
        for number in range(self._field(address, 0)):
            yield self._field(address, 2 + number)

    def _list(self, address: int) -> Iterator[int]:
        while not address & 1:
            assert self._tag(address) == 1, "no list"
            yield self._field(address, 0)
            address = self._field(address, 1)

    def _text(self, address: int) -> str:
        assert self._tag(address) == 249, "no string"
        at, size = self._at(address), self._field(address, 0)
        return self._data[at + 32 : at + 32 + size - 1].decode()

    def _number(self, address: int) -> int:
        if address & 1:
            return address >> 1
        assert self._tag(address) == 250, "no number"
        limbs = struct.unpack_from("<i", self._data, self._at(address) + 12)[0]
        at = self._at(self._field(address, 1))
        return int.from_bytes(self._data[at : at + 8 * limbs], "little")

    def _name(self, address: int) -> Tree:
        name = self._spelled(address)
        return self._renamed.get(name, name)

    def _spelled(self, address: int) -> Tree:
        if address & 1:
            return ()
        above = self._spelled(self._field(address, 0))
        last = self._field(address, 1)
        return (*above, self._text(last) if self._tag(address) == 1 else self._number(last))

    def _level(self, address: int) -> Tree:
        tag = self._tag(address)
        if tag == 0:
            return self._make("zero")
        if tag == 4:
            name = self._spelled(self._field(address, 0))
            place = self._parameters.index(name) if name in self._parameters else name
            return self._make("param", (place,))
        what, count = _LEVELS[tag]
        return self._make(what, (), *(self._level(self._field(address, n)) for n in range(count)))

    def _expression(self, address: int) -> Tree:
        key = (self._parameters, address)
        if key in self._trees:
            assert self._trees[key] is not None, "a cycle"
            return self._trees[key]
        self._trees[key] = None
        tag = self._tag(address)
        found = self._trees[key] = self._read_expression(address, tag)
        return found

    def _read_expression(self, address: int, tag: int) -> Tree:
        def field(number: int) -> int:
            return self._field(address, number)

        if tag == _MDATA:
            return self._expression(field(1))
        if tag == _PROJ:
            says = self._name(field(0)), self._number(field(1))
            return self._make("proj", says, self._expression(field(2)))
        if tag == 0:
            return self._make("bvar", (self._number(field(0)),))
        if tag == 3:
            return self._make("sort", (), self._level(field(0)))
        if tag == 4:
            levels = map(self._level, self._list(field(1)))
            return self._make("const", (self._name(field(0)),), *levels)
        if tag == 9:
            literal, value = field(0), self._field(field(0), 0)
            is_text = self._tag(literal) == 1
            return self._make("lit", (self._text(value) if is_text else self._number(value),))
        what, fields = _MADE_OF_EXPRESSIONS[tag]
        return self._make(what, (), *(self._expression(field(n)) for n in fields))

    def constant(self, address: int) -> Tree:
        """Kind, name, number of parameters, type, what its kind has besides, and scalars."""
        kind, fields, scalars = _CONSTANTS[self._tag(address)]
        value = self._field(address, 0)
        head = self._field(value, 0)
        self._parameters = tuple(self._spelled(each) for each in self._list(self._field(head, 1)))
        parts: list[Tree] = [self._name(self._field(head, 0)), len(self._parameters)]
        assert len(set(self._parameters)) == len(self._parameters), "a parameter twice"
        parts.append(self._expression(self._field(head, 2)))
        parts += [self._part(kind, number, self._field(value, number)) for number in fields]
        return kind, *parts, self._scalars(value, scalars)

    def _part(self, kind: str, number: int, address: int) -> Tree:
        if kind in ("definition", "theorem", "opaque"):
            return self._expression(address)
        if kind == "recursor" and number == 6:
            return [
                (
                    self._name(self._field(rule, 0)),
                    self._number(self._field(rule, 1)),
                    self._expression(self._field(rule, 2)),
                )
                for rule in self._list(address)
            ]
        if (kind, number) in (("inductive", 3), ("inductive", 4), ("recursor", 1)):
            return [self._name(each) for each in self._list(address)]
        if (kind, number) == ("constructor", 1):
            return self._name(address)
        return self._number(address)
