"""A machine's cache of snapshots: its budget, many processes, crashes, trouble; and its formats."""

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

from leanq.lean.snapshots.cache import SnapshotCache
from leanq.lean.snapshots.store import (
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
    # Another process may be content with less.
    other = Machine(tmp_path, budget_bytes=100_000)
    assert [other.snapshots.holds(f"k{n}") for n in range(4)] == [False, False, False, True]
    assert await machine.content("k0", shelf) is None
    assert machine.cache.damaged == 0


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
    first, second = Machine(tmp_path), Machine(tmp_path)
    for machine in (first, second):
        await machine.snapshots.keep("k", machine.write(content()), nothing)
        assert await machine.snapshots.fetch("k", nothing)
    assert len(first.files()) == 1


# Many processes

WORKER = """
import asyncio, random, sys
from pathlib import Path
from support.lean.machines import Machine, content
from leanq.states import MemoryStates

async def work(folder, seed, rounds):
    rng, states, hits = random.Random(seed), MemoryStates(), 0
    machine = Machine(Path(folder), budget_bytes=500_000)
    machine.scratch = machine.folder / f"scratch{seed}"
    machine.scratch.mkdir()
    for _ in range(rounds):
        n = rng.randrange(10)
        print(flush=True)
        if rng.random() < 0.5:
            await machine.snapshots.keep(f"k{n}", machine.write(content(seed=n)), states)
            assert machine.files()
        else:
            found = await machine.snapshots.fetch(f"k{n}", states)
            if found:
                exposed = found.expose(machine.scratch, "x")
                assert exposed.read_bytes() == content(seed=n)
                exposed.unlink()
                hits += 1
    assert machine.cache.damaged == 0
    assert hits

asyncio.run(work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def start_worker(folder: Path, seed: int, rounds: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), str(seed), str(rounds)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path: Path) -> None:
    workers = [start_worker(tmp_path, seed, 150) for seed in range(3)]
    for worker in workers:
        _, errors = worker.communicate(timeout=60)
        assert (worker.returncode, errors) == (0, b"")
    machine = Machine(tmp_path)
    assert 0 < sum(file.stat().st_size for file in machine.files()) <= 500_000
    assert machine.coming() == []


@pytest.mark.slow
def test_killed_process_leaves_nothing_that_is_taken_for_a_snapshot(tmp_path: Path) -> None:
    for seed in range(3):
        worker = start_worker(tmp_path, seed, 1_000_000)
        assert worker.stdout
        # Somewhere in the midst of its work.
        for _ in range(3 + 20 * seed):
            worker.stdout.readline()
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=20)
    machine = Machine(tmp_path, budget_bytes=500_000)
    assert machine.coming() == []
    for n in range(10):
        found = machine.cache.find(f"k{n}")
        assert found is None or found[0].read_bytes() == content(seed=n)
    assert machine.cache.damaged == 0


def test_what_the_dead_left_is_removed_and_nothing_of_the_living(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    left = tmp_path / "cache" / "coming" / "left"
    left.mkdir()
    (left / "snapshot").write_bytes(b"half")
    with machine.cache.bringing(10) as place:
        assert place
        place.write_bytes(b"mine")
        Machine(tmp_path)
        assert machine.coming() == [place.parent]
        assert place.read_bytes() == b"mine"
    assert machine.coming() == []


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
    assert (receiver.files(), receiver.coming()) == ([], [])
    file = sender.write(content(seed=1))
    with full_disk(10):
        # Moved as it is, but its manifest cannot be written.
        await sender.snapshots.keep("l", file, shelf)
    assert not sender.snapshots.holds("l")
    assert await receiver.content("k", shelf) == content()
    assert await receiver.content("l", shelf) == content(seed=1)


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
