"""Workers with nothing to do: they look after the fleet together, and cost the server little."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.fleets import Wire, is_idle, working
from support.queue.queues import Queue
from support.queue.shards import LEASE_MS, Shard
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.queue.settings import Settings


async def test_the_lease_of_who_holds_nothing_is_longer(shard: Shard) -> None:
    await shard.submit("r", "waits")
    await shard.job("busy")
    await shard.queue.register("idle", b"", {})
    for worker in ("busy", "idle"):
        renewed = await shard.queue.renew(worker, ["a", "b"], idle_factor=6.0)
        assert (renewed.workers, renewed.waiting) == (2, 1)
    ends = shard.dump().workers
    assert ends == {"busy": shard.now_ms + LEASE_MS, "idle": shard.now_ms + 6 * LEASE_MS}
    # From its first request on its lease is like any other's.
    await shard.job("idle")
    assert shard.dump().workers["idle"] == shard.now_ms + LEASE_MS
    assert (await shard.queue.renew("idle", ["a", "b"])).waiting == 0


async def test_a_claim_that_finds_nothing_leaves_the_longer_lease(shard: Shard) -> None:
    await shard.queue.register("idle", b"", {})
    await shard.queue.renew("idle", ["a"], idle_factor=6.0)
    # Its next heartbeat is as far away as the lease was long.
    assert not (await shard.claim("idle", 1)).jobs
    assert shard.dump().workers["idle"] == shard.now_ms + 6 * LEASE_MS


@pytest.mark.slow
async def test_idle_workers_of_a_large_fleet_renew_seldom(settings: Settings) -> None:
    brief, queue = replace(settings, lease_s=1.5), Queue(settings)
    for number in range(149):
        await queue.register(f"other{number}", b"", {})
    async with working(brief) as worker, AsyncLeanQClient(settings) as lean:
        (consumer,) = worker.consumers

        async def lease_s() -> float:
            rows = (await queue.status()).workers
            return max(row.lease_s for row in rows if row.worker == worker.id)

        await eventually(lambda: consumer.idle_factor == 3.0)

        async def has_a_longer_lease() -> bool:
            return await lease_s() > 2.0

        await eventually(has_a_longer_lease)
        # What it claims then has a lease as ever.
        assert await lean.echo(b"x", delay_s=0.05) == b"x"
        assert await lease_s() < 1.6
        await eventually(has_a_longer_lease)
    for number in range(149):
        await queue.release(f"other{number}", [], leave=True)
    await queue.close()


async def test_an_idle_worker_does_not_claim_while_all_is_paused(settings: Settings) -> None:
    """Neither new requests nor heartbeats make it ask."""
    brief, queue = replace(settings, lease_s=0.6), Queue(settings)
    wire = Wire(brief)
    await queue.set_paused("environment", "echo", paused=True)
    async with working(brief, wire=wire) as worker, AsyncLeanQClient(settings) as lean:
        await eventually(lambda: is_idle(worker))
        claims, renewals = wire.calls["claim"], wire.calls["renew"]
        asking = [asyncio.create_task(lean.echo(b"x")) for _ in range(3)]

        async def wait() -> bool:
            return sum(row.waiting for row in (await queue.status()).priorities) == 3

        await eventually(wait)
        await eventually(lambda: wire.calls["renew"] > renewals + 2)
        assert wire.calls["claim"] == claims
        await queue.set_paused("environment", "echo", paused=False)
        assert await asyncio.gather(*asking) == [b"x"] * 3
    await queue.close()


async def test_what_no_worker_heard_of_is_found_at_the_next_renewal(
    settings: Settings,
) -> None:
    class Unheard(Wire):
        async def block(self, *_: object, block_s: float) -> Any:
            await asyncio.Event().wait()

    short = replace(settings, lease_s=0.9)
    async with working(short, wire=Unheard(short)) as worker:
        await eventually(lambda: is_idle(worker))
        async with AsyncLeanQClient(settings) as lean:
            assert await lean.echo(b"x") == b"x"
