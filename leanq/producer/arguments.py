"""Checks callers' arguments before anything is sent.

Each function returns the value in the type that the rest of leanq works with. Otherwise it raises
InvalidRequestError, which says what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import msgspec

from leanq.errors import InvalidRequestError

# Beyond this a number is not exact in the scripts of the server.
_MAX_WHOLE = 1 << 53


def text(name: str, value: object) -> str:
    # Nearly all values are plain texts, so test for these first.
    if type(value) is str:
        return value
    if not isinstance(value, str):
        raise wrong_type(name, "a text (str)", value)
    # A subclass, such as NumPy's, becomes a plain text: the wire takes no other.
    return str.__str__(value)


def data(name: str, value: object) -> bytes:
    if type(value) is bytes:
        return value
    if not isinstance(value, bytes | bytearray | memoryview):
        raise wrong_type(name, "bytes", value)
    return bytes(value)


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, "True or False", value)
    return value


def number(name: str, value: object) -> float:
    """Returns a number, such as a time in seconds, as a ``float``."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequestError(f"{name} is out of range: {value!r:.40}") from None


def whole_number(name: str, value: object, least: int = -_MAX_WHOLE) -> int:
    """Returns an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong_type(name, "an integer", value)
    if abs(int(value)) > _MAX_WHOLE:
        raise InvalidRequestError(f"{name} is out of range: {value!r:.40}")
    if int(value) < least:
        raise InvalidRequestError(f"{name} must be at least {least}, got {int(value)}")
    return int(value)


def texts(name: str, value: object) -> tuple[str, ...]:
    # Iterating a single text would yield its letters.
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise wrong_type(name, "a list of texts", value)
    return tuple(text(f"an element of {name}", each) for each in value)


def json_values(name: str, value: object) -> dict[str, Any]:
    """Returns a copy of JSON values by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wrong_type(name, "values by name (dict)", value)
    try:
        copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} must have only what JSON has: {error}") from None
    return copied


def one_of(name: str, value: object, words: Collection[str]) -> str:
    if not isinstance(value, str) or value not in words:
        raise wrong_type(name, " or ".join(map(repr, words)), value)
    return value


def wrong_type(name: str, expected: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} must be {expected}, got {value!r:.80} ({type(value).__name__})"
    )
