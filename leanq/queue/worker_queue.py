"""Calls of a worker to one shard: it claims, settles, renews its lease, and gives work back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

from msgspec import structs

from leanq.queue.headers import HeaderUse
from leanq.queue.records import read_claimed, read_exchanged, read_jobs
from leanq.queue.results import (
    Claimed,
    Job,
    Reaped,
    Renewed,
    Returning,
    Settlement,
    Stop,
    Times,
    Use,
    Wakeup,
    tallies_of,
)
from leanq.queue.scripts import LARGE_BATCH_BYTES, LARGE_BYTES
from leanq.queue.shard import Shard, in_batches, text_of

# After an answer that may last, claims skip the script `exchange` for so long.
_UNUSUAL_S = 0.5
# The fields that settlements of one call share, as the scripts take them. Uploaded replies are too
# large for a script.
_END = ("outcome", "reason", "warm", "way", "fingerprint", "uploaded")
_shared = attrgetter(*_END[:-1])
# A settlement, and its values of these fields.
_Ended = tuple[Settlement, tuple[Any, ...]]


class WorkerQueue:
    """One shard as a worker calls it.

    ``renew``, ``release`` and ``register`` may be repeated after an error. After ``claim`` the
    worker calls ``reconcile`` to get the requests that it was given.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        # The monotonic time until which each exchange is left to ``claim``.
        self._unusual_until_s = 0.0

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
        """Settles finished requests and claims up to ``want`` requests, in one call.

        ``busy`` counts requests in flight beside those settled here. ``token`` becomes the token of
        every lease given out, so it must be new for each call.
        """
        ends: list[_Ended] = [
            (item, (*_shared(item), len(item.reply) > LARGE_BYTES)) for item in settlements
        ]
        uploads = {
            self.shard.keys.upload(item.token, item.request_id): item.reply
            for item, end in ends
            if end[-1]
        }
        exchanges = want == 1 and len(settlements) == 1 and len(environments) == 1
        # While weights or pauses last, a try would cost each claim another round trip.
        if exchanges and time.monotonic() >= self._unusual_until_s:
            ((item, end),) = ends
            answer = await self.shard.run(
                "exchange",
                uploads,
                worker=worker,
                token=token,
                environment=environments[0],
                request_id=item.request_id,
                settled_token=item.token,
                reply=b"" if end[-1] else item.reply,
                cpu_ms=item.cpu_ms,
                **dict(zip(_END, end, strict=True)),
            )
            # None and 0 mean that ``claim`` has to be called; after 0 that may last.
            if answer == 0:
                self._unusual_until_s = time.monotonic() + _UNUSUAL_S
            if answer:
                return await self._with_bodies(read_exchanged(answer, token))
            # The server has the uploads by now.
            uploads = {}
        about = {"worker": worker, "token": token, "busy": busy}
        claimed, missing = await self._run_claim(
            ends, uploads, want=want, environments=environments, **about
        )
        if missing:
            # A full memory refuses uploads, but takes replies inside the call.
            whole = [(ends[n - 1][0], (*ends[n - 1][1][:-1], False)) for n in missing]
            again, _ = await self._run_claim(whole, {}, want=0, environments=[], **about)
            accepted = list(claimed.accepted)
            for n, counted in zip(missing, again.accepted, strict=True):
                accepted[n - 1] = counted
            claimed = replace(claimed, accepted=tuple(accepted), held=again.held)
        return await self._with_bodies(claimed)

    async def _run_claim(
        self, ends: Sequence[_Ended], uploads: Mapping[str, bytes], **arguments: Any
    ) -> tuple[Claimed, list[int]]:
        """Runs ``claim``; also returns the numbers of settlements whose uploads are missing."""
        kinds: dict[tuple[object, ...], int] = {}
        rows = [
            (
                item.request_id,
                item.token,
                kinds.setdefault(end, len(kinds) + 1),
                item.cpu_ms,
                b"" if end[-1] else item.reply,
            )
            for item, end in ends
        ]
        fields = [dict(zip(_END, kind, strict=True)) for kind in kinds]
        answer = await self.shard.run("claim", uploads, ends=fields, settlements=rows, **arguments)
        return read_claimed(answer, arguments["token"], len(rows)), answer["missing"]

    async def _with_bodies(self, claimed: Claimed) -> Claimed:
        jobs = await self.fetch_bodies(claimed.jobs)
        return claimed if jobs is claimed.jobs else replace(claimed, jobs=jobs)

    async def fetch_bodies(self, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
        """Returns the jobs with the bodies that lie apart from their records."""
        apart = [(job.request_id, job.detached_bytes) for job in jobs if job.detached_bytes]
        if not apart:
            return jobs
        bodies: dict[str, bytes | None] = {}
        for request_ids in in_batches(apart, LARGE_BATCH_BYTES):
            names = (self.shard.keys.of("body", request_id) for request_id in request_ids)
            (found,) = await self.shard.ask(("MGET", *names))
            bodies |= zip(request_ids, found, strict=True)
        return tuple(
            structs.replace(job, body=bodies[job.request_id]) if job.detached_bytes else job
            for job in jobs
        )

    async def reconcile(
        self, worker: str, holds: Collection[str]
    ) -> tuple[tuple[Job, ...], list[str]]:
        """Returns requests leased to ``worker`` beside those it ``holds``, and those it lost."""
        answer = await self.shard.run("reconcile", worker=worker, request_ids=list(holds))
        jobs = read_jobs(answer, map(text_of, answer["tokens"]))
        lost = [text_of(request_id) for request_id in answer["lost"]]
        return await self.fetch_bodies(jobs), lost

    async def renew(
        self,
        worker: str,
        environments: Collection[str] = (),
        *,
        idle_factor: float = 1.0,
        times: Mapping[tuple[str, Times], int] | None = None,
        used: Mapping[Use, int] | None = None,
        headers: Sequence[HeaderUse] = (),
    ) -> Renewed:
        """Sends a heartbeat, which extends the lease over all that the worker holds.

        Args:
            environments: those whose waiting requests the answer counts.
            idle_factor: how many times longer the lease is if the worker holds nothing.
            times: how many results of an environment took which times since the last heartbeat.
            used: what its runs have cost since then.
            headers: those of the texts that it has served since then.
        """
        answer = await self.shard.run(
            "renew",
            worker=worker,
            idle_lease_ms=int(self.shard.lease_ms * idle_factor),
            environments=list(environments),
            tallies=list(tallies_of(times or {}).items()),
            used=[(*use, n) for use, n in (used or {}).items()],
            headers=headers,
        )
        return Renewed(
            held=answer["held"],
            lapsed=answer["expired"] > 0,
            timed_out=tuple(text_of(request_id) for request_id in answer["timed_out"]),
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
        """Gives back requests unfinished, as (request id, token) pairs.

        Returns how many of the leases were current. ``leave``: the worker leaves the fleet.
        """
        given = await self.shard.run("release", worker=worker, how=how, leave=leave, leases=leases)
        return cast(int, given)

    async def reap(self) -> Reaped:
        """Requeues up to 100 requests of one worker whose lease has expired."""
        answer = await self.shard.run("reap")
        return Reaped(
            requeued=answer["queued"],
            poisoned=answer["poisoned"],
            more=answer["more"] == 1,
            expiry_grace_s=answer["expiry_grace_ms"] / 1000,
        )

    async def register(
        self,
        worker: str,
        info: bytes,
        environments: Mapping[str, bytes],
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        """Enters the fleet. ``info`` and the environments' values are for people to read.

        ``fingerprints`` say which verdicts may be remembered for each environment from now on.
        """
        rows = [
            (environment, (fingerprints or {}).get(environment, ""), about)
            for environment, about in environments.items()
        ]
        await self.shard.run("register", worker=worker, info=info, environments=rows)
        await self.shard.load_for_clients()

    async def wait_wakeup(
        self, worker: str, environments: Sequence[str], block_s: float
    ) -> Wakeup | Stop | None:
        """Waits for an environment's wake-up, or for something for ``worker`` alone.

        Returns None after ``block_s`` seconds or a ``notify_worker``.
        """
        stop = self.shard.keys.of("stop", worker)
        names = [stop, *(self.shard.keys.of("wakeup", environment) for environment in environments)]
        (found,) = await self.shard.block(("BLPOP", *names, block_s), block_s=block_s)
        if found is None:
            return None
        if text_of(found[0]) != stop:
            return Wakeup()
        return Stop(text_of(found[1])) if found[1] else None

    async def notify_worker(self, worker: str) -> None:
        """Ends the worker's own ``wait_wakeup``."""
        await self.shard.run("notify_worker", worker=worker)

    async def notify(self, environment: str) -> None:
        """Passes a wake-up's token on to the next idle worker."""
        await self.shard.run("notify", environment=environment)


async def reap(queue: WorkerQueue) -> Reaped:
    """Reaps until no lease is overdue or an expiry grace period begins; returns the totals."""
    requeued = poisoned = 0
    while (step := await queue.reap()).more:
        requeued += step.requeued
        poisoned += step.poisoned
    return Reaped(requeued, poisoned, more=False, expiry_grace_s=step.expiry_grace_s)


async def reap_all(queues: Sequence[WorkerQueue], *, through_expiry_grace: bool) -> Reaped:
    """Reaps all shards; ``through_expiry_grace`` also waits for grace periods to end."""
    requeued = poisoned = 0
    while True:
        parts = await asyncio.gather(*(reap(queue) for queue in queues))
        requeued += sum(part.requeued for part in parts)
        poisoned += sum(part.poisoned for part in parts)
        expiry_grace_s = max(part.expiry_grace_s for part in parts)
        if not (expiry_grace_s and through_expiry_grace):
            return Reaped(requeued, poisoned, more=False)
        # Wait half of it: if no other process is heard, a silence as long as all of it would begin
        # another grace period.
        await asyncio.sleep(expiry_grace_s / 2 + 0.01)
