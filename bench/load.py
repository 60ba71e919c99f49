"""The loads that every queue gets, and the counts taken while they run.

A file of ``peers/`` says how one queue sends an echo and collects its reply, and hands that to
:func:`main`. It runs in that queue's own environment, so this module needs redis-py only. It prints
one line of JSON per load, so that a client killed later has reported its earlier figures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import string
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, Self

import redis

SMALL_BYTES, LARGE_BYTES = 100, 64 << 10
WORKER_PID = "LEANQ_BENCH_WORKER_PID"

Echo = Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]


@dataclass(frozen=True)
class Plan:
    """Seconds of each part, and the number of outstanding requests (0: no such load)."""

    warm_s: float = 0.5
    one_s: float = 1.5
    ramp_s: float = 1.0
    many_s: float = 2.5
    count_s: float = 1.0
    large_s: float = 2.0
    many: int = 1000
    large: int = 200

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Plan:
        return cls(**json.loads(text))

    @property
    def limit_s(self) -> float:
        """Time after which a client will not end by itself; a slow one drains its requests."""
        parts_s = (
            self.warm_s,
            self.one_s,
            2 * self.ramp_s,
            self.many_s,
            self.count_s,
            self.large_s,
        )
        return 30 + 2 * sum(parts_s)


class Sender(Protocol):
    """A blocking client: returns tickets for requests, and replies to tickets, in order."""

    def send(self, payloads: Sequence[bytes]) -> Sequence[Any]: ...

    def take(self, tickets: Sequence[Any]) -> Sequence[bytes]: ...


class Client(Protocol):
    """A queue's client, which measures the loads of a plan."""

    def measure(self, url: str, plan: Plan) -> None:
        """Prints a line of JSON for each load of the plan."""


def main(worker: Callable[[str], None], client: Client) -> None:
    """Runs one role: ``worker URL`` works until it is ended; ``client URL PLAN`` measures."""
    match sys.argv[1:]:
        case ["worker", url, *_]:
            worker(url)
        case ["client", url, plan, *_]:
            client.measure(url, Plan.of(plan))
        case _:
            sys.exit("worker URL | client URL PLAN")


