"""The tactics of a text as steps: the goals before and after each.

Lean has told the goals before tactics. What a tactic leaves stands before the next one of its
block. Before bullets it is what each of them begins with, and at the end of a block of a proof that
was accepted it is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from leanq.lean.run.documents import TacticSpan, tactics_of
from leanq.queue.requests import Tactic

Goals = tuple[str, ...]


class Step(NamedTuple):
    """A tactic and its goals; ``after`` is None where that is not known."""

    text: str
    before: Goals
    after: Goals | None


def steps_of(code: str, told: Sequence[Tactic], *, is_proved: bool) -> list[Step]:
    """Returns the tactics of a text that Lean has told the goals of, in the text's order."""
    known = {(each.line, each.column): each.goals for each in told}
    # What stands before the next of a block, from the end on.
    before: dict[int, Goals | None] = {}
    inner: Goals | None = None
    steps: list[Step] = []
    for each in reversed(tactics_of(code) if told else []):
        after = before.get(each.block, () if is_proved else None)
        if each.is_bullet:
            # What is read just before, from the end on, is the first behind the bullet.
            own = None if inner is None or after is None else (*inner, *after)
        else:
            own = known.get((each.line, each.column))
            if own is not None:
                steps.append(Step(_text(code, each), own, after))
        before[each.block] = inner = own
    return steps[::-1]


def _text(code: str, found: TacticSpan) -> str:
    """Returns a tactic as it would stand in the first column."""
    first, *rest = code[found.start : found.end].rstrip().split("\n")
    indent = " " * found.column
    return "\n".join([first, *(line.removeprefix(indent) for line in rest)])
