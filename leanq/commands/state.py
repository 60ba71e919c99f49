"""``leanq state``: states looked at, and carried from queue to queue."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from leanq.client import AsyncLeanQClient
from leanq.commands import options
from leanq.commands.common import interruptible, queue_url
from leanq.commands.submit import client_at
from leanq.errors import InvalidRequestError, RequestError
from leanq.fleet.shown import printable
from leanq.lean.recipes import Recipe, unpack_export
from leanq.producer.request_builder import InEnvironment
from leanq.queue.shard import Shard
from leanq.states import RedisStates

_UNAVAILABLE_TIMEOUT_S = 30.0
_T = TypeVar("_T")

# A state's id has 64 digits; the first eight tell its shard and bucket.
_ID = re.compile(r"[0-9a-f]{8,64}")
_DIGITS = 64


@click.group()
def state() -> None:
    """Look at states, and carry them from queue to queue."""


@state.command()
@click.argument("state")
@options.client
@options.env_of_state
def show(state: str, url: str | None, as_json: bool, env: str | None) -> None:
    """Show a state's recipe: its source up to the hole, and the tactics so far."""
    state, exported = _export(url, state, env)
    recipe = unpack_export(exported)
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
        click.echo(f"  {number:5} {printable(text.expandtabs())}")
    for tactic in tactics:
        first, *more = (printable(each.expandtabs()) for each in tactic.split("\n"))
        click.echo("\n".join((f"tactic       {first}", *(f"             {each}" for each in more))))


@state.command()
@click.argument("state")
@options.client
@options.env_of_state
@click.option(
    "--output",
    metavar="FILE",
    default="-",
    help="The file to write; - is standard output.",
)
def export(state: str, url: str | None, as_json: bool, env: str | None, output: str) -> None:
    """Write bytes that mean the same state wherever the same environment is.

    With --json, prints an object with these bytes in base 64.
    """
    state, data = _export(url, state, env)
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
@options.client
@options.env
def import_(file: str, url: str | None, as_json: bool, env: str) -> None:
    """Import an exported state, and print its id.

    A FILE of - is standard input.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {file}: {error.strerror}") from None
    state = ask(url, lambda client: client.import_(data, env=env))
    click.echo(json.dumps({"state": state}) if as_json else state)


def _export(url: str | None, state: str, env: str | None) -> tuple[str, bytes]:
    """Returns the state's whole id, and its export."""
    where: InEnvironment = options.in_environment(env, {})

    async def export(client: AsyncLeanQClient, whole: str) -> tuple[str, bytes]:
        return whole, await client.export(whole, **where)

    return ask_about(url, state, export)


def ask_about(
    url: str | None, state: str, call: Callable[[AsyncLeanQClient, str], Awaitable[_T]]
) -> _T:
    """Calls :func:`ask` about the state whose id is ``state`` or begins uniquely with it."""

    async def of_whole_id(client: AsyncLeanQClient) -> _T:
        return await call(client, await _whole_id(client, state))

    return ask(url, of_whole_id)


async def _whole_id(client: AsyncLeanQClient, text: str) -> str:
    if not client.clusters:
        # A gateway with keys seals ids, and knows whole ids alone.
        return text
    if not _ID.fullmatch(text):
        raise InvalidRequestError(
            f"{text!r:.80} is not a state; expected the {_DIGITS} hexadecimal digits of its id, or "
            "the first eight of them or more"
        )
    if len(text) == _DIGITS:
        return text
    found: set[str] = set()
    for settings in client.clusters:
        async with Shard.every(settings) as shards:
            found.update(await RedisStates(shards).beginning_with(text))
    if len(found) == 1:
        return found.pop()
    if not found:
        raise InvalidRequestError(f"no state is known whose id begins with {text}")
    some = ", ".join(state[: len(text) + 8] for state in sorted(found)[:3])
    raise InvalidRequestError(
        f"the ids of {len(found)} states begin with {text}: {some}, …; give more digits"
    )


def ask(url: str | None, call: Callable[[AsyncLeanQClient], Awaitable[_T]]) -> _T:
    """Returns the result of one call of a client; Ctrl-C and SIGTERM withdraw it.

    Raises:
        InvalidRequestError: no worker can carry the call out as it is.
        Stopped: a signal came.
    """

    async def run() -> _T:
        wait_s = _UNAVAILABLE_TIMEOUT_S
        async with client_at(queue_url(url), unavailable_timeout_s=wait_s) as client:
            return await call(client)

    try:
        return interruptible(run())
    except RequestError as error:
        raise InvalidRequestError(str(error)) from None


def _place(recipe: Recipe) -> tuple[int, int]:
    code, offset = recipe.source.code, recipe.source.holes[recipe.opened].offset
    return code.count("\n", 0, offset) + 1, offset - (code.rfind("\n", 0, offset) + 1)
