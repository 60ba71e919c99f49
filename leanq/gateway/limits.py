"""Limits the connections of a gateway, and chooses which one gives way to a new one.

Each connection is an open file, and a process has a limited number of files. A connection *works*
while a request with a key is under way on it, and *waits* otherwise. Waiting connections give way:
those that never had a key before the others, and older before newer. So nobody keeps others out by
opening many.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from fastapi import HTTPException
from starlette.types import Scope

from leanq.gateway.keys import Key
from leanq.queue.metrics import count

CONNECTION = "leanq.connection"
"""The name of a request's connection in its state."""

_RETRY_AFTER_S = 1

_MOST_FILES = 65_536
# Files for the queue's connections, for the process, and for connections that are about to close.
_OTHER_FILES = 256


class Connection(Protocol):
    """One connection of a client."""

    def has_key(self, name: str, *, streams: bool) -> None:
        """Notes that the request under way has the key of this name."""

    async def taken(self) -> None:
        """Waits until the client has taken what was sent, or has gone."""

    def close(self) -> None:
        """Ends the connection at once."""


def most_connections() -> int:
    """Returns how many connections this process may hold; raises its limit on files first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    files = max(soft, most)
    return files - min(_OTHER_FILES, files // 2)


class Connections:
    """All connections of a gateway.

    Args:
        most: the most connections, also an attribute. Strangers from one peer may hold a third of
            them, and one key may work on a third. So both together leave room for other callers.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._share = max(1, most // 3)
        # By the name of the key.
        self._under_way: Counter[str] = Counter()
        self._peers: dict[Connection, str] = {}
        # Waiting connections, oldest first, since a dict keeps its order. Strangers never had a
        # request with a key.
        self._strangers: dict[Connection, None] = {}
        # Strangers whose request has come, and has to wait for its turn.
        self._deferred: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._strangers_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, connection: Connection, peer: str) -> bool:
        """Takes in a new connection; returns False if all others work and there is no room."""
        crowded = self._strangers_of[peer] >= self._share
        if crowded or len(self._peers) >= self.most:
            count("leanq_http_refusals_total", "connections")
            oldest = self._oldest(peer if crowded else None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.close()
        self._peers[connection] = peer
        self._strangers[connection] = None
        self._strangers_of[peer] += 1
        return True

    def leave(self, connection: Connection) -> None:
        self.works(connection)
        self._peers.pop(connection, None)

    def works(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        for strangers in (self._strangers, self._deferred):
            if connection in strangers:
                del strangers[connection]
                peer = self._peers[connection]
                self._strangers_of[peer] -= 1
                if not self._strangers_of[peer]:
                    del self._strangers_of[peer]

    def waits(self, connection: Connection) -> None:
        is_stranger = connection in self._strangers or connection in self._deferred
        if connection in self._peers and not is_stranger:
            self._idle[connection] = None

    def defers(self, connection: Connection) -> None:
        """Notes that a stranger's request waits for its turn; silent strangers give way first."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._deferred[connection] = None

    def resumes(self, connection: Connection) -> None:
        if connection in self._deferred:
            del self._deferred[connection]
            self._strangers[connection] = None

    def _oldest(self, peer: str | None) -> Connection | None:
        """Returns the connection that gives way: a stranger, of this peer if one is named."""
        for each in itertools.chain(self._strangers, self._deferred):
            if peer is None or self._peers[each] == peer:
                return each
        return next(iter(self._idle), None)

    @contextlib.contextmanager
    def carrying(
        self, scope: Scope, key: Key, *, streams: bool = False
    ) -> Iterator[Connection | None]:
        """Counts a key's request while it is under way; ``streams``: its body is read bit by bit.

        Yields its connection, if this gateway serves one. Raises HTTPException (429) if the key has
        too many under way.
        """
        if self._under_way[key.name] >= self._share:
            count("leanq_http_refusals_total", "connections")
            raise HTTPException(
                429,
                f"{self._share} HTTP requests of this key are under way, the most that this "
                f"gateway takes of one key; retry after {_RETRY_AFTER_S} s",
                {"Retry-After": str(_RETRY_AFTER_S)},
            )
        self._under_way[key.name] += 1
        try:
            connection: Connection | None = scope.get("state", {}).get(CONNECTION)
            if connection:
                connection.has_key(key.name, streams=streams)
            yield connection
        finally:
            self._under_way[key.name] -= 1
