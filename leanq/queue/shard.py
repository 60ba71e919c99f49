"""A connection to one shard of the queue, and the questions that every role may ask.

Each worker that joins writes the *shape* of its queue where every process looks, even one that
expects another number of shards. The shape holds while a worker of that shape is alive. The first
worker after that may bring another.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Self, TypeVar, cast

import redis.asyncio as redis

from leanq.errors import (
    QueueError,
    QueueFullError,
    RefusedError,
    UnavailableError,
    UnknownEnvironmentError,
    UsageError,
)
from leanq.queue.connection import Address, Link
from leanq.queue.keys import Keys, early_shape_key, shape_key
from leanq.queue.scripts import SCRIPTS, script_text
from leanq.queue.settings import Settings
from leanq.queue.tasks import to_its_end

_T = TypeVar("_T")

_NOTE_COUNTS_S = 120.0
_MOST_OF_NOTE = 1000

# Workers load these scripts for clients, whose users may not.
_CALLED_BY_CLIENTS = (
    *("submit", "lookup", "cancel", "state_recall"),
    *(name for name in SCRIPTS if name.startswith("replay_")),
)


class Shard:
    """One shard of the queue, over two connections that open at their first use.

    Its methods, and those of ``ClientQueue``, ``WorkerQueue`` and ``OperatorQueue``, raise
    UnavailableError if the server cannot be reached or refuses to serve. They retry nothing: after
    such an error the call may or may not have happened.
    """

    def __init__(self, settings: Settings, shard: int = 0) -> None:
        self.settings = settings
        self.keys = Keys(settings.prefix, shard, settings.shards)
        self.reply_ttl_ms = int(settings.reply_ttl_s * 1000)
        self.lease_ms = int(settings.lease_s * 1000)
        address = Address(settings.url, settings.written)
        self._commands = Link(address)
        self._blocking = Link(address)

    @classmethod
    def each(cls, settings: Settings) -> list[Self]:
        return [cls(settings, shard) for shard in range(settings.shards)]

    @classmethod
    @contextlib.asynccontextmanager
    async def every(cls, settings: Settings) -> AsyncIterator[list[Self]]:
        """Yields all shards of the queue, and closes them in the end."""
        shards = cls.each(settings)
        try:
            yield shards
        finally:
            await to_its_end(asyncio.gather(*(shard.close() for shard in shards)))

    async def close(self) -> None:
        """Closes both connections; calls under way fail."""
        links = (self._commands, self._blocking)
        await to_its_end(asyncio.gather(*(link.close() for link in links)))

    async def run(
        self, name: str, uploads: Mapping[str, bytes] | None = None, /, **arguments: Any
    ) -> Any:
        """Runs the script ``name`` and returns its answer, by name if it has names.

        Settings of the queue that the script takes are added to the ``arguments``.
        ``uploads`` are values by key. They are set before the script runs, which moves them to
        their places. They have the time-to-live of replies, so no eviction takes them before older
        replies.
        """
        script = SCRIPTS[name]
        own = {name: read(self) for name, read in _OWN.items() if name in script.names}
        args = script.values({**own, **arguments})
        first = [
            ("SET", key, data, "PX", self.reply_ttl_ms) for key, data in (uploads or {}).items()
        ]
        try:
            tag = self.keys.lasting if script.lasting else self.keys.tag
            comes = name in _CALLED_BY_CLIENTS
            answer = await self._commands.run(script_text(name), tag, args, first, comes=comes)
        except RefusedError as error:
            raise RefusedError(f"the script {name!r}: {error}") from None
        return script.named(answer)

    async def ask(self, *commands: Sequence[Any]) -> list[Any]:
        """Sends commands at once, and returns their answers as they are on the wire."""
        return await self._commands.ask(*commands)

    async def block(self, *commands: Sequence[Any], block_s: float) -> list[Any]:
        """Does the same as ``ask`` on the other connection, for commands that may block."""
        return await self._blocking.ask(*commands, block_s=block_s)

    async def at_once(self, *commands: Sequence[Any]) -> Any:
        """Returns the answers to commands that run as one transaction."""
        return (await self.ask(("MULTI",), *commands, ("EXEC",)))[-1]

    async def call(self, work: Callable[[redis.Redis], Awaitable[_T]]) -> _T:
        """Calls ``work`` with the connection for commands, and returns its result."""
        return await self._commands.call(work)

    async def clock_s(self) -> float:
        """Returns the server's time, in seconds since 1970."""
        ((seconds, microseconds),) = await self.ask(("TIME",))
        return int(seconds) + int(microseconds) / 1_000_000

    async def load_for_clients(self) -> None:
        """Loads the scripts that clients call but may not load."""
        await self._commands.load(script_text(name) for name in _CALLED_BY_CLIENTS)

    async def environments(self) -> list[str]:
        """Returns the environments that workers have ever offered."""
        found: Any = await self.call(lambda c: c.hkeys(self.keys.of("environments")))
        return sorted(map(text_of, found))

    async def unknown(self, environment: str) -> UnknownEnvironmentError:
        """Returns the error for an environment that no worker ever offered."""
        text = f"no worker has ever offered the environment {environment!r}"
        return UnknownEnvironmentError(f"{text}; {await self.known()}")

    async def known(self) -> str:
        """Returns a text that names all environments, to tell who asks for another."""
        names = ", ".join(await self.environments())
        return f"known: {names}" if names else "no environment is known"

    async def fingerprints(self) -> dict[str, str]:
        """Returns each environment's fingerprint, as the last worker to join has it."""
        prints: Any = await self.call(lambda c: c.hgetall(self.keys.of("fingerprints")))
        return {text_of(name): text_of(fingerprint) for name, fingerprint in pairs_of(prints)}

    async def paused(self) -> dict[str, float]:
        """Returns environments and tenants that are held back, as in ``Status``."""
        found: Any = await self.call(lambda c: c.hgetall(self.keys.of("paused")))
        return {text_of(name): int(since_ms) / 1000 for name, since_ms in pairs_of(found)}

    async def ping(self) -> Mapping[str, Any]:
        """Returns the server's INFO; raises UnavailableError."""
        return cast("Mapping[str, Any]", await self.call(lambda c: c.info()))


