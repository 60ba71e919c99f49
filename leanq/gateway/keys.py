"""The file of keys: who may call the gateway, on behalf of which tenant, in which environments.

The file is TOML and holds only the keys' hashes::

    secret = "5b1f…"                  # binds states to their tenants

    [[key]]
    name = "trainer"                  # for logs
    sha256 = "9f86d081884c7d65…"      # of the key
    tenant = "alice"
    environments = ["mathlib"]        # the first is the default; all if not given
    rights = ["submit", "status"]     # the default; "operate" is the third
    outstanding = 10000               # requests at a time
    rate_per_s = 100                  # requests; no limit if not given
    outstanding_mb = 512              # of texts, also of those still arriving
    body_mb = 64                      # of one HTTP request

Keys are drawn at random, so a plain hash is as good as a slow one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from leanq.errors import UsageError
from leanq.queue.settings import check_name

log = logging.getLogger("leanq.gateway")

Right = Literal["submit", "status", "operate"]

_USUAL: tuple[Right, ...] = ("submit", "status")

MAX_BODY_MB = 64
"""The largest body of an HTTP request that is not streamed, in MiB. It holds several of the largest
requests that a queue takes."""

_LOOK_EVERY_S = 1.0


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rights and limits of one key, as above. ``name`` is "" for a gateway without keys."""

    name: str
    sha256: str
    tenant: str
    environments: tuple[str, ...] = ()
    rights: tuple[Right, ...] = _USUAL
    outstanding: Annotated[int, Meta(ge=1)] = 10_000
    rate_per_s: Annotated[float, Meta(gt=0)] | None = None
    outstanding_mb: Annotated[int, Meta(ge=1)] = 512
    body_mb: Annotated[int, Meta(ge=1, le=MAX_BODY_MB)] = MAX_BODY_MB

    def __post_init__(self) -> None:
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise ValueError(
                f"key {self.name!r}: sha256 must be 64 hexadecimal digits in lower case, as "
                "sha256sum prints them"
            )
        if self.outstanding_mb < self.body_mb:
            raise ValueError(
                f"key {self.name!r}: outstanding_mb must be at least body_mb, or its largest body "
                f"would never be let in; got {self.outstanding_mb} and {self.body_mb}"
            )
        check_name("tenant", self.tenant)
        for environment in self.environments:
            check_name("environment", environment)


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file of keys."""

    secret: Annotated[str, Meta(min_length=32)]
    key: tuple[Key, ...]


def read_keys(path: Path) -> Keys:
    """Returns the keys in a file.

    Raises:
        UsageError: the file cannot be read, has another form than above, or has no key.
    """
    try:
        read = tomllib.loads(path.read_text())
        found = msgspec.convert(read, Keys)
    except OSError as error:
        raise UsageError(f"cannot read the keys in {path}: {error.strerror}") from None
    except (ValueError, UsageError) as error:
        raise UsageError(f"the keys in {path}: {error}") from None
    # An operator who removes the last environment does not mean all of them.
    for key in read["key"]:
        if key.get("environments") == []:
            raise UsageError(
                f"the keys in {path}: key {key['name']!r} may use no environment; leave "
                "`environments` out for all of them, or take the key out"
            )
    for what in ("name", "sha256"):
        if len({getattr(key, what) for key in found.key}) < len(found.key):
            raise UsageError(f"the keys in {path}: two have the same {what}")
    if not found.key:
        raise UsageError(f"the keys in {path}: there are none; write a [[key]] with its sha256")
    return found


def make_keys(path: Path) -> str | None:
    """Writes a file with one key that may do everything, and returns the key; None if there is a
    file. Raises UsageError."""
    key = secrets.token_hex(32)
    text = f'''secret = "{secrets.token_hex(32)}"

[[key]]
name = "first"
sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"
tenant = "default"
rights = ["submit", "status", "operate"]
'''
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
    except FileExistsError:
        return None
    except OSError as error:
        raise UsageError(f"cannot write the keys to {path}: {error.strerror}") from None
    return key


class KeyFile:
    """The keys of a file, which is read again when it has changed; raises UsageError.

    A changed file that cannot be read is logged, and the earlier keys stay.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        # Take the time before reading the file, or a change in between would go unseen.
        self._version = self._look()
        self._looked_at_s = clock()
        self._keys = read_keys(path)

    @property
    def secret(self) -> bytes:
        return self._keys.secret.encode()

    def find(self, secret: str) -> Key | None:
        """Returns the key with this ``secret``. Its time does not tell how close a guess came."""
        digest = hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()
        found = None
        for key in self._now():
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def named(self, name: str) -> Key | None:
        return next((key for key in self._now() if key.name == name), None)

    def renewed(self, key: Key) -> Key | None:
        """Returns the present entry of a key that was read before."""
        return next((each for each in self._now() if each.sha256 == key.sha256), None)

    def _now(self) -> tuple[Key, ...]:
        """Returns the keys, read again if the file has changed."""
        now_s = self._clock()
        if now_s - self._looked_at_s >= _LOOK_EVERY_S:
            self._looked_at_s = now_s
            before, self._version = self._version, self._look()
            if self._version != before:
                try:
                    self._keys = read_keys(self._path)
                    log.info("%d keys read from %s", len(self._keys.key), self._path)
                except UsageError as error:
                    log.warning("%s; the keys before this change stay", error)
        return self._keys.key

    def _look(self) -> tuple[int, int, int]:
        try:
            about = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return about.st_mtime_ns, about.st_ino, about.st_size
