"""Serves the gateway on a port, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from leanq.errors import UsageError
from leanq.gateway.limits import CONNECTION, Connections
from leanq.queue.metrics import count

# The most connections that the kernel holds before they are accepted.
_BACKLOG = 2048
# asyncio accepts so many at once, and opens a file for each before any can be refused. Between two
# such turns other requests go on.
_ACCEPTED_AT_ONCE = 8
# So many of one caller's connections have their turn at once. A hundred requests that all begin in
# one turn of the loop would keep those of other callers waiting for 30 ms of CPU time.
_HANDLED_AT_ONCE = 8
# asyncio reads so much of a connection in a turn, where it would read four times as much. Forty
# connections with large bodies would make each turn last for 60 ms of CPU time.
_READ_BYTES = 65_536
# The deadline for headers, from a connection's beginning or a further request's first byte. If the
# request has no key, it is also the deadline for the answer, from the end of the headers.
_HEAD_S = 20.0
# h11 takes a line feed alone for the end of a line, too.
_HEADS_END = re.compile(rb"\n\r?\n")
# The body of a request with a key gets this time, and a second more for so many bytes.
_BODY_S = 20.0
_BODY_BYTES_PER_S = 65_536
# A head may have so many lines and bytes, and so may the trailers of a body. The longest head that
# is read in one turn, of lines with four bytes, would stop the loop for 80 ms.
_HEAD_LINES, _HEAD_BYTES = 100, 16_384
_TOO_LONG = 431
# A body may have so many chunks, and one more for every so many bytes.
_TINY_CHUNKS, _TINY_CHUNK_BYTES = 1000, 32
# Time to answer those whose requests are given up.
_LAST_WORDS_S = 2.0

_Caller = tuple[str | None, str]
"""The name of a key, or None and the address of a peer whose connection never had one."""


class _Buffer(ReceiveBuffer):
    """h11's buffer, but it refuses heads and trailers that take long to read."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines: list[bytearray] | None = super().maybe_extract_lines()
        if lines and (len(lines) > _HEAD_LINES or sum(map(len, lines)) > _HEAD_BYTES):
            raise h11.RemoteProtocolError("too long", error_status_hint=_TOO_LONG)
        return lines


class _Connection(h11.Connection):
    """h11's connection, but it refuses what costs the loop too much: long heads, tiny chunks.

    A chunk takes some 30 µs. ``fault`` is what the caller is told; None for what is no HTTP.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _HEAD_BYTES)
        self._receive_buffer = _Buffer()
        self._chunks = self._bytes = 0
        self.fault: str | None = None

    def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._bytes = 0
            elif isinstance(event, h11.Data):
                self._chunks += 1
                self._bytes += len(event.data)
                if self._chunks > _TINY_CHUNKS + self._bytes / _TINY_CHUNK_BYTES:
                    self.fault = "The chunks of the body are too small."
                    raise h11.RemoteProtocolError("tiny chunks")
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == _TOO_LONG:
                self.fault = (
                    f"The headers are too long: a request may have {_HEAD_LINES} lines and "
                    f"{_HEAD_BYTES} bytes of them."
                )
            raise
        return event


class _Turns:
    """Lets each caller have a few connections handled in a turn of the loop, others later."""

    def __init__(self) -> None:
        # By caller: how many are handled in this turn, and those that wait, the first one first.
        self._handled: Counter[_Caller] = Counter()
        self._waiting: dict[_Caller, deque[_Protocol]] = {}

    def admits(self, connection: _Protocol, caller: _Caller) -> bool:
        """Returns True if the caller's connection has its turn now; otherwise wakes it later."""
        if not self._handled:
            connection.loop.call_soon(self._begin, connection.loop)
        if caller not in self._waiting and self._handled[caller] < _HANDLED_AT_ONCE:
            self._handled[caller] += 1
            return True
        self._waiting.setdefault(caller, deque()).append(connection)
        return False

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handled.clear()
        for caller, waiting in list(self._waiting.items()):
            for _ in range(min(_HANDLED_AT_ONCE, len(waiting))):
                self._handled[caller] += 1
                loop.call_soon(waiting.popleft().wake)
            if not waiting:
                del self._waiting[caller]
        if self._handled:
            loop.call_soon(self._begin, loop)


