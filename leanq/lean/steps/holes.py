"""Sources with holes: their places, and the text with which Lean tries a tactic in one.

A hole is a ``sorry``. A trial is written into a block in its place, ``(by {…})`` for a term and
``({…})`` for a tactic. This is Lean's own syntax in any environment. The tactics stand at the
margin, whatever the lines around them, and only the brace ends the block. Lean prints the goals
left in such a block as it prints any goal::

    theorem t (p q : Prop) (hp : p) (hq : q) : And p q := (by {
    constructor
    ;
    exact hp
                                                          })
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count

from msgspec import structs

from leanq.errors import InvalidRequestError
from leanq.lean.recipes import Form, Hole, Recipe, Tactic
from leanq.lean.syntax import Token, place_of, split_header, tokens
from leanq.queue.requests import Message

_SORRY = "sorry"
_UNSOLVED = "unsolved goals\n"
# Signs that can end a tactic, so that a word on the next line begins another.
_ENDS = (")", "]", "}", "⟩", '"', "'", "_")
_BEFORE_TACTICS = ("by", ";", "·", "<;>", "{")
# A bracket of another kind around the tactics of a block. A tactic that closes one of the two
# leaves the other open, so it compiles in one of them at most.
_INNER = ("(\nskip\n;", ")")  # `skip`, since Lean reads no more behind a block at the beginning
# Code that rests on it compiles, as with sorryAx. There is one for each hole: two holes are not
# equal, and a tactic that finds one in its goal has no other.
_STAND_IN = '@[extern "lean_sorry", never_extract] axiom {}.{{u}} (α : Sort u) : α\n'


@dataclass(frozen=True, slots=True)
class Given:
    """A tactic as it is kept, and where that lay in the given text.

    ``text`` begins at the margin, without blanks and comments around it, so tactics that differ in
    these alone are one. ``line`` counts the lines that were left out before it. ``moved`` says for
    each of its lines by how many columns it moved to the left.
    """

    text: str
    line: int
    moved: tuple[int, ...]

    def place(self, line: int, column: int) -> tuple[int, int]:
        """Returns a place in ``text`` (lines from 1) as one in the given text."""
        moved = self.moved[line - 1] if 1 <= line <= len(self.moved) else 0
        return line + self.line, column + moved

    def message(self, message: Message) -> Message:
        """Returns a message about ``text`` as one about the given text."""
        line, column = self.place(message.line, message.column)
        end: tuple[int | None, int | None] = (None, None)
        if message.end_line is not None and message.end_column is not None:
            end = self.place(message.end_line, message.end_column)
        return structs.replace(
            message, line=line, column=column, end_line=end[0], end_column=end[1]
        )


def find_holes(text: str) -> tuple[Hole, ...]:
    """Returns every ``sorry`` of a text, with the form that its surroundings suggest."""
    holes: list[Hole] = []
    before = 0
    for token in tokens(text):
        if token.text == _SORRY:
            begins_line = text.find("\n", before, token.start) >= 0
            last = text[max(0, before - 1) : before]
            follows_end = last.isalnum() or last in _ENDS
            is_tactic = text.endswith(_BEFORE_TACTICS, 0, before) or (begins_line and follows_end)
            holes.append(Hole(token.start, "tactic" if is_tactic else "term"))
        before = token.end
    return tuple(holes)


def are_plain(text: str, holes: Sequence[Hole]) -> bool:
    """Returns whether only Lean's own syntax can decide these holes' forms: each stands behind a
    word that only a term, or only a tactic, can follow."""
    forms = {hole.offset: hole.form for hole in holes}
    before, last = Token("", 0, 0), Token("", 0, 0)
    for token in tokens(text):
        if form := forms.pop(token.start, None):
            follows_assign = (before.text, last.text, before.end) == (":", "=", last.start)
            follows = "term" if follows_assign or last.text == "exact" else None
            if form != ("tactic" if last.text == "by" else follows):
                return False
        before, last = last, token
    return not forms


def read_tactic(given: str) -> Given:
    """Returns a tactic as it is kept; raises InvalidRequestError if there is none."""
    found = list(tokens(given))
    # A separator at its end would meet our own.
    while found and found[-1].text == ";":
        found.pop()
    if not found:
        raise InvalidRequestError("there is no tactic to run: the text is empty")
    start, end = found[0].start, found[-1].end
    column = start - (given.rfind("\n", 0, start) + 1)

    # The lines within a string stay as they are.
    strings = [token for token in found if given.find("\n", token.start, token.end) >= 0]

    moved = [column]
    pieces: list[str] = []
    done = start
    for blanks in re.compile(r"\n *").finditer(given, start, end):
        fixed = any(token.start < blanks.start() < token.end for token in strings)
        moved.append(0 if fixed else min(column, len(blanks[0]) - 1))
        pieces.append(given[done : blanks.start() + 1])
        done = blanks.start() + 1 + moved[-1]
    text = "".join([*pieces, given[done:end]])
    return Given(text, given.count("\n", 0, start), tuple(moved))


def misfit(tactic: str) -> Message | None:
    """Returns why a tactic could change something outside of its hole, if it could.

    Lean's parser leaves the block only by its brace. Lean itself finds all other faults of a
    tactic.
    """
    depth = 0
    found = list(tokens(f"{tactic}\n;"))
    for token in found:
        depth += (token.text == "{") - (token.text == "}")
        if depth < 0:
            return _at(tactic, token.start, "this } closes nothing in the tactic, which must stay")
    if found[-1].start < len(tactic):
        return _at(
            tactic,
            found[-1].start,
            "a comment or string does not end in the tactic, which must stay",
        )
    if depth:
        return _at(tactic, len(tactic), "a { is not closed in the tactic, which must stay")
    return None


def is_genuine(recipe: Recipe) -> bool:
    """Returns whether steps could have led to a recipe, as far as its texts tell."""
    for tactic in recipe.tactics:
        if misfit(tactic.text) or read_tactic(tactic.text).text != tactic.text:
            return False
    texts = [(recipe.source.code, recipe.source.holes)]
    texts += [(tactic.text, tactic.holes) for tactic in recipe.tactics]
    return all(
        [hole.offset for hole in find_holes(text)] == [hole.offset for hole in holes]
        for text, holes in texts
    )


def _at(text: str, offset: int, why: str) -> Message:
    return Message("error", *place_of(text, offset), f"leanq: {why} in its hole")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text, from ``start`` to before ``end``, in characters."""

    start: int
    end: int

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.end

    def touches(self, other: Span) -> bool:
        """Returns whether they overlap or lie side by side."""
        return self.start <= other.end and other.start <= self.end


