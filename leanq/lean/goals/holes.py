"""Sources with holes: their places, and the text with which Lean tries a tactic in one.

A hole is a ``sorry`` or ``admit``. A trial is written into a block in its place, ``(by {…})`` for a
term and ``({…})`` for a tactic. This is Lean's own syntax in any environment. Where a text catches
the errors of a tactic, as ``try`` does, the block is ``(exact by {…})``: Lean reports those of a
term in a tactic, and goes on. The tactics stand at the margin, whatever the lines around them, and
only the brace ends the block. Lean prints the goals left in such a block as it prints any goal::

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
from itertools import accumulate, chain, count
from typing import NamedTuple

from msgspec import structs

from leanq.errors import InvalidRequestError
from leanq.lean.goals.recipes import Form, Hole, Recipe, Tactic
from leanq.lean.judge.closing import Marks
from leanq.lean.text import place_of, split_header, tokens
from leanq.queue.requests import Message

_SORRY = "sorry"
_UNSOLVED = "unsolved goals\n"
# Signs that can end a tactic, so that a word on the next line begins another.
_ENDS = (")", "]", "}", "⟩", '"', "'", "_")
_BEFORE_TACTICS = ("by", ";", "·", "<;>", "{", "_goals", "try", "repeat", "first |")
# Lean keeps this word for no tactic, so it is a hole only where one is likely.
_ADMIT = "admit"
_BEGINNINGS: Mapping[Form, str] = {"term": "(by {", "tactic": "({", "caught": "(exact by {"}
# Code that rests on these compiles, as with sorryAx. The second stands in a hole that nothing
# fills, since Lean may keep nothing of a proof with a `sorry` but that.
_AXIOM = '@[extern "lean_sorry", never_extract] {}axiom {}.{{u}} {{α : Sort u}} {}: α\n'
_MARKER_NAME = "_leanq_hole"
_NOTATION = re.compile("notation|(?:in|pre|post)fix")
# A notation's symbol that could begin in a block, end one, or stand where leanq sees a comment, a
# string or a brace. Lean's symbols have no blanks.
_OF_BLOCKS = re.compile(
    r"[@_?;]\S*|by|sorry|admit|exact|refine|all_goals|\S*(?:[(){}'«]|--|/-)\S*|.*\\.*", re.DOTALL
)
# Only such a string can have a quotation mark in it.
_RAW = re.compile(r'(?<![\w.\'!?])r#+"')


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


def find_holes(text: str, *, doubtful: bool = False) -> tuple[Hole, ...]:
    """Returns each ``sorry`` and ``admit`` of a text, with the form that its place suggests.

    With ``doubtful``, also each ``admit`` that may be a name instead, as ``unknown``: Lean has to
    say what it is.
    """
    holes: list[Hole] = []
    before = 0
    # Most texts have none, and a search is much faster than reading them.
    for token in tokens(text) if _SORRY in text or _ADMIT in text else ():
        if token.text in (_SORRY, _ADMIT):
            begins_line = text.find("\n", before, token.start) >= 0
            last = text[max(0, before - 1) : before]
            follows_end = last.isalnum() or last in _ENDS
            is_tactic = text.endswith(_BEFORE_TACTICS, 0, before) or (begins_line and follows_end)
            is_tactic |= token.text == _ADMIT and text.endswith("=>", 0, before)
            if is_tactic or token.text == _SORRY:
                holes.append(Hole(token.start, "tactic" if is_tactic else "term"))
            elif doubtful:
                holes.append(Hole(token.start, "unknown"))
        before = token.end
    return tuple(holes)


def read_tactic(given: str) -> Given:
    """Returns a tactic as it is kept; raises InvalidRequestError if there is none."""
    found = list(tokens(given))
    # A separator at its end would meet our own.
    while found and found[-1].text == ";":
        found.pop()
    if not found:
        raise InvalidRequestError(
            "there is no tactic to run: the text is empty, or a comment alone"
        )
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


def reads_blocks(code: str) -> str | None:
    """Returns a symbol by which a text's notation could read the block of a tactic otherwise than
    that of an open hole; None if it has none.

    Comments can have quotation marks, so whatever stands between two of these may be a symbol.
    """
    if not _NOTATION.search(code):
        return None
    if raw := _RAW.search(code):
        return raw[0]
    return next(filter(_OF_BLOCKS.fullmatch, map(str.strip, code.split('"')[1:-1])), None)


def is_genuine(recipe: Recipe) -> bool:
    """Returns whether steps could have led to a recipe, as far as its texts tell."""
    for tactic in recipe.tactics:
        if misfit(tactic.text) or read_tactic(tactic.text).text != tactic.text:
            return False
    texts = [(recipe.source.code, recipe.source.holes)]
    texts += [(tactic.text, tactic.holes) for tactic in recipe.tactics]
    for text, holes in texts:
        offsets = [hole.offset for hole in holes]
        possible = find_holes(text, doubtful=True)
        if offsets != [hole.offset for hole in possible if hole.offset in offsets]:
            return False
        if any(hole.form != "unknown" and hole.offset not in offsets for hole in possible):
            return False
    return True


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
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._column = 0
        self.trial = Span(0, 0)
        self.blocks: list[Span] = []
        self.probes: dict[int, Span] = {}

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

    def fill(self, text: str, holes: Sequence[Hole], fill: Callable[[int, Hole], bool]) -> Span:
        """Appends ``text``; ``fill`` appends the content of a hole, or returns that its word
        stays."""
        start, done = self._length, 0
        for number, hole in enumerate(holes):
            self.add(text[done : hole.offset])
            done = hole.offset + len(_SORRY)
            if not fill(number, hole):
                self.add(text[hole.offset : done])
        self.add(text[done:])
        return Span(start, self._length)

    def add_block(self, form: Form, content: Callable[[], object], marker: str = "") -> Span:
        """Appends a block, perhaps with a marker around what it makes; ``content`` appends its
        tactics."""
        start, column = self._length, self._column
        # Lean has no bare brace behind `case … =>`.
        self.add(_BEGINNINGS[form])
        if marker:
            # Without the @, Lean introduces implicit variables before the tactics.
            self.add(f"refine @{marker} _ ?_; ({{")
        content()
        # Where a line begins may depend on where the text behind a hole stands.
        end = "})})" if marker else "})"
        blanks = column + len(_SORRY) - len(end) - self._column
        self.add(" " * blanks if blanks >= 0 else "\n" + " " * (blanks + self._column))
        self.add(end)
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

    def level_around(self, messages: Sequence[Message]) -> int:
        """Returns the innermost block further out in which goals are left; -1 if there is none."""
        levels = [level for m in messages if (level := self.level(m)) is not None]
        return max((level for level in levels if level < len(self.blocks) - 1), default=-1)

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
        errors = (m for m in messages if m.severity == "error" and not m.text.startswith(_UNSOLVED))
        return any(span.touches(self.place(m)) for m in errors)

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


def draft_trial(recipe: Recipe, tactic: Tactic, probes: Mapping[int, Form] | None = None) -> Draft:
    """Drafts the source of a state with a tactic in its hole, after those that led there.

    Args:
        probes: the forms of those of the tactic's own holes that get an empty block.
    """
    return _draft(structs.replace(recipe, tactics=(*recipe.tactics, tactic)), probes=probes or {})


class Claim(NamedTuple):
    """What has to hold of a text with a step.

    Attributes:
        opened: the text with a hole that is open, which says what the hole states. It has the same
            markers; "" is the source without any.
        marks: the hole that is proved, and the open ones that may state nothing else than before.
            None has the whole text verified against the other.
    """

    opened: str
    marks: Marks | None


def draft_claims(recipe: Recipe, tactic: Tactic, level: int) -> tuple[Draft, list[Claim]]:
    """Drafts a text in which a tactic closes a hole beside others, with a marker around each hole,
    and around what else a tactic leaves. Returns it with what has to hold of it, the innermost hole
    first.

    A hole in a hole of a tactic is judged with those around it, since nobody has judged that tactic
    yet. One around a block with goals left is judged with what closes these. Whatever is left has
    to state what it stated.

    Args:
        level: of the innermost block with goals left; -1 if there is none.
    """
    whole = structs.replace(recipe, tactics=(*recipe.tactics, tactic))
    base = _base(whole)
    of_source, *of_tactics = _markers(base, recipe)
    inner = [
        "" if each.opened is None else names[each.opened]
        for each, names in zip(recipe.tactics, of_tactics, strict=True)
    ]
    filled = [of_source[recipe.opened], *filter(None, inner)]
    left = [[each for each in names if each not in filled] for names in (of_source, *of_tactics)]
    rest = [_rest(base, depth) for depth in range(len(filled))]

    def claim(tactics: int, hole: str, compared: Sequence[str]) -> Claim:
        opened = structs.replace(recipe, tactics=recipe.tactics[:tactics])
        around, inside = [*chain(rest, *left[: tactics + 1])], [*chain(*left[tactics + 1 :])]
        marks = Marks(hole, tactics > 0, filled, inside, around, compared, f"{base}open")
        return Claim(_draft(opened, base, is_open=True).text, marks)

    claims = [claim(0, filled[0] if level < 0 else "", left[0])]
    depth = 0
    for number, (hole, others) in enumerate(zip(inner, left[1:], strict=True), 1):
        if hole:
            claims.append(claim(number, hole if level <= depth else "", [*others, rest[depth]]))
            depth += 1
        elif others:
            claims.append(claim(number, "", others))
    return _draft(whole, base), claims[::-1]


def draft_beside(recipe: Recipe, tactic: Tactic, outermost: Claim) -> tuple[Draft, Claim]:
    """Drafts the text of `draft_claims` without the markers around what is filled, so that the
    declarations and holes beside it see its value. Returns it with what has to hold of them.

    ``outermost``: the last of those claims.
    """
    assert outermost.marks is not None
    whole = structs.replace(recipe, tactics=(*recipe.tactics, tactic))
    marks = outermost.marks._replace(hole=outermost.marks.filled[0], is_seen=True)
    claim = outermost._replace(marks=marks)
    return _draft(whole, _base(whole), is_seen=True), claim


def _draft(
    recipe: Recipe,
    base: str = "",
    *,
    probes: Mapping[int, Form] | None = None,
    is_open: bool = False,
    is_seen: bool = False,
) -> Draft:
    """Drafts the source of a state.

    Args:
        base: how the names of the markers begin that stand around all holes; "" for none.
        probes: if the last tactic is on trial, the forms of those of its holes that get an empty
            block.
        is_open: whether the holes of the last tactic are open, or the source's without tactics.
        is_seen: whether those that are filled have no marker.
    """
    is_marked = bool(base)
    of_source, *of_tactics = _markers(base, recipe)
    trial = None if is_open else recipe.tactics[-1]
    levels: list[list[tuple[int, Tactic]]] = [[]]
    for number, each in enumerate(recipe.tactics):
        is_last = number == len(recipe.tactics) - 1
        levels[-1].append((number, each))
        if each.opened is not None and not (is_open and is_last):
            levels.append([])
    draft = Draft()

    def write(level: int) -> None:
        for place, (number, each) in enumerate(levels[level]):
            draft.add("\n;\n" if place else "\n")
            if each is trial:
                draft.trial = draft.fill(
                    each.text, each.holes, lambda hole, _: _probe(draft, hole, probes or {})
                )
            else:
                is_last = number == len(recipe.tactics) - 1
                opened = None if is_open and is_last else each.opened
                fill_holes(each.text, each.holes, opened, level + 1, of_tactics[number])
        if is_marked and (is_open or level < len(levels) - 1):
            draft.add(f"\n;\nall_goals exact @{_rest(base, level)} _ (@{base}open _)")
        draft.add("\n")

    def fill_holes(
        text: str,
        holes: Sequence[Hole],
        opened: int | None,
        level: int,
        markers: Sequence[str],
    ) -> None:
        def fill(number: int, hole: Hole) -> bool:
            marker = markers[number] if is_marked else ""
            if number == opened:
                marker = "" if is_seen else marker
                block = draft.add_block(hole.form, lambda: write(level), marker)
                draft.blocks.insert(0, block)
            elif marker and hole.form != "unknown":
                draft.add_block(hole.form, lambda: draft.add(f"exact @{base}open _"), marker)
            else:
                return False
            return True

        draft.fill(text, holes, fill)

    code, holes = recipe.source.code, recipe.source.holes
    if is_marked:
        header = split_header(code)
        end = header.end_offset
        draft.add(code[:end] + ("\n" if end else ""))
        public = "public " if header.is_module else ""
        rest = (_rest(base, level) for level in range(len(levels)))
        for name in chain(of_source, *of_tactics, rest):
            draft.add(_AXIOM.format(public, name, "(a : α) "))
        draft.add(_AXIOM.format(public, f"{base}open", ""))
        code = code[end:]
        holes = tuple(structs.replace(hole, offset=hole.offset - end) for hole in holes)
    # Without tactics all holes are open, and the text is one for all of them.
    opened = recipe.opened if recipe.tactics else None
    fill_holes(code, holes, opened, 0, of_source)
    return draft


def _markers(base: str, recipe: Recipe) -> list[list[str]]:
    """Returns the names of the markers around the holes of a source, then of each tactic."""
    holes = {f"{base}_": recipe.source.holes}
    holes |= {f"{base}{number}_": each.holes for number, each in enumerate(recipe.tactics)}
    return [[f"{begin}{n}" for n in range(len(each))] for begin, each in holes.items()]


def _rest(base: str, depth: int) -> str:
    """Returns the name of the marker around what tactics leave of the goals in a block that lies in
    so many others."""
    return f"{base}rest{depth}"


def _base(recipe: Recipe) -> str:
    """Returns a name that neither the source nor a tactic uses, nor any that begins with it."""
    texts = [recipe.source.code, *(tactic.text for tactic in recipe.tactics)]
    names = (f"{_MARKER_NAME}{'_' * number}" for number in count())
    return next(name for name in names if not any(name in text for text in texts))


def _probe(draft: Draft, number: int, forms: Mapping[int, Form]) -> bool:
    if number in forms:
        draft.probes[number] = draft.add_block(forms[number], lambda: None)
    return number in forms