class _Protocol(H11Protocol):
    """uvicorn's protocol with deadlines, turns and a limit on connections.

    uvicorn closes a silent connection, but not one on which a byte comes now and then, which costs
    its client nothing. A request with a key may wait long for its answer, and the body of a batch
    may come slowly.
    """

    def __init__(self, connections: Connections, turns: _Turns, **how: Any) -> None:
        super().__init__(**how)
        self.conn: _Connection = _Connection()
        self._all = connections
        self._turns = turns
        self._caller: _Caller = None, ""
        self._waits_for_turn = False
        self._overdue: asyncio.TimerHandle | None = None
        self._answering: object = None
        self._body_bytes = 0
        self.app_state = {**self.app_state, CONNECTION: self}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        peer = self.client[0] if self.client else ""
        self._caller = None, peer
        if self._all.enter(self, peer):
            self._watch()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._body_bytes += len(data)
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """Handles what has come, also behind an earlier request, if that is this caller's turn."""
        if self._waits_for_turn:
            return
        if not self._can_begin() or self._turns.admits(self, self._caller):
            super().handle_events()
        else:
            self._waits_for_turn = True
            self._all.defers(self)
            self.transport.pause_reading()

    def _can_begin(self) -> bool:
        """Returns whether what has come may begin a request: half a head costs no turn."""
        is_idle = self.conn.their_state is h11.IDLE
        return not is_idle or _HEADS_END.search(self.conn.trailing_data[0]) is not None

    def wake(self) -> None:
        """Handles what waits, now that it is this connection's turn."""
        self._waits_for_turn = False
        self._all.resumes(self)
        if not self.transport.is_closing():
            if not self.flow.read_paused:
                self.transport.resume_reading()
            super().handle_events()
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._all.leave(self)
        super().connection_lost(exc)
        # They lead back here. Under a flood, the collector would stop the loop to find such cycles.
        self._answering = self.cycle = self.scope = None  # type: ignore[assignment]
        self.app_state = {}

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.fault or msg)
        else:
            # An answer has begun, or was given before the body came to its end.
            self.close()
        if self.cycle:
            self.cycle.disconnected = True

    def on_response_complete(self) -> None:
        self._forget()
        self._all.waits(self)
        super().on_response_complete()
        # A pipelined request may have begun.
        self._watch()

    def has_key(self, name: str, *, streams: bool) -> None:
        """Notes the key of the request under way; ``streams``: its body is read as it is used.

        The request then gets the deadline of a body with a key, and its connection does not give
        way.
        """
        self._caller = name, ""
        self._all.works(self)
        self._forget()
        if not streams and self.cycle and self.cycle.more_body:
            began_s = self.loop.time()
            self._overdue = self.loop.call_later(_BODY_S, self._look_at_body, began_s)

    async def taken(self) -> None:
        """Waits until the client has taken what was sent, but for some KiB, or has gone."""
        await self.flow.drain()

    def close(self) -> None:
        if self.transport.get_write_buffer_size():
            # A peer that does not read would keep it open.
            self.transport.abort()
        else:
            self.transport.close()

    def _watch(self) -> None:
        cycle = self.cycle if self.cycle and not self.cycle.response_complete else None
        if cycle is not None and cycle is not self._answering:
            # A request has begun.
            self._answering, self._body_bytes = cycle, 0
            self._forget()
        elif cycle is not None:
            return
        if self._overdue is None:
            # An answer that was not taken yet takes its reader's time, too.
            unread_bytes = self.transport.get_write_buffer_size()
            wait_s = _HEAD_S + unread_bytes / _BODY_BYTES_PER_S
            self._overdue = self.loop.call_later(wait_s, self._give_up)

    def _forget(self) -> None:
        if self._overdue:
            self._overdue.cancel()
            self._overdue = None

    def _look_at_body(self, began_s: float) -> None:
        self._overdue = None
        if not self.cycle.more_body or self.cycle.response_complete:
            return
        late_s = self.loop.time() - began_s - self._body_bytes / _BODY_BYTES_PER_S
        if late_s >= _BODY_S:
            self._give_up()
        else:
            wait_s = _BODY_S - late_s
            self._overdue = self.loop.call_later(wait_s, self._look_at_body, began_s)

    def _give_up(self) -> None:
        self._overdue = None
        count("leanq_http_refusals_total", "too slow")
        self.close()


class _Server(uvicorn.Server):
    """uvicorn's server, but the command handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio uses one number for the kernel's backlog and for the connections accepted at once.
        for each in sockets or ():
            each.listen(_BACKLOG)


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
    """The application on a socket. After :meth:`stop`, requests go on for at most ``grace_s``."""

    def __init__(self, app: FastAPI, listener: socket.socket, *, grace_s: float) -> None:
        self._app = app
        self._listener = listener
        self._grace_s = grace_s
        config = uvicorn.Config(
            app,
            http=functools.partial(  # type: ignore[arg-type]
                _Protocol, app.state.connections, _Turns()
            ),
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
            backlog=_ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=max(1, round(grace_s + _LAST_WORDS_S)),
        )
        self._server = _Server(config)

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
        loop = asyncio.get_running_loop()
        loop.call_later(self._grace_s, self._app.state.ending.set)
        loop.call_later(self._grace_s + _LAST_WORDS_S / 2, self._close)
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True

    def _close(self) -> None:
        """Ends connections whose peers have not taken their answers."""
        for connection in list(self._server.server_state.connections):
            assert isinstance(connection, _Protocol)
            connection.close()
