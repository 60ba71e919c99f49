"""``leanq doctor``: what there is, what is missing, and the remedy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import click

from leanq import __version__
from leanq.commands import options
from leanq.commands.common import tell
from leanq.commands.environments import environments, openers
from leanq.commands.worker import cpus
from leanq.errors import LeanQError, NotPermittedError, RefusedError, UnavailableError
from leanq.fleet.shown import duration
from leanq.fleet.stats import degraded_of
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.judge.judge_client import Judges
from leanq.lean.run.fork_server import fault_of_forks
from leanq.lean.run.headers import prepared
from leanq.lean.run.headers_memory import LEAST_BYTES, WORKER_BYTES, Memory, default_bytes
from leanq.lean.run.proof import memory_of, short
from leanq.lean.sandbox.sandbox import Sandbox
from leanq.lean.sandbox.walls import advice, missing_walls
from leanq.local import EmbeddedServer, find_server
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.requests import Request
from leanq.queue.settings import Settings, without_password
from leanq.queue.shard import Shard, check_shape, refusal
from leanq.queue.trial import Trial, try_scripts
from leanq.queue.up_file import UpFile
from leanq.queue.wire import info_of
from leanq.states import MemoryStates

_FULL = 0.97  # share of maxmemory
_CLOCKS_AGREE_S = 60.0
_UNASKED_S = 1.0
_REMEDY_OF_FORKS = (
    "it needs x86-64, process and mount namespaces (see the sandbox's line), and a Lean of the "
    "official layout, with lib/lean/libleanshared.so; leanq worker --no-fork-server is silent of it"
)
_INDENT = 22  # width of the mark and the name


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's: its subject, whether that works, and the remedy if not.

    ``warns``: leanq works without it, but slower or with less protection.
    """

    what: str
    works: bool
    text: str
    warns: bool = False

    def mark(self) -> str:
        """Returns the word in front of the line, in its colour."""
        word, colour = ("warning", "yellow") if self.warns else ("ok", "green")
        if not self.works:
            word, colour = "FAILED", "red"
        return click.style(f"{word:7}", fg=colour, bold=True)


@click.command()
@options.queue
@environments
def doctor(url: str | None, as_json: bool, **given: Any) -> int:
    """Show what is installed, what works, and how to mend it.

    Exit code: 0 if a check works in each environment, else 3; a warning is no failure.
    """
    findings = asyncio.run(_examine(url, openers(**given).values()))
    lines = (f"{each.mark()}  {each.what:11}  {_wrapped(each.text)}" for each in findings)
    tell(as_json, map(asdict, findings), lines)
    return 0 if all(finding.works for finding in findings) else 3


def _wrapped(text: str) -> str:
    """Wraps a text behind a mark and a name to the terminal's width; a file gets it whole."""
    if not sys.stdout.isatty():
        return text
    width = max(shutil.get_terminal_size().columns - _INDENT, 40)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * _INDENT}".join(lines)


async def _examine(
    url: str | None, environments: Iterable[Callable[[], Environment]]
) -> list[Finding]:
    python = f"{platform.python_version()} ({sys.executable})"
    findings = [Finding("leanq", True, __version__), Finding("python", True, python)]
    findings += await server_findings(url or UpFile(os.environ).read())
    findings += [await sandbox_finding(), memory_finding(cpus())]
    for opener in environments:
        findings += await _examine_environment(opener)
    return findings


async def _examine_environment(opener: Callable[[], Environment]) -> list[Finding]:
    try:
        environment = opener()
    except LeanQError as error:
        return [Finding("lean", False, str(error))]
    return await environment_findings(environment)


async def environment_findings(environment: Environment) -> list[Finding]:
    """Examines an environment: its Lean, the judge, forks, and one real check."""
    return [
        Finding("lean", True, str(environment)),
        await _judge(environment),
        await asyncio.to_thread(_first_texts, environment),
        await _fork_server(environment),
        await _check(environment),
    ]


async def server_findings(url: str | None) -> list[Finding]:
    """Examines the server that ``url`` names, or an embedded one, and looks for workers that do
    worse than others."""
    if url is None:
        program = find_server()
        try:
            with EmbeddedServer() as server:
                (found, *others) = await _ask_server(server.settings())
        except LeanQError as error:
            return [Finding("server", False, str(error))]
        return [replace(found, text=f"embedded, {found.text} ({program})"), *others]
    try:
        (found, *others) = await _ask_server(Settings.load(url, os.environ))
    except LeanQError as error:
        said = await _unasked(url)
        return [Finding("server", False, f"{error}{said or _hint(url, str(error))}")]
    return [replace(found, text=f"{without_password(url)}, {found.text}"), *others]


