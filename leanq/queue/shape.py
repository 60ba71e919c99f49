"""Settings that a queue's workers and clients must share, and how a process finds a difference.

Each worker that joins writes the shape of its queue where every process looks, even one that
expects another number of shards. The shape holds while a worker of that shape is alive. The first
worker after that may bring another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leanq.errors import UsageError
from leanq.queue.keys import Keys, shape_key
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings that a queue's keys and leases depend on; ``lease_s`` is in seconds."""

    shards: int
    lease_s: float

    @classmethod
    def of(cls, settings: Settings) -> Shape:
        """Returns the shape that a process with these settings expects."""
        return cls(settings.shards, settings.lease_s)


async def check_shape(shard: Shard) -> None:
    """Checks the number of shards for a client, to which the lease does not matter.

    Raises:
        UsageError: living workers serve the queue with another number of shards.
        UnavailableError: the server cannot be reached, or forbids to look.
    """
    told, own = await _living_shape(shard), Shape.of(shard.settings)
    if told:
        _compare_shards(told, own)


async def announce_shape(shard: Shard) -> None:
    """Writes the shape of a joining worker's queue, unless living workers have another.

    Raises:
        UsageError: living workers have another; the text names both values.
        UnavailableError: the server cannot be reached.
    """
    told, own = await _living_shape(shard), Shape.of(shard.settings)
    if told == own:
        return
    if told:
        _compare_shards(told, own)
        raise UsageError(
            f"the workers of this queue have a lease of {told.lease_s:g} s, LEANQ_LEASE_S is "
            f"{own.lease_s:g} here; set the same, or stop all workers before it is changed"
        )
    key = shape_key(shard.settings.prefix)
    fields = ["shards", str(own.shards), "lease_s", str(own.lease_s)]
    await shard.call(lambda c: c.hset(key, items=fields))


def _compare_shards(told: Shape, own: Shape) -> None:
    if told.shards != own.shards:
        parts = "1 shard" if told.shards == 1 else f"{told.shards} shards"
        raise UsageError(
            f"this queue has {parts}, LEANQ_SHARDS is {own.shards} here; "
            f"set LEANQ_SHARDS={told.shards}, or stop all workers before it is changed"
        )


async def _living_shape(shard: Shard) -> Shape | None:
    """Returns the last shape written if it is this process's own or workers of it are alive."""
    prefix = shard.settings.prefix
    fields: Any = await shard.call(lambda c: c.hgetall(shape_key(prefix)))
    told = _read(fields)
    if told is None or told == Shape.of(shard.settings):
        return told
    workers = Keys(prefix, 0, told.shards).workers
    seconds, microseconds = await shard.call(lambda c: c.time())
    now_ms = seconds * 1000 + microseconds // 1000
    alive = await shard.call(lambda c: c.zcount(workers, now_ms, "+inf"))
    return told if alive else None


def _read(fields: Mapping[bytes, bytes]) -> Shape | None:
    # No worker has written an unreadable shape, so it says nothing.
    with contextlib.suppress(KeyError, ValueError):
        shards, lease_s = int(fields[b"shards"]), float(fields[b"lease_s"])
        if 1 <= shards <= 1000:
            return Shape(shards, lease_s)
    return None
