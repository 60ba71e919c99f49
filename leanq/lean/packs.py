"""Packs: an environment as one file, for machines whose disks are slow or far away.

Lean looks for thousands of small files at each import, which takes long on a network disk. A worker
unpacks a pack once into the node's cache folder, and Lean maps the compiled files from there. It is
a tar archive, compressed by zstd with its checksum. First comes ``manifest.json``, then
``toolchain/`` (``lean``, its shared libraries and compiled library), ``folders/0/``, … (the
compiled modules of each folder of the search path) and ``project/`` (the sources that count in the
fingerprint). So the unpacked environment has the fingerprint of the packed one; opening compares
them. Wherever an environment's name stands for a folder, a pack's path does as well.

In the cache each pack has a folder and a lock under its fingerprint. Processes hold the lock
together while they use the folder. One that holds it alone may unpack it, or remove it a day after
its last use. All functions block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import zstandard

from leanq.errors import ToolchainError
from leanq.lean.files import compiled_modules
from leanq.lean.hashes import make_folders, make_ours

_FORMAT = 1
_MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 1 << 16
_UNUSED_S = 86_400.0
_MAKING = ".making-"
_MODE, _PROGRAM_MODE = 0o644, 0o755

# The locks of the folders that this process uses; they end with it.
_held: dict[Path, int] = {}


class Manifest(msgspec.Struct, frozen=True):
    """What a pack says of itself. ``lean`` is the version that compiled it; ``project``: whether it
    was a Lake project; ``toolchain``: whether it brings its Lean."""

    format: int
    fingerprint: str
    lean: str
    folders: int
    project: bool
    toolchain: bool


def toolchain_files(prefix: Path) -> Mapping[str, Path]:
    """Returns what Lean needs of a toolchain, by its name there: the program, the shared libraries
    and the compiled library. Raises OSError."""
    library = prefix / "lib" / "lean"
    found = {"bin/lean": prefix / "bin" / "lean"}
    found |= {str(path.relative_to(prefix)): path for path in (prefix / "lib").rglob("*.so*")}
    found |= {f"lib/lean/{file.name}": Path(file.path) for file in compiled_modules(library)}
    return found


def write_pack(target: Path, manifest: Manifest, files: Mapping[str, Path]) -> None:
    """Writes a pack with these files, by their names in it. The target appears whole. Raises
    ToolchainError if a file cannot be read, or the target cannot be written."""
    try:
        with tempfile.TemporaryDirectory(prefix=_MAKING, dir=target.parent) as scratch:
            new = Path(scratch, target.name)
            compressor = zstandard.ZstdCompressor(level=6, threads=-1, write_checksum=True)
            with (
                new.open("wb") as raw,
                compressor.stream_writer(raw, closefd=False) as packed,
                tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
            ):
                said = msgspec.json.encode(manifest)
                archive.addfile(_member(_MANIFEST, len(said)), BytesIO(said))
                for name, path in files.items():
                    with path.open("rb") as file:
                        archive.addfile(_member(name, os.fstat(file.fileno()).st_size), file)
            new.chmod(_MODE)
            new.replace(target)
    except OSError as error:
        what = error.filename or target
        raise ToolchainError(f"cannot write {target}: {what}: {error.strerror}") from error


def unpacked(pack: Path, cache: Path) -> tuple[Path, Manifest]:
    """Returns the folder of an unpacked pack, which this process holds until it ends, and what the
    pack says of itself. Others wait for the first one to unpack it. Raises ToolchainError."""
    try:
        with (
            pack.open("rb") as raw,
            zstandard.ZstdDecompressor().stream_reader(raw, closefd=False) as plain,
        ):
            archive = tarfile.open(fileobj=plain, mode="r|")  # noqa: SIM115 - ends with the file
            manifest = _manifest(pack, archive)
            place = cache / "packs" / manifest.fingerprint[:32]
            make_folders(cache)
            if not make_ours(place.parent, 0o700):
                raise ToolchainError(
                    f"other users can write to {place.parent}, from which Lean would be started: "
                    "let it be this user's alone, or name another cache folder with LEANQ_CACHE"
                )

            def unpack() -> None:
                _remove_unused(place.parent)
                with tempfile.TemporaryDirectory(prefix=_MAKING, dir=place.parent) as made:
                    whole = Path(made, "whole")
                    _unpack(archive, manifest, whole)
                    while plain.read(1 << 20):  # the checksum comes last
                        pass
                    whole.rename(place)

            _hold(place, unpack)
    except (zstandard.ZstdError, tarfile.TarError, EOFError, ValueError) as error:
        raise ToolchainError(
            f"{pack} is damaged, or no pack ({error}); make it anew: "
            f"leanq env pack PROJECT -o {pack}"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free_mb = shutil.disk_usage(cache).free >> 20
            raise ToolchainError(
                f"the disk of the cache folder {cache} is full ({free_mb} MB free) and has no room "
                f"for {pack}; free some, or name a folder on another disk with LEANQ_CACHE"
            ) from error
        raise ToolchainError(f"{error.filename or pack}: {error.strerror}") from error
    return place, manifest


def _hold(place: Path, unpack: Callable[[], None]) -> None:
    """Holds a pack's folder, together with others until this process ends; unpacks it first if it
    is not there."""
    if place in _held:
        return
    lock = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Where it is there, nobody waits for those who use it.
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not place.is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.is_dir():
                unpack()
            fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock)
    except BaseException:
        os.close(lock)
        raise
    _held[place] = lock


def _manifest(pack: Path, archive: tarfile.TarFile) -> Manifest:
    first = archive.next()
    content = archive.extractfile(first) if first and first.name == _MANIFEST else None
    if not first or not content or first.size > _MOST_MANIFEST_BYTES:
        raise ValueError(f"expected {_MANIFEST} first")
    said = content.read()
    found: Any = msgspec.json.decode(said)
    if isinstance(found, dict) and found.get("format", _FORMAT) != _FORMAT:
        raise ToolchainError(f"{pack} was made by a later release of leanq than this one")
    manifest = msgspec.json.decode(said, type=Manifest)
    if not set(manifest.fingerprint) <= set("0123456789abcdef") or len(manifest.fingerprint) != 64:
        raise ValueError(f"expected a fingerprint, got {manifest.fingerprint!r}")
    return manifest


def _unpack(archive: tarfile.TarFile, manifest: Manifest, whole: Path) -> None:
    for part in ("toolchain", "project", *(f"folders/{n}" for n in range(manifest.folders))):
        make_folders(whole / part)
    made: set[Path] = set()
    while member := archive.next():
        place = PurePosixPath(member.name)
        content = archive.extractfile(member) if member.isreg() else None
        if content is None or place.is_absolute() or ".." in place.parts:
            raise ValueError(f"{member.name!r} is no file of a pack")
        path = whole / place
        if path.parent not in made:
            make_folders(path.parent)
            made.add(path.parent)
        with path.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
        path.chmod(_PROGRAM_MODE if place.parts[:2] == ("toolchain", "bin") else _MODE)


def _remove_unused(folder: Path) -> None:
    """Removes packs that no process holds and that were last used a day ago or more, and what
    processes that were killed have left behind."""
    before_s = time.time() - _UNUSED_S
    for lock_path in folder.glob("*.lock"):
        with contextlib.suppress(OSError), lock_path.open("rb") as lock:
            if os.fstat(lock.fileno()).st_mtime > before_s:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that is killed here leaves no half of a pack under the pack's name.
            with tempfile.TemporaryDirectory(prefix=_MAKING, dir=folder) as gone:
                lock_path.with_suffix("").rename(Path(gone, "whole"))
    for left in folder.glob(f"{_MAKING}*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_mtime < before_s:
                shutil.rmtree(left, ignore_errors=True)


def _member(name: str, size: int) -> tarfile.TarInfo:
    """Returns a member that tells nothing of who packed it and when: the same files give the same
    pack."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, _MODE
    return member
