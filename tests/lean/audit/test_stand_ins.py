"""Stand-ins for holes, beside a reader that gives names to variables and finds the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leanq.lean.audit import shapes
from leanq.lean.audit.interner import Interner
from leanq.lean.audit.stand_ins import ALONE, Use, Uses

Tree = tuple[Any, ...]

SORRY = ("constant", "sorryAx")
VARIABLES = st.builds(lambda n: ("variable", n), st.integers(0, 5))
CONSTANTS = st.builds(lambda n: ("constant", n), st.sampled_from(["a", "b", "sorryAx"]))
STAND_INS = st.builds(lambda n: ("stand-in", n), st.sampled_from(["one", "two"]))
BINDERS = ("function", "forall", "let")
MANY = 100_000


def above(trees: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.just("apply"), trees, trees),
        st.tuples(st.sampled_from(["function", "forall"]), trees, trees),
        st.tuples(st.just("let"), trees, trees, trees),
        st.tuples(st.just("field"), trees),
        st.builds(lambda stand_in, tree: ("apply", stand_in, tree), STAND_INS, trees),
        st.builds(lambda tree: ("apply", ("apply", SORRY, tree), SORRY), trees),
    )


TREES = st.recursive(VARIABLES | CONSTANTS | STAND_INS, above, max_leaves=25)


class Written:
    """Trees as numbers, and what is found in them."""

    def __init__(self) -> None:
        self.interner = Interner()
        self.stand_ins = {name: self.interner.number((name,)) for name in ("one", "two")}
        self.left = MANY
        self.uses = Uses(self.interner, self.stand_ins.values(), self._spend)

    def _spend(self, steps: int) -> None:
        self.left -= steps
        assert self.left > 0

    def number(self, tree: Tree) -> int:
        kind, *parts = tree
        number = self.interner.number
        if kind == "variable":
            return number((shapes.BVAR, parts[0]))
        if kind == "constant":
            return number((shapes.CONST, (parts[0],)))
        if kind == "stand-in":
            return number((shapes.CONST, self.stand_ins[parts[0]], "level"))
        below = [self.number(part) for part in parts]
        kinds = {
            "apply": shapes.APP,
            "function": shapes.LAM,
            "forall": shapes.FORALL,
            "let": shapes.LET,
            "field": shapes.PROJ,
        }
        return number((kinds[kind], *below, *((("A",), 0) if kind == "field" else ())))

    def context(self, binders: Sequence[Sequence[Tree]]) -> int:
        """The number of what is around, outermost first."""
        made = self.interner.number(("context",))
        for binder in binders:
            made = self.interner.number(("context", made, *map(self.number, binder)))
        return made


class Reader:
    """A reader that knows the variables around each place, outermost first."""

    def __init__(self) -> None:
        self.found: set[tuple[str, tuple[Any, ...], Tree | None]] = set()
        self.held: set[str] = set()

    def read(self, tree: Tree, around: tuple[Any, ...] = ()) -> None:
        kind, *parts = tree
        if kind == "stand-in":
            self.found.add((parts[0], (), None))
        elif kind == "apply" and parts[0][0] == "stand-in":
            self.found.add((parts[0][1], around, parts[1]))
            self.read(parts[1], around)
        elif kind in BINDERS:
            *outer, inner = parts
            for part in outer:
                self.read(part, around)
            self.read(inner, (*around, tuple(outer)))
            if mentions(inner, SORRY):
                self.held |= {name for part in outer for name in stand_ins(part)}
        elif kind not in ("variable", "constant"):
            for part in parts:
                self.read(part, around)
            head = tree
            while head[0] == "apply":
                head = head[1]
            if head == SORRY:
                self.held |= stand_ins(parts[1])


def mentions(tree: Tree, part: Tree) -> bool:
    return tree == part or any(mentions(each, part) for each in tree if isinstance(each, tuple))


def stand_ins(tree: Tree) -> set[str]:
    return {name for name in ("one", "two") if mentions(tree, ("stand-in", name))}


def mentioned(tree: Tree, depth: int = 0) -> set[int]:
    """The variables around a tree that it mentions: 0 is the innermost."""
    kind, *parts = tree
    if kind == "variable":
        return {parts[0] - depth} if parts[0] >= depth else set()
    below = [part for part in parts if isinstance(part, tuple)]
    return set().union(
        *(
            mentioned(part, depth + (kind in BINDERS and part_at == len(below) - 1))
            for part_at, part in enumerate(below)
        )
    )


def lowered(tree: Tree, by: int, depth: int = 0) -> Tree:
    """The tree with fewer variables around it."""
    kind, *parts = tree
    if kind == "variable":
        return (kind, parts[0] - by if parts[0] >= depth else parts[0])
    return (
        kind,
        *(
            lowered(part, by, depth + (kind in BINDERS and at == len(parts) - 1))
            if isinstance(part, tuple)
            else part
            for at, part in enumerate(parts)
        ),
    )


@given(TREES)
def test_uses_are_those_that_a_reader_finds(tree: Tree) -> None:
    reader, written = Reader(), Written()
    reader.read(tree)
    uses = written.uses.of(written.number(tree))
    found = {
        (use.mark, *([ALONE] if use.type_ == ALONE else next(written.uses.sequents(use))))
        for use in uses
    }
    assert found == {
        (
            written.stand_ins[name],
            *([ALONE] if type_ is None else (written.context(around), written.number(type_))),
        )
        for name, around, type_ in reader.found
    }


@given(TREES)
def test_a_use_is_seen_without_the_last_variables_that_it_does_not_mention(tree: Tree) -> None:
    reader, written = Reader(), Written()
    reader.read(tree)
    sequents: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for use in written.uses.of(written.number(tree)):
        if use.type_ != ALONE:
            found = list(written.uses.sequents(use))
            sequents[use.mark, *found[0]] = found
    for name, around, type_ in reader.found:
        if type_ is None:
            continue
        most = min([*mentioned(type_), len(around)])
        expected = [
            (written.context(around[: len(around) - by]), written.number(lowered(type_, by)))
            for by in range(most + 1)
        ]
        assert sequents[written.stand_ins[name], *expected[0]] == expected


@given(TREES)
def test_what_the_goals_of_holes_mention_is_held(tree: Tree) -> None:
    reader, written = Reader(), Written()
    reader.read(tree)
    expected = {written.stand_ins[name] for name in reader.held}
    assert written.uses.held(written.number(tree)) == expected


def test_the_closed_type_has_the_variables_that_it_mentions() -> None:
    written = Written()
    a, b = ("constant", "a"), ("constant", "b")
    type_ = ("apply", b, ("variable", 1))
    tree = ("function", b, ("function", a, ("function", b, ("apply", ("stand-in", "one"), type_))))
    (use,) = written.uses.of(written.number(tree))
    closed = ("forall", a, ("apply", b, ("variable", 0)))
    assert written.uses.closed(use) == written.number(closed)


def test_a_deep_expression_needs_no_recursion() -> None:
    written = Written()
    number = written.number(("apply", ("stand-in", "one"), ("variable", 0)))
    type_ = written.number(("constant", "a"))
    for _ in range(10_000):
        number = written.interner.number((shapes.LAM, type_, number))
    (use,) = written.uses.of(number)
    assert use.mark == written.stand_ins["one"]
    assert next(written.uses.sequents(use))[1] == written.number(("variable", 0))
    assert written.uses.held(number) == frozenset()
    assert isinstance(use, Use)
