"""``leanq state`` and ``leanq step``: states looked at, carried elsewhere, and tactics on them."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from leanq.client import AsyncLeanQClient
from leanq.commands import options
from leanq.commands.common import exit_code, interruptible, queue_url
from leanq.commands.replies import coloured, hanging, shown_lines
from leanq.commands.submit import client_at, read_source
from leanq.errors import InvalidRequestError, RequestError
from leanq.fleet.shown import printable
from leanq.lean.goals.recipes import unpack_export
from leanq.producer.request_builder import Check, InEnvironment
from leanq.queue.requests import STEPPED, Reply, reply_to_json

_UNAVAILABLE_TIMEOUT_S = 30.0
_T = TypeVar("_T")


@click.group()
def state() -> None:
    """Look at states, and carry them from queue to queue."""


@state.command()
@click.argument("state")
@options.client
@options.env_of_state
def show(state: str, url: str | None, as_json: bool, env: str | None) -> None:
    """Show a state's recipe: its source up to the hole, and the tactics so far."""
    recipe = unpack_export(_export(url, state, env))
    code, offset = recipe.source.code, recipe.source.holes[recipe.opened].offset
    line, column = code.count("\n", 0, offset) + 1, offset - (code.rfind("\n", 0, offset) + 1)
    tactics = [tactic.text for tactic in recipe.tactics]
    if as_json:
        record = {"state": state, "fingerprint": recipe.source.fingerprint, "source": code}
        click.echo(json.dumps({**record, "line": line, "column": column, "tactics": tactics}))
        return
    click.echo(f"state        {state}")
    click.echo(f"environment  {recipe.source.fingerprint}")
    click.echo(f"hole         line {line}, column {column} of")
    for number, text in enumerate(code.split("\n")[:line], 1):
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
    data = _export(url, state, env)
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


def _export(url: str | None, state: str, env: str | None) -> bytes:
    where: InEnvironment = options.in_environment(env, {})
    return ask(url, lambda client: client.export(state, **where))


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


@click.command()
@click.argument("state")
@click.argument("tactic")
@options.client
@options.env_of_state
@options.lean
def step(
    state: str, tactic: str, url: str | None, as_json: bool, env: str | None, **how: Any
) -> int:
    """Try a tactic on a state, and print the goals that are left.

    STATE is an id that a check or a step has printed. A TACTIC of - is standard input.

    Exit code: as of submit; 1 also if goals are left.
    """
    text = read_source("-") if tactic == "-" else tactic
    asked: Check = options.in_environment(env, how)
    reply = ask(url, lambda client: client.step(state, text, **asked))
    if as_json:
        click.echo(json.dumps(reply_to_json(reply, STEPPED)))
    else:
        click.echo("\n".join(lines_of_step(reply)))
    return exit_code(reply.verdict)


def lines_of_step(reply: Reply) -> list[str]:
    """Returns the lines of a reply to a step."""
    reason = f"{reply.reason}; " if reply.reason else ""
    lines = [f"{coloured(reply.verdict)} ({reason}{reply.wall_s:.2f} s)"]
    if reply.state:
        lines.append(f"state {reply.state}")
    lines += ("\n" + "\n".join(shown_lines(goal)) for goal in reply.goals)
    for message in reply.messages:
        lines += hanging(f"{message.line}:{message.column}: {message.severity}: ", message.text)
    return lines
