"""Calls of operators to one shard: they look, pause, weigh, and handle dead letters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import structs

from leanq.errors import QueueFullError, UnknownEnvironmentError, WireError
from leanq.queue.client_queue import ClientQueue
from leanq.queue.connection import RETRY_AFTER_S
from leanq.queue.keys import retry_request_id
from leanq.queue.records import InFlight, read_in_flight, read_record, version_of
from leanq.queue.results import (
    EARLY_VERSIONS,
    Became,
    DeadLetter,
    MemoryRow,
    OthersRow,
    PriorityRow,
    Status,
    Use,
    WorkerRow,
    added,
    merged,
    read_account,
    read_minute,
    read_stats,
)
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard, pairs_of, text_of

LEAST_WEIGHT, MOST_WEIGHT = 0.01, 1000.0
"""The bounds of a tenant's weight."""

_DECISIONS_MS = 600_000
# The most bytes of a record's head, without the body.
_RECORD_HEAD_BYTES = 1024
# Records to read for each that is shown.
_LOOKED_AT = 2


class OperatorQueue:
    """One shard as operators, the scaler and the page call it."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    async def status(self) -> Status:
        """Returns the shard's status; it counts an environment's first 1,000 tenants."""
        answer = await self.shard.run("status")
        counters, tallies = read_stats(pairs_of(answer["stats"]))
        return Status(
            counters=counters,
            environments={text_of(k): v for k, v in pairs_of(answer["environments"])},
            workers=tuple(
                WorkerRow(text_of(worker), lease_ms / 1000, held, info)
                for worker, lease_ms, held, info in answer["workers"]
            ),
            priorities=tuple(
                PriorityRow(
                    text_of(environment),
                    *(priority, tenants, waiting, oldest_ms / 1000, held),
                    {text_of(fullest): most} if most else {},
                )
                for environment, priority, tenants, waiting, oldest_ms, held, fullest, most in (
                    answer["priorities"]
                )
            ),
            quarantined={text_of(environment): n for environment, n in answer["quarantined"]},
            dead=answer["dead"],
            tallies=tallies,
            paused={text_of(k): int(v) / 1000 for k, v in pairs_of(answer["paused"])},
            decisions={text_of(k): v for k, v in pairs_of(answer["decisions"])},
            weights={text_of(k): float(v) for k, v in pairs_of(answer["weights"])},
            others=_others(answer["left"], answer["early_workers"], answer["early"]),
            memories={
                text_of(name): MemoryRow.of(dict(pairs_of(about)))
                for name, about in answer["memories"]
            },
        )

    async def others(self) -> tuple[OthersRow, ...]:
        """Returns what other releases wrote and waits in this shard."""
        answer = await self.shard.run("others")
        return _others(answer["left"], answer["workers"], answer["early"])

    async def set_paused(
        self, kind: Literal["environment", "tenant"], name: str, *, paused: bool
    ) -> bool:
        """Pauses or resumes an environment or a tenant; returns whether that changed anything."""
        return bool(await self.shard.run("pause", kind=kind[0], name=name, set=paused))

    async def set_weight(self, tenant: str, weight: float | None) -> None:
        """Gives a tenant a weight, or takes it away (None).

        While any tenant has one, tenants share CPU time by weight; those without one weigh 1.
        """
        key = self.shard.keys.of("weights")
        if weight is None:
            await self.shard.call(lambda c: c.hdel(key, tenant))
        else:
            await self.shard.call(lambda c: c.hset(key, tenant, f"{weight:.12g}"))

    async def publish_decisions(self, decisions: Mapping[str, bytes]) -> None:
        """Stores the scaler's decisions on environments, for ten minutes after the last call."""
        key, fields = (
            self.shard.keys.of("scaler"),
            [part for pair in decisions.items() for part in pair],
        )
        await self.shard.at_once(("HSET", key, *fields), ("PEXPIRE", key, _DECISIONS_MS))

    async def minutes(self, since_minute: int) -> list[dict[str, int]]:
        """Returns the totals noted once a minute, oldest first; each has its ``minute``."""
        found: Any = await self.shard.call(
            lambda c: c.zrangebyscore(self.shard.keys.of("minutes"), since_minute, "+inf")
        )
        return [read_minute(data) for data in found]

    async def accounts(self, first_day: int) -> dict[int, tuple[int, dict[Use, int]]]:
        """Returns the accounts from a day on: what runs cost, and since when (ms) it was kept.

        The oldest account that the shard has is always among them, without costs if it is older.
        """
        (days,) = await self.shard.ask(("ZRANGE", self.shard.keys.of("accounts"), 0, -1))
        found: dict[int, tuple[int, dict[Use, int]]] = {}
        # Any process may have written more than days.
        for day in (int(text) for text in days if text.isdigit() and len(text) < 7):
            if day < first_day and found:
                continue
            (flat,) = await self.shard.ask(("HGETALL", self.shard.keys.of("account", day)))
            since_ms, uses = read_account(pairs_of(flat))
            found[day] = since_ms, uses if day >= first_day else {}
        return found

    async def dead_request_ids(self, limit: int, *, disagreed: bool = False) -> list[str]:
        """Returns the dead letters' request ids, the newest first; or those of the requests on
        which kernels ``disagreed``."""
        key = self.shard.keys.of("disagreed" if disagreed else "dead")
        found: Any = await self.shard.call(lambda c: c.zrevrange(key, 0, limit - 1))
        return [text_of(request_id) for request_id in found]

    async def dead_letter(self, request_id: str) -> DeadLetter | None:
        """Returns a letter of either kind, or None if there is none with this id.

        Raises:
            WireError: another release wrote it.
        """
        letter = ("HGETALL", self.shard.keys.of("deadreq", request_id))
        flat, *died_ms = await self.shard.at_once(
            letter, *(("ZSCORE", key, request_id) for key in self._letters)
        )
        fields, found_ms = dict(pairs_of(flat)), [*filter(None, died_ms)]
        if not fields or not found_ms:
            return None
        submission, client = read_record(request_id, fields[b"record"])
        # Without a digest a retry joins no other run.
        body = fields.get(b"body", submission.body)
        submission = structs.replace(submission, digest="", body=body)
        worker = text_of(fields[b"w"])
        died_s, reply = float(found_ms[0]) / 1000, fields.get(b"reply", b"")
        return DeadLetter(submission, client, int(fields[b"n"]), worker, died_s, reply)

    async def drop_dead(self, request_id: str) -> bool:
        """Removes a letter of either kind for good; returns whether there was one."""
        letter = ("UNLINK", self.shard.keys.of("deadreq", request_id))
        *removed, _ = await self.shard.at_once(
            *(("ZREM", key, request_id) for key in self._letters), letter
        )
        return any(removed)

    @property
    def _letters(self) -> tuple[str, str]:
        return self.shard.keys.of("dead"), self.shard.keys.of("disagreed")

    async def running(self, workers: Sequence[str], limit: int) -> list[InFlight]:
        """Returns requests that these workers hold, the longest running first.

        It returns at most ``limit``, and reads at most ``limit`` of each worker.
        """
        zranges = (
            ("ZRANGE", self.shard.keys.of("processing", worker), 0, limit - 1, "WITHSCORES")
            for worker in workers
        )
        now, *rows = await self.shard.ask(("TIME",), *zranges)
        now_s = int(now[0]) + int(now[1]) / 1_000_000
        held = {
            text_of(request_id): (worker, float(until_ms) / 1000)
            for worker, row in zip(workers, rows, strict=True)
            for request_id, until_ms in pairs_of(_flat(row))
        }
        # The requests that have run longest mostly have the earliest timeouts.
        first = sorted(held, key=lambda request_id: held[request_id][1])[: _LOOKED_AT * limit]
        found = []
        for request, longest_s in await self._in_flight(first):
            worker, until_s = held[request.request_id]
            running_s = max(0.0, now_s - (until_s - longest_s))
            found.append(structs.replace(request, worker=worker, running_s=running_s))
        return sorted(found, key=lambda request: -request.running_s)[:limit]

    async def phase(self, request_id: str) -> tuple[str, str]:
        """Returns the letter of a request's phase, and the worker that the phase names.

        Both are empty if the request simply waits or has ended; see ``lua/parts/phase.lua``.
        """
        (data,) = await self.shard.ask(("HGET", self.shard.keys.of("phase"), request_id))
        kind, *fields = text_of((data or b"")[:1]), *text_of((data or b"")[1:]).split("\0")
        named = {"l": 1, "j": 1, "r": 0}.get(kind)
        return kind, fields[named] if named is not None and named < len(fields) else ""

    async def quarantined(self, environment: str, limit: int) -> list[InFlight]:
        """Returns up to ``limit`` of the next requests that wait for an isolated attempt."""
        (ids,) = await self.shard.ask(
            ("LRANGE", self.shard.keys.of("quarantined", environment), 0, limit - 1)
        )
        return [request for request, _ in await self._in_flight([text_of(id_) for id_ in ids])]

    async def _in_flight(self, request_ids: Sequence[str]) -> list[tuple[InFlight, float]]:
        """Reads the records of these requests; leaves out requests that have ended meanwhile."""
        heads = (
            ("GETRANGE", self.shard.keys.request(request_id), 0, _RECORD_HEAD_BYTES - 1)
            for request_id in request_ids
        )
        answers = await self.shard.ask(*heads) if request_ids else []
        found = []
        for request_id, data in zip(request_ids, answers, strict=True):
            with contextlib.suppress(ValueError, WireError):
                found.append(read_in_flight(request_id, data))
        return found


