"""Settings, parsed once from flags, environment variables and a URL.

| variable | meaning | default |
| --- | --- | --- |
| ``LEANQ_URL`` | the Redis: ``redis://``, ``rediss://`` or ``unix://`` | an embedded server |
| ``LEANQ_PREFIX`` | keeps several leanqs apart in one Redis | ``leanq`` |
| ``LEANQ_SHARDS`` | parts of the queue, one per master of a cluster | 1 |
| ``LEANQ_LEASE_S`` | seconds without a sign of life after which a worker's work goes back | 10 |
| ``LEANQ_REPLY_TTL_S`` | seconds for which a reply can be collected | 3600 |
| ``LEANQ_MAX_ATTEMPTS`` | workers that a request may take down before it is poisoned | 3 |
| ``LEANQ_MAX_WAITING`` | requests that may wait per environment and tenant | 1000000 |
| ``LEANQ_REMEMBER_S`` | seconds for which Lean's verdicts answer identical requests; 0: never | 0 |
| ``LEANQ_STATE_TTL_S`` | seconds after which a state that nobody used is collected | 604800 |
| ``LEANQ_SNAPSHOT_MB`` | memory in Redis for snapshots of states, all shards together | 1024 |
| ``LEANQ_CACHE_MB`` | disk for snapshots on each worker's machine | 4096 |
| ``LEANQ_REPL_MEMORY_MB`` | resident memory at which a process of the REPL is replaced | 8192 |
| ``LEANQ_REPL_REQUESTS`` | requests after which it is | 5000 |
| ``LEANQ_REPL_AGE_S`` | seconds after which it is | 3600 |

A URL may name several hosts, ``redis://HOST:PORT,HOST:PORT``: nodes of one cluster, or a master and
the replicas that may follow it. A client may be given several clusters, with blanks between their
URLs, and with weights if they are not to be equal: ``redis://A*3 redis://B*1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar
from urllib.parse import urlsplit

from leanq.errors import UsageError

MAX_REQUEST_BYTES = 16 << 20
"""The largest encoded request that is accepted at submit, in bytes."""

_MOST = 1_000_000_000
_Number = TypeVar("_Number", int, float)
_WEIGHTED = re.compile(r"(?s)(.*?)(?:\*(\d+(?:\.\d+)?))?")
_HOST = re.compile(r"[^\s*]+\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}\Z")


@dataclass(frozen=True)
class Settings:
    """What clients, workers and reapers of one queue agree on."""

    url: str = field(repr=False)
    prefix: str = "leanq"
    shards: int = 1
    lease_s: float = 10.0
    reply_ttl_s: float = 3600.0
    max_attempts: int = 3
    max_waiting: int = 1_000_000
    remember_s: float = 0.0
    state_ttl_s: float = 604_800.0
    snapshot_mb: int = 1024
    cache_mb: int = 4096
    repl_memory_mb: int = 8192
    repl_requests: int = 5000
    repl_age_s: float = 3600.0

    def __post_init__(self) -> None:
        check_url(self.url)
        check_name("LEANQ_PREFIX", self.prefix)
        if not 1 <= self.shards <= 1000:
            raise UsageError(f"LEANQ_SHARDS is {self.shards}; it must lie between 1 and 1000")
        for what, value, least in (
            ("LEANQ_LEASE_S", self.lease_s, 0.5),
            ("LEANQ_REPLY_TTL_S", self.reply_ttl_s, 1),
            ("LEANQ_MAX_ATTEMPTS", self.max_attempts, 1),
            ("LEANQ_MAX_WAITING", self.max_waiting, 1),
            ("LEANQ_REMEMBER_S", self.remember_s, 0),
            ("LEANQ_STATE_TTL_S", self.state_ttl_s, 1),
            ("LEANQ_SNAPSHOT_MB", self.snapshot_mb, 0),
            ("LEANQ_CACHE_MB", self.cache_mb, 0),
            ("LEANQ_REPL_MEMORY_MB", self.repl_memory_mb, 1),
            ("LEANQ_REPL_REQUESTS", self.repl_requests, 1),
            ("LEANQ_REPL_AGE_S", self.repl_age_s, 1),
        ):
            if not least <= value <= _MOST:
                raise UsageError(f"{what} is {value}; it must lie between {least} and {_MOST}")

    @classmethod
    def load(cls, url: str, environ: Mapping[str, str]) -> Settings:
        """The settings for ``url``, the rest from ``LEANQ_…`` in ``environ``.

        Raises:
            UsageError: a value that is no number, out of range, or a URL of another scheme.
        """
        return cls(
            url=url,
            prefix=environ.get("LEANQ_PREFIX", cls.prefix),
            shards=_number(environ, "LEANQ_SHARDS", cls.shards),
            lease_s=_number(environ, "LEANQ_LEASE_S", cls.lease_s),
            reply_ttl_s=_number(environ, "LEANQ_REPLY_TTL_S", cls.reply_ttl_s),
            max_attempts=_number(environ, "LEANQ_MAX_ATTEMPTS", cls.max_attempts),
            max_waiting=_number(environ, "LEANQ_MAX_WAITING", cls.max_waiting),
            remember_s=_number(environ, "LEANQ_REMEMBER_S", cls.remember_s),
            state_ttl_s=_number(environ, "LEANQ_STATE_TTL_S", cls.state_ttl_s),
            snapshot_mb=_number(environ, "LEANQ_SNAPSHOT_MB", cls.snapshot_mb),
            cache_mb=_number(environ, "LEANQ_CACHE_MB", cls.cache_mb),
            repl_memory_mb=_number(environ, "LEANQ_REPL_MEMORY_MB", cls.repl_memory_mb),
            repl_requests=_number(environ, "LEANQ_REPL_REQUESTS", cls.repl_requests),
            repl_age_s=_number(environ, "LEANQ_REPL_AGE_S", cls.repl_age_s),
        )


def each_host(url: str) -> list[str]:
    """A URL for each of the hosts in ``redis://HOST:PORT,HOST:PORT/DB``, which are nodes of one
    cluster, or a master and its replicas."""
    scheme, mark, rest = url.partition("://")
    # Not for urlsplit, which knows a single host.
    end = next((place for place, sign in enumerate(rest) if sign in "/?#"), len(rest))
    login, at, hosts = rest[:end].rpartition("@")
    return [f"{scheme}{mark}{login}{at}{host}{rest[end:]}" for host in hosts.split(",")]


def each_cluster(urls: str) -> list[tuple[str, float | None]]:
    """The clusters in ``redis://A*3 redis://B*1``, each with its weight if it has one.

    A single URL is left as it is: what ends it like a weight would be part of its path or options.
    """
    # Before a scheme alone, since a socket's path may have blanks.
    each = re.split(r"\s+(?=\w+://)", urls.strip())
    if len(each) == 1:
        return [(urls, None)]
    parts = (_WEIGHTED.fullmatch(text) for text in each)
    return [(part[1], float(part[2]) if part[2] else None) for part in parts if part]


def check_url(url: str) -> None:
    """Raises UsageError where ``url`` names no Redis, or several clusters."""
    if (count := len(each_cluster(url))) > 1:
        raise UsageError(f"the URL names {count} clusters; only clients take more than one")
    try:
        good = all(map(_is_complete, each_host(url)))
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            f"not a Redis URL: {without_password(url)!r}; "
            "use redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH"
        )


def _is_complete(url: str) -> bool:
    parts = urlsplit(url)
    _ = parts.port
    if parts.scheme == "unix":
        return bool(parts.path)
    return parts.scheme in ("redis", "rediss") and bool(_HOST.match(parts.hostname or ""))


def without_password(url: str) -> str:
    """``url`` as it may be shown to people and written to logs."""
    shown = re.sub(r"(password=)[^&]*", r"\1***", url)
    # Up to the last @, with or without a scheme: whoever mistypes a URL has typed a password.
    return re.sub(r"(?s)\A((?:\w+://|(?!\w+://))[^:/@]*):.*@", r"\1:***@", shown)


@lru_cache(4096)
def check_name(what: str, name: str) -> str:
    """``name`` itself if it may stand in a key: an environment, a tenant, a prefix.

    Raises:
        UsageError: names ``what`` and says what is allowed.
    """
    if not _NAME.match(name):
        raise UsageError(
            f"{what} {name!r} is no name: 1 to 64 letters, digits and . _ @ + -, "
            "beginning with a letter or digit"
        )
    return name


def _number(environ: Mapping[str, str], name: str, default: _Number) -> _Number:
    """The variable as a number of the default's type."""
    text = environ.get(name)
    if text is None:
        return default
    try:
        return type(default)(text)
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise UsageError(f"{name} is {text!r}, which is no {kind}") from None