# Arguments that scripts take from the queue's settings.
_OWN: Mapping[str, Callable[[Shard], int]] = {
    "lease_ms": lambda shard: shard.lease_ms,
    "reply_ttl_ms": lambda shard: shard.reply_ttl_ms,
    "remember_ms": lambda shard: int(shard.settings.remember_s * 1000),
    "max_attempts": lambda shard: shard.settings.max_attempts,
    "max_waiting": lambda shard: shard.settings.max_waiting,
}


async def check_shape(shard: Shard) -> None:
    """Checks the number of shards for a client, to which the lease does not matter.

    Raises:
        UsageError: living workers serve the queue with another number of shards.
        UnavailableError: the server cannot be reached, or forbids to look.
    """
    told = await _told_shape(shard)
    if told and told[0] != shard.settings.shards and await _has_workers(shard, told[0]):
        raise _other_shards(told[0], shard.settings.shards)


async def announce_shape(shard: Shard) -> None:
    """Writes the shape of a joining worker's queue, unless living workers have another.

    Raises:
        UsageError: living workers have another; the text names both values.
        UnavailableError: the server cannot be reached.
    """
    told, own = await _told_shape(shard), (shard.settings.shards, shard.settings.lease_s)
    if told == own:
        return
    if told and await _has_workers(shard, told[0]):
        if told[0] != own[0]:
            raise _other_shards(told[0], own[0])
        raise UsageError(
            f"the workers of this queue have a lease of {told[1]:g} s, LEANQ_LEASE_S is "
            f"{own[1]:g} here; set the same, or stop all workers before it is changed"
        )
    fields = ("shards", own[0], "lease_s", own[1])
    # Workers empty a full memory, so they join one, too. The next worker that joins writes it.
    with contextlib.suppress(QueueFullError):
        await shard.ask(("HSET", shape_key(shard.settings.prefix), *fields))


