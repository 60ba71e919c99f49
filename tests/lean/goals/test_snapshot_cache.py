"""A worker's cache of snapshots: its budget, its end, trouble; and its formats."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lean.machines import Machine, Shelf, content
from support.paths import TESTS

from leanq.lean.goals.snapshots import (
    SnapshotCache,
    Snapshots,
    compress,
    decompress,
    is_portable,
    local_deps,
    portable_deps,
)
from leanq.states import CHUNK_BYTES, MemoryStates


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def nothing() -> MemoryStates:
    """A server without snapshots, so that only the disk counts."""
    return MemoryStates()


# Budget


async def test_least_recently_used_goes(tmp_path: Path, shelf: Shelf) -> None:
    machine = Machine(tmp_path, budget_bytes=350_000)
    for n in range(3):
        await machine.keep(f"k{n}", content(seed=n), shelf)
    shelf.held.clear()
    assert await machine.content("k0", shelf) == content(seed=0)
    await machine.keep("k3", content(seed=3), shelf)
    assert [machine.snapshots.holds(f"k{n}") for n in range(4)] == [True, False, True, True]
    assert len(machine.files()) == 3
    assert await machine.content("k1", shelf) is None


async def test_what_is_larger_than_the_budget_is_only_sent(tmp_path: Path, shelf: Shelf) -> None:
    machine = Machine(tmp_path, budget_bytes=50_000)
    await machine.keep("k", content(), shelf)
    assert (machine.files(), list(shelf.held)) == ([], ["k"])
    assert await machine.content("k", shelf) is None
    assert machine.files() == []


async def test_snapshot_in_use_outlives_its_eviction(tmp_path: Path, nothing: MemoryStates) -> None:
    machine = Machine(tmp_path)
    await machine.snapshots.keep("k", machine.write(content()), nothing)
    found = await machine.snapshots.fetch("k", nothing)
    assert found
    machine.cache.drop("k")
    assert found.expose(machine.scratch, "x").read_bytes() == content()
    with pytest.raises(FileExistsError):
        found.expose(machine.scratch, "x")


async def test_inboxes_lie_on_the_same_disk(tmp_path: Path, nothing: MemoryStates) -> None:
    machine = Machine(tmp_path)
    await machine.snapshots.keep("k", machine.write(content()), nothing)
    found = await machine.snapshots.fetch("k", nothing)
    assert found
    assert machine.cache.inbox_root
    exposed = found.expose(machine.cache.inbox_root, "x")
    assert exposed.stat().st_nlink == 2


async def test_the_same_snapshot_twice(tmp_path: Path, nothing: MemoryStates) -> None:
    machine = Machine(tmp_path)
    for seed in (0, 1):
        await machine.snapshots.keep("k", machine.write(content(seed=seed)), nothing)
        assert await machine.content("k", nothing) == content(seed=seed)
    assert len(machine.files()) == 1


# Its end

WORKER = """
import asyncio, sys
from pathlib import Path
from support.lean.machines import Machine, content
from leanq.states import MemoryStates

