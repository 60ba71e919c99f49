"""``make attack-gateway``: a gateway under attack by a stranger and by one key, beside two tenants.

    python -m engines.attack [--seconds 180] [--quiet-seconds 30] [--files 1024] [--way direct]

The gateway is a process with a small limit on open files. It is attacked twice: directly, and
through ``deploy/Caddyfile``. Its queue and its worker, which runs no Lean, are in this process; the
attackers are in others. All of them share one address and the machine's CPUs. Other programs and
the attackers themselves take those CPUs, too. So a second gateway, which nobody attacks, serves the
same queue and is measured at the same time: it shows what the lack of CPUs does by itself. The tool
prints a table for each way. It ends with code 1 unless both ways

- the gateway's memory stays below its limit for the attacker's key plus 64 MB, above what it has
  at rest,
- its log stays below 1 MB,

and through the proxy

- the tenants' p99 stays below twice that of the gateway that nobody attacks (or 50 ms, if that is
  more),
- `/health` answers within a second throughout, or within twice the time that it takes there,
- every request of the tenants has its verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import httpx2
from support.cluster import free_ports
from support.fleets import working
from support.gateway.gateways import Scripted, key_file
from support.gateway.proxies import caddy
from support.paths import TESTS
from support.servers import own_server

from leanq.queue.settings import Settings

BODY_MB, OUTSTANDING_MB = 8, 64
MORE_MB, LOG_BYTES, HEALTH_S, LEAST_P99_S = 64, 1_000_000, 1.0, 0.05
TENANTS = ("alice", "bob")
WAYS = ("direct", "proxied")
_EVERY_S = 0.25
_START_S = 60.0
_END_S = 120.0
_ANSWER_S = 20.0
_NICE = 8
_MIB = 1 << 20

# What the attackers do


@dataclass
class Target:
    """A gateway, and what became of what was sent to it: by kind, how often."""

    port: int
    key: str
    came: Counter[tuple[str, str]] = field(default_factory=Counter)

    def head(self, line: str, *lines: str, key: bool = True) -> bytes:
        named = [f"Authorization: Bearer {self.key}"] if key else []
        origin = f"Origin: http://127.0.0.1:{self.port}"
        return (
            "\r\n".join((f"{line} HTTP/1.1", "Host: localhost", origin, *named, *lines))
            .replace("Host: localhost", f"Host: 127.0.0.1:{self.port}")
            .encode()
            + b"\r\n\r\n"
        )

    @contextlib.asynccontextmanager
    async def connection(
        self, kind: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection; raises OSError if none can be made. What goes wrong later is counted."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            self.came[kind, "refused"] += 1
            await asyncio.sleep(0.1)
            raise
        try:
            yield reader, writer
        except OSError:
            self.came[kind, "cut"] += 1
        finally:
            writer.close()

    async def send(self, kind: str, data: bytes, wait_s: float = _ANSWER_S) -> None:
        """Sends something and notes the status of the answer, or that none came."""
        with contextlib.suppress(OSError):
            async with self.connection(kind) as (reader, writer):
                writer.write(data)
                came = b""
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(wait_s):
                        await writer.drain()
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(wait_s):
                        came = await reader.read(256)
                found = re.match(rb"HTTP/1.1 (\d+)", came)
                self.came[kind, found[1].decode() if found else "closed"] += 1


def _post(target: Target, path: str, kind: str, body: bytes, *lines: str) -> bytes:
    length = f"Content-Length: {len(body)}"
    return target.head(f"POST {path}", f"Content-Type: {kind}", length, *lines) + body


def bombs(target: Target) -> Iterator[tuple[str, bytes]]:
    """Requests that cost more to read than to send, each with a submit key."""
    most = BODY_MB * _MIB - 1000
    form, kind = "application/x-www-form-urlencoded", "application/json"
    code = b'{"code": "-- x", "environment": '
    many = b"{" + b",".join(b'"k%d":0' % number for number in range(most // 12)) + b"}"
    unseen = "\u202e\u202d" * (most // 20)
    for path in ("/v1/check", "/api/check", "/v1/step"):
        yield f"deep JSON {path}", _post(target, path, kind, b"[" * most)
        yield f"deep value {path}", _post(target, path, kind, code + b"[" * (most - 100))
        yield f"huge number {path}", _post(target, path, kind, b'{"timeout": ' + b"9" * most + b"}")
        yield f"many keys {path}", _post(target, path, kind, many)
        yield (
            f"many values {path}",
            _post(target, path, kind, b'{"x":[' + b"0," * (most // 2) + b"0]}"),
        )
    snippets = json.dumps({"snippets": [{"id": str(n), "code": ""} for n in range(90_000)]})
    yield "many snippets", _post(target, "/api/check", kind, snippets.encode())
    yield "escaped form", _post(target, "/page/check", form, b"code=" + b"%41" * (most // 3))
    yield "many fields", _post(target, "/page/check", form, b"a=&" * (most // 3))
    yield "large form", _post(target, "/page/check", form, b"code=" + b"a" * (most + 2000))
    yield (
        "unseen text",
        _post(
            target, "/page/check", form, urlencode({"code": unseen}).encode(), "HX-Request: true"
        ),
    )
    yield (
        "gzip",
        _post(
            target, "/v1/check", kind, gzip.compress(b"a" * (most * 10)), "Content-Encoding: gzip"
        ),
    )
    long = b'{"code": "-- x", "request_id": "' + b"r" * most + b'"}'
    yield "long id", _post(target, "/v1/check", kind, long)
    yield "long path", target.head(f"GET /v1/requests/{'r' * 60_000}")
    yield "long header", target.head("GET /v1/status", f"X-Long: {'h' * 200_000}")
    line = b'{"op": "check", "code": "-- x", "id": ' + b"[" * 1000 + b"\n"
    yield "malformed lines", _post(target, "/v1/batch", "application/x-ndjson", line * 3000)
    yield "one long line", _post(target, "/v1/batch", "application/x-ndjson", b"x" * most)


async def throw_bombs(target: Target) -> None:
    """One after another."""
    while True:
        for kind, data in bombs(target):
            await target.send(kind, data)
            await asyncio.sleep(0.2)


async def hold(
    target: Target, kind: str, number: int, begin: bytes, more: bytes, *, streams: bool = False
) -> None:
    """Holds so many connections on which a request never comes to its end.

    Args:
        streams: whether an answer that goes on is read on; otherwise it ends the connection.
    """

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                async with target.connection(kind) as (reader, writer):
                    writer.write(begin)
                    target.came[kind, "opened"] += 1
                    reading = asyncio.ensure_future(_answered(reader, streams))
                    try:
                        while not reading.done():
                            writer.write(more)
                            await writer.drain()
                            await asyncio.wait({reading}, timeout=1.0)
                    finally:
                        reading.cancel()
                        await asyncio.gather(reading, return_exceptions=True)
                    target.came[kind, "ended"] += 1
            await asyncio.sleep(0.5)

    await asyncio.gather(*(one() for _ in range(number)))


async def _answered(reader: asyncio.StreamReader, streams: bool) -> None:
    found = await reader.read(64)
    while streams and found.startswith(b"HTTP/1.1 200") and await reader.read(_MIB):
        pass


async def flood(target: Target) -> None:
    """Opens connections as fast as they can be opened, and says nothing."""
    opened: list[asyncio.StreamWriter] = []
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", target.port)
            target.came["flood", "opened"] += 1
            opened.append(writer)
        if len(opened) >= 2000:
            for each in opened:
                each.transport.abort()
            opened.clear()
        await asyncio.sleep(0.005)


async def nonsense(target: Target) -> None:
    """What is no HTTP, wrong keys, and logins that end before they have begun."""
    wrong = Target(target.port, "wrong", target.came)
    login = target.head("POST /page/login", "Content-Length: 10", key=False)
    names, lines = (f"X{number}:" for number in range(8000)), ["a:"] * 12_000
    named = target.head("GET /health", *names, "Connection: close", key=False)
    chunked = ("Transfer-Encoding: chunked", "Connection: close")
    trailed = (
        target.head("POST /health", *chunked, key=False)
        + "\r\n".join(("0", *lines, "", "")).encode()
    )
    while True:
        await target.send("many headers", named, 5.0)
        await target.send("many trailers", trailed, 5.0)
        await target.send("no HTTP", b"\x16\x03\x01 nonsense\r\n\r\n", 2.0)
        await target.send("wrong key", wrong.head("GET /v1/status", "Connection: close"), 5.0)
        await target.send(
            "upgrade", target.head("GET /health", "Connection: upgrade", "Upgrade: websocket"), 5.0
        )
        with contextlib.suppress(OSError):
            async with target.connection("left login") as (_, writer):
                writer.write(login)
                await writer.drain()
                target.came["left login", "left"] += 1
        await asyncio.sleep(0.02)


def holds(target: Target) -> list[Awaitable[None]]:
    """Connections that are held open."""
    slow = target.head("POST /page/login", "Content-Length: 100", key=False)
    half = BODY_MB * _MIB // 2
    form = ("Content-Type: application/x-www-form-urlencoded", f"Content-Length: {half + 1000}")
    begun = target.head("POST /page/check", *form) + b"code=" + b"a" * half
    body = ("Content-Type: application/json", f"Content-Length: {half + 1000}")
    check = target.head("POST /v1/check", *body) + b'{"code": "' + b"a" * half
    waits = _post(target, "/v1/check", "application/json", b'{"code": "-- held"}')
    batch = target.head("POST /v1/batch", "Transfer-Encoding: chunked")
    return [
        hold(target, "no body", 200, slow, b""),
        hold(target, "slow body", 50, slow, b"a"),
        hold(target, "slow head", 200, b"GET /health HTTP/1.1\r\n", b"X: y\r\n"),
        hold(target, "half a form", 20, begun, b""),
        hold(target, "half a check", 20, check, b""),
        hold(target, "waiting checks", 300, waits, b""),
        hold(target, "half a batch", 100, batch, b"", streams=True),
        hold(target, "events", 300, target.head("GET /page/events"), b"", streams=True),
    ]


PARTS: dict[str, Callable[[Target], list[Awaitable[None]]]] = {
    "holds": holds,
    "bombs": lambda target: [throw_bombs(target), throw_bombs(target)],
    "floods": lambda target: [flood(target), nonsense(target)],
}
"""What one process of attackers does, all of it at once."""


async def attack(target: Target, part: str, seconds: float) -> None:
    """One part of the attack."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*PARTS[part](target))


