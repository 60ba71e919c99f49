"""``leanq dead``: requests that took down too many workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from .. import wire
from ..errors import InvalidRequestError, QueueFullError, UnknownEnvironmentError, WireError
from ..keys import retry_rid, shard_of
from ..queue import Queue
from ..transitions import DeadLetter, Full, UnknownLane
from .fleet import queue_settings

_T = TypeVar("_T")


def show_all(url: str | None, as_json: bool, most: int) -> None:
    """One line for each of the newest ``most``."""

    async def look(queue: Queue) -> list[DeadLetter]:
        rids = await queue.dead_rids(most)
        # One may be retried or dropped in the meantime.
        return [letter for rid in rids if (letter := await queue.dead_letter(rid))]

    for letter in _run(url, look):
        record = _record(letter)
        if as_json:
            click.echo(json.dumps(record))
        else:
            click.echo("{rid}  {died}  {environment}  {tenant}  last on {worker}".format(**record))


def show(rid: str, url: str | None, as_json: bool) -> None:
    """One letter, with what was asked."""
    letter = _run(url, lambda queue: _find(queue, rid))
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
    click.echo("\n".join(f"{name:<12}{value}" for name, value in record.items()))
    click.echo(f"\n{code}")


def retry(rids: Sequence[str], url: str | None, as_json: bool) -> None:
    """Sends each again as a new request."""

    async def send(queue: Queue) -> list[tuple[str, str]]:
        return [(rid, await _send_again(queue, await _find(queue, rid))) for rid in rids]

    for old, new in _run(url, send):
        click.echo(json.dumps({"rid": old, "retried_as": new}) if as_json else f"{old} -> {new}")


def drop(rids: Sequence[str], url: str | None, as_json: bool) -> None:
    """Removes each."""

    async def remove(queue: Queue) -> list[str]:
        for rid in rids:
            await _find(queue, rid)
        return [rid for rid in rids if await queue.drop_dead(rid)]

    for rid in _run(url, remove):
        click.echo(json.dumps({"rid": rid, "dropped": True}) if as_json else f"{rid} dropped")


async def _send_again(queue: Queue, letter: DeadLetter) -> str:
    old = letter.submission
    new = retry_rid(old.rid)
    submission = replace(old, rid=new)
    (answer,) = await queue.submit(letter.client, [submission])
    if answer == UnknownLane():
        raise UnknownEnvironmentError(f"no worker offers the environment {old.lane!r} of {old.rid}")
    if isinstance(answer, Full):
        raise QueueFullError(f"the queue of {old.tenant!r} is full", answer.retry_after_s)
    # Only now: sent twice it is one request, dropped first it could be lost.
    await queue.drop_dead(old.rid)
    return new


async def _find(queue: Queue, rid: str) -> DeadLetter:
    shard_of(rid)
    letter = await queue.dead_letter(rid)
    if letter is None:
        raise InvalidRequestError(f"there is no dead letter {rid}; 'leanq dead list' shows them")
    return letter


def _record(letter: DeadLetter) -> dict[str, Any]:
    asked = letter.submission
    return {
        "rid": asked.rid,
        "died": datetime.fromtimestamp(letter.died_s, UTC).isoformat(timespec="seconds"),
        "environment": asked.lane,
        "tenant": asked.tenant,
        "priority": asked.level,
        "attempts": letter.attempts,
        "worker": letter.worker,
    }


def _run(url: str | None, work: Callable[[Queue], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        queue = Queue(queue_settings(url))
        try:
            return await work(queue)
        finally:
            await queue.close()

    return asyncio.run(run())
