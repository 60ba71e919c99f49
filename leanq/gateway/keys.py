"""The file of keys: who may call the gateway, on behalf of which tenant, in which environments.

It is TOML, and has the keys' hashes alone::

    [[key]]
    name = "trainer"                  # for logs
    sha256 = "9f86d081884c7d65…"      # of the key
    tenant = "alice"
    environments = ["mathlib"]        # the first is the default; all unless given

Keys are drawn at random, so that a plain hash is as good as a slow one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from leanq.errors import UsageError
from leanq.queue.settings import check_name

log = logging.getLogger("leanq.gateway")

_LOOK_EVERY_S = 1.0


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the holder of one key may do.

    Attributes:
        name: how logs call it; "" for a gateway without keys.
        sha256: the key's SHA-256, 64 hexadecimal digits.
        tenant: on whose behalf its requests are.
        environments: those that it may use, the default first; empty for all.
    """

    name: str
    sha256: str
    tenant: str
    environments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise ValueError(
                f"key {self.name!r}: sha256 must be 64 hexadecimal digits in lower case, as "
                "sha256sum prints them"
            )
        check_name("tenant", self.tenant)
        for environment in self.environments:
            check_name("environment", environment)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: tuple[Key, ...]


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in a file.

    Raises:
        UsageError: it cannot be read, is not what the module's docstring shows, or has no key.
    """
    try:
        keys = msgspec.convert(tomllib.loads(path.read_text()), _File).key
    except OSError as error:
        raise UsageError(f"cannot read the keys in {path}: {error.strerror}") from None
    except (ValueError, UsageError) as error:
        raise UsageError(f"the keys in {path}: {error}") from None
    for what, values in (
        ("name", [key.name for key in keys]),
        ("sha256", [key.sha256 for key in keys]),
    ):
        if len(set(values)) < len(values):
            raise UsageError(f"the keys in {path}: two have the same {what}")
    if not keys:
        raise UsageError(f"the keys in {path}: there are none; write a [[key]] with its sha256")
    return keys


class KeyFile:
    """The keys of a file, read again when it has changed.

    A change that cannot be read is logged, and the keys before it stay.

    Raises:
        UsageError: as :func:`read_keys`.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        # Before the file is read, or a change between the two would never be seen.
        self._version = self._look()
        self._looked_at_s = clock()
        self._keys: Sequence[Key] = read_keys(path)

    def find(self, secret: str) -> Key | None:
        """The key that ``secret`` is. How long it takes does not tell how near it came."""
        self._notice_changes()
        digest = hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def _notice_changes(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_at_s < _LOOK_EVERY_S:
            return
        self._looked_at_s = now_s
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(self._path)
        except UsageError as error:
            log.warning("%s; the keys before this change stay", error)
        else:
            log.info("%d keys read from %s", len(self._keys), self._path)

    def _look(self) -> tuple[int, int, int]:
        try:
            about = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return about.st_mtime_ns, about.st_ino, about.st_size
