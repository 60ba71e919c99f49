"""``leanq extract``: what a text declares, or another text made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leanq.commands import options
from leanq.commands.common import EXIT_OK, interruptible
from leanq.commands.submit import read_named
from leanq.commands.worker import project_here
from leanq.errors import InvalidRequestError, UsageError
from leanq.queue.requests import TIMEOUT_S, Reply, Request

if TYPE_CHECKING:
    from leanq.lean.declarations import Declaration
    from leanq.lean.lean_driver import LeanDriver


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
    help="Limit in CPU seconds, for each of the times that Lean reads the text.",
)
@click.option(
    "--make",
    type=click.Choice(["statements", "lemmas", "negation"]),
    help="Print another text: its theorems with sorry for their proofs, each sorry as a lemma of "
    "its own, or the negation of a theorem.",
)
@click.option("--theorem", metavar="NAME", help="The theorem to negate [default: the last one].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
def extract(
    file: str,
    project: Path | None,
    lean: str | None,
    timeout_s: float,
    make: str | None,
    theorem: str | None,
    as_json: bool,
) -> int:
    """Print a text's declarations, as Lean compiles them here.

    For each declaration: its name, kind and statement, its universe parameters, its references in
    the text and among its imports, the axioms behind it, and its place. None of it is a verdict;
    for verdicts use submit and verify.

    A FILE of - is standard input. --make compiles its result once more. A negation says that a
    theorem's statement implies False.

    Exit code: 0, or 2 if Lean refuses the text.
    """
    code = read_named(file)
    if theorem and make != "negation":
        raise UsageError("--theorem names what --make negation negates")
    from leanq.lean import rewrites
    from leanq.lean.declarations import extract as declarations_of
    from leanq.lean.environment import open_environment
    from leanq.lean.lean_driver import LeanDriver

    where = project or project_here()
    driver = LeanDriver(lambda: open_environment("default", where, lean=lean), slots=1, forks=None)

    def request(text: str) -> Request:
        return Request(op="check", code=text, timeout_s=timeout_s)

    async def declared(text: str) -> Sequence[Declaration]:
        return await declarations_of(driver.opened.lean, request(text))

    async def extracted() -> str | Sequence[Declaration]:
        await driver.opened.lean.open()
        found = await declared(code)
        if make is None:
            return found
        if make == "statements":
            made = rewrites.with_statements(code, found)
        elif make == "lemmas":
            reply = await _checked(driver, request(code))
            made = rewrites.with_lemmas(
                code, found, reply.sorries, _free_name("sorry_lemma_", code)
            )
        else:
            chosen = _chosen(found, theorem)
            name = _free_name("negation", code)
            made = rewrites.with_negation(code, chosen, name)
            try:
                await declared(rewrites.with_contradiction(code, chosen, name))
            except InvalidRequestError as error:
                raise UsageError(
                    f"Lean prints {chosen.statement!r} for {chosen.name}, and reads that "
                    "otherwise. Put `set_option pp.numericTypes true` or `set_option "
                    f"pp.explicit true` in front of it; {error}"
                ) from None
        try:
            after = await declared(made)
        except InvalidRequestError as error:
            raise UsageError(f"the new text does not compile: {error}\n{made}") from None
        _same(found, after, make)
        return made

    async def run() -> str | Sequence[Declaration]:
        try:
            return await extracted()
        finally:
            await driver.opened.close()

    told = interruptible(run())
    if isinstance(told, str):
        click.echo(json.dumps({"text": told}) if as_json else told, nl=as_json)
    else:
        for each in told:
            shown = {**asdict(each), "has_sorry": each.has_sorry}
            click.echo(json.dumps(shown) if as_json else "\n".join(_lines(each)))
    return EXIT_OK


async def _checked(driver: LeanDriver, asked: Request) -> Reply:
    reply = await driver.run(asked)
    if reply.verdict not in ("accepted", "incomplete"):
        raise UsageError(f"the text does not compile ({reply.verdict}, {reply.reason})")
    if not reply.sorries:
        raise UsageError("the text has no sorry to make a lemma of")
    return reply


def _chosen(found: Sequence[Declaration], name: str | None) -> Declaration:
    theorems = [each for each in found if each.kind == "theorem"]
    chosen = [each for each in theorems if name in (None, each.name)]
    if not chosen:
        named = ", ".join(each.name for each in theorems[:20]) or "none"
        raise UsageError(f"the text has no theorem {name or ''!r}; it has {named}")
    return chosen[-1]


def _same(before: Sequence[Declaration], after: Sequence[Declaration], make: str) -> None:
    """Raises UsageError unless all earlier declarations have the same statements as before."""
    now = {each.name: (each.kind, each.statement) for each in after}
    for each in before:
        # A negation takes its theorem's place.
        is_gone = make == "negation" and each.name not in now
        if not is_gone and now.get(each.name) != (each.kind, each.statement):
            raise UsageError(f"the new text states {each.name} otherwise")


def _free_name(prefix: str, code: str) -> str:
    while prefix in code:
        prefix += "_"
    return prefix


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
