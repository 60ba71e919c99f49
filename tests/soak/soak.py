"""The soak: what leanq guarantees, while everything goes wrong that can.

Clients send requests whose right answers are known, workers are killed all the time, and one
nemesis after another befalls the rest. Then the history is checked, and what was left behind.
The requests are echoes, or theorems for real Lean; the clients have one server and its replica, or
two such pairs with workers of their own, between which the clients' weights change all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import redis
from support.fleets import look, until_stalled
from support.producer.history import Findings, Journal, check, check_clusters, read, reply_row
from support.producer.nemeses import NEMESES, Scene, Wreck, Wrecks, rounds
from support.producer.victims import Clients, Fleet, Pair, process_group

from leanq.client import LeanQClient
from leanq.producer.route import ClientTimings
from leanq.queue.keys import Keys
from leanq.queue.settings import Settings

# Those of the nemeses that no worker can work through.
_OUTAGES = frozenset(
    {"cut", "half_open", "freeze", "restart", "promote", "forget", "server_clock", "slow_disk"}
)


@dataclass(frozen=True)
class Plan:
    """How much, and what.

    ``requests`` and ``kills`` are reached in ``pace_s`` seconds if nothing holds them up. After
    ``seconds`` the run ends with what it has reached, which its table says. ``silence_s``: after
    which a client asks what became of a request. ``driver``: of the workers, and so what is asked.
    ``workers``: for each of the ``clusters``.
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
    silence_s: float = ClientTimings().silence_s
    driver: str = "echo"
    clusters: int = 1


@dataclass
class Outcome:
    """What a run came to; ``faults`` must be empty, or ``journals`` is the folder with what all
    processes told."""

    plan: Plan
    findings: Findings = field(default_factory=Findings)
    happened: Counter[str] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)
    wrecks: list[Wreck] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    in_time: bool = True
    journals: Path | None = None

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
    def requeued_s(self) -> list[float]:
        """How long it took until the queue knew of each death, in seconds."""
        return [
            wreck.requeued_s
            for wreck in self.wrecks
            if wreck.request_ids and wreck.requeued_s is not None
        ]

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
            (
                "planned",
                f"{self.plan.requests:,} requests, {self.plan.kills:,} kills"
                + ("" if self.in_time else "; **not reached in time**"),
            ),
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
            ("… until its requests were requeued", quantiles(self.requeued_s)),
            ("… where the server was there all the time", quantiles(self.recoveries(calm=True))),
            ("**other faults**", "; ".join(self.faults) or "0"),
            *([("journals and logs, kept", str(self.journals))] if self.journals else []),
        ]
        return markdown(f"leases of {self.plan.lease_s:g} s", rows)


