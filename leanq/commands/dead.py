"""``leanq dead``: requests that took down too many workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from leanq.commands.fleet import queue_settings
from leanq.errors import InvalidRequestError, QueueFullError, UnknownEnvironmentError, WireError
from leanq.queue import wire
from leanq.queue.keys import retry_rid, shard_of
from leanq.queue.queue import Queue, every_shard
from leanq.queue.results import DeadLetter, Full, UnknownLane

_T = TypeVar("_T")


def show_all(url: str | None, as_json: bool, most: int) -> None:
    """One line for each of the newest ``most``."""

    async def look(queues: Sequence[Queue]) -> list[DeadLetter]:
        found = [(queue, rid) for queue in queues for rid in await queue.dead_rids(most)]
        # One may be retried or dropped in the meantime.
        letters = [letter for queue, rid in found if (letter := await queue.dead_letter(rid))]
        return sorted(letters, key=lambda letter: -letter.died_s)[:most]

    for letter in _run(url, look):
        record = _record(letter)
        if as_json:
            click.echo(json.dumps(record))
        else:
            click.echo("{rid}  {died}  {environment}  {tenant}  last on {worker}".format(**record))


def show(rid: str, url: str | None, as_json: bool) -> None:
    """One letter, with what was asked."""
    letter = _run(url, lambda queues: _find(queues, rid))
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

    async def send(queues: Sequence[Queue]) -> list[tuple[str, str]]:
        letters = [await _find(queues, rid) for rid in rids]
        return [(rid, await _send_again(queues, a)) for rid, a in zip(rids, letters, strict=True)]

    for old, new in _run(url, send):
        click.echo(json.dumps({"rid": old, "retried_as": new}) if as_json else f"{old} -> {new}")


def drop(rids: Sequence[str], url: str | None, as_json: bool) -> None:
    """Removes each."""

    async def remove(queues: Sequence[Queue]) -> list[str]:
        for rid in rids:
            await _find(queues, rid)
        return [rid for rid in rids if await queues[shard_of(rid)].drop_dead(rid)]

    for rid in _run(url, remove):
        click.echo(json.dumps({"rid": rid, "dropped": True}) if as_json else f"{rid} dropped")


async def _send_again(queues: Sequence[Queue], letter: DeadLetter) -> str:
    old = letter.submission
    queue = queues[shard_of(old.rid)]
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


async def _find(queues: Sequence[Queue], rid: str) -> DeadLetter:
    shard = shard_of(rid)
    letter = await queues[shard].dead_letter(rid) if shard < len(queues) else None
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


def _run(url: str | None, work: Callable[[Sequence[Queue]], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        async with every_shard(queue_settings(url)) as queues:
            return await work(queues)

    return asyncio.run(run())
