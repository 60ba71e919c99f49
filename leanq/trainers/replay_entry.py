"""The data of a replay memory: entries as msgpack, batches of them, bounds and statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec

from leanq.errors import InvalidRequestError, TooLargeError, UsageError, WireError, to_install
from leanq.producer import arguments
from leanq.queue.requests import Reason, Reply, Verdict

VERSION = 1
"""The version of entries in Redis."""

MAX_ENTRY_BYTES = 1 << 20
"""The largest packed entry, in bytes."""

MAX_VALUE_BYTES = 64 << 10
"""The largest packed value beside a memory, in bytes."""

MOST_ENTRIES = 100_000_000
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


def _packed(
    value: ReplayEntry | Mapping[str, Any],
    decoder: msgspec.msgpack.Decoder[Any],
    most: int,
    what: str,
) -> bytes:
    try:
        data = _encode(value if isinstance(value, ReplayEntry) else dict(value))
        decoder.decode(data)
    except (*_UNREADABLE, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"not {what}: {error}") from None
    if len(data) > most:
        size = len(data)
        raise TooLargeError(f"{what} has {size} bytes, more than the {most} that are allowed")
    return data


def pack_entry(entry: ReplayEntry) -> bytes:
    """Returns the entry's bytes, which any learner can read.

    Raises:
        TooLargeError: more than ``MAX_ENTRY_BYTES``.
        InvalidRequestError: a field of another type, or text that is not Unicode.
    """
    return _packed(entry, _entries, MAX_ENTRY_BYTES, "an entry of a replay memory")


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
    return _packed(fields, _values, MAX_VALUE_BYTES, "a value to be published")


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
            UsageError: pyarrow is not installed (``leanq[campaigns]``).
        """
        try:
            arrow = import_module("pyarrow")
        except ImportError:
            raise UsageError(
                f"columns need pyarrow, which is not installed: {to_install('campaigns')}"
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


@dataclass(frozen=True, slots=True)
class ReplayBounds:
    """How much a memory keeps, and which entries samples are drawn from.

    Attributes:
        entries: the most entries; the oldest leave first.
        max_mb: the most MiB that packed entries take.
        reservoir: whether samples are drawn from all entries ever written, instead of the latest.
            Then as many entries again are kept beside the list, and each entry is among them with
            the same probability.
        weighted: whether samples can be drawn by the entries' weights; takes some 150 bytes for
            each entry.
    """

    entries: int = 100_000
    max_mb: int = 256
    reservoir: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("entries", self.entries, MOST_ENTRIES),
            ("max_mb", self.max_mb, 1 << 20),
        ):
            if not 1 <= arguments.whole_number(name, value) <= most:
                raise InvalidRequestError(f"{name} must lie between 1 and {most}, got {value}")
        arguments.flag("reservoir", self.reservoir)
        arguments.flag("weighted", self.weighted)


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Statistics of a memory.

    Attributes:
        entries: how many entries the list has.
        size_bytes: their packed size.
        sampled: how many entries samples are drawn from.
        first, last: the numbers of the oldest and the latest entry; in an empty list ``last`` is
            one less than ``first``.
        written: how many were ever written.
        evicted: how many have left the list.
        dropped: how many were not written, or had to leave, because the server was short of memory.
    """

    entries: int
    size_bytes: int
    sampled: int
    first: int
    last: int
    written: int
    evicted: int
    dropped: int
