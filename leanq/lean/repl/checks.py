"""Elaborates a text in a process of the REPL: Lean's verdict on it, and the goals of its holes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from leanq.lean.diagnostics import Printed, classify_printed
from leanq.lean.recipes import Hole
from leanq.lean.repl.protocol import Elaborated, OpenGoal
from leanq.lean.repl.session import Session
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.steps.goals import Seen, look
from leanq.lean.steps.holes import Draft, are_plain, draft_probe, find_holes
from leanq.lean.syntax import Header, header_statements, place_of
from leanq.queue.requests import Message, Reply


def outcome_of(answer: Elaborated) -> Reply:
    """Returns Lean's verdict on a text before any audit, without messages about its header."""
    return classify_printed(Printed(answer.messages), open_goals=bool(answer.sorries))


def whole_outcome(answer: Elaborated, session: Session, header: Header) -> Reply:
    """Returns Lean's verdict on a text, with the messages about its header first."""
    lines = [place_of(header.text, start) for _, start in header_statements(header)]
    notes: list[Message] = []
    for note, _ in session.notes(header):
        # With blanks and comments between the words, columns are a little off.
        line, column = lines[note.line - 1] if 0 < note.line <= len(lines) else (1, 0)
        column += note.column
        notes.append(replace(note, line=line, column=column, end_line=None, end_column=None))
    outcome = outcome_of(answer)
    return replace(outcome, messages=(*notes, *outcome.messages))


async def see(
    session: Session, code: str, header: Header, answer: Elaborated, limits: Limits
) -> Seen:
    """Returns the holes of an elaborated text. The REPL says which goals it has met where, and not
    what can stand there. If the text does not tell either, the REPL is asked once more with empty
    blocks in the holes. Errors as of :meth:`Session.ask`."""
    holes = find_holes(code)
    opened = opened_at(holes, code, answer.sorries)
    if len(opened) == len(holes) and are_plain(code, holes):
        return Seen(holes, {number: each.goal for number, each in opened.items()})

    async def run(draft: Draft) -> Reply:
        return outcome_of(await session.elaborate(draft.text, header, limits))

    return await look(holes, run, lambda forms: draft_probe(code, holes, forms))


def opened_at(
    holes: Sequence[Hole], code: str, sorries: Sequence[OpenGoal]
) -> Mapping[int, OpenGoal]:
    """Returns the goal that was met in each hole, by its number, if there was exactly one."""
    met = Counter(each.at for each in sorries)
    by_place = {each.at: each for each in sorries if met[each.at] == 1}
    places = ((number, place_of(code, hole.offset)) for number, hole in enumerate(holes))
    return {number: by_place[place] for number, place in places if place in by_place}
