"""One worker's snapshots on its machine's disk.

The cache is a folder::

    workers/NAME/       the files of one worker, which has locked it
    inboxes/            for others: folders on the same disk, so that links into them can be made

A worker removes its folder at its end, and those of dead workers at its beginning. Which snapshots
it has it knows in memory alone. If a disk is full or cannot be written, the cache is merely empty.
Several threads can call the methods; all block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from leanq.lean.hashes import DIGEST_BYTES, hash_bytes, make_folders

MOST_RAW_BYTES = 4 << 30
"""The largest snapshot, uncompressed."""


class Manifest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A snapshot's size, its BLAKE2b-256 hash, and its dependencies in a form for any machine
    (:func:`leanq.lean.snapshots.store.portable_deps`)."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_RAW_BYTES)]
    digest: bytes
    deps: Any

    def pack(self) -> bytes:
        """Returns it as bytes, which begin with a hash of the others."""
        content = msgspec.msgpack.encode(self)
        return hash_bytes(content) + content

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """Raises ValueError if the bytes are damaged, or of another version."""
        content = data[DIGEST_BYTES:]
        if hash_bytes(content) != data[:DIGEST_BYTES]:
            raise ValueError("a damaged manifest")
        try:
            return msgspec.msgpack.decode(content, type=cls)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"a damaged manifest, or one of another version: {error}") from None


class SnapshotCache:
    """A worker's snapshots on disk: at most ``budget_bytes``; the least recently used leave first.
    ``damaged`` counts those that were damaged, on the way or by Lean's word. ``inbox_root``: a
    folder on their disk, for others; None if there is none."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.damaged = 0
        self.inbox_root: Path | None = None
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, Manifest] = {}  # the most recently used stand last
        with contextlib.suppress(OSError):
            make_folders(folder / "inboxes")
            self._own, handle = _own_folder(folder / "workers")
            weakref.finalize(self, _remove, self._own, handle, os.getpid())
            self.inbox_root = folder / "inboxes"

    def holds(self, key: str) -> bool:
        """Returns whether the snapshot is on the disk; takes microseconds."""
        return key in self._kept

    def find(self, key: str) -> tuple[Path, Manifest] | None:
        """Returns the file and its manifest."""
        with self._lock:
            if key not in self._kept:
                return None
            manifest = self._kept[key] = self._kept.pop(key)
            return self._file(key), manifest

    @contextlib.contextmanager
    def bringing(self, size_bytes: int) -> Iterator[Path | None]:
        """Yields a place for a file to come in, for :meth:`enter` to take; it vanishes in the end.
        None if there is no room for so much."""
        if self.inbox_root is None or size_bytes > self._budget_bytes:
            yield None
            return
        place = self._own / secrets.token_hex(8)
        try:
            yield place
        finally:
            place.unlink(missing_ok=True)

    def enter(self, key: str, file: Path, manifest: Manifest) -> bool:
        """Takes in a file from :meth:`bringing`; returns whether the cache has it now."""
        with contextlib.suppress(OSError), self._lock:
            # No process has a reason to write to it, and many may have links to it.
            file.chmod(0o444)
            self._remove(key)
            used = sum(each.size_bytes for each in self._kept.values()) + manifest.size_bytes
            while used > self._budget_bytes:
                oldest = next(iter(self._kept))
                used -= self._kept[oldest].size_bytes
                self._remove(oldest)
            file.rename(self._file(key))
            self._kept[key] = manifest
        return self.holds(key)

    def drop(self, key: str) -> None:
        with self._lock:
            self._remove(key)

    def _remove(self, key: str) -> None:
        if self._kept.pop(key, None):
            self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        # Hashed, so that no key leads anywhere else.
        return self._own / hash_bytes(key.encode()).hex()


def _own_folder(workers: Path) -> tuple[Path, int]:
    """Makes a folder for this worker, and removes those of dead ones; returns it with the
    descriptor that keeps it locked."""
    make_folders(workers)
    # One after another, so that none takes a folder for an abandoned one before it is locked.
    with _opened(workers) as all_of_them:
        fcntl.flock(all_of_them, fcntl.LOCK_EX)
        for folder in workers.iterdir():
            with contextlib.suppress(OSError), _opened(folder) as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        own = Path(tempfile.mkdtemp(dir=workers))
        handle = os.open(own, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        return own, handle


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def _remove(folder: Path, handle: int, pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of the worker
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)