class Concurrent:
    """An asyncio client: one loop for each outstanding request, each awaiting its own.

    With ``chunk``, fewer loops each send that many at once, for clients that have such a call.
    """

    def __init__(
        self,
        client: Callable[[str], AbstractAsyncContextManager[Echo]],
        chunk: int = 1,
        run: Callable[..., Any] = asyncio.run,
    ) -> None:
        self._client, self._chunk, self._run = client, chunk, run

    def measure(self, url: str, plan: Plan) -> None:
        self._run(self._measure(url, plan))

    async def _measure(self, url: str, plan: Plan) -> None:
        async with self._client(url) as echo:
            times = _Times(plan)
            for payload in _payloads(SMALL_BYTES):
                before = time.perf_counter()
                assert await echo((payload,)) == [payload]
                if times.add(before):
                    break
            if plan.many:
                with Window.small(url, plan) as window:
                    await self._loops(echo, window, plan.many)
            if plan.large:
                with Window.large(url, plan) as window:
                    await self._loops(echo, window, plan.large)

    async def _loops(self, echo: Echo, window: Window, width: int) -> None:
        payloads = _payloads(window.size_bytes)

        async def loop() -> None:
            while not window.over:
                sent = list(itertools.islice(payloads, self._chunk))
                assert await echo(sent) == sent
                window.add(len(sent))

        async with asyncio.TaskGroup() as group:
            for _ in range(width // self._chunk):
                group.create_task(loop())


class Windowed:
    """A blocking client: one thread sends ahead, and takes the oldest replies first.

    One thread for each outstanding request would only cost throughput.
    """

    def __init__(
        self, client: Callable[[str], AbstractContextManager[Sender]], chunk: int = 1
    ) -> None:
        self._client, self._chunk = client, chunk

    def measure(self, url: str, plan: Plan) -> None:
        with self._client(url) as sender:
            times = _Times(plan)
            for payload in _payloads(SMALL_BYTES):
                before = time.perf_counter()
                assert sender.take(sender.send((payload,))) == [payload]
                if times.add(before):
                    break
            if plan.many:
                with Window.small(url, plan) as window:
                    self._ahead(sender, window, plan.many)
            if plan.large:
                with Window.large(url, plan) as window:
                    self._ahead(sender, window, plan.large)

    def _ahead(self, sender: Sender, window: Window, width: int) -> None:
        payloads = _payloads(window.size_bytes)
        outstanding: deque[tuple[list[bytes], Sequence[Any]]] = deque()
        while outstanding or not window.over:
            while not window.over and (len(outstanding) + 1) * self._chunk <= width:
                sent = list(itertools.islice(payloads, self._chunk))
                outstanding.append((sent, sender.send(sent)))
            sent, tickets = outstanding.popleft()
            assert sender.take(tickets) == sent
            window.add(len(sent))


class _Times:
    """Times of consecutive requests, after some to warm up."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._begin_s = 0.0
        self._times_s: list[float] = []

    def add(self, before_s: float) -> bool:
        """Notes a request; after the last one, prints the percentiles and returns True."""
        now_s = time.perf_counter()
        if not self._begin_s:  # The first request waited for the worker to start.
            self._begin_s = now_s + self._plan.warm_s
        if before_s < self._begin_s:
            return False
        self._times_s.append(now_s - before_s)
        if now_s < self._begin_s + self._plan.one_s:
            return False
        times_s = sorted(self._times_s)
        p50_s, p99_s = times_s[len(times_s) // 2], times_s[len(times_s) * 99 // 100]
        _say(p50_ms=p50_s * 1e3, p99_ms=p99_s * 1e3)
        return True


class _Look(NamedTuple):
    """One moment: its time, the replies so far, and the CPU time of server, client and worker."""

    time_s: float
    replies: int
    cpu_s: float
    client_s: float
    worker_s: float


class Window:
    """A load of many outstanding requests: it ramps up, is timed, and then counts commands.

    Commands are counted in a part of their own, since a monitored server is slower. Everything
    happens within :meth:`add`, which the loops call. So no task or thread competes with them,
    except the one that reads MONITOR's output.
    """

    def __init__(self, url: str, size_bytes: int, plan: Plan, timed_s: float, width: int) -> None:
        self.size_bytes = size_bytes
        self.over = False
        self._plan, self._timed_s, self._width = plan, timed_s, width
        self._small = size_bytes == SMALL_BYTES
        self._look = redis.Redis.from_url(url)
        self._monitor = Monitor(url)
        self._replies = 0
        self._steps = self._parts()
        self._due_s = next(self._steps)

    @classmethod
    def small(cls, url: str, plan: Plan) -> Self:
        return cls(url, SMALL_BYTES, plan, plan.many_s, plan.many)

    @classmethod
    def large(cls, url: str, plan: Plan) -> Self:
        return cls(url, LARGE_BYTES, plan, plan.large_s, plan.large)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.close()
        self._look.close()

    def add(self, replies: int) -> None:
        """Notes so many more replies."""
        self._replies += replies
        if time.perf_counter() >= self._due_s and self._replies >= self._width:
            self._due_s = next(self._steps)

    def _parts(self) -> Iterator[float]:
        """Runs the load's parts; yields the time of the next one."""
        yield time.perf_counter() + self._plan.ramp_s
        before = self._now()
        yield before.time_s + self._timed_s
        after = self._now()
        replies = after.replies - before.replies
        rate = replies / (after.time_s - before.time_s)
        spent_us = {
            "server": (after.cpu_s - before.cpu_s) / replies * 1e6,
            "client": (after.client_s - before.client_s) / replies * 1e6,
            "worker": (after.worker_s - before.worker_s) / replies * 1e6,
        }
        if not self._small:
            _say(rps_64k=rate, cpu_us_64k=sum(spent_us.values()))
            _say(**{f"{part}_us_64k": us for part, us in spent_us.items()})
        else:
            _say(rps=rate, cpu_us_per_request=sum(spent_us.values()))
            _say(**{f"{part}_us_per_request": us for part, us in spent_us.items()})
            self._monitor.start()
            replies = self._replies
            yield time.perf_counter() + self._plan.count_s
            commands = self._monitor.stop()
            _say(commands_per_request=commands / (self._replies - replies))
        self.over = True
        yield float("inf")

    def _now(self) -> _Look:
        info = self._look.info("cpu")
        cpu_s = float(info["used_cpu_sys"]) + float(info["used_cpu_user"])
        return _Look(
            time.perf_counter(), self._replies, cpu_s, time.process_time(), _worker_cpu_s()
        )


def _worker_cpu_s() -> float:
    """Returns the CPU time of the worker's process, or of its first one."""
    process = os.environ.get(WORKER_PID)
    if not process:
        return 0.0
    with open(f"/proc/{process}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Monitor:
    """Counts the commands that clients send, of any kind and sent in any way.

    No counter of the server does: INFO and SLOWLOG also count the calls of scripts. MONITOR writes
    a line for each command, and marks those of scripts. A line's only line break is its end.
    """

    def __init__(self, url: str) -> None:
        self._look = redis.Redis.from_url(url)
        self._stream: socket.socket | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._commands = 0
        self._ended_early = ""

    def start(self) -> None:
        place = self._look.connection_pool.connection_kwargs
        self._stream = socket.create_connection((place["host"], place["port"]), timeout=30)
        self._stream.sendall(b"MONITOR\r\n")
        self._thread.start()

    def stop(self) -> int:
        """Returns the commands since the start; raises ConnectionError if some are missing."""
        self._look.echo(_LAST)
        self._thread.join()
        if self._ended_early:
            raise ConnectionError(f"MONITOR ended early: {self._ended_early}")
        return self._commands

    def close(self) -> None:
        if self._stream:
            self._stream.close()
        self._look.close()

    def _read(self) -> None:
        # The load waits for this thread, and must hear why it ended.
        try:
            self._count()
        except OSError as error:
            self._ended_early = str(error) or type(error).__name__

    def _count(self) -> None:
        assert self._stream is not None
        rest = b""
        while _LAST.encode() not in rest:
            # A mark may lie across two pieces, so keep an unfinished line for the next one.
            piece = self._stream.recv(1 << 20)
            if not piece:
                raise ConnectionError("the server closed the connection")
            lines, _, rest = (rest + piece).rpartition(b"\r\n")
            self._commands += lines.count(b"\r\n") + bool(lines) - lines.count(b" lua] ")
            if _LAST.encode() in lines:
                break
        self._commands -= 1  # MONITOR's own answer
        self._commands -= 1  # the last command, which is ours


_LAST = "bench-monitor-ends-here"


def _payloads(size_bytes: int) -> Iterator[bytes]:
    """Yields different payloads of that size: text, since some queues carry nothing else."""
    letters = string.ascii_letters + string.digits
    noise = "".join(random.Random(0).choices(letters, k=size_bytes - 20)).encode()
    return (b"%020d%s" % (next(_numbers), noise) for _ in itertools.repeat(None))


_numbers = itertools.count()


def _say(**figures: float) -> None:
    print(json.dumps(figures), flush=True)
