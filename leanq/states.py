"""Keeps states and their snapshots: in Redis, or in this process alone.

A **state** is an open goal with an id of 64 hex digits. It is kept as a *record* of its recipe. A
root's record is ``R`` and a payload. For a tactic's result, the record is ``S``, the 32 bytes of
the parent's id, and a payload. Recalling a state uses its ancestors too, and keeping it uses its
parent, so no parent is collected before its children.

A **snapshot** only saves time. It is found whole or not at all. It travels as chunks under the hash
of their content. Before they come, it is entered into ``:snaps``, whose entries the budget counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from cachetools import TTLCache

from leanq.errors import QueueFullError
from leanq.queue.headers import LEAST_TEXTS, MOST_PRELOADED, HeadersUsed
from leanq.queue.shard import Shard

CHUNK_BYTES = 4 << 20
"""The largest chunk of a snapshot: far below any server's limit, and quick to send."""

MOST_DEPTH = 10_000
"""The most records from a state to its root. No proof has as many, so more mean damage."""

BUCKETS = 4096
_HOUR_S = 3600
# Items per call of a script: a longer call would keep the server from others.
_KEPT_AT_ONCE = 1000
LOOKED_AT_AT_ONCE = 256
# Making room looks at every snapshot.
_MOST_SNAPSHOTS = 4096
# How long one worker may make a snapshot before another may.
_MAKING_MS = 120_000
# How long a snapshot's chunks may be on their way before others may take its place.
_COMING_MS = 600_000


@dataclass(frozen=True)
class Packed:
    """A snapshot as it travels: compressed, in chunks of at most CHUNK_BYTES.

    Only the driver that packed it knows what ``manifest`` means.
    """

    manifest: bytes
    chunks: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.manifest) + sum(map(len, self.chunks))


class States(Protocol):
    """A place for states and snapshots. This base class keeps no snapshots.

    ``counts`` counts snapshots as ``found``, ``missing``, ``damaged`` and ``refused``. Under
    ``broken`` it counts states whose records lead to no root.
    """

    counts: Counter[str]

    @property
    def most_snapshot_bytes(self) -> int:
        """The largest packed snapshot that may be kept; 0 if none are kept."""
        return 0

    async def keep(self, records: Mapping[str, bytes]) -> None:
        """Stores records by the ids of their states. Some may be there already.

        Raises:
            QueueFullError: the server is out of memory. Some records may have been kept.
        """

    async def recall(self, state: str) -> list[bytes] | None:
        """Returns the records from the state up to its root; None if any is unknown."""

    async def keep_snapshot(self, key: str, snapshot: Packed) -> bool:
        """Keeps a snapshot; returns True if it can now be found, or an earlier one of its key can.

        Returns False if it does not fit, the memory is full, or another worker is just storing it.
        """
        self.counts["refused"] += 1
        return False

    async def find_snapshot(self, key: str) -> Packed | None:
        """Returns a snapshot after comparing its chunks with their hashes; drops a damaged one."""
        self.counts["missing"] += 1
        return None

    async def begin_snapshot(self, key: str) -> bool:
        """Returns True if the caller should make a snapshot; False while another worker does."""
        return True

    async def drop_snapshot(self, key: str) -> None:
        """Removes a snapshot that was found to be damaged."""
        return

    async def collect(self) -> int:
        """Does a small piece of the work of removing unused states; returns how many it removed.

        Many callers call it often. A round over everything is followed by an hour's rest.
        """

    def note_header(self, fingerprint: str, tenant: str, header: str) -> None:
        """Notes that a text of a tenant was served, whose header is that."""
        return

    async def hot_headers(self, fingerprint: str) -> list[str]:
        """Returns the headers that texts of all workers have, in the order to preload them."""
        return []


def parent_of(record: bytes) -> bytes | None:
    """Returns the 32 bytes of the parent's id, None for a root; raises ValueError if malformed."""
    if record[:1] == b"R":
        return None
    if record[:1] == b"S" and len(record) > 32:
        return record[1:33]
    raise ValueError(f"no record of a state: {record[:40]!r}")


