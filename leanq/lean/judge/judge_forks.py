"""Forks of the judge's process: each judges a file, or a few files of one tenant.

The end of a process and the pages that it touches first cost more than a small file's judgement. So
a fork goes on with its tenant's next files, within bounds on their number, time and memory. Of a
further file it says only that the kernel accepts it. Otherwise it ends without an answer, and a new
fork judges that file. So nothing that an earlier file leaves behind makes an honest file fail.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, Protocol

from leanq.lean.judge.printing import end_when_it_takes_too_long, take_all_the_time

_MOST_FILES = 8
# A fork that has used so much more than at its beginning judges no further file.
_MOST_CPU_S, _MOST_BYTES = 2.0, 64 << 20
# A further file's first attempt: if it takes longer, a new fork gives it all its time.
_FURTHER_CPU_S = 2
# A file that says little may have names of megabytes, and the worker reads all that a fork says.
_MOST_SAID_BYTES = 8 << 20
# The time between two looks at a fork; what it takes in between has to fit into the worker's
# margin.
_LOOK_MS = 20

Files = Sequence[Sequence[bytes]]
"""The bytes of compiled files, each in its parts."""


class Bench(Protocol):
    """Judges, in the process that forks and in its forks alike."""

    def answer(self, order: dict[str, Any], files: Files) -> dict[str, Any]:
        """Returns the answer about the files."""

    def statements(self) -> Iterator[str]:
        """Yields the statements of the last answer's theorems; this may end the process."""

    def start_anew(self) -> bool:
        """Forgets the last file; returns whether that is possible."""


class Forks:
    """The forks of this process, one at a time.

    Args:
        bench: what judges.
        inherited: descriptors that no fork may hold.
    """

    def __init__(self, bench: Bench, inherited: Sequence[int]) -> None:
        self._bench, self._inherited = bench, inherited
        self._fork: _Fork | None = None

    def answer(self, order: dict[str, Any], files: Files) -> str:
        """Returns the line with a fork's answer, or the limit that ended it, and what it used.

        ``order["tenant"]`` says whose files may be judged one after another; None: nobody's.
        """
        fork, self._fork = self._fork, None
        wasted_s = 0.0
        if fork is not None and fork.tenant != order["tenant"]:
            fork.end()
            fork = None
        if fork is not None:
            found = fork.ask(order, files)
            if not found.lines:
                wasted_s, fork = found.cpu_s, None
        if fork is None:
            fork = _Fork(self._bench, self._inherited, order, files)
            found = fork.first(order)
        if not fork.has_ended:
            self._fork = fork
        lines = found.lines or [json.dumps({"limit": _limit_in_words(order, found)})]
        told = {
            "statements": _texts(lines[1:]),
            "cpu_s": wasted_s + found.cpu_s,
            "peak_bytes": found.peak_bytes,
        }
        return f'{{"answer": {lines[0]}, {json.dumps(told)[1:]}\n'


class _Found(NamedTuple):
    """What a fork said, in whole lines, and used for it."""

    lines: list[str]
    cpu_s: float
    peak_bytes: int
    status: int
    killed_for: str


class _Fork:
    """One fork.

    Attributes:
        tenant: whose files it judges; None: it judges one file.
        has_ended: whether it judges no further file.
    """

    def __init__(
        self, bench: Bench, inherited: Sequence[int], order: dict[str, Any], files: Files
    ) -> None:
        """Begins with the first file."""
        self.tenant: str | None = order["tenant"]
        self.has_ended = False
        self._told_s = 0.0
        # Here, since each page that a fork touches costs it microseconds.
        self._memory = Memory.of("self")
        orders, self._orders = os.pipe()
        self._said, said = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                for each in (*inherited, self._orders, self._said):
                    os.close(each)
                with open(orders, "rb") as stream:
                    _serve(bench, stream, said, order, files, self._memory)
            finally:
                os._exit(1)
        os.close(orders)
        os.close(said)

    def first(self, order: dict[str, Any]) -> _Found:
        """Returns what it says of the first file."""
        return self._found(self._memory, order)

    def ask(self, order: dict[str, Any], files: Files) -> _Found:
        """Returns what it says of a further file; no lines if a new fork has to judge it."""
        memory = Memory.of(str(self._pid))
        try:
            write(self._orders, json.dumps(order).encode() + b"\n")
            for parts in files:
                for part in parts:
                    write(self._orders, part)
        except BrokenPipeError:
            pass  # its end is seen below
        return self._found(memory, order)

    def end(self) -> None:
        """Ends it, which has no file in hand."""
        os.close(self._orders)
        os.close(self._said)
        # It would hold up another tenant's file if it did not end by itself.
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _found(self, before: Memory, order: dict[str, Any]) -> _Found:
        said, killed_for = self._watched(before.anonymous_bytes, int(order["memory_bytes"]))
        # The last line is complete, or empty; what ends the fork after its answer does not matter.
        lines = said.decode().split("\n")[:-1]
        if _is_whole(said):
            used = json.loads(lines.pop())
            cpu_s, peak_bytes, status = used["cpu_s"], used["peak_bytes"], 0
        else:
            self.has_ended = True
            os.close(self._orders)
            os.close(self._said)
            _, status, usage = os.wait4(self._pid, 0)
            cpu_s, peak_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10
        told_s, self._told_s = self._told_s, cpu_s
        return _Found(lines, cpu_s - told_s, peak_bytes, status, killed_for)

    def _watched(self, held_bytes: int, more_bytes: int) -> tuple[bytes, str]:
        """Returns what it says of a file, and the limit for which it was ended, or "".

        Lean's allocator reserves gigabytes of address space at its start, so no limit of the
        kernel's tells what is used.
        """
        poll = select.poll()
        poll.register(self._said, select.POLLIN)
        said = bytearray()
        killed_for = ""
        while not _is_whole(said):
            if poll.poll(_LOOK_MS):
                if not (piece := os.read(self._said, 1 << 16)):
                    break
                said += piece
                if len(said) > _MOST_SAID_BYTES:
                    killed_for = f"its names take more than {_MOST_SAID_BYTES >> 20} MB"
                    os.kill(self._pid, signal.SIGKILL)
                    return b"", killed_for
            elif Memory.of(str(self._pid)).anonymous_bytes > held_bytes + more_bytes:
                killed_for = f"it takes more than {more_bytes >> 20} MB of memory"
                os.kill(self._pid, signal.SIGKILL)
        return bytes(said), killed_for


