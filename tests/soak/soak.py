"""The soak: what leanq guarantees, while everything goes wrong that can.

Clients ask for echoes whose right answers are known, workers are killed all the time, and one
nemesis after another befalls the rest. Then the history is checked, and what was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import redis
from support.fleets import look, until
from support.history import Findings, Journal, check, read, reply_row
from support.nemeses import NEMESES, Scene, Wreck, Wrecks, rounds
from support.victims import Clients, Fleet, Pair, process_group

from leanq.client import LeanQClient
from leanq.producer.route import Timings
from leanq.queue.keys import Keys
from leanq.queue.settings import Settings

_DRAIN_S = 60.0
# Those of the nemeses that no worker can work through.
_OUTAGES = frozenset({"cut", "freeze", "restart", "promote", "forget"})


@dataclass(frozen=True)
class Plan:
    """How much, and what.

    ``requests`` and ``kills`` are reached in ``pace_s`` seconds if nothing holds them up, and in
    ``seconds`` at the latest. ``silence_s``: after which a client asks what became of a request.
    """

    requests: int
    kills: int
    pace_s: float
    seconds: float
    seed: int
    nemeses: Sequence[str] = tuple(NEMESES)
    workers: int = 8
    slots: int = 4
    clients: int = 3
    delay_s: float = 0.06
    lease_s: float = 2.0
    attempts: int = Settings.max_attempts
    silence_s: float = Timings().silence_s


@dataclass
class Outcome:
    """What a run came to; ``faults`` must be empty."""

    plan: Plan
    findings: Findings = field(default_factory=Findings)
    happened: Counter[str] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)
    wrecks: list[Wreck] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def recoveries(self, *, calm: bool) -> list[float]:
        """How long each killed worker's work lay idle, in seconds; ``calm``: without those that
        an outage of the server fell into."""
        took: list[float] = []
        for wreck in self.wrecks:
            until_s = wreck.at_s + (wreck.took_s or 0.0)
            hit = any(start <= until_s and wreck.at_s <= end for start, end in self.outages)
            if wreck.request_ids and wreck.took_s is not None and not (calm and hit):
                took.append(wreck.took_s)
        return took

    @property
    def poisoned_by_chance(self) -> float:
        """How many requests chance alone would poison: each attempt ends in a kill with the same
        probability per second, and the delays are uniform below their bound."""
        found, most = self.findings, self.plan.attempts
        charged = found.charged / max(1, found.attempted)
        return found.attempted * (2 * charged) ** most / (most + 1)

    def table(self) -> str:
        happened, counters = (
            ", ".join(f"{n:,} {name}" for name, n in sorted(counts.items()))
            for counts in (self.happened, self.counters)
        )
        held = sum(len(wreck.request_ids or ()) for wreck in self.wrecks)
        rows = [
            ("seed; seconds", f"{self.plan.seed}; {self.seconds:.0f}"),
            ("what happened", happened),
            ("what the servers counted", counters),
            *self.findings.rows(),
            ("attempts before a request is poisoned", str(self.plan.attempts)),
            ("poisoned by chance, expected", f"{self.poisoned_by_chance:.2g}"),
            (
                "requests that killed workers held",
                f"{held:,}",
            ),
            ("recovery from SIGKILL, all", quantiles(self.recoveries(calm=False))),
            ("… where the server was there all the time", quantiles(self.recoveries(calm=True))),
            ("**other faults**", "; ".join(self.faults) or "0"),
        ]
        return markdown(f"leases of {self.plan.lease_s:g} s", rows)


class Storm:
    """One run, from the first process to the last."""

    def __init__(self, plan: Plan, scene: Scene, folder: Path, group: int) -> None:
        self.plan, self.scene, self._folder, self._group = plan, scene, folder, group
        self.outcome = Outcome(plan)
        self._over = threading.Event()
        self._settings = scene.fleet.settings
        self._wrecks = Wrecks(self._settings)
        self._deadline_s = time.monotonic() + plan.seconds

    def rage(self) -> None:
        """Until there was enough of everything, or the time is over."""
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(job) for job in (self._kill, self._plague, self._look)]
            try:
                while not self._over.wait(0.2) and not any(job.done() for job in jobs):
                    if time.monotonic() > self._deadline_s:
                        self.outcome.faults.append("there was not enough of everything in time")
                        break
                    if self._enough():
                        break
            finally:
                self._over.set()
            for job in jobs:
                if error := job.exception():
                    self.outcome.faults.append(f"cut short: {error!r}")

    def _enough(self) -> bool:
        happened, plan = self.outcome.happened, self.plan
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(self._settings.url) as c:
            asked = int(c.hget(f"{Keys(self._settings.prefix).tag}:stats", "submitted") or 0)
            enough = asked >= plan.requests and happened["kill"] >= plan.kills
            return enough and all(happened[name] for name in plan.nemeses)
        return False

    def _kill(self) -> None:
        rng = random.Random(f"kill {self.plan.seed}")
        every_s = self.plan.pace_s / self.plan.kills
        next_s = time.monotonic()
        while not self._over.wait(max(0.0, next_s - time.monotonic())):
            for code in self.scene.fleet.replace_the_ended():
                self.outcome.happened[f"worker that ended by itself with {code}"] += 1
            if self._wrecks.kill(self.scene.fleet, rng):
                self.scene.fleet.hire()
                self.outcome.happened["kill"] += 1
                next_s += rng.expovariate(1 / every_s)
            else:
                next_s = time.monotonic() + 0.05

    def _plague(self) -> None:
        for name in rounds(self.plan.nemeses, self.scene.rng):
            if self._over.wait(self.scene.rng.uniform(0.1, 0.5) * self.plan.lease_s):
                return
            started_s = time.monotonic()
            NEMESES[name](self.scene)
            self.outcome.happened[name] += 1
            if name in _OUTAGES:
                self.outcome.outages.append((started_s, time.monotonic()))

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self._wrecks.look()

    def calm_down(self) -> None:
        """All workers finish, and leave in order."""
        faults = self.outcome.faults
        if any(codes := self.scene.clients.stop()):
            faults.append(f"clients ended with {codes}")
        with self._fault("what was in flight did not end"):
            until(self._quiet, _DRAIN_S)
        if any(codes := self.scene.fleet.stop(signal.SIGTERM)):
            faults.append(f"workers that were told to stop ended with {codes}")
        self._wrecks.look()
        self.outcome.wrecks = self._wrecks.all
        for stray in (name for name in self.outcome.happened if name.startswith("worker that")):
            # Without a server at its start, a worker says so and ends.
            if not stray.endswith(" 3"):
                faults.append(stray)
        self._account()

    def _quiet(self) -> bool:
        self.scene.fleet.replace_the_ended()
        status = look(self._settings)
        alive = self.scene.fleet.joined()
        idle = not (
            status.priorities or status.quarantined or any(row.held for row in status.workers)
        )
        return (
            self._wrecks.look() and idle and len(status.workers) == self.plan.workers == len(alive)
        )

    def _account(self) -> None:
        """Looks up every reply once more, and what is left behind."""
        faults, told = self.outcome.faults, self._folder / "keys.history"
        with redis.Redis.from_url(self._settings.url) as connection:
            journal = Journal(told, "keys")
            left: Counter[str] = Counter()
            keys = connection.scan_iter(count=1000)
            while some := list(islice(keys, 1000)):
                left.update(_look_up(connection, some, journal))
            journal.close()
            stats = connection.hgetall(f"{Keys(self._settings.prefix).tag}:stats")
        if left:
            faults.append(f"left on the server: {dict(left)}")
        if waiting := int(stats.get(b"waiting:echo", 0)):
            faults.append(f"waiting:echo counts {waiting}, and nothing waits")
        for counter in ("fenced", "released", "reaped"):
            self.outcome.counters[counter] = int(stats.get(counter.encode(), 0))
        for log in self._folder.glob("*.log"):
            if (text := log.read_text()).count("Traceback"):
                faults.append(f"{log.name}: {text[text.index('Traceback') :][:2000]}")
        if strays := members(self._group) - {self._group, *self.scene.pair.pids()}:
            faults.append(f"processes left: {strays}")
        files = [*self.scene.clients.journals, told, self._folder / "storm.history"]
        events = chain.from_iterable(map(read, files))
        found = self.outcome.findings = check(events, looked_up=True)
        faults += [f"{len(request_ids)} {name}" for name, request_ids in found.faults.items()]

    @contextlib.contextmanager
    def _fault(self, text: str) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            self.outcome.faults.append(text)


def _look_up(connection: redis.Redis, keys: list[bytes], journal: Journal) -> Counter[str]:
    """Tells the journal of the replies among the keys; what should not be there any more."""
    pipe = connection.pipeline(transaction=False)
    for key in keys:
        pipe.pttl(key)
    left: Counter[str] = Counter()
    replies: dict[str, bytes] = {}
    for key, ttl_ms in zip(keys, pipe.execute(), strict=True):
        kind, _, name = key.decode().partition("}:")[2].partition(":")
        if kind in ("phase", "runs"):
            # Indexed for good, by a long value under no name.
            left[key.decode()] += connection.hkeys(key) != [b""]
        elif kind == "req" and ttl_ms >= 0:
            replies[name] = key
        elif kind in ("inbox", "isolating"):
            left[f"{kind} for ever"] += ttl_ms == -1
        elif kind not in (
            "shape",
            "stats",
            "minutes",
            "environments",
            "fingerprints",
            "wakeup",
            "collect",
        ):
            left[key.decode()] += 1
    if replies:
        values: Any = connection.mget(list(replies.values()))
        rows = (reply_row(*pair) for pair in zip(replies, values, strict=True))
        journal.note("reply", *rows)
    return +left


def members(group: int) -> set[int]:
    """The processes of a group."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            if int(text.rpartition(")")[2].split()[2]) == group:
                found.add(int(stat.parent.name))
    return found


