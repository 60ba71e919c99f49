"""Reads Lean's notes of a text, an ``.ilean`` file: the names that it elaborated, kept or not.

Lean forgets an ``example``. It also drops a declaration, and says nothing, if the error is about a
``sorryAx`` that the text itself calls the mark of an earlier error. A compiled file shows neither,
and where all meanings of an overloaded name fail, Lean's notes do not show it either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from leanq.errors import AuditError
from leanq.lean.examples import NAME
from leanq.lean.syntax import tokens

_SORRY = "sorryAx"


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
    """Returns whether a text has named `sorryAx`; raises AuditError.

    Args:
        ilean: Lean's notes of the text.
        file: its compiled file. Notation has the name there, and not in the notes.
    """
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
