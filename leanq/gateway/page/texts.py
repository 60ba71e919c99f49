"""Makes texts that anybody may have written fit to be seen.

Characters that a browser would not show, or would show in another place, appear as their numbers:
control characters, directions of writing, spaces without width. No text is ever markup.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from itertools import pairwise

from markupsafe import Markup, escape

LONGEST_LINE = 2000
"""Characters of a line that are shown."""

# Unicode's control, format, surrogate, private and unassigned characters, and separators of lines.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# A mark is so many times as long as its character.
_WEIGHT_OF_UNSEEN = 16
_MOST_KEPT = 10_000


class _Shown(dict[int, str]):
    """Maps each character to its escaped or marked form, for ``str.translate``."""

    def __missing__(self, code: int) -> str:
        if len(self) > _MOST_KEPT:
            self.clear()
        character = chr(code)
        shown = str(_mark(character) if _is_unseen(character) else escape(character))
        self[code] = shown
        return shown


_SHOWN = _Shown()


def weight(text: str) -> int:
    """Returns how much of a page a text takes: its characters, and more for marked ones."""
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
    """Returns a text escaped, with its invisible characters marked, cut at the weight ``most``."""
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
    """Returns a line of a text with parts of it marked.

    Args:
        spans: start and end column (in code points; None: to the end) and a style such as
            ``error``. If two overlap, the first in the list counts.
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
