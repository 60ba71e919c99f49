"""One history: real clients, workers and reapers on a simulated network, what befalls them, and
what must hold in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from simulation.loop import BEGINNING_S, Host, SimulatedLoop, simulated
from simulation.network import Network, RealServer
from simulation.plan import CLIENTS, MAX_ATTEMPTS, WORKERS, Ask, Failure, Plan
from support.producer.history import Event, Findings, WritingRoute, check, digest, reply_row

from leanq.client import AsyncLeanQClient
from leanq.errors import LeanQError, UnavailableError
from leanq.producer.route import ClientTimings
from leanq.queue.keys import Keys
from leanq.queue.requests import Reply, Request
from leanq.queue.results import is_record
from leanq.queue.scripts import LARGE_BYTES
from leanq.queue.settings import Settings
from leanq.states import States
from leanq.worker import Worker

ENVIRONMENT = "simulated"
# After the last request was sent, all must have ended within so many leases, and so many seconds.
_LEASES, _SECONDS = 30, 70
# What an old server said is written down in the moment of its end at the latest.
_LATE_S = 0.001
# Kinds of keys that are there only while requests wait or run.
_UNFINISHED = {"wait", "ring", "processing", "quarantined", "joined", "body"}


class MemoryJournal:
    """What one client, or who else takes part, did and saw; of all of them in one list."""

    def __init__(self, who: str, events: list[Event]) -> None:
        self.who, self.events = who, events

    def note(self, kind: str, *rows: Sequence[object]) -> None:
        """One event of this kind for each row."""
        now_s = time.monotonic()
        self.events += ([kind, now_s, self.who, *row] for row in rows)


class WritingClient(WritingRoute, AsyncLeanQClient):
    """A client that writes down all that it sees."""

    timings = ClientTimings(silence_s=2.0)

    def __init__(self, settings: Settings, journal: MemoryJournal) -> None:
        self.journal = journal
        super().__init__(settings, unavailable_timeout_s=1e6)

    async def aclose(self) -> None:
        """Ends the client."""
        await self.close()


class Driver:
    """Answers after the time that the text names; kills its worker where the text says so."""

    environment = ENVIRONMENT

    def __init__(self, began: Callable[[str], None], die: Callable[[], None], warm: bool) -> None:
        self._began, self._die, self._warm = began, die, warm
        self.about: Mapping[str, object] = {"fingerprint": "f"} if warm else {}

    async def open(self, _: States) -> None:
        pass

    async def describe(self) -> str:
        return "simulated"

    async def run(self, request: Request) -> Reply:
        asked = json.loads(request.code)
        self._began(request.code)
        if asked["kills"]:
            await asyncio.sleep(asked["takes_s"] / 2)
            self._die()
        if asked["takes_s"]:
            await asyncio.sleep(asked["takes_s"])
        fingerprint = "f" if self._warm else None
        return Reply(
            payload=answer(request.code),
            warm=self._warm,
            fingerprint=fingerprint,
            cpu_s=asked["takes_s"],
        )

    async def prove(self) -> None:
        pass

    async def close(self) -> None:
        pass


def code_of(ask: Ask) -> str:
    """The text of a request; twins have the same."""
    asked = {"n": ask.same_as, "takes_s": ask.takes_s, "kills": ask.kills}
    # Every fourth body is too large for a script, and every fifth reply.
    filling = "x" * LARGE_BYTES if ask.same_as % 4 == 0 else ""
    return json.dumps({**asked, "filling": filling})


def answer(code: str) -> bytes:
    """The one right answer."""
    times = LARGE_BYTES if json.loads(code)["n"] % 5 == 0 else 1
    return times * hashlib.blake2b(code.encode(), digest_size=8).digest()


@dataclass
class Outcome:
    """What a history came to; ``faults`` must be empty."""

    faults: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    uncharged: int = 0


class Member:
    """A process: its host, and the worker on it, or the number of the client."""

    def __init__(self, host: Host, number: int = 0) -> None:
        self.host, self.number = host, number
        self.worker: Worker | None = None


class World:
    """The processes of one history, and what befalls them."""

    def __init__(self, plan: Plan, loop: SimulatedLoop, real: RealServer) -> None:
        self.plan, self.loop = plan, loop
        self.network = Network(loop, real, random.Random(f"network {plan.seed}"))
        self.server = self.network.server
        self.settings = Settings(
            "redis://server", lease_s=plan.lease_s, max_attempts=MAX_ATTEMPTS, prefix="s"
        )
        self.outcome = Outcome()
        self.journal = MemoryJournal("world", self.outcome.events)
        self.hosts: list[Host] = []
        self.workers: list[Member] = []
        self.clients: list[Member] = []
        # How often each text was begun, and whether the server was replaced.
        self.began: Counter[str] = Counter()
        self.has_forgotten = False
        self._pending: dict[int, Ask] = {}
        self._open: dict[int, Ask] = {}
        self._unsent = len(plan.asks)

    # Processes

    def _host(self, name: str) -> Host:
        host = Host(f"{name}{len(self.hosts)}", self.loop)
        self.hosts.append(host)
        return host

    def hire(self) -> Member:
        """One more worker."""
        host = self._host("w")
        member = Member(host)
        driver = Driver(
            lambda code: self.began.update((code,)),
            partial(self._killed_itself, member),
            self.plan.has_affinity,
        )
        member.worker = host.context.run(
            partial(Worker, self.settings, [driver], slots=self.plan.slots)
        )
        host.spawn(self._work(member))
        self.workers.append(member)
        return member

    async def _work(self, member: Member) -> None:
        assert member.worker
        try:
            await member.worker.run()
        except LeanQError as error:
            self.outcome.faults.append(f"{member.host.name} ended: {error!r}")

    def _killed_itself(self, member: Member) -> None:
        if member.host.alive:
            self.outcome.happened["killed itself"] += 1
            self.kill(member)
            self._later(0.3, self.hire)

    def kill(self, member: Member) -> None:
        """As SIGKILL does: it does nothing more, and its connections end."""
        member.host.alive = False
        member.host.freeze()
        for connection in self.network.of(member.host):
            connection.cut()
        for members in (self.workers, self.clients):
            if member in members:
                members.remove(member)

    def enlist(self, number: int) -> None:
        """Client ``number``, or its successor, which collects what that one waited for."""
        host = self._host("c")
        member = Member(host, number)
        self.clients.append(member)
        host.spawn(self._ask_all(number, host.name))

    async def _ask_all(self, number: int, name: str) -> None:
        journal = MemoryJournal(name, self.outcome.events)
        client = WritingClient(self.settings, journal)
        while True:
            try:
                await client.__aenter__()
            except UnavailableError:
                await asyncio.sleep(0.2)
            else:
                break
        # These were sent by a predecessor.
        inherited = [ask for ask in self._open.values() if ask.client == number]
        asks = [ask for ask in self._pending.values() if ask.client == number]
        async with contextlib.aclosing(client), asyncio.TaskGroup() as group:
            for ask in inherited:
                group.create_task(self._one(client, ask, client.attach(ask.request_id)))
            for ask in asks:
                await _until(BEGINNING_S + ask.at_s)
                del self._pending[ask.number]
                self._open[ask.number] = ask
                journal.note("attempt", (ask.request_id, digest(answer(code_of(ask)))))
                group.create_task(self._one(client, ask, self._sent(client, ask)))

    def _sent(self, client: WritingClient, ask: Ask) -> Coroutine[Any, Any, Reply]:
        return client.check(
            code_of(ask),
            env=ENVIRONMENT,
            tenant=ask.tenant,
            priority=ask.priority,
            deadline_s=ask.deadline_s,
            request_id=ask.request_id,
        )

    async def _one(
        self, client: WritingClient, ask: Ask, asked: Coroutine[Any, Any, Reply]
    ) -> None:
        note = client.journal.note
        try:
            async with asyncio.timeout(ask.cancelled_after_s):
                reply = await asked
        except TimeoutError:
            note("withdrawn", (ask.request_id,))
        except LeanQError as error:
            note("end", (ask.request_id, type(error).__name__, ""))
        else:
            error = reply.verdict or ""
            note("end", (ask.request_id, error, "" if error else digest(reply.payload)))
        self._open.pop(ask.number, None)

    def _later(self, after_s: float, do: Callable[[], object]) -> None:
        self.loop.outside(self.loop.time() + after_s, do)

    # Failures

    def _befall(self, failure: Failure) -> None:
        happen = getattr(self, f"_{failure.kind}")
        if happen(failure) is not False:
            self.outcome.happened[failure.kind] += 1

    def _some_worker(self, failure: Failure) -> Member | None:
        return self.workers[failure.whom % len(self.workers)] if self.workers else None

    def _some_host(self, failure: Failure) -> Host:
        members = [*self.workers, *self.clients]
        return members[failure.whom % len(members)].host

    def _kill(self, failure: Failure) -> bool:
        if member := self._some_worker(failure):
            self.kill(member)
            self._later(0.3, self.hire)
        return member is not None

    def _freeze(self, failure: Failure) -> bool:
        member = self._some_worker(failure)
        if member:
            member.host.freeze()
            self._later((0.5 + 2 * failure.how_long) * self.plan.lease_s, partial(_thaw, member))
        return member is not None

    def _term(self, failure: Failure) -> bool:
        member = self._some_worker(failure)
        if member and member.worker:
            self.workers.remove(member)
            member.worker.stop(grace_s=3 * failure.how_long)
            self.hire()
        return member is not None

    def _client(self, failure: Failure) -> bool:
        if not self.clients:
            return False
        member = self.clients[failure.whom % len(self.clients)]
        number = member.number
        self.kill(member)
        self.journal.note("killed", (member.host.name,))
        self._later(0.3, lambda: self.enlist(number))
        return True

    def _cut(self, _: Failure) -> None:
        for connection in list(self.network.connections):
            connection.cut()

    def _cut_one(self, failure: Failure) -> None:
        if connections := list(self.network.connections):
            connections[failure.whom % len(connections)].cut()

    def _lose_answer(self, failure: Failure) -> None:
        # Of the next script that the host runs: it is done, and the host does not know.
        for connection in self.network.of(self._some_host(failure)):
            connection.loses_answer = True

    def _delay(self, failure: Failure) -> None:
        host = self._some_host(failure)
        self.network.delays_s[host] = failure.how_long * 1.5 * self.plan.lease_s
        self._later(1.5 * self.plan.lease_s, lambda: self.network.delays_s.pop(host, None))

    def _swallow(self, failure: Failure) -> None:
        for connection in self.network.of(self._some_host(failure)):
            connection.swallows = True

    def _restart(self, failure: Failure) -> bool:
        if not self.server.up:
            return False
        self.server.stop()
        self._later(failure.how_long * self.plan.lease_s, self._start)
        return True

    def _start(self) -> None:
        self.server.up = True

    def _pause_server(self, failure: Failure) -> bool:
        if self.server.frozen:
            return False
        self.server.frozen = True
        self._later(2 * failure.how_long * self.plan.lease_s, self.server.thaw)
        return True

    def _forget(self, failure: Failure) -> bool:
        if not self.server.up or self._replica_since_s is not None:
            return False
        self._replica_since_s = self.loop.time()
        self.server.replicate()
        self._later(0.3 * failure.how_long, partial(self._fail_over, failure))
        return True

    _replica_since_s: float | None = None

    def _fail_over(self, failure: Failure) -> None:
        self.has_forgotten = True
        self.server.stop()
        self.server.promote()
        self.server.up = False
        self.journal.note("forgot", (self._replica_since_s, self.loop.time()))
        self._replica_since_s = None
        self._later(failure.how_long * self.plan.lease_s / 2, self._start)

    def _clock(self, failure: Failure) -> None:
        self.server.ahead_s += (failure.how_long * 30 - 10) * self.plan.lease_s / 4

    def _full(self, failure: Failure) -> None:
        self.server.full = True
        self._later(failure.how_long * self.plan.lease_s, self._emptied)

    def _emptied(self) -> None:
        self.server.full = False

    # The course

    async def run(self) -> None:
        """All of it, and what is to be found afterwards."""
        plan, server = self.plan, self.server
        if plan.weights:
            server.ask("HSET", Keys("s").of("weights"), "a", "3")
        for _ in range(WORKERS):
            self.hire()
        await self._while(lambda: not all(map(_has_joined, self.workers)))
        began_s = self.loop.time() - BEGINNING_S
        self._pending = {ask.number: ask for ask in plan.asks}
        for number in range(CLIENTS):
            self.enlist(number)
        for failure in plan.failures:
            self._later(failure.at_s - began_s, partial(self._befall, failure))
        last_s = max([ask.at_s for ask in plan.asks] + [f.at_s for f in plan.failures])
        limit_s = BEGINNING_S + last_s + _LEASES * plan.lease_s + _SECONDS
        # What befalls a worker that leaves is left to its lease.
        over_s = max([f.at_s for f in plan.failures], default=0.0) + 3 * plan.lease_s
        await _until(BEGINNING_S + over_s)
        ended = await self._while(lambda: bool(self._open or self._pending), limit_s)
        if not ended:
            waiting = [*self._open, *self._pending]
            self.outcome.faults.append(f"did not end: {waiting}")
        if not await self._while(self._is_busy, limit_s + 20 * plan.lease_s):
            self.outcome.faults.append("a lease is held for ever")
        for member in self.workers:
            assert member.worker
            member.worker.stop(grace_s=2.0)
        await asyncio.sleep(4.0)
        self._account()

    async def _while(self, condition: Callable[[], bool], until_s: float = 2e9) -> bool:
        while condition():
            if self.loop.time() > until_s:
                return False
            await asyncio.sleep(0.25)
        return True

    def _is_busy(self) -> bool:
        tag = Keys("s").tag
        if not self.server.up or self.server.frozen:
            return True
        found = [key.decode() for key in self.server.ask("KEYS", f"{tag}:*")]
        kinds = {key.partition("}:")[2].partition(":")[0] for key in found}
        known = {name.decode() for name in self.server.ask("ZRANGE", f"{tag}:workers", 0, -1)}
        strangers = known - {each.worker.id for each in self.workers if each.worker}
        return bool(strangers) or bool(kinds & _UNFINISHED)

    def _account(self) -> None:
        """What is left on the server, and what the journals tell."""
        outcome, faults, tag = self.outcome, self.outcome.faults, Keys("s").tag
        left: Counter[str] = Counter()
        told = MemoryJournal("keys", outcome.events)
        replies = 0
        keys = sorted(self.server.ask("KEYS", "*"))
        # Of keys that are no texts it says nothing.
        for key, data in zip(keys, self.server.ask("MGET", *keys), strict=True):
            kind, _, name = key.decode().partition("}:")[2].partition(":")
            if kind == "req":
                if is_record(data):
                    left["req without end"] += 1
                else:
                    replies += 1
                    told.note("reply", reply_row(name, data))
            elif kind == "phase":
                if self.server.ask("HKEYS", key) != [b""]:
                    left[key.decode()] += 1
            elif kind == "workers":
                left["worker in the fleet"] += 1
            elif kind in _UNFINISHED:
                left[key.decode()] += 1
        if left:
            faults.append(f"left on the server: {dict(left)}")
        flat = self.server.ask("HGETALL", f"{tag}:stats")
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        stats = {name.decode(): value for name, value in pairs}
        if waiting := int(stats.get(f"waiting:{ENVIRONMENT}", 0)):
            faults.append(f"{waiting} are counted as waiting, and nothing waits")
        ended = sum(int(n) for name, n in stats.items() if name.startswith(f"f:{ENVIRONMENT}:"))
        submitted = int(stats.get("submitted", 0))
        if not submitted == ended == replies and not self.has_forgotten:
            faults.append(f"{submitted} submitted, {ended} counted as ended, {replies} replies")
        faults += self.loop.faults
        self._judge()

    def _judge(self) -> None:
        outcome, faults = self.outcome, self.outcome.faults
        asks = {ask.request_id: ask for ask in self.plan.asks}
        ordinary: list[Event] = []
        special: dict[str, set[tuple[str, str]]] = {}
        gave_up: set[str] = set()
        for event in outcome.events:
            kind, _, _, *rest = event
            ask = asks.get(rest[0]) if kind not in ("forgot", "killed", "trouble") else None
            if kind == "withdrawn":
                gave_up.add(rest[0])
            elif ask is None or ask.is_ordinary:
                ordinary.append(event)
            elif kind == "reply":
                special.setdefault(ask.request_id, set()).add((rest[2], rest[3]))
            elif kind == "end":
                special.setdefault(ask.request_id, set()).add((rest[1], rest[2]))
            if kind == "reply" and ask and not self.has_forgotten:
                attempts, runs = rest[4], self.began[code_of(ask)]
                outcome.uncharged += attempts > max(runs, 1)
        for request_id, results in special.items():
            ask = asks[request_id]
            right = ("", digest(answer(code_of(ask))))
            allowed = set() if ask.kills else {right}
            allowed |= {("poisoned", "")} if ask.kills else set()
            allowed |= {("expired", "")} if ask.deadline_s else set()
            allowed |= {("cancelled", ""), ("LostError", "")} if ask.cancelled_after_s else set()
            # Its first client may have died before the server had it.
            may_be_lost = self.has_forgotten or outcome.happened["client"] > 0
            allowed |= {("LostError", "")} if may_be_lost else set()
            if not results <= allowed:
                faults.append(f"{request_id} ended as {sorted(results - allowed)}")
            elif len(results) > 1 and not self.has_forgotten:
                faults.append(f"{request_id} has several ends: {sorted(results)}")
        for request_id in (asks.keys() - gave_up) - special.keys():
            if not asks[request_id].is_ordinary:
                faults.append(f"{request_id} never ended")
        found = outcome.findings = check(ordinary, looked_up=True, late_s=_LATE_S)
        faults += [f"{name}: {request_ids}" for name, request_ids in found.faults.items()]


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))


def _has_joined(member: Member) -> bool:
    return member.worker is not None and member.worker.joined.is_set()


def _thaw(member: Member) -> None:
    if member.host.alive:
        member.host.thaw()


class _Errors(logging.Handler):
    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._faults.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextlib.contextmanager
def _quiet(faults: list[str]) -> Any:
    log, handler = logging.getLogger("leanq"), _Errors(faults)
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before
        log.setLevel(before[0])


def play(plan: Plan, real: RealServer) -> Outcome:
    """One history, from the first process to the last."""
    with simulated(plan.seed) as loop:
        world = World(plan, loop, real)
        with _quiet(world.outcome.faults):
            try:
                loop.run_until_complete(world.run())
            except Exception as error:
                world.outcome.faults.append(f"cut short: {error!r}")
            world.outcome.seconds = loop.time() - BEGINNING_S
            _end(world, loop)
    return world.outcome


def _end(world: World, loop: SimulatedLoop) -> None:
    """Ends all tasks, those of the dead included."""
    world.server.stop()
    loop.faults = []
    for host in world.hosts:
        host.alive = False
        host.thaw()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks, timeout=60.0) if tasks else asyncio.sleep(0))
