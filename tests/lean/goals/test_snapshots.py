"""Snapshots between machines: real ones of Lean's, and damage wherever they come along."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from msgspec import structs
from support.lean.machines import Machine, Shelf, content
from support.queue.stores import open_store

from leanq.errors import UnavailableError
from leanq.lean.environment import Environment
from leanq.lean.goals.snapshots import MOST_RAW_BYTES, Manifest, Snapshots
from leanq.queue.settings import Settings
from leanq.states import MemoryStates, Packed


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def one(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "one")


@pytest.fixture
def two(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "two")


# Real ones


@pytest.fixture
async def server_states(settings: Settings) -> AsyncIterator[Any]:
    async with open_store(replace(settings, shards=2)) as store:
        yield store.states


def lean(environment: Environment, folder: Path, name: str, text: str, *args: str) -> bytes:
    """What Lean says about a file."""
    (folder / name).write_text(text)
    done = subprocess.run(
        [*environment.toolchain.command, "--json", *args, name],
        cwd=folder,
        env=environment.process_env(),
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done
    return done.stdout + done.stderr


@pytest.mark.slow
async def test_snapshot_of_leans_serves_a_machine_with_other_paths(
    core: Environment, one: Machine, two: Machine, server_states: Any
) -> None:
    text = "prelude\nimport Core\ntheorem t (p : Prop) (h : p) : p := h\n"
    (place,) = core.search_path
    lean(core, one.scratch, "A.lean", text, "--incr-save=A.made")
    file = one.scratch / "A.made"
    size = file.stat().st_size
    here = Snapshots(one.cache, [place])
    await here.keep("k", file, server_states)
    assert sorted(each.name for each in one.scratch.iterdir()) == ["A.lean"]
    assert here.holds("k")
    sent = await server_states.find_snapshot("k")
    assert sent is not None
    assert sent.size_bytes < size / 4

    shutil.copytree(place, two.root, dirs_exist_ok=True)
    assert not two.snapshots.holds("k")
    found = await two.snapshots.fetch("k", server_states)
    assert found
    assert found.path.stat().st_size == size
    exposed = found.expose(two.scratch, "snapshot")
    assert exposed.stat().st_ino == found.path.stat().st_ino
    deps = json.loads(two.scratch.joinpath("snapshot.deps").read_text())
    assert deps == [{"olean": str(two.root / "Core.olean")}]
    other = replace(core, search_path=(two.root,))
    more = "theorem u (p : Prop) (h : p) : p := t p h\n#check u\n"
    said = lean(other, two.scratch, "B.lean", text + more, "--incr-load=snapshot")
    assert b"u (p : Prop)" in said
    await server_states.drop_snapshot("k")
    assert await two.snapshots.fetch("k", server_states)


# Damage


async def test_a_file_that_is_gone_is_fetched_again(one: Machine, shelf: Shelf) -> None:
    await one.keep("k", content(), shelf)
    (file,) = one.files()
    file.unlink()
    assert await one.content("k", shelf) == content()
    assert one.files() == [file]


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def resigned(packed: Packed, **fields: Any) -> Packed:
    """With another manifest, whose own hash is right."""
    return Packed(structs.replace(Manifest.unpack(packed.manifest), **fields).pack(), packed.chunks)


DAMAGE: dict[str, Callable[[Packed], Packed]] = {
    "manifest": lambda p: Packed(flipped(p.manifest, -1 % len(p.manifest)), p.chunks),
    "manifest's hash": lambda p: Packed(flipped(p.manifest, 0), p.chunks),
    "no manifest": lambda p: Packed(b"", p.chunks),
    "frame": lambda p: Packed(p.manifest, (flipped(p.chunks[0], 40), *p.chunks[1:])),
    "magic": lambda p: Packed(p.manifest, (flipped(p.chunks[0], 0), *p.chunks[1:])),
    "truncated": lambda p: Packed(p.manifest, (p.chunks[0][:-10],)),
    "no chunks": lambda p: Packed(p.manifest, ()),
    "smaller": lambda p: resigned(p, size_bytes=10),
    "larger": lambda p: resigned(p, size_bytes=200_000),
    "other content": lambda p: resigned(p, digest=bytes(32)),
    "way out": lambda p: resigned(p, deps=[{0: "../../etc/passwd"}]),
    "no such root": lambda p: resigned(p, deps=[{7: "Core.olean"}]),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_on_the_way(one: Machine, two: Machine, shelf: Shelf, damage: str) -> None:
    await one.keep("k", content(), shelf)
    shelf.held["k"] = DAMAGE[damage](shelf.held["k"])
    assert await two.content("k", shelf) is None
    assert two.cache.damaged == 1
    assert (shelf.held, two.files()) == ({}, [])


def test_manifest_of_another_version_or_beyond_measure() -> None:
    good = Manifest(10, bytes(32), [])
    assert Manifest.unpack(good.pack()) == good
    for fields in ([2, 10, bytes(32), []], [1, -1, bytes(32), []], [1, 10, "x", []], 7):
        data = msgpack.packb(fields)
        signed = hashlib.blake2b(data, digest_size=32).digest() + data
        with pytest.raises(ValueError, match="version"):
            Manifest.unpack(signed)
    for data in (b"\x81\x90\x00", b"\x94\x01", b"\x91" * 5000):
        with pytest.raises(ValueError):  # noqa: PT011
            Manifest.unpack(hashlib.blake2b(data, digest_size=32).digest() + data)
    with pytest.raises(ValueError, match="version"):
        Manifest.unpack(structs.replace(good, size_bytes=MOST_RAW_BYTES + 1).pack())


async def test_what_lean_cannot_load_is_dropped_everywhere(one: Machine, shelf: Shelf) -> None:
    await one.keep("k", content(), shelf)
    await one.snapshots.damaged("k", shelf)
    assert (shelf.held, one.files(), one.cache.damaged) == ({}, [], 1)
    assert not one.snapshots.holds("k")


@pytest.mark.parametrize("what", ["no deps", "no json", "deep", "link", "pipe", "hard link"])
async def test_what_lean_did_not_write_is_not_kept(one: Machine, shelf: Shelf, what: str) -> None:
    file = one.write(content())
    deps = file.with_name("made.deps")
    secret = one.folder / "secret"
    secret.write_bytes(b"secret")
    match what:
        case "no deps":
            deps.unlink()
        case "no json":
            deps.write_bytes(b"[\xff")
        case "deep":
            deps.write_text("[" * 100_000)
        case "link":
            file.unlink()
            file.symlink_to(secret)
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case _:
            file.unlink()
            file.hardlink_to(secret)
    await one.snapshots.keep("k", file, shelf)
    assert (one.files(), shelf.held, one.cache.damaged) == ([], {}, 1)
    assert list(one.scratch.iterdir()) == []
    assert secret.read_bytes() == b"secret"


async def test_snapshot_with_foreign_paths_is_not_sent(one: Machine, shelf: Shelf) -> None:
    deps = [{"olean": f"{one.root}/A.olean", "other": "/opt/elsewhere"}]
    await one.keep("k", content(), shelf, deps)
    found = await one.snapshots.fetch("k", shelf)
    assert found
    found.expose(one.scratch, "x")
    assert json.loads(one.scratch.joinpath("x.deps").read_text()) == deps
    assert shelf.held == {}


async def test_nothing_is_packed_where_nothing_is_kept(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.lean.goals.snapshots.compress", None)
    await one.snapshots.keep("k", one.write(content()), MemoryStates())
    assert one.snapshots.holds("k")


class Away(Shelf):
    """A server that does not answer."""

    async def keep_snapshot(self, key: str, snapshot: Packed) -> bool:
        raise UnavailableError("no answer")

    async def find_snapshot(self, key: str) -> Packed | None:
        raise UnavailableError("no answer")

    async def drop_snapshot(self, key: str) -> None:
        raise UnavailableError("no answer")


async def test_without_a_server_the_disk_serves(one: Machine) -> None:
    away = Away()
    assert await one.content("k", away) is None
    await one.keep("k", content(), away)
    assert await one.content("k", away) == content()
    await one.snapshots.damaged("k", away)
    assert await one.content("k", away) is None


async def test_who_asks_at_once_fetches_once(one: Machine, two: Machine, shelf: Shelf) -> None:
    await one.keep("k", content(), shelf)
    found = await asyncio.gather(*(two.content("k", shelf) for _ in range(5)))
    assert found == [content()] * 5
    assert shelf.asked == ["k"]
