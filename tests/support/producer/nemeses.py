"""What befalls them. A nemesis is a function that does its harm once, and returns when the run can
be expected to go on by itself. It raises where the harm could not be done, or where its victim
misbehaved.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import redis

from leanq.queue.keys import Keys
from leanq.queue.results import is_record
from leanq.queue.settings import Settings
from support.fleets import until_stalled
from support.producer.history import Journal
from support.producer.troubled_machine import COMPILER
from support.producer.victims import Clients, Fleet, Pair, Popen, close

# How long memory stays full, and at most until a client has met that.
_FULL_S, _MOST_FULL_S = 2.0, 30.0
# What a worker with a broken clock begins with: any look at the time tells another day.
_DERANGED = (
    "import random, time; now = time.time; "
    "time.time = lambda: now() + random.uniform(-1, 1) * 86400; "
)


@dataclass
class Wreck:
    """A worker that was killed, what it held, and how long that lay idle; on a queue that is too
    long it waits on after ``requeued_s``, behind what is more urgent."""

    worker: str
    at_s: float
    request_ids: list[str] | None = None
    requeued_s: float | None = None
    took_s: float | None = None


class Wrecks:
    """Kills workers, and looks from outside when their work ended or was taken up elsewhere."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._tag = settings, Keys(settings.prefix).tag
        self._open: list[Wreck] = []
        self.all: list[Wreck] = []

    def kill(self, fleet: Fleet, rng: random.Random, least: int = 1) -> bool:
        """Kills one of at least so many; whether there were."""
        drawn = fleet.draw(rng, least)
        if drawn is None:
            return False
        worker, name = drawn
        wreck = Wreck(name, time.monotonic())
        worker.kill()
        close(worker)
        self._open.append(wreck)
        self.all.append(wreck)
        return True

    def look(self) -> bool:
        """Whether all have been recovered."""
        with contextlib.suppress(redis.RedisError), self._connection() as connection:
            for wreck in list(self._open):
                work = f"{self._tag}:processing:{wreck.worker}"
                if wreck.request_ids is None:
                    # The server may have been away when the worker was killed.
                    wreck.request_ids = [
                        request_id.decode() for request_id in connection.zrange(work, 0, -1)
                    ]
                if wreck.requeued_s is None and not connection.exists(work):
                    wreck.requeued_s = time.monotonic() - wreck.at_s
                if self._recovered(connection, wreck.worker, wreck.request_ids):
                    wreck.took_s = time.monotonic() - wreck.at_s
                    self._open.remove(wreck)
        return not self._open

    def recovered(self) -> int:
        """How many have been."""
        return sum(wreck.took_s is not None for wreck in self.all)

    def _recovered(self, connection: redis.Redis, worker: str, request_ids: Sequence[str]) -> bool:
        if connection.exists(f"{self._tag}:processing:{worker}"):
            return False
        pipe = connection.pipeline(transaction=False)
        for request_id in request_ids:
            pipe.get(f"{self._tag}:req:{request_id}")
            pipe.hget(f"{self._tag}:phase", request_id)
        found = iter(pipe.execute())
        ended_or = (
            (data is None or not is_record(data), place)
            for data, place in zip(found, found, strict=True)
        )
        return all(
            ended or ((place or b"").startswith(b"l") and worker.encode() not in place.split(b"\0"))
            for ended, place in ended_or
        )

    def _connection(self) -> redis.Redis:
        return redis.Redis.from_url(self._settings.url)


@dataclass
class Scene:
    """Where it happens."""

    pair: Pair
    fleet: Fleet
    clients: Clients
    journal: Journal
    rng: random.Random

    def drawn(self) -> tuple[Popen, str]:
        """One of the workers, as soon as there is one."""
        found: list[tuple[Popen, str]] = []

        def draw() -> bool:
            found.extend(filter(None, [self.fleet.draw(self.rng)]))
            return bool(found)

        until_stalled(draw, self.fleet.progress)
        return found[0]


def stop(scene: Scene) -> None:
    """A machine sleeps until its work was given to others, and wakes up."""
    worker, name = scene.drawn()
    worker.send_signal(signal.SIGSTOP)
    try:
        until_stalled(lambda: name not in scene.fleet.joined().values(), scene.clients.told_bytes)
    finally:
        worker.send_signal(signal.SIGCONT)
        scene.fleet.put(worker)


