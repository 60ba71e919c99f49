"""Whom it befalls: a pair of servers, a fleet of workers, and clients, all of them processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, Self, TypeVar

import redis

from leanq.errors import UnavailableError
from leanq.lean.environment import open_environment
from leanq.producer.route import ClientTimings
from leanq.queue.keys import Keys
from leanq.queue.settings import Settings
from support.cluster import free_ports
from support.fleets import until_stalled
from support.paths import ROOT, TESTS
from support.producer.history import (
    Journal,
    Question,
    WritingClient,
    WritingClusterClient,
    open_ends,
)
from support.producer.troubled_machine import TroubledMachine
from support.proxy import Proxy, proxy_in_thread
from support.servers import find_server

Popen = subprocess.Popen[bytes]
_T = TypeVar("_T")

# How long writes go on that a failover will forget.
_FORGET_S = 0.5
# By turns: what runs is given back at once, or may end.
_GRACES_S = ("1", "3")
_DRAIN_S = 60.0
_MOST_OPEN = 300
# Larger than what a script or an inbox carries; one in fifty is.
_LARGE_BYTES = 70_000
_LEAN_HEADER = "prelude\nimport Core\n"


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """A group for processes that are to end with this one, however it ends."""
    watch = "read -r _; kill -KILL 0"
    watchdog = subprocess.Popen(["/bin/sh", "-c", watch], stdin=subprocess.PIPE, process_group=0)
    try:
        yield watchdog.pid
    finally:
        watchdog.communicate(timeout=20)


def python(code: str, *arguments: str, group: int, log: Path, **environ: str) -> Popen:
    """A Python program of this folder or of leanq, with nothing of the user's settings."""
    inherited = {name: text for name, text in os.environ.items() if name[:6] != "LEANQ_"}
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=inherited | {"PYTHONPATH": f"{TESTS}:{ROOT}"} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            process_group=group,
        )


class Node:
    """One server, whose data outlives it."""

    def __init__(self, folder: Path, group: int) -> None:
        self.folder, self._group = folder, group
        self.socket = folder / "node.sock"
        (self.port,) = free_ports(1)
        self.machine = TroubledMachine(folder)
        self._process: Popen | None = None

    def start(self, primary: Node | None = None) -> None:
        self.folder.mkdir(exist_ok=True)
        options = f"--bind 127.0.0.1 --port {self.port} --unixsocket {self.socket} --save".split()
        options += ["", "--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always"]
        # Otherwise a replica is made to wait for others that may want the same data.
        options += ["--repl-diskless-sync-delay", "0", "--logfile", str(self.folder / "log")]
        if primary:
            options += ["--replicaof", "127.0.0.1", str(primary.port)]
        self._process = subprocess.Popen(
            [str(find_server()), *options],
            env={**os.environ, **self.machine.environ},
            process_group=self._group,
        )
        until_stalled(self._serves, lambda: cpu_ticks(self.pid))

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def send(self, number: signal.Signals) -> None:
        assert self._process
        self._process.send_signal(number)

    def call(self, *words: object) -> Any:
        with redis.Redis(unix_socket_path=str(self.socket)) as connection:
            return connection.execute_command(*words)

    def refusals(self) -> int:
        """How many calls it has refused, since it has no memory for them."""
        with redis.Redis(unix_socket_path=str(self.socket)) as connection:
            said: dict[str, dict[str, int]] = connection.info("errorstats")
            return said.get("errorstat_OOM", {}).get("count", 0)

    def replication(self) -> dict[str, Any]:
        with redis.Redis(unix_socket_path=str(self.socket)) as connection:
            said: dict[str, Any] = connection.info("replication")
            return said

    def _serves(self) -> bool:
        assert self._process
        assert self._process.poll() is None, f"the server ended: {self.folder}/log"
        try:
            return bool(self.call("PING"))
        except redis.RedisError:
            # Not there yet, or still loading what it knew.
            return False


