"""A server of a test's own, to be stopped, started again and tormented."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis

from leanq import local
from leanq.queue.settings import Settings
from support.fleets import until
from support.queue.lua_checks import write_branches

_find_wheel = local.find_server


def find_server() -> Path | None:
    """Returns the server program under test: LEANQ_TEST_SERVER's, by default the wheel's."""
    named = os.environ.get("LEANQ_TEST_SERVER")
    return Path(named) if named else _find_wheel()


@dataclass
class Server:
    """A server that may be stopped, and started again without what it knew."""

    folder: Path
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> Settings:
        return Settings(url=f"unix://{self.folder}/server.sock")

    def start(self) -> None:
        place = str(self.folder / "server.sock")
        options = ["--port", "0", "--unixsocket", place, "--save", ""]
        options += ["--dir", str(self.folder), *self.options]
        self.process = subprocess.Popen(
            [str(find_server()), *options],
            env={**os.environ, **self.environ},
            stdout=subprocess.DEVNULL,
        )

        def listens() -> bool:
            # The socket is there before that.
            with socket.socket(socket.AF_UNIX) as probe:
                return probe.connect_ex(place) == 0

        until(listens)

    def stop(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(20)
            (self.folder / "server.sock").unlink()
            self.process = None

    def send(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def configure(self, name: str, value: str) -> None:
        with redis.Redis.from_url(self.settings.url) as connection:
            connection.config_set(name, value)


@contextlib.contextmanager
def own_server(*options: str, environ: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server for one test, at a socket that stays the same when it is started again."""
    folder = Path(tempfile.mkdtemp(prefix="leanq-t-", dir="/tmp"))
    server = Server(folder, options, environ or {})
    server.start()
    try:
        yield server
    finally:
        write_branches(server.settings.url)
        server.stop()
        shutil.rmtree(server.folder)