def storm(plan: Plan) -> Outcome:
    """A run of its own, with its own servers."""
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="leanq-soak-", dir="/tmp")
        folder = Path(stack.enter_context(made))
        group = stack.enter_context(process_group())
        pair = stack.enter_context(Pair(folder, group))
        settings = Settings(pair.url, lease_s=plan.lease_s, max_attempts=plan.attempts)
        fleet = Fleet(settings, folder, group, plan.slots)
        stack.callback(fleet.stop, signal.SIGKILL)
        for _ in range(plan.workers):
            fleet.hire()
        until(lambda: len(fleet.joined()) == plan.workers, _DRAIN_S)
        given = {
            "url": pair.url,
            "seed": plan.seed,
            "rate": plan.requests / plan.pace_s / plan.clients,
            "delay_s": plan.delay_s,
            "silence_s": plan.silence_s,
        }
        clients = Clients(given, plan.clients, folder, group)
        stack.callback(clients.kill)
        journal = Journal(folder / "storm.history", "storm")
        stack.callback(journal.close)
        rng = random.Random(f"plague {plan.seed}")
        run = Storm(plan, Scene(pair, fleet, clients, journal, rng), folder, group)
        try:
            run.rage()
            run.calm_down()
        except BaseException as error:
            error.add_note(f"seed {plan.seed}; {run.outcome.faults}")
            raise
    run.outcome.seconds = time.monotonic() - started_s
    return run.outcome


