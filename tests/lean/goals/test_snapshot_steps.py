"""Steps with snapshots and without: the same replies, on any machine, whatever becomes of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from support.fleets import look, until
from support.lean.eager import eager_driver, standing_driver
from support.lean.machines import Shelf
from support.paths import ROOT, SUPPORT, TESTS
from support.waiting import eventually

from leanq import LeanQClient, Settings
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.goals.recipes import snapshot_key, text_hash
from leanq.queue.requests import Reply, Request
from leanq.states import MemoryStates, Packed

PREFIX = "prelude\nimport Core\n" + "".join(
    f"def d{n} (p q : Prop) : Prop := And p (And q p)\n" for n in range(20)
)
CODE = f"{PREFIX}theorem t (p q : Prop) (hp : p) (hq : q) : And p (And q p) :=\n  sorry\n"
TACTICS = [
    *("constructor", "exact hp", "exact hq", "exact And.intro hq hp", "skip", "exact sorry"),
    *(
        "exact And.intro sorry sorry",
        "frobnicate",
        "{ exact hp }",
        "intro x",
        "exact (by exact hp)",
    ),
]


@contextlib.asynccontextmanager
async def machine(
    folder: Path, shelf: MemoryStates, opened: Callable[[Path], LeanDriver] = eager_driver
) -> AsyncIterator[LeanDriver]:
    """A machine's driver, with all its files in ``folder``."""
    driver = opened(folder)
    await driver.open(shelf)
    try:
        yield driver
    finally:
        await driver.close()


async def begin(driver: LeanDriver) -> str:
    """The state of CODE, whose snapshot is kept when this returns."""
    reply = await driver.run(Request("check", code=CODE))
    prefixes = driver.opened.prefixes
    await eventually(lambda: prefixes.saving is None)
    (sorry,) = reply.sorries
    assert sorry.state
    return sorry.state


async def step(driver: LeanDriver, state: str, tactic: str) -> Reply:
    return await driver.run(Request("step", state=state, tactic=tactic))


def key_of(driver: LeanDriver, text: str = CODE) -> str:
    return snapshot_key(driver.opened.lean.environment.fingerprint, text_hash(text))


@pytest.mark.slow
async def test_a_state_is_stepped_on_another_machine(core: Environment, tmp_path: Path) -> None:
    shelf = Shelf()
    async with machine(tmp_path / "a", shelf) as a, machine(tmp_path / "b", shelf) as b:
        assert a.opened.lean.environment.search_path != b.opened.lean.environment.search_path
        state = await begin(a)
        here = await step(a, state, "constructor")
        there = await step(b, state, "constructor")
        assert (here.way, there.way) == ("warm", "cold")
        assert here == there
        again = await step(b, state, "exact hp")
        assert again == await step(a, state, "exact hp")
        assert again.way == "warm"
        assert there.state
        assert (await step(b, there.state, "exact hp\nexact And.intro hq hp")).verdict == "accepted"


@pytest.mark.slow
async def test_without_its_snapshot_a_state_is_replayed(core: Environment, tmp_path: Path) -> None:
    shelf = Shelf()
    async with machine(tmp_path / "a", shelf) as a, machine(tmp_path / "b", shelf) as b:
        state = await begin(a)
        with_it = await step(a, state, "constructor")
        shelf.held.clear()
        without_it = await step(b, state, "constructor")
        assert without_it == with_it
        assert without_it.way == "replayed"


@pytest.mark.slow
async def test_a_damaged_snapshot_in_the_store_costs_time(
    core: Environment, tmp_path: Path
) -> None:
    shelf = Shelf()
    async with machine(tmp_path / "a", shelf) as a, machine(tmp_path / "b", shelf) as b:
        state = await begin(a)
        with_it = await step(a, state, "constructor")
        packed = shelf.held[key_of(a)]
        first = bytearray(packed.chunks[0])
        first[len(first) // 2] ^= 1
        shelf.held[key_of(a)] = Packed(packed.manifest, (bytes(first), *packed.chunks[1:]))
        without_it = await step(b, state, "constructor")
        assert without_it == with_it
        assert without_it.way == "failed"
        assert b.opened.prefixes.snapshots.cache.damaged == 1


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"no snapshot" * 1000])
async def test_what_lean_cannot_load_is_replayed_and_dropped(
    core: Environment, tmp_path: Path, content: bytes
) -> None:
    """As after an upgrade that kept the fingerprint, or by a fault of the process that saved it."""
    shelf = Shelf()
    async with machine(tmp_path / "a", shelf) as a, machine(tmp_path / "b", shelf) as b:
        state = await begin(a)
        with_it = await step(a, state, "constructor")
        prefixes = b.opened.prefixes
        assert prefixes.snapshots is not None
        file = tmp_path / "b" / "made"
        file.write_bytes(content)
        (tmp_path / "b" / "made.deps").write_text("[]")
        await prefixes.snapshots.keep(key_of(b), file, shelf)
        without_it = await step(b, state, "constructor")
        assert without_it == with_it
        assert without_it.way == "failed"
        assert prefixes.snapshots.cache.damaged == 1


