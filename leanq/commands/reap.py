"""``leanq reap``: requeues requests whose worker's lease has expired."""

from __future__ import annotations

import asyncio
import json

import click

from leanq.commands import options
from leanq.commands.common import queue_settings
from leanq.errors import NotPermittedError, RefusedError, UnavailableError
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard
from leanq.queue.worker_queue import WorkerQueue, reap_all


@click.command()
@options.queue
@click.option("--watch", is_flag=True, help="Go on until interrupted.")
def reap(url: str | None, as_json: bool, watch: bool) -> None:
    """Requeue requests whose worker's lease has expired.

    Workers do this themselves; use it for a queue whose workers are all gone. With --watch it
    outlasts a server that goes away.
    """
    asyncio.run(_reap(queue_settings(url), as_json, watch))


async def _reap(settings: Settings, as_json: bool, watch: bool) -> None:
    async with Shard.every(settings) as shards:
        queues = [WorkerQueue(shard) for shard in shards]
        has_reaped = False
        while True:
            try:
                done = await reap_all(queues, through_expiry_grace=not watch)
            except UnavailableError as error:
                # A server that never answered is one that was named wrongly.
                if not has_reaped or isinstance(error, RefusedError | NotPermittedError):
                    raise
                click.echo(f"leanq: WARNING: {error}; trying again", err=True)
            else:
                has_reaped = True
                if as_json:
                    click.echo(json.dumps({"requeued": done.requeued, "poisoned": done.poisoned}))
                elif done.requeued or done.poisoned or not watch:
                    click.echo(f"{done.requeued} put back, {done.poisoned} poisoned")
            if not watch:
                return
            await asyncio.sleep(settings.lease_s / 3)
