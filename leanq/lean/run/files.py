"""Files of an environment, and their contents' hashes."""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import itertools
import json
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
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


class LocalSnapshot:
    """A snapshot on this disk, which stays there as long as this object does."""

    def __init__(self, path: Path, deps: bytes) -> None:
        self.path = path
        self._deps = deps
        # The cache may drop the file at any moment.
        self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)

    def expose(self, folder: Path, name: str) -> Path:
        """Puts the snapshot as a link or a copy into ``folder``, with its NAME.deps beside it. No
        candidate may be able to write there. Raises OSError if the disk is full or the name is
        taken."""
        target = folder / name
        try:
            os.link(self.path, target)
        except OSError:
            with open(f"/proc/self/fd/{self._handle}", "rb") as source, target.open("xb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        folder.joinpath(f"{name}.deps").write_bytes(self._deps)
        return target


# Content hashes of files; the cache folder remembers them by path, size, times and inode.
#
# The memory is believed only if this user or the superuser owns it and no other user can write to
# it.

# A file that was just changed may change again within the same tick of its clock.
_SETTLED_NS = 2_000_000_000


DIGEST_BYTES = 32
"""The length of every hash here: BLAKE2b-256."""


def hash_bytes(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def hash_file(path: str | Path) -> bytes:
    """Returns the hash of a file; 150 MB take 0.2 s. Raises OSError."""
    with open(path, "rb") as file:
        return hash_rest(file)


def hash_rest(file: BufferedReader) -> bytes:
    """Returns the hash of an open file, from its position to its end."""
    new = hashlib.blake2b(digest_size=DIGEST_BYTES)
    return hashlib.file_digest(file, lambda: new).digest()


def content_hashes(
    files: Sequence[File], memory: Path, brought: Mapping[File, str] = MappingProxyType({})
) -> dict[str, str]:
    """Returns the hash of each path's content in hexadecimal digits: remembered in the file
    ``memory``, brought, or computed on all CPUs and then remembered. Raises OSError if a file
    cannot be read, or is no longer the one that was found."""
    young = set(unsettled(files))
    known = _recall(memory)
    hashes = {file.path: digest for file in files if (digest := known.get(file, brought.get(file)))}
    unknown = [file for file in files if file.path not in hashes]
    if unknown:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hashes |= pool.map(_hash_found, unknown)
    settled = {file: hashes[file.path] for file in files if file not in young}
    if settled != known:
        keep(memory, json.dumps(list(settled.items()), separators=(",", ":")).encode())
    return hashes


def unsettled(files: Iterable[File]) -> list[File]:
    """Returns the files that may change yet, and then look as they do now."""
    settled_ns = time.time_ns() - _SETTLED_NS
    return [file for file in files if file.ctime_ns >= settled_ns]


def _hash_found(found: File) -> tuple[str, str]:
    """Returns a file's path and hash; raises OSError if another file is there by now."""
    with open(found.path, "rb") as file:
        content = hash_rest(file).hex()
        status = os.fstat(file.fileno())
    if File.of(found.name, found.path, status) != found:
        raise OSError(errno.ESTALE, "it has changed while it was read", found.path)
    return found.path, content


def is_ours(status: os.stat_result) -> bool:
    """Returns whether this user or the superuser alone can write to what has this status."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def make_folders(folder: Path) -> None:
    """Makes a folder and those above it, for no other user to write to; raises OSError."""
    for each in reversed((folder, *folder.parents)):
        if not each.is_dir():
            with contextlib.suppress(FileExistsError):
                each.mkdir(0o755)


def make_ours(folder: Path, mode: int) -> bool:
    """Makes a folder; returns whether no other user can write to it. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode)  # a umask only takes rights away
    status = folder.lstat()
    return is_ours(status) and stat.S_ISDIR(status.st_mode)


def read_kept(path: Path) -> bytes | None:
    """Returns the bytes of :func:`keep`; None if missing, damaged, or another user's."""
    try:
        with open_regular(path) as file:
            if not is_ours(os.fstat(file.fileno())):
                return None
            checksum, _, body = file.read().partition(b"\n")
    except OSError:
        return None
    return body if checksum == _checksum(path, body) else None


def keep(path: Path, body: bytes) -> None:
    """Replaces a file of the cache. If that fails, only the next start is slower."""
    with contextlib.suppress(OSError):
        make_folders(path.parent)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent) as folder:
            new = Path(folder, path.name)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(_checksum(path, body) + b"\n" + body)
            new.replace(path)


def _checksum(path: Path, body: bytes) -> bytes:
    # The name counts: who can write to the folder may rename a file, and need not write one.
    return hash_bytes(os.fsencode(path.name) + b"\0" + body).hex().encode()


def _recall(memory: Path) -> dict[File, str]:
    try:
        return {File(*file): content for file, content in json.loads(read_kept(memory) or b"[]")}
    except (ValueError, TypeError):
        return {}


# The modules that somebody may have meant by the name of one that there is not.

_MOST = 3
# As many are compared letter by letter, which takes some 20 ms.
_MOST_COMPARED = 200


def nearest(module: Sequence[str], modules: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns the nearest of an environment's modules, the best first: those below the name, then
    those that look like it, which stand beside it or end alike. All are parts of names."""
    below, alike = list[tuple[str, ...]](), list[tuple[int, tuple[str, ...]]]()
    for each in map(tuple, modules):
        before, behind = _common(module, each), _common(module[::-1], each[::-1])
        if before == len(module):
            below.append(each)
        # One part of it may be wrong, or it has moved.
        elif behind or len(each) == before + 1:
            alike.append((-before - behind, each))
    below.sort(key=lambda each: (len(each), each))
    compared = {".".join(each): each for _, each in sorted(alike)[:_MOST_COMPARED]}
    found = difflib.get_close_matches(".".join(module), compared, _MOST)
    return [*below[:_MOST], *(compared[name] for name in found)][:_MOST]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns how many parts two names begin with alike."""
    alike = (mine == theirs for mine, theirs in zip(one, other, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, alike))
