"""Compares the HTTP gateway with an empty endpoint and with a direct client; see README.md.

Everything runs on this machine: a server, a worker that answers checks at once without Lean, a
gateway, and ``wrk``, which makes the load. Each row is measured between two measurements of what it
is compared with. The exit code is 1 if a row misses its aim.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2
import redis
from servers import server

from leanq import AsyncLeanQClient
from leanq.lean.driver import EchoDriver
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import Settings
from leanq.worker import Worker

_OUTSTANDING = 200
_BATCH = 100
_LONG_BATCH = 1000
_STREAMS = 1000
_STREAMS_MB = 150
_DEAD_CLIENTS = 50
_CODE = "theorem t (p : Prop) (h : p) : p := h"
_START_S = 30.0
_CALL_S = 120.0
_REST_S = 300.0
_HELD = "-- held"

_WRK_POST = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"code": "%s"}'
"""


class Instant(EchoDriver):
    """Accepts each check at once, except for texts that are held for an hour."""

    environment = "default"

    async def run(self, request: Request) -> Reply:
        if request.code.startswith(_HELD):
            await asyncio.sleep(3600)
        return Reply("accepted", wall_s=0.0)


@dataclass
class Row:
    """One figure beside its aim. ``ratio`` is ``ours`` to ``other``, both in ``unit``."""

    name: str
    unit: str
    ours: float
    other: float
    ratio: float
    aim: str
    met: bool


def rate(url: str, seconds: float, *, post: bool) -> float:
    """Returns answers per second over ``_OUTSTANDING`` connections that are kept alive."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        command = ["wrk", "-t1", f"-c{_OUTSTANDING}", f"-d{seconds:g}s", "--timeout", "30s"]
        if post:
            script.write(_WRK_POST % _CODE)
            script.flush()
            command += ["-s", script.name]
        done = subprocess.run(
            [*command, url], capture_output=True, text=True, check=True, timeout=seconds + 60
        )
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(done.stdout)
    found = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    assert found, done.stdout
    return float(found[1])


async def median_ms(call: Callable[[], Awaitable[Any]], seconds: float) -> float:
    """Returns the median time of consecutive calls, in ms."""
    times_ms = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.perf_counter()
        await call()
        times_ms.append((time.perf_counter() - began_s) * 1000)
    return statistics.median(times_ms)


def ping_pong_ms(url: str, seconds: float) -> float:
    """Returns the median of redis-py's LPUSH and BLPOP round trips to a peer process, in ms."""
    command = [sys.executable, __file__, "--peer", url]
    with subprocess.Popen(command) as peer, redis.Redis.from_url(url) as connection:
        try:
            # Wait for the peer's first answer.
            connection.lpush("ping", b"x")
            connection.blpop(["pong"], timeout=60)
            times_ms = []
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                began_s = time.perf_counter()
                connection.lpush("ping", b"x")
                connection.blpop(["pong"], timeout=5)
                times_ms.append((time.perf_counter() - began_s) * 1000)
        finally:
            peer.terminate()
    return statistics.median(times_ms)


def answer_pings(url: str) -> None:
    with redis.Redis.from_url(url) as connection:
        while True:
            if connection.blpop(["ping"], timeout=5):
                connection.lpush("pong", b"x")


@dataclass
class Pace:
    """Requests per second, and the CPU time of each in the measured process, in µs."""

    per_s: float
    cpu_us: float

    @classmethod
    def between(cls, one: Pace, other: Pace) -> Pace:
        return cls((one.per_s + other.per_s) / 2, (one.cpu_us + other.cpu_us) / 2)


async def direct_pace(redis_url: str, seconds: float) -> Pace:
    """Measures the direct client, in this process, with as many requests outstanding."""
    async with AsyncLeanQClient(redis_url) as lean:
        done = 0
        end_s = time.monotonic() + seconds

        async def keep_asking() -> None:
            nonlocal done
            while time.monotonic() < end_s:
                await lean.check(_CODE)
                done += 1

        await lean.check(_CODE)
        began_s, used_s = time.monotonic(), time.process_time()
        await asyncio.gather(*(keep_asking() for _ in range(_OUTSTANDING)))
        used_s = time.process_time() - used_s
        return Pace(done / (time.monotonic() - began_s), used_s / done * 1e6)


