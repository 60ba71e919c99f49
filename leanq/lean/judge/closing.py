"""Judges whether a step proves its hole by itself.

It makes no proof of its own: it reads a statement and a term from compiled files, and asks the
kernel whether the one is a proof of the other.

The source was compiled with a ``sorry`` in the hole, and once more with the tactics; a marker
stands around both (see :mod:`leanq.lean.judge.marked`). The first file has the hole's *statement*:
its type behind all variables and hypotheses around it. The second has the *term* that the hole
holds. It is closed by all variables around it, and the kernel has to take it as a value of the
statement.

Whatever is still open is unknown to that kernel: a declaration with an open hole is an axiom of its
type, and nothing stands in for a hole. The term may use what comes before its own declaration, and
must hold no hole itself. So if all holes of a text are closed one by one, the text is a proof: each
hole holds a closed proof of its own statement, and declarations come in order.

A tactic may have holes of its own. They are marked, too, and an axiom fills those that are open.
The term of the hole around them may use each where it stands, since whatever closes it later is a
closed proof of what it states there. No term may use another hole of its own tactic, nor one around
it: each could then hold the other.

A step must leave the rest as it is. It declares nothing by a name, which the source or other
tactics could mean. No open hole may come to state something else, unless no step can close it. No
declaration may come to rest on a hole that did not so before.

This is one file, so that all that a term may hold can be checked side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from leanq.lean.judge.judge import DisagreementError, Judge
from leanq.lean.judge.kernel import Kernel, RefusedError, retain
from leanq.lean.judge.marked import SORRY, Held, Marked
from leanq.lean.judge.statement import Difference, made_by_lean
from leanq.lean.run import layouts
from leanq.lean.run.image import AHEAD, BOXED_ZERO, Image, Name, Raw
from leanq.lean.run.layouts import Damaged
from leanq.lean.run.olean import Survey, display, led_to, places, reachable

_T = TypeVar("_T")
_AXIOM, _DEFINITION = 0, 1
_SAFE, _ABBREVIATION = 1, 3
_OPENED, _OURS = "_opened", "_leanq"
# Lean compiles recursion to these.
_RECURSION = frozenset({"brecOn", "fix", "below"})
_MOST_NAMED = 3

# A state keeps its source, so a step closes a hole for no other one.
_CLOSE_FIRST = "write what closes that one into the text first, and check the text again"
_CLOSE_OTHERS = "write what closes the other holes into the text first, and check the text again"
_LEFT_OUT = (
    "Lean keeps nothing of what stands in this hole: nothing that is proved uses it, or another "
    f"hole of its definition states the same; {_CLOSE_OTHERS}"
)
_GOAL_OPEN = f"its goal, or a hypothesis, rests on another open hole; {_CLOSE_FIRST}"
_USES_OPEN = f"it uses what stands in another hole, which is open; {_CLOSE_FIRST}"
_RECURSIVE = (
    "with this tactic its declaration calls itself, which changes what the hole states; "
    f"{_CLOSE_OTHERS}"
)
_ABOUT_OPEN = (
    "a hole of a tactic is about what another one of its holes holds; leave goals there by `?_` "
    "instead"
)
_DECLARES = (
    "a tactic declares it, which may change what others mean; write `have` instead of `let rec`, "
    f"or {_CLOSE_OTHERS}"
)
_STATED = "it stands in a statement, which no step may change; write it into the text instead"
_OPENS = "with this tactic it rests on a sorry, and without it does not"
_DIFFERS = (
    "with this tactic the hole states something else than when it was opened, as when the tactic "
    f"settles what other goals are about; {_CLOSE_OTHERS}"
)


class _RefusalError(Exception):
    """Why a step does not prove its hole."""

    def __init__(self, name: Name, rule: str, text: str) -> None:
        super().__init__(text)
        self.difference = Difference(display(name) if name else "sorry", rule, text)


class Closed(NamedTuple):
    """The judgement on a step.

    Attributes:
        refused: why it does not prove its hole, or None.
        survey: what its proof leads to.
        nodes: how many expressions were rebuilt.
        is_value: whether the hole holds more than a proof.
    """

    refused: Difference | None
    survey: Survey
    nodes: int
    is_value: bool


@dataclass(frozen=True, slots=True)
class File:
    """A compiled file, and its constants but for those of leanq's that do not count."""

    image: Image
    constants: Mapping[Name, Raw]