machine = Machine(Path(sys.argv[1]))
asyncio.run(machine.snapshots.keep("k", machine.write(content()), MemoryStates()))
print(*machine.files(), flush=True)
sys.stdin.read()
"""


def start_worker(folder: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdout
    assert worker.stdout.readline()
    return worker


@pytest.mark.slow
def test_a_worker_leaves_no_files_and_removes_those_of_the_dead_alone(tmp_path: Path) -> None:
    workers = [start_worker(tmp_path), start_worker(tmp_path)]
    machine = Machine(tmp_path)
    assert len(machine.files()) == 2
    workers[0].communicate(timeout=20)
    assert len(machine.files()) == 1
    workers[1].send_signal(signal.SIGKILL)
    workers[1].communicate(timeout=20)
    assert len(machine.files()) == 1
    Machine(tmp_path)
    assert machine.files() == []
    assert machine.cache.inbox_root
    assert len(list((tmp_path / "cache" / "workers").iterdir())) == 1


# Trouble with the disk


async def test_folder_that_cannot_be_written_to(tmp_path: Path, shelf: Shelf) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = SnapshotCache(tmp_path / "file" / "cache", 1 << 20)
    machine = Machine(tmp_path / "good")
    snapshots = Snapshots(cache, [machine.root])
    assert cache.inbox_root is None
    assert not snapshots.holds("k")
    await snapshots.keep("k", machine.write(content()), shelf)
    assert list(shelf.held) == ["k"]
    assert await snapshots.fetch("k", shelf) is None
    await snapshots.damaged("k", shelf)
    assert list(machine.scratch.iterdir()) == []


@contextlib.contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file grows beyond this size meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_full_disk(tmp_path: Path, shelf: Shelf) -> None:
    sender, receiver = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    await sender.keep("k", content(), shelf)
    with full_disk(50_000):
        assert await receiver.content("k", shelf) is None
    assert receiver.cache.damaged == 0
    assert receiver.files() == []
    assert await receiver.content("k", shelf) == content()


async def test_file_from_another_disk_is_copied(tmp_path: Path, shelf: Shelf) -> None:
    machine = Machine(tmp_path)
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    made = machine.write(content())
    file = shared / f"leanq-test-{os.getpid()}"
    beside = file.with_name(f"{file.name}.deps")
    file.write_bytes(made.read_bytes())
    beside.write_text(json.dumps([]))
    await machine.snapshots.keep("k", file, shelf)
    assert not file.exists()
    assert not beside.exists()
    found = await machine.snapshots.fetch("k", shelf)
    assert found
    exposed = found.expose(shared, file.name)
    try:
        assert exposed.read_bytes() == content()
    finally:
        exposed.unlink()
        beside.unlink()


# Lists of dependencies

names = st.text("ab.", min_size=1, max_size=3)
paths = st.lists(st.sampled_from(["a", "b", "..", ".", "", "Core.olean"]), max_size=4)
strings = st.one_of(st.text(max_size=5), paths.map("/".join), paths.map("/".join).map("/".__add__))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), strings),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=10,
)
folders = st.lists(st.sampled_from(["/a", "/a/b", "/b", "/", "/c/d"]), max_size=4)


def shipped(deps: Any) -> Any:
    """As it arrives."""
    return msgpack.unpackb(msgpack.packb(deps), strict_map_key=False)


@pytest.mark.slow
@given(json_values, folders)
def test_paths_come_back_where_the_folders_are_the_same(deps: Any, roots: list[str]) -> None:
    assert local_deps(shipped(portable_deps(deps, roots)), roots) == deps


@given(json_values, folders)
def test_paths_follow_the_folders(deps: Any, roots: list[str]) -> None:
    theirs = [f"/their/{number}" for number, _ in enumerate(roots)]
    packed = shipped(portable_deps(deps, roots))
    if not is_portable(packed):
        return
    moved = local_deps(packed, theirs)
    assert "/their/" in json.dumps(moved) or moved == deps
    # And from there to a third machine.
    assert portable_deps(moved, theirs) == packed


def test_innermost_folder_counts() -> None:
    packed = portable_deps(["/a/b/x", "/a/x", "/a", "/ab/x", "/a/../x", "x"], ["/a", "/a/b", "/a"])
    assert packed == [{1: "x"}, {0: "x"}, "/a", "/ab/x", "/a/../x", "x"]
    assert not is_portable(packed)
    assert is_portable([{1: "x"}, "x", {"olean": {0: "y"}}])
    assert not is_portable({"/opt/x": 1})


@given(st.dictionaries(st.integers(-2, 2), strings, min_size=1, max_size=2))
def test_no_path_leads_out_of_the_folders(deps: Any) -> None:
    try:
        found = local_deps(deps, ["/a", "/b"])
    except ValueError:
        return
    assert Path(os.path.normpath(found)).relative_to(["/a", "/b"][next(iter(deps))])


# Compression


def compressed(raw: bytes, most_bytes: int = 1 << 20) -> tuple[bytes, ...]:
    return compress(io.BufferedReader(io.BytesIO(raw)), len(raw), most_bytes)


@given(st.binary(max_size=5000), st.integers(1, 50))
def test_compressed_comes_back(data: bytes, times: int) -> None:
    raw = data * times
    chunks = compressed(raw)
    assert b"".join(decompress(chunks, len(raw))) == raw
    for wrong in (len(raw) + 1, *range(len(raw) - 1, max(len(raw) - 3, -1), -1)):
        with pytest.raises(ValueError, match="size"):
            list(decompress(chunks, wrong))


@given(st.binary(min_size=1, max_size=300), st.integers(0), st.integers(1, 255))
def test_no_damage_goes_unnoticed_or_is_another_error(raw: bytes, place: int, change: int) -> None:
    (frame,) = compressed(raw)
    place %= len(frame)
    broken = frame[:place] + bytes([frame[place] ^ change]) + frame[place + 1 :]
    with contextlib.suppress(ValueError):
        assert b"".join(decompress([broken], len(raw))) == raw


def test_large_content_goes_in_chunks_of_bounded_size() -> None:
    raw = os.urandom(9 << 20)
    chunks = compressed(raw, 1 << 30)
    assert [len(chunk) == CHUNK_BYTES for chunk in chunks] == [True, True, False]
    assert b"".join(decompress(chunks, len(raw))) == raw
    assert compressed(raw, 8 << 20) == ()


@pytest.mark.slow
def test_bomb_is_not_unpacked() -> None:
    raw = bytes(200 << 20)
    chunks = compressed(raw)
    with pytest.raises(ValueError, match="size"):
        next(decompress(chunks, 1000))