async def batch_pace(url: str, pid: int, path: str, seconds: float) -> Pace:
    """Measures the gateway with batches of ``_BATCH`` requests; two are always under way."""
    if path == "/v1/batch":
        line = json.dumps({"op": "check", "code": _CODE})
        body = "\n".join([line] * _BATCH).encode()
    else:
        snippets = [{"id": str(number), "code": _CODE} for number in range(_BATCH)]
        body = json.dumps({"snippets": snippets}).encode()
    done = 0
    end_s = time.monotonic() + seconds
    async with httpx2.AsyncClient(base_url=url, timeout=_CALL_S) as http:

        async def keep_asking() -> None:
            nonlocal done
            while time.monotonic() < end_s:
                answer = await http.post(
                    path, content=body, headers={"Content-Type": "application/json"}
                )
                assert answer.text.count('"accepted"') == _BATCH, answer.text[:200]
                done += _BATCH

        began_s, used_s = time.monotonic(), cpu_s(pid)
        await asyncio.gather(*(keep_asking() for _ in range(2)))
        return Pace(done / (time.monotonic() - began_s), (cpu_s(pid) - used_s) / done * 1e6)


async def first_result_before_the_last_is_sent(url: str) -> tuple[float, float]:
    """Sends a batch line by line; returns when its first result came and its last line was sent.

    Both are in seconds from its beginning.
    """
    line = json.dumps({"op": "check", "code": _CODE}).encode() + b"\n"
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\n"
    )
    began_s = time.monotonic()
    first_s = 0.0
    count = 0

    async def read() -> None:
        nonlocal first_s, count
        async for got in reader:
            if b'"accepted"' in got:
                first_s = first_s or time.monotonic() - began_s
                count += 1

    reading = asyncio.create_task(read())
    for _ in range(_LONG_BATCH):
        writer.write(b"%x\r\n%s\r\n" % (len(line), line))
        await writer.drain()
        await asyncio.sleep(0.0005)
    sent_s = time.monotonic() - began_s
    writer.write(b"0\r\n\r\n")
    async with asyncio.timeout(_CALL_S):
        await reading
    assert count == _LONG_BATCH, count
    writer.close()
    return first_s, sent_s


async def with_streams(url: str, count: int, measure: Callable[[], float]) -> float:
    """Returns ``measure()`` with so many open event streams, each with a held request."""
    body = json.dumps({"op": "check", "code": _HELD}).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    head = (
        "POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    writers = []
    try:
        for _ in range(count):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + body)
            writers.append(writer)
            async with asyncio.timeout(_CALL_S):
                assert b"200" in await reader.readline()
        # Wait until the queue has all of them.
        await asyncio.sleep(2)
        return measure()
    finally:
        for writer in writers:
            writer.close()