class Marks(NamedTuple):
    """The holes that are marked, by the names of their markers.

    Attributes:
        hole: the one that is judged; "" if there is none.
        is_inner: whether it is a hole of a tactic, as are those that are compared.
        filled: this one, and those of the tactics that are filled.
        open_: the open ones of the tactics in it, which it may use where they stand.
        beside: all others that are open.
        compared: those that have to state in both files the same.
        unfilled: the axiom in those that are open, likewise.
        is_seen: whether no marker hides what fills them from the declarations beside that of the
            hole, which are compared instead.
    """

    hole: str
    is_inner: bool
    filled: Sequence[str]
    open_: Collection[str]
    beside: Collection[str]
    compared: Collection[str]
    unfilled: str
    is_seen: bool = False


def close(
    kernel: Kernel, opened: File, tried: File, marks: Marks, renamed: Mapping[Name, Name]
) -> Closed:
    """Judges whether a step proves its hole.

    Args:
        kernel: it has imported what both files import.
        opened: the source with nothing in its hole.
        tried: the source with the tactics in its hole. It declares what the other file declares.
        marks: the holes.
        renamed: the names by which the kernel shall know some constants of the second file.

    Raises:
        DeniedError: the kernel does not take what the second file says.
        KernelLimitError: it cannot tell.
        Damaged, IndexError: a file is not Lean's.
    """
    closing = _Closing(kernel, opened, tried, marks, renamed)
    refused, found = None, Survey(frozenset(), (), frozenset())
    try:
        closing.check_declared()
        if marks.hole and not marks.is_seen:
            found = closing.run()
        for each in marks.compared:
            closing.compare(each)
    except _RefusalError as refusal:
        refused = refusal.difference
    return Closed(refused, found, closing.nodes, closing.is_value)


class _Judge(Judge):
    """It goes on after a refusal."""

    def _add(self, name: Name, declaration: int) -> None:
        retain(self._kernel.env)  # a refusal consumes it
        super()._add(name, declaration)


class _Given(_Judge):
    """The constants of the file with the tactics.

    Those that are open are axioms of their types. A marker around what is filled is the identity,
    and one around what is open an axiom.
    """

    def __init__(
        self,
        kernel: Kernel,
        file: File,
        renamed: Mapping[Name, Name],
        filled: Collection[Name],
        unfilled: Collection[Name],
        open_: Collection[Name],
    ) -> None:
        super().__init__(kernel, file.image, dict(file.constants), renamed)
        self._filled, self._unfilled, self._open = filled, unfilled, open_

    def _prepare(self, raw: Raw) -> tuple[Callable[[], None], set[Name]]:
        kernel, build = self._kernel, self.build
        if raw.name in self._filled or raw.name in self._unfilled:
            self.references[raw.name] = set()
            marker = _marker(kernel, build.name_of(raw.name), is_filled=raw.name in self._filled)
            return (lambda: self._add(raw.name, marker)), set()
        if raw.name not in self._open:
            return super()._prepare(raw)
        [type_], used = build.expressions(raw.type_)
        self.references[raw.name] = used
        levels = build.names(self._image.words[raw.head + 2])
        value = kernel.axiom_val(build.name_of(raw.name), levels, type_, 0)
        return (lambda: self._add(raw.name, kernel.construct(_AXIOM, value))), used


