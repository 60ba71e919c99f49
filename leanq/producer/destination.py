"""Where a client's requests go: to one or several clusters, or to a gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from leanq.errors import UsageError
from leanq.producer import arguments
from leanq.queue.settings import Settings, each_cluster, without_password

_MAX_WEIGHT = 1e9
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Clusters:
    """A client's clusters and their weights, which any thread may change at any time.

    Raises:
        UsageError: no cluster, one twice, unlike numbers of shards, or weights out of range.
    """

    def __init__(self, each: Sequence[tuple[Settings, float]]) -> None:
        self.each = tuple(settings for settings, _ in each)
        if not each:
            raise UsageError("a client needs at least one URL")
        if len({settings.url for settings in self.each}) < len(self.each):
            raise UsageError("a cluster is named twice")
        if len({settings.shards for settings in self.each}) > 1:
            raise UsageError("clusters of one client must have the same number of shards")
        self._weights = _checked({settings.url: weight for settings, weight in each})

    @classmethod
    def load(
        cls,
        url: str | Settings | Sequence[str | Settings],
        weights: Sequence[float] | None,
        environ: Mapping[str, str],
    ) -> Clusters:
        """Returns the clusters at ``url``: a URL, several, or a text that names several."""
        named: list[tuple[str | Settings, float | None]]
        if isinstance(url, str):
            named = [*each_cluster(url)]
        elif isinstance(url, Settings):
            named = [(url, None)]
        elif isinstance(url, Sequence) and all(isinstance(each, str | Settings) for each in url):
            named = [(each, None) for each in url]
        else:
            raise arguments.wrong_type("url", "a URL, Settings, or a list of these", url)
        if weights is not None:
            if not isinstance(weights, Sequence):
                raise arguments.wrong_type("weights", "a list of numbers", weights)
            if any(weight is not None for _, weight in named):
                raise UsageError("the weights stand in the URL and beside it; give them once")
            if len(weights) != len(named):
                raise UsageError(f"there are {len(weights)} weights for {len(named)} clusters")
            numbers = [arguments.number("a weight", weight) for weight in weights]
            named = [(each, weight) for (each, _), weight in zip(named, numbers, strict=True)]
        return cls(
            [
                (
                    each if isinstance(each, Settings) else Settings.load(each, environ),
                    1.0 if weight is None else weight,
                )
                for each, weight in named
            ]
        )

    def weight(self, url: str) -> float:
        return self._weights[url]

    def change(self, weights: Mapping[str, float]) -> None:
        """Changes the weights of the clusters at these URLs. The others keep theirs.

        Raises:
            UsageError: not a cluster of this client, or weights out of range.
        """
        if not isinstance(weights, Mapping):
            raise arguments.wrong_type("weights", "numbers by URL (dict)", weights)
        for url in weights:
            if arguments.text("a URL", url) not in self._weights:
                raise UsageError(f"the client has no cluster {without_password(url)!r}")
        changed = {url: arguments.number("a weight", weight) for url, weight in weights.items()}
        # Replace the dict, so that no other thread reads it half changed.
        self._weights = _checked({**self._weights, **changed})


def _checked(weights: dict[str, float]) -> dict[str, float]:
    for url, weight in weights.items():
        if not 0 <= weight <= _MAX_WEIGHT:
            name = without_password(url)
            raise UsageError(
                f"the weight of {name} is {weight:g}; it must lie in 0 to {_MAX_WEIGHT:g}"
            )
    if not any(weights.values()):
        raise UsageError("all weights are 0; at least one weight must be positive")
    return weights


def is_gateway(url: str) -> bool:
    return url.startswith(("https://", "http://"))


@dataclass(frozen=True)
class Gateway:
    url: str
    key: str | None = field(repr=False)

    @property
    def is_loopback(self) -> bool:
        """Whether the gateway is on this machine, so that no proxy stands in between."""
        return _is_loopback(_host_of(self.url) or "")

    @property
    def shown(self) -> str:
        """The URL for people, with the proxy on the way there."""
        proxy = None if self.is_loopback else _proxy_to(self.url)
        return f"{self.url} (by the proxy {without_password(proxy)})" if proxy else self.url

    @classmethod
    def checked(cls, url: str, key: str | None, *, insecure_http: bool) -> Gateway:
        """Checks the URL; raises UsageError if it is malformed or would show the key to others."""
        host = _host_of(url)
        if host is None:
            # The message leaves the URL out, since it may hold a password.
            raise UsageError(
                "the URL of a gateway is https://HOST:PORT/PATH, without a name, a password, ? or "
                "#; its key is given by key= or LEANQ_KEY"
            )
        if url.startswith("http://") and not (insecure_http or host in _LOOPBACK):
            raise UsageError(
                f"http://{host} would send the key and the texts in clear; use https://, or "
                "insecure_http=True (--insecure-http) if the network is trusted"
            )
        return cls(url.rstrip("/"), key)


def _host_of(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    more = "@" in parts.netloc or parts.query or parts.fragment
    return None if more else parts.hostname


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _proxy_to(url: str) -> str | None:
    """Returns the proxy that the environment names for a URL."""
    parts, proxies = urlsplit(url), getproxies()
    if proxy_bypass(parts.hostname or ""):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")
