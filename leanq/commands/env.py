"""``leanq env``: the environments of a queue and their aliases, and those of this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from leanq.commands import options
from leanq.commands.common import on_queues, queue_settings, tell
from leanq.commands.worker import environments, named_environments
from leanq.errors import UsageError
from leanq.fleet.shown import printable, table
from leanq.fleet.stats import fingerprints_of
from leanq.lean.audit.evaluators import evaluators
from leanq.lean.audit.judge_client import Judges
from leanq.lean.audit.programs import Evaluators
from leanq.lean.environment import Environment, open_environment, pack_environment
from leanq.lean.toolchain import LEANS_OWN
from leanq.queue.client_queue import ClientQueue
from leanq.queue.operator_queue import OperatorQueue, look, set_alias
from leanq.queue.results import Status
from leanq.queue.settings import check_name
from leanq.queue.wire import environments_in, info_of


@click.group()
def env() -> None:
    """List environments, move aliases, prepare environments."""


@env.command("list")
@options.queue
def list_(url: str | None, as_json: bool) -> None:
    """Show the queue's environments: Lean, library, fingerprint, workers, kernel, aliases.

    The kernel judges what Lean compiles. An environment that no worker serves any more is shown
    as the last one described it.
    """
    status = asyncio.run(look(queue_settings(url)))
    found = _found(status)
    defaults = {name[2:]: to for name, to in status.aliases.items() if name.startswith("t:")}
    rows = table([_row(each) for each in found]) or ["no worker has offered an environment yet"]
    for name, target in sorted(defaults.items()):
        rows.append(printable(f"'default' of the tenant {name} is {target}"))
    tell(as_json, found, rows)


def _found(status: Status) -> list[dict[str, Any]]:
    """Returns what is known of each environment, as ``leanq env list --json`` shows it."""
    served: dict[str, dict[str, str]] = {}
    for row in status.workers:
        info = info_of(row.info)
        for name in environments_in(info) if row.lease_s > 0 else ():
            served.setdefault(name, {})[row.worker] = fingerprints_of(info).get(name, "")
    found = []
    for name in sorted({*status.environments, *served}):
        if f"e:{name}" in status.aliases:
            # It was an environment before.
            continue
        about, workers = info_of(status.environments.get(name, b"")), served.get(name, {})
        told = {key: about.get(key) for key in ("driver", "lean", "commit", "project", "kernel")}
        prints = {*workers.values()} or {str(about.get("fingerprint") or "")}
        libraries = about.get("libraries")
        found.append(
            {
                "environment": name,
                **told,
                "libraries": libraries if isinstance(libraries, list) else [],
                "fingerprints": sorted(filter(None, prints)),
                "workers": sorted(workers),
                "aliases": _leading_to(name, "e:", status.aliases),
                "tenants": _leading_to(name, "t:", status.aliases),
            }
        )
    return found


def _leading_to(environment: str, kind: str, aliases: Mapping[str, str]) -> list[str]:
    """Returns the aliases, or the tenants whose default, lead to an environment."""
    names = (name for name, to in aliases.items() if aliases.get(f"e:{to}", to) == environment)
    return sorted(name[2:] for name in names if name.startswith(kind))


def _row(each: dict[str, Any]) -> dict[str, str]:
    # What every Lean has tells no environment from another.
    libraries = sorted(map(str, each["libraries"]), key=lambda name: (name in LEANS_OWN, name))
    shown = [", ".join(libraries[:3]) + (", …" if libraries[3:] else "")]
    if each["project"]:
        shown.insert(0, str(each["project"]))
    cells = {
        "ENVIRONMENT": each["environment"],
        "LEAN": each["lean"] or each["driver"] or "",
        "LIBRARY": ": ".join(filter(None, shown)),
        "FINGERPRINT": ", ".join(str(each_print)[:12] for each_print in each["fingerprints"]),
        "WORKERS": len(each["workers"]),
        "KERNEL": each["kernel"] or "",
        "ALIASES": ", ".join(each["aliases"]),
    }
    return {title: printable(str(cell)) or "–" for title, cell in cells.items()}


@env.command()
@click.argument("name", metavar="NAME")
@click.argument("target", metavar="TARGET", required=False)
@click.option("--drop", is_flag=True, help="Take the alias NAME away.")
@options.queue
def alias(url: str | None, as_json: bool, name: str, target: str | None, drop: bool) -> None:
    """Let NAME stand for the environment TARGET, from the next request on.

    Clients ask for NAME as for any environment. Requests that were submitted before end where they
    are, and states stay in the environment that they were made in.
    """
    if (target is None) != drop:
        raise UsageError("give either a TARGET or --drop")
    check_name("alias", name)
    if target is not None and check_name("environment", target) == name:
        raise UsageError(f"{name!r} cannot stand for itself")

    async def move(queues: Sequence[OperatorQueue]) -> tuple[str, bool]:
        shard = queues[0].shard
        if target is None and f"e:{name}" not in await shard.aliases():
            raise UsageError(f"{name!r} is no alias; {await shard.known()}")
        now = await set_alias(queues, "environment", name, target or "")
        return now, now in await ClientQueue(shard).served()

    now, served = on_queues(url, move)
    if as_json:
        click.echo(json.dumps({"alias": name, "environment": now or None, "served": served}))
        return
    if now != (target or ""):
        click.echo(f"another operator was later: {name} stands for {now or 'nothing'}")
    elif now:
        click.echo(f"{name} stands for {now} from the next request on")
    else:
        click.echo(f"{name} is no alias any more")
    if now and not served:
        click.echo(f"no worker serves {now} now: requests wait for one")


@env.command()
@environments
@options.lean_program
def prepare(environments: Sequence[str], lean: str | None) -> int:
    """Fill this machine's cache with what a worker needs to know of environments.

    Hashes their compiled files, looks for syntax that evaluates what a text wrote, writes all
    modules as the judge's kernel reads them, and tests the judge. A worker does the same at the
    first use. Run it where an image is built.

    Exit code: 0 if all can be judged, 1 if one cannot.
    """
    faults = []
    for name, path in named_environments(environments).items():
        environment = open_environment(name, path, lean=lean)
        evaluators(environment)
        fault, made, unread = asyncio.run(_prepared(environment))
        said = f"prepared, with {made}" if made else "prepared"
        click.echo(printable(f"{environment}: {fault or said}"))
        for module, why in unread.items():
            click.echo(printable(f"  {module} cannot be imported by what is judged: {why}"))
        faults.append(fault)
    return int(any(faults))


@env.command()
@click.argument("project", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The pack to write, such as mathlib.tar.zst.",
)
@options.lean_program
def pack(project: Path, output: Path, lean: str | None) -> None:
    """Write an environment with its Lean as one file, for machines with slow disks.

    PROJECT is a Lake project that is built, or a folder of .olean files. 'leanq worker --env
    NAME=FILE' unpacks it into the node's cache, once for all workers there.
    """
    environment = open_environment(output.name, project, lean=lean)
    files = pack_environment(environment, output.absolute())
    size_mb = output.stat().st_size / 1e6
    click.echo(printable(f"{environment}: {files} files in {output}, {size_mb:.0f} MB"))


async def _prepared(environment: Environment) -> tuple[str, str, Mapping[str, str]]:
    """Returns why nothing can be judged here, or ""; what was made; and which modules cannot be
    read. A pass is remembered."""
    judges = Judges(environment, slots=1)
    try:
        if fault := await judges.unavailable():
            return fault, "", {}
        return "", *await judges.prepare()
    finally:
        await judges.close()


@env.command()
@environments
@options.lean_program
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each environment.")
def show(environments: Sequence[str], lean: str | None, as_json: bool) -> None:
    """Print an environment's syntax that evaluates what a text wrote.

    A text with such a word or attribute is unverified. The first look at an environment reads all
    its compiled libraries, and keeps the result in the cache folder.
    """
    for name, path in named_environments(environments).items():
        environment = open_environment(name, path, lean=lean)
        found = evaluators(environment)
        record = {"environment": name, "fingerprint": environment.fingerprint, **asdict(found)}
        lines = (f"  {line}" for line in _lines(found))
        tell(as_json, [record], map(printable, (str(environment), *lines)))


def _lines(found: Evaluators) -> Iterator[str]:
    """Yields a line for each finding; one line if there is none."""
    yield from (f"word {word}: {syntax}" for word, syntax in found.words.items())
    yield from (f"attribute @[{name}]: {module}" for name, module in found.attributes.items())
    if found.heads:
        yield f"tactics with a configuration: {', '.join(found.heads)}"
    if found.fields:
        yield f"fields of configurations: {', '.join(found.fields)}"
    yield from (f"evaluates, and has no word: {syntax}" for syntax in found.wordless)
    yield from (f"not looked into: {library}: {why}" for library, why in found.unseen.items())
    if found == Evaluators():
        yield "no syntax beside Lean's own that evaluates"
