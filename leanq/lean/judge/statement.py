"""Compares two compiled files as data: does a candidate state what a target states?

The target was compiled on its own. Its theorems must stand in the candidate with equal levels and
types. All that their statements reach through the target's own constants must stand there too, with
equal values. A target's imports are the same in both: the candidate must import all of them and
cannot declare them to the kernel. Proofs may differ, and so may the values of *holes*: definitions
that are `sorry` in the target and that the caller has named.

Names and kinds of bound variables and metadata do not matter. Universe parameters count by their
place, and not by their name.

Lean makes matchers, abstracted proofs and bodies of recursions by itself, and shares them between
declarations. Each has the name of the first declaration that needed it. So these constants count as
what they are: a theorem as its type, a definition as its type and value. To the kernel, two
definitions with one value are equal, and so are two proofs of one statement. Axioms, opaque
constants and inductive types differ under other names, so these count by their names.

This is one file, so that the meaning of constants and their comparison can be checked side by side.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from leanq.lean.judge.marked import SORRY, Marked
from leanq.lean.run import layouts
from leanq.lean.run.image import AHEAD, BOXED_ZERO, Image, Name, Raw, Walk
from leanq.lean.run.layouts import Damaged
from leanq.lean.run.olean import as_written, display, places

# Extensions of attributes by which a program runs that is not the one that a proof is about.
_OVERRIDES = (
    ("Lean", "Compiler", "implementedByAttr"),
    ("Lean", "externAttr"),
    ("Lean", "Compiler", "CSimp", "ext"),
    ("Lean", "exportAttr"),
    ("Lean", "regularInitAttr"),
    ("Lean", "builtinInitAttr"),
)
# The last part of the names that Lean adds to a constant, and to a constructor.
_BESIDE_CONSTANT = re.compile(r"_.+|match_\d+(?:_\d+)*|splitter|proof_\d+|eq_\d+|eq_def")
# Lean gives a declaration those variables of its section, and of what it stands in, that it uses.
_TAKES_OTHERS = (
    "its type is not the source's; where a tactic uses a variable from around the declaration, "
    "make it an argument of the declaration in the source"
)
_BREC_ON = re.compile(r"brecOn(?:_\d+)?")
_BESIDE_CONSTRUCTOR = frozenset({"inj", "injEq", "sizeOf_spec"})
_MOST_DIFFERENCES = 100
# The worker itself looks for what is open, and no limit of time holds there: two seconds or so.
_MOST_OPENING_STEPS = 1 << 21


class Difference(NamedTuple):
    """A reason why a candidate is not the target's.

    ``rule`` is one of the words of `leanq.queue.requests.Rule`.
    """

    name: str
    rule: str
    text: str


class Comparison(NamedTuple):
    """The comparison of a candidate with a target.

    Attributes:
        theorems: the target's theorems.
        differences: empty if the candidate states what the target states.
    """

    theorems: list[Name]
    differences: list[Difference]


class _Scope:
    """The numbers of levels and leaves under a list of universe parameters."""

    def __init__(self, parameters: Sequence[Name], zero: int) -> None:
        self.places = {name: place for place, name in enumerate(parameters)}
        self.levels = {BOXED_ZERO: zero}
        self.leaves: dict[int, int] = {}


class View:
    """The expressions of one image as numbers.

    Attributes:
        made: the definitions and theorems that count as what they are, and not by their names.
    """

    def __init__(self, interner: Interner, image: Image) -> None:
        self._interner, self._image = interner, image
        self._scopes: dict[tuple[Name, ...], _Scope] = {}
        self.made: Mapping[Name, Raw] = {}
        self._meanings: dict[Name, int] = {}
        self._behind: dict[Name, set[Name]] = {}

    def expression(self, raw: Raw, root: int) -> tuple[int, set[Name]]:
        """Returns the number of an expression in a constant, and the names of the constants in it.

        For a constant that counts as what it is, these are the names in that.
        """
        walk = self._image.walk(root)
        names = set(map(self._image.name, walk.named))
        self._settle(names)
        return self._number(raw, root, walk), self._unfolded(names)

    def _settle(self, names: Iterable[Name]) -> None:
        """Finds the meanings of the constants that count as what they are; without recursion."""
        made, meanings, opened = self.made, self._meanings, set[Name]()
        todo = [name for name in names if name in made]
        while todo:
            name = todo[-1]
            if name in meanings:
                todo.pop()
                continue
            raw = made[name]
            roots = raw.meant
            inner = self._image.constants_in(*roots)
            if needs := [each for each in inner if each in made and each not in meanings]:
                if name in opened:
                    raise Damaged("its definitions go in circles")
                opened.add(name)
                todo += needs
                continue
            numbers = (self._number(raw, root, self._image.walk(root)) for root in roots)
            levels = len(self._image.levels(raw))
            meanings[name] = self._interner.number(("meaning", raw.kind, levels, *numbers))
            self._behind[name] = self._unfolded(inner)
            todo.pop()

    def _unfolded(self, names: set[Name]) -> set[Name]:
        inner = names & self._behind.keys()
        if not inner:
            return names
        return (names - inner).union(*(self._behind[name] for name in inner))

    def _number(self, raw: Raw, root: int, walk: Walk) -> int:
        words, base, scope = self._image.words, self._image.base, self._scope(raw)
        numbers, leaves = self._interner.numbers, scope.leaves
        local: dict[int, int] = {}
        try:
            for at in sorted(walk.addresses):
                index = (at - base) >> 3
                kind = words[index] >> 48
                key: Value
                if kind == layouts.APP:  # more than half of all, spelt out for speed
                    key = (layouts.APP, local[words[index + 1]], local[words[index + 2]])
                elif kind == layouts.MDATA:
                    local[at] = local[words[index + 2]]
                    continue
                elif below := layouts.PARTS[kind]:
                    parts = [local[words[index + part]] for part in below]
                    key = (kind, *parts, *self._leaf(kind, index, scope))
                else:
                    if at not in leaves:
                        leaf = self._leaf(kind, index, scope)
                        leaves[at] = self._interner.number((kind, *leaf))
                    local[at] = leaves[at]
                    continue
                local[at] = numbers.setdefault(key, len(numbers))
        except KeyError:
            raise Damaged(AHEAD) from None
        return local[root]

    def _scope(self, raw: Raw) -> _Scope:
        parameters = tuple(self._image.levels(raw))
        found = self._scopes.get(parameters)
        if found is None:
            zero = self._interner.number(("level", "zero"))
            found = self._scopes[parameters] = _Scope(parameters, zero)
        return found

    def _level(self, address: int, scope: _Scope) -> int:
        """Returns the number of a universe level."""
        image, levels = self._image, scope.levels
        for at, kind, fields in image.levels_behind(address, levels):
            if kind == layouts.LEVEL_PARAM:
                place = scope.places.get(image.name(fields[0]))
                if place is None:
                    raise Damaged("it holds a universe level that is no parameter of its constant")
                key: Value = ("level", kind, place)
            else:
                key = ("level", kind, *(levels[each] for each in fields))
            levels[at] = self._interner.number(key)
        return levels[address]

    def whole(self, raw: Raw) -> Value:
        """Returns everything of a constant, in a form that can be compared."""
        levels = len(self._image.levels(raw))
        type_, _ = self.expression(raw, raw.type_)
        body = None if raw.body is None else self.expression(raw, raw.body)[0]
        return (raw.kind, raw.safe, levels, type_, body, self.others(raw))

    def others(self, raw: Raw) -> Value:
        """Returns what a constant has beside its levels, type and value."""
        image, words, value = self._image, self._image.words, raw.value

        def counts(*fields: int) -> list[int]:
            return [image.small(words[value + field]) for field in fields]

        def flags(count: int) -> list[int]:
            return [image.flag(value, number) for number in range(count)]

        if raw.kind in ("axiom", "opaque", "definition", "quotient"):
            return (image.scalar(value, 0),)
        if raw.kind == "inductive":
            is_counted = image.counts_nested(raw)
            nests = image.small(words[value + 6]) if is_counted else image.flag(value, 3)
            blocks = (tuple(image.names(words[value + number])) for number in (4, 5))
            return (*counts(2, 3), *blocks, *flags(3), nests > 0)
        if raw.kind == "constructor":
            return (image.name(words[value + 2]), *counts(3, 4, 5), *flags(1))
        if raw.kind == "recursor":
            rules = (
                (image.name(constructor), fields, self.expression(raw, right)[0])
                for constructor, fields, right in image.rules(raw)
            )
            block = tuple(image.names(words[value + 2]))
            return (block, *counts(3, 4, 5, 6), *flags(2), *rules)
        return ()

    def _leaf(self, kind: int, index: int, scope: _Scope) -> Value:
        """Returns what an expression holds beside other expressions."""
        image, words = self._image, self._image.words
        if kind == layouts.BVAR:
            return (image.natural(words[index + 1]),)
        if kind == layouts.SORT:
            return (self._level(words[index + 1], scope),)
        if kind == layouts.CONST:
            levels = (self._level(each, scope) for each in image.linked(words[index + 2]))
            name = image.name(words[index + 1])
            return (self._meanings.get(name, name), *levels)
        if kind == layouts.PROJ:
            return (image.name(words[index + 1]), image.small(words[index + 2]))
        return (image.literal(words[index + 1]),) if kind == layouts.LIT else ()


class Stated:
    """One of the two files: its constants, and all that they lead to."""

    def __init__(self, interner: Interner, image: Image) -> None:
        self.image = image
        self.constants = image.constants()
        self.view = View(interner, image)

    def count_by_name(self, names: Collection[Name]) -> None:
        """Lets every other definition and theorem count as what it is."""
        self.view.made = made_by_lean(self.constants, names)

    def beside(self, raw: Raw) -> set[Name]:
        """Returns the constants that come and go together with this one."""
        image, words, value = self.image, self.image.words, raw.value
        if raw.kind == "inductive":
            return {*image.names(words[value + 4]), *image.names(words[value + 5])}
        if raw.kind == "constructor":
            return {image.name(words[value + 2])}
        if raw.kind == "recursor":
            return {*image.names(words[value + 2])}
        return set()

    def behind(self, start: Collection[Name]) -> set[Name]:
        """Returns all constants that these lead to, by types and values."""
        seen, todo = set(start), list(start)
        while todo:
            raw = self.constants.get(todo.pop())
            if raw is not None:
                fresh = (self.image.references(raw) | self.beside(raw)) - seen
                seen |= fresh
                todo += fresh
        return seen

    def overrides(self) -> set[tuple[str, str]]:
        """Returns the declarations that are compiled as something else: by which attribute, and
        which."""
        image, words, found = self.image, self.image.words, set()
        for extension, entries in image.entries().items():
            if extension in _OVERRIDES:
                for address in image.array(entries):
                    try:
                        declaration = display(image.name(words[image.index(address) + 1]))
                    except (Damaged, IndexError):
                        declaration = "?"
                    found.add((display(extension), declaration))
        return found


def made_by_lean(constants: Mapping[Name, Raw], declared: Collection[Name]) -> dict[Name, Raw]:
    """Returns the definitions and theorems that Lean made for those that a text declares."""
    return {
        name: raw
        for name, raw in constants.items()
        if raw.safe and raw.kind in ("definition", "theorem") and name not in declared
    }


def own_constants(image: Image, constants: Mapping[Name, Raw]) -> list[Name]:
    """Returns the constants that the text itself declares, in its order as far as that is known."""
    starts = {name: whole[:2] for name, (whole, _) in places(image).items()}
    own = [name for name in constants if name in starts or not is_leans_own(name, constants)]
    return sorted(own, key=lambda name: (starts.get(name, (0, 0)), str(name)))


def is_leans_own(name: Name, constants: Mapping[Name, Raw]) -> bool:
    """Returns whether Lean has made this constant by itself, for another one of the file.

    Its name tells, so a text can declare one that looks like it: see `own_constants`.
    """
    last, above = name[-1], constants.get(name[:-1]) or constants.get(as_written(name[:-1]))
    if isinstance(last, int):
        return True  # no text can write such a name
    if above is None:
        return False
    if last in _BESIDE_CONSTRUCTOR:
        return above.kind == "constructor"
    return _BESIDE_CONSTANT.fullmatch(last) is not None or (
        last == "eq" and _BREC_ON.fullmatch(str(name[-2])) is not None
    )


def compare(
    target: Image,
    candidate: Image,
    *,
    theorems: Collection[Name] = (),
    holes: Collection[str] | None = (),
    ignored: Collection[Name] = (),
    is_whole: bool = False,
    unfilled: str = "",
    allowed: Collection[str] = (),
) -> Comparison:
    """Compares two files.

    Args:
        theorems: the target's theorems to look for; none means all that its text declares.
        holes: definitions that are `sorry` in the target, and whose value the candidate may choose;
            None for all of them. The candidate has to have the named ones.
        ignored: constants of either file that do not count.
        is_whole: whether the candidate has to have all that the target's text declares.
        unfilled: the whole name of an axiom that stands for what is open, as `sorryAx` does.
        allowed: axioms that the caller allows; if the candidate declares one, it has to be the
            target's.

    Raises:
        Damaged, IndexError: a file is not Lean's.
    """
    interner = Interner()
    ours, theirs = Stated(interner, target), Stated(interner, candidate)
    for each in ignored:
        ours.constants.pop(each, None)
        theirs.constants.pop(each, None)
    wanted = list(theorems) or [
        name
        for name in own_constants(target, ours.constants)
        if is_whole or ours.constants[name].kind == "theorem"
    ]
    open_ = [name for name in ours.constants if holes and display(name) in holes]
    by_name = {*wanted, *open_, *_told_by_name(ours, theirs), *_told_by_name(theirs, ours)}
    ours.count_by_name(by_name)
    theirs.count_by_name(by_name)
    comparing = _Comparing(ours, theirs, wanted, open_, holes, allowed)
    comparing.ignored = {*map(display, ignored)}
    if holes is None:
        # A proof in a definition may be what is open, and it may use other variables then.
        marked = Marked(target, ours.constants, ours.view.made, unfilled)
        comparing.unknown = {name for name in ours.constants if marked.is_open(name)}
    comparing.run()
    return Comparison(wanted, comparing.found)


def what_is_open(target: Image) -> tuple[bool, list[Name]]:
    """Returns whether a target declares a theorem, and the definitions that it leaves open.

    Raises:
        Damaged, IndexError: the file is not Lean's, or takes too long to read.
    """
    target.steps = min(target.steps, _MOST_OPENING_STEPS)
    stated = Stated(Interner(), target)
    own = own_constants(target, stated.constants)
    stated.count_by_name(set(own))
    raws = [stated.constants[name] for name in own]
    # Its value may lead to a sorry through constants that Lean made.
    open_ = [
        raw.name
        for raw in raws
        if raw.kind == "definition"
        and raw.body is not None
        and SORRY in stated.view.expression(raw, raw.body)[1]
    ]
    return any(raw.kind == "theorem" for raw in raws), open_


def _told_by_name(one: Stated, other: Stated) -> Iterator[Name]:
    """Yields the constants that a file's text declares, without private names that the other file
    lacks."""
    for name in places(one.image):
        if name[0] != "_private" or name in other.constants:
            yield name


@dataclass
class _Comparing:
    """One comparison in progress."""

    _ours: Stated
    _theirs: Stated
    _wanted: list[Name]
    _open: list[Name]
    _holes: Collection[str] | None
    _allowed: Collection[str]
    _seen: set[Name] = field(default_factory=set)
    unknown: Collection[Name] = ()
    ignored: Collection[str] = ()
    found: list[Difference] = field(default_factory=list)

    def run(self) -> None:
        if not self._wanted and not self._open:
            self._say((), "target_lacks", "the target declares nothing to prove")
        init = {("Init",)}
        imported = {each.module for each in self._theirs.image.imports()} | init
        for module in sorted({e.module for e in self._ours.image.imports()} - imported, key=str):
            self._say(module, "import_missing", "the target imports it, and the candidate does not")
        for name in [*self._wanted, *self._open]:
            if name not in self._ours.constants:
                self._say(name, "target_lacks", "the target does not declare it")
            self._compare_from(name)
        self._compare_axioms()
        extra = self._theirs.overrides() - self._ours.overrides()
        for extension, declaration in sorted(extra):
            if declaration in self.ignored:
                continue
            text = f"{extension} gives it another program in the candidate alone"
            self._differs(Difference(declaration, "overridden", text))

    def _compare_axioms(self) -> None:
        """Compares by name the axioms that the candidate declares and the caller allows."""
        for name, theirs in self._theirs.constants.items():
            said = display(name)
            if theirs.kind != "axiom" or said not in self._allowed:
                continue
            if name in self._ours.constants:
                self._compare_from(name)
            else:
                self._say(name, "axiom", "the candidate declares it, and the target does not")

    def _compare_from(self, theorem: Name) -> None:
        """Compares a theorem, and all that its statement reaches and no other has reached."""
        todo = [theorem]
        while todo:
            name = todo.pop()
            if name in self._seen:
                continue
            self._seen.add(name)
            ours, theirs = self._ours.constants.get(name), self._theirs.constants.get(name)
            if ours is None and theirs is not None:
                text = "the target imports it, and the candidate declares it"
                self._say(name, "redeclared", text, theorem)
            if ours is None:
                continue
            if theirs is None:
                self._say(name, "missing", "the candidate does not declare it", theorem)
                continue
            todo += self._compare(ours, theirs, theorem) - self._seen

    def _compare(self, ours: Raw, theirs: Raw, theorem: Name) -> set[Name]:
        """Compares two constants of one name; returns the names to compare with them."""
        name, mine, other = ours.name, self._ours, self._theirs
        if ours.kind != theirs.kind:
            text = f"{ours.kind} in the target, {theirs.kind} in the candidate"
            self._say(name, "kind_differs", text, theorem)
            return set()
        if ours.safe and not theirs.safe:
            self._say(name, "safety_differs", "unsafe or partial in the candidate alone", theorem)
        levels = len(mine.image.levels(ours)), len(other.image.levels(theirs))
        if levels[0] != levels[1]:
            text = f"it has {levels[1]} universe parameters, and the target's has {levels[0]}"
            self._say(name, "levels_differ", text, theorem)
        type_, reached = mine.view.expression(ours, ours.type_)
        if type_ != other.view.expression(theirs, theirs.type_)[0]:
            text = _TAKES_OTHERS if self._holes is None else "its type is not the target's"
            self._say(name, "type_differs", text, theorem)
        if ours.kind == "theorem":
            return reached
        if mine.view.others(ours) != other.view.others(theirs):
            self._say(name, "definition_differs", "it has other parts, rules or flags", theorem)
        reached |= mine.beside(ours)
        if ours.body is None or theirs.body is None or name in self.unknown:
            return reached
        body, in_body = mine.view.expression(ours, ours.body)
        if ours.kind == "definition" and SORRY in in_body:
            self._compare_hole(name, other.image.constants_in(theirs.body), theorem)
            return reached
        if body != other.view.expression(theirs, theirs.body)[0]:
            self._say(name, "definition_differs", "its value is not the target's", theorem)
        return reached | in_body

    def _compare_hole(self, name: Name, in_body: set[Name], theorem: Name) -> None:
        if display(name) not in (self._holes or ()):
            text = "its value is a sorry, and it is not named as a hole"
            self._say(name, "hole_not_named", text, theorem)
        mentioned = self._theirs.behind(in_body).intersection(self._wanted)
        if mentioned:
            names = ", ".join(sorted(map(display, mentioned)))
            self._say(name, "hole_uses_theorem", f"what fills the hole leads to {names}", theorem)

    def _say(self, name: Name, rule: str, text: str, theorem: Name = ()) -> None:
        """Notes a difference in a theorem, or in what it reaches."""
        if theorem and theorem != name:
            text = f"{display(name)}, which it reaches: {text}"
            name = theorem
        self._differs(Difference(display(name), rule, text))

    def _differs(self, difference: Difference) -> None:
        if len(self.found) < _MOST_DIFFERENCES:
            self.found.append(difference)


# Numbers for expressions and levels of compiled files.

Value = tuple[Any, ...]
"""The kind of an expression or level, the numbers of those in it, and what it holds beside."""


class Interner:
    """Numbers for expressions and levels: equal ones have the same number, in whatever file."""

    def __init__(self) -> None:
        self.numbers: dict[Value, int] = {}
        self._keys: list[Value] = []

    def number(self, key: Value) -> int:
        """Returns the number of this key."""
        return self.numbers.setdefault(key, len(self.numbers))

    def key(self, number: int) -> Value:
        """Returns the key that has this number."""
        if number >= len(self._keys):
            self._keys += islice(self.numbers, len(self._keys), None)
        return self._keys[number]
