"""``leanq profile``: where Lean spends its time in a text."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Unpack

import click

from leanq.client import AsyncLeanQClient
from leanq.commands import options
from leanq.commands.submit import run_files
from leanq.producer.request_builder import Check
from leanq.queue.requests import PROFILED, Reply


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|FOLDER...")
@options.client
@options.embedded
@options.wait
@options.env
@options.budget
def profile(
    paths: tuple[str, ...],
    url: str | None,
    as_json: bool,
    embedded: bool,
    wait_s: float | None,
    **how: Unpack[Check],
) -> int:
    """Print where Lean spends its time in a text, by declaration.

    A worker runs Lean on each text with Lean's profiler, the heaviest declaration comes first.
    Files, folders and the queue are found as by submit, and the limits are those of a check.
    Imports count against them, since Lean starts anew.

    Times are wall time on all threads, so a busy machine takes longer. The profiler itself takes
    time, too. Nothing is judged: for verdicts use submit.

    Exit code: 0 if Lean told, whatever it says of the text; 3 if leanq has no answer of Lean's; 2
    for wrong usage.
    """

    def ask(client: AsyncLeanQClient, code: str) -> Coroutine[Any, Any, Reply]:
        asked: Check = {**how, "profile": True}
        return client.check(code, **asked)

    return run_files(paths, url, embedded, wait_s, as_json, how, ask, PROFILED)