# What is measured meanwhile


@dataclass
class Measured:
    """What the tenants and a probe have seen."""

    took_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)

    def p99_s(self) -> float:
        ranked = sorted(self.took_s)
        return ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]


async def measure(port: int, seconds: float) -> Measured:
    """Sends a check for each tenant four times a second, and asks for the health as often."""
    seen, numbers = Measured(), itertools.count()

    async def check(http: httpx2.AsyncClient, tenant: str) -> None:
        began_s = time.monotonic()
        try:
            answer = await http.post(
                "/v1/check",
                json={"code": f"-- accepted {next(numbers)}"},
                headers={"Authorization": f"Bearer {tenant}"},
            )
            # The server's own 503, and a proxy's answers, are no JSON.
            found = answer.json() if answer.is_success else {}
            verdict = found.get("verdict", str(answer.status_code))
        except httpx2.HTTPError as error:
            verdict = type(error).__name__
        seen.took_s.append(time.monotonic() - began_s)
        if verdict != "accepted":
            seen.wrong[verdict] += 1

    async def probe() -> None:
        # A new connection for each, as a balancer makes it.
        began_s = time.monotonic()
        answer = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(
                    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )
                answer = await reader.read()
                writer.close()
        is_well = answer.startswith(b"HTTP/1.1 200")
        seen.health_s.append(time.monotonic() - began_s if is_well else _ANSWER_S)

    async with (
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
        asyncio.TaskGroup() as group,
    ):
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for tenant in TENANTS:
                group.create_task(check(http, tenant))
            group.create_task(probe())
            await asyncio.sleep(_EVERY_S)
    return seen


