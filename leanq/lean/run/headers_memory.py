"""One budget for the memory of what stands ready: zygotes, processes behind prefixes, judges.

All environments of a worker share it. Beyond the budget the one used least recently ends. So does
what was not used for minutes. Where the machine or a cgroup is short of memory more ends, before
requests are refused and before the kernel kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from leanq.queue.metrics import count
from leanq.queue.requests import Request

log = logging.getLogger("leanq.worker")

LEAST_BYTES = 512 << 20
"""The budget where requests leave nothing: a few headers have room."""

WORKER_BYTES = 256 << 20
"""What a worker takes for itself."""

_IDLE_S = 300.0
_LOOK_EVERY_S = 1.0
# With less free than this share of all memory, or so many bytes, the kernel soon kills. A look each
# second has to see it before.
_SPARE_SHARE, _SPARE_BYTES = 1 / 16, 1 << 30
# Per cent of the last ten seconds in which some task waited for memory.
_PRESSED = 10.0
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Ready:
    """A process that stands ready, with its forks. ``used_s``: the monotonic time of its last use.
    ``end`` ends it, and returns False if it is in use."""

    used_s: float
    held_bytes: int
    end: Callable[[], Awaitable[bool]]


Holder = Callable[[], Iterable[Ready]]


@dataclass(frozen=True)
class Memory:
    """The memory that this process may use: the machine's, or less in cgroups of either version."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")

    def most_bytes(self) -> int:
        limits = (limit for _, limit in self._limited())
        return min([self._machine("MemTotal"), *limits])

    def free_bytes(self) -> int:
        """Returns what is free for processes; files in memory make room for them."""
        found = [self._machine("MemAvailable")]
        for folder, limit in self._limited():
            stat = _numbers(folder / "memory.stat")
            files = stat.get("total_cache", stat.get("file", 0))
            # Files of a scratch folder stay in memory.
            files -= stat.get("total_shmem", stat.get("shmem", 0))
            found.append(limit - self._used(folder) + max(0, files))
        return min(found)

    def is_pressed(self) -> bool:
        """Returns whether tasks wait for memory, by the kernel's count."""
        files = [folder / "memory.pressure" for folder in self._folders()]
        return any(_pressure(file) >= _PRESSED for file in (*files, self.proc / "pressure/memory"))

    def _machine(self, name: str) -> int:
        return _numbers(self.proc / "meminfo").get(f"{name}:", _NO_LIMIT >> 10) << 10

    def _limited(self) -> Iterator[tuple[Path, int]]:
        for folder in self._folders():
            for name in ("memory.max", "memory.limit_in_bytes"):
                limit = _number(folder / name)
                if limit is not None and limit < _NO_LIMIT:
                    yield folder, limit

    def _used(self, folder: Path) -> int:
        used = _number(folder / "memory.current")
        return used or _number(folder / "memory.usage_in_bytes") or 0

    def _folders(self) -> Iterator[Path]:
        """Yields the cgroups of this process that count memory, its own first."""
        with contextlib.suppress(OSError):
            for line in (self.proc / "self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controllers in ("", "memory"):
                    root = self.cgroups / controllers
                    own = root / path.lstrip("/")
                    # A container sees its own cgroup as the root.
                    yield from (own, *own.parents[: len(own.parts) - len(root.parts)])


@dataclass(eq=False)
class HeadersMemory:
    """The budget: ``most_bytes``, as of :func:`default_bytes` if nobody names them."""

    most_bytes: float = math.inf
    memory: Memory = field(default_factory=Memory)
    idle_s: float = _IDLE_S
    _holders: dict[Holder, None] = field(default_factory=dict)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def join(self, holder: Holder) -> None:
        """Counts what ``holder`` yields from now on, until it leaves."""
        self._holders[holder] = None

    def leave(self, holder: Holder) -> None:
        self._holders.pop(holder, None)

    def held_bytes(self) -> int:
        return sum(each.held_bytes for each in self._ready())

    async def make_room(self) -> None:
        """Ends what was used least recently until the rest is within the budget. It keeps what was
        used last, or each text would import a header that is larger than the budget."""
        async with self._one_at_a_time:
            for each in self._ready()[:-1]:
                if self.held_bytes() <= self.most_bytes:
                    return
                await self._end(each, "beyond")

    async def tend(self) -> None:
        """Looks each second what was not used for minutes, and whether memory is short. Each
        environment calls it, and one of them looks for all until it is cancelled."""
        async with self._tending:
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                await self.look()

    async def look(self) -> None:
        async with self._one_at_a_time:
            now_s = time.monotonic()
            spare = min(_SPARE_BYTES, self.memory.most_bytes() * _SPARE_SHARE)
            is_pressed = self.memory.is_pressed()
            for each in self._ready():
                if each.used_s <= now_s - self.idle_s:
                    await self._end(each, "idle")
                elif is_pressed or self.memory.free_bytes() < spare:
                    # That counts the last ten seconds, so one process at a look is enough.
                    is_pressed &= not await self._end(each, "pressed")
                else:
                    return

    def _ready(self) -> list[Ready]:
        found = [each for holder in self._holders for each in holder()]
        return sorted(found, key=lambda each: each.used_s)

    async def _end(self, each: Ready, why: str) -> bool:
        if not await each.end():
            return False
        count("leanq_fork_server_total", f"ended_{why}")
        if why == "pressed":
            log.info(
                "memory is short: what stood ready behind a header has ended, %d MB",
                each.held_bytes >> 20,
            )
        return True


def default_bytes(slots: int, memory: Memory | None = None) -> int:
    """Returns what the machine has beside the worker and the requests in its slots."""
    request = Request("echo")
    taken = slots * (request.memory_mb + request.scratch_mb << 20) + WORKER_BYTES
    return max(LEAST_BYTES, (memory or Memory()).most_bytes() - taken)


def _numbers(path: Path) -> dict[str, int]:
    """Returns the numbers of a file with a name and a number in each line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return {line[0]: int(line[1]) for line in lines if len(line) > 1}
    except (OSError, ValueError):
        return {}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # such as max
        return None


def _pressure(path: Path) -> float:
    """Returns the first of ``some avg10=1.23 avg60=…``."""
    try:
        return float(path.read_text().split()[1].partition("=")[2])
    except (OSError, ValueError, IndexError):
        return 0.0
