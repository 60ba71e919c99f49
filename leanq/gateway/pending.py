"""Requests as their tenant knows them, and the requests that this gateway waits for.

A batch of a hundred texts is a hundred requests. So nothing here takes a task or a turn of the
event loop for each: an end that comes in calls its callbacks at once.
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
from leanq.producer.outstanding import conflict
from leanq.producer.request_builder import PreparedRequest
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
        """Returns the name; raises InvalidRequestError if it is malformed."""
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{name!r:.80} is no request id here; expected 1 to 48 letters, digits and . _ -"
            )
        return cls(tenant, name)

    @classmethod
    def drawn(cls, tenant: str, request_id: str, shards: int) -> Self:
        """Returns a new name that leads to the shard of a request id, which was drawn before."""
        shard = shard_of(request_id)
        # The first candidate fits in most queues.
        made = cls(tenant, request_id.partition("-")[2])
        while made._shard(shards) != shard:
            made = cls(tenant, secrets.token_urlsafe(12))
        return made

    @classmethod
    def read(cls, tenant: str, request_id: str) -> Self | None:
        """Returns the name of this tenant's request with this id; None for ids of others."""
        _, _, rest = request_id.partition("-")
        owner, mark, name = rest.partition("~")
        return cls(tenant, name) if mark and owner == _of_tenant(tenant) else None

    def request_id(self, shards: int) -> str:
        return f"{self._shard(shards)}-{_of_tenant(self.tenant)}~{self.name}"

    def _shard(self, shards: int) -> int:
        return int.from_bytes(_hash(self.name, 8)) % shards if shards > 1 else 0


@lru_cache(1024)
def _of_tenant(tenant: str) -> str:
    return urlsafe_b64encode(_hash(tenant, 9)).decode()


def _hash(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()


class Pending:
    """A request that this gateway waits for.

    Without ``prepared`` only its name is known; its text is kept once, as packed. ``left`` is
    called once it has ended. ``end`` is the reply or the error that it ended with, None before.
    """

    __slots__ = (
        "_callbacks",
        "_is_known",
        "_known",
        "_left",
        "_read",
        "_submission",
        "end",
        "name",
    )

    def __init__(
        self,
        name: RequestName,
        prepared: PreparedRequest[Any] | None,
        left: Callable[[Pending], None],
    ) -> None:
        self.name = name
        self.end: End | None = None
        self._submission = prepared.submission if prepared else None
        self._read = prepared.read if prepared else None
        self._left = left
        self._callbacks: list[Callable[[End], None]] = []
        self._is_known = False
        # Created lazily; few callers wait for the acknowledgement.
        self._known: asyncio.Event | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of its text, as long as the gateway has it; else 0."""
        return len(self._submission.body) if self._submission else 0

    @property
    def content(self) -> str | None:
        """A digest of the request (see ``content_of``); None if only its name is known."""
        if self._submission is None:
            return None
        return content_of(self._submission.environment, self._submission.digest)

    async def known(self) -> None:
        """Waits until the queue has acknowledged it or it has ended."""
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
            # Name the request as its caller does.
            end = conflict(self.name.name)
        if self.end is None:
            self.end = end
            self._left(self)
            if self._read and isinstance(end, Reply):
                # Reading notes where the reply's states are. Its caller reads the rest.
                with contextlib.suppress(LeanQError):
                    self._read(end)
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback(end)
        self.acknowledged()

    def add(self, callback: Callable[[End], None]) -> None:
        """Calls it with the end as soon as the request ends; at once if it has ended."""
        if self.end is None:
            self._callbacks.append(callback)
        else:
            callback(self.end)

    def discard(self, callback: Callable[[End], None]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Waits until it has ended, for up to so many seconds."""
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
        assert self.end is not None
        if isinstance(self.end, LeanQError):
            raise self.end
        return self.end


def lost(name: str) -> LostError:
    """Returns the error of an unknown request, under its caller's name for it."""
    return LostError(f"the request {name!r} is not known: it never was, or its reply has gone")
