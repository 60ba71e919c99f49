"""A row of a data set: the names of its fields, its texts, and what makes it a bad row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from leanq.errors import UsageError
from leanq.lean.goals.completions import (
    candidates_of,
    open_definitions,
    with_header,
    with_sorry,
)
from leanq.lean.text import split_header
from leanq.queue.settings import MAX_REQUEST_BYTES

MAX_CODE_BYTES = MAX_REQUEST_BYTES - 4096
"""The longest text, together with its target. A request's other fields take some hundred bytes."""

FIRST_ROWS = 100
"""How many rows are read to see whether the data has the fields."""

_LISTED_FIELDS = 20

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
    """The names of the fields in a data set; ``None`` for a field that it does not have.

    Attributes:
        id: names the row.
        code: the text to check, or a list of texts.
        problem: names the problem that the row is an attempt at.
        target: the theorems that the code has to prove: Lean text with ``sorry`` for proofs.
        header, prompt: texts that stand before the code; a row may lack them.
        tags: a text, or a list of texts, that reports group by; a row may lack it.
        parts: whether the fields are those of a problem set. Then the header stands before the
            target too, and a target that stops at ``:=`` or ``by`` gets a ``sorry``. The code is a
            model's answer, as rewards read it: up to four texts are made of it. They may fill in
            definitions that the target leaves open.
        verified: whether the code has to prove the target; otherwise the target only completes it.
    """

    id: str = "id"
    code: str = "code"
    problem: str | None = None
    target: str | None = None
    header: str | None = None
    prompt: str | None = None
    tags: str | None = None
    parts: bool = False
    verified: bool = True

    @property
    def required(self) -> Mapping[str, str]:
        """The fields that no row may lack: their names, by what they hold."""
        kinds = ("id", "code", "problem", "target")
        named = {kind: getattr(self, kind) for kind in kinds}
        return {kind: name for kind, name in named.items() if name is not None}

    @property
    def columns(self) -> list[str]:
        """All names, each once: one column may serve several fields."""
        named = (*self.required.values(), self.header, self.prompt, self.tags)
        return list(dict.fromkeys(name for name in named if name is not None))