async def note_refusal(shard: Shard, worker: str, why: str) -> None:
    """Notes that a worker cannot join, for clients and operators, if it may.

    The note counts for two minutes, so a worker that still tries writes it again.
    """
    with contextlib.suppress(QueueError):
        note = f"{int(await shard.clock_s())} {worker}: {why}"[:_MOST_OF_NOTE]
        await shard.ask(("HSET", shape_key(shard.settings.prefix), "refused", note))


async def note_for_early_clients(shard: Shard, worker: str) -> None:
    """Tells clients of early releases, which show such a note, why no worker takes their requests.

    It counts for two minutes.
    """
    with contextlib.suppress(QueueError):
        why = (
            "its release of leanq has another queue, so requests of this client wait for a worker "
            "of the client's own release; start one, or upgrade this client"
        )
        note = f"{int(await shard.clock_s())} {worker}: {why}"
        await shard.ask(("HSET", early_shape_key(shard.settings.prefix), "refused", note))


async def forget_refusal(shard: Shard) -> None:
    """Removes the note: a worker has joined. One that still cannot writes it again."""
    with contextlib.suppress(UnavailableError):
        await shard.ask(("HDEL", shape_key(shard.settings.prefix), "refused"))


async def refusal(shard: Shard) -> str:
    """Returns which worker could not join within the last minutes, and why; else ""."""
    (note,) = await shard.ask(("HGET", shape_key(shard.settings.prefix), "refused"))
    at_s, _, text = text_of(note or b"").partition(" ")
    # Any process may have written it.
    if not (at_s.isdecimal() and len(at_s) < 12):
        return ""
    is_fresh = abs(await shard.clock_s() - int(at_s)) < _NOTE_COUNTS_S
    return " ".join(text.split()) if is_fresh else ""


def _other_shards(told: int, own: int) -> UsageError:
    parts = "1 shard" if told == 1 else f"{told} shards"
    return UsageError(
        f"this queue has {parts}, LEANQ_SHARDS is {own} here; "
        f"set LEANQ_SHARDS={told}, or stop all workers before it is changed"
    )


async def _told_shape(shard: Shard) -> tuple[int, float] | None:
    """Returns the last shape written: shards, and the lease in seconds."""
    (found,) = await shard.ask(("HGETALL", shape_key(shard.settings.prefix)))
    fields = dict(pairs_of(found))
    # No worker has written an unreadable shape, so it says nothing.
    with contextlib.suppress(KeyError, ValueError):
        shards, lease_s = int(fields[b"shards"]), float(fields[b"lease_s"])
        if 1 <= shards <= 1000:
            return shards, lease_s
    return None


async def _has_workers(shard: Shard, shards: int) -> bool:
    """Returns whether workers of a queue with so many shards are alive."""
    workers = Keys(shard.settings.prefix, 0, shards).of("workers")
    now_ms = await shard.clock_s() * 1000
    (alive,) = await shard.ask(("ZCOUNT", workers, now_ms, "+inf"))
    return bool(alive)


def in_batches(sized: Iterable[tuple[str, int]], most_bytes: int) -> Iterator[list[str]]:
    """Yields the request ids in batches; each ends with the id that brings it to ``most_bytes``."""
    batch: list[str] = []
    size_bytes = 0
    for request_id, more_bytes in sized:
        batch.append(request_id)
        size_bytes += more_bytes
        if size_bytes >= most_bytes:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def backoff_s(rng: random.Random, base_s: float = 0.05, max_s: float = 5.0) -> Iterator[float]:
    """Yields waiting times with full jitter, in seconds: uniform below a bound that doubles."""
    bound = base_s
    while True:
        yield rng.uniform(0, bound)
        bound = min(max_s, bound * 2)


def new_token() -> str:
    """Returns a lease token that comes no second time: 72 random bits."""
    return secrets.token_urlsafe(9)


def text_of(name: bytes) -> str:
    # Any process may write to Redis, and bad text must not end a client or a worker.
    return name.decode(errors="replace")


def pairs_of(flat: Any) -> Iterator[tuple[bytes, bytes]]:
    if isinstance(flat, dict):
        return iter(flat.items())
    return zip(flat[::2], flat[1::2], strict=True)
