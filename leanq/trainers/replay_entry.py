"""The entries of a replay memory, as msgpack, and the batches that a learner reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec

from leanq.errors import InvalidRequestError, TooLargeError, UsageError, WireError, to_install
from leanq.queue.requests import Reason, Reply, Verdict

VERSION = 1
"""The version of entries in Redis."""

MAX_ENTRY_BYTES = 1 << 20
"""The largest packed entry, in bytes."""

MAX_VALUE_BYTES = 64 << 10
"""The largest packed value beside a memory, in bytes."""

_LEAST_WEIGHT, _MOST_WEIGHT = 1e-9, 1e9
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidRequestError)


class ReplayEntry(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="v", tag=VERSION):
    """One attempt at a proof.

    Attributes:
        verdict: that of Lean, of the judge, or of the infrastructure.
        text: the attempt: Lean text, a tactic, a model's answer.
        reason: why the verdict is not ``accepted``.
        goals: the goals that are left, as Lean prints them.
        rewards: rewards by name; all finite.
        tags: the caller's tags, such as the problem and the policy's version.
        weight: for weighted samples: from 1e-9 to 1e9, or 0 for never.
    """

    verdict: Verdict
    text: str
    reason: Reason | None = None
    goals: tuple[str, ...] = ()
    rewards: dict[str, float] = {}
    tags: dict[str, str] = {}
    weight: float = 1.0

    @classmethod
    def of(
        cls,
        reply: Reply,
        text: str,
        *,
        rewards: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        weight: float = 1.0,
    ) -> ReplayEntry:
        """Returns the entry for a reply to ``text``, with the goals that are left.

        Raises:
            InvalidRequestError: the reply is an echo's, or an argument is out of range.
        """
        if reply.verdict is None:
            raise InvalidRequestError("an echo has no verdict to be remembered")
        return cls(
            reply.verdict,
            text,
            reply.reason,
            reply.goals or tuple(each.goal for each in reply.sorries if each.goal),
            dict(rewards or {}),
            dict(tags or {}),
            weight,
        )

    def __post_init__(self) -> None:
        if self.weight and not _LEAST_WEIGHT <= self.weight <= _MOST_WEIGHT:
            raise InvalidRequestError(
                f"a weight must be 0, or from {_LEAST_WEIGHT:g} to {_MOST_WEIGHT:g}, "
                f"got {self.weight!r:.40}"
            )
        for name, value in self.rewards.items():
            if not math.isfinite(value):
                raise InvalidRequestError(f"the reward {name!r:.40} must be finite, got {value!r}")


_encode = msgspec.msgpack.Encoder().encode
_entries = msgspec.msgpack.Decoder(ReplayEntry)
_values = msgspec.msgpack.Decoder(dict[str, Any])


def pack_entry(entry: ReplayEntry) -> bytes:
    """Returns the entry's bytes, which any learner can read.

    Raises:
        TooLargeError: more than ``MAX_ENTRY_BYTES``.
        InvalidRequestError: a field of another type, or text that is not Unicode.
    """
    try:
        data = _encode(entry)
        _entries.decode(data)
    except (*_UNREADABLE, TypeError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"not an entry of a replay memory: {error}") from None
    if len(data) > MAX_ENTRY_BYTES:
        raise TooLargeError(
            f"the entry has {len(data)} bytes, more than the {MAX_ENTRY_BYTES} that are allowed"
        )
    return data


def unpack_entry(data: bytes) -> ReplayEntry:
    """Returns the entry in ``data``, which may be hostile.

    Raises:
        WireError: ``data`` is no entry, or one of a later version.
    """
    if len(data) > MAX_ENTRY_BYTES:
        raise WireError(f"an entry has at most {MAX_ENTRY_BYTES} bytes, got {len(data)}")
    try:
        return _entries.decode(data)
    except _UNREADABLE as error:
        raise WireError(f"not an entry of a replay memory: {error}") from None


@dataclass(frozen=True, slots=True)
class ReplayValue:
    """The value beside a memory.

    Attributes:
        version: grows with each published value.
        fields: the published fields, by name.
    """

    version: int
    fields: Mapping[str, Any]


def pack_value(fields: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a value: texts, numbers, booleans, None, and lists and maps of them, by
    name.

    Raises:
        TooLargeError: more than ``MAX_VALUE_BYTES``.
        InvalidRequestError: it holds other types, or its keys are not texts.
    """
    try:
        data = _encode(dict(fields))
        _values.decode(data)
    except (*_UNREADABLE, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"not a value to be published: {error}") from None
    if len(data) > MAX_VALUE_BYTES:
        raise TooLargeError(
            f"the value has {len(data)} bytes, more than the {MAX_VALUE_BYTES} that are allowed"
        )
    return data


def unpack_value(version: int, data: bytes) -> ReplayValue:
    """Returns the value in ``data``, which may be hostile.

    Raises:
        WireError: ``data`` is no value.
    """
    try:
        return ReplayValue(version, _values.decode(data))
    except _UNREADABLE as error:
        raise WireError(f"not a value beside a replay memory: {error}") from None


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """Entries that were read or drawn together.

    Attributes:
        entries: in the order of the list, or of the draws.
        numbers: the number of each entry; numbers grow by one in the order of writing.
        offset: where to read on; 0 for a sample.
        missed: how many entries left the memory before this learner read them.
        unreadable: how many entries were left out, since this release cannot read them.
    """

    entries: Sequence[ReplayEntry] = ()
    numbers: Sequence[int] = ()
    offset: int = 0
    missed: int = 0
    unreadable: int = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[ReplayEntry]:
        return iter(self.entries)

    def to_arrow(self) -> Any:
        """Returns the batch as a ``pyarrow.RecordBatch``: ``number`` (int64), ``verdict``,
        ``reason``, ``text`` (string), ``goals`` (list of string), ``rewards`` (map to double),
        ``tags`` (map to string), ``weight`` (double). Every batch has the same columns.

        Raises:
            UsageError: pyarrow is not installed (``leanq[data]``).
        """
        try:
            arrow = import_module("pyarrow")
        except ImportError:
            raise UsageError(
                f"columns need pyarrow, which is not installed: {to_install('data')}"
            ) from None
        text = arrow.string()
        columns = {
            "number": arrow.array(self.numbers, arrow.int64()),
            "verdict": arrow.array([each.verdict for each in self.entries], text),
            "reason": arrow.array([each.reason for each in self.entries], text),
            "text": arrow.array([each.text for each in self.entries], text),
            "goals": arrow.array([each.goals for each in self.entries], arrow.list_(text)),
            "rewards": arrow.array(
                [[*each.rewards.items()] for each in self.entries],
                arrow.map_(text, arrow.float64()),
            ),
            "tags": arrow.array(
                [[*each.tags.items()] for each in self.entries], arrow.map_(text, text)
            ),
            "weight": arrow.array([each.weight for each in self.entries], arrow.float64()),
        }
        return arrow.RecordBatch.from_arrays([*columns.values()], names=[*columns])


def read_batch(rows: Sequence[tuple[int, bytes]], offset: int = 0, missed: int = 0) -> ReplayBatch:
    """Returns the batch of rows, each a number and an entry's bytes; counts the unreadable ones."""
    entries, numbers = [], []
    for number, data in rows:
        try:
            entries.append(unpack_entry(data))
        except WireError:
            continue
        numbers.append(number)
    return ReplayBatch(entries, numbers, offset, missed, len(rows) - len(entries))