def _others(left: Any, workers: int, early: Any) -> tuple[OthersRow, ...]:
    rows = [OthersRow(version, text_of(name), waiting) for version, name, waiting in left]
    for name, waiting, record in early:
        version = version_of(record) if record else max(EARLY_VERSIONS)
        rows.append(OthersRow(version, text_of(name), waiting, workers))
    return added(rows)


async def send_again(queue: OperatorQueue, letter: DeadLetter) -> str:
    """Sends a dead letter of this shard as a new request, drops the letter, and returns the new id.

    Raises:
        UnknownEnvironmentError: no worker ever offered its environment.
        QueueFullError: the tenant's queue is full.
        UnavailableError: the shard cannot be reached.
    """
    old = letter.submission
    new = retry_request_id(old.request_id)
    submission = structs.replace(old, request_id=new)
    (answer,) = await ClientQueue(queue.shard).submit(letter.client, [submission])
    if answer is Became.UNKNOWN_ENVIRONMENT:
        raise UnknownEnvironmentError(
            f"no worker offers the environment {old.environment!r} of {old.request_id}"
        )
    if answer is Became.FULL:
        raise QueueFullError(f"the queue of {old.tenant!r} is full", RETRY_AFTER_S)
    # Last: a letter sent twice is still one request, a letter dropped first could be lost.
    await queue.drop_dead(old.request_id)
    return new


@contextlib.asynccontextmanager
async def every_queue(settings: Settings) -> AsyncIterator[list[OperatorQueue]]:
    """Yields all shards of the queue as operators call them, and closes them in the end."""
    async with Shard.every(settings) as shards:
        yield [OperatorQueue(shard) for shard in shards]


async def look(settings: Settings) -> Status:
    """Looks at the whole queue once, and returns its status; raises UnavailableError."""
    async with every_queue(settings) as queues:
        return merged(await asyncio.gather(*(queue.status() for queue in queues)))


def _flat(row: Any) -> Any:
    # With scores, one version of the protocol has pairs, and the other a flat list.
    return [part for pair in row for part in pair] if row and isinstance(row[0], list) else row
