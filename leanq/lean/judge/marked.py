"""Finds what a hole holds in a compiled file, with all that is bound around it.

A marker stands around the content of the hole: an axiom of leanq's that says of any value that it
is one. Lean keeps it, with the type of the hole, in the term of the declaration::

    theorem t (p q : Prop) (hp : p) … := fun p q hp … => … (marker T e) …

Lean moves parts of a declaration into constants of its own: proofs in a definition, the body of a
recursion. There the term stands behind other variables, so it is read from where the declaration
uses that constant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from leanq.lean.judge.kernel import Kernel, KernelLimitError
from leanq.lean.judge.rebuild import Rebuilder
from leanq.lean.run import layouts
from leanq.lean.run.image import BOXED_ZERO, Image, Name, Raw
from leanq.lean.run.olean import as_written

SORRY: Name = ("sorryAx",)
# More copies of one hole than a person would write, and few enough to be judged.
_MOST_COPIES = 64
_MOST_VISITS = 1 << 16
_TOO_MANY = f"the hole stands in more than {_MOST_COPIES} places"


class _Use(NamedTuple):
    """A constant of Lean's that is applied to arguments: the addresses of its levels and of the
    arguments."""

    name: Name
    levels: int
    args: tuple[int, ...]


class _Part(NamedTuple):
    """A part of a constant: the binders around it, outermost first, and the term there or the
    constant that has it.

    Addresses of expressions and of the marker's level; those but the binders' are 0 where ``use``
    says which constant it is.
    """

    binders: tuple[int, ...]
    level: int = 0
    type_: int = 0
    term: int = 0
    use: _Use | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What a hole holds in one place.

    Attributes:
        root: the declaration of the text that it stands in.
        parts: the way there: a part of the root, then one of the constant that this part uses, and
            so on.
    """

    root: Name
    parts: tuple[_Part, ...]


