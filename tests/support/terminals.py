"""What the tests of the command line share: a user with folders of his own, and his commands."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from leanq.queue.settings import Settings
from support.command_server import COMMAND_TIMEOUT_S, Command
from support.fleets import until
from support.lean.sandboxes import busy, children, marked
from support.paths import ROOT, SAMPLES

# As the installed script does it, with an interpreter of its own.
LEANQ = (sys.executable, "-c", "from leanq.__main__ import main; main()")


Process = Command | subprocess.Popen[bytes]


def samples(*names: str) -> list[str]:
    return [str(SAMPLES / f"{name}.lean") for name in names]


@dataclass(frozen=True)
class Done:
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal:
    """A user: his home, his folder for temporary files, his files, his environment variables."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.tmp, self.home = folder / "t", folder / "h"
        self.tmp.mkdir()
        self.home.mkdir()
        self.environ = {
            name: text for name, text in os.environ.items() if name[:6] not in ("LEANQ_", "XDG_CA")
        }
        self.environ.pop("XDG_RUNTIME_DIR", None)
        self.environ |= {
            "PYTHONPATH": str(ROOT),
            # Without any other Lean than the wheel's.
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "LEANQ_CACHE": str(cache),
        }
        self.processes: list[Process] = []

    @property
    def up_file(self) -> Path:
        return self.home / ".cache" / "leanq" / "up.json"

    def use(self, settings: Settings) -> None:
        """All further commands mean this queue."""
        self.environ |= {"LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix}

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def start(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        program: Sequence[str] = (),
        **streams: Any,
    ) -> Process:
        """Starts ``leanq`` with these arguments; its three streams are pipes unless given.

        The command is the server's, unless ``program`` says how to start it.
        """
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE} | streams
        streams.setdefault("stderr", subprocess.PIPE)
        env = {**self.environ, **(environ or {})}
        process: Process
        if program:
            process = subprocess.Popen([*program, *arguments], env=env, cwd=self.folder, **streams)
        else:
            process = Command(arguments, env=env, cwd=self.folder, **streams)
        self.processes.append(process)
        return process

    def run(
        self,
        *arguments: str,
        stdin: bytes = b"",
        environ: Mapping[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> Done:
        """Runs ``leanq`` to its end. Never may it show a traceback."""
        process = self.start(*arguments, environ=environ, program=program, stdin=subprocess.PIPE)
        return ended(process, stdin)

    def busy(self) -> bool:
        """Whether a Lean process of one of its workers has a text to work on: one of its own, or a
        fork, since no process imports a test's small library for so long."""
        own, forks = busy("lean_launcher.py"), busy("leanq.lean.run.zygote", least_s=2.0)
        return any(map(self.owns, [*own, *forks]))

    def owns(self, pid: int) -> bool:
        """Whether a process descends from one of its commands."""
        commands = {process.pid for process in self.processes}
        with contextlib.suppress(OSError):  # it has just ended
            while pid > 1 and pid not in commands:
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        return pid in commands

    def is_clean(self) -> bool:
        """Whether no process and no temporary file of its commands is left.

        Each supervisor removes its folder as its last act, and so does what watches a server.
        """
        return not os.listdir(self.tmp) and not marked(str(self.tmp))


def ended(process: Process, stdin: bytes | None = None) -> Done:
    out, err = process.communicate(stdin, timeout=COMMAND_TIMEOUT_S)
    done = Done(
        process.returncode,
        (out or b"").decode(errors="surrogateescape"),
        (err or b"").decode(errors="surrogateescape"),
    )
    assert "Traceback" not in done.err, done.err
    return done


def own_server_of(process: Process) -> int:
    """The process id of the server that a command has started for itself."""
    (shell,) = (
        pid
        for pid in children(process.pid)
        if b"server.conf" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    (server,) = children(shell)
    return server


def wait_for_line(stream: IO[bytes] | None, text: str) -> str:
    """Reads lines up to the one with ``text`` in it."""
    assert stream is not None
    for line in stream:
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"ended without {text!r}")


def read_terminal(descriptor: int) -> str:
    """All that is shown on a pseudo-terminal until its last program ends."""
    shown = b""
    # A terminal without programs is an error to read from.
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 1 << 16):
            shown += chunk
    return shown.decode()


@contextlib.contextmanager
def screen() -> Iterator[tuple[int, int]]:
    """A pseudo-terminal: our end and the programs' end, which the caller closes."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)


@contextlib.contextmanager
def new_terminal(cache: Path) -> Iterator[Terminal]:
    """A user whose commands have to leave nothing behind."""
    # The socket of a server must have a short path.
    folder = Path(tempfile.mkdtemp(prefix="lq-", dir="/tmp"))
    terminal = Terminal(folder, cache)
    try:
        yield terminal
        for process in terminal.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        until(terminal.is_clean)
    finally:
        for process in terminal.processes:
            process.kill()
            process.wait(COMMAND_TIMEOUT_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    stream.close()
        shutil.rmtree(folder)


@contextlib.contextmanager
def new_fleet(cache: Path, url: str, *options: str) -> Iterator[Settings]:
    """A queue of its own on the server at ``url``, with a ``leanq worker`` process."""
    settings = Settings(url=url, prefix=f"t{secrets.token_hex(6)}")
    with new_terminal(cache) as terminal:
        terminal.use(settings)
        worker = terminal.start("worker", *options, stdout=subprocess.DEVNULL)
        wait_for_line(worker.stderr, "serves")
        yield settings
        worker.send_signal(signal.SIGTERM)
        assert ended(worker).code == 0
