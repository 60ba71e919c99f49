"""Keeps the latest requests of one gateway with their texts, for people to look at.

The queue keeps a request's text only until the request has ended, and replies do not hold it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from leanq.gateway.pending import End, Pending
from leanq.queue.requests import Reply
from leanq.queue.results import Submission

_MOST_BYTES = 32 << 20
# The cost of a request beside its text, so that small ones are bounded too.
_EACH_BYTES = 4096


@dataclass(slots=True)
class RecentRequest:
    """A request that came through this gateway.

    ``pending`` is None once it has ended. ``ended`` has the verdict and the times of its reply,
    which may be large; it is None before, or if the request ended with an error.
    """

    submission: Submission
    pending: Pending | None
    ended: Reply | None = None
    at_s: float = field(default_factory=time.time)

    @property
    def size_bytes(self) -> int:
        return _EACH_BYTES + len(self.submission.body)

    def has_ended(self, end: End) -> None:
        self.pending = None
        if isinstance(end, Reply):
            self.ended = Reply(
                end.verdict, queued_s=end.queued_s, cpu_s=end.cpu_s, wall_s=end.wall_s
            )


class RecentRequests:
    """The latest requests, in bounded memory: some thousands of small ones."""

    def __init__(self) -> None:
        # By request id, oldest first.
        self._kept: OrderedDict[str, RecentRequest] = OrderedDict()
        self._bytes = 0

    def add(self, submission: Submission, pending: Pending) -> None:
        """Keeps a request; forgets the oldest ones if they are too many."""
        key, kept = submission.request_id, RecentRequest(submission, pending)
        if kept.size_bytes > _MOST_BYTES:
            return
        if before := self._kept.pop(key, None):
            self._bytes -= before.size_bytes
        self._kept[key] = kept
        self._bytes += kept.size_bytes
        pending.add(kept.has_ended)
        while self._bytes > _MOST_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size_bytes

    def find(self, request_id: str) -> RecentRequest | None:
        return self._kept.get(request_id)

    def all(self, tenant: str | None = None) -> Iterator[RecentRequest]:
        """Returns the requests of a tenant, or of all tenants, oldest first."""
        return (kept for kept in self._kept.values() if tenant in (None, kept.submission.tenant))
