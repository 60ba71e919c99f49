"""Clients and workers of this tree beside those of older commits, as processes on one Redis."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from support.fleets import look, until
from support.paths import ROOT
from support.terminals import Terminal

from leanq.local import EmbeddedServer
from leanq.queue.keys import Keys
from leanq.queue.settings import Settings

pytestmark = pytest.mark.slow

# The last commit with records of each version.
COMMITS = {
    1: "1d26043d161c148a02e8e8a2b8d328b10983e33c",
    2: "238dd2a5d88e1a21ebda298949237b1bc7bbc49a",
}
COUNT = 30
JOINED = "serves echo"
# Within this time a side says what it has noticed.
TOLD_S = 10.0
CLIENT = """
import logging, sys
from leanq import LeanQClient
logging.basicConfig(stream=sys.stderr)
with LeanQClient() as client:
    sent = [client.echo(b"%d" % number) for number in range(int(sys.argv[1]))]
    payloads = [getattr(end, "payload", end) for end in (future.result(90) for future in sent)]
    assert payloads == [b"%d" % number for number in range(len(sent))], payloads
"""


# What a worker reads that asks about commands with a wrong arity, on a server that looks at it.
REFUSED = "Wrong number of args for redis.acl_check_cmd()"


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, check=True
    ).stdout


@pytest.fixture(scope="module", params=COMMITS)
def version(request: pytest.FixtureRequest) -> int:
    """The version of the older records."""
    return int(request.param)


@pytest.fixture(scope="module")
def older(version: int, server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an older leanq, whose workers can join on this server."""
    if not (ROOT / ".git").exists() or _git("rev-parse", "--is-shallow-repository") != b"false\n":
        pytest.skip("this checkout has no history")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=io.BytesIO(_git("archive", COMMITS[version], "leanq"))) as archive:
        archive.extractall(folder, filter="data")
    settings = replace(Settings.load(server.url, {}), prefix=f"older{version}")
    with contextlib.ExitStack() as at_end:
        worker = Side(settings, folder, folder / "logs", at_end).start_worker()
        until(lambda: worker.has_said(JOINED) or worker.has_said(REFUSED))
        joined = worker.has_said(JOINED)
    with redis.Redis.from_url(server.url) as connection:
        keys = [*connection.scan_iter(f"*{settings.prefix}*", count=1000)]
        connection.delete("none", *keys)
    if not joined:
        pytest.skip(f"workers with records of version {version} cannot join here: {REFUSED}")
    return folder


class Process:
    """A process whose output goes to a file."""

    def __init__(self, arguments: list[str], environ: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], env=environ, cwd=log.parent, stdout=out, stderr=out
            )

    def has_said(self, text: str) -> bool:
        return text in self._log.read_text()

    def says(self, text: str, deadline_s: float = 60.0) -> None:
        until(lambda: self.has_said(text), deadline_s)

    def ends_well(self) -> None:
        until(lambda: self._process.poll() is not None, 120.0)
        assert self._process.returncode == 0, self._log.read_text()

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()


class Side:
    """Processes of one release: the tree's, or an older one's."""

    def __init__(
        self, settings: Settings, leanq: Path, logs: Path, at_end: contextlib.ExitStack
    ) -> None:
        environ = {name: text for name, text in os.environ.items() if name[:6] != "LEANQ_"}
        self._environ = environ | {
            "PYTHONPATH": str(leanq),
            "LEANQ_URL": settings.url,
            "LEANQ_PREFIX": settings.prefix,
        }
        self._logs = logs
        logs.mkdir()
        self._at_end = at_end

    def _start(self, name: str, *arguments: str) -> Process:
        process = Process([*arguments], self._environ, self._logs / f"{name}.log")
        self._at_end.callback(process.end)
        return process

    def start_worker(self) -> Process:
        return self._start("worker", "-m", "leanq", "worker", "--driver", "echo")

    def worker(self) -> Process:
        worker = self.start_worker()
        worker.says(JOINED)
        return worker

    def client(self) -> Process:
        return self._start("client", "-c", CLIENT, str(COUNT))


@pytest.fixture
def sides(settings: Settings, older: Path, tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    with contextlib.ExitStack() as at_end:
        yield (
            Side(settings, older, tmp_path / "olds", at_end),
            Side(settings, ROOT, tmp_path / "news", at_end),
        )
    # Whatever is about one request ends by itself.
    with redis.Redis.from_url(settings.url) as server:
        keys = [*server.scan_iter(f"{Keys(settings.prefix).lasting}*", count=1000)]
        kinds = ("req", "body", "upload", "joined", "wait", "ring", "inbox", "processing")
        lasts = [
            key
            for key in keys
            if key.partition(b"}:")[2].decode().partition(":")[0] in kinds
            and server.pttl(key) == -1
        ]
        assert not lasts
        # An old worker leaves the index of its phases.
        server.delete(f"{Keys(settings.prefix).lasting}:phase")


def test_an_older_client_beside_a_worker_of_this_tree(
    sides: tuple[Side, Side], settings: Settings, terminal: Terminal, version: int
) -> None:
    old, new = sides
    terminal.use(settings)
    worker, client = new.worker(), old.client()
    until(lambda: sum(row.waiting for row in look(settings).others) == COUNT)
    told = f"{COUNT} of echo with records of version {version}, of another release"
    worker.says(told, TOLD_S)
    client.says("no worker is alive for the environment 'echo'", TOLD_S)
    assert f"others      {told}" in terminal.run("status").out
    assert told in terminal.run("doctor").out
    assert terminal.run("status", "--json").lines[0]["lost"] == 0
    old.worker()
    client.ends_well()


def test_a_client_of_this_tree_beside_an_older_worker(sides: tuple[Side, Side]) -> None:
    old, new = sides
    old.worker()
    client = new.client()
    client.says("of an earlier release, which cannot read records of version 3", 60.0)
    new.worker()
    client.ends_well()


def test_workers_of_both(sides: tuple[Side, Side], settings: Settings) -> None:
    old, new = sides
    old.worker()
    new.worker()
    clients = [old.client(), new.client()]
    for client in clients:
        client.ends_well()
    status = look(settings)
    assert (status.counters["settled"], status.others, status.unaccounted) == (COUNT, (), 0)