@contextlib.contextmanager
def gateway_process(
    settings: Settings, folder: Path, files: int
) -> Iterator[tuple[int, int, Path]]:
    """A gateway with a small limit on files: its port, its process id, its log."""
    limits = {"body_mb": BODY_MB, "outstanding_mb": OUTSTANDING_MB, "outstanding": 1000}
    keys = [{"secret": tenant, **limits} for tenant in (*TENANTS, "attacker")]
    keys[-1]["rights"] = ["submit", "status"]
    log = folder / "log"
    options = ("serve", "--json", "--port", "0", "--keys", str(key_file(folder, *keys)))
    # The shell is replaced by the gateway.
    command = f'ulimit -n {files}; exec "$@"'
    program = (sys.executable, "-m", "leanq", *options)
    environ = {**os.environ, "LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix}
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command, "sh", *program], stdout=out, stderr=out, env=environ
        )
    try:
        end_s = time.monotonic() + _START_S
        while not (found := re.search(r"http://127.0.0.1:(\d+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"the gateway did not start: {log.read_text()}")
            time.sleep(0.05)
        yield int(found[1]), process.pid, log
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def memory_mb(pid: int, name: str = "VmHWM") -> float:
    """The resident memory of a process: the most it had, or what it has (``VmRSS``)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


@dataclass(frozen=True)
class Outcome:
    """How a gateway has stood an attack, how it was before, and how one beside it was meanwhile."""

    quiet: Measured
    attacked: Measured
    beside: Measured
    rest_mb: float
    most_mb: float
    log_bytes: int
    came: dict[str, dict[str, int]]
    is_proxied: bool

    def rows(self) -> list[tuple[str, str, str, str, str, bool]]:
        """Each figure: its name, before, beside, under attack, its limit, and whether that held."""
        # What floods of connections do to a gateway without a proxy is shown alone.
        open_ = not self.is_proxied
        times = self.quiet, self.beside, self.attacked
        p99s_s = [each.p99_s() for each in times]
        health_s = [max(each.health_s) for each in times]
        limit_s = max(2 * p99s_s[1], LEAST_P99_S)
        health_limit_s = max(2 * health_s[1], HEALTH_S)
        limit_mb = self.rest_mb + OUTSTANDING_MB + MORE_MB
        wrong = self.attacked.wrong.total()
        wrongs = ", ".join(f"{n} {name}" for name, n in self.attacked.wrong.items()) or "none"
        return [
            ("p99 of tenants, ms", *_ms(*p99s_s, limit_s), p99s_s[2] < limit_s or open_),
            (
                "slowest /health, ms",
                *_ms(*health_s, health_limit_s),
                health_s[2] < health_limit_s or open_,
            ),
            (
                *("memory, MB", f"{self.rest_mb:.0f}", "", f"{self.most_mb:.0f}"),
                *(f"{limit_mb:.0f}", self.most_mb < limit_mb),
            ),
            (
                *("log, bytes", "", "", f"{self.log_bytes:,}", f"{LOG_BYTES:,}"),
                self.log_bytes < LOG_BYTES,
            ),
            ("without a verdict", "", "", f"{wrong} ({wrongs})", "0", wrong == 0 or open_),
        ]

    def kept(self) -> bool:
        """Whether every limit is."""
        return all(row[-1] for row in self.rows())


def _ms(*times_s: float) -> tuple[str, str, str, str]:
    quiet, beside, attacked, limit = (f"{1000 * each:.0f}" for each in times_s)
    return quiet, beside, attacked, limit


async def attacker(port: int, part: str, seconds: float) -> asyncio.subprocess.Process:
    """A process that attacks, and prints what came of it."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engines.attack", "--port", str(port), "--part", part),
        *("--seconds", str(seconds)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
    )


async def run(
    seconds: float,
    quiet_s: float,
    files: int,
    parts: Collection[str] = tuple(PARTS),
    *,
    is_proxied: bool,
) -> Outcome:
    """Attacks a gateway of its own."""
    with own_server() as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with working(server.settings, Scripted(), slots=2000):
            starting = contextlib.ExitStack()
            async with contextlib.AsyncExitStack() as proxies:
                proxies.enter_context(starting)
                (port, pid, log), (other_port, _, _) = [
                    await asyncio.to_thread(
                        starting.enter_context, gateway_process(server.settings, each, files)
                    )
                    for each in (folder, Path(tempfile.mkdtemp(dir=folder)))
                ]
                if is_proxied:
                    behind, [port] = port, free_ports(1)
                    await proxies.enter_async_context(
                        caddy(f"127.0.0.1:{behind}", port, connections=files - 324)
                    )
                await asyncio.gather(measure(port, 1.0), measure(other_port, 1.0))
                quiet, _ = await asyncio.gather(
                    measure(port, quiet_s), measure(other_port, quiet_s)
                )
                rest_mb = memory_mb(pid, "VmRSS")
                attackers = [await attacker(port, part, seconds) for part in parts]
                for each in attackers:
                    assert each.stdout
                    await each.stdout.readline()
                attacked, beside = await asyncio.gather(
                    measure(port, seconds), measure(other_port, seconds)
                )
                came: dict[str, dict[str, int]] = {}
                async with asyncio.timeout(_END_S):
                    for each in attackers:
                        told, _ = await each.communicate()
                        came |= json.loads(told)
                most_mb = memory_mb(pid)
                size = log.stat().st_size
                return Outcome(quiet, attacked, beside, rest_mb, most_mb, size, came, is_proxied)


def main() -> int:
    """Runs the attack and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="of the attack")
    parser.add_argument("--quiet-seconds", type=float, default=30.0, help="before it")
    parser.add_argument("--files", type=int, default=1024, help="the gateway's limit on open files")
    parser.add_argument("--port", type=int, help="attack what is there, as the attackers' process")
    parser.add_argument("--way", choices=WAYS, action="append", help="one way alone")
    parser.add_argument("--part", choices=PARTS, help="one part of the attack alone")
    options = parser.parse_args()
    if options.port:
        target = Target(options.port, "attacker")
        # Attackers have machines of their own.
        os.nice(_NICE)
        print("begun", flush=True)
        asyncio.run(attack(target, options.part, options.seconds))
        came: dict[str, dict[str, int]] = {}
        for (kind, what), number in sorted(target.came.items()):
            came.setdefault(kind, {})[what] = number
        print(json.dumps(came))
        return 0
    parts = [options.part] if options.part else [*PARTS]
    outcomes = [
        _told(
            way,
            asyncio.run(
                run(
                    options.seconds,
                    options.quiet_seconds,
                    options.files,
                    parts,
                    is_proxied=way == "proxied",
                )
            ),
        )
        for way in options.way or WAYS
    ]
    return 0 if all(outcomes) else 1


def _told(way: str, outcome: Outcome) -> bool:
    """Prints a table; returns whether all limits were kept."""
    print(f"# {way}")
    for kind, counts in outcome.came.items():
        print(f"{kind:28} {', '.join(f'{what} {n:,}' for what, n in counts.items())}")
    head = ("measured", "before", "beside", "under attack", "limit")
    for name, *figures, kept in ((*head, None), *outcome.rows()):
        columns = "".join(f"{figure:>14}" for figure in figures)
        print(f"{name:24}{columns}  {'' if kept is None else 'ok' if kept else 'EXCEEDED'}")
    return outcome.kept()


if __name__ == "__main__":
    sys.exit(main())
