"""Finds the files of an environment without reading them; opens files that others made."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

# All files of a module that Lean opens for an import. It opens `.ilean` for the editor alone.
_MODULE_PARTS = (".olean", ".olean.private", ".olean.server", ".ir", ".ir.sig")
_UNFOLLOWED = os.O_NOFOLLOW | os.O_NONBLOCK


class File(NamedTuple):
    """A file without its content."""

    name: str
    """Relative to the folder where the search began."""
    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """Unpackers and build tools set mtime back, to the same for all files; not this one."""
    inode: int

    @classmethod
    def of(cls, name: str, path: str, status: os.stat_result) -> File:
        times = (status.st_mtime_ns, status.st_ctime_ns)
        return cls(name, path, status.st_size, *times, status.st_ino)

    @classmethod
    def at(cls, path: Path) -> File:
        """Returns the file at a path; raises OSError."""
        return cls.of("", str(path), os.stat(path))


def open_regular(path: Path) -> BufferedReader:
    """Opens a file that others, such as a candidate, may have made; raises OSError.

    It follows no link, as one could lead anywhere, and refuses all but regular files.
    """
    # Opening a pipe would wait for its writer. Without an opener, a folder's descriptor would leak.
    file = open(path, "rb", opener=lambda name, how: os.open(name, how | _UNFOLLOWED))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def compiled_modules(folder: Path, leave_out: Collection[str] = ()) -> list[File]:
    """Returns the files of compiled modules below a folder but some libraries'; raises OSError."""
    found = files_below(str(folder), _MODULE_PARTS, lambda _: True, leave_out=leave_out)
    return sorted(found)


def module_names(folder: Path, libraries: Collection[str]) -> Iterator[str]:
    """Yields the names, relative to a folder, of the modules of some libraries. It lists folders
    and looks at no file; a folder that cannot be read has none."""
    for library in libraries:
        if (folder / f"{library}.olean").exists():
            yield f"{library}.olean"
        for path, _, names in os.walk(folder / library):
            below = os.path.relpath(path, folder)
            yield from (f"{below}/{name}" for name in names if name.endswith(".olean"))


def library_of(name: str) -> str:
    """Returns the first part of a module's name, by its file's name below a folder."""
    first = name.partition("/")[0]
    for part in _MODULE_PARTS if first == name else ():
        first = first.removesuffix(part)
    return first


def files_below(
    folder: str,
    endings: tuple[str, ...],
    enter: Callable[[str], bool],
    prefix: str = "",
    above: frozenset[tuple[int, int]] = frozenset(),
    leave_out: Collection[str] = (),
) -> Iterator[File]:
    """Yields the files below a folder whose names end so, behind this prefix. It follows links, as
    Lean does, and skips folders that ``enter`` refuses. ``above``: the folders on the way here, by
    device and inode. ``leave_out``: libraries. Raises OSError if a folder cannot be read."""
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return  # A link to a folder above itself would lead round and round.
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if not prefix and (entry.name in leave_out or library_of(entry.name) in leave_out):
                continue
            if entry.is_dir():
                if enter(entry.name):
                    yield from files_below(entry.path, endings, enter, f"{name}/", above | {here})
            elif entry.name.endswith(endings) and entry.is_file():
                yield File.of(name, entry.path, entry.stat())
