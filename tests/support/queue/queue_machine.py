"""The rules by which hypothesis drives the scripts and their model side by side."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import redis
from hypothesis import HealthCheck
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from msgspec import structs

from leanq.queue.requests import Reply
from leanq.queue.results import Became, Reaped, Returning, Settlement, Submission
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply
from support.queue.queue_check import check_status, check_wakeups, compare
from support.queue.queue_model import Model
from support.queue.queues import Queue
from support.queue.shards import LARGE, dump, lasting_of, set_clock

_T = TypeVar("_T")

SOAK = int(os.environ.get("LEANQ_SOAK", "0"))
PROFILE = profile(
    max_examples=SOAK or 100,
    stateful_step_count=60,
    deadline=None,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=list(HealthCheck),
)
ENVIRONMENTS, TENANTS, CLIENTS = ("a", "b"), ("s", "t", "u"), ("c", "d")
LEASE_MS, MAX_ATTEMPTS, MAX_WAITING = 10_000, 4, 6


class _Large(bytes):
    def __repr__(self) -> str:
        return "LARGE"  # a failure shows its example


BODIES = {"": (b"body", _Large(LARGE)), "p": (b"body",), "q": (_Large(LARGE),)}
NAMES = {
    Became.QUEUED: "queued",
    Became.ATTACHED: "attached",
    Became.CONFLICT: "conflict",
    Became.FULL: "full",
    Became.UNKNOWN_ENVIRONMENT: "unknown",
}
environments = st.lists(st.sampled_from(ENVIRONMENTS), min_size=1, unique=True)
clients = st.sampled_from(CLIENTS)
workers = st.integers(0, 1)
some = st.lists(st.integers(1, 20), max_size=6)
submissions = st.builds(
    Submission,
    request_id=st.just("new"),
    environment=st.sampled_from((*ENVIRONMENTS, *ENVIRONMENTS, "x")),
    tenant=st.sampled_from(TENANTS),
    priority=st.integers(0, 2),
    deadline_ms=st.sampled_from((0, 0, 5_000, 30_000)),
    longest_run_ms=st.sampled_from((8_000, 100_000)),
    # Those that are identical have the same body.
    body=st.just(b""),
    digest=st.sampled_from(("", "p", "q")),
).flatmap(
    lambda item: st.sampled_from(BODIES[item.digest]).map(
        lambda body: structs.replace(item, body=body)
    )
)
fingerprints = st.sampled_from(("", "f", "g"))


def pick(known: Sequence[_T], back: Sequence[int]) -> list[_T]:
    """Some of what came up before, counted from the newest."""
    return [known[-number] for number in back if number <= len(known)]


class QueueMachine(RuleBasedStateMachine):
    """Every rule does the same to the model and to the server, and compares the answers."""

    server: redis.Redis
    loop: asyncio.AbstractEventLoop
    settings: Settings
    examples = itertools.count()
    model_type: type[Model] = Model

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(replace(self.settings, prefix=f"model{next(self.examples)}"))
        self.tag = self.queue.keys.tag
        self.model = self.model_type(LEASE_MS, MAX_ATTEMPTS, self.settings.max_waiting)
        self.workers = ["w0", "w1"]
        self.calls = itertools.count()
        self.sound = True
        # Every lease that a worker was ever given, the ended ones too.
        self.leases: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.sent: list[Submission] = []
        self.replies: dict[str, bytes] = {}
        # Environments of which a worker took a wake-up's token and has not claimed since.
        self.woken: set[str] = set()
        self.advance(0)

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        self.sound = False
        return self.loop.run_until_complete(work)

    def anyone_late(self) -> bool:
        return any(end <= self.model.now for end in self.model.leases.values())

    def anyone_busy(self) -> bool:
        return any(self.model.work.values())

    @rule(ms=st.sampled_from((1, 900, 4_000, 10_000, 40_000, -3_000, -40_000)))
    def advance(self, ms: int) -> None:
        self.model.now += ms
        set_clock(self.server, self.tag, self.model.now)

    @rule(
        client=clients,
        batch=st.lists(submissions, min_size=4, max_size=12),
        again=some,
        others=st.lists(submissions, max_size=3),
    )
    def submit(
        self, client: str, batch: list[Submission], again: list[int], others: list[Submission]
    ) -> None:
        """New requests, some that were sent before, and ``others`` by names that were used."""
        batch = [structs.replace(item, request_id=f"r{next(self.calls)}") for item in batch]
        batch += pick(self.sent, again)
        used = [item.request_id for item in batch]
        free = [item.request_id for item in self.sent if item.request_id not in used]
        for item, name in zip(others, dict.fromkeys(reversed(free)), strict=False):
            batch.append(structs.replace(item, request_id=name))
        self.sent += batch
        expected = [self.model.submit(client, item) for item in batch]
        answers = self.call(self.queue.submit(client, batch))
        assert [NAMES.get(answer, "reply") for answer in answers] == expected
        for item, answer in zip(batch, answers, strict=True):
            if isinstance(answer, bytes):
                assert answer in (self.replies.get(item.request_id), *self.remembered(item))

    def remembered(self, item: Submission) -> list[bytes | None]:
        """The replies that any request of this name could be answered with at once."""
        asked = [each for each in self.sent if each.request_id == item.request_id]
        prints = self.model.prints
        return [
            self.found.verdict.get(f"{prints.get(each.environment)}:{each.digest}")
            for each in asked
        ]

    @rule(client=clients, item=submissions, again=st.integers(1, 20), new=st.booleans())
    def submit_one(self, client: str, item: Submission, again: int, new: bool) -> None:
        """A single request, as most clients send them, or one that was sent before."""
        if new:
            self.submit(client, [item], [], [])
        else:
            self.submit(client, [], [again], [])

    @rule(number=workers, environments=st.permutations(ENVIRONMENTS))
    def work(self, number: int, environments: list[str]) -> None:
        """Settles all that it can and claims much."""
        self.claim(number, environments, 12, list(range(1, 13)), "")

    @rule(
        number=workers,
        environment=st.sampled_from(ENVIRONMENTS),
        settled=st.integers(1, 6),
        print_=fingerprints,
    )
    def exchange(self, number: int, environment: str, settled: int, print_: str) -> None:
        """Settles one and claims one, as workers mostly do."""
        self.claim(number, [environment], 1, [settled], print_)

    @rule(
        number=workers,
        environments=environments,
        want=st.integers(0, 9),
        settled=some,
        print_=fingerprints,
    )
    def claim(
        self, number: int, environments: list[str], want: int, settled: list[int], print_: str
    ) -> None:
        worker = self.workers[number]
        call = next(self.calls)
        leases = pick(self.leases[worker], settled)
        # The same token may come again, and then with other words.
        reply = Reply("accepted", cpu_s=call, payload=LARGE if call % 3 == 0 else None)
        warm = call % 4 > 0
        cpu_ms = [call * 37 % 5000 * (n % 3) for n in range(len(leases))]
        done = [
            Settlement(
                *lease, "accepted", pack_reply(lease[1], reply), print_, warm, cpu_ms=used_ms
            )
            for lease, used_ms in zip(leases, cpu_ms, strict=True)
        ]
        accepted = tuple(
            self.model.settle(worker, *lease, print_, warm, used_ms)
            for lease, used_ms in zip(leases, cpu_ms, strict=True)
        )
        busy = len(self.model.work[worker])
        request_ids, alone, hold = self.model.claim(worker, environments, want, busy)
        self.model.call_over()
        token = f"{call}:"
        got = self.call(
            self.queue.claim(worker, environments, want, busy=busy, token=token, settlements=done)
        )
        assert (got.accepted, got.must_empty) == (accepted, hold)
        assert sorted(job.request_id for job in got.jobs) == sorted(request_ids)
        for job in got.jobs:
            assert job.token == token
            self.model.lease(worker, job.request_id, job.token)
            item = self.model.flying[job.request_id]
            assert (job.attempts, job.environment, job.body) == (
                item.attempts,
                item.sub.environment,
                item.sub.body,
            )
            assert job.isolated == alone == (2 * (job.attempts - 1) >= MAX_ATTEMPTS)
            self.leases[worker].append((job.request_id, job.token))
        self.model.called(worker)
        assert got.held == len(self.model.work[worker])
        if want and not hold:
            # A worker on hold keeps the token that it took; a renewal makes up for that.
            self.woken -= set(environments)

    @rule(which=some)
    def settle_late(self, which: list[int]) -> None:
        """Workers that lost a lease to another come with their results all the same."""
        flying = self.model.flying
        lost = [
            (worker, request_id, token)
            for worker, leases in self.leases.items()
            for request_id, token in leases
            if request_id in flying and flying[request_id].token not in {None, token}
        ]
        for worker, request_id, token in pick(lost, which):
            done = [Settlement(request_id, token, "accepted", pack_reply(token, Reply("accepted")))]
            work = self.queue.claim(worker, [], 0, busy=0, token="-", settlements=done)
            assert self.call(work).accepted == (False,)
            self.model.called(worker)

    @rule(number=workers)
    def renew(self, number: int) -> None:
        worker = self.workers[number]
        timed_out = tuple(self.model.renew(worker))
        got = self.call(self.queue.renew(worker))
        assert (got.timed_out, got.held) == (timed_out, len(self.model.work[worker]))
        assert got.known == (worker in self.model.fleet)
        expiry_grace = self.model.now < self.model.expiry_grace
        assert got.lapsed == (self.anyone_late() and not expiry_grace)

    @precondition(anyone_busy)
    @rule(number=workers, which=some, how=st.sampled_from(get_args(Returning)), leave=st.booleans())
    def release(self, number: int, which: list[int], how: Returning, leave: bool) -> None:
        worker = self.workers[number]
        leases = pick(self.leases[worker], which)
        given = sum(self.model.release(worker, *lease, how) for lease in reversed(leases))
        self.model.call_over()
        if leave:
            self.model.leave(worker)
        work = self.queue.release(worker, leases, how=how, leave=leave)
        assert self.call(work) == given

    @rule(which=some)
    def cancel(self, which: list[int]) -> None:
        request_ids = [item.request_id for item in pick(self.sent, which)]
        expected = [self.model.cancel(request_id) for request_id in request_ids]
        self.model.trim()
        assert self.call(self.queue.cancel(request_ids)) == expected

    @rule(client=clients, which=some)
    def lookup(self, client: str, which: list[int]) -> None:
        request_ids = ["unknown", *(item.request_id for item in pick(self.sent, which))]
        expected = [self.model.lookup(client, request_id) for request_id in request_ids]
        self.model.trim()
        answers = self.call(self.queue.lookup(client, request_ids))
        for request_id, answer, name in zip(request_ids, answers, expected, strict=True):
            if name == "reply":
                assert isinstance(answer, bytes)
                assert answer == self.replies.setdefault(request_id, answer)
            else:
                assert answer is (name == "in flight")

    @rule(
        kind=st.sampled_from(("environment", "tenant")),
        hold=st.booleans(),
        number=st.integers(0, 1),
    )
    def hold_back(self, kind: Literal["environment", "tenant"], hold: bool, number: int) -> None:
        name = (ENVIRONMENTS if kind == "environment" else TENANTS)[number]
        changed = self.call(self.queue.set_paused(kind, name, paused=hold))
        assert changed == self.model.pause(kind, name, hold)

    @rule(tenant=st.sampled_from(TENANTS), weight=st.sampled_from((None, None, 0.3, 1.0, 4.0)))
    def weigh(self, tenant: str, weight: float | None) -> None:
        self.call(self.queue.set_weight(tenant, weight))
        self.model.weights.pop(tenant, None)
        if weight is not None:
            self.model.weights[tenant] = weight

    @precondition(anyone_late)
    @rule()
    def reap(self) -> None:
        ends = self.model.reap()
        got = self.call(self.queue.reap())
        if ends is None:
            expiry_grace_s = (self.model.expiry_grace - self.model.now) / 1000
            assert got == Reaped(0, 0, more=False, expiry_grace_s=expiry_grace_s)
        else:
            assert got == Reaped(ends["queued"], ends["poisoned"], more=True)

    @precondition(anyone_busy)
    @rule(number=workers, which=some)
    def reconcile(self, number: int, which: list[int]) -> None:
        worker = self.workers[number]
        holds = {request_id for request_id, _ in pick(self.leases[worker], which)}
        work = set(self.model.work[worker])
        jobs, lost = self.call(self.queue.reconcile(worker, holds))
        assert (set(lost), {job.request_id for job in jobs}) == (holds - work, work - holds)
        for job in jobs:
            item = self.model.flying[job.request_id]
            assert (job.token, job.attempts) == (item.token, self.model.attempts_told(item))
            assert job.body == item.sub.body
            assert job.isolated == (2 * (item.attempts - 1) >= MAX_ATTEMPTS)

    @rule(
        number=workers,
        environments=st.lists(st.sampled_from(ENVIRONMENTS), unique=True),
        print_=fingerprints,
    )
    def register(self, number: int, environments: list[str], print_: str) -> None:
        worker = self.workers[number]
        self.model.register(worker, environments, print_)
        about, prints = dict.fromkeys(environments, b"about"), dict.fromkeys(environments, print_)
        self.call(self.queue.register(worker, b"info", about, prints))

    @rule(number=workers)
    def kill(self, number: int) -> None:
        """The worker simply stops; one with a new name takes its place."""
        self.workers[number] = f"w{next(self.calls)}"

    @precondition(anyone_busy)
    @rule()
    def reap_all(self) -> None:
        """No heartbeat is sent until all leases have lapsed and been reaped."""
        self.advance(LEASE_MS)
        if self.anyone_late():
            # Not so where the clock has gone back.
            self.reap()
        self.advance(LEASE_MS // 2)
        while self.anyone_late():
            self.reap()
            # Silence, or a clock that went back, may have begun a time in which no lease is judged.
            self.advance(max(0, self.model.expiry_grace - self.model.now))

    @rule(environment=st.sampled_from(ENVIRONMENTS))
    def listen(self, environment: str) -> None:
        if self.server.lpop(f"{self.tag}:wakeup:{environment}"):
            self.woken.add(environment)

    @rule(ask=st.booleans(), environments=environments)
    def hold_on(self, ask: bool, environments: list[str]) -> None:
        """Who empties itself for a quarantined request asks again, or is not heard of any more."""
        for environment, worker in list(self.model.isolating.items()):
            if ask and worker in self.workers:
                self.claim(self.workers.index(worker), environments, 5, [], "")
            elif not ask:
                self.server.delete(f"{self.tag}:isolating:{environment}")
                del self.model.isolating[environment]

    @invariant()
    def everything_is_in_its_place(self) -> None:
        self.sound = False
        self.found = dump(self.server, self.tag)
        self.found.check(self.model.remembered)
        assert self.found.reply == {**self.found.reply, **self.replies}, "a reply has changed"
        self.replies = self.found.reply
        self.server_is_as_the_model_says()
        self.sound = True

    def server_is_as_the_model_says(self) -> None:
        compare(self.found, self.model)
        check_wakeups(self.found, self.model, self.woken)
        check_status(self.loop.run_until_complete(self.queue.status()), self.found, self.model)

    def teardown(self) -> None:
        try:
            if self.sound:
                self.drain()
        finally:
            self.loop.run_until_complete(self.queue.close())
            self.server.delete(*self.server.keys(f"{lasting_of(self.tag)}*"))

    def drain(self) -> None:
        """From any state, the workers that are left bring every request to its end."""
        for kind, name in sorted(self.model.paused):
            assert self.call(self.queue.set_paused(kind, name, paused=False))
            self.model.pause(kind, name, False)
        self.kill(0)
        self.advance(1_000_000)
        if self.anyone_late():
            self.reap()
        self.advance(LEASE_MS // 2)
        while self.anyone_late():
            self.reap()
            # Silence, or a clock that went back, may have begun a time in which no lease is judged.
            self.advance(max(0, self.model.expiry_grace - self.model.now))
        for _ in range(100):
            self.claim(0, [*ENVIRONMENTS, "x"], 8, list(range(1, 9)), "")
            if not self.model.flying:
                break
        self.everything_is_in_its_place()
        assert not self.found.req