def _serve(
    bench: Bench, orders: BinaryIO, said: int, order: dict[str, Any], files: Files, memory: Memory
) -> NoReturn:
    """Judges the first file and further ones in a fork, and ends it."""
    tenant, began = order["tenant"], memory
    for number in range(_MOST_FILES):
        _limit(order, memory.mapped_bytes, is_further=number > 0)
        answer = bench.answer(order, files)
        is_clean = bool(answer.get("proved"))
        if number and not is_clean:
            os._exit(0)
        write(said, json.dumps(answer).encode() + b"\n")
        # No other fork prints the statements if this one ends.
        _limit_cpu(int(order["cpu_s"]))
        end_when_it_takes_too_long()
        for each in bench.statements():
            write(said, json.dumps(each).encode() + b"\n")
        take_all_the_time()
        if tenant is None or not is_clean or number == _MOST_FILES - 1:
            break
        memory = Memory.of("self")
        used = resource.getrusage(resource.RUSAGE_SELF)
        used_s = used.ru_utime + used.ru_stime
        grown_bytes = memory.anonymous_bytes - began.anonymous_bytes
        if used_s > _MOST_CPU_S or grown_bytes > _MOST_BYTES or not bench.start_anew():
            break
        told = {"cpu_s": used_s, "peak_bytes": used.ru_maxrss << 10}
        write(said, json.dumps(told).encode() + b"\n")
        if not (line := orders.readline()):
            break
        order = json.loads(line)
        files = read_files(orders, order)
    os._exit(0)


def _limit(order: dict[str, Any], mapped_bytes: int, *, is_further: bool) -> None:
    """Sets this process's limits; the sandbox has somewhat higher ones around them."""
    cpu_s = int(order["cpu_s"])
    _limit_cpu(1 + min(cpu_s, _FURTHER_CPU_S) if is_further else cpu_s)
    # Memory that is reserved already is used first. This stops what the parent would see too late.
    if mapped_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + int(order["memory_bytes"]), hard))


def _limit_cpu(cpu_s: int) -> None:
    """Sets this process's limit to so much more than it has used in whole seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + cpu_s, hard))


def _is_whole(said: bytes | bytearray) -> bool:
    """Returns whether a fork waits for a further file: its last line says what it has used."""
    return (
        said.endswith(b"}\n")
        and said.startswith(b"{", said.rfind(b"\n", 0, -1) + 1, -1)
        and said.count(b"\n") > 1
    )


def _texts(lines: Sequence[str]) -> list[str]:
    """Returns the lines of JSON that are texts: what Lean prints with must not decide on the
    rest."""
    found = []
    for line in lines:
        try:
            text = json.loads(line)
        except ValueError:
            break
        found.append(text if isinstance(text, str) else "")
    return found


def _limit_in_words(order: Mapping[str, Any], found: _Found) -> str:
    """Returns what ended a fork before it said anything."""
    if found.killed_for:
        return found.killed_for
    if os.WIFSIGNALED(found.status) and os.WTERMSIG(found.status) == signal.SIGXCPU:
        return f"it takes more than {order['cpu_s']} s of CPU time"
    return f"its process died (exit code {os.waitstatus_to_exitcode(found.status)})"


class Memory(NamedTuple):
    """The memory of a process; zeros if /proc is hidden, and the sandbox alone counts."""

    mapped_bytes: int
    anonymous_bytes: int
    """Resident memory that belongs to no file."""

    @classmethod
    def of(cls, process: str) -> Memory:
        """Returns a process's memory at this moment."""
        try:
            text = Path(f"/proc/{process}/statm").read_text()
        except OSError:
            return cls(0, 0)
        mapped, resident, of_files = (
            int(each) * resource.getpagesize() for each in text.split()[:3]
        )
        return cls(mapped, resident - of_files)


def read_files(stream: BinaryIO, order: Mapping[str, Any]) -> Files:
    """Returns the files behind an order; ends this process if there is nobody who sends them."""
    return [[_read(stream, size) for size in sizes] for sizes in order["sizes"]]


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        sys.exit(0)  # the worker has gone
    return data


def write(fd: int, data: bytes) -> None:
    """Writes all of the data."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
