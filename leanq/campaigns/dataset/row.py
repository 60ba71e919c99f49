"""What a row of a data set is, and what has to stand in its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from leanq.queue.settings import MAX_REQUEST_BYTES

MAX_CODE_BYTES = MAX_REQUEST_BYTES - 4096
"""The longest text to check: the request's other fields take some hundred bytes beside it."""

_KINDS: Mapping[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    bytes: "bytes, not text",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of the fields in a data set; ``None`` for those that it has not."""

    id: str = "id"
    code: str = "code"
    problem: str | None = None
    header: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What is to be checked.

    Attributes:
        line: where the row stands, from 1: the line of a JSONL file, the row of a Parquet file,
            the place among a folder's sorted files.
        next: where the following row begins; only the data itself knows what it means.
        problem: of what the row is one attempt; ``None`` where the data names none.
        codes: whole texts to check: header, prompt and code.
        listed: whether the code was a list of texts, and not a text alone.
    """

    line: int
    next: int
    id: str | int
    problem: str | int | None
    codes: tuple[str, ...]
    listed: bool


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be checked, and why; ``id`` is ``None`` where it has none to speak of."""

    line: int
    next: int
    id: str | int | None
    error: str


class Data(Protocol):
    """A data set, which can be read from any row on in memory that does not grow with it."""

    @property
    def path(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Tells whether this is still the same data: equal for equal data, and for other data
        different unless it has the same size, beginning and end."""

    def total(self) -> int | None:
        """The number of rows, bad ones too, if it can be told cheaply."""

    def rows(self, line: int = 1, start: int = 0) -> Iterator[Row | BadRow]:
        """The rows from ``start`` on, where what is numbered ``line`` begins: after a row that is
        its ``next``, and ``row.line + 1`` even if a blank line follows.

        Raises:
            UsageError: the data can no longer be read.
        """


class UnfitError(Exception):
    """Why something is no row; its text is one short line."""


def read_row(fields: Fields, line: int, following: int, record: Mapping[str, Any]) -> Row | BadRow:
    """The row whose fields are in ``record``; ``following`` is its ``next``."""
    name: str | int | None = None
    try:
        name = _name(fields.id, record)
        problem = None if fields.problem is None else _name(fields.problem, record)
        codes, listed = _codes(fields, record)
    except UnfitError as error:
        return BadRow(line, following, name, str(error))
    return Row(line, following, name, problem, codes, listed)


def check_size(size_bytes: int) -> None:
    """Raises UnfitError where a text of this size is too long to be checked."""
    if size_bytes > MAX_CODE_BYTES:
        raise UnfitError(f"the code has {size_bytes} bytes; at most {MAX_CODE_BYTES} are taken")


def _name(field: str, record: Mapping[str, Any]) -> str | int:
    value = _required(field, record)
    if isinstance(value, str):
        _size_bytes(value, field)
        return value
    # bool is an int in Python, but true is no name.
    if type(value) is int:
        return value
    raise UnfitError(f"{_the(field)} is {_kind(value)}; it must be a text or a whole number")


def _codes(fields: Fields, record: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """The texts to check, and whether they stood in a list."""
    field, value = fields.code, _required(fields.code, record)
    before, before_bytes = _before(fields, record)
    if isinstance(value, str):
        check_size(before_bytes + _size_bytes(value, field))
        return (before + value,), False
    if not isinstance(value, list):
        raise UnfitError(f"{_the(field)} is {_kind(value)}; it must be a text or a list of texts")
    if not value:
        raise UnfitError(f"{_the(field)} is an empty list")
    for place, code in enumerate(value):
        if not isinstance(code, str):
            raise UnfitError(f"{_the(field)} is a list whose element {place} is {_kind(code)}")
        check_size(before_bytes + _size_bytes(code, field))
    return tuple(before + code for code in value), True


def _before(fields: Fields, record: Mapping[str, Any]) -> tuple[str, int]:
    """What the code is preceded by, and its size in bytes."""
    header, prompt = _optional(fields.header, record), _optional(fields.prompt, record)
    if header and not header.endswith("\n"):
        header += "\n"
    size_bytes = _size_bytes(header, fields.header) + _size_bytes(prompt, fields.prompt)
    return header + prompt, size_bytes


def _required(field: str, record: Mapping[str, Any]) -> object:
    value = record.get(field)
    if value is None:
        raise UnfitError(f"{_the(field)} is {'null' if field in record else 'missing'}")
    return value


def _optional(field: str | None, record: Mapping[str, Any]) -> str:
    value = None if field is None else record.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnfitError(f"{_the(field)} is {_kind(value)}; it must be a text")
    return value


def _size_bytes(text: str, field: str | None) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        surrogate = ord(text[error.start])
        raise UnfitError(
            f"{_the(field)} is no Unicode text: half of a surrogate pair, U+{surrogate:04X}"
        ) from None


def _the(field: str | None) -> str:
    return f"the field {field!r:.60}"


def _kind(value: object) -> str:
    return _KINDS.get(type(value), f"of type {type(value).__name__}")
