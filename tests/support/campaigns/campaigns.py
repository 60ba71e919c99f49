"""Campaigns as jobs in tests: a desk to submit them at, and a driver that gives verdicts."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import redis

from leanq.campaigns.results import read_results
from leanq.campaigns.rq_queue import Campaigns, CampaignStatus
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import Settings
from support.fleets import Recorder, until
from support.lean.sandboxes import children, running
from support.servers import Server
from support.terminals import Process, Terminal, ended

# Within which a campaign has to be resumed after its coordinator has died.
RESUMED_S = 30.0


class Judge(Recorder):
    """Gives the verdict that a text begins with, and ``accepted`` when it is asked again."""

    def __init__(self) -> None:
        super().__init__("default")

    async def run(self, request: Request) -> Reply:
        code = request.code.encode()
        self.started.append(code)
        again = self.started.count(code) > 1
        return Reply("accepted" if again else request.code.split()[0])


class Desk:
    """A user who submits campaigns to RQ and follows them."""

    def __init__(self, terminal: Terminal, settings: Settings, rq_url: str | None = None) -> None:
        self.terminal, self.folder = terminal, terminal.folder
        terminal.use(settings)
        if rq_url:
            terminal.environ["LEANQ_RQ_URL"] = rq_url
        self.connection = redis.Redis.from_url(rq_url or settings.url)
        self.campaigns = Campaigns(self.connection, settings.prefix)
        self._names = iter(f"c{number}" for number in range(100))

    def run(self, *arguments: str) -> str:
        """The output of a command, which has to succeed."""
        done = self.terminal.run("campaign", *arguments)
        assert done.code == 0, done
        return done.out

    def send(self, *codes: str, options: tuple[str, ...] = (), environment: str = "echo") -> str:
        """Submits a campaign over these texts; its id."""
        name = next(self._names)
        rows = (json.dumps({"id": n, "code": code}) for n, code in enumerate(codes))
        data = self.terminal.file(f"{name}.jsonl", "\n".join(rows))
        out = str(self.folder / f"{name}.out")
        return self.run("submit", data, "--out", out, "--env", environment, *options).strip()

    def look(self, id_: str) -> CampaignStatus:
        return self.campaigns.show(id_)

    def reaches(self, id_: str, *states: str, deadline_s: float = RESUMED_S) -> CampaignStatus:
        """Waits until the campaign is in one of these states."""
        try:
            until(lambda: self.look(id_).state in states, deadline_s)
        except AssertionError:
            raise AssertionError(f"{self.look(id_)} was to be {states}") from None
        return self.look(id_)

    def results(self, id_: str) -> list[dict[str, Any]]:
        return list(read_results(self.look(id_).campaign.out))

    def start_worker(self) -> Process:
        """Starts a ``leanq campaign worker`` and waits until RQ knows it."""
        before = self._workers()
        worker = self.terminal.start("campaign", "worker", stdout=subprocess.DEVNULL)
        until(lambda: self._workers() > before or worker.poll() is not None)
        assert worker.poll() is None, ended(worker)
        return worker

    def _workers(self) -> int:
        return int(self.connection.scard(f"rq:workers:{self.campaigns.queue.name}"))  # type: ignore[arg-type]


def coordinator_of(worker: Process, *, after: int = 0) -> int:
    """The pid of a worker's coordinator, once there is one that is not ``after``."""
    found: list[int] = []

    def begun() -> bool:
        found[:] = [pid for pid in children(worker.pid) if pid != after]
        return bool(found)

    until(begun, RESUMED_S)
    return found[0]


def has_ended(pid: int) -> bool:
    return not running(pid)


def stop_worker(worker: Process) -> str:
    """Stops a worker with SIGTERM; returns what it printed to standard error."""
    worker.send_signal(signal.SIGTERM)
    done = ended(worker)
    assert done.code == 0, done
    return done.err


def start_again(server: Server) -> None:
    """Starts a persistent server again, and waits until it has loaded its data."""
    server.start()

    def loaded() -> bool:
        with redis.Redis.from_url(server.settings.url) as connection:
            try:
                return bool(connection.ping())
            except redis.exceptions.BusyLoadingError:
                return False

    until(loaded)


@contextlib.contextmanager
def desk_at(terminal: Terminal, settings: Settings, rq_url: str | None = None) -> Iterator[Desk]:
    """A desk; what it leaves in RQ is removed."""
    desk = Desk(terminal, settings, rq_url)
    with contextlib.closing(desk.connection):
        yield desk
        for process in terminal.processes:
            if process.poll() is None:
                stop_worker(process)
        for sent in desk.campaigns.list():
            desk.connection.delete(f"{desk.campaigns.queue.name}:{sent.id}")
