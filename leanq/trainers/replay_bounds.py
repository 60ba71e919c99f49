"""The bounds of a replay memory, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass

from leanq.errors import InvalidRequestError
from leanq.producer import arguments

MOST_ENTRIES = 100_000_000


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