class RedisStates:
    """Keeps states in Redis shards; after an UnavailableError any method can be called again."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.counts: Counter[str] = Counter()
        self.headers = HeadersUsed()
        self._shards = shards
        settings = shards[0].settings
        # Use of states counts by the hour; the hour that has begun is not over.
        self._ttl_hours = math.ceil(settings.state_ttl_s / _HOUR_S)
        self._ttl_ms = int(settings.state_ttl_s * 1000)
        self._budget_bytes = (settings.snapshot_mb << 20) // len(shards)

    @property
    def most_snapshot_bytes(self) -> int:
        # A larger snapshot would drive out most of the others.
        return self._budget_bytes // 4

    async def keep(self, records: Mapping[str, bytes]) -> None:
        # Parents come without a record, since they are only marked as used.
        entries = {bytes.fromhex(state): record for state, record in records.items()}
        for parent in list(map(parent_of, entries.values())):
            if parent is not None:
                entries.setdefault(parent, b"")
        shards: dict[Shard, list[tuple[str, bytes, bytes]]] = {}
        for state, record in entries.items():
            row = (state.hex()[:3], state[1:], record)
            shards.setdefault(self._home_of_state(state), []).append(row)
        for shard, rows in shards.items():
            for start in range(0, len(rows), _KEPT_AT_ONCE):
                await shard.run("state_keep", records=rows[start : start + _KEPT_AT_ONCE])

    async def recall(self, state: str) -> list[bytes] | None:
        records: list[bytes] = []
        at: bytes | None = bytes.fromhex(state)
        while at is not None:
            left = MOST_DEPTH - len(records)
            found: list[bytes] = []
            if left:
                found = await self._home_of_state(at).run(
                    "state_recall", id=at, shards=len(self._shards), max_records=left
                )
            records += found
            try:
                at = parent_of(records[-1]) if found else None
            except ValueError:
                found = []
            if not found:
                self.counts["broken"] += bool(records)
                return None
        return records

    async def keep_snapshot(self, key: str, snapshot: Packed) -> bool:
        shard = self._home_of_key(key)
        size = snapshot.size_bytes
        kept = False
        if size <= self.most_snapshot_bytes:
            try:
                kept = await self._bring(shard, key, snapshot)
            except QueueFullError:
                await self.drop_snapshot(key)
        self.counts["refused"] += not kept
        return kept

    async def _bring(self, shard: Shard, key: str, snapshot: Packed) -> bool:
        if await shard.run("snapshot_find", key=key, ttl_ms=self._ttl_ms):
            return True
        hashes = [await asyncio.to_thread(_hash, chunk) for chunk in snapshot.chunks]
        missing = await self._make_room(shard, key, snapshot.size_bytes, hashes)
        if missing is None:
            return False
        for place in missing:
            # Send one at a time, since others wait for the connection.
            digest, chunk = hashes[place - 1], snapshot.chunks[place - 1]
            await shard.ask(("SET", _chunk(shard, digest), chunk, "PX", _COMING_MS))
        kept = await shard.run(
            "snapshot_keep",
            key=key,
            manifest=snapshot.manifest,
            ttl_ms=self._ttl_ms,
            chunks=hashes,
        )
        return bool(kept)

    async def find_snapshot(self, key: str) -> Packed | None:
        shard = self._home_of_key(key)
        answer = await shard.run("snapshot_find", key=key, ttl_ms=self._ttl_ms)
        fault = "missing"
        if answer:
            manifest, *hashes = answer
            try:
                chunks = [await _read_chunk(shard, digest.decode()) for digest in hashes]
            except ValueError as error:
                fault = str(error)
            else:
                self.counts["found"] += 1
                return Packed(manifest, tuple(chunks))
        self.counts[fault] += 1
        if answer is not None:
            await self.drop_snapshot(key)
        return None

    async def begin_snapshot(self, key: str) -> bool:
        shard = self._home_of_key(key)
        name = shard.keys.of("making", key)
        (taken,) = await shard.ask(("SET", name, "1", "NX", "PX", _MAKING_MS))
        return taken is not None

    async def drop_snapshot(self, key: str) -> None:
        await self._make_room(self._home_of_key(key), key, 0, [])

    def note_header(self, fingerprint: str, tenant: str, header: str) -> None:
        self.headers.add(fingerprint, tenant, header)

    async def hot_headers(self, fingerprint: str) -> list[str]:
        found = await self._shards[0].run(
            "hot_headers", fingerprint=fingerprint, most=MOST_PRELOADED, least=LEAST_TEXTS
        )
        return [text.decode() for text in found]

    async def collect(self) -> int:
        return sum(await asyncio.gather(*map(self._collect, self._shards)))

    async def _collect(self, shard: Shard) -> int:
        answer = await shard.run(
            "state_collect",
            unused_hours=self._ttl_hours,
            buckets=BUCKETS,
            max_records=LOOKED_AT_AT_ONCE,
        )
        if answer["ended"]:
            # This also drops the entries of snapshots that expired.
            await self._make_room(shard, "", 0, [])
        return int(answer["removed"])

    async def _make_room(
        self, shard: Shard, key: str, size: int, hashes: Sequence[str]
    ) -> list[int] | None:
        missing: list[int] | None = await shard.run(
            "snapshot_room",
            key=key,
            bytes=size,
            budget=self._budget_bytes,
            max_snapshots=_MOST_SNAPSHOTS,
            coming_ms=_COMING_MS,
            chunks=hashes,
        )
        return missing

    def _home_of_state(self, state: bytes) -> Shard:
        return self._shards[int.from_bytes(state[:4], "big") % len(self._shards)]

    def _home_of_key(self, key: str) -> Shard:
        return self._home_of_state(hashlib.blake2b(key.encode(), digest_size=4).digest())


# The cost of a state in a MemoryStates beside its record.
_EACH_BYTES = 256


class MemoryStates(States):
    """Keeps states in this process, which has no Redis.

    It keeps no snapshots, since the caller has them on its own disk. If records exceed
    ``most_bytes``, the least recently used give way.
    """

    def __init__(
        self,
        state_ttl_s: float = 604_800.0,
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = 256 << 20,
    ) -> None:
        self.counts: Counter[str] = Counter()
        # Setting a record again notes its use.
        self._records: TTLCache[bytes, bytes] = TTLCache(
            most_bytes, state_ttl_s, clock, lambda record: _EACH_BYTES + len(record)
        )

    async def keep(self, records: Mapping[str, bytes]) -> None:
        for state, record in records.items():
            parent = parent_of(record)
            self._records[bytes.fromhex(state)] = record
            if parent is not None and (known := self._records.get(parent)):
                self._records[parent] = known

    async def recall(self, state: str) -> list[bytes] | None:
        records: list[bytes] = []
        at: bytes | None = bytes.fromhex(state)
        while at is not None:
            record = self._records.get(at)
            if record is None or len(records) == MOST_DEPTH:
                self.counts["broken"] += bool(records)
                return None
            self._records[at] = record
            records.append(record)
            at = parent_of(record)
        return records

    async def collect(self) -> int:
        return len(list(self._records.expire()))


async def _read_chunk(shard: Shard, digest: str) -> bytes:
    """Returns the chunk with this hash.

    Raises:
        ValueError: the chunk is ``missing`` or ``damaged``.
    """
    (chunk,) = await shard.ask(("GET", _chunk(shard, digest)))
    if chunk is None:
        raise ValueError("missing")
    if await asyncio.to_thread(_hash, chunk) != digest:
        raise ValueError("damaged")
    return cast("bytes", chunk)


def _chunk(shard: Shard, digest: str) -> str:
    return shard.keys.of("chunk", digest)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
