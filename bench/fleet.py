"""Simulates a fleet and its client: one process makes the calls of thousands of workers.

It asks the server for the same things as a worker's pump and a client's shard_client, in turn. It
calls the same methods of :class:`queues.Queue`, on the two connections of one queue. So the server
does all its work for so many workers, except for their connections and wake-ups.
"""

from __future__ import annotations

import itertools
import secrets
import time
from base64 import urlsafe_b64encode
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from msgspec.structs import replace
from queues import Queue

from leanq.queue import wire
from leanq.queue.keys import new_request_id
from leanq.queue.requests import Reply, Request
from leanq.queue.results import Became, Job, Settlement, Submission, Times, times_of

PAYLOAD_BYTES, CODE_BYTES = 100, 1024

_FINGERPRINT, _HEADER = "f" * 64, "h" * 32
# No request may be taken away for running too long, however slow this machine is.
_LONGEST_RUN_MS = 3_600_000


class Look(NamedTuple):
    """One moment: the server's CPU seconds so far, and the bytes that it holds."""

    cpu_s: float
    memory_bytes: int


async def look(queue: Queue) -> Look:
    """Returns the server's own figures."""
    info = await queue.ping()
    cpu_s = float(info["used_cpu_sys"]) + float(info["used_cpu_user"])
    return Look(cpu_s, int(info["used_memory"]))


@dataclass(frozen=True)
class Load:
    """The size and the work of a fleet.

    Attributes:
        batch: requests that the client submits at once.
        each: requests that a worker settles and claims at once.
        held: requests in flight with each worker.
        waiting: requests that wait in line all the time.
        checks: True for checks of Lean code, whose digests and affinities cost the server
            something; False for echoes.
    """

    workers: int = 1
    tenants: int = 1
    batch: int = 64
    each: int = 64
    held: int = 64
    waiting: int = 0
    checks: bool = False


class Fleet:
    """Simulated workers, and the client of their requests.

    In turn, each worker settles its oldest requests with the call that claims as many again.
    Workers renew their leases in time.
    """

    def __init__(self, queue: Queue, load: Load, environment: str = "default") -> None:
        self.replies = self.renewals = 0
        self._queue = queue
        self._load = load
        self._environment = environment
        self._client, self._position = secrets.token_urlsafe(12), "0-0"
        self._tenants = itertools.cycle([f"tenant-{n}" for n in range(load.tenants)])
        self._numbers = itertools.count()
        self._turns = deque(
            (f"host-{secrets.token_hex(6)}", deque[Job]()) for _ in range(load.workers)
        )
        self._times = Counter[tuple[str, Times]]()
        self._renewals: deque[tuple[float, str]] = deque()
        # Replies that were settled and not yet read.
        self._unread = 0

    async def open(self, beside: Sequence[Fleet] = ()) -> None:
        """Lets all workers join and fill up, so that later turns are all alike.

        Meanwhile the fleets ``beside`` renew their leases.
        """
        info = wire.pack_info(
            {
                "host": "host",
                "pid": 1,
                "slots": self._load.held,
                "started": 0.0,
                "environments": [self._environment],
            }
        )
        about = {self._environment: wire.pack_info({"driver": "echo"})}
        for worker, _ in self._turns:
            await self._queue.register(worker, info, about, {self._environment: _FINGERPRINT})
            self._renewals.append((time.monotonic() + self._renew_every_s, worker))
            for fleet in (self, *beside):
                await fleet.renew()
        load = self._load
        await self.submit(load.waiting)
        step = min(load.held, 1000)
        for _ in range(load.workers * load.held // step):
            await self.submit(step)
            await self.claim(step, settle=False)
            for fleet in (self, *beside):
                await fleet.renew()

    async def turn(self) -> None:
        """Submits a batch, claims as much, and reads the replies."""
        await self.submit(self._load.batch)
        for _ in range(self._load.batch // self._load.each):
            await self.claim(self._load.each)
            await self.renew()
        while self._unread:
            self._position, pairs = await self._queue.read_inbox(self._client, self._position, 1000)
            self._unread -= len(pairs)
            self.replies += len(pairs)

    async def renew(self) -> None:
        """Renews the leases of the workers whose time has come."""
        while self._renewals[0][0] <= time.monotonic():
            _, worker = self._renewals.popleft()
            times, self._times = self._times, Counter()
            renewed = await self._queue.renew(worker, times=times)
            assert renewed.known
            assert not renewed.lapsed
            self._renewals.append((time.monotonic() + self._renew_every_s, worker))
            self.renewals += 1

    async def submit(self, count: int) -> None:
        """Submits so many requests from the client."""
        for start in range(0, count, 1000):
            batch = [self._submission() for _ in range(min(1000, count - start))]
            answers = await self._queue.submit(self._client, batch)
            assert answers == [Became.QUEUED] * len(batch)

    async def claim(self, want: int, *, settle: bool = True) -> None:
        """Lets the next worker settle its oldest requests and claim as many."""
        worker, jobs = self._turns[0]
        self._turns.rotate(-1)
        ends = [self._end(jobs.popleft()) for _ in range(want)] if settle else []
        claimed = await self._queue.claim(
            worker,
            [self._environment],
            want,
            busy=len(jobs),
            token=secrets.token_urlsafe(9),
            settlements=ends,
        )
        assert all(claimed.accepted)
        assert len(claimed.jobs) == want
        jobs.extend(claimed.jobs)
        self._unread += len(ends)
        self._times.update((self._environment, end.times) for end in ends)

    @property
    def _renew_every_s(self) -> float:
        return self._queue.settings.lease_s / 3

    def _submission(self) -> Submission:
        number = next(self._numbers)
        if not self._load.checks:
            request = Request("echo", payload=b"%0*d" % (PAYLOAD_BYTES, number))
            return self._place(wire.pack_request(request))
        code = f"theorem t : {number} = {number} := rfl\n".ljust(CODE_BYTES, "-")
        body = wire.pack_request(Request("check", code=code))
        digest = urlsafe_b64encode(blake2b(body, digest_size=16).digest()).rstrip(b"=").decode()
        return self._place(body, digest, (_HEADER,))

    def _place(self, body: bytes, digest: str = "", affinity: tuple[str, ...] = ()) -> Submission:
        tenant, run_ms = next(self._tenants), _LONGEST_RUN_MS
        return Submission(
            new_request_id(1), self._environment, tenant, 1, 0, run_ms, body, digest, affinity
        )

    def _end(self, job: Job) -> Settlement:
        if self._load.checks:
            reply = Reply("accepted", axioms=("propext",), fingerprint=_FINGERPRINT)
            outcome, fingerprint = "accepted", _FINGERPRINT
        else:
            reply = Reply(payload=wire.unpack_request(job.body).payload)
            outcome, fingerprint = "echo", ""
        signed = replace(reply, worker="host-1", attempts=1, queued_s=job.queued_s, wall_s=0.1)
        data = wire.pack_reply(job.token, signed)
        return Settlement(
            job.request_id,
            job.token,
            outcome,
            data,
            fingerprint,
            warm=self._load.checks,
            times=times_of(job.queued_s, 0.1),
            cpu_ms=100 if self._load.checks else 0,
        )
