"""Whether anything was written in an environment's folders, as the kernel tells (inotify).

To look at all files of a large library takes 150 ms, and each verdict waits for a look. A watch
that has heard nothing since the last look saves it. It hears nothing of other machines, so network
file systems are never quiet; nor of writes by another name of a file or through memory, which the
look every few seconds finds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from leanq.lean.environment import Environment

_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
# Modified, attributes, closed after writing, moved, created, deleted, and the folder itself gone.
_MASK = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
# File systems on which all writes pass this kernel.
_LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "squashfs", "erofs")
)
_EVENT_BYTES = 1 << 16


class Watch:
    """A watch over the folders of an environment's files; over none, it is never quiet. Blocks for
    as long as it takes to find these folders."""

    def __init__(self, environment: Environment | None = None) -> None:
        self._fd = -1
        self._is_quiet = False
        if environment is None:
            return
        folders = _folders(environment)
        try:
            if not _are_local(folders):
                return
            libc = ctypes.CDLL(None, use_errno=True)
            self._fd = libc.inotify_init1(_NONBLOCK_CLOEXEC)
            for folder in folders if self._fd >= 0 else ():
                if libc.inotify_add_watch(self._fd, os.fsencode(folder), _MASK) < 0:
                    raise OSError(ctypes.get_errno(), "inotify_add_watch", folder)
        except (OSError, AttributeError):
            self.close()

    def begin(self) -> None:
        """Forgets what was heard: a look at all files begins."""
        self._is_quiet = self._fd >= 0
        self._hear()

    def is_quiet(self) -> bool:
        """Returns whether nothing was heard since the last :meth:`begin`."""
        if self._is_quiet and self._hear():
            self._is_quiet = False
        return self._is_quiet

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._is_quiet = False

    def _hear(self) -> bool:
        heard = False
        with contextlib.suppress(BlockingIOError):
            while self._fd >= 0 and os.read(self._fd, _EVENT_BYTES):
                heard = True
        return heard


def _folders(environment: Environment) -> list[str]:
    """Returns the folders of all files, and of what links among them lead to."""
    places = [str(folder) for folder in environment.search_path]
    places += [os.path.dirname(path) for path in environment.found]
    places.append(os.path.dirname(environment.toolchain.program))
    folders = set(filter(os.path.isdir, places))
    folders |= {os.path.dirname(os.path.realpath(path)) for path in environment.found}
    folders |= set(map(os.path.realpath, tuple(folders)))
    return sorted(folders)


def _are_local(folders: Iterable[str]) -> bool:
    kinds = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, behind = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        kinds[point] = behind.split()[0]

    def kind_of(folder: str) -> str:
        while folder not in kinds and folder != "/":
            folder = os.path.dirname(folder)
        return kinds.get(folder, "")

    return all(kind_of(os.path.realpath(each)) in _LOCAL for each in folders)
