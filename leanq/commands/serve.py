"""``leanq serve``: the gateway for clients that speak HTTP."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import click

from leanq.commands import options
from leanq.commands.common import queue_url
from leanq.errors import UsageError
from leanq.fleet.logging import log_to_stderr
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import KeyFile
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT
from leanq.queue.settings import check_name

log = logging.getLogger("leanq.gateway")


@click.command()
@options.queue
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="The port to listen on; 0 takes any free one, and logs it.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on; one that other machines reach needs --keys.",
)
@click.option(
    "--hostname",
    "hostnames",
    multiple=True,
    metavar="NAME",
    help="A name under which clients reach it, besides localhost; may be given several times. "
    "Requests for other names are refused; *.NAME stands for all below a name, * for any.",
)
@click.option(
    "--keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The keys that callers need, in TOML; a change is read without a restart. Without, all "
    "of this machine may call.",
)
@click.option(
    "--env",
    metavar="NAME",
    default=DEFAULT_ENVIRONMENT,
    show_default=True,
    help="The environment of requests that name none, where their key names none either.",
)
@click.option(
    "--grace",
    "grace_s",
    type=options.FiniteRange(1, 3600),
    metavar="SECONDS",
    default=30.0,
    show_default=True,
    help="Seconds from SIGTERM to the end, in which what is under way may finish.",
)
def serve(
    url: str | None,
    as_json: bool,
    port: int,
    host: str,
    hostnames: tuple[str, ...],
    keys: Path | None,
    env: str,
    grace_s: float,
) -> None:
    """Serve HTTP until SIGTERM, then end what runs.

    Its interfaces are leanq's own and Kimina Lean Server's. With --json it logs JSON lines.
    """
    try:
        from leanq.gateway import server
        from leanq.gateway.access import Access
        from leanq.gateway.app import make_app
    except ImportError as error:
        raise UsageError(f"leanq serve needs: pip install 'leanq[server]' ({error})") from None
    if keys is None and not server.is_loopback(host):
        raise UsageError(
            f"without keys the gateway listens on loopback alone, got --host {host}; name a file "
            "of keys with --keys"
        )
    access = Access(KeyFile(keys) if keys else None, check_name("environment", env))
    for name in hostnames:
        if "*" in name[1:] or (name.startswith("*") and name != "*" and name[1] != "."):
            raise UsageError(f"--hostname {name!r} is not a name, *.NAME or *")
    log_to_stderr(as_json)
    # The server's own words, too.
    logging.getLogger("uvicorn").handlers = logging.getLogger("leanq").handlers

    async def run() -> None:
        async with GatewayClient(queue_url(url), when_full="raise") as lean:
            with server.listen(host, port) as listener:
                app = make_app(lean, access, [host, *hostnames])
                gateway = server.GatewayServer(app, listener, grace_s=grace_s)
                for number in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().add_signal_handler(number, gateway.stop)
                bound, shown = listener.getsockname()[1], f"[{host}]" if ":" in host else host
                log.info("the gateway is at http://%s:%d (Ctrl-C ends it)", shown, bound)
                await gateway.run()

    asyncio.run(run())
