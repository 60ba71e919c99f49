"""Snapshots of elaborated prefixes: made, kept, fetched, and weighed against a replay.

Lean writes a snapshot as a memory image of 3 to 300 MB. Beside it, ``NAME.deps`` is JSON with the
absolute paths of the compiled modules that must be there for loading it. The store keeps the image,
whose hash it compares after every transfer. It keeps paths relative to the environment's search
path: that is the same on every machine, and the folders are not.

A snapshot only saves time: a faulty one counts as missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zstandard

from leanq.errors import QueueError
from leanq.lean.run.files import (
    DIGEST_BYTES,
    LocalSnapshot,
    hash_bytes,
    hash_file,
    hash_rest,
    make_folders,
    open_regular,
)
from leanq.states import CHUNK_BYTES, Packed, States

# One worker's snapshots on its machine's disk.
#
# The cache is a folder::
#
#     workers/NAME/       the files of one worker, which has locked it
#     inboxes/            for others: folders on the same disk, so that links into them can be made
#
# A worker removes its folder at its end, and those of dead workers at its beginning. Which
# snapshots it has it knows in memory alone. If a disk is full or cannot be written, the cache is
# merely empty. Several threads can call the methods; all block.

MOST_RAW_BYTES = 4 << 30
"""The largest snapshot, uncompressed."""


class Manifest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A snapshot's size, its BLAKE2b-256 hash, and its dependencies in a form for any machine
    (:func:`leanq.lean.goals.snapshots.portable_deps`)."""

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


LEVEL = 9
"""The level of compression: it leaves 8 to 9 % of 150 MB in 1.1 s. Level 3 leaves 8.7 %, and higher
ones take several times as long for little. It is paid once, and each fetch gains."""

_BLOCK_BYTES = 1 << 20
_MOST_DEPS_BYTES = 16 << 20
# No frame's maker gets more memory than this.
_MOST_WINDOW_BYTES = 1 << 27


class Snapshots:
    """The snapshots of one environment: on this worker's disk, and in the states' server. No
    method raises for a snapshot's faults; the cache counts them. ``roots``: the folders of
    the search path in order, the toolchain's library among them."""

    def __init__(self, cache: SnapshotCache, roots: Sequence[Path]) -> None:
        self.cache = cache
        # Lean may write either: the folder's name, or the target of a link.
        self._roots = [*map(str, roots), *(str(root.resolve()) for root in roots)]
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def holds(self, key: str) -> bool:
        """Returns whether this worker has the snapshot on its disk; takes microseconds."""
        return self.cache.holds(key)

    async def fetch(self, key: str, states: States) -> LocalSnapshot | None:
        """Returns the snapshot from this worker's disk, else from the server, else None."""
        # The second request finds on the disk what the first has fetched.
        async with self._turns.setdefault(key, asyncio.Lock()):
            found = await asyncio.to_thread(self._open, key)
            return found or await self._receive(key, states)

    async def keep(self, key: str, file: Path, states: States) -> None:
        """Takes over Lean's files ``file`` and ``file``.deps, and sends them to the server. A
        snapshot that depends on anything outside the roots stays with this worker."""
        most = min(MOST_RAW_BYTES, states.most_snapshot_bytes)
        packed = await asyncio.to_thread(self._take, key, file, most)
        if packed is None:
            return
        with contextlib.suppress(QueueError):
            await states.keep_snapshot(key, packed)

    async def damaged(self, key: str, states: States) -> None:
        """Drops a snapshot that Lean could not load, here and in the server."""
        self.cache.damaged += 1
        await asyncio.to_thread(self.cache.drop, key)
        with contextlib.suppress(QueueError):
            await states.drop_snapshot(key)

    def _open(self, key: str) -> LocalSnapshot | None:
        found = self.cache.find(key)
        if found is None:
            return None
        path, manifest = found
        try:
            deps = json.dumps(local_deps(manifest.deps, self._roots)).encode()
            return LocalSnapshot(path, deps)
        except (OSError, ValueError):
            # Removed meanwhile, or its paths lead nowhere here.
            return None

    async def _receive(self, key: str, states: States) -> LocalSnapshot | None:
        with contextlib.suppress(QueueError):
            packed = await states.find_snapshot(key)
            try:
                if packed is not None and await asyncio.to_thread(self._unpack, key, packed):
                    return await asyncio.to_thread(self._open, key)
            except ValueError:
                await self.damaged(key, states)
        return None

    def _unpack(self, key: str, packed: Packed) -> bool:
        """Returns whether the cache could take it; raises ValueError if it is damaged."""
        manifest = Manifest.unpack(packed.manifest)
        local_deps(manifest.deps, self._roots)
        with contextlib.suppress(OSError), self.cache.bringing(manifest.size_bytes) as place:
            if place is not None:
                with place.open("xb") as file:
                    for block in decompress(packed.chunks, manifest.size_bytes):
                        file.write(block)
                if hash_file(place) != manifest.digest:
                    raise ValueError("a damaged snapshot")
                return self.cache.enter(key, place, manifest)
        return False

    def _take(self, key: str, file: Path, most: int) -> Packed | None:
        """Puts a snapshot into the cache; returns it packed, or None if it is not to be sent."""
        beside = file.with_name(f"{file.name}.deps")
        try:
            with _regular(file) as source:
                manifest = self._read(source, beside)
                self._put(key, file, source, manifest)
                if not most or not is_portable(manifest.deps):
                    return None
                chunks = compress(source, manifest.size_bytes, most)
                return Packed(manifest.pack(), chunks) if chunks else None
        except OSError:
            return None
        except (ValueError, OverflowError, RecursionError):
            # Not what Lean writes.
            self.cache.damaged += 1
        finally:
            for each in (file, beside):
                with contextlib.suppress(OSError):
                    each.unlink()
        return None

    def _read(self, source: BufferedReader, beside: Path) -> Manifest:
        size = os.fstat(source.fileno()).st_size
        if size > MOST_RAW_BYTES:
            raise ValueError("a snapshot beyond all measure")
        with _regular(beside) as file:
            text = file.read(_MOST_DEPS_BYTES + 1)
        if len(text) > _MOST_DEPS_BYTES:
            raise ValueError("a list of files beyond all measure")
        deps = portable_deps(json.loads(text), self._roots)
        return Manifest(size, hash_rest(source), deps)

    def _put(self, key: str, file: Path, source: BufferedReader, manifest: Manifest) -> None:
        with contextlib.suppress(OSError), self.cache.bringing(manifest.size_bytes) as place:
            if place is None:
                return
            try:
                file.rename(place)
            except OSError:
                # Another disk.
                source.seek(0)
                with place.open("xb") as copy:
                    shutil.copyfileobj(source, copy, _BLOCK_BYTES)
            self.cache.enter(key, place, manifest)


