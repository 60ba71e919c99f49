"""``leanq trace``: where the time of one request went."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click

from leanq.commands import options
from leanq.commands.common import on_queues
from leanq.errors import InvalidRequestError
from leanq.fleet.shown import printable
from leanq.fleet.timeline import Timeline, find
from leanq.queue.keys import shard_of
from leanq.queue.operator_queue import OperatorQueue

_WIDTH = 14


@click.command()
@click.argument("request_id")
@options.queue
def trace(request_id: str, url: str | None, as_json: bool) -> None:
    """Show where the time of a request went, attempt by attempt.

    All times are in milliseconds, from the submit to the settled reply. Before a reply's
    time-to-live ends, it tells of a request that has ended.
    """
    shard = shard_of(request_id)

    async def look(queues: Sequence[OperatorQueue]) -> Timeline | None:
        return await find(queues[shard], request_id) if shard < len(queues) else None

    found = on_queues(url, look)
    if found is None:
        raise InvalidRequestError(
            f"nothing is known of the time of {request_id}: no request has this id, or its reply "
            "has gone, or a worker of another release gave it"
        )
    click.echo(json.dumps(found.to_json()) if as_json else "\n".join(_lines(found)))


def _lines(found: Timeline) -> Iterator[str]:
    submitted = datetime.fromtimestamp(found.submitted_s, UTC).isoformat(timespec="milliseconds")
    yield f"{found.request_id}, submitted {submitted}: {found.end or 'not ended'}"
    for number, attempt in enumerate(found.attempts, 1):
        where = f" on {printable(attempt.worker)}" if attempt.worker else ""
        end = f": {printable(attempt.end)}" if attempt.end else ""
        yield f"attempt {number}{where}{end}"
        for name, ms in attempt.phases_ms.items():
            yield f"  {name:<{_WIDTH}}{ms:>12,.1f} ms"
    yield f"{'in all':<{_WIDTH + 2}}{found.total_ms:>12,.1f} ms"
