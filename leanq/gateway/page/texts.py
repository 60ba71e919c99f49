"""Texts that anybody may have written, made fit to be seen.

What a browser would not show, or would show in another place, is shown by its number: control
characters, directions of writing, spaces without width. Nothing in a text is ever markup.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from itertools import pairwise

from markupsafe import Markup, escape

LONGEST_LINE = 2000
"""Characters of a line that are shown."""

# All that Unicode calls control, format, surrogate, private, unassigned, or a separator of lines.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# A mark has so many times the characters of what it stands for.
_WEIGHT_OF_UNSEEN = 16
_MOST_KEPT = 10_000


class _Shown(dict[int, str]):
    """How each character is shown, for ``str.translate``: escaped, or marked."""

    def __missing__(self, code: int) -> str:
        if len(self) > _MOST_KEPT:
            self.clear()
        character = chr(code)
        shown = str(_mark(character) if _is_unseen(character) else escape(character))
        self[code] = shown
        return shown


_SHOWN = _Shown()


def weight(text: str) -> int:
    """Returns how much of a page a text takes: its characters, and more for those marked."""
    unseen = sum(number for each, number in Counter(text).items() if _is_unseen(each))
    return len(text) + (_WEIGHT_OF_UNSEEN - 1) * unseen


def fitting(text: str, most: int) -> str:
    """Returns the beginning of a text that weighs at most ``most``."""
    shown = text[:most]
    if weight(shown) <= most:
        return shown
    left = most
    for number, character in enumerate(shown):
        left -= _WEIGHT_OF_UNSEEN if _is_unseen(character) else 1
        if left < 0:
            return shown[:number]
    return shown


def visible(text: str, most: int | None = None) -> Markup:
    """A text escaped, with what cannot be seen in it marked; cut where it weighs over ``most``."""
    shown = text if most is None else fitting(text, most)
    made = Markup(shown.translate(_SHOWN))
    if len(shown) < len(text):
        made += Markup('<span class="cut">… {} more characters</span>').format(
            f"{len(text) - len(shown):,}"
        )
    return made


def _is_unseen(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in _UNSEEN


def _mark(character: str) -> Markup:
    name = unicodedata.name(character, "")
    return Markup('<span class="unseen" title="{}">U+{:04X}</span>').format(name, ord(character))


def marked_line(line: str, spans: list[tuple[int, int | None, str]]) -> Markup:
    """A line of a text with parts of it marked.

    Args:
        spans: from and to which column (in code points; None: to the end), and how: ``error`` and
            the like. Where two overlap, the first in the list counts.
    """
    shown = min(len(line), LONGEST_LINE)
    ends = [(max(0, start), shown if end is None else min(end, shown)) for start, end, _ in spans]
    edges = sorted({0, shown, *(edge for pair in ends for edge in pair if 0 <= edge <= shown)})
    made = Markup("")
    for start, end in pairwise(edges):
        part = visible(line[start:end])
        kind = next(
            (
                span[2]
                for span, (first, last) in zip(spans, ends, strict=True)
                if first <= start and end <= last
            ),
            "",
        )
        made += Markup('<mark class="{}">{}</mark>').format(kind, part) if kind else part
    if len(line) > shown:
        made += visible(line[shown:], 0)
    return made
