"""``leanq dead``: requests that took down too many workers, or on which kernels disagree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from leanq.commands import options
from leanq.commands.common import on_queues, tell
from leanq.errors import InvalidRequestError, WireError
from leanq.fleet.shown import printable, table
from leanq.queue import wire
from leanq.queue.keys import shard_of
from leanq.queue.operator_queue import OperatorQueue, send_again
from leanq.queue.results import DeadLetter


@click.group()
def dead() -> None:
    """Show, retry or drop requests that killed too many workers.

    The same for requests on which two kernels disagree: see 'list --disagreed'.
    """


@dead.command("list")
@options.queue
@click.option(
    "--limit",
    type=options.WholeRange(1, 10_000),
    default=100,
    help="How many to show.",
)
@click.option(
    "--disagreed",
    is_flag=True,
    help="Show instead the requests that the environment's Lean takes, and the judge's kernel "
    "does not: attacks, or limits of the judge's.",
)
def list_(url: str | None, as_json: bool, limit: int, disagreed: bool) -> None:
    """Show the dead letters, the newest first."""

    async def look(queues: Sequence[OperatorQueue]) -> tuple[list[dict[str, Any]], bool]:
        found = [
            (queue, request_id)
            for queue in queues
            for request_id in await queue.dead_request_ids(limit + 1, disagreed=disagreed)
        ]
        # A letter may be retried or dropped in the meantime.
        records = []
        for queue, request_id in found:
            try:
                if letter := await queue.dead_letter(request_id):
                    records.append(_record(letter))
            except WireError as error:
                click.echo(str(error), err=True)
                records.append({"request_id": request_id, "died": "", "message": str(error)})
        records.sort(key=lambda record: str(record["died"]), reverse=True)
        return records[:limit], len(records) > limit

    records, more = on_queues(url, look)
    if more:
        click.echo(f"only the newest {limit} are shown; --limit shows more", err=True)
    last = (
        {"MESSAGE": "message"} if disagreed else {"ATTEMPTS": "attempts", "LAST WORKER": "worker"}
    )
    names = {
        "REQUEST": "request_id",
        "ENDED" if disagreed else "DIED": "died",
        "ENVIRONMENT": "environment",
        "TENANT": "tenant",
        **last,
    }
    rows = [
        {title: printable(str(record.get(name, "–"))) for title, name in names.items()}
        for record in records
    ]
    shown = table(rows, left=names.keys() - {"ATTEMPTS"})
    tell(as_json, records, shown or ["no such requests" if disagreed else "no dead letters"])


@dead.command()
@click.argument("request_id")
@options.queue
def show(request_id: str, url: str | None, as_json: bool) -> None:
    """Show one dead letter with its Lean code."""
    letter = on_queues(url, lambda queues: _letter(queues, request_id))
    record = _record(letter)
    try:
        request = wire.unpack_request(letter.submission.body)
        record |= {"operation": request.op, "timeout_s": request.timeout_s}
        record |= {"memory_mb": request.memory_mb, "code": request.code}
    except WireError as error:
        record["code"] = f"cannot be read: {error}"
    if as_json:
        click.echo(json.dumps(record))
        return
    code = record.pop("code")
    click.echo("\n".join(f"{name:<12}{printable(str(value))}" for name, value in record.items()))
    click.echo(f"\n{code}")


@dead.command()
@click.argument("request_ids", nargs=-1, required=True, metavar="REQUEST_ID...")
@options.queue
def retry(request_ids: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Send dead letters once more, each as a new request.

    Prints each new request's id; wait for it with 'attach' of a Python client. The old id keeps its
    reply.
    """

    async def send(queues: Sequence[OperatorQueue]) -> None:
        # Print each at once: the next may fail, and nothing else tells the new id.
        for letter in [await _letter(queues, request_id) for request_id in request_ids]:
            old = letter.submission.request_id
            new = await send_again(queues[shard_of(old)], letter)
            told = {"request_id": old, "retried_as": new}
            click.echo(json.dumps(told) if as_json else f"{old} -> {new}")

    on_queues(url, send)


@dead.command()
@click.argument("request_ids", nargs=-1, required=True, metavar="REQUEST_ID...")
@options.queue
def drop(request_ids: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Remove dead letters for good."""

    async def remove(queues: Sequence[OperatorQueue]) -> None:
        for request_id in request_ids:
            await _letter(queues, request_id)
        for request_id in request_ids:
            if await queues[shard_of(request_id)].drop_dead(request_id):
                told = {"request_id": request_id, "dropped": True}
                click.echo(json.dumps(told) if as_json else f"{request_id} dropped")

    on_queues(url, remove)


async def _letter(queues: Sequence[OperatorQueue], request_id: str) -> DeadLetter:
    shard = shard_of(request_id)
    letter = await queues[shard].dead_letter(request_id) if shard < len(queues) else None
    if letter is None:
        raise InvalidRequestError(
            f"there is no dead letter {request_id}; 'leanq dead list' shows them"
        )
    return letter


def _record(letter: DeadLetter) -> dict[str, Any]:
    asked = letter.submission
    said: dict[str, Any] = {}
    if letter.reply:
        try:
            reply = wire.unpack_reply(asked.request_id, letter.reply)
            text = reply.messages[-1].text if reply.messages else ""
            said = {"kernel": reply.kernel, "message": text}
        except WireError as error:
            said = {"kernel": None, "message": f"cannot be read: {error}"}
    return {
        "request_id": asked.request_id,
        "died": datetime.fromtimestamp(letter.died_s, UTC).isoformat(timespec="seconds"),
        "environment": asked.environment,
        "tenant": asked.tenant,
        "priority": asked.priority,
        "attempts": letter.attempts,
        "worker": letter.worker,
        **said,
    }
