"""Serves any number of requests over one connection: reads them while it sends results.

Requests are lines of JSON. The *window* holds the requests that were read and whose result was not
sent yet. The gateway reads on only while the window has room: if a client reads slowly or the queue
is full, it waits. So memory stays flat for any number of lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import HTTPException, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive, Scope, Send

from leanq.errors import LeanQError, TooLargeError
from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import Ending
from leanq.gateway.groups import Group
from leanq.gateway.keys import Key
from leanq.gateway.operations import prepared_of, prepared_text
from leanq.gateway.pending import End
from leanq.gateway.problems import problem_of
from leanq.gateway.v1_bodies import ITEM, Step, result_of
from leanq.queue.settings import MAX_REQUEST_BYTES

log = logging.getLogger("leanq.gateway")

_WINDOW = 512
# The most results in one piece of the answer, unless a single one has more bytes.
_AT_ONCE, _AT_ONCE_BYTES = 100, 1 << 20
# JSON may write one character as six.
_MAX_LINE_BYTES = 2 * MAX_REQUEST_BYTES
_PAUSE_S = 0.1
_RESULT_BYTES = 1000
# Proxies close idle connections.
_KEEP_ALIVE_S = 15.0


class BatchResponse(Response):
    """Sends the results of the requests in the HTTP request's body.

    Args:
        events: True for server-sent events, False for lines of JSON.
        ending: set once the gateway ends, and cuts the batch short.
    """

    def __init__(
        self,
        lean: GatewayClient,
        access: Access,
        key: Key,
        *,
        events: bool,
        ending: Ending,
    ) -> None:
        super().__init__(media_type="text/event-stream" if events else "application/x-ndjson")
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-store"
        # Otherwise nginx collects results before it sends any.
        self.headers["X-Accel-Buffering"] = "no"
        self._lean = lean
        self._access = access
        self._key = key
        self._events = events
        self._ending = ending
        self._group = Group(lean, key.tenant, self._ended)
        # One for each unfinished request that needs more than sending.
        self._tasks: set[asyncio.Task[None]] = set()
        # The caller's ids of the requests that have not ended.
        self._labels: dict[int, Any] = {}
        # Results that were not sent yet, with their bytes.
        self._results: deque[tuple[dict[str, Any], int]] = deque()
        self._changed = asyncio.Event()
        # True once all requests were read, and once the client has gone.
        self._complete = self._gone = False
        self._room = asyncio.Semaphore(min(_WINDOW, key.outstanding))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        with self._access.holding(self._key) as self._note:
            reading = asyncio.create_task(self._read(receive))
            cutting = asyncio.create_task(self._cut_short())
            try:
                while found := await self._next(send):
                    await send(_chunk(b"".join(self._framed(result) for result, _ in found)))
                    for _, size_bytes in found:
                        self._room.release()
                        self._note(-1, -size_bytes)
                if not self._gone:
                    end = self._events and not self._ending.is_set()
                    await send(_chunk(b"event: end\ndata: {}\n\n" if end else b"", more=False))
            finally:
                self._group.leave()
                tasks = (reading, cutting, *self._tasks)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self, send: Send) -> list[tuple[dict[str, Any], int]]:
        """Waits for results and returns those that are there; an empty list after the last one."""
        while True:
            with contextlib.suppress(TimeoutError):
                # Results that come together are sent together.
                if found := self._take():
                    return found
                async with asyncio.timeout(_KEEP_ALIVE_S if self._events else None):
                    if not await self._more():
                        return []
                continue
            await send(_chunk(b": still here\n\n"))

    def _framed(self, result: dict[str, Any]) -> bytes:
        if ended := result.pop("ended", None):
            name, reply = ended
            result["result"] = result_of(self._access.sealed(self._key, reply), name)
        data = msgspec.json.encode(result)
        return b"event: result\ndata: " + data + b"\n\n" if self._events else data + b"\n"

    async def _read(self, receive: Receive) -> None:
        """Reads requests to the end of the body, then waits until the client has gone."""
        try:
            await self._begin_all(receive)
            self._complete = True
            self._changed.set()
            while not self._gone:
                self._gone = (await receive())["type"] == "http.disconnect"
        finally:
            self._complete = True
            self._changed.set()

    def _take(self) -> list[tuple[dict[str, Any], int]]:
        """Returns results that were not sent yet, up to a limit."""
        found: list[tuple[dict[str, Any], int]] = []
        left_bytes = _AT_ONCE_BYTES
        while self._results and len(found) < _AT_ONCE and left_bytes >= 0:
            found.append(self._results.popleft())
            left_bytes -= found[-1][1]
        return found

    async def _more(self) -> bool:
        while not self._results:
            if self._gone or (self._complete and not self._labels):
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def _cut_short(self) -> None:
        """Once the gateway ends, sends that fact in place of further results."""
        await self._ending.wait()
        problem = problem_of(HTTPException(503, "the gateway ends; send the others again"))
        self._group.leave()
        self._complete = True
        self._labels.clear()
        self._put({"index": None, "id": None, "problem": problem})

    def _put(self, result: dict[str, Any]) -> None:
        size_bytes = _bytes_of(result)
        self._results.append((result, size_bytes))
        self._note(1, size_bytes)
        self._changed.set()

    async def _begin_all(self, receive: Receive) -> None:
        index = 0
        try:
            with self._access.body(self._key) as note:
                async for line in self._lines(receive, note):
                    if line.strip():
                        await self._room.acquire()
                        self._key = self._access.renewed(self._key, "submit")
                        self._begin(index, line)
                        index += 1
        except (TooLargeError, HTTPException) as error:
            self._put({"index": index, "id": None, "problem": problem_of(error)})

    def _begin(self, index: int, line: bytes) -> None:
        if self._complete:
            return
        try:
            item = ITEM.read(line)
        except RequestValidationError as error:
            self._put({"index": index, "id": None, "problem": problem_of(error)})
            return
        self._labels[index] = item.id
        if isinstance(item, Step) or self._limit():
            task = asyncio.create_task(self._begin_later(index, item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        try:
            prepared = prepared_text(item, self._key, self._access, self._lean)
            self._group.begin(index, prepared, item.request_id)
        except (LeanQError, HTTPException) as error:
            self._end(index, {"problem": problem_of(error)})

    async def _begin_later(self, index: int, item: Any) -> None:
        """Begins a request that needs an answer of the queue first, or meets a limit.

        A batch waits at a limit; a single request is refused.
        """
        try:
            prepared = await prepared_of(item, self._key, self._access, self._lean)
            while True:
                if not self._limit():
                    break
                await asyncio.sleep(_PAUSE_S)
            self._group.begin(index, prepared, item.request_id)
        except (LeanQError, HTTPException) as error:
            self._end(index, {"problem": problem_of(error)})
        except Exception:
            # A defect of leanq must not cost the other requests their results.
            log.exception("a request of a batch")
            self._end(index, {"problem": problem_of(HTTPException(500))})

    def _limit(self) -> bool:
        return self._access.wait_for(self._key, 1, self._lean) is not None

    def _ended(self, index: int, name: str, end: End) -> None:
        if isinstance(end, LeanQError):
            self._end(index, {"problem": problem_of(end)})
        else:
            # Convert the reply when it is sent; this runs in a callback of the queue's connection.
            self._end(index, {"ended": (name, end)})

    def _end(self, index: int, result: dict[str, Any]) -> None:
        # Drop results that come after the message that the gateway ends.
        if index in self._labels:
            self._put({"index": index, "id": self._labels.pop(index), **result})

    async def _lines(self, receive: Receive, note: Callable[[int], None]) -> AsyncIterator[bytes]:
        # The pieces of an unfinished line. They are not searched for a line break again.
        begun: list[bytes] = []
        begun_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                return
            first, *more = message.get("body", b"").split(b"\n")
            begun.append(first)
            begun_bytes += len(first)
            note(len(first))
            for piece in more:
                yield b"".join(begun)
                note(len(piece) - begun_bytes)
                begun, begun_bytes = [piece], len(piece)
            if begun_bytes > _MAX_LINE_BYTES:
                raise TooLargeError(f"a line has more than the {_MAX_LINE_BYTES} bytes allowed")
            if not message.get("more_body", False):
                yield b"".join(begun)
                return


def _bytes_of(result: dict[str, Any]) -> int:
    """Returns about how much memory a result takes: its texts, and the objects around them."""
    if "ended" not in result:
        return _RESULT_BYTES
    _, reply = result["ended"]
    texts = (
        *(message.text for message in reply.messages),
        *(sorry.goal for sorry in reply.sorries),
        *(theorem.statement or "" for theorem in reply.theorems),
        *reply.goals,
    )
    objects = len(texts) + 1
    return objects * _RESULT_BYTES + sum(map(len, texts))


def _chunk(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
