"""``leanq env``: the environments of a queue, and those of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from leanq.commands import options
from leanq.commands.common import queue_settings, tell
from leanq.commands.environments import environments, openers
from leanq.fleet.shown import printable, table
from leanq.fleet.stats import fingerprints_of, options_of
from leanq.lean.environment import Environment
from leanq.lean.judge.judge_client import Judges
from leanq.lean.run.evaluators import evaluators
from leanq.lean.run.fork_server import fault_of_forks
from leanq.lean.run.headers import forkable_header, note
from leanq.lean.run.library_syntax import Evaluators
from leanq.lean.run.proof import short
from leanq.lean.run.toolchain import LEANS_OWN, shown
from leanq.lean.text import split_header
from leanq.queue.operator_queue import look
from leanq.queue.results import Status
from leanq.queue.wire import environments_in, info_of


@click.group()
def env() -> None:
    """List environments, and prepare them."""


@env.command("list")
@options.queue
def list_(url: str | None, as_json: bool) -> None:
    """Show the queue's environments: Lean and options, library, fingerprint, workers, kernel.

    The kernel judges what Lean compiles. An environment that no worker serves any more is shown
    as the last one described it.
    """
    status = asyncio.run(look(queue_settings(url)))
    found = _found(status)
    rows = table([_row(each) for each in found]) or ["no worker has offered an environment yet"]
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
        about, workers = info_of(status.environments.get(name, b"")), served.get(name, {})
        told = {key: about.get(key) for key in ("driver", "lean", "commit", "project", "kernel")}
        prints = {*workers.values()} or {str(about.get("fingerprint") or "")}
        libraries = about.get("libraries")
        found.append(
            {
                "environment": name,
                **told,
                "libraries": libraries if isinstance(libraries, list) else [],
                "options": options_of(about),
                "fingerprints": sorted(filter(None, prints)),
                "workers": sorted(workers),
            }
        )
    return found


def _row(each: dict[str, Any]) -> dict[str, str]:
    # What every Lean has tells no environment from another.
    libraries = sorted(map(str, each["libraries"]), key=lambda name: (name in LEANS_OWN, name))
    shown = [", ".join(libraries[:3]) + (", …" if libraries[3:] else "")]
    if each["project"]:
        shown.insert(0, str(each["project"]))
    with_options = f", {', '.join(each['options'])}" if each["options"] else ""
    cells = {
        "ENVIRONMENT": each["environment"],
        "LEAN": f"{each['lean'] or each['driver'] or ''}{with_options}",
        "LIBRARY": ": ".join(filter(None, shown)),
        "FINGERPRINT": ", ".join(str(each_print)[:12] for each_print in each["fingerprints"]),
        "WORKERS": len(each["workers"]),
        "KERNEL": each["kernel"] or "",
    }
    return {title: printable(str(cell)) or "–" for title, cell in cells.items()}


def _refuse_names(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> None:
    if names:
        raise click.UsageError(
            f"this reads environments of this machine: write --env {names[0]}=FOLDER. What workers "
            "offer by name: leanq env list"
        )


_no_names = click.argument(
    "names", nargs=-1, metavar="", expose_value=False, callback=_refuse_names
)


@env.command()
@_no_names
@environments
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="TEXT|FILE",
    help="What texts will import, such as 'import Mathlib', or a file that begins so; may be given "
    "several times. Workers on this machine preload it before their first text.",
)
def prepare(headers: Sequence[str], **given: Any) -> int:
    """Fill this machine's cache with what a worker needs to know of environments.

    Hashes their compiled files, looks for syntax that evaluates what a text wrote, writes all
    modules as the judge's kernel reads them, tests the judge, and proves forks behind each
    --header. A worker does the same at the first use. Run it where an image is built.

    Exit code: 0 if all can be judged, 1 if one cannot, or has not what a --header imports.
    """
    texts = [_text_of(header) for header in headers]
    faults = []
    for opener in openers(**given).values():
        environment = opener()
        evaluators(environment)
        fault, made, unread = asyncio.run(_prepared(environment))
        said = f"prepared, with {made}" if made else "prepared"
        click.echo(printable(f"{environment}: {fault or said}"))
        for module, why in unread.items():
            click.echo(printable(f"  {module} cannot be imported by what is judged: {why}"))
        faults.append(fault)
        for text in texts:
            fault, said = asyncio.run(_forked(environment, text))
            click.echo(printable(f"  {fault or said}"))
            faults.append(fault)
    return int(any(faults))


def _text_of(header: str) -> str:
    """Returns a text with the header that ``--header`` gives or names the file of."""
    path = Path(header)
    try:
        return path.read_text() if path.is_file() else f"{header}\n"
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--header {header}: {error}") from None


async def _forked(environment: Environment, text: str) -> tuple[str, str]:
    """Notes a text's header, and has forks behind it proved. Returns why no text can have it, or
    ""; and what came of it."""
    whole = environment.header_for(text) + text
    header = forkable_header(environment, whole)
    if header is None:
        if environment.missing(split_header(whole)):
            return environment.explain_import(whole), ""
        return f"texts that begin so run in no fork: {text[:80]!r}", ""
    note(environment, header)
    why = await fault_of_forks(environment, header, anew=False)
    if why:
        return "", f"each worker has to prove forks behind {short(header)}: {why}"
    return "", f"forks behind {short(header)} are proved"


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
@_no_names
@environments
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each environment.")
def show(as_json: bool, **given: Any) -> None:
    """Print an environment's options, and its syntax that evaluates what a text wrote.

    A text with such a word or attribute is unverified. The first look at an environment reads all
    its compiled libraries, and keeps the result in the cache folder.
    """
    for name, opener in openers(**given).items():
        environment = opener()
        found = evaluators(environment)
        about = {"fingerprint": environment.fingerprint, "options": shown(environment.options)}
        record = {"environment": name, **about, **asdict(found)}
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
