"""Snapshots on the local disk, shared by all workers of a machine.

The cache is a folder::

    lock                held for a moment by a process that changes what is in the folder
    entries/NAME/       one snapshot; it was used when the folder was last changed
        snapshot            as Lean wrote it
        manifest            its size, its hash and what it depends on
    coming/NAME/        on its way in, locked by the process that brings it
    inboxes/            for others: folders on the same disk, so that links into them can be made

An entry comes and goes by a rename, so it is whole or not there, however its worker ends. Dead
processes left the unlocked entries in ``coming``, which are removed.

A snapshot's hash is verified when it comes. Each process verifies it again before its first use,
and whenever the file has changed: see :func:`_stamp`.

If a disk is full or cannot be written, the cache is merely empty. All methods block; several
threads can call them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from leanq.lean.hashes import DIGEST_BYTES, hash_bytes, hash_file, make_folders

MOST_RAW_BYTES = 4 << 30
"""The largest snapshot, uncompressed."""

_SNAPSHOT, _MANIFEST = "snapshot", "manifest"


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
    """The snapshots on this machine's disk: at most ``budget_bytes``; the least recently used leave
    first. ``damaged`` counts those that were damaged, on disk, on the way, or by Lean's word."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.damaged = 0
        self._budget_bytes = budget_bytes
        self._lock = folder / "lock"
        self._entries = folder / "entries"
        self._coming = folder / "coming"
        self._inboxes = folder / "inboxes"
        self._verified: dict[str, tuple[int, ...]] = {}
        with contextlib.suppress(OSError):
            for place in (self._entries, self._coming, self._inboxes):
                make_folders(place)
            with self._locked():
                self._make_room(0)

    @property
    def inbox_root(self) -> Path | None:
        """A folder on the disk of the snapshots, for others; None if there is none."""
        return self._inboxes if self._inboxes.is_dir() else None

    def holds(self, key: str) -> bool:
        """Returns whether the snapshot is on the disk, verified or not; takes microseconds."""
        return (self._entry(key) / _SNAPSHOT).exists()

    def find(self, key: str) -> tuple[Path, Manifest] | None:
        """Returns the verified file, and its manifest; drops a damaged one."""
        entry = self._entry(key)
        try:
            return self._verify(entry)
        except (OSError, ValueError):
            if not entry.exists():
                return None
        # It may have been replaced meanwhile; under the lock no process can do that.
        with contextlib.suppress(OSError), self._locked():
            try:
                return self._verify(entry)
            except (OSError, ValueError):
                if entry.exists():
                    self.damaged += 1
                    self._remove(entry)
        return None

    @contextlib.contextmanager
    def bringing(self, size_bytes: int) -> Iterator[Path | None]:
        """Yields a place on the cache's disk for a file to come in, for :meth:`enter` to take; it
        vanishes in the end. None if there is no room for so much."""
        with contextlib.ExitStack() as stack:
            place = None
            with contextlib.suppress(OSError):
                if size_bytes <= self._budget_bytes:
                    folder = self._coming / secrets.token_hex(8)
                    with self._locked():
                        self._make_room(0)
                        folder.mkdir(0o755)
                        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                        stack.callback(os.close, handle)
                        # Before another process can take it for an abandoned one.
                        fcntl.flock(handle, fcntl.LOCK_EX)
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    place = folder / _SNAPSHOT
            yield place

    def enter(self, key: str, file: Path, manifest: Manifest) -> bool:
        """Takes in a file from :meth:`bringing`; returns whether the cache has it now."""
        entry, folder = self._entry(key), file.parent
        with contextlib.suppress(OSError):
            (folder / _MANIFEST).write_bytes(manifest.pack())
            # No process has a reason to write to it, and many may have links to it.
            file.chmod(0o444)
            stamp = _stamp(file)
            with self._locked():
                self._make_room(manifest.size_bytes)
                # Another worker may have been quicker.
                if not entry.exists():
                    folder.rename(entry)
                    self._verified[entry.name] = stamp
        return self.holds(key)

    def drop(self, key: str) -> None:
        with contextlib.suppress(OSError), self._locked():
            self._remove(self._entry(key))

    def _verify(self, entry: Path) -> tuple[Path, Manifest]:
        """Raises OSError or ValueError if it is missing or damaged."""
        file = entry / _SNAPSHOT
        stamp = _stamp(file)
        manifest = Manifest.unpack((entry / _MANIFEST).read_bytes())
        if self._verified.get(entry.name) != stamp:
            if hash_file(file) != manifest.digest:
                raise ValueError("a damaged snapshot")
            self._verified[entry.name] = stamp
        os.utime(entry)
        return file, manifest

    def _entry(self, key: str) -> Path:
        # Hashed, so that no key leads anywhere else.
        return self._entries / hash_bytes(key.encode()).hex()

    def _make_room(self, size_bytes: int) -> None:
        """Removes what dead processes left, and the least recently used until so much fits."""
        for folder in list(self._coming.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                _remove_if_left(folder)
        entries = []
        for entry in self._entries.iterdir():
            file = entry / _SNAPSHOT
            size = file.stat().st_size if file.exists() else 0
            entries.append((entry.stat().st_mtime_ns, size, entry))
        total = sum(size for _, size, _ in entries) + size_bytes
        for _, size, entry in sorted(entries):
            if total <= self._budget_bytes:
                break
            self._remove(entry)
            total -= size

    def _remove(self, entry: Path) -> None:
        """Removes an entry at once, though its files may take a while."""
        self._verified.pop(entry.name, None)
        gone = self._coming / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            entry.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock.open("ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _remove_if_left(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(handle)


def _stamp(file: Path) -> tuple[int, ...]:
    """Returns what tells a file from another, and changes when its content is written. The time of
    its inode's last change does not serve: every link to the file moves it."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
