"""The folder that a program may write to: in memory with a size, or measured on a disk.

In memory it does not count against the program's memory limit, nor do its mapped files. So a
request means the same on a machine with the folder on a disk. Each run begins with an empty one.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat

from leanq.lean.sandbox import isolation

# It has a little more room, so that an excess can be seen.
_SPARE_BYTES = 4 << 20
_FILE_BYTES = 4096  # the least that each file counts as
_FULL_BYTES = 1 << 20  # a disk with less is full


class Scratch:
    """The scratch folder of one sandbox, for its supervisor. ``fds``: while a program has a folder
    in memory, a descriptor that reaches its files from anywhere."""

    def __init__(self, path: str, *, in_memory: bool) -> None:
        self.path = path
        self.fds: list[int] = []
        self._in_memory = in_memory

    def open(self, size_bytes: float) -> None:
        """Makes it ready for the next program; raises OSError if it cannot."""
        if not self._in_memory:
            empty(self.path)
            return
        isolation.mount_memory(self.path, mode="700", size_bytes=size_bytes + _SPARE_BYTES)
        self.fds.append(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def resize(self, size_bytes: float) -> None:
        """Gives it another size while a program has it; an infinite one leaves its size."""
        # A size below its content is refused; a folder that holds too much already is found so.
        with contextlib.suppress(OSError):
            if self._in_memory and math.isfinite(size_bytes):
                isolation.resize_memory(self.path, size_bytes + _SPARE_BYTES)

    def close(self) -> None:
        """Leaves a folder in memory to those who have it open."""
        while self.fds:
            os.close(self.fds.pop())
            isolation.unmount(self.path)

    def used_bytes(self, most_bytes: float) -> float:
        """Returns the space of its files, each at least 4 KiB; stops counting above the most."""
        if not self._in_memory:
            return disk_bytes(self.path, most_bytes)
        held = os.fstatvfs(self.fds[0])
        files = held.f_files - held.f_ffree - 1  # the folder is one of them
        return max((held.f_blocks - held.f_bfree) * held.f_frsize, files * _FILE_BYTES)

    def on_full_disk(self) -> bool:
        """Returns whether its disk has no more room, whatever fills it."""
        if self._in_memory:
            return False
        disk = os.statvfs(self.path)
        no_files = disk.f_files > 0 and disk.f_favail == 0
        return no_files or disk.f_bavail * disk.f_frsize < _FULL_BYTES


def empty(folder: str) -> None:
    """Removes everything in ``folder``, where no other process is at work; follows no link. A
    program can nest folders deeper than any path reaches, so each is first moved to the top."""
    while True:
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            found = list(entries)
        if not found:
            return
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            with os.scandir(entry.path) as inside:
                for child in inside:
                    if child.is_dir(follow_symlinks=False):
                        os.chmod(child.path, 0o700)
                        os.rename(child.path, os.path.join(folder, os.urandom(12).hex()))
                    else:
                        os.unlink(child.path)
            os.rmdir(entry.path)


def disk_bytes(folder: str, most_bytes: float) -> float:
    """Returns the disk space of everything in a folder; stops counting above ``most_bytes``. Each
    file counts as at least 4 KiB, which bounds how many are looked at; those deeper than any path
    reaches as endless. Open files without a name are missed."""
    total = 0
    folders = [folder]
    while folders and total <= most_bytes:
        place = folders.pop()
        try:
            with contextlib.suppress(PermissionError):
                os.chmod(place, 0o700)
            with os.scandir(place) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    total += max(status.st_blocks * 512, _FILE_BYTES)
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)
                    if total > most_bytes:
                        break
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return math.inf
            # Or it was removed meanwhile.
    return total
