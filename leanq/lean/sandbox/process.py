"""A program in a sandbox, as the worker sees it: its pipes, its limits and its end."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from leanq.errors import SandboxError
from leanq.queue.metrics import count

_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 16  # of a long-lived program's standard error
_OUTPUTS = 2
_KILL_TIMEOUT_S = 30.0  # for a killed program to be gone


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program.

    ``cpu_s`` and ``memory_bytes`` are for the program and all its descendants together, measured
    every 25 ms to ``look_s`` (see ``leanq.lean.sandbox.cgroup``). So is ``scratch_bytes``, the disk
    space of its scratch folder. ``output_bytes`` limits the unread bytes of both outputs together;
    of standard output alone if standard error is kept as a tail.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int
    output_bytes: int = 64 << 20
    look_s: float = 0.1
    scratch_bytes: float = math.inf

    def measured(self) -> dict[str, float]:
        """Returns the limits that the supervisor enforces; it does not see the output."""
        names = ("cpu_s", "wall_s", "memory_bytes", "look_s", "scratch_bytes")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Exit:
    """How a program ended, and what it and its descendants used.

    One of ``code`` and ``signal`` is None. ``stopped`` says why leanq ended it: a limit, or
    ``killed`` if it was not wanted any more; None if it ended by itself. ``cpu_s`` counts from its
    start, ``wall_s`` from when its limits were last set. ``peak_bytes`` is the largest sample, 0
    for a program that ended within a tenth of a second. ``scratch_bytes`` is the last size of its
    scratch folder. ``waited_s``: at its wall limit, for how long nothing of it had run or been
    ready to run. ``reports``: what a fork has told of itself, in this order. ``earlier``: how many
    texts the fork had served before.
    """

    code: int | None
    signal: int | None
    stopped: Literal["cpu", "wall", "memory", "processes", "scratch", "output", "killed"] | None
    cpu_s: float
    wall_s: float
    peak_bytes: int
    scratch_bytes: int = 0
    waited_s: float = 0.0
    reports: Sequence[str] = ()
    earlier: int = 0

    @classmethod
    def of(cls, status: int, **used: Any) -> Exit:
        """``status`` is an exit code, or a signal's number below 0."""
        died = status < 0
        return cls(None if died else status, -status if died else None, **used)


@dataclass(frozen=True, slots=True)
class Usage:
    """The CPU time of a program and its descendants since its limits were set before, and the
    memory that they hold now. What a fork shares with its supervisor counts once less."""

    cpu_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A program's end with its whole output, at most ``output_bytes`` together."""

    exit: Exit
    stdout: bytes
    stderr: bytes


