"""``leanq verify``: whether candidates prove a target."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Unpack

import click

from leanq.client import AsyncLeanQClient
from leanq.commands import options
from leanq.commands.submit import read_named, run_files
from leanq.errors import UsageError
from leanq.producer.request_builder import Check
from leanq.queue.requests import VERIFIED, Reply


@click.command()
@click.argument("candidates", nargs=-1, required=True, metavar="CANDIDATE...")
@click.option(
    "--target",
    metavar="FILE",
    help="Lean text whose theorems, their proofs a sorry, are to be proved.",
)
@click.option(
    "--theorem",
    "theorems",
    multiple=True,
    metavar="NAME",
    help="Instead of a target: a theorem of the environment whose statement is to be proved; may "
    "be given several times.",
)
@click.option(
    "--hole",
    "holes",
    multiple=True,
    metavar="NAME",
    help="A definition of the target whose value the candidate may choose; may be given several "
    "times.",
)
@options.client
@options.embedded
@options.wait
@options.env
@options.lean
def verify(
    candidates: tuple[str, ...],
    target: str | None,
    theorems: tuple[str, ...],
    holes: tuple[str, ...],
    url: str | None,
    as_json: bool,
    embedded: bool,
    wait_s: float | None,
    **how: Unpack[Check],
) -> int:
    """Check that Lean files prove the theorems of a target.

    A candidate has to prove exactly the target's statements. Prints each candidate's verdict as it
    comes, and which theorem failed by which rule. A CANDIDATE is a file, a folder (all .lean files
    below it), or - for standard input.

    Exit code: as of submit.
    """
    if (target is None) == (not theorems):
        raise UsageError("name either a target with --target, or theorems with --theorem")
    if target == "-" and "-" in candidates:
        raise UsageError("the target and a candidate cannot both be standard input")
    text = None if target is None else read_named(target)
    if text is not None and not text.strip():
        raise UsageError(f"{target}: the target is empty")

    def ask(client: AsyncLeanQClient, code: str) -> Coroutine[Any, Any, Reply]:
        return client.verify(text, code, theorems=theorems, holes=holes, **how)

    return run_files(candidates, url, embedded, wait_s, as_json, how, ask, VERIFIED)
