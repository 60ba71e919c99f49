"""The requests of one route whose ends are awaited."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from leanq.errors import (
    ConflictError,
    InvalidRequestError,
    LeanQError,
    RequestError,
    WireError,
)
from leanq.producer.route import Waiter
from leanq.queue import wire
from leanq.queue.requests import Reply, content_of
from leanq.queue.results import Submission, is_reply_to


class Outstanding(Struct, eq=False):
    """A request whose end is awaited. Times are by the monotonic clock.

    Attributes:
        submission: the request; None if only its request id is known.
        silence_s: how long to wait for a reply before asking the server for it.
        ask_at_s: when to ask; 0 until the request is sent.
        expires_at_s: when its deadline has passed.
        known: whether the server has taken it in.
    """

    request_id: str
    submission: Submission | None
    waiter: Waiter
    silence_s: float
    ask_at_s: float = 0.0
    expires_at_s: float = math.inf
    known: bool = False

    def is_due(self, now_s: float) -> bool:
        sent = self.submission is None or self.ask_at_s > 0
        return sent and self.ask_at_s <= now_s

    def ask_later(self, now_s: float) -> None:
        """Notes when to ask the server for it: after its silence, or when its deadline passes."""
        self.ask_at_s = now_s + self.silence_s
        if now_s < self.expires_at_s:
            self.ask_at_s = min(self.ask_at_s, self.expires_at_s)


class _Entry(Protocol):
    request_id: str
    waiter: Waiter


_E = TypeVar("_E", bound=_Entry)


class Awaited(dict[str, _E]):
    """Requests by request id. It tells each one's waiter once how it ended.

    ``on_idle``: called when the last request has left. ``over``: makes the error that ends each
    request, once requests are refused; else None.
    """

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.over: Callable[[], LeanQError] | None = None
        self._on_idle = on_idle

    def enter(self, entry: _E) -> bool:
        """Takes a request in; returns False if it has ended with an error instead."""
        if self.over:
            entry.waiter.ended(self.over())
            return False
        if entry.request_id in self:
            text = f"this client already waits for request {entry.request_id}"
            entry.waiter.ended(InvalidRequestError(text))
            return False
        self[entry.request_id] = entry
        return True

    def end(self, request_id: str, end: Reply | LeanQError) -> None:
        if entry := self.pop(request_id, None):
            entry.waiter.ended(end)
            if not self:
                self._on_idle()

    def holds(self, entry: _E) -> bool:
        """Returns whether this very request is awaited; another may have its id by now."""
        return self.get(entry.request_id) is entry

    def end_all(self, error: Callable[[], LeanQError]) -> None:
        """Ends each with an error of its own, since raising one adds to its traceback."""
        for request_id in list(self):
            self.end(request_id, error())

    def refuse(self, error: Callable[[], LeanQError]) -> None:
        """Ends each with an error, and refuses all later ones with it."""
        self.over = error
        self.end_all(error)

    def withdraw(self, request_id: str, waiter: Waiter) -> bool:
        """Forgets a request of this waiter; returns False if it has ended already."""
        entry = self.get(request_id)
        if entry is None or entry.waiter is not waiter:
            return False
        del self[request_id]
        if not self:
            self._on_idle()
        return True


class OutstandingRequests(Awaited[Outstanding]):
    """The outstanding requests of one shard's client.

    ``remembers``: whether replies may be remembered verdicts.
    """

    def __init__(self, *, remembers: bool, on_idle: Callable[[], None]) -> None:
        super().__init__(on_idle)
        self._remembers = remembers
        self._environments_answered: set[str] = set()

    def acknowledge(self, entry: Outstanding) -> None:
        entry.known = True
        # The request may have been withdrawn meanwhile, and its waiter may wait elsewhere.
        if self.holds(entry):
            entry.waiter.acknowledged()

    def end(self, request_id: str, end: Reply | LeanQError) -> None:
        entry = self.get(request_id)
        if entry and entry.submission:
            self._environments_answered.add(entry.submission.environment)
        super().end(request_id, end)

    def end_with_bytes(self, request_id: str, data: bytes) -> None:
        """Ends a request with a packed reply, or with an error if the bytes are no reply to it."""
        try:
            reply = wire.unpack_reply(request_id, data)
        except WireError as error:
            text = f"the reply to {request_id} cannot be read: {error}"
            self.end(request_id, RequestError(text))
            return
        entry = self.get(request_id)
        if entry and (submission := entry.submission):
            if not is_reply_to(submission, reply, anywhere=self._remembers):
                self.end(request_id, conflict(request_id))
                return
            if self._remembers and reply.content:
                content = content_of(submission.environment, submission.digest)
                reply = replace(reply, content=content)
        self.end(request_id, reply if reply.error is None else RequestError(reply.error))

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Counts the requests that are not answered, by environment and tenant."""
        # Those that are not queued yet count, too: without a worker, none may ever be.
        return Counter(
            (entry.submission.environment, entry.submission.tenant)
            for entry in self.values()
            if entry.submission
        )

    def take_answered(self) -> AbstractSet[str]:
        """Returns the environments of requests that have ended since the last call."""
        answered, self._environments_answered = self._environments_answered, set()
        return answered


def conflict(name: str) -> ConflictError:
    return ConflictError(
        f"the request id {name!r} is that of a request with other content, which stays as it is; "
        "give this one another id"
    )
