"""Finds the campaigns in RQ's Redis for commands and clients; a plain installation lacks RQ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from leanq.errors import UnavailableError, UsageError, to_install
from leanq.queue.settings import check_url, each_host

if TYPE_CHECKING:
    import redis

    from leanq.campaigns.rq_queue import Campaigns

_TIMEOUT_S = 5.0

NO_CLUSTER = "RQ needs one Redis that is no cluster; name it with LEANQ_RQ_URL"


@contextlib.contextmanager
def submitted_campaigns(url: str, prefix: str) -> Iterator[Campaigns]:
    """Yields the campaigns in RQ's Redis at ``url``, of the leanq with this LEANQ_PREFIX.

    Raises UsageError without RQ or for a Redis that it cannot use, and UnavailableError.
    """
    require_rq()
    from leanq.campaigns.rq_queue import Campaigns

    # No call here waits for anything but its answer.
    with rq_connection(url, timeout_s=_TIMEOUT_S) as connection:
        yield Campaigns(connection, prefix)


def require_rq() -> None:
    """Raises UsageError if RQ is not installed."""
    try:
        import rq  # noqa: F401
    except ImportError:
        raise UsageError(
            f"campaigns as jobs need RQ, which is not installed: {to_install('campaigns')}"
        ) from None


@contextlib.contextmanager
def rq_connection(url: str, timeout_s: float | None = None) -> Iterator[redis.Redis]:
    """Yields a connection to RQ's Redis at ``url``; raises as ``submitted_campaigns``.

    Without ``timeout_s`` it waits without end, as workers need that wait for jobs.
    """
    import redis

    try:
        check_url(url)
    except UsageError as error:
        raise UsageError(f"{error} ({NO_CLUSTER})") from None
    if len(each_host(url)) > 1:
        raise UsageError(NO_CLUSTER)
    try:
        times = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        with contextlib.closing(redis.Redis.from_url(url, **times)) as connection:
            about: Any = connection.info("cluster")
            if about.get("cluster_enabled"):
                raise UsageError(NO_CLUSTER)
            yield connection
    except redis.RedisError as error:
        raise UnavailableError(f"RQ's Redis: {error}") from None