def portable_deps(deps: Any, roots: Sequence[str]) -> Any:
    """Returns JSON with ``{number of the root: rest}`` for each path below one of ``roots``, the
    innermost and first. JSON has no numbers for keys, so Lean can have written nothing like it."""
    if isinstance(deps, str):
        best = max(
            (place for place, root in enumerate(roots) if _below(deps, root)),
            key=lambda place: (len(roots[place]), -place),
            default=None,
        )
        return deps if best is None else {best: _below(deps, roots[best])}
    if isinstance(deps, list):
        return [portable_deps(each, roots) for each in deps]
    if isinstance(deps, dict):
        return {name: portable_deps(each, roots) for name, each in deps.items()}
    return deps


def local_deps(deps: Any, roots: Sequence[str]) -> Any:
    """Returns the argument of :func:`portable_deps`, for this machine's roots; may raise
    ValueError."""
    if isinstance(deps, list):
        return [local_deps(each, roots) for each in deps]
    if not isinstance(deps, dict):
        return deps
    if all(isinstance(name, str) for name in deps):
        return {name: local_deps(each, roots) for name, each in deps.items()}
    match list(deps.items()):
        case [(int(place), str(rest))] if 0 <= place < len(roots) and _is_plain(rest):
            return f"{roots[place].rstrip('/')}/{rest}"
    raise ValueError("a path that leads nowhere on this machine")


def is_portable(deps: Any) -> bool:
    """Returns whether the result of :func:`portable_deps` has no absolute path left."""
    if isinstance(deps, str):
        return not deps.startswith("/")
    if isinstance(deps, list):
        return all(map(is_portable, deps))
    if isinstance(deps, dict):
        return all(
            isinstance(k, int) or (is_portable(k) and is_portable(v)) for k, v in deps.items()
        )
    return True


def _below(path: str, root: str) -> str:
    """Returns the rest of a path below ``root``; empty if it is not below it."""
    rest = path.removeprefix(f"{root.rstrip('/')}/")
    return rest if rest != path and _is_plain(rest) else ""


def _is_plain(rest: str) -> bool:
    """Returns whether a relative path only leads down, and is the only way to write it."""
    return all(part not in ("", ".", "..") for part in rest.split("/"))


def compress(source: BufferedReader, size_bytes: int, most_bytes: int) -> tuple[bytes, ...]:
    """Returns a whole file as one zstd frame, in chunks; none if they exceed ``most_bytes``."""
    source.seek(0)
    # The level's threads would compete with Lean for the machine, so there is one.
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    chunks: list[bytes] = []
    left = most_bytes
    with compressor.stream_reader(source, size=size_bytes, closefd=False) as reader:
        while chunk := reader.read(CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                return ()
            chunks.append(chunk)
    return tuple(chunks)


def decompress(chunks: Iterable[bytes], size_bytes: int) -> Iterator[bytes]:
    """Yields a frame's content in blocks; ValueError if it is damaged, or of another size."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES)
    left = size_bytes
    try:
        with decompressor.stream_reader(b"".join(chunks)) as reader:
            while block := reader.read(_BLOCK_BYTES):
                left -= len(block)
                if left < 0:
                    break
                yield block
    except zstandard.ZstdError as error:
        raise ValueError(f"a damaged frame: {error}") from None
    if left:
        raise ValueError("a snapshot of another size")


def _regular(path: Path) -> BufferedReader:
    """Opens a file that a candidate may have put there; a link or a pipe could lead anywhere.
    Raises ValueError if it is no plain file."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if os.fstat(file.fileno()).st_nlink != 1:
        file.close()
        raise ValueError("no plain file")
    return file