class Pair:
    """A primary and its replica. One path leads to whichever is the primary."""

    def __init__(self, folder: Path, group: int) -> None:
        self._link = folder / "server.sock"
        self.url = f"unix://{self._link}"
        self.primary, self.replica = Node(folder / "a", group), Node(folder / "b", group)

    def __enter__(self) -> Self:
        self.primary.start()
        self.replica.start(self.primary)
        self._lead()
        return self

    def __exit__(self, *_: object) -> None:
        self.primary.kill()
        self.replica.kill()

    def pids(self) -> set[int]:
        return {self.primary.pid, self.replica.pid}

    def restart(self) -> None:
        """kill -9, and back with its data."""
        self.primary.kill()
        self.primary.start()

    def promote(self) -> None:
        """An orderly failover: nothing is lost, and those connected are left with the old one."""
        self.catch_up()
        # Longer than all of this may take: what is written after it would be lost unseen.
        self.primary.call("CLIENT", "PAUSE", 3_600_000, "WRITE")
        self.catch_up()
        self.replica.call("REPLICAOF", "NO", "ONE")
        self._swap()
        self.replica.call("REPLICAOF", "127.0.0.1", self.primary.port)
        self.replica.call("CLIENT", "UNPAUSE")

    def forget(self) -> tuple[float, float]:
        """A failover that loses what was written last: since when, at most, and when the old
        primary had ended and the new one was not to be reached yet."""
        since_s = self.catch_up()
        self.replica.call("REPLICAOF", "NO", "ONE")
        time.sleep(_FORGET_S)
        self.primary.kill()
        ended_s = time.monotonic()
        self._swap()
        shutil.rmtree(self.replica.folder)
        return since_s, ended_s

    def rejoin(self) -> None:
        """The old primary comes back without its data, as the replica."""
        self.replica.start(self.primary)

    def catch_up(self) -> float:
        """Waits until the replica has all that the primary had at the time that is returned."""
        now_s = time.monotonic()
        offset = self.primary.replication()["master_repl_offset"]

        def reached() -> int:
            said = self.replica.replication()
            # What a full resynchronisation has loaded counts in none of the offsets.
            return int(said["slave_repl_offset"]) if said["master_link_status"] == "up" else -1

        until_stalled(lambda: reached() >= offset, lambda: (reached(), cpu_ticks(self.replica.pid)))
        return now_s

    @contextlib.contextmanager
    def through_proxy(self) -> Iterator[Proxy]:
        """All connections that are made in this block lead through a proxy; those that are there
        are cut, and those through the proxy with the end of the block."""
        place = self._link.with_name("proxy.sock")
        with proxy_in_thread(self.primary.socket, place) as proxy:
            self._lead(place)
            try:
                self.primary.call("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")
                yield proxy
            finally:
                self._lead()
        place.unlink()

    def _swap(self) -> None:
        self.primary, self.replica = self.replica, self.primary
        self._lead()

    def _lead(self, place: Path | None = None) -> None:
        new = self._link.with_suffix(".new")
        new.symlink_to(place or self.primary.socket)
        new.replace(self._link)