class _Closing:
    """One step in progress."""

    def __init__(
        self, kernel: Kernel, opened: File, tried: File, marks: Marks, renamed: Mapping[Name, Name]
    ) -> None:
        self._kernel, self._opened, self._tried = kernel, opened, tried
        # Lean also notes places of what it has dropped.
        self._places = {
            name: place for name, place in places(opened.image).items() if name in opened.constants
        }
        self._is_inner = marks.is_inner
        made = [made_by_lean(file.constants, self._places) for file in (opened, tried)]
        ours = {*marks.filled, *marks.open_, *marks.beside}
        self._marked = [
            partial(Marked, file.image, file.constants, names, marks.unfilled, ours)
            for file, names in zip((opened, tried), made, strict=True)
        ]
        self._hole = marks.hole
        self._before, self._after = (marked(marks.hole) for marked in self._marked)
        names = tried.constants.keys()
        self._markers = {(each,) for each in marks.filled} & names
        self._open_markers = {(each,) for each in marks.open_} & names
        beside = {(each,) for each in marks.beside} & names
        self._open = {
            name
            for name in tried.constants.keys() & self._places.keys()
            if self._after.is_open(name) or self._before.is_open(name)
        }
        unfilled = self._open_markers | beside
        self._unknown = unfilled | self._after.holes - {SORRY}
        self._ours = self._markers | unfilled | self._after.holes
        self._given = _Given(kernel, tried, renamed, self._markers, unfilled, self._open)
        self.is_value = False
        held = self._before.held(self._places) if marks.is_seen else []
        self._around = {each.root for each in held}
        # The other file may lack what Lean made for the source, or name it otherwise.
        self._made = made[0]
        others = {name: (_OPENED, *name) for name in made[0]}
        self._stated = _Judge(kernel, opened.image, self._made, {**renamed, **others})

    @property
    def nodes(self) -> int:
        return self._given.build.nodes + self._stated.build.nodes

    def check_declared(self) -> None:
        """Raises _RefusalError if the second file declares what the first one does not, or leaves
        open what holds in the first. Other tactics, and the source's own proofs, would see it."""
        constants = self._tried.constants
        declared = places(self._tried.image).keys() & constants.keys() - self._ours
        for name in sorted(declared - self._places.keys(), key=str):
            raise _RefusalError(name, "declared", _DECLARES)
        for name in sorted(declared & self._open, key=str):
            if not self._before.is_open(name):
                raise _RefusalError(name, "hole_open", _OPENS)

    def run(self) -> Survey:
        """Returns what the proof leads to; raises _RefusalError if there is none."""
        for name in self._places:
            if self._before.is_stated(name, self._places):
                raise _RefusalError(name, "type_differs", _STATED)
        return self._in_two_ways(self._hole, self._prove)

    def _in_two_ways(self, marker: str, judge: Callable[[Marked, Marked], _T]) -> _T:
        """Judges a hole behind every ``have`` as behind a variable, or else with its value.

        Where nothing uses it, Lean may drop it from one of the files alone. Values are left out at
        first, since the kernel would check them again.
        """
        try:
            return judge(*(marked(marker) for marked in self._marked))
        except _RefusalError as refusal:
            if refusal.difference.rule != "type_differs":
                raise
        return judge(*(marked(marker, has_values=True) for marked in self._marked))

    def _prove(self, before: Marked, after: Marked) -> Survey:
        self._before, self._after = before, after
        stated, held = before.held(self._places), after.held(self._places)
        if not stated or not held:
            raise _RefusalError((), "hole_left_out", _LEFT_OUT)
        self.is_value = not all(after.is_proof(each) for each in held)
        for each in stated:
            names = self._behind_statement(before, each)
            if not names.isdisjoint(before.holes):
                raise _RefusalError(each.root, "hole_open", _GOAL_OPEN)
            self._declare_statement(names, each)
        reached = set[Name]().union(*map(self._declare_needs, held))
        if SORRY not in reached:
            for number, each in enumerate(held):
                try:
                    self._declare(after, _named(after, number), each)
                except RefusedError as error:
                    raise self._refused(each, reached, str(error)) from None
            self._match(stated, held)
        constants = self._tried.constants
        own = reached & constants.keys() - self._ours
        behind = frozenset(reached - constants.keys())
        axioms = frozenset(name for name in own if constants[name].kind == "axiom")
        return Survey(axioms, ((held[0].root, behind),), behind)

    def _behind_statement(self, before: Marked, held: Held) -> set[Name]:
        """Returns all that the statement of a hole leads to; not through markers of what is filled,
        nor through the values of declarations that are open."""
        image, constants = self._opened.image, self._opened.constants
        reached = set[Name]()
        todo = [*image.constants_in(*before.addresses(held, with_term=False))]
        while todo:
            name = todo.pop()
            if name in reached or name in self._markers:
                continue
            reached.add(name)
            if name in constants:
                raw = constants[name]
                is_unknown = name in self._open
                todo += image.constants_in(raw.type_) if is_unknown else image.references(raw)
        return reached

    def _declare_statement(self, names: set[Name], held: Held) -> None:
        """Declares all that the statement of a hole leads to."""
        # A constant that Lean made for the source needs the others first.
        self._run(self._given, names - self._made.keys() | self._markers, held)
        self._run(self._stated, names & self._made.keys(), held)

    def _declare_needs(self, held: Held) -> set[Name]:
        """Declares all that leads from what a hole holds; returns their names."""
        image, constants = self._tried.image, self._tried.constants
        names = self._names(self._after, held)
        moved = self._moved(held, names)
        bodies = [constants[name].parts[-1] for name in moved]
        used = names.union(image.constants_in(*bodies)) - moved
        if not used.isdisjoint(self._after.holes) and not self._is_open_in_marks(held, bodies):
            raise _RefusalError(held.root, "hole_open", _USES_OPEN)
        whole = led_to(image, constants, names, {})
        if held.root in whole or any(map(self._after.leads, whole)):
            raise _RefusalError(held.root, "hole_uses_hole", _RECURSIVE)
        self._run(self._given, names, held)
        reached = reachable(used - self._unknown, self._given.references, moved)
        if not reached.isdisjoint(self._unknown):
            raise _RefusalError(held.root, "hole_open", _USES_OPEN)
        # By its values: a finished part of one that is open may lead to another one.
        declared = whole.keys() & self._places.keys()
        for name in sorted((reached | declared) & self._open, key=str):
            if self._is_of_tactic(name, held.root):
                raise _RefusalError(held.root, "hole_open", _USES_OPEN)
            if not self._comes_before(name, held.root):
                text = f"it uses {display(name)}, which is open and does not come before it"
                raise _RefusalError(held.root, "hole_uses_hole", f"{text}; {_CLOSE_FIRST}")
        return reached

    def _moved(self, held: Held, names: Iterable[Name]) -> set[Name]:
        """Returns the parts of a term with open holes that Lean has moved into constants."""
        constants, after, moved = self._tried.constants, self._after, set[Name]()
        todo = [*names]
        while todo:
            name = todo.pop()
            is_part = name not in moved and after.is_part(name, held.root, self._places)
            if is_part and after.is_open(name):
                type_, body = map(self._tried.image.constants_in, constants[name].parts)
                if type_.isdisjoint(after.holes):
                    moved.add(name)
                    todo += body
        return moved

    def _is_open_in_marks(self, held: Held, moved: Iterable[int]) -> bool:
        """Returns whether a term has no hole but proofs that tactics leave open, each where it
        stands: ``marker P (open P)``. A value is more than a proof, since others differ from it.

        Args:
            moved: the values of its parts that stand elsewhere.
        """
        image = self._tried.image
        words, holes = image.words, self._after.holes - {SORRY}
        known: dict[int, str] = {}

        def part(at: int) -> str:
            """Returns which part of such a proof an expression is; "" for another one."""
            index = image.index(at)
            if words[index] >> 48 == layouts.APP:
                return {"open": "filling", "marker": "marked"}.get(known[words[index + 1]], "")
            if words[index] >> 48 != layouts.CONST:
                return ""
            name = image.name(words[index + 1])
            if name in self._open_markers:
                is_proof = image.linked(words[index + 2]) == [BOXED_ZERO]
                return "marker" if is_proof else "value"
            return "open" if name in holes else ""

        roots = [*self._after.addresses(held, with_term=True), *moved]
        try:
            for at in sorted(image.walk(*roots).addresses):
                known[at] = part(at)
                index = image.index(at)
                parts = layouts.PARTS[words[index] >> 48]
                of, *others = [known[words[index + number]] for number in parts] or [""]
                if words[index] >> 48 == layouts.APP:
                    is_proof = (of, *others) == ("marked", "filling")
                    is_part = of in ("open", "marker") and others == [""]
                    if not is_proof and not is_part and (of or any(others)):
                        return False
                elif of or any(others):
                    return False
        except KeyError:
            raise Damaged(AHEAD) from None
        return not any(known[at] for at in roots) and "value" not in known.values()

    def compare(self, marker: str) -> None:
        """Raises _RefusalError unless an open hole states in the second file what it states in the
        first."""
        self._in_two_ways(marker, self._compare)

    def _compare(self, before: Marked, after: Marked) -> None:
        stated, every = (each.held(self._places) for each in (before, after))
        # Behind a value, its own declaration may say what it is.
        found = [each for each in every if each.root not in self._around]
        is_known = all(self._is_known(before, each, number) for number, each in enumerate(stated))
        if found and self._is_inner and not is_known:
            raise _RefusalError(found[0].root, "hole_open", _ABOUT_OPEN)
        # No step closes such a hole of the source beside others, and no term may use it.
        if not is_known or not (stated or self._is_inner):
            return
        for number, each in enumerate(found):
            self._run(self._given, self._names(after, each), each)
            name = _named(after, number)
            try:
                self._declare(after, name, each)
            except RefusedError:
                raise _RefusalError(each.root, "type_differs", _DIFFERS) from None
            if not any(
                self._takes(before, (*name, at), one, self._constant(name, one, each))
                for at, one in enumerate(stated)
            ):
                raise _RefusalError(each.root, "type_differs", _DIFFERS)

    def _is_known(self, before: Marked, held: Held, number: int) -> bool:
        """Returns whether a statement means something whatever is filled in elsewhere."""
        names = self._behind_statement(before, held)
        if not names.isdisjoint(before.holes):
            return False
        try:
            self._declare_statement(names | {before.marker} | before.holes - {SORRY}, held)
            value, type_ = before.closed(held, self._kernel, self._stated.build)
            levels = self._stated.build.names(_levels_of(self._opened, held))
            self._add((_OURS, "known", *_named(before, number)), levels, type_, value)
        except (_RefusalError, RefusedError):
            return False
        return True

    def _is_of_tactic(self, name: Name, root: Name) -> bool:
        """Returns whether an open declaration may stand in a tactic, which nobody has judged."""
        if not self._is_inner or root not in self._places:
            return False
        return self._places[name][0].is_inside(self._places[root][0])

    def _comes_before(self, name: Name, root: Name) -> bool:
        """Returns whether a declaration of the source ends before another one does, as those in it
        do."""
        if root not in self._places:
            return False
        one, other = (self._places[each][0] for each in (name, root))
        return (one[2:], other[:2]) < (other[2:], one[:2])

    def _declare(self, after: Marked, name: Name, held: Held) -> None:
        """Declares what a hole holds, closed, as a value of the type that it has there; raises
        RefusedError."""
        value, type_ = after.closed(held, self._kernel, self._given.build)
        levels = self._given.build.names(_levels_of(self._tried, held))
        self._add(name, levels, type_, value)

    def _names(self, after: Marked, held: Held) -> set[Name]:
        return self._tried.image.constants_in(*after.addresses(held, with_term=True))

    def _match(self, stated: Sequence[Held], held: Sequence[Held]) -> None:
        """Finds a statement for each value, and a value for each statement.

        Raises:
            _RefusalError: there is none.
        """
        is_used = set[int]()
        for number, each in enumerate(stated):
            found = self._proving(each, number, held, [number, *range(len(held))])
            if found is None:
                raise self._differs(each)
            is_used.add(found)
        for number, one in enumerate(held):
            if number not in is_used and not any(
                self._proving(each, place, held, [number]) is not None
                for place, each in enumerate(stated)
            ):
                raise self._differs(one)

    def _proving(
        self, stated: Held, number: int, held: Sequence[Held], tried: Iterable[int]
    ) -> int | None:
        """Returns which of the values is one of a statement."""
        for place in dict.fromkeys(tried):
            if place < len(held):
                name = _named(self._after, place)
                value = self._constant(name, stated, held[place])
                if self._takes(self._before, (*name, number), stated, value):
                    return place
        return None

    def _constant(self, name: Name, stated: Held, held: Held) -> int:
        """Returns a constant of the second file's levels, at the levels of the first one's; 0 if
        these are not as many."""
        kernel, build = self._kernel, self._stated.build
        parameters = self._opened.image.names(_levels_of(self._opened, stated))
        other = self._tried.image.names(_levels_of(self._tried, held))
        if len(parameters) != len(other):
            return 0
        levels = [kernel.level_param(build.name_of(each)) for each in parameters]
        return int(kernel.const(kernel.name(name), kernel.list(levels)))

    def _takes(self, before: Marked, name: Name, stated: Held, value: int) -> bool:
        """Returns whether the kernel takes a value as one of what a hole stated."""
        if not value:
            return False
        _, type_ = before.closed(stated, self._kernel, self._stated.build)
        try:
            levels = self._stated.build.names(_levels_of(self._opened, stated))
            self._add(name, levels, type_, value)
        except RefusedError:
            return False
        return True

    def _differs(self, held: Held) -> _RefusalError:
        """Returns why what a hole holds is no value of what it stated."""
        used = [
            set[Name]().union(*led_to(file.image, file.constants, [held.root], {}).values())
            for file in (self._tried, self._opened)
            if held.root in file.constants
        ]
        recursive = [{name for name in each if name[-1] in _RECURSION} for each in used]
        if len(recursive) > 1 and recursive[0] - recursive[1]:
            return _RefusalError(held.root, "hole_uses_hole", _RECURSIVE)
        return _RefusalError(held.root, "type_differs", _DIFFERS)

    def _run(self, judge: Judge, names: Iterable[Name], held: Held) -> None:
        """Declares these constants and all that they lead to."""
        constants = self._made if judge is self._stated else self._tried.constants
        try:
            judge.run([name for name in names if name in constants])
        except DisagreementError as error:
            reached = reachable(names, judge.references)
            raise self._refused(held, reached, str(error), error) from None

    def _refused(
        self, held: Held, reached: Collection[Name], why: str, error: Exception | None = None
    ) -> Exception:
        """Returns the error about a constant that the kernel does not take: it may need the value
        of one that is open."""
        open_ = sorted(map(display, self._open.intersection(reached)))
        if open_:
            names = ", ".join(open_[:_MOST_NAMED])
            text = f"it needs to know what {names} is, which is open; {_CLOSE_FIRST}"
            return _RefusalError(held.root, "hole_open", text)
        return error or DisagreementError(
            "kernel_refused", f"Lean's kernel does not accept what stands in this hole: {why}"
        )

    def _add(self, name: Name, levels: int, type_: int, value: int) -> None:
        retain(self._kernel.env)  # a refusal consumes it
        self._kernel.add(_definition(self._kernel, self._kernel.name(name), levels, type_, value))


