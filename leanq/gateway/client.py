"""The gateway's client of the queue: its requests bear their tenant and can be fetched later.

The gateway's request ids are ``SHARD-TENANT~NAME``. TENANT is a hash of the tenant; NAME is chosen
by the HTTP client or drawn for it. Ids are always made of the caller's tenant and a name, so no
name leads to another tenant's request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable
from operator import methodcaller
from typing import Any

from cachetools import LRUCache
from msgspec import structs

from leanq.client import AsyncLeanQClient
from leanq.errors import (
    LostError,
    QueueFullError,
    RequestError,
    UnavailableError,
    UnknownStateError,
    UsageError,
    WireError,
)
from leanq.gateway.fresh import Fresh
from leanq.gateway.pending import End, Pending, RequestName, lost
from leanq.gateway.recent import RecentRequests
from leanq.lean.goals.recipes import read_recipe
from leanq.producer.outstanding import conflict
from leanq.producer.request_builder import Check, PreparedRequest, RequestBuilder
from leanq.queue import wire
from leanq.queue.keys import shard_of
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.requests import Reply, content_of
from leanq.queue.results import is_record, is_reply_to
from leanq.queue.shard import Shard
from leanq.states import RedisStates

_STATES_REMEMBERED = 100_000
_OPTIONS_REMEMBERED = 1000
# How long a withdrawal waits for a request that may still be coming.
_ON_ITS_WAY_S = 2.0
_LOOK_EVERY_S = 0.5


class GatewayClient(AsyncLeanQClient):
    """An asyncio client with requests of many tenants, which may outlive their callers.

    Attributes:
        queues: all shards of all clusters, for looks that read no replies.
        recent: its latest requests.
        lost: why the queue does not answer, so that requests are refused; "" while it answers.
    """

    recent: RecentRequests
    lost = ""

    # Callers may wait for one request at several gateways.
    shares_ends = True
    role = "gateway"

    def _made(self) -> None:
        super()._made()
        if not self.clusters:
            raise UsageError("a gateway needs a Redis, and not another gateway: name it with --url")
        self._pending: dict[RequestName, Pending] = {}
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._checks: LRUCache[Hashable, Callable[[str], PreparedRequest[Reply]]] = LRUCache(
            _OPTIONS_REMEMBERED
        )
        self.recent = RecentRequests()
        self._clusters_shards = [Shard.each(settings) for settings in self.clusters]
        self._shards = [shard for shards in self._clusters_shards for shard in shards]
        self.queues = [OperatorQueue(shard) for shard in self._shards]
        # The fingerprint of a state's environment never changes.
        self._fingerprints: LRUCache[str, str] = LRUCache(_STATES_REMEMBERED)
        self._offered = Fresh(self._look)

    @property
    def builder(self) -> RequestBuilder:
        return self._builder

    def checks(
        self, key: Hashable, options: Callable[[], Check]
    ) -> Callable[[str], PreparedRequest[Reply]]:
        """As ``RequestBuilder.checks``, but remembers the options of earlier requests.

        ``key`` is equal only for equal options.
        """
        try:
            return self._checks[key]
        except KeyError:
            found = self._checks[key] = self._builder.checks(options())
            return found

    def outstanding(self, tenant: str) -> int:
        return self._counts[tenant]

    def outstanding_bytes(self, tenant: str) -> int:
        return self._bytes[tenant]

    def all_outstanding(self) -> int:
        return len(self._pending)

    async def reach(self) -> None:
        """Asks every shard a small question; raises UnavailableError."""
        await asyncio.gather(*(shard.environments() for shard in self._shards))

    async def trouble(self) -> str:
        """Returns why the queue is lost; "" while one of its shards answers."""
        looks = (shard.environments() for shard in self._shards)
        ends = await asyncio.gather(*looks, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, UnavailableError):
                raise end
        return str(ends[0]) if all(isinstance(end, UnavailableError) for end in ends) else ""

    def submit(self, tenant: str, prepared: PreparedRequest[Any], name: str | None) -> Pending:
        """Sends a request, unless one of this name is on its way.

        Raises:
            InvalidRequestError: a malformed name.
            ConflictError: a request of this name with other content is on its way.
            UnavailableError: the queue is lost.
        """
        if self.lost:
            raise UnavailableError(self.lost)
        shards, submission = self.settings.shards, prepared.submission
        if name is None:
            made = RequestName.drawn(tenant, submission.request_id, shards)
        else:
            made = RequestName.of(tenant, name)
        if found := self._pending.get(made):
            return self._same(found, prepared)
        named = structs.replace(submission, request_id=made.request_id(shards))
        prepared = structs.replace(prepared, submission=named)
        pending = self._enter(Pending(made, prepared, self._left))
        self.recent.add(named, pending)
        self._open_route().send(prepared, pending)
        return pending

    def _same(self, found: Pending, prepared: PreparedRequest[Any]) -> Pending:
        """Returns a pending request for one that came again; raises ConflictError."""
        submission = prepared.submission
        if found.content is not None:
            if found.content != content_of(submission.environment, submission.digest):
                raise conflict(found.name.name)
            return found
        # Until the request ends, only its name is known.
        again = Pending(found.name, None, lambda _: None)
        again.acknowledged()
        remembers = self.settings.remember_s > 0

        def told(end: End) -> None:
            if isinstance(end, Reply) and not is_reply_to(submission, end, anywhere=remembers):
                again.ended(conflict(again.name.name))
            else:
                again.ended(end)

        found.add(told)
        return again

    def find(self, tenant: str, name: str) -> Pending:
        """Returns a request that was sent before, perhaps by another gateway.

        It ends with LostError if there is no such request. Raises InvalidRequestError.
        """
        made = RequestName.of(tenant, name)
        if found := self._pending.get(made):
            return found
        pending = self._enter(Pending(made, None, self._left))
        self._open_route().attach(self._id_of(pending), pending)
        return pending

    async def peek(self, tenant: str, name: str) -> Reply | None:
        """Returns the reply of a request that has ended, or raises its error; None before.

        A look does not prolong the wait of other clients. Raises LostError for an unknown request.
        """
        made = RequestName.of(tenant, name)
        if made in self._pending:
            return None
        request_id = made.request_id(self.settings.shards)
        for shard in self._shards:
            if shard.keys.shard != shard_of(request_id):
                continue
            key = shard.keys.request(request_id)
            data: Any = await shard.call(methodcaller("get", key))
            if data is not None:
                return None if is_record(data) else _read(request_id, data)
        raise lost(name)

    async def reply(self, pending: Pending, *, withdraw: bool) -> Reply:
        """Returns the reply of a request, or raises the LeanQError that it ended with.

        ``withdraw``: cancelling the waiting task withdraws it.
        """
        try:
            await pending.wait()
        except asyncio.CancelledError:
            if withdraw:
                self.give_up(pending)
            raise
        return pending.result()

    def give_up(self, pending: Pending) -> None:
        """Withdraws a request that no caller waits for any more, unless it has ended."""
        if pending.end is None:
            self._open_route().cancel(self._id_of(pending), pending)
            # Others here may wait for it too.
            pending.ended(Reply("cancelled", reason="withdrawn"))

    async def patient_reply(self, tenant: str, prepared: PreparedRequest[Any]) -> Reply:
        """Returns the reply of a new request, as ``reply``; waits while the queue is full."""
        while True:
            try:
                return await self.reply(self.submit(tenant, prepared, None), withdraw=True)
            except QueueFullError as error:
                await asyncio.sleep(error.retry_after_s)

    async def withdraw(self, tenant: str, name: str) -> Reply:
        """Withdraws a request; returns ``cancelled``, or its reply or error if that came first.

        A withdrawal may overtake its request at another gateway, so it waits two seconds for the
        request before it raises LostError.
        """
        give_up_s = time.monotonic() + _ON_ITS_WAY_S
        while True:
            try:
                return await self._withdraw(self.find(tenant, name))
            except LostError:
                if time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _withdraw(self, pending: Pending) -> Reply:
        # The queue cannot withdraw a request that it does not know yet.
        await pending.known()
        route, request_id = self._open_route(), self._id_of(pending)
        if pending.end is None and route.cancel(request_id, pending):
            route.attach(request_id, pending)
        await pending.wait()
        return pending.result()

    async def environments_of(self, state: str) -> frozenset[str]:
        """Returns the environments of a state that workers offer now, or offered a second ago.

        Raises UnknownStateError if no cluster knows the state, and UnavailableError.
        """
        fingerprint = self._fingerprints.get(state)
        for shards in () if fingerprint else self._clusters_shards:
            if records := await RedisStates(shards).recall(state):
                fingerprint = read_recipe(state, records).source.fingerprint
                self._fingerprints[state] = fingerprint
                break
        if fingerprint is None:
            raise UnknownStateError(f"the state {state} is not known here, or no longer")
        offered = await self._offered.get()
        return frozenset(name for name, known in offered if known == fingerprint)

    async def _look(self) -> frozenset[tuple[str, str]]:
        """Returns environments with their fingerprints."""
        firsts = [shards[0] for shards in self._clusters_shards]
        each = await asyncio.gather(*(shard.fingerprints() for shard in firsts))
        return frozenset(pair for one in each for pair in one.items())

    async def close(self, *, withdraw: bool = False) -> None:
        """Ends the client. Outstanding requests run on, so that they can be fetched later."""
        await super().close(withdraw=withdraw)
        await asyncio.gather(*(shard.close() for shard in self._shards))

    def _id_of(self, pending: Pending) -> str:
        return pending.name.request_id(self.settings.shards)

    def _enter(self, pending: Pending) -> Pending:
        name = pending.name
        self._pending[name] = pending
        self._counts[name.tenant] += 1
        self._bytes[name.tenant] += pending.size_bytes
        return pending

    def _left(self, pending: Pending) -> None:
        name = pending.name
        del self._pending[name]
        self._counts[name.tenant] -= 1
        self._bytes[name.tenant] -= pending.size_bytes
        if not self._counts[name.tenant]:
            del self._counts[name.tenant]
            del self._bytes[name.tenant]


def _read(request_id: str, data: bytes) -> Reply:
    try:
        reply = wire.unpack_reply(request_id, data)
    except WireError as error:
        raise RequestError(f"the reply to {request_id} cannot be read: {error}") from None
    if reply.error is not None:
        raise RequestError(reply.error)
    return reply
