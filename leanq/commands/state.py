"""``leanq state``: states looked at, and carried from queue to queue."""

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
from leanq.commands import options
from leanq.commands.common import queue_url
from leanq.errors import InvalidRequestError, RequestError
from leanq.lean.recipes import Recipe, unpack_export
from leanq.producer.request_builder import InEnvironment

_UNAVAILABLE_TIMEOUT_S = 30.0
_T = TypeVar("_T")


@click.group()
def state() -> None:
    """Look at states, and carry them from queue to queue."""


@state.command()
@click.argument("state")
@options.queue
@options.env_of_state
def show(state: str, url: str | None, as_json: bool, env: str | None) -> None:
    """Show the recipe of a state: its source up to the hole, and the tactics so far."""
    where: InEnvironment = options.in_environment(env, {})
    recipe = unpack_export(ask(url, lambda client: client.export(state, **where)))
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


@state.command()
@click.argument("state")
@options.queue
@options.env_of_state
@click.option(
    "--output",
    metavar="FILE",
    default="-",
    show_default=True,
    help="Where to write; - is standard output.",
)
def export(state: str, url: str | None, as_json: bool, env: str | None, output: str) -> None:
    """Write bytes that mean the same state wherever there is the same environment.

    With --json an object with these bytes in base 64.
    """
    where: InEnvironment = options.in_environment(env, {})
    data = ask(url, lambda client: client.export(state, **where))
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


@state.command("import")
@click.argument("file")
@options.queue
@options.env
def import_(file: str, url: str | None, as_json: bool, env: str) -> None:
    """Take in a state that was exported, and print its id.

    A FILE of - is standard input.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {file}: {error.strerror}") from None
    state = ask(url, lambda client: client.import_(data, env=env))
    click.echo(json.dumps({"state": state}) if as_json else state)


def ask(url: str | None, call: Callable[[LeanQClient], Future[_T]]) -> _T:
    """The result of one call of a client; raises InvalidRequestError where no worker can do it."""
    with LeanQClient(queue_url(url), unavailable_timeout_s=_UNAVAILABLE_TIMEOUT_S) as client:
        try:
            return call(client).result()
        except RequestError as error:
            # No worker can carry it out as it is, as with bad input that is seen here.
            raise InvalidRequestError(str(error)) from None


def _place(recipe: Recipe) -> tuple[int, int]:
    code, offset = recipe.source.code, recipe.source.holes[recipe.opened].offset
    return code.count("\n", 0, offset) + 1, offset - (code.rfind("\n", 0, offset) + 1)