@contextlib.contextmanager
def dead_clients(url: str, pid: int, count: int) -> Iterator[None]:
    """Opens clients that stop amid a request; closes them on leaving.

    Every fifth one sends a whole batch instead and never reads the answer, although the work is
    done.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    line = json.dumps({"op": "check", "code": _CODE}).encode() + b"\n"
    made = []
    for number in range(count):
        client = socket.create_connection((host, int(port)))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        head = b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
        half = b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        with contextlib.suppress(BlockingIOError):
            client.send(head + line * 1000 if number % 5 == 0 else half)
        made.append(client)
    try:
        until_idle(pid)
        yield
    finally:
        for client in made:
            client.close()


def until_idle(pid: int) -> None:
    """Waits until a process uses hardly any CPU time."""
    used_s = cpu_s(pid)
    for _ in range(int(_REST_S)):
        time.sleep(1)
        before_s, used_s = used_s, cpu_s(pid)
        if used_s - before_s < 0.05:
            return
    raise RuntimeError("the gateway does not come to rest")


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", text)
    assert found
    return int(found[1]) / 1024


@contextlib.contextmanager
def gateway(redis_url: str) -> Iterator[tuple[str, int]]:
    """Runs a gateway in a process of its own; yields its URL and process id."""
    command = [sys.executable, "-m", "leanq", "serve", "--url", redis_url, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            line = process.stderr.readline()
            found = re.search(r"http://\S+:\d+", line)
            if not found:
                raise RuntimeError(f"the gateway does not start: {line}{process.stderr.read()}")
            yield found[0], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def worker(redis_url: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, __file__, "--worker", redis_url]) as process:
        try:
            yield
        finally:
            process.terminate()


async def work(redis_url: str) -> None:
    made = Worker(Settings.load(redis_url, {}), [Instant()], slots=4096)
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(made.run())
    loop.add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def rows(redis_url: str, url: str, pid: int, seconds: float) -> list[Row]:
    made: list[Row] = []

    def note(
        name: str, unit: str, ours: float, other: float, ratio: float, aim: str, *, met: bool
    ) -> None:
        made.append(Row(name, unit, ours, other, ratio, aim, met))
        print(
            f"| {name} | {ours:,.4g} {unit} | {other:,.4g} {unit} | {ratio:.2f} | {aim} | "
            f"{'yes' if met else 'NO'} |",
            flush=True,
        )

    empty_url, check_url = f"{url}/health", f"{url}/v1/check"
    in_thread = asyncio.to_thread

    used_s = [cpu_s(pid)]
    before = await in_thread(rate, empty_url, seconds, post=False)
    used_s.append(cpu_s(pid))
    ours = await in_thread(rate, check_url, seconds, post=True)
    used_s.append(cpu_s(pid))
    after = await in_thread(rate, empty_url, seconds, post=False)
    empty = (before + after) / 2
    name = f"one check a request, {_OUTSTANDING} outstanding, beside an empty endpoint"
    note(name, "/s", ours, empty, ours / empty, "at least 0.4", met=ours >= 0.4 * empty)
    empty_us = (used_s[1] - used_s[0]) / (before * seconds) * 1e6
    ours_us = (used_s[2] - used_s[1]) / (ours * seconds) * 1e6
    name = "the same in CPU time of the gateway for each request"
    ratio = empty_us / ours_us
    note(name, "µs", ours_us, empty_us, ratio, "at least 0.4", met=ratio >= 0.4)

    for path in ("/api/check", "/v1/batch"):
        first = await direct_pace(redis_url, seconds)
        batches = await batch_pace(url, pid, path, seconds)
        direct = Pace.between(first, await direct_pace(redis_url, seconds))
        name = f"batches of {_BATCH} to {path}, beside the direct client"
        ratio = batches.per_s / direct.per_s
        aim = "at least 0.5"
        note(name, "/s", batches.per_s, direct.per_s, ratio, aim, met=ratio >= 0.5)
        name = "the same in CPU time of the gateway and of the direct client for each request"
        ratio = direct.cpu_us / batches.cpu_us
        note(name, "µs", batches.cpu_us, direct.cpu_us, ratio, aim, met=ratio >= 0.5)

    async with (
        AsyncLeanQClient(redis_url) as lean,
        httpx2.AsyncClient(base_url=url, timeout=_CALL_S) as http,
    ):
        body = {"code": _CODE}
        await lean.check(_CODE)
        empty_ms = await median_ms(lambda: http.get("/health"), seconds)
        ours_ms = await median_ms(lambda: http.post("/v1/check", json=body), seconds)
        direct_ms = await median_ms(lambda: lean.check(_CODE), seconds)
    floor_ms = await in_thread(ping_pong_ms, redis_url, seconds)
    bound_ms = empty_ms + direct_ms + floor_ms
    name = "p50 of one check after the other, beside empty + direct + ping-pong"
    note(name, "ms", ours_ms, bound_ms, ours_ms / bound_ms, "at most 1", met=ours_ms <= bound_ms)

    first_s, sent_s = await first_result_before_the_last_is_sent(url)
    note(
        f"a batch of {_LONG_BATCH}: its first result, beside its last line being sent",
        "s",
        first_s,
        sent_s,
        first_s / sent_s,
        "below 1",
        met=first_s < sent_s,
    )

    alone = await in_thread(rate, check_url, seconds, post=True)
    with dead_clients(url, pid, _DEAD_CLIENTS):
        beside = await in_thread(rate, check_url, seconds, post=True)
    alone = (alone + await in_thread(rate, check_url, seconds, post=True)) / 2
    name = f"one check a request beside {_DEAD_CLIENTS} dead clients, and without"
    note(name, "/s", beside, alone, beside / alone, "at least 0.9", met=beside >= 0.9 * alone)
    return made


async def streams_row(redis_url: str) -> Row:
    """Measures a gateway of its own, whose memory nothing else has used."""
    with gateway(redis_url) as (url, pid):
        before = resident_mb(pid)
        during = await with_streams(url, _STREAMS, lambda: resident_mb(pid))
    met = during <= _STREAMS_MB
    print(
        f"| {_STREAMS:,} open event streams, beside none | {during:.4g} MB | {before:.4g} MB | "
        f"{during / before:.2f} | at most {_STREAMS_MB} MB | {'yes' if met else 'NO'} |",
        flush=True,
    )
    name = f"{_STREAMS:,} open event streams, beside none"
    ratio = during / before
    return Row(name, "MB", during, before, ratio, f"at most {_STREAMS_MB} MB", met)


async def watch(redis_url: str, url: str, pid: int, viewers: int, seconds: float) -> None:
    """Prints the cost of so many open pages: the gateway's CPU time and the server's commands."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = b"GET /page/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
    readers, writers = [], []

    async def drain(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    try:
        for _ in range(viewers):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head)
            writers.append(writer)
            async with asyncio.timeout(_CALL_S):
                assert b"200" in await reader.readline()
            readers.append(asyncio.create_task(drain(reader)))
        # Wait until all pages have their first picture.
        await asyncio.sleep(5)
        used_s, commands, began_s = cpu_s(pid), commands_of(redis_url), time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began_s
        share = (cpu_s(pid) - used_s) / took_s
        each_s = (commands_of(redis_url) - commands) / took_s
        print(f"| {viewers:,} | {share:.1%} | {each_s:.1f} |", flush=True)
    finally:
        for reading in readers:
            reading.cancel()
        for writer in writers:
            writer.close()


