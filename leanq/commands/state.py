"""``leanq step`` and ``leanq state``: proofs that go on from where they were left."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import click

from leanq.client import LeanQClient
from leanq.commands.fleet import queue_url
from leanq.commands.submit import Ended, read_source
from leanq.errors import InvalidRequestError, RequestError
from leanq.lean.recipes import Recipe, unpack_export
from leanq.producer.request_builder import Check, InEnvironment
from leanq.queue.requests import Reply, step_reply_to_json

_UNAVAILABLE_TIMEOUT_S = 30.0
_T = TypeVar("_T")


def step(state: str, tactic: str, url: str | None, as_json: bool, options: Check) -> int:
    """Tries ``tactic`` (``-``: standard input) on ``state`` and prints the outcome; exit code."""
    text = read_source("-") if tactic == "-" else tactic
    if not isinstance(text, str):
        raise text
    reply = _ask(url, lambda client: client.step(state, text, **options))
    if as_json:
        click.echo(json.dumps(step_reply_to_json(reply)))
    else:
        click.echo("\n".join(_lines(reply)))
    return Ended(state, reply).exit_code


def show(state: str, url: str | None, as_json: bool, options: InEnvironment) -> None:
    """Prints the recipe of ``state``."""
    recipe = unpack_export(_ask(url, lambda client: client.export(state, **options)))
    line, column = _place(recipe)
    tactics = [tactic.text for tactic in recipe.tactics]
    if as_json:
        source = recipe.source
        record = {"state": state, "fingerprint": source.fingerprint, "source": source.code}
        click.echo(json.dumps({**record, "line": line, "column": column, "tactics": tactics}))
        return
    click.echo(f"state        {state}")
    click.echo(f"environment  {recipe.source.fingerprint}")
    click.echo(f"hole         line {line}, column {column} of")
    for number, text in enumerate(recipe.source.code.split("\n")[:line], 1):
        click.echo(f"  {number:5} {text}")
    for tactic in tactics:
        first, *more = tactic.split("\n")
        click.echo("\n".join((f"tactic       {first}", *(f"             {each}" for each in more))))


def export(state: str, url: str | None, as_json: bool, options: InEnvironment, output: str) -> None:
    """Writes the export of ``state`` to a file, or to the output (``-``)."""
    data = _ask(url, lambda client: client.export(state, **options))
    if as_json:
        data = json.dumps({"state": state, "exported": base64.b64encode(data).decode()}).encode()
        data += b"\n"
    if output == "-":
        sys.stdout.buffer.write(data)
        return
    try:
        Path(output).write_bytes(data)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {output}: {error.strerror}") from None


def import_(file: str, url: str | None, as_json: bool, options: InEnvironment) -> None:
    """Takes in the state in ``file`` (``-``: standard input) and prints its id."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {file}: {error.strerror}") from None
    state = _ask(url, lambda client: client.import_(data, **options))
    click.echo(json.dumps({"state": state}) if as_json else state)


def _ask(url: str | None, call: Callable[[LeanQClient], Future[_T]]) -> _T:
    with LeanQClient(queue_url(url), unavailable_timeout_s=_UNAVAILABLE_TIMEOUT_S) as client:
        try:
            return call(client).result()
        except RequestError as error:
            # No worker can carry it out as it is, as with bad input that is seen here.
            raise InvalidRequestError(str(error)) from None


def _place(recipe: Recipe) -> tuple[int, int]:
    code, offset = recipe.source.code, recipe.source.holes[recipe.opened].offset
    return code.count("\n", 0, offset) + 1, offset - (code.rfind("\n", 0, offset) + 1)


def _lines(reply: Reply) -> list[str]:
    lines = [f"{reply.verdict} ({reply.wall_s:.2f} s)"]
    if reply.state:
        lines.append(f"state {reply.state}")
    lines += ("\n" + goal for goal in reply.goals)
    for message in reply.messages:
        lines.append(f"{message.line}:{message.column}: {message.severity}: {message.text}")
    return lines
