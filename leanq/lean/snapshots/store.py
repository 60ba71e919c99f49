"""Keeps and fetches snapshots of Lean's work on a text, and adapts them to the machine.

Lean writes a snapshot as a memory image of 3 to 300 MB. Beside it, ``NAME.deps`` is JSON with the
absolute paths of the compiled modules that must be there for loading it. The store keeps the image,
whose hash it compares after every transfer. It keeps paths relative to the environment's search
path: that is the same on every machine, and the folders are not.

A snapshot only saves time: a faulty one counts as missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import zstandard

from leanq.errors import QueueError
from leanq.lean.files import open_regular
from leanq.lean.hashes import hash_file, hash_rest
from leanq.lean.snapshots.cache import MOST_RAW_BYTES, Manifest, SnapshotCache
from leanq.states import CHUNK_BYTES, Packed, States

LEVEL = 9
"""The level of compression: it leaves 8 to 9 % of 150 MB in 1.1 s. Level 3 leaves 8.7 %, and higher
ones take several times as long for little. It is paid once, and each fetch gains."""

_BLOCK_BYTES = 1 << 20
_MOST_DEPS_BYTES = 16 << 20
# No frame's maker gets more memory than this.
_MOST_WINDOW_BYTES = 1 << 27


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
                shutil.copyfileobj(source, copy, _BLOCK_BYTES)
        folder.joinpath(f"{name}.deps").write_bytes(self._deps)
        return target


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
