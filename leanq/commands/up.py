"""``leanq up``: a server and a worker on this machine, which later commands find."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import click

from leanq.commands.worker import make_worker, metrics_page, run_until_stopped, worker_options
from leanq.fleet.logging import log_to_stderr
from leanq.local import EmbeddedServer, embedded_settings
from leanq.queue.up_file import UpFile


@click.command()
@worker_options
def up(metrics_port: int | None, **how: Any) -> None:
    """Run a server and a worker that later commands find."""
    log_to_stderr(False)
    place = UpFile(os.environ)
    with EmbeddedServer() as server:
        settings = embedded_settings(server, os.environ)
        worker = make_worker(settings, **how)

        async def run() -> None:
            announcing = asyncio.create_task(announce())
            try:
                await run_until_stopped(worker)
            finally:
                announcing.cancel()

        async def announce() -> None:
            # Not before there is a worker whose Lean works.
            await worker.joined.wait()
            click.echo(f"leanq is up; LEANQ_URL={server.url} (Ctrl-C ends it)", err=True)

        place.write(settings)
        try:
            with metrics_page(worker, metrics_port):
                asyncio.run(run())
        finally:
            place.remove()
