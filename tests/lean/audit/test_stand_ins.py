"""What stands in for holes: found in expressions as a reader with named variables finds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leanq.lean.audit.image import APP, BVAR, CONST, FORALL, LAM, LET, PROJ
from leanq.lean.audit.interner import Interner
from leanq.lean.audit.stand_ins import ALONE, Use, Uses

Tree = tuple[Any, ...]

STAND_IN, SORRY = ("stand-in",), ("constant", "sorryAx")
VARIABLES = st.builds(lambda n: ("variable", n), st.integers(0, 5))
CONSTANTS = st.builds(lambda n: ("constant", n), st.sampled_from("abc"))
MARKS = st.builds(lambda n: ("constant", n), st.sampled_from(["one", "two"]))
MANY = 100_000


def above(trees: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.just("apply"), trees, trees),
        st.tuples(st.sampled_from(["function", "forall"]), trees, trees),
        st.tuples(st.just("let"), trees, trees, trees),
        st.tuples(st.just("field"), trees),
        st.builds(lambda mark, tree: ("apply", ("apply", STAND_IN, mark), tree), MARKS, trees),
        st.builds(lambda tree: ("apply", STAND_IN, tree), trees),
    )


TREES = st.recursive(VARIABLES | CONSTANTS | st.just(STAND_IN), above, max_leaves=25)


class Written:
    """Trees as numbers, and what a reader finds in them."""

    def __init__(self) -> None:
        self.interner = Interner()
        self.meaning = self.interner.number(STAND_IN)
        self.left = MANY
        self.uses = Uses(self.interner, self.meaning, self._spend)

    def _spend(self, steps: int) -> None:
        self.left -= steps
        assert self.left > 0

    def number(self, tree: Tree) -> int:
        kind, *parts = tree
        number = self.interner.number
        if kind == "variable":
            return number((BVAR, parts[0]))
        if kind == "constant":
            return number((CONST, (parts[0],)))
        if kind == "stand-in":
            return number((CONST, self.meaning, "level"))
        below = [self.number(part) for part in parts]
        kinds = {"apply": APP, "function": LAM, "forall": FORALL, "let": LET, "field": PROJ}
        return number((kinds[kind], *below, *((("A",), 0) if kind == "field" else ())))


class Named:
    """A reader that gives each variable a name, and the type that it was bound with."""

    def __init__(self, free: int) -> None:
        # Variables that nothing binds are those of a place further out.
        self.types: list[Tree | None] = [None] * free
        self.free = free
        self.found: set[tuple[Tree, Tree] | None] = set()

    def read(self, tree: Tree, around: Sequence[int]) -> Tree:
        """Returns the tree with names, and notes the uses in it."""
        kind, *parts = tree
        if kind == "variable":
            return ("name", around[parts[0]])
        if kind == "constant":
            return tree
        if kind == "stand-in":
            self.found.add(None)
            return tree
        if kind == "apply" and parts[0][:2] == ("apply", STAND_IN):
            mark, type_ = (self.read(part, around) for part in (parts[0][2], parts[1]))
            is_closed = not self.mentioned(mark)
            self.found.add((mark, self.closed(type_)) if is_closed else None)
            return ("apply", ("apply", STAND_IN, mark), type_)
        if kind in ("function", "forall", "let"):
            *outer, inner = parts
            named = [self.read(part, around) for part in outer]
            self.types.append(named[0])
            name = len(self.types) - 1
            return (kind, *named, ("bind", name, self.read(inner, (name, *around))))
        return (kind, *(self.read(part, around) for part in parts))

    def mentioned(self, named: Any) -> set[int]:
        """The names in a tree that it does not bind itself."""
        if not isinstance(named, tuple):
            return set()
        if named[0] == "name":
            return {named[1]}
        inner: set[int] = set().union(*map(self.mentioned, named[1:]))
        return inner - {named[1]} if named[0] == "bind" else inner

    def closed(self, type_: Tree) -> Tree:
        """Returns a type behind all variables that it rests on, with numbers for names."""
        needed, todo = set[int](), self.mentioned(type_)
        while todo:
            needed |= todo
            types = (self.types[name] for name in todo)
            todo = set().union(*(self.mentioned(each) for each in types)) - needed
        bound = sorted(name for name in needed if name >= self.free)
        for name in reversed(bound):
            type_ = ("forall", self.types[name], ("bind", name, type_))
        return self.numbered(type_, ())

    def numbered(self, named: Tree, around: Sequence[int]) -> Tree:
        kind, *parts = named
        if kind == "name":
            order = (*around, *range(self.free))
            return ("variable", order.index(parts[0]))
        if kind == "bind":
            return self.numbered(parts[1], (parts[0], *around))
        if kind in ("constant", "stand-in"):
            return named
        return (kind, *(self.numbered(part, around) for part in parts))


@given(TREES)
def test_uses_are_those_that_a_reader_with_names_finds(tree: Tree) -> None:
    free = 6
    named, written = Named(free), Written()
    named.read(tree, range(free))
    expected = {ALONE if use is None else Use(*map(written.number, use)) for use in named.found}
    assert written.uses.of(written.number(tree)) == expected


def places(tree: Tree) -> list[tuple[int, ...]]:
    """The paths to all parts of a tree that are expressions."""
    if tree[0] in ("variable", "constant", "stand-in"):
        return [()]
    below = [(at, *path) for at, part in enumerate(tree[1:], 1) for path in places(part)]
    return [(), *below]


def put(tree: Tree, path: Sequence[int], part: Tree) -> Tree:
    if not path:
        return part
    at, *rest = path
    return (*tree[:at], put(tree[at], rest, part), *tree[at + 1 :])


CLOSED = st.recursive(CONSTANTS, above, max_leaves=12)


@given(st.data(), CLOSED, CLOSED)
def test_a_sorry_stands_for_anything_and_nothing_else_does(
    data: st.DataObject, tree: Tree, part: Tree
) -> None:
    written = Written()
    mark, other = written.number(("constant", "one")), written.number(("constant", "two"))
    path = data.draw(st.sampled_from(places(tree)))
    held = ("apply", ("apply", SORRY, ("constant", "a")), ("constant", "b"))
    known = Use(mark, written.number(put(tree, path, held)))
    filled = Use(mark, written.number(put(tree, path, part)))
    assert written.uses.fits(filled, [known])
    assert not written.uses.fits(Use(other, filled.type_), [known])
    # Without a sorry, only the same fits.
    assert written.uses.fits(filled, [Use(mark, written.number(tree))]) == (
        put(tree, path, part) == tree
    )


def test_a_deep_expression_needs_no_recursion() -> None:
    written = Written()
    number = written.number(("apply", ("apply", STAND_IN, ("constant", "one")), ("variable", 0)))
    type_ = written.number(("constant", "a"))
    for _ in range(20_000):
        number = written.interner.number((LAM, type_, number))
    uses = written.uses.of(number)
    outside = written.number(("forall", ("constant", "a"), ("variable", 0)))
    assert uses == {Use(written.number(("constant", "one")), outside)}