def deaths(count: int = 20, tasks: int = 5) -> list[float]:
    """Kills workers that hold ``tasks`` requests each, with leases as long as users have them; how
    long it took until another had taken all of them up, in seconds."""
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="leanq-soak-", dir="/tmp")
        folder = Path(stack.enter_context(made))
        group = stack.enter_context(process_group())
        pair = stack.enter_context(Pair(folder, group))
        settings = Settings(pair.url)
        doomed, others = (Fleet(settings, folder, group, n) for n in (tasks, count * tasks))
        for fleet in (doomed, others):
            stack.callback(fleet.stop, signal.SIGKILL)
        for _ in range(count):
            doomed.hire()
        until(lambda: len(doomed.joined()) == count, _DRAIN_S)
        with LeanQClient(settings) as client:
            for _ in range(count * tasks):
                client.echo(b"", 3600.0)
            until(lambda: all(row.held == tasks for row in look(settings).workers), _DRAIN_S)
            others.hire()
            until(lambda: len(others.joined()) == count + 1, _DRAIN_S)
            wrecks, rng = Wrecks(settings), random.Random(0)
            # One after another, so that they die at all moments of their leases.
            for _ in range(count):
                wrecks.kill(doomed, rng)
                wrecks.look()
                time.sleep(settings.lease_s / count)
            until(wrecks.look, 3 * settings.lease_s)
        others.stop(signal.SIGTERM)
    assert all(len(wreck.request_ids or ()) == tasks for wreck in wrecks.all)
    return [wreck.took_s for wreck in wrecks.all if wreck.took_s is not None]


def quantiles(took_s: Sequence[float]) -> str:
    if len(took_s) < 2:
        return f"of {len(took_s)}"
    cuts = statistics.quantiles(took_s, n=100, method="inclusive")
    return f"p50 {cuts[49]:.1f} s, p99 {cuts[98]:.1f} s, max {max(took_s):.1f} s, of {len(took_s)}"


def markdown(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join([f"| {title} | |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)])


def main() -> None:
    """Prints the tables; the exit code is 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000, help="at least so many")
    parser.add_argument("--kills", type=int, default=500, help="at least so many")
    parser.add_argument("--seconds", type=float, default=600.0, help="at most, for all of it")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--nemeses", type=lambda text: text.split(","), default=list(NEMESES))
    parser.add_argument("--attempts", type=int, default=Plan.attempts, help="LEANQ_MAX_ATTEMPTS")
    given = parser.parse_args()
    if unknown := set(given.nemeses) - set(NEMESES):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NEMESES)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.monotonic()
    took_s = deaths()
    rows = [("recovery from SIGKILL, holding five", quantiles(took_s))]
    print(markdown(f"leases of {Settings.lease_s:g} s", rows), end="\n\n", flush=True)
    # What is in flight has to end as well, and every reply to be looked up.
    left_s = given.seconds - (time.monotonic() - started_s) - 30.0
    plan = Plan(given.requests, given.kills, 0.85 * left_s, left_s, given.seed)
    outcome = storm(replace(plan, nemeses=given.nemeses, attempts=given.attempts))
    print(outcome.table())
    sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