async def _unasked(url: str) -> str:
    """Returns what a server says to whoever connects before it ends the connection: in protected
    mode, or with too many clients."""
    parts = urlsplit(url)
    said = b""
    if parts.scheme != "redis":
        return ""
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        async with asyncio.timeout(_UNASKED_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 6379)
            with contextlib.closing(writer):
                said = await reader.readline()
    text = said.decode(errors="replace")
    return f"; it says: {text[1:].strip()}" if text.startswith("-") else ""


def _hint(url: str, failed: str) -> str:
    """Returns what may cause an error if only one side speaks TLS, or the name differs."""
    ended = r"reset by peer|closed by server|Connection lost|Broken pipe"
    if url.startswith("redis:") and re.search(ended, failed):
        return "; if that port speaks TLS, the URL begins with rediss://"
    if url.startswith("rediss:") and re.search(r"(?i)timeout connecting|WRONG_VERSION", failed):
        return "; if that port speaks no TLS, the URL begins with redis://"
    if "self-signed certificate" in failed:
        return "; ?ssl_ca_certs=FILE in the URL names the CA of the server's certificate"
    if "mismatch" in failed:
        return "; where the CA signs for this server alone, ?ssl_check_hostname=false is safe"
    return ""


async def _ask_server(settings: Settings) -> list[Finding]:
    """Examines a server, its clock and whether it runs the scripts. Looks for workers that cannot
    join, and for those that are slower than they should be."""
    shard = Shard(settings)
    try:
        info = await _info(shard)
        await check_shape(shard)
        ahead_s = await shard.clock_s() - time.time()
        may_look = "maxmemory_policy" in info
        looked = await OperatorQueue(shard).status() if may_look else None
        refused = await refusal(shard)
        trial = await try_scripts(settings)
        restart = await _restart(shard, info)
    finally:
        await shard.close()
    others = []
    if trial.failed:
        others.append(Finding("scripts", False, _failed(trial)))
    if refused:
        others.append(Finding("worker", False, f"one that would join is refused: {refused}"))
    others += [
        Finding("worker", True, f"{name} on {row.worker}: {why}", warns=True)
        for row in (looked.workers if looked else ())
        for name, why in degraded_of(info_of(row.info)).items()
    ]
    others += [
        Finding("requests", True, row.text, warns=True) for row in (looked.others if looked else ())
    ]
    others += [*filter(None, [restart])]
    version = info.get("valkey_version") or info.get("redis_version", "?")
    if abs(ahead_s) > _CLOCKS_AGREE_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        text = f"is {duration(abs(ahead_s))} {side} this machine's; leanq's times are the server's"
        others.append(Finding("clock", True, text, warns=True))
    if not may_look:
        text = "this user may not ask for its eviction policy and its workers, an observer may"
        text = f"version {version}{_shown(trial)}; {text}"
        return [Finding("server", True, text), *others]
    policy, works = str(info["maxmemory_policy"]), True
    text = f"version {version}{_shown(trial)}, maxmemory-policy {policy}"
    if policy.startswith("allkeys"):
        text += " evicts requests in flight: set noeviction, or a volatile policy"
        works = False
    used, limit = (int(info.get(name, 0)) for name in ("used_memory", "maxmemory"))
    if limit and used >= _FULL * limit:
        text += (
            f"; it is full ({used >> 20} of {limit >> 20} MiB) and takes no requests: enlarge it, "
            "or lower LEANQ_REPLY_TTL_S or LEANQ_SNAPSHOT_MB"
        )
        works = False
    return [Finding("server", works, text), *others]


async def _restart(shard: Shard, info: Mapping[str, Any]) -> Finding | None:
    """Looks whether a restart would replay what scripts wrote. Redis from 7.0 to 8.2 and Valkey 8.1
    do so as the default user; Valkey 9.1 does not ask for its rights."""
    valkey = str(info.get("valkey_version", "0")).split(".")[:2]
    if not info.get("aof_enabled") or [*map(int, valkey)] >= [9, 1]:
        return None
    key = shard.keys.of("stats")
    try:
        said, *_ = await shard.ask(("ACL", "DRYRUN", "default", "HSET", key, "x", "1"))
    except NotPermittedError as error:
        text = f"whether it keeps what scripts wrote is unknown: {error.right}"
        return Finding("restart", True, text, warns=True)
    except UnavailableError:
        # The server has no such command, so it is older than what it asks about.
        return None
    if said == b"OK":
        return None
    return Finding(
        "restart",
        True,
        "the server replays its append-only file as the user 'default', who may not write here, "
        "so a restart loses nearly all that scripts wrote; the first line of the file of users has "
        "to be 'user default off resetpass ~* &* +@all' (deploy/users.acl)",
        warns=True,
    )


