"""The file by which ``leanq up`` says that it is up, and clients and commands find its queue."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from leanq.errors import UnavailableError, UsageError
from leanq.queue.ray_cluster import published
from leanq.queue.settings import Settings


class UpFile:
    """One file per user, which ``leanq up`` writes, and removes when it ends."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        base = environ.get("XDG_RUNTIME_DIR") or environ.get("XDG_CACHE_HOME")
        home = environ.get("HOME") or os.path.expanduser("~")
        self.path = Path(base or f"{home}/.cache", "leanq", "up.json")

    def write(self, settings: Settings) -> None:
        """Writes the file; raises UnavailableError if another ``leanq up`` runs already."""
        if self.read() is not None:
            raise UnavailableError("leanq is up already; other commands find it by themselves")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The file holds the password, so it is private; replacing makes it appear whole.
            handle, new = tempfile.mkstemp(prefix="up-", dir=self.path.parent)
            with os.fdopen(handle, "w") as file:
                json.dump({"pid": os.getpid(), "url": settings.url}, file)
            os.replace(new, self.path)
        except OSError as error:
            raise UnavailableError(f"cannot write {self.path}: {error.strerror}") from None

    def read(self) -> str | None:
        """Returns the URL of the ``leanq up`` that runs, or None."""
        try:
            saved = json.loads(self.path.read_text())
            url, pid = str(saved["url"]), int(saved["pid"])
            os.kill(pid, 0)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        return url if Path(url.partition("@")[2]).exists() else None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def find_queue(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Returns ``environ`` with a ``LEANQ_URL``.

    The URL is that of ``environ``, else of the Ray cluster that this process is part of, else of
    the running ``leanq up``. Ray's head also gives the queue's other settings, where ``environ``
    lacks them.

    Raises:
        UsageError: none exists.
        UnavailableError: Ray's head does not answer.
    """
    if environ.get("LEANQ_URL"):
        return environ
    if of_ray := published(environ):
        return {**of_ray, **environ, "LEANQ_URL": of_ray["LEANQ_URL"]}
    if url := UpFile(environ).read():
        return {**environ, "LEANQ_URL": url}
    raise UsageError(
        "no queue: LEANQ_URL is not set and no 'leanq up' runs; do one of the two, or give the "
        "client a URL"
    )
