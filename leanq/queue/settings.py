"""Declares each setting once: its variable, default, bounds and meaning.

A URL may name several hosts, ``redis://HOST:PORT,HOST:PORT``: nodes of one cluster, or a master and
the replicas that may follow it. A client's URL may name several clusters, separated by blanks, with
weights unless these are equal: ``redis://A*3 redis://B*1``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

from leanq.errors import UsageError

log = logging.getLogger("leanq.settings")

MAX_REQUEST_BYTES = 16 << 20
"""The largest encoded request that is accepted at submit, in bytes."""

_MOST = 1_000_000_000
_LIKE = 0.8
# Variables by which one process of leanq informs another.
JOB_VARIABLE = "LEANQ_JOB"
_INTERNAL = ("LEANQ_CAMPAIGN_WORKER", JOB_VARIABLE)
# Variables that Kubernetes sets beside a service whose name begins with leanq.
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)\Z|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?\Z")
_WEIGHTED = re.compile(r"(?s)(.*?)(?:\*(\d+(?:\.\d+)?))?")
_HOST = re.compile(r"[^\s*]+\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}\Z")


def _setting(default: Any, meaning: str, *, least: float = 1, most: float = _MOST) -> Any:
    """Declares the setting of a variable, ``LEANQ_`` and a name; the default gives its type."""
    return field(default=default, metadata={"meaning": meaning, "least": least, "most": most})


@dataclass(frozen=True)
class Settings:
    """Settings on which clients, workers and reapers of one queue agree.

    Attributes:
        url: the Redis: ``redis://``, ``rediss://`` or ``unix://``.
    """

    url: str = field(repr=False)
    prefix: str = _setting("leanq", "keeps several leanqs apart in one Redis")
    shards: int = _setting(1, "parts of the queue, one per master of a cluster", most=1000)
    lease_s: float = _setting(
        10.0, "seconds without a heartbeat after which a worker's requests are requeued", least=0.5
    )
    reply_ttl_s: float = _setting(3600.0, "seconds for which a reply can be collected")
    max_attempts: int = _setting(6, "workers that a request may take down before it is poisoned")
    max_waiting: int = _setting(1_000_000, "requests that may wait per environment and tenant")
    remember_s: float = _setting(
        0.0, "seconds for which Lean's verdicts answer identical requests; 0: never", least=0
    )
    state_ttl_s: float = _setting(604_800.0, "seconds after which an unused state is collected")
    snapshot_mb: int = _setting(
        1024, "memory in Redis for snapshots of states, all shards together, in MiB", least=0
    )
    cache_mb: int = _setting(4096, "disk for each worker's snapshots, in MiB", least=0)
    compare_every: int = _setting(
        500,
        "one of so many checks behind a preloaded header runs in a new Lean too; 0: none",
        least=0,
    )
    # Returns where the Redis is by now, if that is written down.
    written: Callable[[], str | None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_url(self.url)
        check_name("LEANQ_PREFIX", self.prefix)
        for declared in _declared():
            value = getattr(self, declared.name)
            least, most = declared.metadata["least"], declared.metadata["most"]
            if not isinstance(value, str) and not least <= value <= most:
                raise UsageError(
                    f"{_variable(declared)} must lie between {least} and {most}, got {value}"
                )

    @classmethod
    def load(cls, url: str, environ: Mapping[str, str]) -> Settings:
        """Loads the settings for ``url``, and all others from ``LEANQ_…`` in ``environ``.

        A URL with a host and without a password gets ``LEANQ_PASSWORD``. An unknown variable in
        ``LEANQ_`` is logged as a warning.

        Raises:
            UsageError: a value of another type, out of range, or a URL of another scheme.
        """
        for name in environ:
            if name.startswith("LEANQ_"):
                _warn_of_typo(name)
        return cls(
            _with_password(url, environ.get("LEANQ_PASSWORD", "")),
            **{
                declared.name: _parse(_variable(declared), environ[_variable(declared)], declared)
                for declared in _declared()
                if _variable(declared) in environ
            },
        )

    def variables(self) -> dict[str, str]:
        """Returns the variables by which another process loads the same settings."""
        each = {_variable(declared): str(getattr(self, declared.name)) for declared in _declared()}
        return {"LEANQ_URL": self.url, **each}


_OTHER_VARIABLES = {
    "LEANQ_URL": (
        "the queue's Redis: `redis://`, `rediss://` or `unix://`; for clients also a gateway: `https://`",
        "`leanq up`'s, or an embedded server",
    ),
    "LEANQ_KEY": ("the key for a gateway, where LEANQ_URL is `https://HOST`", ""),
    "LEANQ_PASSWORD": (
        "the Redis' password, written as it is, where LEANQ_URL has a host and no password",
        "",
    ),
    "LEANQ_RQ_URL": ("the Redis of RQ, for campaigns", "LEANQ_URL"),
    "LEANQ_CAMPAIGNS": (
        "the folder, shared with campaign workers, for the rows of a client's campaigns",
        "",
    ),
    "LEANQ_LEAN": ("the path of the `lean` program", "a Lake project's, PATH's, or the wheel's"),
    "LEANQ_CACHE": ("the folder for snapshots and compiled files", "the user's cache folder"),
}
"""Variables that are read elsewhere: their meanings, and their defaults."""


def variables() -> list[tuple[str, str, str]]:
    """Returns every variable that leanq reads: its name, its meaning and its default."""
    declared = (
        (_variable(item), item.metadata["meaning"], str(item.default).removesuffix(".0"))
        for item in _declared()
    )
    return [*((name, *about) for name, about in _OTHER_VARIABLES.items()), *declared]


def _declared() -> Iterable[Field[Any]]:
    return (item for item in fields(Settings) if item.metadata)


def _variable(declared: Field[Any]) -> str:
    return f"LEANQ_{declared.name.upper()}"


def _parse(name: str, text: str, declared: Field[Any]) -> Any:
    is_integer = isinstance(declared.default, int)
    try:
        return text if isinstance(declared.default, str) else (int if is_integer else float)(text)
    except ValueError:
        expected = "an integer" if is_integer else "a number"
        raise UsageError(f"{name} must be {expected}, got {text!r}") from None


@cache
def _warn_of_typo(name: str) -> None:
    """Warns once per process of a name that leanq does not read."""
    names = [variable for variable, _, _ in variables()]
    if name in (*names, *_INTERNAL) or _OF_KUBERNETES.search(name):
        return
    like = get_close_matches(name, names, 1, _LIKE)
    log.warning(
        "%s is not a variable of leanq and has no effect%s",
        name,
        f"; did you mean {like[0]}?" if like else "",
    )


def each_host(url: str) -> list[str]:
    """Returns a URL for each of the hosts in ``redis://HOST:PORT,HOST:PORT/DB``.

    They are nodes of one cluster, or a master and its replicas.
    """
    scheme, login, hosts, rest = _parts(url)
    return [f"{scheme}{login}{host}{rest}" for host in hosts.split(",")]


def _parts(url: str) -> tuple[str, str, str, str]:
    """Returns the parts of a URL with their signs: scheme, login, hosts, and the rest."""
    # Do not use urlsplit, which knows a single host.
    scheme, mark, rest = url.partition("://")
    end = next((place for place, sign in enumerate(rest) if sign in "/?#"), len(rest))
    login, at, hosts = rest[:end].rpartition("@")
    return f"{scheme}{mark}", f"{login}{at}", hosts, rest[end:]


def each_cluster(urls: str) -> list[tuple[str, float | None]]:
    """Returns the clusters in ``redis://A*3 redis://B*1``, each with its weight if it has one.

    A single URL stays as it is: a weight at its end would be part of its path or options.
    """
    # Split only before a scheme, since a socket's path may have blanks.
    each = re.split(r"\s+(?=\w+://)", urls.strip())
    if len(each) == 1:
        return [(urls, None)]
    parts = (_WEIGHTED.fullmatch(text) for text in each)
    return [(part[1], float(part[2]) if part[2] else None) for part in parts if part]


def check_url(url: str) -> None:
    """Raises UsageError if ``url`` names no Redis, or several clusters."""
    if url.startswith(("http://", "https://")):
        raise UsageError(
            f"{without_password(url)!r} is a gateway, and this needs the queue's Redis, "
            "redis://HOST:PORT/DB; submit, verify, step, state, profile, mcp and campaign run take "
            "a gateway"
        )
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
            f"{'; a password with / ? # % or @ goes into LEANQ_PASSWORD' if '@' in url else ''}"
        )


def _is_complete(url: str) -> bool:
    parts = urlsplit(url)
    _ = parts.port
    if parts.scheme == "unix":
        return bool(parts.path)
    return parts.scheme in ("redis", "rediss") and bool(_HOST.match(parts.hostname or ""))


def _with_password(url: str, password: str) -> str:
    scheme, login, hosts, rest = _parts(url)
    has_one = ":" in login or "@" in rest or re.search(r"[?&]password=", rest)
    if not password or has_one or scheme not in ("redis://", "rediss://"):
        return url
    return f"{scheme}{login.removesuffix('@')}:{quote(password, safe='')}@{hosts}{rest}"


def without_password(url: str) -> str:
    """Returns ``url`` as it may be shown to people and written to logs."""
    shown = re.sub(r"(password=)[^&]*", r"\1***", url)
    # Replace up to the last @, even without a scheme: a mistyped URL has a password, too.
    return re.sub(r"(?s)\A((?:\w+://|(?!\w+://))[^:/@]*):.*@", r"\1:***@", shown)


@lru_cache(4096)
def _is_name(name: str) -> bool:
    return _NAME.match(name) is not None


def check_name(what: str, name: str) -> str:
    """Returns ``name`` if it may stand in a key: an environment, a tenant, a prefix.

    Raises:
        UsageError: it may not; the text names ``what`` and says what is allowed.
    """
    if not _is_name(name):
        # A worker takes NAME=FOLDER, so that is what callers give, too.
        folder = "; only a worker is told the folder behind a name" if "=" in name else ""
        raise UsageError(
            f"{what} {name!r:.80} is not a valid name; expected 1 to 64 letters, digits and "
            f". _ @ + -, beginning with a letter or digit{folder}"
        )
    return name
