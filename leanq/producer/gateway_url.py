"""Where a gateway is: an ``https://`` URL and a key, instead of a Redis."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from leanq.errors import UsageError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_gateway(url: str) -> bool:
    """Returns whether a URL names a gateway rather than a Redis."""
    return url.startswith(("https://", "http://"))


@dataclass(frozen=True)
class Gateway:
    """A gateway's URL, and the key for it."""

    url: str
    key: str | None = field(repr=False)

    @classmethod
    def checked(cls, url: str, key: str | None, *, insecure_http: bool) -> Gateway:
        """Checks the URL; raises UsageError if it is malformed or would show the key to others."""
        host = _host_of(url)
        if host is None:
            # The message leaves the URL out, since it may hold a password.
            raise UsageError(
                "the URL of a gateway is https://HOST:PORT, with nothing else in it; its key is "
                "given by key= or LEANQ_KEY"
            )
        if url.startswith("http://") and not (insecure_http or host in _LOOPBACK):
            raise UsageError(
                f"http://{host} would send the key and the texts in clear; use https://, or "
                "insecure_http=True (--insecure-http) if the network is trusted"
            )
        return cls(url, key)


def _host_of(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    more = "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment
    return None if more else parts.hostname
