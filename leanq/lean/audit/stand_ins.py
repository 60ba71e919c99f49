"""Tells what the axioms that stand in for holes prove in a compiled file.

Each hole has an axiom of its own, which is applied to the hole's type. A tactic can take one out of
its goal by unification, and apply it to another type, or where less is assumed. So two files are
compared. In one the tactic's own hole is a `sorry`, and in the other the tactic stands there. A
stand-in that the tactic can reach may prove in the second file only what it proves in the first.

What a hole is about can be what the tactic finds. So a stand-in may change with a tactic that
cannot reach it. The file does not tell which one can: Lean drops from it what a tactic saw, and a
tactic can name a goal that is closed. So Lean is asked what the tactic sees, and the caller says
which stand-ins are not there. All others prove what they prove without the tactic. None proves more
types than without it: a recursion more is one more to be ended by a hole behind `decreasing_by`.

A type counts behind all variables around it, whether it mentions them or not: a hypothesis can be
why it holds. Further variables behind these do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from functools import reduce
from operator import or_
from typing import NamedTuple, TypeVar

from leanq.lean.audit import shapes
from leanq.lean.audit.image import Name
from leanq.lean.audit.interner import Interner, Value

SORRY: Name = ("sorryAx",)
_Item = TypeVar("_Item", bound=Hashable)
_Found = TypeVar("_Found")
_PARTS = {shapes.APP: 2, shapes.LAM: 2, shapes.FORALL: 2, shapes.LET: 3, shapes.PROJ: 1}
_BEHIND = "behind"
_CONTEXT = "context"


class Use(NamedTuple):
    """A stand-in at one place: which one, and the number of its type behind all variables.

    ``type_`` is `ALONE` if it is not applied to a type.
    """

    mark: int
    type_: int


ALONE = -1


class Uses:
    """Finds the uses of stand-ins in expressions that are numbers.

    Args:
        marks: what counts as a stand-in in a constant's key.
        spend: is called with a number of steps; it raises `Damaged` when there are too many.
    """

    def __init__(
        self, interner: Interner, marks: Collection[int], spend: Callable[[int], None]
    ) -> None:
        self._key, self._number = interner.key, interner.number
        self._all_marks, self._spend = marks, spend
        self._uses: dict[int, frozenset[Use]] = {}
        self._marks: dict[int, frozenset[int]] = {}
        self._held: dict[int, frozenset[int] | None] = {}
        self._masks: dict[int, int] = {}
        self._lowered: dict[tuple[int, int], int] = {}

    def of(self, root: int) -> frozenset[Use]:
        """Returns the uses in an expression."""
        return _fold(root, self._uses, self._below, self._join_uses, self._spend)

    def marks(self, root: int) -> frozenset[int]:
        """Returns the stand-ins in an expression."""
        return _fold(root, self._marks, self._below, self._join_marks, self._spend)

    def held(self, root: int) -> frozenset[int]:
        """Returns the stand-ins in the goals of the `sorry`s of an expression, and in what they
        assume."""
        self.marks(root)
        return _fold(root, self._held, self._below, self._join_held, self._spend) or frozenset()

    def sequents(self, use: Use) -> Iterator[tuple[int, int]]:
        """Yields the variables and the type of a use, then without the last variables as long as
        the type does not mention them."""
        type_, binders = self._opened(use)
        contexts = [self._number((_CONTEXT,))]
        for binder in binders:
            contexts.append(self._number((_CONTEXT, contexts[-1], *binder)))
        yield contexts.pop(), type_
        while contexts and not self._mask(type_) & 1:
            type_ = self._lower(type_)
            yield contexts.pop(), type_

    def closed(self, use: Use) -> int:
        """Returns the type of a use behind the variables that it mentions alone."""
        type_, binders = self._opened(use)
        for binder in reversed(binders):
            if self._mask(type_) & 1:
                type_ = self._number((shapes.FORALL, binder[0], type_))
            else:
                type_ = self._lower(type_)
        return type_

    def _opened(self, use: Use) -> tuple[int, list[tuple[int, ...]]]:
        binders: list[tuple[int, ...]] = []
        number = use.type_
        while (key := self._key(number))[0] == _BEHIND:
            self._spend(1)
            *binder, number = key[1:]
            binders.append(tuple(binder))
        return number, binders

    def _below(self, number: int) -> tuple[int, ...]:
        return _parts(self._key(number))

    def _mark(self, number: int) -> int | None:
        """Returns which stand-in a constant is."""
        key = self._key(number)
        is_mark = key[0] == shapes.CONST and key[1] in self._all_marks
        return key[1] if is_mark else None

    def _join_uses(self, number: int) -> frozenset[Use]:
        if (mark := self._mark(number)) is not None:
            return frozenset([Use(mark, ALONE)])
        key, parts = self._key(number), self._below(number)
        below = [self._uses[each] for each in parts]
        if key[0] == shapes.APP and (mark := self._mark(parts[0])) is not None:
            below[0] = frozenset([Use(mark, parts[1])])
        elif key[0] in shapes.BINDERS and below[-1]:
            self._spend(len(below[-1]))
            below[-1] = frozenset(self._outside(use, parts[:-1]) for use in below[-1])
        return _union(below)

    def _outside(self, use: Use, binder: tuple[int, ...]) -> Use:
        """Returns a use as it is outside of the innermost variable around it."""
        if use.type_ == ALONE:
            return use
        return Use(use.mark, self._number((_BEHIND, *binder, use.type_)))

    def _join_marks(self, number: int) -> frozenset[int]:
        if (mark := self._mark(number)) is not None:
            return frozenset([mark])
        return _union([self._marks[each] for each in self._below(number)])

    def _join_held(self, number: int) -> frozenset[int] | None:
        """Returns None if there is no `sorry`."""
        key, parts = self._key(number), self._below(number)
        if key[:2] == (shapes.CONST, SORRY):
            return frozenset()
        found = [each for part in parts if (each := self._held[part]) is not None]
        if not found:
            return None
        if key[0] == shapes.APP and self._is_sorry(parts[0]):
            found.append(self._marks[parts[1]])
        elif key[0] in shapes.BINDERS and self._held[parts[-1]] is not None:
            found += [self._marks[part] for part in parts[:-1]]
        return _union(found)

    def _is_sorry(self, number: int) -> bool:
        key = self._key(number)
        while key[0] == shapes.APP:
            key = self._key(_parts(key)[0])
        return key[:2] == (shapes.CONST, SORRY)

    def _mask(self, root: int) -> int:
        """Returns which of the variables around an expression it mentions, a bit for each."""

        def join(number: int) -> int:
            key = self._key(number)
            if key[0] == shapes.BVAR:
                index: int = key[1]
                self._spend(1 + index // 64)
                return 1 << index
            masks = [self._masks[each] for each in _parts(key)]
            if key[0] in shapes.BINDERS:
                masks[-1] >>= 1
            return reduce(or_, masks, 0)

        return _fold(root, self._masks, self._below, join, self._spend)

    def _lower(self, root: int) -> int:
        """Returns an expression with one variable less around it, which it does not mention."""

        def below(item: tuple[int, int]) -> tuple[tuple[int, int], ...]:
            number, inner = item
            if not self._mask(number) >> inner:
                return ()
            key = self._key(number)
            parts = _parts(key)
            is_inside = key[0] in shapes.BINDERS
            return tuple(
                (part, inner + (is_inside and place == len(parts) - 1))
                for place, part in enumerate(parts)
            )

        def join(item: tuple[int, int]) -> int:
            number, inner = item
            if not self._mask(number) >> inner:
                return number
            key = self._key(number)
            if key[0] == shapes.BVAR:
                return self._number((shapes.BVAR, key[1] - 1))
            parts = [self._lowered[each] for each in below(item)]
            return self._number((key[0], *parts, *key[len(parts) + 1 :]))

        return _fold((root, 0), self._lowered, below, join, self._spend)


def _parts(key: Value) -> tuple[int, ...]:
    """Returns the expressions in an expression."""
    return key[1 : 1 + _PARTS.get(key[0], 0)]


def _union(sets: list[frozenset[_Item]]) -> frozenset[_Item]:
    found = [each for each in sets if each]
    return found[0] if len(found) == 1 else frozenset().union(*found)


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