def term(scene: Scene) -> None:
    """A preemption: the worker gives back what it holds, and leaves in order."""
    worker, _ = scene.drawn()
    scene.fleet.hire()
    _dismiss(worker)


def clock(scene: Scene) -> None:
    """A worker is replaced by one whose clock is deranged."""
    worker, _ = scene.drawn()
    scene.fleet.hire(_DERANGED)
    _dismiss(worker)


def _dismiss(worker: Popen) -> None:
    worker.terminate()
    code = close(worker)
    assert code == 0, f"a worker that was told to stop ended with {code}"


def cut(scene: Scene) -> None:
    """All connections of clients and workers are cut."""
    scene.pair.primary.call("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")


def half_open(scene: Scene) -> None:
    """Connections stay open for longer than a lease. What is sent arrives, and no answer does."""
    with scene.pair.through_proxy() as proxy:
        until_stalled(
            lambda: proxy.connections >= len(scene.fleet.joined()), lambda: proxy.connections
        )
        # Those that come later are silent as well, as behind a firewall that has lost its table.
        proxy.silent = True
        time.sleep(1.5 * scene.fleet.settings.lease_s)


def freeze(scene: Scene) -> None:
    """The server answers no process for longer than a lease."""
    scene.pair.primary.send(signal.SIGSTOP)
    try:
        time.sleep(1.5 * scene.fleet.settings.lease_s)
    finally:
        scene.pair.primary.send(signal.SIGCONT)


def restart(scene: Scene) -> None:
    """The server dies, and comes back with its data."""
    scene.pair.restart()


def promote(scene: Scene) -> None:
    """The replica takes over, and those connected have to find out."""
    scene.pair.promote()


def forget(scene: Scene) -> None:
    """The server dies, and the replica that takes over lacks the last writes."""
    scene.journal.note("forgot", scene.pair.forget())
    scene.pair.rejoin()


def memory(scene: Scene) -> None:
    """The server's memory is full for a while. On a busy machine no client may send anything for
    seconds, and it stays full until one has."""
    primary = scene.pair.primary
    refused, until_s = primary.refusals(), time.monotonic() + _MOST_FULL_S
    primary.call("CONFIG", "SET", "maxmemory", 1)
    time.sleep(_FULL_S)
    while primary.refusals() == refused and time.monotonic() < until_s:
        time.sleep(0.1)
    primary.call("CONFIG", "SET", "maxmemory", 0)


def server_clock(scene: Scene) -> None:
    """The server's clock jumps, and stays there until it jumps again. A killed worker's lease may
    end by the time before; replies are not to end."""
    lease_s = scene.fleet.settings.lease_s
    scene.pair.primary.machine.set_clock(scene.rng.uniform(-50, 10) * lease_s)
    time.sleep(1.5 * lease_s)


def slow_disk(scene: Scene) -> None:
    """The server's disk takes up to a lease for what the server waits for before each answer."""
    machine, lease_s = scene.pair.primary.machine, scene.fleet.settings.lease_s
    machine.slow_down(scene.rng.uniform(0.02, 1.0) * lease_s)
    try:
        time.sleep(3 * lease_s)
    finally:
        machine.slow_down(0.0)


def client(scene: Scene) -> None:
    """A client is killed, and its successor collects its replies."""
    killed = scene.clients.replace(scene.rng)
    scene.journal.note("killed", (killed,))


NEMESES: dict[str, Callable[[Scene], None]] = {
    nemesis.__name__: nemesis
    for nemesis in (
        stop,
        term,
        clock,
        cut,
        half_open,
        freeze,
        restart,
        promote,
        forget,
        memory,
        server_clock,
        slow_disk,
        client,
    )
    # A library is made for both of them.
    if COMPILER or nemesis not in (server_clock, slow_disk)
}
"""All but the SIGKILL of workers, which goes on beside them."""


def rounds(names: Sequence[str], rng: random.Random) -> Iterator[str]:
    """The names for ever, all of them in each round, in another order."""
    for _ in itertools.count():
        yield from rng.sample(names, len(names))
