"""Commands as processes of their own, without half a second of imports for each.

A server process has imported leanq, and forks for each command: the child has the arguments,
variables, folder and streams that it is given, and ends as the installed script would. Run as a
program, this is the server; its one argument is the descriptor of the socket on which it is asked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

COMMAND_TIMEOUT_S = 100.0
START_TIMEOUT_S = 30.0
_REQUEST_BYTES = 1 << 17

# What most commands import. Others import theirs when they run, as they do without a server.
_PRELOADED = (
    *("submit", "state", "status", "worker", "pause", "reap"),
    *("campaign", "metrics", "scale", "dead", "doctor", "serve"),
)


class Command:
    """A process of the server's, with the face of ``subprocess.Popen``; all waits end."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        prelude: str = "",
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> None:
        self.args = ["leanq", *arguments]
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        with contextlib.ExitStack() as theirs:
            descriptors = [
                self._connect(name, number, wanted, theirs)
                for number, (name, wanted) in enumerate(
                    {"stdin": stdin, "stdout": stdout, "stderr": stderr}.items()
                )
            ]
            self._ends, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.enter_context(end)
            request = {
                "arguments": self.args,
                "env": dict(env),
                "cwd": str(cwd),
                "prelude": prelude,
            }
            message = json.dumps(request).encode()
            assert len(message) < _REQUEST_BYTES
            assert _control, "no server runs; the fixture `commands` starts it"
            socket.send_fds(_control, [message], [end.fileno(), *descriptors])
        self._ends.settimeout(START_TIMEOUT_S)
        self.pid = int(self._ends.recv(16))

    def _connect(
        self, name: str, number: int, wanted: int | IO[Any] | None, theirs: contextlib.ExitStack
    ) -> int:
        """The descriptor that becomes the command's; our end of a pipe becomes an attribute."""
        if wanted is None:
            return number
        if wanted == subprocess.DEVNULL:
            return theirs.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
        if wanted != subprocess.PIPE:
            return wanted if isinstance(wanted, int) else wanted.fileno()
        read, write = os.pipe()
        ours, other = (write, read) if number == 0 else (read, write)
        setattr(self, name, open(ours, "wb" if number == 0 else "rb"))  # noqa: SIM115
        theirs.callback(os.close, other)
        return other

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float = COMMAND_TIMEOUT_S) -> int:
        if self.returncode is None:
            if not select.select([self._ends], [], [], max(0.0, timeout))[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._ends.recv(16))
            self._ends.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(
        self, data: bytes | None = None, timeout: float = COMMAND_TIMEOUT_S
    ) -> tuple[bytes, bytes]:
        """Feeds its input and reads its outputs to their ends, and waits for its end."""
        deadline = time.monotonic() + timeout
        read: dict[Any, list[bytes]] = {self.stdout: [], self.stderr: []}
        rest = memoryview(data or b"")
        with selectors.DefaultSelector() as selector:
            for stream in (self.stdout, self.stderr):
                if stream and not stream.closed:
                    selector.register(stream, selectors.EVENT_READ)
            if self.stdin and not self.stdin.closed:
                os.set_blocking(self.stdin.fileno(), False)
                selector.register(self.stdin, selectors.EVENT_WRITE)
            while selector.get_map():
                remaining = deadline - time.monotonic()
                if remaining < 0:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                for key, _ in selector.select(remaining):
                    stream = key.fileobj
                    if stream is self.stdin:
                        with contextlib.suppress(BlockingIOError):
                            try:
                                rest = rest[os.write(key.fd, rest) :]
                            except BrokenPipeError:
                                rest = rest[:0]
                        ended = not rest
                    else:
                        # Past what an earlier reader of lines has in its buffer.
                        chunk = stream.read1(1 << 16)  # type: ignore[union-attr]
                        read[stream].append(chunk)
                        ended = not chunk
                    if ended:
                        selector.unregister(stream)
                        stream.close()  # type: ignore[union-attr]
        self.wait(deadline - time.monotonic())
        return b"".join(read[self.stdout]), b"".join(read[self.stderr])


_control: socket.socket | None = None


@contextlib.contextmanager
def command_server() -> Iterator[None]:
    """Keeps the server of this process."""
    global _control
    _control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    try:
        yield
    finally:
        _control.close()
        _control = None
        assert process.wait(COMMAND_TIMEOUT_S) == 0


# The server's side


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Forks for each request. Returns the request in the child, and None at the server's end."""
    children: dict[int, socket.socket] = {}
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # An interrupt at the keyboard is for pytest.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([control, readable], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(readable, 4096)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with children.pop(pid) as end, contextlib.suppress(OSError):
                end.send(str(os.waitstatus_to_exitcode(status)).encode())
        if control not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 4)
        if not message:
            return None
        end = socket.socket(fileno=descriptors[0])
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, descriptor in enumerate(descriptors[1:]):
                os.dup2(descriptor, number)
            for descriptor in (readable, writable, *descriptors[1:]):
                os.close(descriptor)
            for each in (control, end, *children.values()):
                each.close()
            return dict(json.loads(message))
        children[pid] = end
        with contextlib.suppress(OSError):
            end.send(str(pid).encode())
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def _become(request: dict[str, Any]) -> None:
    """Makes this process what the interpreter would have made of the request."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["arguments"]
    sys.path[0] = ""
    sys.stdin = io.TextIOWrapper(open(0, "rb"))  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb")  # noqa: SIM115
        lines = number == 2 or os.isatty(number)
        setattr(sys, name, io.TextIOWrapper(raw, line_buffering=lines))
    exec(request["prelude"], {})


def main() -> None:
    from leanq import cli, local

    # See support.servers.
    if named := os.environ.get("LEANQ_TEST_SERVER"):
        local.find_server = lambda: Path(named)
    for name in _PRELOADED:
        importlib.import_module(f"leanq.commands.{name}")
    gc.freeze()  # what the children never change is shared with them
    if request := _serve(socket.socket(fileno=int(sys.argv[1]))):
        _become(request)
        cli.main()


if __name__ == "__main__":
    # Its own folder is on the path first, whose names are not leanq's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
