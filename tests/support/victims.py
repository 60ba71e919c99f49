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
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Self

import redis

from leanq.local import find_server
from leanq.producer.route import Timings
from leanq.queue.keys import Keys
from leanq.queue.settings import Settings
from support.cluster import free_ports
from support.fleets import until
from support.history import Journal, WritingClient, open_ends
from support.paths import ROOT, TESTS

Popen = subprocess.Popen[bytes]

# How long writes go on that a failover will forget.
_FORGET_S = 0.5
# By turns: what runs is given back at once, or may end.
_GRACES_S = ("1", "3")
_DRAIN_S = 60.0
_MOST_OPEN = 300
# Larger than what an inbox carries.
_LARGE_BYTES = 70_000


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
        self._process: Popen | None = None

    def start(self, primary: Node | None = None) -> None:
        self.folder.mkdir(exist_ok=True)
        options = f"--bind 127.0.0.1 --port {self.port} --unixsocket {self.socket} --save".split()
        options += ["", "--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always"]
        # Otherwise a replica is made to wait for others that may want the same data.
        options += ["--repl-diskless-sync-delay", "0", "--logfile", str(self.folder / "log")]
        if primary:
            options += ["--replicaof", "127.0.0.1", str(primary.port)]
        self._process = subprocess.Popen([str(find_server()), *options], process_group=self._group)
        until(self._serves)

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
        self.primary.call("CLIENT", "PAUSE", 10_000, "WRITE")
        self.catch_up()
        self.replica.call("REPLICAOF", "NO", "ONE")
        self._swap()
        self.replica.call("REPLICAOF", "127.0.0.1", self.primary.port)
        self.replica.call("CLIENT", "UNPAUSE")

    def forget(self) -> float:
        """A failover that loses what was written last: since when, at most."""
        since_s = self.catch_up()
        self.replica.call("REPLICAOF", "NO", "ONE")
        time.sleep(_FORGET_S)
        self.primary.kill()
        self._swap()
        shutil.rmtree(self.replica.folder)
        return since_s

    def rejoin(self) -> None:
        """The old primary comes back without its data, as the replica."""
        self.replica.start(self.primary)

    def catch_up(self) -> float:
        """Waits until the replica has all that the primary had at the time that is returned."""
        now_s = time.monotonic()
        offset = self.primary.replication()["master_repl_offset"]

        def caught_up() -> bool:
            said = self.replica.replication()
            up: bool = said["master_link_status"] == "up"
            return up and said["slave_repl_offset"] >= offset

        until(caught_up, 60.0)
        return now_s

    def _swap(self) -> None:
        self.primary, self.replica = self.replica, self.primary
        self._lead()

    def _lead(self) -> None:
        new = self._link.with_suffix(".new")
        new.symlink_to(self.primary.socket)
        new.replace(self._link)


class Fleet:
    """Workers as processes, as many as were hired. The nemesis that draws one takes care of it."""

    def __init__(self, settings: Settings, folder: Path, group: int, slots: int) -> None:
        self.settings, self._slots = settings, slots
        self._group, self._log = group, folder / "workers.log"
        self._graces = itertools.cycle(_GRACES_S)
        self._lock = threading.Lock()
        self._members: list[Popen] = []
        self._known: dict[int, str] = {}

    def hire(self, prelude: str = "") -> None:
        """Starts one more worker."""
        options = ["--driver", "echo", "--slots", str(self._slots), "--grace", next(self._graces)]
        worker = python(
            f"{prelude}from leanq.cli import main; main()",
            *("worker", *options),
            group=self._group,
            log=self._log,
            LEANQ_URL=self.settings.url,
            LEANQ_PREFIX=self.settings.prefix,
            LEANQ_LEASE_S=str(self.settings.lease_s),
            LEANQ_MAX_ATTEMPTS=str(self.settings.max_attempts),
        )
        self.put(worker)

    def put(self, worker: Popen) -> None:
        with self._lock:
            self._members.append(worker)

    def draw(self, rng: random.Random) -> tuple[Popen, str] | None:
        """Takes out one that has joined the queue, and says by which name; None without any."""
        with self._lock:
            joined = self.joined()
            found = [(worker, name) for worker in self._members if (name := joined.get(worker.pid))]
            if not found:
                return None
            drawn = rng.choice(found)
            self._members.remove(drawn[0])
            return drawn

    def joined(self) -> dict[int, str]:
        """The names of the workers that the queue knows, by process; without a server, those that
        it knew."""
        address, tag = self.settings.url, Keys(self.settings.prefix).tag
        with contextlib.suppress(redis.RedisError):
            # A server that is silent must not keep workers from being killed.
            with redis.Redis.from_url(address, socket_timeout=0.5) as connection:
                names = [name.decode() for name in connection.zrange(f"{tag}:workers", 0, -1)]
            self._known = {int(name.rsplit("-", 2)[1]): name for name in names}
        return self._known

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


def close(process: Popen, deadline_s: float = 30.0) -> int:
    """Waits for the end; the exit code."""
    assert process.stdin
    process.stdin.close()
    return process.wait(deadline_s)


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

        until(ready, _DRAIN_S)
        return killed

    def stop(self) -> list[int]:
        """Tells all to stop, and waits for what they wait for; their exit codes."""
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
        return [close(process, 120.0) for process in self._processes]

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
        code, log = "from support.victims import load; load()", self._folder / "clients.log"
        return python(code, json.dumps(load), group=self._group, log=log)


def load() -> None:
    """One client: asks at its rate until its standard input ends, then waits for what is open."""
    given = json.loads(sys.argv[1])
    who, path = given["who"], Path(given["journal"])
    WritingClient.timings = Timings(silence_s=given["silence_s"])
    told = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    rng = random.Random(f"{given['seed']} {who}")
    journal = Journal(path, who)
    with WritingClient(Settings(given["url"]), journal) as client:
        wait(client.take_over(open_ends(path)), _DRAIN_S)
        Clients.caught_up(path.parent, who).touch()
        open_: set[Future[bytes]] = set()
        asked, started_s = 0, time.monotonic()
        while not told.wait(0.02):
            open_ = {future for future in open_ if not future.done()}
            due = int((time.monotonic() - started_s) * given["rate"]) - asked
            requests = []
            for _ in range(min(due, _MOST_OPEN - len(open_))):
                request_id, asked = f"0-{who}-{asked}", asked + 1
                size = _LARGE_BYTES if rng.random() < 0.002 else rng.randrange(400)
                requests.append(
                    (
                        request_id,
                        f"{request_id} ".encode().ljust(size),
                        rng.random() * given["delay_s"],
                    )
                )
            open_.update(client.ask(requests))
        wait(open_, _DRAIN_S)
