"""``leanq status`` and ``leanq doctor``: what there is, and what is missing."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import click

from .. import __version__, wire
from ..config import Settings, without_password
from ..drivers.environment import Environment, open_environment
from ..drivers.lean import LeanDriver
from ..errors import LeanQError, WireError
from ..local import EmbeddedServer, UpFile, embedded_settings, find_server
from ..queue import Queue, look
from ..sandbox import Sandbox
from ..states import MemoryStates
from ..transitions import Status
from ..wire import Request
from .fleet import queue_settings


def status(url: str | None, as_json: bool) -> None:
    """Prints one look at the queue."""
    settings = queue_settings(url)
    record = _record(settings, asyncio.run(look(settings)))
    if as_json:
        click.echo(json.dumps(record, default=str))
    else:
        click.echo("\n".join(_lines(record)))


def _record(settings: Settings, found: Status) -> dict[str, Any]:
    counters = found.counters
    return {
        "url": without_password(settings.url),
        "waiting": [asdict(row) for row in found.levels],
        "suspects": dict(found.suspects),
        "running": sum(row.held for row in found.workers),
        "dead": found.dead,
        "submitted": counters.get("submitted", 0),
        "settled": counters.get("settled", 0),
        "coalesced": counters.get("coalesced", 0),
        "remembered": counters.get("remembered", 0),
        "reaped": counters.get("reaped", 0),
        "released": counters.get("released", 0),
        "fenced": counters.get("fenced", 0),
        "prefixes": _counted(counters, "way:"),
        "warm_hits": counters.get("warm_hits", 0),
        "warm_misses": counters.get("warm_misses", 0),
        "steals": counters.get("steals", 0),
        "verdicts": _counted(counters, "verdict:"),
        "environments": {lane: _info(about) for lane, about in sorted(found.lanes.items())},
        "workers": [
            {
                "worker": row.worker,
                "running": row.held,
                "lease_s": round(row.lease_s, 1),
                **{k: v for k, v in _info(row.info).items() if isinstance(v, _SHOWN.get(k, ()))},
            }
            for row in found.workers
        ],
    }


def _counted(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """The counters whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): n
        for name, n in sorted(counters.items())
        if name.startswith(prefix)
    }


_SHOWN: Mapping[str, type] = {"slots": int, "started": float, "lanes": list}


def _lines(record: dict[str, Any]) -> Iterator[str]:
    yield f"queue     {record['url']}"
    waiting = sum(row["waiting"] for row in record["waiting"])
    yield f"waiting   {waiting}"
    for row in record["waiting"]:
        yield (
            f"          {row['lane']}, priority {row['level']}: {row['waiting']} of "
            f"{row['tenants']} tenants, the oldest for {row['oldest_s']:.1f} s"
        )
    for lane, count in record["suspects"].items():
        yield f"          {lane}: {count} suspects, each to run alone"
    yield f"running   {record['running']}"
    counts = ", ".join(f"{name} {count}" for name, count in record["verdicts"].items())
    yield f"ended     {counts or 'nothing yet'}"
    if record["coalesced"] or record["remembered"]:
        yield (
            f"saved     {record['coalesced']} by an identical request's run, "
            f"{record['remembered']} by a remembered verdict"
        )
    yield (
        f"trouble   {record['reaped']} reaped, {record['released']} released, "
        f"{record['fenced']} late results, {record['dead']} dead letters"
        f"{' (leanq dead list)' if record['dead'] else ''}"
    )
    if record["prefixes"]:
        ways = ", ".join(f"{name} {count}" for name, count in record["prefixes"].items())
        yield f"prefixes  {ways}"
    if record["warm_hits"] or record["warm_misses"]:
        yield (
            f"warm      {record['warm_hits']} hits, {record['warm_misses']} misses, "
            f"{record['steals']} stolen from workers that did not come"
        )
    for lane, about in record["environments"].items():
        yield f"offered   {lane}: {_about(about)}"
    for row in record["workers"]:
        lease = f"lease {row['lease_s']} s" if row["lease_s"] > 0 else "LAPSED"
        age = time.time() - row.get("started", time.time())
        yield (
            f"worker    {row['worker']}: {row['running']} of {row.get('slots', '?')} slots, "
            f"{lease}, up {age:.0f} s, serves {', '.join(map(str, row.get('lanes', [])))}"
        )
    if not record["workers"]:
        yield "worker    none is alive; start one with 'leanq worker'"