class Storm:
    """One run, from the first process to the last; ``scenes``: of each cluster, with the same
    clients."""

    def __init__(self, plan: Plan, scenes: Sequence[Scene], folder: Path, group: int) -> None:
        self.plan, self.scenes, self._folder, self._group = plan, scenes, folder, group
        self.outcome = Outcome(plan)
        self._clients = scenes[0].clients
        self._over = threading.Event()
        self._wrecks = [Wrecks(scene.fleet.settings) for scene in scenes]
        self._deadline_s = time.monotonic() + plan.seconds

    def rage(self) -> None:
        """Until there was enough of everything, or the time is over."""
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(job) for job in (self._kill, self._plague, self._look)]
            try:
                while not self._over.wait(0.2) and not any(job.done() for job in jobs):
                    if self._enough():
                        break
                    if time.monotonic() > self._deadline_s:
                        self._ran_out_of_time()
                        break
            finally:
                self._over.set()
            for job in jobs:
                if error := job.exception():
                    self.outcome.faults.append(f"cut short: {error!r}")

    def _ran_out_of_time(self) -> None:
        """Fewer requests are a slow machine's; a nemesis that never came was not tested."""
        self.outcome.in_time = False
        never = [name for name in self.plan.nemeses if not self.outcome.happened[name]]
        if never:
            self.outcome.faults.append(f"never happened: {', '.join(never)}")

    def _enough(self) -> bool:
        happened, plan = self.outcome.happened, self.plan
        with contextlib.suppress(redis.RedisError):
            asked = sum(int(stats(scene).get(b"submitted", 0)) for scene in self.scenes)
            enough = asked >= plan.requests and happened["kill"] >= plan.kills
            return enough and all(happened[name] for name in plan.nemeses)
        return False

    def _kill(self) -> None:
        rng = random.Random(f"kill {self.plan.seed}")
        every_s = self.plan.pace_s / self.plan.kills
        next_s = time.monotonic()
        while not self._over.wait(max(0.0, next_s - time.monotonic())):
            for scene in self.scenes:
                for code in scene.fleet.replace_the_ended():
                    self.outcome.happened[f"worker that ended by itself with {code}"] += 1
            which = rng.randrange(len(self.scenes))
            fleet = self.scenes[which].fleet
            # On a busy machine workers start slowly: a fleet that is never there shows nothing.
            if self._wrecks[which].kill(fleet, rng, least=self.plan.workers // 2):
                fleet.hire()
                self.outcome.happened["kill"] += 1
                next_s += rng.expovariate(1 / every_s)
            else:
                next_s = time.monotonic() + 0.05

    def _plague(self) -> None:
        rng = self.scenes[0].rng
        for name in rounds(self.plan.nemeses, rng):
            if self._over.wait(rng.uniform(0.1, 0.5) * self.plan.lease_s):
                return
            started_s = time.monotonic()
            NEMESES[name](rng.choice(self.scenes))
            self.outcome.happened[name] += 1
            if name in _OUTAGES:
                self.outcome.outages.append((started_s, time.monotonic()))

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self._all_recovered()

    def _all_recovered(self) -> bool:
        # All are looked at, whatever the first says.
        recovered = [wrecks.look() for wrecks in self._wrecks]
        return all(recovered)

    def calm_down(self) -> None:
        """All workers finish, and leave in order."""
        faults = self.outcome.faults
        if any(codes := self._clients.stop()):
            faults.append(f"clients ended with {codes}")
        with self._fault("what was in flight did not end"):
            until_stalled(self._quiet, self._settled)
        for scene in self.scenes:
            if any(codes := scene.fleet.stop(signal.SIGTERM)):
                faults.append(f"workers that were told to stop ended with {codes}")
        self._all_recovered()
        self.outcome.wrecks = [wreck for wrecks in self._wrecks for wreck in wrecks.all]
        for stray in (name for name in self.outcome.happened if name.startswith("worker that")):
            # Without a server at its start, a worker says so and ends.
            if not stray.endswith(" 3"):
                faults.append(stray)
        self._account()

    def _quiet(self) -> bool:
        return self._all_recovered() and all(map(self.is_quiet, self.scenes))

    def is_quiet(self, scene: Scene) -> bool:
        """Whether nothing is to be done there, and the queue knows its workers alone."""
        scene.fleet.replace_the_ended()
        status = look(scene.fleet.settings)
        busy = status.priorities or status.quarantined or any(row.held for row in status.workers)
        hired = len(status.workers) == self.plan.workers and scene.fleet.complete()
        return hired and not busy

    def _settled(self) -> list[tuple[int, int]]:
        """What each server has settled, and how many workers it has."""
        return [
            (int(stats(scene).get(b"settled", 0)), len(scene.fleet.joined()))
            for scene in self.scenes
        ]

    def _account(self) -> None:
        """Looks up every reply once more, and what is left behind."""
        faults = self.outcome.faults
        told, several = self._folder / "keys.history", len(self.scenes) > 1
        for number, scene in enumerate(self.scenes):
            journal = Journal(told, f"keys@{number}" if several else "keys")
            with redis.Redis.from_url(scene.fleet.settings.url) as connection:
                left: Counter[str] = Counter()
                keys = connection.scan_iter(count=1000)
                while some := list(islice(keys, 1000)):
                    left.update(look_up(connection, some, journal))
            journal.close()
            if left:
                faults.append(f"left on the server: {dict(left)}")
            counted = stats(scene)
            for name, count in counted.items():
                if name.startswith(b"waiting:") and int(count):
                    faults.append(f"{name.decode()} counts {count.decode()}, and nothing waits")
            for counter in ("fenced", "released", "reaped"):
                found = int(counted.get(counter.encode(), 0))
                self.outcome.counters[counter] = self.outcome.counters.get(counter, 0) + found
        for log in self._folder.rglob("*.log"):
            text = log.read_text()
            if preloaded := text.count("INFO preloaded"):
                self.outcome.happened["header preloaded"] += preloaded
            if "Traceback" in text:
                faults.append(f"{log.name}: {text[text.index('Traceback') :][:2000]}")
        pids = {pid for scene in self.scenes for pid in scene.pair.pids()}
        if strays := members(self._group) - {self._group, *pids}:
            faults.append(f"processes left: {strays}")
        files = [*self._clients.journals, told, self._folder / "storm.history"]
        events = chain.from_iterable(map(read, files))
        findings = (
            check_clusters(events, len(self.scenes)) if several else check(events, looked_up=True)
        )
        self.outcome.findings = findings
        faults += [f"{len(request_ids)} {name}" for name, request_ids in findings.faults.items()]

    @contextlib.contextmanager
    def _fault(self, text: str) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            self.outcome.faults.append(text)


def stats(scene: Scene) -> dict[bytes, bytes]:
    """What its server has counted."""
    settings = scene.fleet.settings
    with redis.Redis.from_url(settings.url) as connection:
        found: Any = connection.hgetall(f"{Keys(settings.prefix).tag}:stats")
        return dict(found)


def look_up(connection: redis.Redis, keys: list[bytes], journal: Journal) -> Counter[str]:
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
        elif kind in ("inbox", "isolating", "upload"):
            left[f"{kind} for ever"] += ttl_ms == -1
        elif kind not in (
            "shape",
            "stats",
            *("minutes", "accounts", "account"),
            "environments",
            "fingerprints",
            *("hot", "texts"),
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
        folder = Path(tempfile.mkdtemp(prefix="leanq-soak-", dir="/tmp"))
        group = stack.enter_context(process_group())
        fleets: list[tuple[Pair, Fleet]] = []
        for number in range(plan.clusters):
            place = folder / f"cluster{number}"
            place.mkdir()
            pair = stack.enter_context(Pair(place, group))
            settings = Settings(pair.url, lease_s=plan.lease_s, max_attempts=plan.attempts)
            fleet = Fleet(settings, place, group, plan.slots, plan.driver)
            stack.callback(fleet.stop, signal.SIGKILL)
            for _ in range(plan.workers):
                fleet.hire()
            fleets.append((pair, fleet))
        for _, fleet in fleets:
            until_stalled(lambda fleet=fleet: len(fleet.joined()) == plan.workers, fleet.progress)
        given = {
            "urls": [pair.url for pair, _ in fleets],
            "shards": settings.shards,
            "seed": plan.seed,
            "rate": plan.requests / plan.pace_s / plan.clients,
            "delay_s": plan.delay_s,
            "silence_s": plan.silence_s,
            "lean": plan.driver != "echo",
        }
        clients = Clients(given, plan.clients, folder, group)
        stack.callback(clients.kill)
        until_stalled(clients.all_began, clients.progress)
        rng = random.Random(f"plague {plan.seed}")
        scenes: list[Scene] = []
        for number, (pair, fleet) in enumerate(fleets):
            who = f"storm@{number}" if plan.clusters > 1 else "storm"
            journal = Journal(folder / "storm.history", who)
            stack.callback(journal.close)
            scenes.append(Scene(pair, fleet, clients, journal, rng))
        run = Storm(plan, scenes, folder, group)
        try:
            run.rage()
            run.calm_down()
        except BaseException as error:
            error.add_note(f"seed {plan.seed}; {run.outcome.faults}; journals: {folder}")
            raise
    if run.outcome.faults:
        run.outcome.journals = folder
    else:
        shutil.rmtree(folder)
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
        until_stalled(lambda: len(doomed.joined()) == count, doomed.progress)
        with LeanQClient(settings) as client:
            for _ in range(count * tasks):
                client.echo(b"", 3600.0)
            until_stalled(
                lambda: all(row.held == tasks for row in look(settings).workers), doomed.progress
            )
            others.hire()
            until_stalled(lambda: len(others.joined()) == count + 1, others.progress)
            wrecks, rng = Wrecks(settings), random.Random(0)
            # One after another, so that they die at all moments of their leases.
            for _ in range(count):
                wrecks.kill(doomed, rng)
                wrecks.look()
                time.sleep(settings.lease_s / count)
            until_stalled(wrecks.look, wrecks.recovered)
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
    parser.add_argument("--driver", choices=("echo", "lean", "server"), default="echo")
    parser.add_argument("--clusters", type=int, default=1)
    parser.add_argument("--workers", type=int, default=Plan.workers, help="of each cluster")
    parser.add_argument("--slots", type=int, default=Plan.slots, help="of each worker")
    parser.add_argument("--lease", type=float, default=Plan.lease_s, help="in seconds")
    given = parser.parse_args()
    if unknown := set(given.nemeses) - set(NEMESES):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NEMESES)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.monotonic()
    if given.driver == "echo" and given.clusters == 1:
        took_s = deaths()
        rows = [("recovery from SIGKILL, holding five", quantiles(took_s))]
        print(markdown(f"leases of {Settings.lease_s:g} s", rows), end="\n\n", flush=True)
    # What is in flight has to end as well, and every reply to be looked up.
    left_s = given.seconds - (time.monotonic() - started_s) - 30.0
    plan = Plan(
        given.requests,
        given.kills,
        0.85 * left_s,
        left_s,
        given.seed,
        given.nemeses,
        given.workers,
        given.slots,
        lease_s=given.lease,
        attempts=given.attempts,
        driver=given.driver,
        clusters=given.clusters,
    )
    outcome = storm(plan)
    print(outcome.table())
    sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