def _failed(trial: Trial) -> str:
    first = next(iter(trial.failed.values()))
    return (
        f"no worker can serve there, since {', '.join(trial.failed)} fail: {first}; "
        "docs/operations/servers.md names the servers that serve; report others that should"
    )


def _shown(trial: Trial) -> str:
    """Returns how many scripts run, unless that says nothing of the server."""
    if trial.failed or trial.full:
        return ""
    if not trial.forbidden:
        return f", runs all {len(trial.passed)} scripts"
    return f", runs the {len(trial.passed)} scripts that this user may run"


async def _info(shard: Shard) -> Mapping[str, Any]:
    """Returns what the server says of itself: little to the user of a client or a worker."""
    try:
        return await shard.ping()
    except UnavailableError as refused:
        try:
            hello = await shard.call(_hello)
        except RefusedError:
            hello = {}
        except UnavailableError:
            raise refused from None
    return {"redis_version": hello.get(b"version", b"?").decode()}


async def _hello(client: Any) -> dict[bytes, Any]:
    """The part that each user may ask for."""
    answer = await client.execute_command("HELLO")
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))


async def sandbox_finding() -> Finding:
    """Examines the walls around each program."""
    try:
        sandbox = await Sandbox.open()
    except LeanQError as error:
        return Finding("sandbox", False, str(error))
    walls = sandbox.isolation
    await sandbox.close()
    text = ", ".join(walls) or "process groups"
    missing = missing_walls(walls)
    if missing:
        text = f"only {text}; without {', '.join(missing)}: {advice(missing)}"
    return Finding("sandbox", True, text, warns=bool(missing))


def memory_finding(slots: int) -> Finding:
    """Tells whether there is memory beside requests for what stands ready behind headers."""
    most, request = Memory().most_bytes(), Request("echo")
    taken = slots * (request.memory_mb + request.scratch_mb)
    text = (
        f"{most >> 20} MB: {taken} for requests of {request.memory_mb} MB in {slots} slots with "
        f"scratch disk of {request.scratch_mb} MB, {WORKER_BYTES >> 20} for the worker, "
        f"{default_bytes(slots) >> 20} for headers"
    )
    lacks = taken + ((WORKER_BYTES + LEAST_BYTES) >> 20) > most >> 20
    if lacks:
        text += ", which is more; give requests less --memory, or the worker fewer --slots"
    return Finding("memory", True, text, warns=lacks)


async def _judge(environment: Environment) -> Finding:
    judges = Judges(environment, slots=1)
    try:
        if why := await judges.self_test():
            return Finding("judge", False, f"texts that Lean takes stay unjudged: {why}")
        text = f"passes its self-test with honest and forged files: {await judges.describe()}"
        return Finding("judge", True, text)
    finally:
        await judges.close()


async def _fork_server(environment: Environment) -> Finding:
    """Compares half a dozen texts behind a preloaded header with a Lean that starts anew."""
    why = await fault_of_forks(environment, environment.header)
    if not why:
        return Finding("fork server", True, "says what Lean says that starts anew")
    text = f"checks are several times slower, since Lean starts anew for each text: {why}"
    return Finding("fork server", True, f"{text}; {_REMEDY_OF_FORKS}", warns=True)


def _first_texts(environment: Environment) -> Finding:
    """Tells what a worker's first texts wait for, behind the headers that it preloads."""
    headers = prepared(environment)
    if not headers:
        text = (
            "wait for their header's import and its proof, unless the fleet's texts had it lately; "
            "what texts will import: leanq env prepare --header 'import …'"
        )
        return Finding("first texts", True, text)
    proved = [header for header in headers if memory_of(environment, header).is_kept()]
    others = [header for header in headers if header not in proved]
    parts = []
    if proved:
        parts.append(f"wait for the import of {', '.join(map(short, proved))}, proved here")
    if others:
        parts.append(f"wait for import and proof of {', '.join(map(short, others))}")
    return Finding("first texts", True, "; ".join(parts))


async def _check(environment: Environment) -> Finding:
    """Runs one real check with its audit."""
    driver = LeanDriver(lambda: environment, slots=1)
    prelude = "prelude\n" if environment.toolchain.source == "wheel" else ""
    code = f"{prelude}theorem leanq_doctor (p : Prop) (h : p) : p := h\n"
    try:
        await driver.open(MemoryStates())
        reply = await driver.run(Request(op="check", code=code))
    except LeanQError as error:
        return Finding("check", False, str(error))
    finally:
        await driver.close()
    said = "; ".join(message.text for message in reply.messages)
    works = reply.verdict == "accepted"
    return Finding("check", works, f"{reply.verdict} in {reply.wall_s:.2f} s {said}".strip())
