"""``leanq serve``: the gateway for clients that speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
from pathlib import Path
from typing import Any

import click

from leanq.commands import options
from leanq.commands.submit import queue_at
from leanq.errors import UsageError, to_install
from leanq.fleet.logging import log_to_stderr
from leanq.fleet.prometheus import page_at
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import KeyFile, make_keys
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT
from leanq.queue.settings import check_name
from leanq.queue.up_file import UpFile

log = logging.getLogger("leanq.gateway")

_READY_TIMEOUT_S = 5.0
# A request under way outlives a restart of the queue's server, and no more.
_UNAVAILABLE_TIMEOUT_S = 30.0
# Of glibc's mallopt: blocks of at least so many bytes are the system's again once they are freed.
_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES = -3, 131_072


@click.command()
@options.queue
@click.option(
    "--port",
    type=options.PORT,
    default=8000,
    help="The port to listen on; 0 takes any free one, and logs it.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="The address to listen on; one that other machines reach needs --keys.",
)
@click.option(
    "--hostname",
    "hostnames",
    multiple=True,
    metavar="NAME",
    help="A name, besides localhost, by which clients reach it; may be given several times. "
    "Requests for other names are refused. *.NAME stands for all below a name, * for any.",
)
@click.option(
    "--keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The callers' keys, in TOML; changes need no restart. Without the file, everyone on this "
    "machine may call.",
)
@click.option(
    "--make-key",
    is_flag=True,
    help="If the file of --keys does not exist, write it with one key, and show the key once.",
)
@click.option(
    "--env",
    metavar="NAME[=PATH]",
    default=DEFAULT_ENVIRONMENT,
    help="The environment of requests that name none, and whose key names none. PATH is its Lake "
    "project or folder of .olean files, for the worker that a gateway without a queue starts.",
)
@click.option(
    "--grace",
    "grace_s",
    type=options.FiniteRange(1, 3600, "seconds"),
    default=30.0,
    help="Seconds from SIGTERM to the end; requests under way may finish within them.",
)
@click.option(
    "--metrics-port",
    type=options.PORT,
    help="Serve /metrics and /healthz on this port; 0 takes any free one, and logs it. /healthz is "
    "200 while queue and gateway work, else 503.",
)
@click.option(
    "--metrics-host",
    metavar="ADDRESS",
    help="The address for metrics, for whoever reaches it [default: that of --host].",
)
def serve(
    url: str | None,
    as_json: bool,
    port: int,
    host: str,
    hostnames: tuple[str, ...],
    keys: Path | None,
    make_key: bool,
    env: str,
    grace_s: float,
    metrics_port: int | None,
    metrics_host: str | None,
) -> None:
    """Serve HTTP, and a page that shows the fleet, until SIGTERM.

    The interfaces are leanq's own and Kimina Lean Server's. Requests under way may finish. If
    nothing names a queue it starts one, with a worker. With --json it logs JSON lines.
    """
    try:
        from leanq.gateway import server
        from leanq.gateway.access import Access
        from leanq.gateway.app import make_app
    except ImportError as error:
        raise UsageError(f"leanq serve needs: {to_install('server')} ({error})") from None
    if keys is None and not server.is_loopback(host):
        raise UsageError(
            f"without keys the gateway listens on loopback alone, got --host {host}; name a file "
            "of keys with --keys"
        )
    if make_key and keys is None:
        raise UsageError("--make-key needs --keys: the file that the key goes to")
    made = make_keys(keys) if make_key and keys else None
    name, _, path = env.partition("=")
    access = Access(KeyFile(keys) if keys else None, check_name("environment", name))
    has_queue = url or UpFile(os.environ).read()
    if not path and name != DEFAULT_ENVIRONMENT and not has_queue:
        raise UsageError(
            f"--env {env!r}: nothing names a queue, so this gateway starts a worker, which needs "
            f"the environment's folder: --env {name}=FOLDER; or name a queue with --url or "
            "LEANQ_URL, or start one with 'leanq up'"
        )
    if path and has_queue:
        raise UsageError(
            f"--env {env!r}: a folder is for the worker that a gateway without a queue starts, and "
            "this one has a queue; offer it there with 'leanq worker --env', and give the name here"
        )
    for name in hostnames:
        if "*" in name[1:] or (name.startswith("*") and name != "*" and name[1] != "."):
            raise UsageError(f"--hostname {name!r} is not a name, *.NAME or *")
    _log(as_json)
    if made:
        log.warning("the key of this gateway, which is shown this once: %s", made)

    async def run() -> None:
        async with (
            queue_at(url, environments=[env] if path else []) as (place, own),
            GatewayClient(
                place, when_full="raise", unavailable_timeout_s=_UNAVAILABLE_TIMEOUT_S
            ) as lean,
        ):
            if own:
                log.info("no queue is named, so this gateway has one of its own, with a worker")
            with server.listen(host, port) as listener:
                app = make_app(lean, access, [host, *hostnames])
                gateway = server.GatewayServer(app, listener, grace_s=grace_s)
                for number in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().add_signal_handler(number, gateway.stop)
                bound, shown = listener.getsockname()[1], f"[{host}]" if ":" in host else host
                with _metrics_page(app.state, metrics_host or host, metrics_port):
                    log.info("the gateway is at http://%s:%d (Ctrl-C ends it)", shown, bound)
                    if not server.is_loopback(host):
                        log.warning(
                            "other machines reach this gateway: put a proxy in front of it, which "
                            "ends TLS, slow clients and floods of connections (deploy/Caddyfile)"
                        )
                    if not (hostnames or server.is_loopback(host)):
                        log.warning(
                            "only requests to localhost and %s are taken; name the hosts by which "
                            "clients reach this gateway with --hostname",
                            host,
                        )
                    _free_large_blocks()
                    # All imports stay. To walk through them in each collection takes a fifth of a
                    # batched request's CPU time.
                    gc.collect()
                    gc.freeze()
                    # Most objects are young garbage, which is collected often and in small parts.
                    # To walk through all connections takes 80 ms, so it is rare.
                    gc.set_threshold(1_000, 10, 50)

                    def end(_: object) -> None:
                        gateway.stop()
                        # No request under way can end any more.
                        app.state.ending.set()

                    for task in own:
                        task.add_done_callback(end)
                    await gateway.run()
                    for task in own:
                        if task.done():
                            task.result()

    asyncio.run(run())


def _free_large_blocks() -> None:
    """Has the C library return large blocks to the system, where it can be told.

    By itself, glibc takes them from its heap after the first few, and bodies of some megabytes
    leave holes there that stay.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def _log(as_json: bool) -> None:
    """Logs the gateway and its HTTP server to standard error."""
    # Needs the extra.
    from leanq.gateway.logs import SparingFilter, access

    log_to_stderr(as_json)
    if not as_json:
        # People do not get a line for each request.
        access.setLevel(logging.WARNING)
    handlers = logging.getLogger("leanq").handlers
    for handler in handlers:
        handler.addFilter(SparingFilter())
    for name in ("uvicorn", "asyncio"):
        logging.getLogger(name).handlers = handlers


def _metrics_page(
    state: Any, host: str, port: int | None
) -> contextlib.AbstractContextManager[object]:
    """Returns the gateway's metrics page, if a port was named for it."""
    loop = asyncio.get_running_loop()

    def is_ready() -> bool:
        asked = asyncio.run_coroutine_threadsafe(state.readiness.is_ready(), loop)
        try:
            return bool(asked.result(_READY_TIMEOUT_S))
        except TimeoutError:
            asked.cancel()
            return False

    return page_at(port, "gateway", state.metrics.samples, is_ready, host)
