"""States that a process keeps for itself; what they share with Redis is in test_states.py."""

from __future__ import annotations

from support.queue.stores import ROOT, child, ident, packed

from leanq.states import MemoryStates


async def test_states_in_memory_are_collected() -> None:
    now = 0.0
    states = MemoryStates(state_ttl_s=100.0, clock=lambda: now)
    await states.keep({ident(0): ROOT, ident(1): child(ident(0)), ident(2): child(ident(0))})
    now = 60.0
    assert await states.recall(ident(2))
    now = 120.0
    assert await states.collect() == 1
    assert await states.recall(ident(1)) is None
    assert await states.recall(ident(2)) == [child(ident(0)), ROOT]
    now = 1000.0
    assert (await states.collect(), await states.collect()) == (2, 0)


async def test_the_least_recently_used_give_way_where_there_is_no_room() -> None:
    states = MemoryStates(most_bytes=100_000)
    await states.keep({ident(0): ROOT})
    for number in range(1, 1000):
        await states.keep({ident(number): child(ident(0))})
    # A parent is used with each of its children.
    assert await states.recall(ident(999)) == [child(ident(0)), ROOT]
    assert await states.recall(ident(1)) is None
    kept = [number for number in range(1000) if await states.recall(ident(number))]
    assert 100 < len(kept) < 400


async def test_memory_keeps_no_snapshots() -> None:
    states = MemoryStates()
    assert states.most_snapshot_bytes == 0
    assert not await states.keep_snapshot("k", packed(b"chunk"))
    assert await states.find_snapshot("k") is None
    await states.drop_snapshot("k")