def _levels_of(file: File, held: Held) -> int:
    """Returns the address of the universe parameters of the declaration of a hole."""
    return file.image.words[file.constants[held.root].head + 2]


def _named(after: Marked, number: int) -> Name:
    """Returns a name for what a hole holds in one of its places."""
    return (_OURS, *after.marker, int(after.has_values), number)


def _marker(kernel: Kernel, name: int, *, is_filled: bool) -> int:
    """Returns the declaration of a marker: the identity, or an axiom of its type."""
    level, sort, value = (kernel.name((part,)) for part in ("u", "α", "a"))

    def bound(make: Callable[[int, int, int, int], int], body: int) -> int:
        type_ = kernel.sort(kernel.level_param(level))
        return int(make(sort, type_, make(value, kernel.bvar(kernel.nat(0)), body, 0), 1))

    type_ = bound(kernel.forall, kernel.bvar(kernel.nat(1)))
    levels = kernel.list([level])
    if not is_filled:
        return kernel.construct(_AXIOM, kernel.axiom_val(name, levels, type_, 0))
    same = bound(kernel.lam, kernel.bvar(kernel.nat(0)))
    return _definition(kernel, name, levels, type_, same)


def _definition(kernel: Kernel, name: int, levels: int, type_: int, value: int) -> int:
    made = kernel.definition_val(
        name, levels, type_, value, _ABBREVIATION, _SAFE, kernel.list([name])
    )
    return kernel.construct(_DEFINITION, made)
