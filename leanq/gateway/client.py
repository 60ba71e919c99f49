"""The gateway's client of the queue: requests that bear their tenant, and may be fetched later.

A request id of the gateway's is ``SHARD-TENANT~NAME``, where TENANT is a hash of the tenant and
NAME what the HTTP client knows: its own choice, or drawn for it. Since ids are always made of the
caller's tenant and a name, no name leads to a request of another tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from base64 import urlsafe_b64encode
from collections import Counter
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Self, cast

from msgspec import structs

from leanq.client import AsyncLeanQClient
from leanq.errors import (
    InvalidRequestError,
    LeanQError,
    LostError,
    QueueFullError,
    RequestError,
    UsageError,
    WireError,
)
from leanq.producer.request_builder import PreparedRequest, RequestBuilder
from leanq.queue import wire
from leanq.queue.keys import shard_of
from leanq.queue.queue import Queue
from leanq.queue.requests import Reply
from leanq.queue.results import is_record

_NAME = re.compile(r"[A-Za-z0-9._-]{1,48}")


@dataclass(frozen=True, slots=True)
class RequestName:
    """A request as its tenant knows it."""

    tenant: str
    name: str

    @classmethod
    def of(cls, tenant: str, name: str) -> Self:
        """Raises InvalidRequestError for what can be no name."""
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{name!r:.80} is no request id here; expected 1 to 48 letters, digits and . _ -"
            )
        return cls(tenant, name)

    @classmethod
    def drawn(cls, tenant: str, shard: int, shards: int) -> Self:
        """A new name that leads to this shard."""
        while True:
            made = cls(tenant, secrets.token_urlsafe(12))
            if made._shard(shards) == shard:
                return made

    def request_id(self, shards: int) -> str:
        """The id under which the queue knows it."""
        tenant = urlsafe_b64encode(_hash(self.tenant, 9)).decode()
        return f"{self._shard(shards)}-{tenant}~{self.name}"

    def _shard(self, shards: int) -> int:
        return int.from_bytes(_hash(self.name, 8)) % shards


def _hash(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()


class Pending:
    """A request whose end this gateway waits for.

    Attributes:
        name: as its tenant knows it.
        known: set once the queue has acknowledged it, or it has ended.
        end: what it ended with.
    """

    def __init__(self, name: RequestName, prepared: PreparedRequest[Any] | None = None) -> None:
        self.name = name
        self.known = asyncio.Event()
        self.end: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._prepared = prepared
        # An end that no caller waits for any more is no fault.
        self.end.add_done_callback(lambda end: end.cancelled() or end.exception())

    def acknowledged(self) -> None:
        self.known.set()

    def ended(self, end: Reply | LeanQError) -> None:
        if isinstance(end, LostError):
            end = _lost(self.name.name)
        if not self.end.done():
            if isinstance(end, LeanQError):
                self.end.set_exception(end)
            else:
                self._learn(end)
                self.end.set_result(end)
        self.known.set()

    def _learn(self, reply: Reply) -> None:
        # Where the reply's states are. What else it means is for the caller to read.
        if self._prepared:
            with contextlib.suppress(LeanQError):
                self._prepared.read(reply)


class GatewayClient(AsyncLeanQClient):
    """An asyncio client whose requests are of many tenants, and may outlive those who brought
    them. Its arguments are those of :class:`leanq.LeanQClient`."""

    def _made(self) -> None:
        super()._made()
        if not self.clusters:
            raise UsageError("a gateway needs a Redis, and not another gateway: name it with --url")
        self._pending: dict[RequestName, Pending] = {}
        self._counts: Counter[str] = Counter()
        # For looks that make this client no receiver of what it looks at.
        self._queues = [queue for settings in self.clusters for queue in Queue.each(settings)]

    @property
    def builder(self) -> RequestBuilder:
        """Prepares requests for :meth:`submit`."""
        return self._builder

    def outstanding(self, tenant: str) -> int:
        """How many requests of a tenant this gateway waits for."""
        return self._counts[tenant]

    def submit(self, tenant: str, prepared: PreparedRequest[Any], name: str | None) -> Pending:
        """Sends a request, unless it is on its way by this name.

        Raises:
            InvalidRequestError: what can be no name.
        """
        shards, submission = self.settings.shards, prepared.submission
        if name is None:
            made = RequestName.drawn(tenant, shard_of(submission.request_id), shards)
        else:
            made = RequestName.of(tenant, name)
        if found := self._pending.get(made):
            return found
        pending = self._enter(Pending(made, prepared))
        request_id = self._id_of(pending)
        named = replace(prepared, submission=structs.replace(submission, request_id=request_id))
        self._open_route().send(named, pending)
        return pending

    def find(self, tenant: str, name: str) -> Pending:
        """A request that was sent before, perhaps by another gateway.

        Its end is LostError where there is no such request. Raises InvalidRequestError.
        """
        made = RequestName.of(tenant, name)
        if found := self._pending.get(made):
            return found
        pending = self._enter(Pending(made))
        self._open_route().attach(self._id_of(pending), pending)
        return pending

    async def peek(self, tenant: str, name: str) -> Reply | None:
        """What a request has ended with, or None. No other client waits for it the longer.

        Raises:
            LeanQError: what it has ended with; LostError where there is no such request.
        """
        made = RequestName.of(tenant, name)
        if made in self._pending:
            return None
        request_id = made.request_id(self.settings.shards)
        for queue in self._queues:
            if queue.keys.shard != shard_of(request_id):
                continue
            data = await _get(queue, queue.keys.request(request_id))
            if data is not None:
                return None if is_record(data) else _read(request_id, data)
        raise _lost(name)

    async def reply(self, pending: Pending, *, withdraw: bool) -> Reply:
        """What a request ends with; ``withdraw``: it is, where the waiting task is cancelled.

        Raises:
            LeanQError: what it ended with.
        """
        try:
            return await asyncio.shield(pending.end)
        except asyncio.CancelledError:
            if withdraw and not pending.end.done():
                self._open_route().cancel(self._id_of(pending), pending)
                # Others may wait for it too.
                pending.ended(Reply("cancelled", reason="withdrawn"))
            raise

    async def patient_reply(self, tenant: str, prepared: PreparedRequest[Any]) -> Reply:
        """What a new request ends with, which waits where the queue is full. It is withdrawn where
        the waiting task is cancelled.

        Raises:
            LeanQError: what it ended with.
        """
        while True:
            try:
                return await self.reply(self.submit(tenant, prepared, None), withdraw=True)
            except QueueFullError as error:
                await asyncio.sleep(error.retry_after_s)

    async def withdraw(self, pending: Pending) -> Reply:
        """Withdraws a request. What it ends with: ``cancelled``, or what was faster.

        Raises:
            LeanQError: what it ended with; LostError where there is no such request.
        """
        # What the queue does not know yet cannot be withdrawn from it.
        await pending.known.wait()
        route, request_id = self._open_route(), self._id_of(pending)
        if not pending.end.done() and route.cancel(request_id, pending):
            route.attach(request_id, pending)
        return await asyncio.shield(pending.end)

    async def close(self, *, withdraw: bool = False) -> None:
        """Ends the client. Outstanding requests run on, so that they can be fetched later."""
        await super().close(withdraw=withdraw)
        await asyncio.gather(*(queue.close() for queue in self._queues))

    def _id_of(self, pending: Pending) -> str:
        return pending.name.request_id(self.settings.shards)

    def _enter(self, pending: Pending) -> Pending:
        name = pending.name
        self._pending[name] = pending
        self._counts[name.tenant] += 1

        def leave(_: object) -> None:
            del self._pending[name]
            self._counts[name.tenant] -= 1
            if not self._counts[name.tenant]:
                del self._counts[name.tenant]

        pending.end.add_done_callback(leave)
        return pending


def _lost(name: str) -> LostError:
    # By the name that the caller has for it.
    return LostError(f"the request {name!r} is not known: it never was, or its reply has gone")


async def _get(queue: Queue, key: str) -> bytes | None:
    data: Any = await queue.call(lambda connection: connection.get(key))
    return cast("bytes | None", data)


def _read(request_id: str, data: bytes) -> Reply:
    try:
        reply = wire.unpack_reply(request_id, data)
    except WireError as error:
        raise RequestError(f"the reply to {request_id} cannot be read: {error}") from None
    if reply.error is not None:
        raise RequestError(reply.error)
    return reply
