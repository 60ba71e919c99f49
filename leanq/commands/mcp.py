"""``leanq mcp``: tools for agents, over standard input and output."""

from __future__ import annotations

import logging
from typing import Unpack

import click

from leanq.commands import options
from leanq.commands.common import interruptible
from leanq.commands.submit import client_at, queue_at
from leanq.errors import UsageError, to_install
from leanq.fleet.logging import log_to_stderr
from leanq.producer.request_builder import Check


@click.command()
@options.client
@options.embedded
@options.env
@options.lean
def mcp(url: str | None, as_json: bool, embedded: bool, **how: Unpack[Check]) -> None:
    """Serve tools for agents by the Model Context Protocol.

    The tools are check, verify, step and search, over standard input and output. If nothing names a
    Redis (--url, LEANQ_URL or 'leanq up'), a server and a worker run beside it. It logs to standard
    error, with --json in JSON lines.
    """
    try:
        from leanq.trainers.mcp_server import make_server
    except ImportError as error:
        raise UsageError(f"leanq mcp needs: {to_install('server')} ({error})") from None
    log_to_stderr(as_json)
    # The library would set up logging of its own beside ours.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("mcp").handlers = logging.getLogger("leanq").handlers

    async def run() -> None:
        async with queue_at(url, embedded=embedded) as (place, _), client_at(place) as lean:
            await make_server(lean, **how).run_stdio_async()

    interruptible(run())