class Process:
    """A program that runs in a sandbox; ``Sandbox.start`` makes it. Both outputs are read as they
    come, so a program never waits for its reader."""

    def __init__(
        self,
        pipes: tuple[int, int, int],
        output_bytes: int,
        *,
        tail: bool,
        tell: Callable[[Mapping[str, Any]], None],
        give_up: Callable[[str], None],
    ) -> None:
        """Takes over our ends of the ``pipes`` to its standard input, output and error; the first
        is negative if it gets its input in another way. With ``tail``, only the last 64 KiB of
        standard error are kept."""
        self._loop = asyncio.get_running_loop()
        self._tell, self._give_up = tell, give_up
        self._started = asyncio.Event()
        self._exit: asyncio.Future[Exit] = self._loop.create_future()
        self._renewed: asyncio.Future[Usage] | None = None
        self._stdin_fd, self._stdout_fd, stderr_fd = pipes
        self._stdin_open, self._eof = self._stdin_fd >= 0, False
        self._unwritten = bytearray()
        self._stdout, self._stderr = bytearray(), bytearray()
        self._outputs = {self._stdout_fd: self._stdout, stderr_fd: self._stderr}
        self._output_bytes = output_bytes
        self._overflowed = False
        self.was_limited = False
        self.counts = True
        self._tail = tail
        self._fresh = asyncio.Event()  # new output, or the end of it
        self.outputs: tuple[int, ...] = ()
        """The pipes from a process that waits for another text: the caller's to close."""
        for fd in pipes:
            if fd >= 0:
                os.set_blocking(fd, False)
        for fd in self._outputs:
            self._loop.add_reader(fd, self._pump, fd)

    @property
    def ended(self) -> bool:
        return self._exit.done()

    def write(self, data: bytes) -> None:
        """Sends ``data`` to its standard input. Unread data is lost with it."""
        self._unwritten += data
        self._flush()

    def write_eof(self) -> None:
        self._eof = True
        self._flush()

    async def read(self, n: int = _CHUNK_BYTES) -> bytes:
        """Returns the next bytes of its standard output, b"" at the end. One at a time."""
        while not self._stdout and self._stdout_fd in self._outputs:
            self._fresh.clear()
            await self._fresh.wait()
        chunk = bytes(self._stdout[:n])
        del self._stdout[:n]
        return chunk

    def discard(self) -> bytes:
        """Returns all that it has printed until now, without waiting."""
        while self._pump(self._stdout_fd):
            pass
        printed = bytes(self._stdout)
        self._stdout.clear()
        return printed

    async def renew(self, limits: Limits) -> Usage:
        """Counts CPU and wall time afresh against new limits, and memory above its present memory;
        returns its usage until now. One at a time. Raises SandboxError if the program has ended."""
        self._renew(limits, is_told=True)
        self._renewed = self._loop.create_future()
        return await self._renewed

    def renew_untold(self, limits: Limits) -> None:
        """Does the same, without waiting for it and for its usage. Until the supervisor hears of
        it, the program spends what the limits before allow."""
        self._renew(limits, is_told=False)

    def _renew(self, limits: Limits, *, is_told: bool) -> None:
        if self.ended:
            raise SandboxError("the program has ended")
        self._output_bytes = limits.output_bytes
        self._tell({"renew": limits.measured(), "is_told": is_told})

    def feed(self, data: bytes, limits: Limits | None = None, *, stays: bool = False) -> None:
        """Sends all of its standard input, and counts against these limits from now on. Then a fork
        that ``stays`` may wait for another text behind this one."""
        if limits is not None:
            self._output_bytes = limits.output_bytes
            self._tell({"limit": limits.measured(), "stays": stays})
        self.write(data)
        self.write_eof()

    async def kill(self) -> Exit:
        """Ends the program and all its descendants. Even a cancellation waits until then. Raises
        SandboxError if the supervisor has died, or did not answer for 30 s and was given up."""
        if not self.ended:
            self._tell({"stop": "killed"})
        cancelled: asyncio.CancelledError | None = None
        while not self.ended:
            try:
                done, _ = await asyncio.wait([self._exit], timeout=_KILL_TIMEOUT_S)
                if not done:
                    self._give_up("the supervisor does not answer")
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return self._exit.result()

    async def wait(self) -> Exit:
        """Waits for the end. Raises SandboxError if the supervisor has died, and so the program."""
        await asyncio.wait([self._exit])
        return self._exit.result()

    async def started(self) -> None:
        """Waits until the program runs. Raises SandboxError if it could not be started."""
        await self._started.wait()
        if self.ended and (failure := self._exit.exception()):
            raise failure

    async def finished(self) -> Finished:
        """Waits for the end and returns all unread output. Errors as in :meth:`wait`."""
        exit_ = await self.wait()
        return Finished(exit_, bytes(self._stdout), bytes(self._stderr))

    # The sandbox calls these with the supervisor's words.

    def on_started(self) -> None:
        self._started.set()

    def on_renewed(self, used: Usage) -> None:
        if self._renewed is not None and not self._renewed.done():
            self._renewed.set_result(used)

    def on_end(
        self, end: Exit | SandboxError, *, limited: bool = False, waits: bool = False
    ) -> None:
        """All is over: the pipes hold all that will ever be there of this text."""
        self.was_limited = limited
        outputs = [*self._outputs]
        for fd in outputs:
            while self._pump(fd):
                pass
        if waits and len(self._outputs) == len(outputs) == _OUTPUTS:
            for fd in outputs:
                self._loop.remove_reader(fd)
            self.outputs = tuple(outputs)
            self._outputs.clear()
        for fd in list(self._outputs):
            self._close_output(fd)
        self._unwritten.clear()
        self.write_eof()
        if isinstance(end, SandboxError):
            reason = "supervisor"
            self._exit.set_exception(end)
            self._exit.exception()  # whether or not a task waits for it
        else:
            if self._overflowed and end.stopped is None:
                end = replace(end, stopped="output")
            reason = end.stopped or ("" if end.signal is None else "signal")
            self._exit.set_result(end)
        # Nobody wanted it any more if it was killed.
        if self.counts and reason not in ("", "killed"):
            count("leanq_lean_deaths_total", reason)
        if self._renewed is not None and not self._renewed.done():
            self._renewed.set_exception(SandboxError("the program has ended"))
        self._started.set()

    def _flush(self) -> None:
        if not self._stdin_open:
            return
        try:
            while self._unwritten:
                count = os.write(self._stdin_fd, self._unwritten[:_CHUNK_BYTES])
                del self._unwritten[:count]
        except BlockingIOError:
            self._loop.add_writer(self._stdin_fd, self._flush)
            return
        except BrokenPipeError:
            self._eof = True  # it does not want more
        self._loop.remove_writer(self._stdin_fd)
        if self._eof:
            self._stdin_open = False
            os.close(self._stdin_fd)

    def _pump(self, fd: int) -> bool:
        """Takes a chunk from an output pipe; returns whether there may be more."""
        if fd not in self._outputs:
            return False
        try:
            chunk = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._close_output(fd)
            return False
        buffer = self._outputs[fd]
        if self._tail and buffer is self._stderr:
            buffer += chunk
            del buffer[:-_TAIL_BYTES]
            return True
        held = len(self._stdout) + (0 if self._tail else len(self._stderr))
        room = max(self._output_bytes - held, 0)
        buffer += chunk[:room]
        if len(chunk) > room and not self._overflowed:
            self._overflowed = True
            self._tell({"stop": "output"})
        self._fresh.set()
        return True

    def _close_output(self, fd: int) -> None:
        if self._outputs.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
            os.close(fd)
            self._fresh.set()