class Fleet:
    """Workers as processes, as many as were hired. The nemesis that draws one takes care of it."""

    def __init__(
        self, settings: Settings, folder: Path, group: int, slots: int, driver: str = "echo"
    ) -> None:
        self.settings, self._slots = settings, slots
        self._driver, self._environ = ["--driver", driver], dict[str, str]()
        if driver != "echo":
            # Not beside the server's socket, whose folder a sandbox hides.
            cache = os.environ.get("LEANQ_CACHE", str(folder.with_name("cache")))
            self._environ = {"LEANQ_CACHE": cache}
            # Lean's library is compiled here, and not by each worker.
            open_environment("default", None, environ=self._environ)
        self._group, self._log = group, folder / "workers.log"
        self._graces = itertools.cycle(_GRACES_S)
        self._lock = threading.Lock()
        self._members: list[Popen] = []
        self._known: dict[int, str] = {}

    def hire(self, prelude: str = "") -> None:
        """Starts one more worker."""
        options = [*self._driver, "--slots", str(self._slots), "--grace", next(self._graces)]
        worker = python(
            f"{prelude}from leanq.cli import main; main()",
            *("worker", *options),
            group=self._group,
            log=self._log,
            LEANQ_URL=self.settings.url,
            LEANQ_PREFIX=self.settings.prefix,
            LEANQ_SHARDS=str(self.settings.shards),
            LEANQ_LEASE_S=str(self.settings.lease_s),
            LEANQ_MAX_ATTEMPTS=str(self.settings.max_attempts),
            **self._environ,
        )
        self.put(worker)

    def put(self, worker: Popen) -> None:
        with self._lock:
            self._members.append(worker)

    def draw(self, rng: random.Random, least: int = 1) -> tuple[Popen, str] | None:
        """Takes out one that has joined the queue, and says by which name; None where fewer than
        ``least`` have."""
        with self._lock:
            joined = self.joined()
            found = [(worker, name) for worker in self._members if (name := joined.get(worker.pid))]
            if len(found) < least:
                return None
            drawn = rng.choice(found)
            self._members.remove(drawn[0])
            return drawn

    def joined(self) -> dict[int, str]:
        """The names of the workers that the queue knows, by process; without a server, those that
        it knew."""
        with contextlib.suppress(redis.RedisError):
            self._known = {int(name.rsplit("-", 2)[1]): name for name in self._names()}
        return self._known

    def complete(self) -> bool:
        """Whether the queue knows all that were hired, and no others. One that still starts would
        be ended by the signal that tells others to leave, and one that was killed has not left."""
        with self._lock:
            return self.joined().keys() == {worker.pid for worker in self._members}

    def _names(self) -> list[str]:
        # A server that is silent must not keep workers from being killed.
        with redis.Redis.from_url(self.settings.url, socket_timeout=0.5) as connection:
            key = f"{Keys(self.settings.prefix).tag}:workers"
            return [name.decode() for name in connection.zrange(key, 0, -1)]

    def progress(self) -> tuple[int, int]:
        """How many have joined, and what all of them had of the CPU until then."""
        with self._lock:
            members = list(self._members)
        return len(self.joined()), sum(cpu_ticks(worker.pid) for worker in members)

    def replace_the_ended(self) -> list[int]:
        """Hires for those that ended by themselves, as at a start without a server; their exit
        codes."""
        with self._lock:
            ended = [worker for worker in self._members if worker.poll() is not None]
            for worker in ended:
                self._members.remove(worker)
        for worker in ended:
            close(worker)
            self.hire()
        return [worker.returncode for worker in ended]

    def stop(self, signal_: signal.Signals) -> list[int]:
        """Ends all; their exit codes."""
        with self._lock:
            ended, self._members = self._members, []
        for worker in ended:
            worker.send_signal(signal_)
        return [close(worker) for worker in ended]


def cpu_ticks(pid: int) -> int:
    """What a process has had of the CPU, in clock ticks; 0 where it is no more."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def close(process: Popen) -> int:
    """Waits for the end, as long as it has work; the exit code."""
    assert process.stdin
    process.stdin.close()
    until_stalled(lambda: process.poll() is not None, lambda: cpu_ticks(process.pid))
    return process.returncode


def wait_for_all(futures: set[Future[_T]]) -> None:
    """Waits as long as any of them ends within a minute."""
    left = futures
    while left:
        ended, left = wait(left, _DRAIN_S, return_when=FIRST_COMPLETED)
        if not ended:
            return


class Clients:
    """Clients as processes: a line of successors each, who all write into one journal."""

    def __init__(self, load: dict[str, object], count: int, folder: Path, group: int) -> None:
        self._load, self._folder, self._group = load, folder, group
        self.journals = [folder / f"client{number}.history" for number in range(count)]
        self._generations = [0] * count
        self._processes = [self._start(number) for number in range(count)]

    def replace(self, rng: random.Random) -> str:
        """Kills one; returns who it was when its successor has collected what was left open."""
        number = rng.randrange(len(self._processes))
        killed = self._who(number)
        self._processes[number].kill()
        close(self._processes[number])
        self._generations[number] += 1
        self._processes[number] = self._start(number)
        caught_up = self.caught_up(self._folder, self._who(number))

        def ready() -> bool:
            assert self._processes[number].poll() is None, "a client ended by itself"
            return caught_up.exists()

        until_stalled(ready, lambda: (self.told_bytes(), cpu_ticks(self._processes[number].pid)))
        return killed

    def told_bytes(self) -> int:
        """The size of all journals, which grows as long as anything ends."""
        return sum(path.stat().st_size for path in self.journals if path.exists())

    def progress(self) -> int:
        """What all of them had of the CPU."""
        return sum(cpu_ticks(process.pid) for process in self._processes)

    def all_began(self) -> bool:
        """Whether all have reached the server."""
        whos = (self._who(number) for number in range(len(self._processes)))
        return all(self.caught_up(self._folder, who).exists() for who in whos)

    def stop(self) -> list[int]:
        """Tells all to stop, and waits for what they wait for; their exit codes."""
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
        return [close(process) for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            close(process)

    @staticmethod
    def caught_up(folder: Path, who: str) -> Path:
        """The file by which a client says that it knows the ends of its predecessor's requests."""
        return folder / f"{who}.caught-up"

    def _who(self, number: int) -> str:
        return f"client{number}.{self._generations[number]}"

    def _start(self, number: int) -> Popen:
        load = {"who": self._who(number), "journal": str(self.journals[number])} | self._load
        log = self._folder / "clients.log"
        code = "from support.producer.victims import load; load()"
        return python(code, json.dumps(load), group=self._group, log=log)


