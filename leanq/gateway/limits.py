"""Limits the connections of a gateway, and how many of them one key may work on.

Each connection is an open file, and a process has a limited number of files. Beyond the limit a
request is answered with 503.
"""

from __future__ import annotations

import contextlib
import resource
from collections import Counter
from collections.abc import Collection, Iterator

from fastapi import HTTPException

from leanq.queue.metrics import count

_RETRY_AFTER_S = 1

# A connection with an unfinished head takes some 20 KiB.
_MOST_FILES = 8192
# Files for the queue's connections, for the process, and for connections that are about to close.
_OTHER_FILES = 256


def most_connections() -> int:
    """Returns how many connections this process may hold, and sets its limit on files so."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return files - min(_OTHER_FILES, files // 2)


class Connections:
    """All connections of a gateway.

    Args:
        most: the most connections, also an attribute. One key may work on a third of them, and so
            may strangers who log in. So both together leave room for other callers.

    Attributes:
        held: those that the server has.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: Collection[object] = ()
        self._share = max(1, most // 3)
        # By the name of the key.
        self._under_way: Counter[str] = Counter()

    @contextlib.contextmanager
    def carrying(self, name: str) -> Iterator[None]:
        """Counts a request of a key's name, or of strangers (""), while it is under way.

        Raises HTTPException (429) for too many.
        """
        if self._under_way[name] >= self._share:
            count("leanq_http_refusals_total", "connections")
            raise HTTPException(
                429,
                f"{self._share} HTTP requests of this key are under way, the most that this "
                f"gateway takes of one key; retry after {_RETRY_AFTER_S} s",
                {"Retry-After": str(_RETRY_AFTER_S)},
            )
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way[name] -= 1
