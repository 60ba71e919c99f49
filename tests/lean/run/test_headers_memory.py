"""One budget for what stands ready: its order, what it ends when memory is short, its default."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lean.forks import RULES
from support.lean.sites import Site
from support.waiting import eventually

from leanq.lean.run.headers_memory import (
    LEAST_BYTES,
    WORKER_BYTES,
    HeadersMemory,
    Memory,
    Ready,
    default_bytes,
)
from leanq.queue.requests import Request

GB = 1 << 30
V1, V2 = "4:memory:/a/b\n3:cpu:/\n0::/\n", "0::/a/b\n"


@dataclass(eq=False)
class Shelf:
    """What stands ready in one place: name → last use, bytes, whether it is in use."""

    items: dict[str, tuple[float, int, bool]]
    ended: list[str] = field(default_factory=list)

    def ready(self) -> Iterator[Ready]:
        for name, (used_s, held, _) in self.items.items():
            yield Ready(used_s, held, partial(self.end, name))

    async def end(self, name: str) -> bool:
        if name not in self.items or self.items[name][2]:
            return False
        del self.items[name]
        self.ended.append(name)
        return True


def machine(folder: Path, version: str = "", *, free_gb: float = 8, pressure: float = 0) -> Memory:
    """A machine of 16 GB, as its files tell it."""
    proc = folder / "proc"
    (proc / "pressure").mkdir(parents=True, exist_ok=True)
    (proc / "self").mkdir(exist_ok=True)
    kb = int(free_gb * GB) >> 10
    (proc / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {kb} kB\nHugePages: 0\n")
    (proc / "pressure/memory").write_text(f"some avg10={pressure} avg60=0.00 avg300=0.00 total=1\n")
    (proc / "self/cgroup").write_text(version)
    return Memory(proc, folder / "cgroup")


def cgroup(folder: Path, version: str, limit: object, *, used: int = 0, files: int = 0) -> None:
    own = folder / "cgroup" / ("memory/a" if version == V1 else "a")
    own.mkdir(parents=True, exist_ok=True)
    names = ("limit_in_bytes", "usage_in_bytes") if version == V1 else ("max", "current")
    for name, value in zip(names, (limit, used), strict=True):
        (own / f"memory.{name}").write_text(f"{value}\n")
    names = ("total_cache", "total_shmem") if version == V1 else ("file", "shmem")
    (own / "memory.stat").write_text(f"{names[0]} {files + 7}\n{names[1]} 7\n")


items = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.tuples(st.integers(0, 9).map(float), st.integers(1, 50), st.booleans()),
    max_size=8,
)


@given(one=items, other=items, most=st.integers(0, 200))
def test_what_was_used_least_recently_makes_room(
    one: dict[str, tuple[float, int, bool]], other: dict[str, tuple[float, int, bool]], most: int
) -> None:
    shelves = [Shelf(dict(one)), Shelf({name.upper(): item for name, item in other.items()})]
    before = {**shelves[0].items, **shelves[1].items}
    budget = HeadersMemory(most)
    for shelf in shelves:
        budget.join(shelf.ready)
    asyncio.run(budget.make_room())
    left = {**shelves[0].items, **shelves[1].items}
    ended = [name for shelf in shelves for name in shelf.ended]
    assert not any(before[name][2] for name in ended)
    free = sorted(item[0] for item in before.values() if not item[2])
    # No one goes before another that was used earlier.
    assert sorted(before[name][0] for name in ended) == free[: len(ended)]
    held = sum(item[1] for item in left.values())
    newest = max((item[0] for item in before.values()), default=0.0)
    over = [name for name, item in left.items() if not item[2] and item[0] < newest]
    assert held <= most or not over
    # Nothing goes without need.
    if ended:
        last = max(before[name][0] for name in ended)
        assert held + max(before[n][1] for n in ended if before[n][0] == last) > most
    budget.leave(shelves[0].ready)
    assert budget.held_bytes() == sum(item[1] for item in shelves[1].items.values())


async def test_what_was_not_used_for_minutes_ends(tmp_path: Path) -> None:
    now_s = time.monotonic()
    shelf = Shelf({"old": (now_s - 301, 1, False), "busy": (now_s - 400, 1, True)})
    shelf.items["new"] = (now_s - 100, 1, False)
    budget = HeadersMemory(math.inf, machine(tmp_path))
    budget.join(shelf.ready)
    await budget.look()
    assert shelf.ended == ["old"]


@pytest.mark.parametrize("short", ["machine", "pressure", V1, V2])
async def test_under_pressure_one_after_another_ends(tmp_path: Path, short: str) -> None:
    now_s = time.monotonic()
    budget = HeadersMemory(math.inf, machine(tmp_path))
    shelf = Shelf({"a": (now_s - 9, 1, False), "b": (now_s - 8, 1, True), "c": (now_s, 1, False)})
    budget.join(shelf.ready)
    await budget.look()
    assert shelf.ended == []
    if short == "machine":
        machine(tmp_path, free_gb=0.9)
    elif short == "pressure":
        machine(tmp_path, pressure=12.5)
    else:
        machine(tmp_path, short)
        cgroup(tmp_path, short, 4 * GB, used=4 * GB - (100 << 20), files=200 << 20)
        await budget.look()
        assert shelf.ended == []  # files in memory make room
        cgroup(tmp_path, short, 4 * GB, used=4 * GB - (100 << 20))
    await budget.look()
    if short == "pressure":
        assert shelf.ended == ["a"]
        await budget.look()
    assert shelf.ended == ["a", "c"]


@pytest.mark.parametrize("version", [V1, V2])
def test_the_default_is_what_is_left_beside_requests(tmp_path: Path, version: str) -> None:
    request = Request("echo")
    slot = request.memory_mb + request.scratch_mb << 20
    assert default_bytes(2, machine(tmp_path)) == 16 * GB - 2 * slot - WORKER_BYTES
    memory = machine(tmp_path, version)
    for unlimited in ("max", 9223372036854771712):
        cgroup(tmp_path, version, unlimited)
        assert memory.most_bytes() == 16 * GB
    cgroup(tmp_path, version, 10 * GB)
    assert default_bytes(2, memory) == 10 * GB - 2 * slot - WORKER_BYTES
    assert default_bytes(3, memory) == LEAST_BYTES


def test_a_machine_that_tells_nothing_has_room(tmp_path: Path) -> None:
    memory = Memory(tmp_path, tmp_path)
    assert memory.free_bytes() == memory.most_bytes() >= 1 << 50
    assert not memory.is_pressed()
    assert Memory().most_bytes() > Memory().free_bytes() > 0


@pytest.mark.slow
async def test_zygotes_steps_and_judges_are_of_one_order(site: Site) -> None:
    budget = HeadersMemory(math.inf)
    driver = await site.driver(forks=RULES, memory=budget)
    forks = driver.opened.lean.forks
    assert forks is not None

    async def both_stand() -> bool:
        await driver.run(Request("check", code="theorem t (p : Prop) (h : p) : p := h\n"))
        zygotes = sum(each.held_bytes for each in forks.ready())
        return 0 < zygotes < budget.held_bytes()

    await eventually(both_stand, deadline_s=60.0)
    held = budget.held_bytes()
    budget.most_bytes = 0
    await budget.make_room()
    assert 0 < budget.held_bytes() < held
    budget.idle_s = 0.0
    await budget.look()
    assert budget.held_bytes() == 0
    assert (await driver.run(Request("check", code="theorem t : True := .intro\n"))).verdict == (
        "accepted"
    )
    await driver.close()
    assert budget.held_bytes() == 0
