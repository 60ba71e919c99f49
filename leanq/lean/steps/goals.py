"""The goals in the holes of a text, and the states of these goals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from leanq.lean.recipes import Form, Hole, Source, record_after, record_id
from leanq.lean.steps.holes import Draft
from leanq.queue.requests import LEAN_VERDICTS, Reply, Sorry
from leanq.states import States

_FLIPPED: Mapping[Form, Form] = {"term": "tactic", "tactic": "term"}
_MOST_PROBES = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """The holes of a text as Lean sees them, and the goals that it shows, by number."""

    holes: tuple[Hole, ...]
    goals: Mapping[int, str]


async def look(
    holes: tuple[Hole, ...],
    run: Callable[[Draft], Awaitable[Reply]],
    draft_with: Callable[[Mapping[int, Form]], Draft],
) -> Seen:
    """Has Lean show the goals of holes, and finds their forms by that. Those of no known form are
    left out unless they have a goal.

    ``run``: returns Lean's answer on a draft.
    """
    doubtful = {number for number, hole in enumerate(holes) if hole.form == "unknown"}
    forms, goals = await _look(
        {number: hole.form for number, hole in enumerate(holes) if number not in doubtful},
        run,
        draft_with,
        _FLIPPED,
    )
    if doubtful:
        found = await _look(dict.fromkeys(doubtful, "tactic"), run, draft_with, {})
        forms, goals = forms | found[0], goals | found[1]
    kept = [number for number in range(len(holes)) if number in goals or number not in doubtful]
    return Seen(
        tuple(Hole(holes[number].offset, forms.get(number, "unknown")) for number in kept),
        {place: goals[number] for place, number in enumerate(kept) if number in goals},
    )


async def _look(
    missing: dict[int, Form],
    run: Callable[[Draft], Awaitable[Reply]],
    draft_with: Callable[[Mapping[int, Form]], Draft],
    flipped: Mapping[Form, Form],
) -> tuple[dict[int, Form], dict[int, str]]:
    """Returns the forms and the goals of those holes, by their first guesses, of which Lean shows a
    goal.

    ``flipped``: the second guesses.
    """
    goals: dict[int, str] = {}
    forms: dict[int, Form] = {}
    for _ in range(_MOST_PROBES if missing else 0):
        draft = draft_with(missing)
        outcome = await run(draft)
        if outcome.verdict not in LEAN_VERDICTS:
            break
        messages = outcome.messages
        found = draft.goals(messages)
        goals |= found
        forms |= {number: missing.pop(number) for number in found}
        # After one misread block Lean may have stopped, so the others can be right.
        misread = [number for number in missing if draft.is_misread(number, messages)]
        missing |= {number: flipped.get(missing[number], "unknown") for number in misread}
        if not (found or misread):
            # The text may catch the errors of tactics, but not those of a term in one.
            caught = [number for number, form in missing.items() if form == "tactic"]
            if not caught:
                break
            missing |= dict.fromkeys(caught, "caught")
        missing = {number: form for number, form in missing.items() if form != "unknown"}
        if not missing:
            break
    return forms, goals


def sorry_at(line: int, column: int, goal: str | None, state: str | None) -> Sorry:
    """Returns the hole that begins here."""
    return Sorry(line, column, goal, state, end_line=line, end_column=column + len("sorry"))


def sorries_of(
    text: str,
    seen: Seen,
    opened: Mapping[int, tuple[str, bytes]],
    placed: Callable[[int, int], tuple[int, int]] = lambda line, column: (line, column),
) -> tuple[Sorry, ...]:
    """The holes of a text with their goals and states, and their places as ``placed``."""
    sorries: list[Sorry] = []
    line, counted = 1, 0
    for number, hole in enumerate(seen.holes):
        line += text.count("\n", counted, hole.offset)
        counted = hole.offset
        column = hole.offset - (text.rfind("\n", 0, hole.offset) + 1)
        state, _ = opened.get(number, (None, b""))
        sorries.append(sorry_at(*placed(line, column), seen.goals.get(number), state))
    return tuple(sorries)


async def keep_opened(code: str, seen: Seen, fingerprint: str, states: States) -> tuple[Sorry, ...]:
    """Returns the holes of a checked text, once the states of those with a goal are kept. Raises
    QueueFullError if there is no room to keep them."""
    record = Source(fingerprint, code, seen.holes).record()
    source = record_id(record)
    opened = {number: record_after(source, number) for number in seen.goals}
    await states.keep({source: record, **dict(opened.values())})
    return sorries_of(code, seen, opened)
