"""Where the tactics of a text begin and end. Lean's language server then tells their goals.

The server names no places, so layout decides: the tactics of a block begin in one column, and a
block begins behind ``by``, ``·`` or the arrow of a case. A term that looks the same counts, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from leanq.lean.syntax import tokens

_MOST_TACTICS = 2000
_CASES = frozenset({"|", "case", "next"})
_SIGNS = frozenset("<;>=")
_OPENING, _CLOSING = frozenset("([{⟨"), frozenset(")]}⟩")


@dataclass(slots=True)
class TacticSpan:
    """A tactic, or a bullet with the tactics behind it: its line from 1, its column from 0 in code
    points, where it starts and ends in the text, and which block it is of."""

    line: int
    column: int
    start: int
    end: int
    block: int
    is_bullet: bool


@dataclass(slots=True)
class _Block:
    """Tactics that begin in one column, within so many brackets."""

    number: int
    column: int
    depth: int
    found: list[TacticSpan] = field(default_factory=list)


def tactic_places(text: str) -> list[tuple[int, int]]:
    """Returns where tactics may begin: lines from 1, columns from 0 in code points. The first
    2,000 of a text; takes time in its length alone."""
    return [(each.line, each.column) for each in tactics_of(text) if not each.is_bullet]


def tactics_of(text: str) -> list[TacticSpan]:
    """Returns what may be the tactics of a text, in its order: the first 2,000."""
    found: list[TacticSpan] = []
    numbers = count()
    # The innermost last.
    blocks: list[_Block] = []
    line, line_start, counted = 1, 0, 0
    begun_line, line_word = 0, ""
    # The signs just read that belong together, such as ``<;>``.
    signs, opens, depth, ended = "", False, 0, 0

    def close() -> None:
        for each in blocks.pop().found[-1:]:
            each.end = ended

    for token in tokens(text):
        line += text.count("\n", counted, token.start)
        line_start = text.rfind("\n", 0, token.start) + 1 if line != begun_line else line_start
        counted = token.start
        column = token.start - line_start
        depth -= token.text in _CLOSING
        while blocks and (blocks[-1].depth > depth or _is_next(token.text, blocks[-1], depth)):
            close()
        if line != begun_line:
            begun_line, line_word = line, token.text
            while blocks and blocks[-1].column > column:
                close()
            begins = bool(blocks) and blocks[-1].column == column and token.text != "|"
        else:
            begins = False
        if opens:
            blocks.append(_Block(next(numbers), column, depth))
            begins = token.text != "|"
        # Behind `;` and `<;>` the block goes on.
        begins = begins or (bool(blocks) and signs in (";", "<;>"))
        if begins:
            if len(found) == _MOST_TACTICS:
                break
            block = blocks[-1]
            for each in block.found[-1:]:
                each.end = ended - len(signs)
            made = TacticSpan(line, column, token.start, token.end, block.number, token.text == "·")
            block.found.append(made)
            found.append(made)
        signs = signs + token.text if token.text in _SIGNS else ""
        opens = token.text in ("by", "·") or (signs == "=>" and line_word in _CASES)
        depth += token.text in _OPENING
        ended = token.end
    while blocks:
        close()
    return found


def _is_next(token: str, block: _Block, depth: int) -> bool:
    """Returns whether a token ends a block within brackets, as the next term there."""
    return token == "," and block.depth == depth > 0
