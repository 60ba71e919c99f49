"""Requests as their tenant knows them, and those whose end this gateway waits for.

A batch of a hundred texts is a hundred requests, so that nothing here takes a task, or a turn of
the event loop, for each: what waits for an end is called at once where the end comes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Self

from leanq.errors import ConflictError, InvalidRequestError, LeanQError, LostError
from leanq.producer.request_builder import PreparedRequest
from leanq.producer.shard_client import conflict
from leanq.queue.keys import shard_of
from leanq.queue.requests import Reply, content_of

End = Reply | LeanQError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,48}")


class RequestName(NamedTuple):
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
    def drawn(cls, tenant: str, request_id: str, shards: int) -> Self:
        """A new name that leads to the shard of a request id, which was drawn for the request."""
        shard = shard_of(request_id)
        # In most queues this is it.
        made = cls(tenant, request_id.partition("-")[2])
        while made._shard(shards) != shard:
            made = cls(tenant, secrets.token_urlsafe(12))
        return made

    @classmethod
    def read(cls, tenant: str, request_id: str) -> Self | None:
        """The request of this tenant that has this id; None where it is not one of the tenant's."""
        _, _, rest = request_id.partition("-")
        owner, mark, name = rest.partition("~")
        return cls(tenant, name) if mark and owner == _of_tenant(tenant) else None

    def request_id(self, shards: int) -> str:
        """The id under which the queue knows it."""
        return f"{self._shard(shards)}-{_of_tenant(self.tenant)}~{self.name}"

    def _shard(self, shards: int) -> int:
        return int.from_bytes(_hash(self.name, 8)) % shards if shards > 1 else 0


@lru_cache(1024)
def _of_tenant(tenant: str) -> str:
    return urlsafe_b64encode(_hash(tenant, 9)).decode()


def _hash(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()


class Pending:
    """A request whose end this gateway waits for.

    Args:
        prepared: the request, where it is not only its name that is known.
        left: called with this once it has ended.

    Attributes:
        name: as its tenant knows it.
        end: what it ended with; None as long as it has not.
    """

    __slots__ = ("_callbacks", "_is_known", "_known", "_left", "_prepared", "end", "name")

    def __init__(
        self,
        name: RequestName,
        prepared: PreparedRequest[Any] | None,
        left: Callable[[Pending], None],
    ) -> None:
        self.name = name
        self.end: End | None = None
        self._prepared = prepared
        self._left = left
        self._callbacks: list[Callable[[End], None]] = []
        self._is_known = False
        # Made for those that wait for it, which are few.
        self._known: asyncio.Event | None = None

    @property
    def size_bytes(self) -> int:
        """Of its text, as long as the gateway has that."""
        return len(self._prepared.submission.body) if self._prepared else 0

    @property
    def content(self) -> str | None:
        """What it asks for (see ``content_of``); None where only its name is known."""
        if self._prepared is None:
            return None
        return content_of(self._prepared.submission.environment, self._prepared.submission.digest)

    async def known(self) -> None:
        """Until the queue has acknowledged it, or it has ended."""
        if not self._is_known:
            self._known = self._known or asyncio.Event()
            await self._known.wait()

    def acknowledged(self) -> None:
        self._is_known = True
        if self._known:
            self._known.set()

    def ended(self, end: End) -> None:
        if isinstance(end, LostError):
            end = lost(self.name.name)
        elif isinstance(end, ConflictError):
            # By the name that its caller has for it.
            end = conflict(self.name.name)
        if self.end is None:
            self.end = end
            self._left(self)
            if self._prepared and isinstance(end, Reply):
                # Where the reply's states are. What else it means is for the caller to read.
                with contextlib.suppress(LeanQError):
                    self._prepared.read(end)
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback(end)
        self.acknowledged()

    def add(self, callback: Callable[[End], None]) -> None:
        """Has it called with the end, in the moment in which the end comes; now where it has."""
        if self.end is None:
            self._callbacks.append(callback)
        else:
            callback(self.end)

    def discard(self, callback: Callable[[End], None]) -> None:
        """Has it called no more."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until it has ended, for up to so many seconds."""
        if self.end is not None:
            return
        woken = asyncio.get_running_loop().create_future()

        def wake(_: End) -> None:
            if not woken.done():
                woken.set_result(None)

        self.add(wake)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await woken
        finally:
            self.discard(wake)

    def result(self) -> Reply:
        """The reply of a request that has ended; raises the LeanQError that it ended with."""
        assert self.end is not None
        if isinstance(self.end, LeanQError):
            raise self.end
        return self.end


def lost(name: str) -> LostError:
    """The error of a request that is not known, by the name that its caller has for it."""
    return LostError(f"the request {name!r} is not known: it never was, or its reply has gone")
