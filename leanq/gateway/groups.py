"""Waits for the requests of one HTTP request together, without a task for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from leanq.errors import LeanQError, QueueFullError
from leanq.gateway.client import GatewayClient
from leanq.gateway.pending import End, Pending
from leanq.producer.request_builder import PreparedRequest

_T = TypeVar("_T")

# A key may send ten thousand texts at once, which keep the event loop busy for half a second.
_IN_ONE_TURN = 50


async def in_turns(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yields the items, and lets the event loop serve other requests after every few items."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % _IN_ONE_TURN:
            await asyncio.sleep(0)


class _Sent(NamedTuple):
    pending: Pending
    callback: Callable[[End], None]
    prepared: PreparedRequest[Any]
    name: str | None


class Group:
    """Requests of a tenant. A request that meets a full queue is sent again until there is room.

    ``told`` is called once for each request, with its number, its name and its end.
    """

    def __init__(
        self, lean: GatewayClient, tenant: str, told: Callable[[int, str, End], None]
    ) -> None:
        self._lean = lean
        self._tenant = tenant
        self._told = told
        # The unfinished requests by number: either sent, or waiting to be sent again.
        self._sent: dict[int, _Sent] = {}
        self._waiting: dict[int, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._sent) + len(self._waiting)

    def begin(self, number: int, prepared: PreparedRequest[Any], name: str | None = None) -> None:
        """Sends a request; raises InvalidRequestError for a malformed name of the caller's."""
        pending = self._lean.submit(self._tenant, prepared, name)
        callback = partial(self._ended, number)
        self._sent[number] = _Sent(pending, callback, prepared, name)
        pending.add(callback)

    def leave(self) -> None:
        """Stops waiting: withdraws the requests without a name, and lets the others run on.

        Calls ``told`` no more.
        """
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        sent, self._sent = self._sent, {}
        for each in sent.values():
            each.pending.discard(each.callback)
            if each.name is None:
                self._lean.give_up(each.pending)

    def _ended(self, number: int, end: End) -> None:
        sent = self._sent.pop(number)
        if isinstance(end, QueueFullError):
            loop = asyncio.get_running_loop()
            self._waiting[number] = loop.call_later(
                end.retry_after_s, self._again, number, sent.prepared, sent.name
            )
        else:
            self._told(number, sent.pending.name.name, end)

    def _again(self, number: int, prepared: PreparedRequest[Any], name: str | None) -> None:
        del self._waiting[number]
        try:
            self.begin(number, prepared, name)
        except LeanQError as error:
            self._told(number, name or "", error)
