"""Content hashes of files; the cache folder remembers them by path, size, times and inode.

The memory is believed only if this user or the superuser owns it and no other user can write to it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType

from leanq.lean.files import File, open_regular

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
