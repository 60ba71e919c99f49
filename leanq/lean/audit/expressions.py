"""Tells the types and shapes of expressions from how they are written.

It unfolds no definition: two types that are equal only by a definition count as different.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from leanq.lean.audit import shapes
from leanq.lean.audit.image import Name
from leanq.lean.audit.kernel import Kernel, KernelLimitError

EXPLICIT, INSTANCE = 0, 3
"""Lean's numbers for the kinds of binders."""
_THEOREM = 2
NATURAL, _STRING = (shapes.CONST, "Nat"), (shapes.CONST, "String")
_MARKS = frozenset(
    (shapes.CONST, each) for each in ("optParam", "autoParam", "outParam", "semiOutParam")
)

Key = object
"""The structure of an expression, for comparison; without universe levels."""


@dataclass(frozen=True, slots=True)
class Local:
    """A variable that is bound around an expression."""

    type_: int
    is_instance: bool


Locals = tuple[Local, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """The type of a function.

    Attributes:
        kinds: of each binder, as Lean numbers them.
        types: of each binder.
        told: the parameters that follow from each of these types.
        mentioned: the parameters that each of them mentions.
        result: the type behind the binders.
        told_by_result: the parameters that follow from it.
        depth: how many variables are bound around the type.
        is_proof: whether the function is a theorem.
        hides_levels: whether its arguments do not tell all its universe levels.
    """

    kinds: tuple[int, ...]
    types: tuple[int, ...]
    told: tuple[frozenset[int], ...]
    mentioned: tuple[frozenset[int], ...]
    result: int
    told_by_result: frozenset[int]
    depth: int = 0
    is_proof: bool = False
    hides_levels: bool = False


class Expressions:
    """Reads expressions as Lean's library holds them.

    Args:
        kernel: its environment has all that they refer to.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._name = kernel, kernel.read_name
        self._cells: dict[int, tuple[int, ...]] = {}
        self._signatures: dict[Name, Signature] = {}
        self._keys: dict[tuple[int, int], Key] = {}
        self._types: dict[tuple[int, Locals], Key] = {}
        self._left = 0

    def _type(self, at: int, around: Locals) -> Key:
        """Returns the type of an expression; None if its parts alone do not tell it."""
        found = self._types.get((at, around))
        if found is None:
            found = self._types[at, around] = self._found_type(at, around)
        return found

    def _found_type(self, at: int, around: Locals) -> Key:
        kind = self._kind(at)
        if kind in (shapes.SORT, shapes.FORALL):
            return (shapes.SORT,)
        if kind == shapes.LIT:
            is_text = isinstance(self._kernel.literal(self._word(at, 1)), str)
            return _STRING if is_text else NATURAL
        if kind == shapes.BVAR:
            level = len(around) - 1 - (self._word(at, 1) >> 1)
            return without_mark(self._key(around[level].type_, level))
        if kind == shapes.CONST:
            return self._key(self._kernel.info(self._word(at, 1)).type_, 0)
        if kind != shapes.APP:
            return None
        head, args = self._spine(at)
        type_ = self._type(head, around)
        for arg in args:
            type_ = self._result(type_, self._key(arg, len(around)))
        return without_mark(type_)

    def _result(self, type_: Key, value: Key) -> Key:
        """Returns the type of a function's result for a value, by the function's type; None if it
        is not plain."""
        if not isinstance(type_, tuple) or type_[0] != shapes.FORALL:
            return None
        return self._replaced(type_[3], value, 0)

    def _replaced(self, key: Any, value: Key, inner: int) -> Key:
        """A key with a value for each variable that is bound around it."""
        self._spend()
        kind = key[0]
        if kind == shapes.BVAR:
            return value if key == (shapes.BVAR, "bound", inner) else key
        if kind in (shapes.CONST, shapes.SORT, shapes.LIT):
            return key
        below = [self._replaced(each, value, inner) for each in key[2:-1]]
        is_inside = kind in shapes.BINDERS
        return self._made(*key[:2], *below, self._replaced(key[-1], value, inner + is_inside))

    def _made(self, kind: int, number: int, *below: Any) -> Key:
        """Returns the key of an expression with these parts; for an applied function, that of its
        body."""
        if kind == shapes.APP and below[0][0] == shapes.LAM:
            return self._replaced(below[0][3], below[1], 0)
        return (kind, number, *below)

    def _is_proof(self, at: int, around: Locals) -> bool:
        """Returns whether an expression may be a proof that is not printed."""
        if self._kind(at) in (shapes.BVAR, shapes.CONST, shapes.SORT, shapes.FORALL, shapes.LIT):
            return False
        while (kind := self._kind(at)) in (shapes.LAM, shapes.LET):
            at, around = self._word(at, 3 if kind == shapes.LAM else 4), self._inside(at, around)
        type_: Any = self._type(at, around)
        while type_ is not None and type_[0] == shapes.FORALL:
            type_ = type_[3]
        head: Any = head_of(type_)
        if head is None or head[0] in (shapes.SORT, shapes.LIT):
            return head is None
        if head[:2] == (shapes.BVAR, "around") and head[2] < len(around):
            sort = self._telescope(around[head[2]].type_, head[2]).result
            return self._kind(sort) != shapes.SORT or self._word(sort, 1) & 1 == 1
        if head[0] != shapes.CONST:
            return True
        sort = self._of_constant(self._kernel.name(head[1:])).result
        return self._kind(sort) != shapes.SORT or self._may_be_zero(self._word(sort, 1))

    def _may_be_zero(self, level: int) -> bool:
        if level & 1:
            return True
        kind = self._kind(level)
        if kind == shapes.LEVEL_MAX:
            return all(self._may_be_zero(self._word(level, number)) for number in (1, 2))
        return kind != shapes.LEVEL_SUCC

    def _signature(self, head: int, around: Locals) -> Signature | None:
        """Returns the type of an application's head; None if it is neither a constant nor a
        variable."""
        kind = self._kind(head)
        if kind == shapes.BVAR:
            level = len(around) - 1 - (self._word(head, 1) >> 1)
            return self._telescope(around[level].type_, level)
        return self._of_constant(self._word(head, 1)) if kind == shapes.CONST else None

    def _of_constant(self, named: int) -> Signature:
        name = self._name(named)
        found = self._signatures.get(name)
        if found is None:
            info = self._kernel.info(named)
            params = {self._name(each) for each in self._kernel.items(info.levels)}
            found = self._telescope(
                info.type_, 0, is_proof=info.kind == _THEOREM, params=frozenset(params)
            )
            self._signatures[name] = found
        return found

    def _telescope(
        self,
        type_: int,
        depth: int,
        *,
        is_proof: bool = False,
        params: frozenset[Name] = frozenset(),
    ) -> Signature:
        kinds, types = [], []
        while self._kind(type_) == shapes.FORALL:
            kinds.append(self._binder(type_))
            types.append(self._word(type_, 2))
            type_ = self._word(type_, 3)
        return Signature(
            tuple(kinds),
            tuple(types),
            tuple(frozenset(self._rigid(each, n)) for n, each in enumerate(types)),
            tuple(frozenset(self._mentioned(each, n)) for n, each in enumerate(types)),
            type_,
            frozenset(self._rigid(type_, len(types))),
            depth,
            is_proof,
            hides_levels=bool(params) and not params <= self._levels_in(types),
        )

    def _levels_in(self, roots: Sequence[int]) -> set[Name]:
        """Returns the universe parameters that some expressions tell; a maximum does not tell its
        parts."""
        found, seen = set[Name](), set[int]()
        levels: list[int] = []
        for at in self._below(roots):
            if self._kind(at) == shapes.SORT:
                levels.append(self._word(at, 1))
            elif self._kind(at) == shapes.CONST:
                levels += self._kernel.items(self._word(at, 2))
        while levels:
            level = levels.pop()
            if level & 1 or level in seen:
                continue
            seen.add(level)
            kind = self._kind(level)
            if kind == shapes.LEVEL_PARAM:
                found.add(self._name(self._word(level, 1)))
            elif kind == shapes.LEVEL_SUCC:
                levels.append(self._word(level, 1))
        return found

    def _rigid(self, type_: int, depth: int) -> set[int]:
        """Returns the parameters that follow from a type; ``depth`` are bound around it."""
        kind = self._kind(type_)
        if kind == shapes.BVAR:
            return parameter(self._word(type_, 1) >> 1, depth)
        if kind in (shapes.FORALL, shapes.LAM):
            inner = self._rigid(self._word(type_, 3), depth + 1) - {depth}
            is_type = kind == shapes.FORALL
            return inner | self._rigid(self._word(type_, 2), depth) if is_type else inner
        if kind != shapes.APP:
            return set()
        head, args = self._spine(type_)
        told = args if self._constant(head) else ()
        return set[int]().union(*(self._rigid(each, depth) for each in told))

    def _mentioned(self, type_: int, depth: int) -> set[int]:
        """Returns the parameters that a type mentions."""
        if self._kind(type_) == shapes.BVAR:
            return parameter(self._word(type_, 1) >> 1, depth)
        found = set[int]()
        for part, is_inside in self._parts(type_):
            below = self._mentioned(part, depth + is_inside)
            found |= below - {depth} if is_inside else below
        return found

    def _key(self, at: int, depth: int, values: Sequence[Key] = ()) -> Key:
        """Returns the structure of an expression with values for the innermost variables around
        it."""
        if values:
            return self._new_key(at, depth, values, 0)
        found = self._keys.get((at, depth))
        if found is None:
            found = self._keys[at, depth] = self._new_key(at, depth, values, 0)
        return found

    def _new_key(self, at: int, depth: int, values: Sequence[Key], inner: int) -> Key:
        self._spend()
        kind, word = self._kind(at), self._word
        if kind == shapes.BVAR:
            index = word(at, 1) >> 1
            if index < inner:
                return (shapes.BVAR, "bound", index)
            index -= inner
            if index < len(values):
                return values[len(values) - 1 - index]
            return (shapes.BVAR, "around", depth - 1 - (index - len(values)))
        if kind == shapes.CONST:
            return (shapes.CONST, *self._name(word(at, 1)))
        if kind == shapes.SORT:
            return (shapes.SORT,)
        if kind == shapes.LIT:
            return (shapes.LIT, self._kernel.literal(word(at, 1)))
        below = [
            self._new_key(part, depth, values, inner + is_inside)
            for part, is_inside in self._parts(at)
        ]
        return self._made(kind, word(at, 2) if kind == shapes.PROJ else 0, *below)

    def _below(self, roots: Sequence[int]) -> Iterator[int]:
        """Yields all expressions in some, each once."""
        seen, todo = set(roots), list(roots)
        while todo:
            self._spend()
            at = todo.pop()
            yield at
            fresh = {part for part, _ in self._parts(at)} - seen
            seen |= fresh
            todo += fresh

    def _parts(self, at: int) -> Iterator[tuple[int, bool]]:
        """Yields the expressions in one, and whether each is inside of its variable."""
        kind, *words = self._cell(at)
        parts = shapes.PARTS[kind]
        for part in parts:
            yield words[part - 1], kind in shapes.BINDERS and part == parts[-1]

    def _constant(self, at: int) -> Name:
        """Returns the name of a constant; () for another expression."""
        return self._name(self._word(at, 1)) if self._kind(at) == shapes.CONST else ()

    def _spine(self, at: int) -> tuple[int, list[int]]:
        """Returns the head of an application, and its arguments."""
        args = []
        cell = self._cell(at)
        while cell[0] == shapes.APP:
            args.append(cell[2])
            at = cell[1]
            cell = self._cell(at)
        self._spend(len(args) + 1)
        args.reverse()
        return at, args

    def _inside(self, at: int, around: Locals) -> Locals:
        is_instance = self._kind(at) != shapes.LET and self._binder(at) == INSTANCE
        return (*around, Local(self._word(at, 2), is_instance))

    def _binder(self, at: int) -> int:
        return self._kernel.byte(at, 3, 8)

    def _cell(self, at: int) -> tuple[int, ...]:
        """Returns the kind of an expression or a level, and its fields; for metadata, those behind
        it."""
        found = self._cells.get(at)
        if found is None:
            found = self._kernel.cell(at)
            if found[0] == shapes.MDATA:
                found = self._cell(found[2])
            self._cells[at] = found
        return found

    def _kind(self, at: int) -> int:
        return self._cell(at)[0]

    def _word(self, at: int, number: int) -> int:
        return self._cell(at)[number]

    def _spend(self, visits: int = 1) -> None:
        self._left -= visits
        if self._left < 0:
            raise KernelLimitError("the statement is too large")


def parameter(index: int, depth: int) -> set[int]:
    """Returns which of so many parameters a variable is, if it is one of them."""
    return {depth - 1 - index} if index < depth else set()


def head_of(key: Any) -> Key:
    """Returns the key of an application's head."""
    while isinstance(key, tuple) and key and key[0] == shapes.APP:
        key = key[2]
    return key


def domain(type_: Any) -> Key:
    """Returns a function type's argument type; None for another type."""
    return type_[2] if type_ is not None and type_[0] == shapes.FORALL else None


def without_mark(type_: Any) -> Key:
    """Returns the type of a parameter without the mark of a default value, or of an output."""
    while head_of(type_) in _MARKS:
        while type_[2] not in _MARKS:
            type_ = type_[2]
        type_ = type_[3]
    return type_
