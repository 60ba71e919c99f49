"""Gives each example of a text a name, so that it leaves a constant behind.

Lean elaborates an ``example`` as a definition of the name ``_example`` and forgets it. So the text
is compiled once more with each example as a definition of another such name. They fill the same
characters, so no line and no column moves. A name begins with ``_``, which no search of Lean's
offers, and stands nowhere in the text.

The examples before one are still there when Lean reads it. They can change what it states only by
an attribute, by a tactic that searches the environment, or by a term that tells its declaration's
name. A text with one of these is not judged so. Nor is one in which leanq may misread a comment or
a string, and with it what an example is: see :mod:`leanq.lean.text`.

Lean's notes of a text, an ``.ilean`` file, have the names that it elaborated, kept or not.

Lean also drops a declaration, and says nothing, if the error is about a ``sorryAx`` that the text
itself calls the mark of an earlier error. A compiled file does not show it, and where all meanings
of an overloaded name fail, Lean's notes do not show it either.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from leanq.errors import AuditError
from leanq.lean.text import bare_text, split_header, tokens

NAME = "_example"
"""Lean's name for an example."""

_SORRY = "sorryAx"
_WORD = "example"
# Bold Fraktur letters: every Lean 4 takes them in names, and no library gives them a meaning.
_LETTERS = "".join(map(chr, range(0x1D56C, 0x1D5A0)))
# Words by which a text finds what its examples leave behind, or tells their names. No compiled term
# shows it: a branch that fails under each name but Lean's own leaves no trace.
_FINDS_WORDS = (
    "exact? apply? rw? rw?? rewrite? have? observe? try? rw_search library_search hint propose "
    "locals suggestions decl_name unreachable! panic! todo! assert! debug_assert! _example"
)
_FINDS = frozenset(_FINDS_WORDS.split(" "))
_BETWEEN_PARTS = re.compile("[.«»]")
# What stands behind an attribute of a command that is no example.
_DECLARES_WORDS = (
    "def theorem lemma instance abbrev structure class inductive coinductive axiom opaque alias "
    "notation notation3 infix infixl infixr prefix postfix irreducible_def"
)
_MODIFIER_WORDS = "private protected public meta noncomputable unsafe partial nonrec scoped local"
_MODIFIERS = frozenset(_MODIFIER_WORDS.split(" "))
_DECLARES = frozenset(_DECLARES_WORDS.split(" "))


@dataclass(frozen=True, slots=True)
class Examples:
    """A text with a name for each of its examples.

    Attributes:
        names: these names.
        places: where they stand: lines from 1, columns from 0.
        doubt: why they must not be judged so; empty if they may.
    """

    text: str
    names: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    doubt: str = ""

    @classmethod
    def of(cls, code: str, salt: str, declared: Collection[str] = ()) -> Examples:
        """Names the examples of a text.

        Args:
            salt: makes up the names.
            declared: the tokens of libraries.
        """
        starts = _offsets(code)
        names = _hidden_names(code, salt, len(starts))
        if len(names) < len(starts):
            return cls(code, (), (), "there are too many")
        text = _replaced(code, starts, names)
        return cls(text, names, _places(code, starts), _doubt(code, declared, len(starts)))


def _places(code: str, starts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns where the names for these examples stand."""
    found: list[tuple[int, int]] = []
    line, done = 1, 0
    for start in starts:
        line += code.count("\n", done, start)
        done = start
        found.append((line, start - code.rfind("\n", 0, start) - 1 + len("def ")))
    return tuple(found)


def _hidden_names(code: str, salt: str, count: int) -> tuple[str, ...]:
    """Returns names of three characters that stand nowhere in a text."""
    first = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest())
    ends = _LETTERS + string.ascii_letters + string.digits
    most = len(_LETTERS) * len(ends)
    made_up = (
        f"_{_LETTERS[number % most // len(ends)]}{ends[number % len(ends)]}"
        for number in range(first % most, first % most + most)
    )
    return tuple(itertools.islice((name for name in made_up if name not in code), count))


def _doubt(code: str, declared: Collection[str], count: int) -> str:
    """Returns why the examples of a text, so many, must not be judged by names."""
    bare = bare_text(code[split_header(code).end_offset :], declared)
    words = [word.text for word in bare.words] if bare else []
    glued = any(word.is_glued and _WORD in word.text for word in bare.words) if bare else True
    if glued or words.count(_WORD) != count:
        return "its notation or its strings could hide one; state these otherwise"
    parts = (part for word in words for part in (word, *_BETWEEN_PARTS.split(word)))
    if found := _FINDS.intersection(parts):
        return f"{min(found)} could find what one of them leaves behind, or tell its name"
    for start, pair in enumerate(itertools.pairwise(words)):
        if pair == ("@", "["):
            depth, end = 1, start + 2
            while depth and end < len(words):
                depth += {"[": 1, "]": -1}.get(words[end], 0)
                end += 1
            while end < len(words) and words[end] in _MODIFIERS:
                end += 1
            behind = words[end : end + 2]
            if behind != ["@", "["] and not _DECLARES.intersection(behind[:1]):
                return "one of them, or what it declares, has an attribute"
    return ""


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