def commands_of(redis_url: str) -> int:
    """Returns the number of commands that the server ran, also inside scripts."""
    with redis.Redis.from_url(redis_url) as connection:
        found = connection.info("commandstats")
    return sum(each["calls"] for each in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument(
        "--viewers", type=int, nargs="+", help="measure what so many open pages cost, and no more"
    )
    parser.add_argument("--results", type=Path, help="a file of JSON to write")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work(options.worker))
        return
    if options.peer:
        answer_pings(options.peer)
        return
    if shutil.which("wrk") is None:
        sys.exit("bench-gateway needs wrk, which makes the load: apt-get install wrk")
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load average before {load:.2f}\n")
    if options.viewers:
        print("| pages | CPU of the gateway | commands/s of the server |\n| --- | --- | --- |")
        with server() as redis_url, worker(redis_url):
            for viewers in options.viewers:
                with gateway(redis_url) as (url, pid):
                    asyncio.run(watch(redis_url, url, pid, viewers, options.seconds))
        return
    print("| | ours | beside | ratio | aim | met |\n| --- | --- | --- | --- | --- | --- |")
    with server() as redis_url, worker(redis_url):
        with gateway(redis_url) as (url, pid):
            made = asyncio.run(rows(redis_url, url, pid, options.seconds))
        made.append(asyncio.run(streams_row(redis_url)))
    if options.results:
        about = {"cpus": os.cpu_count(), "load_average_before": load}
        options.results.write_text(
            json.dumps({**about, "rows": [asdict(row) for row in made]}, indent=1) + "\n"
        )
    sys.exit(0 if all(row.met for row in made) else 1)


if __name__ == "__main__":
    main()
