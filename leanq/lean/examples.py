"""Gives each example of a text a name, so that it leaves a constant behind.

Lean elaborates an ``example`` as a definition of the name ``_example`` and forgets it. So the text
is compiled once more for each example, with that one as ``def _example``. It states the same: all
before it is unchanged, and its name and place are as before. The examples behind it get other
names, since equal names collide.

Lean's notes of a text, an ``.ilean`` file, have the names that it elaborated, kept or not. leanq
may misread a word as an example, or miss one. A doubtful word gets a name in a compilation of its
own, which must leave no constant of that name. Doubtful words share a compilation, unless the text
declares tokens: with those, one word can decide whether another one is read.

Lean also drops a declaration, and says nothing, if the error is about a ``sorryAx`` that the text
itself calls the mark of an earlier error. A compiled file does not show it, and where all meanings
of an overloaded name fail, Lean's notes do not show it either.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leanq.errors import AuditError
from leanq.lean.syntax import may_be_keyword, string_contents, tokens

NAME = "_example"
"""Lean's name for an example."""

_SORRY = "sorryAx"
_WORD = "example"
_EXAMPLE = re.compile(r"example(?![A-Za-z0-9_'!?\u2080-\u2089\u2090-\u209c])")
_DECLARES_TOKENS = re.compile("notation|infix|prefix|postfix")
# Bold Fraktur letters: every Lean 4 takes them in names, and no library gives them a meaning.
_LETTERS = "".join(map(chr, range(0x1D56C, 0x1D5A0)))
# Terms that tell their own line.
_TELLS_LINE = re.compile(r"(?<![\w.])(?:\w+!|sorry\b)")


@dataclass(frozen=True, slots=True)
class Named:
    """A text with a name for one of its examples, and the place of the name."""

    text: str
    line: int
    column: int


class Examples:
    """The examples that a text may have, ``count`` of them by leanq's reading. ``probes`` are the
    texts with ``probe_name`` for other words that could be one. ``tells_line``: whether an example
    had to move to another line, and the text could tell. ``salt`` makes up the names."""

    def __init__(self, code: str, salt: str) -> None:
        self._code = code
        self._starts: list[int] = []
        self._ends: list[int] = []  # of the token before each
        end = 0
        for token in tokens(code):
            if token.text == _WORD:
                self._starts.append(token.start)
                self._ends.append(end)
            end = token.end
        self.count = len(self._starts)
        seen, literals = set(self._starts), string_contents(code)
        others = [
            match.start()
            for match in _EXAMPLE.finditer(code)
            if match.start() not in seen and may_be_keyword(code, match.start(), literals)
        ]
        *self._names, self.probe_name = made_up_names(salt, self.count + 1)
        together = (
            [others] if others and not _DECLARES_TOKENS.search(code) else ([n] for n in others)
        )
        self.probes = [_replaced(code, each, [self.probe_name] * len(each)) for each in together]
        self.tells_line = False

    def named(self, number: int) -> Named:
        code, start = self._code, self._starts[number]
        later = _replaced(code, self._starts[number + 1 :], self._names[number + 1 :])
        rest = later[start + len(_WORD) :]
        line_start = code.rfind("\n", 0, start) + 1
        above_start = code.rfind("\n", 0, max(line_start - 1, 0)) + 1
        column = start - line_start
        above = code[above_start:line_start].strip()
        is_free = above_start >= max(self._ends[number], 1) and (
            not above or (above.startswith("--") and "-/" not in above)
        )
        if is_free and not code[line_start:start].strip():
            # On the line above, so that nothing behind it moves.
            head = f"{code[:above_start]}{' ' * column}def {NAME}"
            text = f"{head} {above}".rstrip()
        else:
            self.tells_line = self.tells_line or _TELLS_LINE.search(code) is not None
            text = head = f"{code[:start]}def {NAME}"
        text = f"{text}\n{' ' * (column + len(_WORD))}{rest}"
        return Named(text, head.count("\n") + 1, len(head) - len(NAME) - head.rfind("\n") - 1)


def may_have_examples(code: str) -> bool:
    return _WORD in code


def name_examples(code: str, salt: str) -> str | None:
    """Makes every ``example`` a definition, so that it leaves a constant behind; None if there is
    none. The names need not be secret, only unused in the file."""
    offsets = _offsets(code)
    return _replaced(code, offsets, made_up_names(salt, len(offsets))) if offsets else None


def example_names(code: str, salt: str) -> tuple[str, ...]:
    """Returns the names that :func:`name_examples` gives."""
    return made_up_names(salt, len(_offsets(code)))


def made_up_names(salt: str, count: int) -> tuple[str, ...]:
    """Returns names of three letters that follow from the salt."""
    first = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest())
    base = len(_LETTERS)
    return tuple(
        "".join(_LETTERS[number // base**k % base] for k in range(3))
        for number in range(first, first + count)
    )


def _offsets(code: str) -> list[int]:
    return [token.start for token in tokens(code) if token.text == _WORD]


def _replaced(code: str, offsets: Sequence[int], names: Sequence[str]) -> str:
    """Returns the text with a definition for each of these examples. ``def``, a blank and a name
    fill up the seven characters of ``example``, so no line and no column moves."""
    pieces: list[str] = []
    done = 0
    for offset, name in zip(offsets, names, strict=True):
        pieces += code[done:offset], f"def {name}"
        done = offset + len(_WORD)
    return "".join([*pieces, code[done:]])


def examples_in(ilean: bytes) -> tuple[str, ...]:
    """Returns the names of examples in the notes of a text; raises AuditError."""
    named = (name for name, is_declared in _constants(ilean, NAME) if is_declared)
    return tuple(sorted({name for name in named if name.split(".")[-1] == NAME}))


def may_name_sorry(code: str) -> bool:
    """Returns whether `sorryAx` stands anywhere in a text."""
    return _SORRY in code


def writes_sorry(code: str) -> bool:
    """Returns whether `sorryAx` stands in a text outside comments and strings."""
    return any(_SORRY in token.text for token in tokens(code))


def names_sorry(ilean: bytes, file: Iterable[bytes]) -> bool:
    """Returns whether a text has named `sorryAx`, by Lean's notes and the compiled file, which
    alone has the names of notation. Raises AuditError."""
    return any(_SORRY.encode() in part for part in file) or any(
        name == _SORRY for name, _ in _constants(ilean, _SORRY)
    )


def _constants(ilean: bytes, part: str) -> list[tuple[str, bool]]:
    """Returns the constants whose names have this part, each with whether the text declares it."""
    try:
        references = json.loads(ilean)["references"]
        return [
            (str(json.loads(key)["c"]["n"]), found["definition"] is not None)
            for key, found in references.items()
            if part in key
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AuditError(f"its .ilean file cannot be read: {error}") from None
