"""Serves the gateway on a port, until it is told to end.

The server is uvicorn, by its public interface alone. It waits for heads without end and takes any
number of silent connections: what only a proxy can do, one in front does (``deploy/Caddyfile``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from leanq.errors import UsageError
from leanq.gateway.limits import Connections

# Connections that the kernel holds before they are accepted, and that are accepted at once.
_BACKLOG = 128
# The most bytes of an unfinished head.
_HEAD_BYTES = 16_384
# Time to answer those whose requests are given up.
_LAST_WORDS_S = 2.0


class _Server(uvicorn.Server):
    """uvicorn's server, but the command handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 takes a free port. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # Python repeats the address behind the system's words.
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise UsageError(
            f"cannot listen on {host}, port {port}: {why}; name another address with --host, or "
            "another port with --port"
        ) from None
    # The kernel probes silent peers, and ends the connections of those that are gone.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setblocking(False)
    return made


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches ``host``, an address or ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class GatewayServer:
    """The application on a socket. After ``stop``, requests go on for at most ``grace_s``.

    Attributes:
        connections: those that it holds.
    """

    def __init__(self, app: FastAPI, listener: socket.socket, *, grace_s: float) -> None:
        self._app = app
        self._listener = listener
        self._grace_s = grace_s
        config = uvicorn.Config(
            app,
            http="h11",
            h11_max_incomplete_event_size=_HEAD_BYTES,
            limit_concurrency=app.state.connections.most,
            # An upgraded connection would have another protocol, without these limits.
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            # uvicorn warns about each malformed request.
            log_level="error",
            # No header decides who calls.
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=max(1, round(grace_s + _LAST_WORDS_S)),
        )
        self._server = _Server(config)
        self.connections: Connections = app.state.connections
        self.connections.held = self._server.server_state.connections

    async def run(self) -> None:
        """Serves until it is told to stop and the requests under way have ended."""
        watching = asyncio.create_task(self._app.state.readiness.watch())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def stop(self) -> None:
        """Takes no more connections, and ends the requests under way after the grace.

        A second call ends them at once.
        """
        self._app.state.readiness.ending = True
        self._app.state.stopping.set()
        asyncio.get_running_loop().call_later(self._grace_s, self._app.state.ending.set)
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True