@dataclass(frozen=True, slots=True)
class Row:
    """A row to check.

    Attributes:
        line: the row's place, from 1: its line in JSONL, its row in Parquet, its number among a
            folder's sorted files.
        problem: the problem that the row is an attempt at; ``None`` if the data names none.
        codes: for each code, whole texts made of header, prompt and code, the best first. Only a
            code that is verified has more than one.
        listed: whether the row has a list of texts instead of one text.
        target: the text that the codes have to prove; ``None`` if they are only checked.
        holes: definitions of the target whose values the codes choose.
        tags: texts that reports group by.
    """

    line: int
    id: str | int
    problem: str | int | None
    codes: tuple[tuple[str, ...], ...]
    listed: bool
    target: str | None = None
    holes: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be checked, and why; ``id`` is ``None`` if it has no valid one."""

    line: int
    id: str | int | None
    error: str


class UnfitError(Exception):
    """Says why something is no row, in one short line.

    Attributes:
        id: the row's id, if that is known.
    """

    id: str | None = None


Numbered = tuple[int, Mapping[str, Any] | UnfitError]


class Dataset(ABC):
    """A data set that can be read from any row on, in bounded memory.

    Attributes:
        path: where it is, for messages.
        fields: the names of its fields.
        fingerprint: equal for equal data. Other data differs, unless it has the same size,
            beginning and end.
    """

    path: str
    fields: Fields
    fingerprint: str

    @abstractmethod
    def total(self) -> int:
        """Returns the number of rows, bad ones included."""

    @abstractmethod
    def _records(self, line: int) -> Iterator[Numbered]:
        """Yields the line and the fields of each row from ``line`` on."""

    def check_fields(self) -> None:
        """Reads the first rows, to find a wrong field name before anything is checked.

        Raises UsageError if none of them has one of the required fields.
        """
        found: Counter[str] = Counter()
        count = 0
        for record in self.first_records():
            count += 1
            found.update(record.keys())
        for kind, name in self.fields.required.items():
            if count and not found[name]:
                known = [repr(each)[:60] for each, _ in found.most_common(_LISTED_FIELDS)]
                more = ", …" if len(found) > len(known) else ""
                raise UsageError(
                    f"{self.path} has no field {name!r:.60} in its first {count:,} "
                    f"row{'s' * (count > 1)}, but {', '.join(known) or 'no field at all'}{more}; "
                    f"name the right one with --{kind}-field"
                )

    def first_records(self) -> Iterator[Mapping[str, Any]]:
        """Yields the first rows that can be read."""
        for _, found in islice(self._records(1), FIRST_ROWS):
            if not isinstance(found, UnfitError):
                yield found

    def rows(self, line: int = 1) -> Iterator[Row | BadRow]:
        """Yields the rows from ``line`` on; raises UsageError."""
        for number, found in self._records(line):
            if isinstance(found, UnfitError):
                yield BadRow(number, found.id, str(found))
            else:
                yield _read_row(self.fields, number, found)


def _read_row(fields: Fields, line: int, record: Mapping[str, Any]) -> Row | BadRow:
    name: str | int | None = None
    try:
        name = _name(fields.id, record)
        problem = None if fields.problem is None else _name(fields.problem, record)
        named = fields.target
        target = None if named is None else _text(named, _given(named, record))
        header, prompt = _optional(fields.header, record), _optional(fields.prompt, record)
        value = _given(fields.code, record)
        given = _texts(fields.code, value)
        if not given:
            raise UnfitError(f"{_the(fields.code)} is an empty list")
        tags = None if fields.tags is None else record.get(fields.tags)
        tags = [] if fields.tags is None or tags is None else _texts(fields.tags, tags)
        if fields.parts:
            answers = [_joined(prompt, code) for code in given]
            target, codes = _completed(header, target, answers)
        else:
            if header and not header.endswith("\n"):
                header += "\n"
            codes = [(_joined(header, prompt, code),) for code in given]
        if not fields.verified:
            # Lean would take a remark of the answer as well as its proof.
            target, codes = None, [code[:1] for code in codes]
        for text in chain.from_iterable(codes):
            check_size(_size_bytes(text) + _size_bytes(target or ""))
    except UnfitError as error:
        return BadRow(line, name, str(error))
    holes = open_definitions(target) if fields.parts and target is not None else ()
    listed = isinstance(value, list)
    return Row(line, name, problem, (*codes,), listed, target, holes, (*tags,))


def check_size(size_bytes: int) -> None:
    """Raises UnfitError if a text of this size is too long to be checked."""
    if size_bytes > MAX_CODE_BYTES:
        raise UnfitError(f"the code has {size_bytes} bytes; at most {MAX_CODE_BYTES} are taken")


def _completed(
    header: str, target: str | None, answers: list[str]
) -> tuple[str | None, list[tuple[str, ...]]]:
    """Returns the target and the whole texts of a problem set's row."""
    made: list[tuple[str, ...]]
    if target is None:
        made = [(with_sorry(candidates_of("", answer)[0]),) for answer in answers]
    else:
        statement = with_sorry(target)
        made = [candidates_of(statement, answer) for answer in answers]
        target = with_header(header, statement)
        # A statement that holds the imports itself lends them to the codes.
        header = header or split_header(statement).text
    return target, [tuple(with_header(header, text) for text in texts) for texts in made]


def _given(field: str, record: Mapping[str, Any]) -> object:
    value = record.get(field)
    if value is None:
        raise UnfitError(f"{_the(field)} is {'null' if field in record else 'missing'}")
    return value


def _name(field: str, record: Mapping[str, Any]) -> str | int:
    value = _given(field, record)
    # In Python, bool is an int.
    if type(value) is int:
        return value
    return _text(field, value, "a text or a whole number")


def _optional(field: str | None, record: Mapping[str, Any]) -> str:
    value = None if field is None else record.get(field)
    return "" if field is None or value is None else _text(field, value)


def _text(field: str, value: object, expected: str = "a text") -> str:
    if not isinstance(value, str):
        raise UnfitError(f"{_the(field)} is {_kind(value)}; it must be {expected}")
    try:
        check_size(_size_bytes(value))
    except UnicodeEncodeError as error:
        surrogate = ord(value[error.start])
        raise UnfitError(
            f"{_the(field)} is no Unicode text: half of a surrogate pair, U+{surrogate:04X}"
        ) from None
    return value


def _texts(field: str, value: object) -> list[str]:
    if not isinstance(value, list):
        return [_text(field, value, "a text or a list of texts")]
    for place, each in enumerate(value):
        if not isinstance(each, str):
            raise UnfitError(f"{_the(field)} is a list whose element {place} is {_kind(each)}")
    return [_text(field, each) for each in value]


def _joined(*parts: str) -> str:
    check_size(sum(map(_size_bytes, parts)))
    return "".join(parts)


def _size_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _the(field: str) -> str:
    return f"the field {field!r:.60}"


def _kind(value: object) -> str:
    return _KINDS.get(type(value), f"of type {type(value).__name__}")
