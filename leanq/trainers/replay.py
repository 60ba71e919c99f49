"""A replay memory in Redis: replies for learners that did not submit the requests.

Any number of processes read and write without a lock: each change is one script on one hash slot.
Entries are numbered in the order of writing. A learner reads a list from an offset that it keeps,
subscribes to new entries, or draws samples. Sampling does not walk through the memory.

A memory gives way to requests. If the server's memory is nearly full, new entries are dropped and
counted, and older ones leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import secrets
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from leanq.errors import (
    LeanQError,
    NotPermittedError,
    QueueFullError,
    UnavailableError,
    UsageError,
    WireError,
)
from leanq.producer import arguments
from leanq.producer.route import is_gateway
from leanq.queue.settings import Settings, check_name
from leanq.queue.shard import Shard, backoff_s
from leanq.queue.up_file import find_queue
from leanq.trainers.replay_entry import (
    ReplayBatch,
    ReplayBounds,
    ReplayEntry,
    ReplayStats,
    ReplayValue,
    pack_entry,
    pack_value,
    read_batch,
    unpack_value,
)

_T = TypeVar("_T")
# A weight and an entry's bytes.
_Row = tuple[float, bytes]

# A call blocks the server for a few milliseconds at most.
_WRITTEN_AT_ONCE = 256
_READ_AT_ONCE = 128
_DRAWN_AT_ONCE = 256
_BYTES_AT_ONCE, _BYTES_READ_AT_ONCE = 1 << 20, 4 << 20
# For so long a write whose answer was lost may be repeated.
_WRITER_MS = 600_000
# A wait ends so often, to see whether the memory was made anew.
_BLOCK_S = 5.0
_BUFFERED, _BUFFERED_BYTES = 10_000, 64 << 20
_WARN_AGAIN_S = 60.0
# The share of maxmemory above which entries are dropped; requests are refused at 1.
_PRESSED = 0.9
# How old an answer may be, in seconds and in bytes written since.
_PRESSED_S, _PRESSED_BYTES = 1.0, 1 << 20
_RANDOM_BYTES = 6
# Draws by weight need up to 1.25 attempts on average, and three numbers for each.
_PER_WEIGHTED = 4
_SPARE_NUMBERS = 48
_EMPTY_ANSWERS = 3

log = logging.getLogger("leanq.replay")


class ReplayMemory:
    """A replay memory by its name; for asyncio, in one event loop.

    Examples:
        >>> async def main():
        ...     async with ReplayMemory("curriculum") as memory:
        ...         await memory.write([ReplayEntry("accepted", "by simp", rewards={"proof": 1.0})])
        ...         batch = await memory.read()
        ...         await memory.drop()
        ...     return [(each.verdict, each.text) for each in batch]
        >>> asyncio.run(main())
        [('accepted', 'by simp')]

    Methods that ask the server retry for ``unavailable_timeout_s``, and then raise
    UnavailableError. That writes no entry twice.

    Args:
        name: the memory's name, such as a tenant's or a campaign's: up to 64 letters, digits and
            ``. _ @ + -``.
        url: the Redis, or ``Settings``; unless given, ``LEANQ_URL`` or the queue of ``leanq
            up``.
        bounds: how much the memory keeps, if this is the first to use it. An existing memory must
            have the same bounds, if any are given.
        unavailable_timeout_s: how long the server may be out of reach, in seconds.

    Attributes:
        dropped: how many entries of this process were not written: the server was short of memory,
            out of reach for too long, or refused them.

    Raises:
        UsageError: a malformed argument, or no queue is found.
    """

    def __init__(
        self,
        name: str,
        url: str | Settings | None = None,
        *,
        bounds: ReplayBounds | None = None,
        unavailable_timeout_s: float = 30.0,
    ) -> None:
        self.name = check_name("the replay memory", arguments.text("name", name))
        environ: Mapping[str, str] = os.environ
        if url is None:
            environ = find_queue(environ)
            url = environ["LEANQ_URL"]
        if isinstance(url, str):
            if is_gateway(url):
                raise UsageError("a replay memory is in the Redis itself; a gateway has none")
            url = Settings.load(url, environ)
        self.dropped = 0
        self._bounds = bounds
        self._timeout_s = arguments.number("unavailable_timeout_s", unavailable_timeout_s)
        # The name alone decides on the shard, so all processes find it.
        shard = int.from_bytes(hashlib.blake2b(self.name.encode()).digest()[:4]) % url.shards
        self._new_shard = partial(Shard, url, shard)
        self._shard = self._new_shard()
        self._prefix = self._shard.keys.of("replay", self.name)
        self._opened: ReplayBounds | None = None
        self._writing = asyncio.Lock()
        self._writer, self._serial = secrets.token_urlsafe(9), 0
        self._random = random.Random()
        self._pressed, self._pressed_until_s, self._unasked_bytes = False, 0.0, 0
        self._buffer: deque[_Row] = deque()
        self._buffered_bytes = 0
        # The part of `dropped` that the memory's own counter lacks.
        self._untold, self._warn_at_s = 0, 0.0
        self._closing = False
        self._flushing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self._shard.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> ReplayBounds:
        """Makes the memory if it is missing, and returns its bounds.

        Raises:
            UsageError: it exists with other bounds than those given.
        """
        if self._opened is None:
            asked = self._bounds or ReplayBounds()
            found = await self._run(
                "replay_open",
                entries=asked.entries,
                max_bytes=asked.max_mb << 20,
                reservoir=int(asked.reservoir),
                weighted=int(asked.weighted),
            )
            there = ReplayBounds(
                found["entries"],
                found["max_bytes"] >> 20,
                found["reservoir"] == 1,
                found["weighted"] == 1,
            )
            if self._bounds not in (None, there):
                raise UsageError(
                    f"the replay memory {self.name!r} has {there}; asked for was {self._bounds}: "
                    "drop it first, or leave the bounds out"
                )
            self._opened = there
        return self._opened

    async def close(self) -> None:
        """Writes what was added, as far as the server takes it, and closes the connections."""
        self._closing = True
        try:
            if self._flushing:
                await self._flushing
        finally:
            self._closing = False
            await self._shard.close()

    def add(self, entry: ReplayEntry) -> None:
        """Writes an entry in the background, in batches, for rollout workers that must not wait.

        Entries that the server does not take are counted in ``dropped``.

        Raises:
            InvalidRequestError: a field of another type.
            TooLargeError: more than 1 MiB.
        """
        row = _row(entry)
        size = self._buffered_bytes + len(row[1])
        if len(self._buffer) == _BUFFERED or size > _BUFFERED_BYTES:
            self.drop_unsent(1, "there are more than can be written")
            return
        self._buffer.append(row)
        self._buffered_bytes = size
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        while self._buffer:
            rows = next(_pieces(self._buffer))
            self._unbuffer(len(rows))
            try:
                await self.open()
                # First: if it fails, these rows are dropped too.
                if told := self._untold:
                    await self._run("replay_refuse", refused=told, evict=0)
                    self._untold -= told
                await self._write_all(rows)
            except LeanQError as error:
                self.drop_unsent(len(rows), str(error))
                if self._closing:
                    # Each further batch would take as long to fail.
                    self.drop_unsent(len(self._buffer), str(error))
                    self._unbuffer(len(self._buffer))

    def _unbuffer(self, count: int) -> None:
        for _ in range(count):
            self._buffered_bytes -= len(self._buffer.popleft()[1])

    def drop_unsent(self, count: int, why: str) -> None:
        """Counts entries that did not reach the server, and warns once a minute. The next write
        tells the server."""
        self.dropped += count
        self._untold += count
        if count and time.monotonic() >= self._warn_at_s:
            self._warn_at_s = time.monotonic() + _WARN_AGAIN_S
            log.warning(
                "the replay memory %s: %d entries of this process were dropped so far: %s",
                self.name, self.dropped, why,
            )  # fmt: skip

    async def write(self, entries: Iterable[ReplayEntry]) -> int:
        """Writes entries in their order; returns how many were written.

        If the server is short of memory, it writes fewer and drops the others, since requests go
        first.

        Raises:
            InvalidRequestError: a field of another type; nothing was written.
            TooLargeError: an entry of more than 1 MiB; nothing was written.
        """
        return await self._write_all([_row(entry) for entry in entries])

    async def _write_all(self, rows: Sequence[_Row]) -> int:
        written = 0
        # The server remembers the last write of each writer.
        async with self._writing:
            for batch in _pieces(rows):
                written += await self._write(batch)
        return written

    async def _write(self, batch: Sequence[_Row]) -> int:
        self._serial += 1
        bounds = await self.open()
        if not await self._is_pressed():
            # One draw for each entry, and some for slots that have to be emptied.
            numbers = 2 * len(batch) + 256 if bounds.reservoir else 0
            call = partial(
                self._run,
                "replay_write",
                writer=self._writer,
                serial=str(self._serial),
                writer_ms=_WRITER_MS,
                randoms=self._random.randbytes(_RANDOM_BYTES * numbers),
                items=batch,
            )
            try:
                while await call() is None:
                    # The memory was dropped meanwhile.
                    self._opened = None
                    await self.open()
            except QueueFullError:
                self._pressed, self._pressed_until_s = True, time.monotonic() + _PRESSED_S
            else:
                self._unasked_bytes += sum(len(data) for _, data in batch)
                return len(batch)
        # Twice as many leave as would have come, so that a server full of memories recovers.
        await self._run("replay_refuse", refused=len(batch), evict=2 * len(batch))
        self.dropped += len(batch)
        return 0

    async def read(self, offset: int = 0, *, limit: int = 1000, wait_s: float = 0.0) -> ReplayBatch:
        """Returns the entries behind ``offset`` in the order of writing, up to ``limit``.

        A learner saves ``batch.offset`` with its state, and reads on from there after a crash.
        ``missed`` counts the entries that had left the memory.

        Args:
            offset: that of an earlier batch; 0 is before the oldest entry.
            limit: the most entries.
            wait_s: how many seconds to wait if there are none yet.
        """
        offset = arguments.whole_number("offset", offset, 0)
        limit = arguments.whole_number("limit", limit, 1)
        until_s = time.monotonic() + arguments.number("wait_s", wait_s)
        await self.open()
        while True:
            after, at_once = await self._position(offset)
            left_s = min(_BLOCK_S, until_s - time.monotonic())
            rows = await self._rows(after, limit, at_once, left_s)
            if rows or time.monotonic() >= until_s:
                break
        if not rows:
            return ReplayBatch(offset=after)
        return read_batch(rows, rows[-1][0], rows[0][0] - after - 1)

    async def _position(self, offset: int) -> tuple[int, int]:
        """Returns the offset, or the next one that the memory knows, and how many entries of the
        mean size to read in one call."""
        about = ("HMGET", f"{self._prefix}:about", "base", "last", "bytes", "evicted")
        ((base, last, *held),) = await self._persist(lambda: self._shard.ask(about))
        if base is None:
            return offset, _READ_AT_ONCE
        size_bytes, evicted = map(int, held)
        entries = int(last) - int(base) - evicted
        at_once = min(_READ_AT_ONCE, max(1, _BYTES_READ_AT_ONCE * entries // max(1, size_bytes)))
        if offset > int(last):
            log.warning(
                "the replay memory %s ends at %d, before the offset %d: the server has lost its "
                "last entries", self.name, int(last), offset,
            )  # fmt: skip
        return max(int(base), min(offset, int(last))), at_once

    async def _rows(
        self, after: int, limit: int, at_once: int, wait_s: float
    ) -> list[tuple[int, bytes]]:
        rows: list[tuple[int, bytes]] = []
        while True:
            wanted = min(limit - len(rows), at_once)
            found = await self._persist(partial(self._read, after, wanted, wait_s))
            rows += found
            if len(found) < wanted or len(rows) == limit:
                return rows
            after, wait_s = rows[-1][0], 0.0

    async def _read(self, after: int, count: int, wait_s: float) -> list[tuple[int, bytes]]:
        key = f"{self._prefix}:log"
        if wait_s > 0:
            return await _wait(self._shard, key, after, count, wait_s)
        (rows,) = await self._shard.ask(("XRANGE", key, after + 1, "+", "COUNT", count))
        return _numbered(rows)

    async def subscribe(self, *, limit: int = 1000) -> AsyncGenerator[ReplayBatch, None]:
        """Yields batches of the entries written from now on, without end. Redis keeps nothing for a
        subscriber.

        A subscriber that falls behind gets the latest ``limit`` entries; ``missed`` counts the
        others.
        """
        limit = arguments.whole_number("limit", limit, 1)
        offset = (await self.stats()).last
        while True:
            newest = (await self.stats()).last
            passed = max(0, newest - limit - offset)
            batch = await self.read(offset + passed, limit=limit, wait_s=_BLOCK_S)
            offset = batch.offset
            if len(batch) or batch.unreadable:
                yield replace(batch, missed=batch.missed + passed)

    async def sample(
        self, n: int, *, weighted: bool = False, rng: random.Random | None = None
    ) -> ReplayBatch:
        """Draws ``n`` entries independently, with replacement, uniformly or by their weights.

        It draws from the latest entries, or from the reservoir. The batch is empty if the memory
        is, or if no entry has a weight.

        Args:
            n: how many.
            weighted: whether an entry of twice the weight is drawn twice as often.
            rng: a source of randomness, for tests.

        Raises:
            UsageError: the memory keeps no weights.
        """
        n = arguments.whole_number("n", n, 0)
        if arguments.flag("weighted", weighted) and not (await self.open()).weighted:
            raise UsageError(
                f"the replay memory {self.name!r} keeps no weights; drop it, and make it anew with "
                "ReplayBounds(weighted=True)"
            )
        source = rng or self._random
        rows: list[tuple[int, bytes]] = []
        empty = 0
        while len(rows) < n and empty < _EMPTY_ANSWERS:
            wanted = min(n - len(rows), _DRAWN_AT_ONCE)
            numbers = _PER_WEIGHTED * wanted + _SPARE_NUMBERS if weighted else wanted
            found = await self._run(
                "replay_sample",
                count=wanted,
                max_bytes=_BYTES_AT_ONCE,
                by_weight=weighted,
                randoms=source.randbytes(_RANDOM_BYTES * numbers),
            )
            found = found or []
            # By chance, all attempts of a call can fail although there are entries.
            empty = 0 if found else empty + 1
            rows += zip(map(int, found[::2]), found[1::2], strict=True)
        return read_batch(rows)

    async def stats(self) -> ReplayStats:
        """Returns the memory's statistics."""
        await self.open()
        about, entries, slots = await self._persist(
            lambda: self._shard.ask(
                ("HMGET", f"{self._prefix}:about", "base", "last", "bytes", "evicted", "dropped"),
                ("XLEN", f"{self._prefix}:log"),
                ("HLEN", f"{self._prefix}:slots"),
            )
        )
        base, last, size_bytes, evicted, dropped = (int(value or 0) for value in about)
        return ReplayStats(
            entries=entries,
            size_bytes=size_bytes,
            sampled=slots or entries,
            first=last - entries + 1,
            last=last,
            written=last - base,
            evicted=evicted,
            dropped=dropped,
        )

    async def drop(self) -> None:
        """Removes the memory and all its entries. A later writer makes a new one."""
        await self._run("replay_drop")
        self._opened = None

    async def publish(
        self, fields: Mapping[str, Any], *, expected: int | None = None
    ) -> int | None:
        """Replaces the value beside the memory.

        Args:
            fields: texts, numbers, booleans, None, and lists and maps of them, by name; up to 64
                KiB, such as a policy's name and its sampling temperature.
            expected: the version of the value to replace; 0 if there must be none.

        Returns:
            The new version; None if another value than the expected one is there.

        Raises:
            InvalidRequestError: a field cannot be published.
            TooLargeError: more than 64 KiB.
        """
        if expected is not None:
            expected = arguments.whole_number("expected", expected, 0)
        version = await self._run(
            "replay_publish",
            expected="" if expected is None else expected,
            value=pack_value(fields),
        )
        return None if version is None else int(version)

    async def published(self) -> ReplayValue | None:
        """Returns the last published value; None if there is none.

        Raises:
            WireError: it cannot be read.
        """
        newest = ("XREVRANGE", f"{self._prefix}:value", "+", "-", "COUNT", 1)
        (rows,) = await self._persist(lambda: self._shard.ask(newest))
        return unpack_value(*_numbered(rows)[-1]) if rows else None

    async def watch(self, after: int = 0) -> AsyncGenerator[ReplayValue, None]:
        """Yields the value, if its version is above ``after``, and then each new one, without end.
        A value that is soon replaced may be left out; an unreadable one is logged.

        It holds a connection of its own until it is closed.
        """
        after = arguments.whole_number("after", after, 0)
        shard = self._new_shard()
        try:
            while True:
                wait = partial(_wait, shard, f"{self._prefix}:value", after, 1, _BLOCK_S)
                for row in await self._persist(wait):
                    after = row[0]
                    try:
                        value = unpack_value(*row)
                    except WireError as error:
                        log.warning("the replay memory %s: %s", self.name, error)
                    else:
                        yield value
        finally:
            await shard.close()

    async def _is_pressed(self) -> bool:
        if time.monotonic() >= self._pressed_until_s or self._unasked_bytes > _PRESSED_BYTES:
            self._pressed, self._unasked_bytes = False, 0
            # Without INFO, a full server shows when it refuses an entry.
            with contextlib.suppress(UnavailableError):
                info: Any = await self._shard.call(lambda c: c.info("memory"))
                limit = int(info.get("maxmemory", 0))
                self._pressed = bool(limit) and int(info["used_memory"]) > _PRESSED * limit
            self._pressed_until_s = time.monotonic() + _PRESSED_S
        return self._pressed

    async def _run(self, name: str, /, **values: Any) -> Any:
        return await self._persist(partial(self._shard.run, name, name=self.name, **values))

    async def _persist(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Returns what ``call`` answers, and repeats it until the server can be reached."""
        until_s = time.monotonic() + self._timeout_s
        for pause_s in backoff_s(self._random):
            try:
                return await call()
            except NotPermittedError:
                raise
            except UnavailableError:
                if time.monotonic() + pause_s >= until_s:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError


async def _wait(
    shard: Shard, key: str, after: int, count: int, wait_s: float
) -> list[tuple[int, bytes]]:
    """Returns the entries that come behind a number in a stream within so many seconds."""
    wait = ("BLOCK", max(1, int(wait_s * 1000)), "STREAMS", key, f"{after}-0")
    (found,) = await shard.block(("XREAD", "COUNT", count, *wait), block_s=wait_s)
    # By the protocol's version, a map with one stream or a list with a pair for it.
    (rows,) = found.values() if isinstance(found, dict) else [found[0][1] if found else []]
    return _numbered(rows)


def _numbered(rows: Any) -> list[tuple[int, bytes]]:
    return [(int(number.partition(b"-")[0]), fields[1]) for number, fields in rows]


def _row(entry: ReplayEntry) -> _Row:
    return float(entry.weight), pack_entry(entry)


def _pieces(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    piece: list[_Row] = []
    size = 0
    for row in rows:
        if piece and (len(piece) == _WRITTEN_AT_ONCE or size + len(row[1]) > _BYTES_AT_ONCE):
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += len(row[1])
    if piece:
        yield piece
