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

# How long a worker without its server may take to end its requests.
_END_S = 5.0


@click.command()
@worker_options
def up(metrics_port: int | None, metrics_host: str, **how: Any) -> None:
    """Run a server and a worker that later commands find."""
    log_to_stderr(False)
    place = UpFile(os.environ)
    with EmbeddedServer() as server:
        settings = embedded_settings(server, os.environ)
        worker = make_worker(settings, **how)

        async def run() -> None:
            announcing = asyncio.create_task(announce())
            serving = asyncio.create_task(run_until_stopped(worker))
            watching = asyncio.create_task(server.watch())
            try:
                await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    # Later commands would find a socket that nobody listens at.
                    place.remove()
                    worker.stop(grace_s=0.0)
                    await asyncio.wait({serving}, timeout=_END_S)
                    await watching
                await serving
            finally:
                for task in (announcing, watching, serving):
                    task.cancel()
                await asyncio.gather(announcing, watching, serving, return_exceptions=True)

        async def announce() -> None:
            # Only once a worker is there whose Lean works.
            await worker.joined.wait()
            click.echo(f"leanq is up; LEANQ_URL={server.url} (Ctrl-C ends it)", err=True)

        place.write(settings)
        try:
            with metrics_page(worker, metrics_port, metrics_host):
                asyncio.run(run())
        finally:
            place.remove()