class Draft:
    """A text for Lean, written piece by piece, and the places of its blocks.

    Attributes:
        trial: the place of the tactic on trial.
        blocks: the block around it, and before that those around this block.
        probes: the empty blocks, by the numbers of their holes.
        stand_ins: the names of our axioms for other holes.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._column = 0
        self.trial = Span(0, 0)
        self.blocks: list[Span] = []
        self.probes: dict[int, Span] = {}
        self.stand_ins: list[str] = []

    @cached_property
    def text(self) -> str:
        """The whole text; nothing is appended any more."""
        return "".join(self._pieces)

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *accumulate(len(line) + 1 for line in self.text.split("\n"))]

    def add(self, text: str) -> Span:
        """Appends ``text``; returns its place."""
        self._pieces.append(text)
        self._length += len(text)
        line_start = text.rfind("\n") + 1
        self._column = len(text) - line_start + (0 if line_start else self._column)
        return Span(self._length - len(text), self._length)

    def fill(self, text: str, holes: Sequence[Hole], fill: Callable[[int, Hole], object]) -> Span:
        """Appends ``text``; ``fill`` appends the content of each hole."""
        start, done = self._length, 0
        for number, hole in enumerate(holes):
            self.add(text[done : hole.offset])
            fill(number, hole)
            done = hole.offset + len(_SORRY)
        self.add(text[done:])
        return Span(start, self._length)

    def add_block(self, form: Form, content: Callable[[], object]) -> Span:
        """Appends a block; ``content`` appends its tactics."""
        start, column = self._length, self._column
        # Lean has no bare brace behind `case … =>`.
        self.add("(by {" if form == "term" else "({")
        content()
        # Fields behind it may not stand to the left of those before it.
        self.add(" " * (column - self._column))
        self.add("})")
        return Span(start, self._length)

    def place(self, message: Message) -> Span:
        """Returns the part of the text that a message of Lean's is about."""
        start = self._offset(message.line, message.column)
        if message.end_line is None or message.end_column is None:
            return Span(start, start)
        return Span(start, self._offset(message.end_line, message.end_column))

    def is_trial(self, message: Message) -> bool:
        """Returns whether it is about the tactic on trial."""
        return self.trial.start <= self.place(message).start <= self.trial.end

    def is_left(self, message: Message) -> bool:
        """Returns whether it tells the goals left in the block around the tactic on trial."""
        return self.level(message) == len(self.blocks) - 1

    def left_over(self, messages: Sequence[Message]) -> list[int]:
        """Returns how many goals are left in each block; the last is that of the tactic on
        trial."""
        left = [0] * len(self.blocks)
        for message in messages:
            if (level := self.level(message)) is not None:
                left[level] += len(read_goals(message))
        return left

    def level(self, message: Message) -> int | None:
        """Returns the innermost block that ends with goals left, if the message says so."""
        if not message.text.startswith(_UNSOLVED) or self.is_trial(message):
            return None
        start = self.place(message).start
        inside = [level for level, block in enumerate(self.blocks) if start in block]
        return inside[-1] if inside else None

    def of_trial(self, message: Message) -> Message:
        """Returns a message about the tactic on trial, with its place in it: from line 1, column
        0."""
        up = self.text.count("\n", 0, self.trial.start)
        if message.end_line is None or self.place(message).end > self.trial.end:
            return structs.replace(message, line=message.line - up, end_line=None, end_column=None)
        return structs.replace(message, line=message.line - up, end_line=message.end_line - up)

    def goals(self, messages: Sequence[Message]) -> dict[int, str]:
        """Returns the goals that Lean reports in the empty blocks, by number. A block that runs
        several times has several goals."""
        found: dict[int, list[str]] = {}
        numbers = sorted(self.probes, key=lambda number: self.probes[number].start)
        starts = [self.probes[number].start for number in numbers]
        for message in messages:
            if message.severity == "error" and message.text.startswith(_UNSOLVED):
                start = self.place(message).start
                at = bisect_right(starts, start) - 1
                if at >= 0 and start in self.probes[numbers[at]]:
                    found.setdefault(numbers[at], []).extend(read_goals(message))
        return {number: "\n\n".join(goals) for number, goals in found.items()}

    def is_misread(self, number: int, messages: Sequence[Message]) -> bool:
        """Returns whether Lean says that an empty block cannot stand in its place."""
        span = self.probes[number]
        return any(m.severity == "error" and span.touches(self.place(m)) for m in messages)

    def _offset(self, line: int, column: int) -> int:
        return self._line_starts[min(max(line, 1), len(self._line_starts)) - 1] + column


