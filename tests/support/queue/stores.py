"""A store of states of a test's own on a real server, laid open."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator

import redis

import leanq.states
from leanq.queue.settings import Settings
from leanq.states import Packed, RedisStates, States
from support.queue.counted import check_counts, evict
from support.queue.queues import Queue
from support.queue.shards import set_clock

HOUR_MS = 3_600_000
HOURS = 48
START_MS = 1_800_000_000_000
ROOT = b"Rroot"


def ident(name: object) -> str:
    return hashlib.blake2b(str(name).encode(), digest_size=32).hexdigest()


def child(parent: str, payload: bytes = b"simp") -> bytes:
    return b"S" + bytes.fromhex(parent) + payload


def packed(*chunks: bytes, manifest: bytes = b"manifest") -> Packed:
    return Packed(manifest, chunks)


def digest(chunk: bytes) -> str:
    return hashlib.blake2b(chunk, digest_size=32).hexdigest()


class Store:
    """States of a test's own, with their keys laid open and their time to be set."""

    def __init__(self, settings: Settings, queues: list[Queue], server: redis.Redis) -> None:
        self.settings = settings
        self.server = server
        self.queues = queues
        self.states = RedisStates(queues)
        self.now_ms = START_MS
        self.advance(0)

    def advance(self, ms: int) -> None:
        self.now_ms += ms
        for queue in self.queues:
            set_clock(self.server, queue.keys.tag, self.now_ms)

    def keys(self, kind: str) -> set[str]:
        pattern = f"{{{self.settings.prefix}:*}}:{kind}:*"
        found = self.server.scan_iter(pattern, count=10_000)
        return {key.decode().rpartition(":")[2] for key in found}

    def evict(self, kind: str, name: str) -> None:
        for queue in self.queues:
            evict(self.server, f"{queue.keys.tag}:{kind}:{name}")

    def accounts(self) -> set[str]:
        fields = [self.server.hkeys(f"{queue.keys.tag}:snaps") for queue in self.queues]
        return {key.decode() for shard in fields for key in shard}  # type: ignore[union-attr]

    def clear(self) -> None:
        for key in self.server.scan_iter(f"{{{self.settings.prefix}:*", count=10_000):
            self.server.delete(key)


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    async with Queue.every(settings) as queues:
        with redis.Redis.from_url(settings.url) as server:
            made = Store(settings, queues, server)
            try:
                yield made
                check_counts(server, settings.prefix)
            finally:
                made.clear()


async def collect_all(states: States) -> int:
    """A round, however many calls it takes."""
    removed = 0
    for _ in range(leanq.states.BUCKETS):
        removed += await states.collect()
    return removed


def early(n: int) -> str:
    """An id that lies in one of the first two buckets."""
    return f"00{n % 2}{ident(n)[3:]}"