@pytest.mark.slow
async def test_a_toolchain_without_snapshots_works_as_well(
    core: Environment, tmp_path: Path
) -> None:
    old = replace(core, toolchain=replace(core.toolchain, version="4.31.0"))
    shelf = Shelf()

    def without(folder: Path) -> LeanDriver:
        return eager_driver(folder, lambda: old)

    async with machine(tmp_path / "a", shelf) as a, machine(tmp_path / "b", shelf, without) as b:
        state = await begin(a)
        replayed = await step(b, state, "constructor")
        assert replayed == await step(a, state, "constructor")
        assert replayed.way == "replayed"
        assert not b.opened.prefixes.holds(key_of(b))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_replay_snapshot_and_standing_process_agree_on_random_proof_trees(
    core: Environment, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    shelf = Shelf()

    def plain(folder: Path) -> LeanDriver:
        return LeanDriver(lambda: core, slots=1, forks=None)

    async with contextlib.AsyncExitStack() as stack:
        openers = (eager_driver, plain, lambda _: standing_driver(core))
        drivers = [
            await stack.enter_async_context(machine(tmp_path / str(number), shelf, opener))
            for number, opener in enumerate(openers)
        ]
        frontier = [await begin(drivers[0])]
        ways: list[tuple[object, ...]] = []
        for _ in range(14):
            state, tactic = rng.choice(frontier), rng.choice(TACTICS)
            replies = [await step(driver, state, tactic) for driver in drivers]
            assert replies[0] == replies[1] == replies[2], tactic
            ways.append(tuple(reply.way for reply in replies))
            assert replies[0].verdict is not None
            found = (replies[0].state, *(sorry.state for sorry in replies[0].sorries))
            frontier += [each for each in found if each and each not in frontier]
        by_snapshot, by_replay, behind_prefix = map(set, zip(*ways, strict=True))
        assert "warm" in by_snapshot
        # A tactic that could leave its hole is not tried at all.
        assert "replayed" in by_replay <= {"replayed", None}
        assert "warm" in behind_prefix


def start_worker(settings: Settings, folder: Path) -> subprocess.Popen[bytes]:
    environ = {name: text for name, text in os.environ.items() if name[:6] != "LEANQ_"}
    environ |= {"LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix, "LEANQ_LEASE_S": "2"}
    environ |= {"LEANQ_CACHE": str(folder), "PYTHONPATH": f"{TESTS}:{ROOT}"}
    return subprocess.Popen([sys.executable, str(SUPPORT / "lean" / "eager.py")], env=environ)


def snapshot_keys(settings: Settings, kind: str) -> list[bytes]:
    with redis.Redis.from_url(settings.url) as server:
        return list(server.scan_iter(f"{{{settings.prefix}:*}}:{kind}:*", count=10_000))


@pytest.mark.slow
def test_the_queue_counts_steps_that_reach_a_warm_worker(
    core: Environment, settings: Settings, tmp_path: Path
) -> None:
    settings = replace(settings, lease_s=2.0)
    workers = [start_worker(settings, tmp_path / name) for name in "ab"]
    try:
        with LeanQClient(settings) as lean:
            (sorry,) = lean.check(CODE).result(60).sorries
            assert sorry.state
            until(lambda: len(look(settings).workers) == 2)
            state = sorry.state

            def hit() -> bool:
                lean.step(state, "constructor", tenant="a").result(60)
                return look(settings).counters.get("warm_hits", 0) >= 5

            until(hit)
            counters = look(settings).counters
            assert counters["way:warm"] >= 5
            ways = {name for name in counters if name.startswith("way:")}
            assert ways <= {"way:warm", "way:cold", "way:replayed"}
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
            worker.wait(20)


@pytest.mark.slow
def test_a_state_outlives_its_worker(core: Environment, settings: Settings, tmp_path: Path) -> None:
    """Made on A, which is killed; stepped on B, whose files are elsewhere."""
    settings = replace(settings, lease_s=2.0)
    workers = [start_worker(settings, tmp_path / "a")]
    try:
        with LeanQClient(settings) as lean:
            (sorry,) = lean.check(CODE).result(60).sorries
            assert sorry.state
            first = lean.step(sorry.state, "constructor").result(60)
            until(lambda: bool(snapshot_keys(settings, "snap")))
            with redis.Redis.from_url(settings.url) as server:
                for key in snapshot_keys(settings, "chunk"):
                    server.set(key, b"damaged")
            workers[0].send_signal(signal.SIGKILL)
            workers[0].wait(20)
            waiting = lean.step(sorry.state, "constructor")
            workers.append(start_worker(settings, tmp_path / "b"))
            second = waiting.result(60)
            assert first == second
            assert first.worker != second.worker
            assert look(settings).counters["way:failed"] == 1
            with redis.Redis.from_url(settings.url) as server:
                for kind in ("snap", "snaps", "chunk"):
                    server.delete(*snapshot_keys(settings, kind), f"{settings.prefix}:none")
            assert lean.step(sorry.state, "constructor").result(60) == first
            assert second.state
            last = lean.step(second.state, "exact hp\nexact And.intro hq hp").result(60)
            assert last.verdict == "accepted"
            # A client that has never heard of the state finds out where it is.
            with LeanQClient(settings) as other:
                assert other.step(sorry.state, "constructor").result(60) == first
                assert (
                    other.import_(other.export(second.state).result(60)).result(60) == second.state
                )
            until(lambda: len(look(settings).workers) == 1)
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
            worker.wait(20)
