"""A mount that stands for a slow disk: each look, open and read takes a latency.

Needs Debian's fuse, and ``pip install mfusepy``.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import mfusepy

_READ_BYTES = 1 << 17


class _Slow(mfusepy.Operations):
    """Shows a folder, each operation after a pause.

    Args:
        root: the folder.
        latency_s: the pause.
    """

    use_ns = True

    def __init__(self, root: Path, latency_s: float) -> None:
        self._root = root
        self.latency_s = latency_s

    def _asked(self, path: str) -> str:
        time.sleep(self.latency_s)
        return f"{self._root}{path}"

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        try:
            status = os.lstat(self._asked(path))
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno or errno.EIO) from None
        names = ("st_mode", "st_ino", "st_nlink", "st_size", "st_uid", "st_gid")
        found = {name: getattr(status, name) for name in names}
        return found | {f"st_{kind}time": getattr(status, f"st_{kind}time_ns") for kind in "amc"}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._asked(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._asked(path))

    def open(self, path: str, flags: int) -> int:
        return os.open(self._asked(path), os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._asked(path)
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


class SlowMount:
    """A mount of a folder, for as long as the context lasts."""

    def __init__(self, root: Path, at: Path, latency_s: float) -> None:
        self.slow = _Slow(root, latency_s)
        self.at = at
        at.mkdir()
        how = {"foreground": True, "ro": True, "max_read": _READ_BYTES}
        self._thread = threading.Thread(
            target=mfusepy.FUSE, args=(self.slow, str(at)), kwargs=how, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        end_s = time.monotonic() + 30
        while not os.path.ismount(self.at):
            if time.monotonic() > end_s:
                sys.exit("the file system is not mounted within 30 s")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["fusermount", "-u", str(self.at)], check=True)
        self._thread.join(30)
