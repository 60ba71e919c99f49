"""``leanq env``: what is known of the environments that a worker here would serve."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from leanq.commands.worker import environments, named_environments
from leanq.fleet.shown import printable
from leanq.lean.audit.evaluators import evaluators
from leanq.lean.audit.judges import Judges
from leanq.lean.audit.programs import Evaluators
from leanq.lean.environment import Environment, open_environment, pack_environment


@click.group()
def env() -> None:
    """Look at environments on this machine, and prepare them."""


_lean = click.option(
    "--lean", metavar="PATH", help="The lean program [default: $LEANQ_LEAN, or found]."
)


@env.command()
@environments
@_lean
def prepare(environments: Sequence[str], lean: str | None) -> None:
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
    if any(faults):
        sys.exit(1)


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
@_lean
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
@_lean
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each environment.")
def show(environments: Sequence[str], lean: str | None, as_json: bool) -> None:
    """Print an environment's syntax that evaluates what a text wrote.

    A text with such a word or attribute is unverified. The first look at an environment reads all
    its compiled libraries, and keeps the result in the cache folder.
    """
    for name, path in named_environments(environments).items():
        environment = open_environment(name, path, lean=lean)
        found = evaluators(environment)
        if as_json:
            shown = {"environment": name, "fingerprint": environment.fingerprint}
            click.echo(json.dumps(shown | asdict(found)))
        else:
            click.echo(printable(str(environment)))
            for line in _lines(found):
                click.echo(f"  {printable(line)}")


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
