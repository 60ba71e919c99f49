"""Texts that anybody may have written, made fit to be seen.

What a browser would not show, or would show in another place, is shown by its number: control
characters, directions of writing, spaces without width. Nothing in a text is ever markup.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

from markupsafe import Markup, escape

LONGEST_LINE = 2000
"""Characters of a line that are shown."""

# All that Unicode calls control, format, surrogate, private, unassigned, or a separator of lines.
# Such are rare, so it is asked of these alone; blanks and line ends are what they are.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_PLAIN = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u0600-\uffff\U00010000-\U0010ffff]+")


def visible(text: str, most: int | None = None) -> Markup:
    """A text escaped, with what cannot be seen in it marked; cut after ``most`` characters."""
    shown = text if most is None else text[:most]
    made = Markup("").join(_parts(shown))
    if len(shown) < len(text):
        made += Markup('<span class="cut">… {} more characters</span>').format(
            f"{len(text) - len(shown):,}"
        )
    return made


def _parts(text: str) -> Iterator[Markup]:
    start = 0
    while start < len(text):
        if plain := _PLAIN.match(text, start):
            yield escape(plain[0])
            start = plain.end()
        else:
            yield _character(text[start])
            start += 1


def _character(character: str) -> Markup:
    if unicodedata.category(character) not in _UNSEEN or character in "\n\t":
        return escape(character)
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
