"""The queue's transitions: one method per script, and the only caller of them.

Every change of a request is one Lua script that touches one hash slot and takes the time
from Redis. A method returns plain values and keeps no state of requests, so that its caller decides
what a failure means; DESIGN.md numbers the transitions. What calls scripts is in one file, however
many these are.

Each process holds at most two connections to a server: ``commands``, on which calls take
turns, and ``blocking``, on which one call at a time waits for a wake-up or an inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import redis.asyncio as redis
from msgspec import structs

from leanq.errors import QueueFullError, UnavailableError
from leanq.queue.connection import RETRY_AFTER_S, Address, Link
from leanq.queue.keys import Keys
from leanq.queue.results import (
    Attached,
    Claimed,
    Conflict,
    DeadLetter,
    EndGroup,
    Full,
    InFlight,
    Job,
    MemoryRow,
    PriorityRow,
    Queued,
    Reaped,
    Renewed,
    Returning,
    Settlement,
    Status,
    Stop,
    Submission,
    SubmissionGroup,
    Submitted,
    Times,
    UnknownEnvironment,
    Wakeup,
    WorkerRow,
    end_of,
    is_record,
    kind_of,
    merged,
    read_claimed,
    read_exchanged,
    read_in_flight,
    read_jobs,
    read_minute,
    read_record,
    read_stats,
    tallies_of,
)
from leanq.queue.scripts import LARGE_BATCH_BYTES, LARGE_BYTES, SCRIPTS, script_text
from leanq.queue.settings import Settings
from leanq.queue.tasks import to_its_end

_T = TypeVar("_T")

# Each holds what one call settled for the client.
_INBOX_ENTRIES = 250
_DECISIONS_MS = 600_000
# All that a record says beside the body.
_RECORD_HEAD_BYTES = 1024
# Scripts that are loaded for clients, who may not.
_CALLED_BY_CLIENTS = (
    *("submit", "submit_one", "lookup", "cancel", "state_recall"),
    *(name for name in SCRIPTS if name.startswith("replay_")),
)
# Uploads that one client may leave behind and still remove.
_LEFT_UPLOADS = 4096
# So long claims ask no more whether what is unusual and may last is still there.
_UNUSUAL_S = 0.5
# Records that are read for each that is shown.
_LOOKED_AT = 2
# A settlement and what it shares with others, of which the last says whether its reply is uploaded.
_Ended = tuple[Settlement, tuple[str, str, bool, str, str, bool]]


class Queue:
    """One shard of the queue, over two connections that are made when first needed.

    Every method raises UnavailableError when the server cannot be reached or refuses to
    serve, and retries nothing: after such an error the call may or may not have happened.
    ``submit``, ``lookup``, ``settle``, ``release``, ``cancel``, ``renew`` and ``register`` may
    simply be called again; after ``claim`` the worker asks ``reconcile`` what it was given.
    """

    def __init__(self, settings: Settings, shard: int = 0) -> None:
        self.settings = settings
        self.keys = Keys(settings.prefix, shard, settings.shards)
        self._tag = self.keys.tag
        self._ttl_ms = int(settings.reply_ttl_s * 1000)
        self._lease_ms = int(settings.lease_s * 1000)
        address = Address(settings.url, settings.written)
        self._commands = Link(address)
        self._blocking = Link(address)
        # Uploads of submits that had no answer, which the server may still hold; the last so many.
        self._left_uploads = deque[str](maxlen=_LEFT_UPLOADS)
        # Until when each exchange is left to ``claim``, by the monotonic clock.
        self._unusual_until_s = 0.0

    @classmethod
    def each(cls, settings: Settings) -> list[Queue]:
        """All shards of the queue."""
        return [cls(settings, shard) for shard in range(settings.shards)]

    async def close(self) -> None:
        """Closes both connections; a call under way fails."""
        links = (self._commands, self._blocking)
        await to_its_end(asyncio.gather(*(link.close() for link in links)))

    async def submit(self, client: str, batch: Sequence[Submission]) -> list[Submitted]:
        """Takes requests in; per request what became of it. Idempotent by request id.

        Raises:
            QueueFullError: the server is out of memory; nothing of the batch was taken.
        """
        remember = self._ttl_ms if self.settings.remember_s > 0 else 0
        if len(batch) == 1 and not remember and await self._submit_one(client, batch[0]):
            return [_QUEUED]
        kinds: dict[tuple[object, ...], int] = {}
        requests: list[tuple[str, int, str, str, bytes | int]] = []
        uploads: dict[str, bytes] = {}
        # Another one for each call, so that none of its uploads is ever taken by an older call.
        call = new_token()
        # Else each attempt of a client that goes on trying would leave megabytes for an hour. Where
        # the older call is still on its way, it finds them missing, and changes nothing.
        await self._remove_left_uploads()
        for item in batch:
            kind, body = kind_of(item), item.body
            if len(body) > LARGE_BYTES:
                uploads[self.keys.upload(call, item.request_id)] = body
                body = b"%d" % len(body)
            number = kinds.setdefault(kind, len(kinds) + 1)
            requests.append((item.request_id, number, item.tenant, item.digest, body))
        try:
            answers = await self.run(
                "submit",
                uploads,
                client=client,
                max_waiting=self.settings.max_waiting,
                remember_ms=remember,
                upload=call if uploads else "",
                kinds=[dict(zip(SubmissionGroup._fields, kind, strict=True)) for kind in kinds],
                requests=requests,
            )
        except QueueFullError:
            self._left_uploads += uploads
            with contextlib.suppress(UnavailableError):
                await self._remove_left_uploads()
            raise
        except BaseException:
            self._left_uploads += uploads
            raise
        if answers == 0:
            raise QueueFullError(
                "the server has no memory for large requests; try again later", RETRY_AFTER_S
            )
        became: list[Submitted] = [_QUEUED] * len(batch)
        for number, answer in zip(answers[::2], answers[1::2], strict=True):
            became[number - 1] = _SUBMITTED[answer] if isinstance(answer, int) else answer
        return became

    async def _submit_one(self, client: str, item: Submission) -> bool:
        """Whether a single request was taken in, as one that is new and simply waits."""
        if len(item.body) > LARGE_BYTES:
            return False
        affinity, second_affinity, *_ = (*item.affinity, "", "")
        answer = await self.run(
            "submit_one",
            client=client,
            max_waiting=self.settings.max_waiting,
            environment=item.environment,
            priority=item.priority,
            deadline_ms=item.deadline_ms,
            run_ms=item.longest_run_ms,
            affinity=affinity,
            second_affinity=second_affinity,
            tenant=item.tenant,
            digest=item.digest,
            request_id=item.request_id,
            body=item.body,
        )
        return answer is not None

    async def _remove_left_uploads(self) -> None:
        if left := tuple(self._left_uploads):
            self._left_uploads.clear()
            try:
                await self._commands.ask(("UNLINK", *left))
            except BaseException:
                self._left_uploads += left
                raise

    async def claim(
        self,
        worker: str,
        environments: Sequence[str],
        want: int,
        *,
        busy: int,
        token: str,
        settlements: Sequence[Settlement] = (),
    ) -> Claimed:
        """Settles what is finished and claims up to ``want`` requests, in one call.

        ``busy`` counts requests in flight beside those settled here. ``token`` must be new
        for each call: it is that of every lease given out.
        """
        ends: list[_Ended] = [(item, end_of(item)) for item in settlements]
        uploads = {
            self.keys.upload(item.token, item.request_id): item.reply
            for item, end in ends
            if end[-1]
        }
        exchanges = want == 1 and len(settlements) == 1 and len(environments) == 1
        # What lasts, as weights and pauses do, would cost a round trip with each claim.
        if exchanges and time.monotonic() >= self._unusual_until_s:
            answer = await self._try_exchange(worker, environments[0], token, ends[0], uploads)
            if answer == 0:
                self._unusual_until_s = time.monotonic() + _UNUSUAL_S
            if answer:
                return await self._with_bodies(read_exchanged(answer, token))
            # The server has them by now.
            uploads = {}
        answer = await self._run_claim(worker, environments, want, busy, token, ends, uploads)
        claimed = read_claimed(answer, token, len(settlements))
        if missing := [number - 1 for number in answer["missing"]]:
            # A full memory refuses uploads, and takes what comes with the call.
            whole = [(ends[n][0], (*ends[n][1][:-1], False)) for n in missing]
            answer = await self._run_claim(worker, [], 0, busy, token, whole, {})
            again = read_claimed(answer, token, len(whole))
            accepted = list(claimed.accepted)
            for n, counted in zip(missing, again.accepted, strict=True):
                accepted[n] = counted
            claimed = replace(claimed, accepted=tuple(accepted), held=again.held)
        return await self._with_bodies(claimed)

    async def _run_claim(
        self,
        worker: str,
        environments: Sequence[str],
        want: int,
        busy: int,
        token: str,
        settlements: Sequence[_Ended],
        uploads: Mapping[str, bytes],
    ) -> dict[str, Any]:
        ends: dict[tuple[object, ...], int] = {}
        rows = [
            (
                item.request_id,
                item.token,
                ends.setdefault(end, len(ends) + 1),
                item.cpu_ms,
                b"" if end[-1] else item.reply,
            )
            for item, end in settlements
        ]
        answer = await self.run(
            "claim",
            uploads,
            worker=worker,
            lease_ms=self._lease_ms,
            reply_ttl_ms=self._ttl_ms,
            token=token,
            want=want,
            busy=busy,
            max_attempts=self.settings.max_attempts,
            remember_ms=int(self.settings.remember_s * 1000),
            ends=[dict(zip(EndGroup._fields, end, strict=True)) for end in ends],
            settlements=rows,
            environments=environments,
        )
        return cast("dict[str, Any]", answer)

    async def _try_exchange(
        self,
        worker: str,
        environment: str,
        token: str,
        ended: _Ended,
        uploads: Mapping[str, bytes],
    ) -> Any:
        """What the script answers for one result and one request; None or 0 where ``claim`` has to
        be called, and 0 where that may last."""
        item, end = ended
        return await self.run(
            "exchange",
            uploads,
            worker=worker,
            lease_ms=self._lease_ms,
            reply_ttl_ms=self._ttl_ms,
            token=token,
            remember_ms=int(self.settings.remember_s * 1000),
            environment=environment,
            request_id=item.request_id,
            settled_token=item.token,
            reply=b"" if end[-1] else item.reply,
            cpu_ms=item.cpu_ms,
            **dict(zip(EndGroup._fields, end, strict=True)),
        )

    async def _with_bodies(self, claimed: Claimed) -> Claimed:
        jobs = await self.fetch_bodies(claimed.jobs)
        return claimed if jobs is claimed.jobs else replace(claimed, jobs=jobs)

    async def fetch_bodies(self, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
        """The jobs with the bodies that lie apart from their records."""
        apart = [(job.request_id, job.detached_bytes) for job in jobs if job.detached_bytes]
        if not apart:
            return jobs
        bodies: dict[str, bytes | None] = {}
        for request_ids in in_batches(apart, LARGE_BATCH_BYTES):
            (found,) = await self._commands.ask(("MGET", *map(self.keys.body, request_ids)))
            bodies |= zip(request_ids, found, strict=True)
        return tuple(
            structs.replace(job, body=bodies[job.request_id]) if job.detached_bytes else job
            for job in jobs
        )

    async def reconcile(
        self, worker: str, holds: Collection[str]
    ) -> tuple[tuple[Job, ...], list[str]]:
        """Requests leased to ``worker`` beside those it ``holds``, and those it lost."""
        answer = await self.run(
            "reconcile",
            worker=worker,
            max_attempts=self.settings.max_attempts,
            request_ids=list(holds),
        )
        jobs = read_jobs(answer, map(_text, answer["tokens"]))
        lost = [_text(request_id) for request_id in answer["lost"]]
        return await self.fetch_bodies(jobs), lost

    async def renew(
        self,
        worker: str,
        environments: Collection[str] = (),
        *,
        idle_factor: float = 1.0,
        times: Mapping[tuple[str, Times], int] | None = None,
    ) -> Renewed:
        """A heartbeat: extends the lease over all that the worker holds.

        Args:
            worker: its id.
            environments: whose waiting requests are counted in the answer.
            idle_factor: how many times longer the lease is if the worker holds nothing.
            times: how often results of an environment took such times since the last heartbeat.
        """
        answer = await self.run(
            "renew",
            worker=worker,
            lease_ms=self._lease_ms,
            idle_lease_ms=int(self._lease_ms * idle_factor),
            max_attempts=self.settings.max_attempts,
            reply_ttl_ms=self._ttl_ms,
            environments=list(environments),
            tallies=list(tallies_of(times or {}).items()),
        )
        return Renewed(
            held=answer["held"],
            lapsed=answer["expired"] > 0,
            timed_out=tuple(_text(request_id) for request_id in answer["timed_out"]),
            known=answer["known"] == 1,
            workers=answer["workers"],
            waiting=answer["waiting"],
        )

    async def release(
        self,
        worker: str,
        leases: Sequence[tuple[str, str]],
        *,
        how: Returning = "requeue",
        leave: bool = False,
    ) -> int:
        """Gives back (request id, token) pairs unfinished; how many of the leases were current.

        ``leave``: the worker leaves the fleet.
        """
        given = await self.run(
            "release",
            worker=worker,
            max_attempts=self.settings.max_attempts,
            reply_ttl_ms=self._ttl_ms,
            how=how,
            leave=leave,
            leases=leases,
        )
        return cast(int, given)

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        """Withdraws requests; per request id whether it was in time."""
        answers = await self.run("cancel", reply_ttl_ms=self._ttl_ms, request_ids=request_ids)
        return [a == 1 for a in answers]

    async def reap(self) -> Reaped:
        """Requeues up to 100 requests of one worker whose lease has expired."""
        answer = await self.run(
            "reap",
            max_attempts=self.settings.max_attempts,
            reply_ttl_ms=self._ttl_ms,
            lease_ms=self._lease_ms,
        )
        return Reaped(
            requeued=answer["queued"],
            poisoned=answer["poisoned"],
            more=answer["more"] == 1,
            expiry_grace_s=answer["expiry_grace_ms"] / 1000,
        )

    async def lookup(self, client: str, request_ids: Sequence[str]) -> list[bytes | bool]:
        """Per request id its reply, True while in flight, or False if the server knows nothing of
        it.

        Attaches ``client`` to what is in flight, and expires what missed its deadline.
        """
        answers = await self.run(
            "lookup",
            client=client,
            reply_ttl_ms=self._ttl_ms,
            max_attempts=self.settings.max_attempts,
            request_ids=request_ids,
        )
        return [a > 0 if isinstance(a, int) else a for a in answers]

    async def register(
        self,
        worker: str,
        info: bytes,
        environments: Mapping[str, bytes],
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        """Enters the fleet; ``info`` and the environments' values are for people to read.

        ``fingerprints`` say which verdicts may be remembered for an environment's requests from now
        on.
        """
        rows = [
            (environment, (fingerprints or {}).get(environment, ""), about)
            for environment, about in environments.items()
        ]
        await self.run(
            "register", worker=worker, lease_ms=self._lease_ms, info=info, environments=rows
        )
        await self.load_for_clients()

    async def load_for_clients(self) -> None:
        """Loads the scripts that clients call and may not load."""
        await self._commands.load(script_text(name) for name in _CALLED_BY_CLIENTS)

    async def set_paused(
        self, kind: Literal["environment", "tenant"], name: str, *, paused: bool
    ) -> bool:
        """Pauses or resumes an environment or a tenant; whether that changed anything."""
        return bool(await self.run("pause", kind=kind[0], name=name, set=paused))

    async def set_weight(self, tenant: str, weight: float | None) -> None:
        """Gives a tenant a weight, or takes it away (None). While any tenant has one, tenants share
        CPU time by weight; those without one weigh 1."""
        key = self.keys.weights
        if weight is None:
            await self._commands.call(lambda c: c.hdel(key, tenant))
        else:
            await self._commands.call(lambda c: c.hset(key, tenant, f"{weight:.12g}"))

    async def status(self) -> Status:
        """The shard's status. Of an environment's tenants the first 1,000 are counted."""
        answer = await self.run("status")
        counters, tallies = read_stats(_pairs(answer["stats"]))
        return Status(
            counters=counters,
            environments={_text(k): v for k, v in _pairs(answer["environments"])},
            workers=tuple(
                WorkerRow(_text(worker), lease_ms / 1000, held, info)
                for worker, lease_ms, held, info in answer["workers"]
            ),
            priorities=tuple(
                PriorityRow(_text(environment), priority, tenants, waiting, oldest_ms / 1000, held)
                for environment, priority, tenants, waiting, oldest_ms, held in answer["priorities"]
            ),
            quarantined={_text(environment): n for environment, n in answer["quarantined"]},
            dead=answer["dead"],
            tallies=tallies,
            paused={_text(k): int(v) / 1000 for k, v in _pairs(answer["paused"])},
            decisions={_text(k): v for k, v in _pairs(answer["decisions"])},
            weights={_text(k): float(v) for k, v in _pairs(answer["weights"])},
            memories={
                _text(name): MemoryRow.of(dict(_pairs(about))) for name, about in answer["memories"]
            },
        )

    async def clock_s(self) -> float:
        """The server's time, in seconds since 1970."""
        ((seconds, microseconds),) = await self._commands.ask(("TIME",))
        return int(seconds) + int(microseconds) / 1_000_000

    async def living(self) -> list[bytes]:
        """What each living worker says of itself; a client's user may ask this."""
        ((seconds, _),) = await self._commands.ask(("TIME",))
        living, names = await self._commands.ask(
            ("ZCOUNT", self.keys.workers, int(seconds) * 1000, "+inf"),
            # Those with the longest leases first.
            ("ZREVRANGE", self.keys.workers, 0, -1),
        )
        # One name that is none, since no name at all would be an error.
        (found,) = await self._commands.ask(("HMGET", f"{self._tag}:info", "", *names[:living]))
        return [info for info in found if info is not None]

    async def paused(self) -> dict[str, float]:
        """Environments and tenants that are held back, as in :class:`Status`."""
        found: Any = await self._commands.call(lambda c: c.hgetall(f"{self._tag}:paused"))
        return {_text(name): int(since_ms) / 1000 for name, since_ms in _pairs(found)}

    async def publish_decisions(self, decisions: Mapping[str, bytes]) -> None:
        """Keeps what the scaler decided for environments, for ten minutes after the last call."""
        key, fields = self.keys.scaler, [part for pair in decisions.items() for part in pair]
        await self._at_once(("HSET", key, *fields), ("PEXPIRE", key, _DECISIONS_MS))

    async def minutes(self, since_minute: int) -> list[dict[str, int]]:
        """The totals that were noted once a minute, oldest first; ``minute`` in each says when."""
        found: Any = await self._commands.call(
            lambda c: c.zrangebyscore(self.keys.minutes, since_minute, "+inf")
        )
        return [read_minute(data) for data in found]

    async def dead_request_ids(self, limit: int) -> list[str]:
        """The dead letters' request ids, the newest first."""
        found: Any = await self._commands.call(lambda c: c.zrevrange(self.keys.dead, 0, limit - 1))
        return [_text(request_id) for request_id in found]

    async def dead_letter(self, request_id: str) -> DeadLetter | None:
        """One dead letter, if there is such a one."""
        letter = ("HGETALL", self.keys.dead_letter(request_id))
        flat, died_ms = await self._at_once(letter, ("ZSCORE", self.keys.dead, request_id))
        fields = dict(_pairs(flat))
        if not fields or died_ms is None:
            return None
        submission, client = read_record(request_id, fields[b"record"])
        # Sent again it runs for itself.
        body = fields.get(b"body", submission.body)
        submission = structs.replace(submission, digest="", body=body)
        worker = _text(fields[b"w"])
        return DeadLetter(submission, client, int(fields[b"n"]), worker, float(died_ms) / 1000)

    async def running(self, workers: Sequence[str], limit: int) -> list[InFlight]:
        """What these workers hold, those that have run the longest first: up to ``limit`` of each,
        and up to ``limit`` in all."""
        zranges = (
            ("ZRANGE", f"{self._tag}:processing:{worker}", 0, limit - 1, "WITHSCORES")
            for worker in workers
        )
        now, *rows = await self._commands.ask(("TIME",), *zranges)
        now_s = int(now[0]) + int(now[1]) / 1_000_000
        held = {
            _text(request_id): (worker, float(until_ms) / 1000)
            for worker, row in zip(workers, rows, strict=True)
            for request_id, until_ms in _pairs(_flat(row))
        }
        # What has run the longest mostly has to end first.
        first = sorted(held, key=lambda request_id: held[request_id][1])[: _LOOKED_AT * limit]
        found = []
        for request, longest_s in await self._in_flight(first):
            worker, until_s = held[request.request_id]
            running_s = max(0.0, now_s - (until_s - longest_s))
            found.append(structs.replace(request, worker=worker, running_s=running_s))
        return sorted(found, key=lambda request: -request.running_s)[:limit]

    async def phase(self, request_id: str) -> tuple[str, str]:
        """The letter of a request's phase (``lua/parts/phase.lua``) and the worker that it names;
        empty where it simply waits, or has ended."""
        (data,) = await self._commands.ask(("HGET", f"{self._tag}:phase", request_id))
        kind, *fields = _text((data or b"")[:1]), *_text((data or b"")[1:]).split("\0")
        named = {"l": 1, "j": 1, "r": 0}.get(kind)
        return kind, fields[named] if named is not None and named < len(fields) else ""

    async def quarantined(self, environment: str, limit: int) -> list[InFlight]:
        """The next requests that wait for an isolated attempt, up to ``limit``."""
        (ids,) = await self._commands.ask(
            ("LRANGE", f"{self._tag}:quarantined:{environment}", 0, limit - 1)
        )
        return [request for request, _ in await self._in_flight([_text(id_) for id_ in ids])]

    async def _in_flight(self, request_ids: Sequence[str]) -> list[tuple[InFlight, float]]:
        """What the records of these say; those that have ended in the meantime are left out."""
        heads = (
            ("GETRANGE", self.keys.request(request_id), 0, _RECORD_HEAD_BYTES - 1)
            for request_id in request_ids
        )
        answers = await self._commands.ask(*heads) if request_ids else []
        found = []
        for request_id, data in zip(request_ids, answers, strict=True):
            with contextlib.suppress(ValueError):
                found.append(read_in_flight(request_id, data))
        return found

    async def drop_dead(self, request_id: str) -> bool:
        """Removes a dead letter for good; whether there was one."""
        letter = ("UNLINK", self.keys.dead_letter(request_id))
        removed, _ = await self._at_once(("ZREM", self.keys.dead, request_id), letter)
        return bool(removed)

    async def read_inbox(
        self, client: str, after: str, block_ms: int, *, extend: bool = True
    ) -> tuple[str, list[tuple[str, bytes]]]:
        """Waits for the client's inbox: the new position and (request id, reply) pairs.

        A reply that is a number has that many bytes, too many for the inbox, and waits in its
        request's place. What lies up to ``after`` is dropped; reading again from the same position
        gives the same entries, so an answer lost on the wire loses nothing.

        ``extend``: the inbox's time-to-live begins anew. Those who write to it do not extend it.
        """
        inbox = self.keys.inbox(client)
        first = [("PEXPIRE", inbox, self._ttl_ms)] if extend else []
        trim = ("XTRIM", inbox, "MINID", _next_id(after))
        read = ("XREAD", "COUNT", _INBOX_ENTRIES, "BLOCK", block_ms, "STREAMS", inbox, after)
        *_, found = await self._blocking.ask(*first, trim, read, block_s=block_ms / 1000)
        if not found:
            return after, []
        # A map with one stream, or a list with a pair for it, by the protocol's version.
        (entries,) = found.values() if isinstance(found, dict) else [found[0][1]]
        pairs: list[tuple[str, bytes]] = []
        for _, fields in entries:
            names = [name.decode(errors="replace") for name in fields[::2]]
            pairs += zip(names, fields[1::2], strict=True)
        return _text(entries[-1][0]), pairs

    async def drop_inbox(self, client: str) -> None:
        """Removes the inbox of a client that ends."""
        await self._commands.call(lambda c: c.unlink(self.keys.inbox(client)))

    async def replies(self, request_ids: Sequence[str]) -> list[bytes | None]:
        """The replies that exist, in order."""
        names = [self.keys.request(request_id) for request_id in request_ids]
        (found,) = await self._commands.ask(("MGET", *names))
        return [None if data is None or is_record(data) else data for data in found]

    async def wait_wakeup(
        self, worker: str, environments: Sequence[str], block_s: float
    ) -> Wakeup | Stop | None:
        """Waits for an environment's wake-up, or for something for ``worker`` alone; ``None`` after
        ``block_s`` seconds or a :meth:`notify_worker`."""
        stop = self.keys.stop(worker)
        names = [stop, *(self.keys.wakeup(environment) for environment in environments)]
        (found,) = await self._blocking.ask(("BLPOP", *names, block_s), block_s=block_s)
        if found is None:
            return None
        if _text(found[0]) != stop:
            return Wakeup()
        return Stop(_text(found[1])) if found[1] else None

    async def notify_worker(self, worker: str) -> None:
        """Ends the worker's own :meth:`wait_wakeup`."""
        await self.run("notify_worker", worker=worker)

    async def notify(self, environment: str) -> None:
        """Passes a wake-up's token on to the next idle worker."""
        await self.run("notify", environment=environment)

    async def environments(self) -> list[str]:
        """The environments that workers have ever offered."""
        names: Any = await self._commands.call(lambda c: c.hkeys(f"{self._tag}:environments"))
        return sorted(_text(name) for name in names)

    async def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each environment, as the last worker to join has it."""
        prints: Any = await self._commands.call(lambda c: c.hgetall(f"{self._tag}:fingerprints"))
        return {
            _text(environment): _text(fingerprint) for environment, fingerprint in _pairs(prints)
        }

    async def ping(self) -> Mapping[str, Any]:
        """What the server says of itself (INFO); raises UnavailableError."""
        return cast("Mapping[str, Any]", await self._commands.call(lambda c: c.info()))

    async def call(self, work: Callable[[redis.Redis], Awaitable[_T]]) -> _T:
        """What ``work`` makes of the connection for commands; for what needs no script."""
        return await self._commands.call(work)

    async def _at_once(self, *commands: Sequence[Any]) -> Any:
        """The answers to commands between which nothing else happens."""
        return (await self._commands.ask(("MULTI",), *commands, ("EXEC",)))[-1]

    async def run(
        self, name: str, uploads: Mapping[str, bytes] | None = None, /, **arguments: Any
    ) -> Any:
        """What the script ``name`` answers for this shard, by name where its answer has names.

        Before it go ``uploads``, by their keys, which the script moves to their places. They have
        the time-to-live of replies, so no eviction takes them before older ones of these.
        """
        script = SCRIPTS[name]
        args = script.values(arguments)
        first = [("SET", key, data, "PX", self._ttl_ms) for key, data in (uploads or {}).items()]
        return script.named(await self._commands.run(script_text(name), self._tag, args, first))


@contextlib.asynccontextmanager
async def every_shard(settings: Settings) -> AsyncIterator[list[Queue]]:
    """All shards of the queue, closed in the end."""
    queues = Queue.each(settings)
    try:
        yield queues
    finally:
        await to_its_end(asyncio.gather(*(queue.close() for queue in queues)))


async def look(settings: Settings) -> Status:
    """One look at the whole queue; raises UnavailableError."""
    async with every_shard(settings) as queues:
        return merged(await asyncio.gather(*(queue.status() for queue in queues)))


def in_batches(sized: Iterable[tuple[str, int]], most_bytes: int) -> Iterator[list[str]]:
    """The request ids, in batches; each ends with the one that brings it to so many bytes."""
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
    """Waiting times with full jitter, in seconds: uniform below a bound that doubles."""
    bound = base_s
    while True:
        yield rng.uniform(0, bound)
        bound = min(max_s, bound * 2)


def new_token() -> str:
    """A lease token, which comes no second time: 72 random bits."""
    return secrets.token_urlsafe(9)


_QUEUED = Queued()
_SUBMITTED: dict[int, Submitted] = {
    2: Attached(),
    3: Full(RETRY_AFTER_S),
    4: UnknownEnvironment(),
    5: Conflict(),
}


def _text(name: bytes) -> str:
    # Any process may have written what stands in Redis; it must not end a client or a worker.
    return name.decode(errors="replace")


def _pairs(flat: Any) -> Iterator[tuple[bytes, bytes]]:
    if isinstance(flat, dict):
        return iter(flat.items())
    return zip(flat[::2], flat[1::2], strict=True)


def _flat(row: Any) -> Any:
    # With scores, one version of the protocol has pairs and the other a flat list.
    return [part for pair in row for part in pair] if row and isinstance(row[0], list) else row


def _next_id(position: str) -> str:
    ms, _, number = position.partition("-")
    return f"{ms}-{int(number) + 1}"