def load() -> None:
    """One client: asks at its rate until its standard input ends, then waits for what is open."""
    given = json.loads(sys.argv[1])
    who, path = given["who"], Path(given["journal"])
    WritingClient.timings = ClientTimings(silence_s=given["silence_s"])
    told = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    rng = random.Random(f"{given['seed']} {who}")
    journal = Journal(path, who)
    clusters = [Settings(url, shards=given["shards"]) for url in given["urls"]]
    weighs = len(clusters) > 1
    with _connected(clusters, journal, path) as client:
        wait_for_all(set(client.take_over(open_ends(path))))
        Clients.caught_up(path.parent, who).touch()
        open_: set[Future[Any]] = set()
        asked, started_s = 0, time.monotonic()
        while not told.wait(0.02):
            if weighs and rng.random() < 0.02:
                # Each of them may have all, or nothing.
                weights = rng.choice([(0, 1), (1, 0), (1, 1), (1, 5), (5, 1)])
                client.set_weights(dict(zip(given["urls"], weights, strict=True)))
            open_ = {future for future in open_ if not future.done()}
            due = int((time.monotonic() - started_s) * given["rate"]) - asked
            questions: list[Question] = []
            for _ in range(min(due, _MOST_OPEN - len(open_))):
                request_id = f"{asked % clusters[0].shards}-{who}-{asked}"
                ask = _lean if given["lean"] else _echo
                questions.append(ask(request_id, rng, given["delay_s"]))
                asked += 1
            open_.update(client.ask(questions))
        wait_for_all(open_)


def _connected(clusters: Sequence[Settings], journal: Journal, path: Path) -> WritingClient:
    """A client refuses to begin where no server answers in time, also on a busy machine, and is
    then started again."""
    while True:
        try:
            if len(clusters) > 1:
                return WritingClusterClient(clusters, journal, path)
            return WritingClient(clusters[0], journal)
        except UnavailableError:
            time.sleep(0.1)


def _echo(request_id: str, rng: random.Random, delay_s: float) -> Question:
    size = _LARGE_BYTES if rng.random() < 0.02 else rng.randrange(400)
    payload = f"{request_id} ".encode().ljust(size)
    return Question(request_id, payload, rng.random() * delay_s)


def _lean(request_id: str, rng: random.Random, _: float) -> Question:
    """A theorem that no other request states. If its proof is wrong, Lean says so of its names."""
    name, wrong, audit = f"n{rng.getrandbits(48)}", rng.random() < 0.3, rng.random() < 0.1
    proof = "theorem t (p q : Prop) ({0} : p) (g : q) : {1} := by\n  exact {0}\n"
    code = _LEAN_HEADER + proof.format(name, "q" if wrong else "p")
    if wrong:
        return Question(request_id, f"rejected {name}".encode(), code=code, audit=audit)
    right = b"accepted" if audit else b"unjudged"
    return Question(request_id, right, code=code, audit=audit)
