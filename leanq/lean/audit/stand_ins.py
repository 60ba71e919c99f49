"""Tells what the axiom that stands in for holes proves in a compiled file.

A stand-in is applied to a mark, which tells its hole, and to the type of that hole. A tactic can
take one out of its goal by unification, and apply it to another type. So two files are compared. In
one the tactic's own hole is a `sorry`, and in the other the tactic stands there. For each mark, the
second file may have no type that the first lacks.

A type counts behind the variables that it mentions. These stand before it as a function's
arguments, so that it does not matter where in the file it stands. Where the type depends on the
tactic's own hole, the first file has a `sorry`, and the second may have anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

from leanq.lean.audit.image import APP, BVAR, CONST, FORALL, LAM, LET, PROJ, Name
from leanq.lean.audit.interner import Interner, Value

_SORRY: Name = ("sorryAx",)
_Item = TypeVar("_Item", bound=Hashable)
_Found = TypeVar("_Found")
_PARTS = {APP: 2, LAM: 2, FORALL: 2, LET: 3, PROJ: 1}


class Use(NamedTuple):
    """A stand-in at one place: the numbers of its mark, and of its type behind its variables."""

    mark: int
    type_: int


ALONE = Use(-1, -1)
"""A stand-in without a mark and a type, or with a mark that is not closed."""


class Uses:
    """Finds the uses of a stand-in in expressions that are numbers.

    Args:
        stand_in: what counts as the stand-in in a constant's key.
        spend: is called with a number of steps; it raises `Damaged` when there are too many.
    """

    def __init__(self, interner: Interner, stand_in: int, spend: Callable[[int], None]) -> None:
        self._key, self._number = interner.key, interner.number
        self._stand_in, self._spend = stand_in, spend
        self._uses: dict[int, frozenset[Use]] = {}
        self._masks: dict[int, int] = {}
        self._lowered: dict[tuple[int, int], int] = {}

    def of(self, root: int) -> frozenset[Use]:
        """Returns the uses in an expression."""
        return _fold(root, self._uses, self._read, self._join, self._spend)

    def fits(self, use: Use, known: Iterable[Use]) -> bool:
        """Returns whether one of the known uses is this one, where a `sorry` in them may be
        anything."""
        return any(
            use.mark == each.mark and self._is_instance(use.type_, each.type_) for each in known
        )

    def _is_instance(self, value: int, pattern: int) -> bool:
        seen, todo = set[tuple[int, int]](), [(value, pattern)]
        while todo:
            pair = todo.pop()
            if pair in seen or pair[0] == pair[1] or self._is_sorry(pair[1]):
                continue
            self._spend(1)
            seen.add(pair)
            mine, theirs = self._key(pair[0]), self._key(pair[1])
            count = _PARTS.get(_kind(mine), 0)
            if not count or mine[0] != theirs[0] or mine[count + 1 :] != theirs[count + 1 :]:
                return False
            todo += zip(_parts(mine), _parts(theirs), strict=True)
        return True

    def _is_sorry(self, number: int) -> bool:
        key = self._key(number)
        while key[0] == APP:
            key = self._key(_parts(key)[0])
        return key[:2] == (CONST, _SORRY)

    def _applied(self, number: int) -> Use | None:
        """Returns the mark and the type of a stand-in with exactly these."""
        key = self._key(number)
        if key[0] == APP:
            function, type_ = _parts(key)
            inner = self._key(function)
            if inner[0] == APP:
                head, mark = _parts(inner)
                if self._key(head)[:2] == (CONST, self._stand_in):
                    return Use(mark, type_)
        return None

    def _read(self, number: int) -> tuple[int, ...]:
        return self._applied(number) or _parts(self._key(number))

    def _join(self, number: int) -> frozenset[Use]:
        key, below = self._key(number), [self._uses[each] for each in self._read(number)]
        if key[:2] == (CONST, self._stand_in):
            return frozenset([ALONE])
        if use := self._applied(number):
            below.append(frozenset([ALONE if self._mask(use.mark) else use]))
        elif key[0] in (LAM, FORALL, LET) and below[-1]:
            bound = _parts(key)[0]
            below[-1] = frozenset(self._outside(use, bound) for use in below[-1])
        found = [each for each in below if each]
        return found[0] if len(found) == 1 else frozenset().union(*found)

    def _outside(self, use: Use, bound: int) -> Use:
        """Returns a use as it is outside of the innermost variable around it, which has this
        type."""
        if use == ALONE:
            return use
        if self._mask(use.type_) & 1:
            return Use(use.mark, self._number((FORALL, bound, use.type_)))
        return Use(use.mark, self._lower(use.type_))

    def _mask(self, root: int) -> int:
        """Returns which of the variables around an expression it mentions, a bit for each."""

        def join(number: int) -> int:
            key = self._key(number)
            if key[0] == BVAR:
                (index,) = key[1:]
                assert isinstance(index, int)
                self._spend(1 + index // 64)
                return 1 << index
            masks = [self._masks[each] for each in _parts(key)]
            if key[0] in (LAM, FORALL, LET):
                masks[-1] >>= 1
            whole = 0
            for mask in masks:
                whole |= mask
            return whole

        return _fold(root, self._masks, lambda n: _parts(self._key(n)), join, self._spend)

    def _lower(self, root: int) -> int:
        """Returns an expression with one variable less around it, which it does not mention."""

        def below(item: tuple[int, int]) -> tuple[tuple[int, int], ...]:
            number, inner = item
            if not self._mask(number) >> inner:
                return ()
            key = self._key(number)
            parts = _parts(key)
            is_inside = key[0] in (LAM, FORALL, LET)
            return tuple(
                (part, inner + (is_inside and place == len(parts) - 1))
                for place, part in enumerate(parts)
            )

        def join(item: tuple[int, int]) -> int:
            number, inner = item
            if not self._mask(number) >> inner:
                return number
            key = self._key(number)
            if key[0] == BVAR:
                (index,) = key[1:]
                assert isinstance(index, int)
                return self._number((BVAR, index - 1))
            parts = [self._lowered[each] for each in below(item)]
            return self._number((key[0], *parts, *key[len(parts) + 1 :]))

        return _fold((root, 0), self._lowered, below, join, self._spend)


def _kind(key: Value) -> int:
    kind = key[0]
    return kind if isinstance(kind, int) else -1


def _parts(key: Value) -> tuple[int, ...]:
    """Returns the expressions in an expression."""
    return key[1 : 1 + _PARTS.get(_kind(key), 0)]  # type: ignore[return-value]


def _fold(
    root: _Item,
    known: dict[_Item, _Found],
    below: Callable[[_Item], Iterable[_Item]],
    join: Callable[[_Item], _Found],
    spend: Callable[[int], None],
) -> _Found:
    """Returns the value of an item, once those below it have theirs; without recursion."""
    todo = [root]
    while todo:
        item = todo[-1]
        if item in known:
            todo.pop()
        elif missing := [each for each in below(item) if each not in known]:
            todo += missing
        else:
            spend(1)
            known[item] = join(item)
            todo.pop()
    return known[root]
