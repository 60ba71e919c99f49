"""The gateway on a port, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from leanq.errors import UsageError

_BACKLOG = 2048
# From a connection's beginning, or the first byte of a further request, to the end of its headers.
_HEAD_S = 20.0
# For answers to those whose requests are given up.
_LAST_WORDS_S = 2.0


class _Protocol(H11Protocol):
    """uvicorn's protocol, which waits for the head of a request no longer than for anything else.

    By itself it closes a connection on which nothing comes, and not one on which a byte comes now
    and then, which costs its client nothing. The body of a request that is under way may take its
    time: it has a key.
    """

    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self._is_under_way():
            self._forget()
        elif self._overdue is None:
            self._overdue = self.loop.call_later(_HEAD_S, self._give_up)

    def _forget(self) -> None:
        if self._overdue:
            self._overdue.cancel()
            self._overdue = None

    def _is_under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self) -> None:
        self._overdue = None
        if not self._is_under_way():
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes any that is free.

    Raises:
        UsageError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; name another "
            "address with --host, or another port with --port"
        ) from None
    made.setblocking(False)
    return made


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``, which is an address or ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class GatewayServer:
    """The application on a socket.

    Args:
        grace_s: how long what is under way may go on once it is told to stop.
    """

    def __init__(self, app: FastAPI, listener: socket.socket, *, grace_s: float) -> None:
        self._app = app
        self._listener = listener
        self._grace_s = grace_s
        config = uvicorn.Config(
            app,
            http=_Protocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="warning",
            # No header decides who calls.
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(grace_s + _LAST_WORDS_S)),
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Serves until it is told to stop, and what is under way has ended."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Takes no more connections, and ends what is under way once the grace is over. The second
        call waits for nothing."""
        self._app.state.readiness.ending = True
        self._app.state.stopping.set()
        asyncio.get_running_loop().call_later(self._grace_s, self._app.state.ending.set)
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True
