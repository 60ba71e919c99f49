"""Any number of requests over one connection, read while their results are sent.

Requests are lines of JSON. What was read and whose result was not sent yet is the *window*: a
client that reads slowly, or a queue that is full, keeps the gateway from reading on, and memory
stays flat for any number of lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import HTTPException, Response
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from leanq.errors import LeanQError, QueueFullError, TooLargeError
from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import Key
from leanq.gateway.operations import prepared_of
from leanq.gateway.problems import problem_of
from leanq.gateway.v1_models import Item, result_of
from leanq.queue.settings import MAX_REQUEST_BYTES

log = logging.getLogger("leanq.gateway")

_WINDOW = 512
# JSON may write a character as six.
_MAX_LINE_BYTES = 2 * MAX_REQUEST_BYTES
_PAUSE_S = 0.1
# Proxies close connections on which nothing happens.
_KEEP_ALIVE_S = 15.0

_items: TypeAdapter[Any] = TypeAdapter(Item)


class BatchResponse(Response):
    """The results of the requests in the body of the HTTP request that it answers.

    Args:
        events: whether they are server-sent events, rather than lines of JSON.
        ending: set once the gateway ends, and cuts the batch short.
    """

    def __init__(
        self,
        lean: GatewayClient,
        access: Access,
        key: Key,
        *,
        events: bool,
        ending: asyncio.Event,
    ) -> None:
        super().__init__(media_type="text/event-stream" if events else "application/x-ndjson")
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-store"
        # Of nginx, which else would collect results before it sends any.
        self.headers["X-Accel-Buffering"] = "no"
        self._lean = lean
        self._access = access
        self._key = key
        self._events = events
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        run = _Run(self._lean, self._access, self._key)
        reading = asyncio.create_task(run.read(receive))
        cutting = asyncio.create_task(run.cut_short(self._ending))
        try:
            while (result := await self._next(run, send)) is not None:
                await send(_chunk(self._framed(result)))
                run.sent()
            if not run.gone:
                end = self._events and not self._ending.is_set()
                await send(_chunk(b"event: end\ndata: {}\n\n" if end else b"", more=False))
        finally:
            tasks = (reading, cutting, *run.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self, run: _Run, send: Send) -> dict[str, Any] | None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_ALIVE_S if self._events else None):
                    return await run.results.get()
            await send(_chunk(b": still here\n\n"))

    def _framed(self, result: dict[str, Any]) -> bytes:
        data = msgspec.json.encode(result)
        return b"event: result\ndata: " + data + b"\n\n" if self._events else data + b"\n"


def _chunk(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class _Run:
    """The requests of one batch.

    Attributes:
        results: those that were not sent yet; None stands behind the last one.
        tasks: one for each request that has not ended.
        gone: whether the client has gone.
    """

    def __init__(self, lean: GatewayClient, access: Access, key: Key) -> None:
        self.results: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.tasks: set[asyncio.Task[None]] = set()
        self.gone = False
        self._lean = lean
        self._access = access
        self._key = key
        self._room = asyncio.Semaphore(min(_WINDOW, key.outstanding))

    async def read(self, receive: Receive) -> None:
        """Reads requests to the end of the body, and then waits for them, or the client's going."""
        try:
            await self._begin_all(receive)
            watching = asyncio.create_task(self._until_gone(receive))
            try:
                while self.tasks and not self.gone:
                    await asyncio.wait({*self.tasks, watching}, return_when=FIRST_COMPLETED)
            finally:
                watching.cancel()
        finally:
            self.results.put_nowait(None)

    def sent(self) -> None:
        """A result was sent."""
        self._room.release()

    async def cut_short(self, ending: asyncio.Event) -> None:
        """Once the gateway ends, says so in the place of further results."""
        await ending.wait()
        problem = problem_of(HTTPException(503, "the gateway ends; send the others again"))
        self.results.put_nowait({"index": None, "id": None, "problem": problem})
        self.results.put_nowait(None)

    async def _begin_all(self, receive: Receive) -> None:
        index = 0
        try:
            async for line in self._lines(receive):
                if line.strip():
                    await self._room.acquire()
                    self._begin(index, line)
                    index += 1
        except TooLargeError as error:
            self.results.put_nowait({"index": index, "id": None, "problem": problem_of(error)})

    def _begin(self, index: int, line: bytes) -> None:
        task = asyncio.create_task(self._end(index, line))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _end(self, index: int, line: bytes) -> None:
        label = None
        try:
            item = _items.validate_json(line)
            label = item.id
            result = {"result": await self._result(item)}
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            result = {"problem": problem_of(RequestValidationError(details))}
        except (LeanQError, HTTPException) as error:
            result = {"problem": problem_of(error)}
        except Exception:
            # A defect of leanq's, which must not cost the other requests their results.
            log.exception("a request of a batch")
            result = {"problem": problem_of(HTTPException(500))}
        self.results.put_nowait({"index": index, "id": label, **result})

    async def _result(self, item: Any) -> dict[str, Any]:
        lean, access, key = self._lean, self._access, self._key
        prepared = prepared_of(item, key, access, lean.builder)
        await self._admitted()
        while True:
            pending = lean.submit(key.tenant, prepared, item.request_id)
            try:
                reply = await lean.reply(pending, withdraw=item.request_id is None)
            except QueueFullError as error:
                await asyncio.sleep(error.retry_after_s)
            else:
                return result_of(access.sealed(key, reply), pending.name.name)

    async def _admitted(self) -> None:
        """A batch waits where a single request is refused."""
        while True:
            try:
                self._access.admit(self._key, 1, self._lean.outstanding(self._key.tenant))
            except HTTPException:
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    async def _lines(self, receive: Receive) -> AsyncIterator[bytes]:
        rest = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                return
            rest += message.get("body", b"")
            *lines, last = rest.split(b"\n")
            for line in lines:
                yield bytes(line)
            rest = last
            if len(rest) > _MAX_LINE_BYTES:
                raise TooLargeError(f"a line has more than the {_MAX_LINE_BYTES} bytes allowed")
            if not message.get("more_body", False):
                yield bytes(rest)
                return

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