class Marked:
    """The holes of one file that are marked.

    Args:
        made: the definitions and theorems that Lean made for those of the text.
        marker: the name of the marker around the hole in question.
        has_values: whether the variable of a ``have`` is known by its value, too.
        unfilled: that of the axiom in marked holes that are open.
        markers: those of all markers.

    Attributes:
        marker: its name in this file; () if the file lacks it.
        holes: the constants that stand for what is open.
    """

    def __init__(
        self,
        image: Image,
        constants: Mapping[Name, Raw],
        made: Collection[Name],
        unfilled: str = "",
        markers: Collection[str] = (),
        marker: str = "",
        *,
        has_values: bool = False,
    ) -> None:
        self._image, self._constants, self._made = image, constants, made
        self.marker: Name = (marker,) if (marker,) in constants else ()
        self.has_values = has_values
        self._markers = {(each,) for each in markers}
        self.holes: set[Name] = {SORRY, (unfilled,)}
        self._named: dict[Name, set[Name]] = {}
        self._leads: dict[Name, bool] = {}
        self._open: dict[Name, bool] = {}
        self._parts: dict[Name, list[_Part]] = {}

    def held(self, declared: Collection[Name]) -> list[Held]:
        """Returns what the hole holds, in each place in these declarations of the text.

        Raises:
            KernelLimitError: there are too many.
        """
        found = []
        for name, raw in self._constants.items():
            if name in declared and raw.safe and raw.body is not None and self.leads(name):
                for parts in self._ways(name, name, declared):
                    found.append(Held(name, parts))
                    if len(found) > _MOST_COPIES:
                        raise KernelLimitError(_TOO_MANY)
        return found

    def is_proof(self, held: Held) -> bool:
        """Returns whether a hole holds a proof, by the level of its marker."""
        return self._image.linked(held.parts[-1].level) == [BOXED_ZERO]

    def leads(self, name: Name) -> bool:
        """Returns whether a constant's value has the marker, perhaps through constants that Lean
        made for it."""
        return self._reaches(name, {self.marker}, self._leads)

    def is_stated(self, name: Name, declared: Collection[Name]) -> bool:
        """Returns whether the marker stands in the type of a declaration of the text, perhaps in a
        constant that Lean made for it."""
        used = self._image.constants_in(self._constants[name].type_)
        parts = (each for each in used if self.is_part(each, name, declared))
        return self.marker in used or any(map(self.leads, parts))

    def is_open(self, name: Name) -> bool:
        """Returns whether a constant's value has a hole in it, in the same sense."""
        return self._reaches(name, self.holes, self._open)

    def _reaches(self, name: Name, wanted: Collection[Name], known: dict[Name, bool]) -> bool:
        if name not in known:
            seen, todo, found = {name}, [name], False
            while todo and not found:
                used = self._in_value(todo.pop())
                found = not used.isdisjoint(wanted)
                fresh = {each for each in used if each in self._made} - seen
                seen |= fresh
                todo += fresh
            known[name] = found
        return known[name]

    def _in_value(self, name: Name) -> set[Name]:
        if name not in self._named:
            body = self._constants[name].body if name in self._constants else None
            self._named[name] = set() if body is None else self._image.constants_in(body)
        return self._named[name]

    def _ways(
        self, name: Name, root: Name, declared: Collection[Name], around: tuple[Name, ...] = ()
    ) -> Iterator[tuple[_Part, ...]]:
        """Yields the ways to the marked terms in a constant, which Lean made for a declaration."""
        if name in around or self._owner(name, root, declared) != root:
            return  # another declaration's, of which this one uses a lemma, say
        if name not in self._parts:
            parts = self._parts_of(self._constants[name])
            self._parts[name] = [*islice(parts, _MOST_COPIES + 1)]
            if len(self._parts[name]) > _MOST_COPIES:
                raise KernelLimitError(_TOO_MANY)
        for part in self._parts[name]:
            if part.use is None:
                yield (part,)
            else:
                for way in self._ways(part.use.name, root, declared, (*around, name)):
                    yield (part, *way)

    def is_part(self, name: Name, root: Name, declared: Collection[Name]) -> bool:
        """Returns whether Lean has made a constant for this declaration of the text."""
        return name in self._made and self._owner(name, (), declared) == root

    def _owner(self, name: Name, default: Name, declared: Collection[Name]) -> Name:
        """Returns for which declaration Lean has made a constant, by its name."""
        owners = (
            each[:end] for each in (name, as_written(name)) for end in range(len(each), 0, -1)
        )
        return next((each for each in owners if each in declared), default)

    def _parts_of(self, raw: Raw) -> Iterator[_Part]:
        """Yields the marked terms in a constant's value, and the constants of Lean's that have
        some."""
        assert raw.body is not None
        image = self._image
        words, base = image.words, image.base
        holding = self._holding(raw.body)
        todo: list[tuple[int, tuple[int, ...]]] = [(raw.body, ())]
        seen = set(todo)
        while todo:
            at, binders = todo.pop()
            if len(seen) > _MOST_VISITS:
                raise KernelLimitError("there are too many ways to what stands in the hole")
            index = (at - base) >> 3
            kind = words[index] >> 48
            below: list[tuple[int, tuple[int, ...]]] = []
            if kind in (layouts.APP, layouts.CONST):
                head, args = self._spine(at)
                if words[head] >> 48 == layouts.CONST:
                    name = image.name(words[head + 1])
                    if name == self.marker and len(args) > 1:
                        yield _Part(binders, words[head + 2], args[0], args[1])
                        args = args[2:]
                    elif name in self._made and self.leads(name):
                        yield _Part(binders, use=_Use(name, words[head + 2], tuple(args)))
                else:
                    below.append((base + 8 * head, binders))
                below += ((each, binders) for each in args)
            else:
                *outside, last = (words[index + part] for part in layouts.PARTS[kind])
                inside = (*binders, at) if kind in layouts.BINDERS else binders
                below += ((each, binders) for each in outside)
                below.append((last, inside))
            for item in reversed(below):
                if item[0] in holding and item not in seen:
                    seen.add(item)
                    todo.append(item)

    def _holding(self, root: int) -> set[int]:
        """Returns the expressions in one that lead to a marked term."""
        image = self._image
        words, base = image.words, image.base
        holding = set[int]()
        for at in sorted(image.walk(root).addresses):
            index = (at - base) >> 3
            kind = words[index] >> 48
            if kind == layouts.CONST:
                name = image.name(words[index + 1])
                if name == self.marker or (name in self._made and self.leads(name)):
                    holding.add(at)
            elif any(words[index + part] in holding for part in layouts.PARTS[kind]):
                holding.add(at)
        return holding

    def _spine(self, at: int) -> tuple[int, list[int]]:
        """Returns the index of an application's head, and its arguments."""
        words, base, args = self._image.words, self._image.base, []
        while True:
            index = (at - base) >> 3
            kind = words[index] >> 48
            if kind == layouts.APP:
                args.append(words[index + 2])
                at = words[index + 1]
            elif kind == layouts.MDATA:
                at = words[index + 2]
            else:
                break
        self._image.spend(len(args) + 1)
        args.reverse()
        return index, args

    # What is built from it

    def addresses(self, held: Held, *, with_term: bool) -> list[int]:
        """Returns the expressions that a closed statement or, with the term, a closed term has."""
        found: list[int] = []
        image = self._image
        for part in held.parts:
            for at in part.binders:
                index = image.index(at)
                found.append(image.words[index + 2])
                if self._keeps_value(at):
                    found.append(image.words[index + 3])
            found += part.use.args if part.use else (part.type_,)
            if with_term and part.term:
                found.append(part.term)
        return found

    def closed(self, held: Held, kernel: Kernel, build: Rebuilder) -> tuple[int, int]:
        """Returns what a hole holds and its type, each closed by all variables around it."""
        builders = [build]
        for part in held.parts[:-1]:
            assert part.use is not None
            parameters = self._image.levels(self._constants[part.use.name])
            builders.append(builders[-1].at_levels(parameters, part.use.levels))
        made = [0, 0]
        for level in reversed(range(len(held.parts))):
            part, build = held.parts[level], builders[level]
            given = 0
            if level:
                use = held.parts[level - 1].use
                assert use is not None
                given = self._given(use, part)
            if part.use is None:
                made = [build.expression(part.term), build.expression(part.type_)]
            else:
                count = self._given(part.use, held.parts[level + 1])
                for arg in part.use.args[:count]:
                    made = [kernel.app(each, build.expression(arg)) for each in made]
            for place in reversed(range(len(part.binders))):
                made = [
                    self._bound(kernel, build, part.binders[place], each, is_type=is_type)
                    for each, is_type in zip(made, (False, place >= given), strict=True)
                ]
        return made[0], made[1]

    def _given(self, use: _Use, part: _Part) -> int:
        """Returns how many binders around a part take an argument of the constant's use."""
        words, index = self._image.words, self._image.index
        at, count = self._constants[use.name].body or 0, 0
        for each, _ in zip(part.binders, use.args, strict=False):
            while words[index(at)] >> 48 == layouts.MDATA:
                at = words[index(at) + 2]
            if each != at or words[index(at)] >> 48 != layouts.LAM:
                break
            at = words[index(at) + 3]
            count += 1
        return count

    def _bound(self, kernel: Kernel, build: Rebuilder, at: int, body: int, *, is_type: bool) -> int:
        words, index = self._image.words, self._image.index(at)
        name, type_ = build.name(words[index + 1]), build.expression(words[index + 2])
        if self._keeps_value(at):
            return int(kernel.let(name, type_, build.expression(words[index + 3]), body, 0))
        kind = 0 if words[index] >> 48 == layouts.LET else words[index + 5] & 3
        return int((kernel.forall if is_type else kernel.lam)(name, type_, body, kind))

    def _keeps_value(self, at: int) -> bool:
        """Returns whether a binder's variable is known by its value, which no hole decides."""
        index = self._image.index(at)
        if self._image.words[index] >> 48 != layouts.LET:
            return False
        if self._image.flag(index, 8) and not self.has_values:
            return False
        used = self._image.constants_in(self._image.words[index + 3])
        is_known = used.isdisjoint(self.holes | self._markers)
        return is_known and not any(each in self._made and self.is_open(each) for each in used)