def read_goals(message: Message) -> tuple[str, ...]:
    """Returns the goals in a message about unsolved goals."""
    return tuple(message.text.removeprefix(_UNSOLVED).split("\n\n"))


def draft_probe(code: str, holes: Sequence[Hole], forms: Mapping[int, Form]) -> Draft:
    """Drafts a source with an empty block in each of the holes that ``forms`` names."""
    draft = Draft()
    draft.fill(code, holes, lambda number, hole: _probe(draft, number, forms))
    return draft


def draft_trial(
    recipe: Recipe,
    tactic: Tactic,
    probes: Mapping[int, Form] | None = None,
    stand_in: str = "",
    outside: Sequence[int] = (),
) -> Draft:
    """Drafts the source of a state with a tactic in its hole, after those that led there.

    Args:
        probes: the forms of those of the tactic's own holes that get an empty block.
        stand_in: how the names of axioms of ours for all other holes begin, so that an audit can
            tell them from those that the tactic itself leaves open. The tactics then stand in a
            second bracket, since a tactic that leaves its block could prove by these axioms.
        outside: how many goals it also ends in each of the blocks around, outermost first.
    """
    levels: list[list[Tactic]] = [[]]
    for each in recipe.tactics:
        levels[-1].append(each)
        if each.opened is not None:
            levels.append([])
    levels[-1].append(tactic)
    draft = Draft()
    numbers = count()

    def other(hole: Hole, end: str = "") -> None:
        if not stand_in or hole.form == "unknown":
            draft.add(_SORRY)
        else:
            proof = f"({stand_in}{end or next(numbers)} _)"
            draft.add(proof if hole.form == "term" else f"exact {proof}")

    opening, closing = _INNER if stand_in else ("", "")

    def write(level: int) -> None:
        draft.add(opening)
        for place, each in enumerate(levels[level]):
            draft.add("\n;\n" if place else "\n")
            if each is tactic:
                draft.trial = draft.fill(
                    each.text, each.holes, lambda number, _: _probe(draft, number, probes or {})
                )
            else:
                fill_holes(each.text, each.holes, each.opened, level + 1)
        if level < len(outside):
            for place in range(outside[level]):
                draft.add("\n;\n")
                # Holes keep their numbers, whatever is left here.
                other(Hole(0, "tactic"), f"{level}_{place}")
        draft.add(f"\n{closing}")

    def fill_holes(text: str, holes: Sequence[Hole], opened: int | None, level: int) -> None:
        def fill(number: int, hole: Hole) -> None:
            if number != opened:
                other(hole)
                return
            draft.blocks.insert(0, draft.add_block(hole.form, lambda: write(level)))

        draft.fill(text, holes, fill)

    code, holes = recipe.source.code, recipe.source.holes
    if stand_in:
        end = split_header(code).end_offset
        ends = [f"{level}_{place}" for level, left in enumerate(outside) for place in range(left)]
        ends += map(str, range(_count_others(recipe)))
        draft.stand_ins += [stand_in + each for each in ends]
        axioms = "".join(map(_STAND_IN.format, draft.stand_ins))
        draft.add(code[:end] + ("\n" if end else "") + axioms)
        code = code[end:]
        holes = tuple(structs.replace(hole, offset=hole.offset - end) for hole in holes)
    fill_holes(code, holes, recipe.opened, 0)
    return draft


def _count_others(recipe: Recipe) -> int:
    """Returns how many holes of a recipe stay open and can be opened."""
    texts: list[tuple[Sequence[Hole], int | None]] = [(recipe.source.holes, recipe.opened)]
    texts += [(each.holes, each.opened) for each in recipe.tactics]
    return sum(
        number != opened and hole.form != "unknown"
        for holes, opened in texts
        for number, hole in enumerate(holes)
    )


def _probe(draft: Draft, number: int, forms: Mapping[int, Form]) -> None:
    if number in forms:
        draft.probes[number] = draft.add_block(forms[number], lambda: None)
    else:
        draft.add(_SORRY)