def _about(about: dict[str, Any]) -> str:
    if "lean" not in about:
        return str(about.get("driver", "?"))
    return f"Lean {about['lean']}, fingerprint {str(about.get('fingerprint', ''))[:12]}"


def _info(data: bytes) -> dict[str, Any]:
    # Whatever stands in Redis was written by somebody; a look must survive it.
    try:
        return wire.unpack_info(data)
    except WireError:
        return {}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's: what was looked at, whether it works, and the remedy if not."""

    what: str
    works: bool
    text: str


def doctor(url: str | None, as_json: bool, lean: str | None) -> int:
    """Looks at everything a check needs, and does one; 0 if it works, else 3."""
    findings = asyncio.run(_examine(url, lean))
    for finding in findings:
        if as_json:
            click.echo(json.dumps(asdict(finding)))
        else:
            mark = click.style("ok     " if finding.works else "MISSING", bold=not finding.works)
            click.echo(f"{mark} {finding.what:12} {finding.text}")
    return 0 if all(finding.works for finding in findings) else 3


async def _examine(url: str | None, lean: str | None) -> list[Finding]:
    python = f"{platform.python_version()} ({sys.executable})"
    findings = [Finding("leanq", True, __version__), Finding("python", True, python)]
    findings.append(await _server(url or UpFile(os.environ).read()))
    environment = _try(findings, "lean", lambda: open_environment("default", None, lean=lean))
    findings.append(await _sandbox())
    if environment:
        findings.append(await _check(environment))
    return findings


def _try(findings: list[Finding], what: str, look: Callable[[], Environment]) -> Environment | None:
    try:
        found = look()
    except LeanQError as error:
        findings.append(Finding(what, False, str(error)))
        return None
    findings.append(Finding(what, True, str(found)))
    return found


async def _server(url: str | None) -> Finding:
    if url is None:
        program = find_server()
        try:
            with EmbeddedServer() as server:
                about = await _ask_server(embedded_settings(server, os.environ))
        except LeanQError as error:
            return Finding("server", False, str(error))
        return Finding("server", True, f"embedded, {about} ({program})")
    try:
        about = await _ask_server(Settings.load(url, os.environ))
    except LeanQError as error:
        return Finding("server", False, str(error))
    return Finding("server", "evicts" not in about, f"{without_password(url)}, {about}")


async def _ask_server(settings: Settings) -> str:
    queue = Queue(settings)
    try:
        info = await queue.ping()
    finally:
        await queue.close()
    version = info.get("valkey_version") or info.get("redis_version", "?")
    policy = str(info.get("maxmemory_policy", "?"))
    text = f"version {version}, maxmemory-policy {policy}"
    if policy.startswith("allkeys"):
        text += " evicts requests in flight: set noeviction, or a volatile policy"
    return text


async def _sandbox() -> Finding:
    try:
        sandbox = await Sandbox.open()
    except LeanQError as error:
        return Finding("sandbox", False, str(error))
    walls = sandbox.isolation
    await sandbox.close()
    if "net-ns" in walls and "mount-ns" in walls:
        return Finding("sandbox", True, ", ".join(walls))
    text = f"only {', '.join(walls) or 'process groups'}: allow user namespaces to keep "
    return Finding("sandbox", True, text + "candidates off the network (see DESIGN.md)")


async def _check(environment: Environment) -> Finding:
    """One real check, audit and all."""
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
