"""``leanq extract``: what a text declares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leanq.commands import options
from leanq.commands.common import EXIT_OK, interruptible
from leanq.commands.environments import project_here
from leanq.commands.submit import read_named
from leanq.queue.requests import TIMEOUT_S, Request

if TYPE_CHECKING:
    from leanq.lean.judge.declarations import Declaration


@click.command()
@click.argument("file")
@click.option(
    "--project",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    metavar="FOLDER",
    help="The Lake project, or folder of .olean files, that it imports from [default: the project "
    "here, or Lean's own library].",
)
@options.lean_program
@click.option(
    "--timeout",
    "timeout_s",
    type=options.FiniteRange(*TIMEOUT_S, "CPU seconds"),
    default=60.0,
    help="Limit in CPU seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
def extract(
    file: str,
    project: Path | None,
    lean: str | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Print a text's declarations, as Lean compiles them here.

    For each declaration: its name, kind and statement, its universe parameters, its references in
    the text and among its imports, the axioms behind it, and its place. None of it is a verdict;
    for verdicts use submit and verify.

    A FILE of - is standard input.

    Exit code: 0, or 2 if Lean refuses the text.
    """
    code = read_named(file)
    from leanq.lean.driver import LeanDriver
    from leanq.lean.environment import open_environment
    from leanq.lean.judge.declarations import extract as declarations_of

    where = project or project_here()
    driver = LeanDriver(lambda: open_environment("default", where, lean=lean), slots=1, forks=None)

    async def run() -> Sequence[Declaration]:
        try:
            await driver.opened.lean.open()
            asked = Request(op="check", code=code, timeout_s=timeout_s)
            return await declarations_of(driver.opened.lean, asked)
        finally:
            await driver.opened.close()

    for each in interruptible(run()):
        shown = {**asdict(each), "has_sorry": each.has_sorry}
        click.echo(json.dumps(shown) if as_json else "\n".join(_lines(each)))
    return EXIT_OK


def _lines(each: Declaration) -> list[str]:
    universes = f".{{{', '.join(each.universes)}}}" if each.universes else ""
    told = {
        "at": f"{each.line}:{each.column} to {each.end_line}:{each.end_column}",
        "uses": ", ".join(each.local),
        "imports": ", ".join(each.imported),
        "axioms": ", ".join(each.axioms),
    }
    head = f"{each.kind} {each.name}{universes} : {each.statement or '?'}"
    return [head, *(f"  {name:8}{value}" for name, value in told.items() if value)]
