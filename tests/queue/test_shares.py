"""Tenants' shares of CPU time, in simulated fleets on the real scripts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from msgspec import structs
from support.queue.fair_fleet import FairFleet
from support.queue.shards import Shard, settlement

from leanq.queue.results import Settlement

HOUR_S = 3600.0


def lognormal(chance: Random, mean_s: float, spread: float = 1.5) -> Callable[[], float]:
    """Times with a ratio of standard deviation to mean, as checks have them."""
    sigma = math.sqrt(math.log(1 + spread**2))
    return lambda: mean_s * math.exp(chance.gauss(0.0, sigma) - sigma * sigma / 2)


@pytest.mark.slow
async def test_by_turns_the_tenant_of_long_checks_has_nearly_all_cpu_time(shard: Shard) -> None:
    fleet = FairFleet(shard, 8, {"long": lambda: 60.0, "short": lambda: 1.0})
    await fleet.run(HOUR_S / 4)
    assert fleet.shares()["long"] > 0.95


@pytest.mark.slow
async def test_one_weight_alone_makes_all_others_weigh_1(shard: Shard) -> None:
    await shard.queue.set_weight("a", 2.0)
    fleet = FairFleet(shard, 4, {"a": lambda: 4.0, "b": lambda: 8.0, "c": lambda: 2.0})
    await fleet.run(HOUR_S / 4)
    assert fleet.shares() == {
        "a": pytest.approx(0.5, abs=0.03),
        "b": pytest.approx(0.25, abs=0.03),
        "c": pytest.approx(0.25, abs=0.03),
    }


@pytest.mark.slow
async def test_a_tenant_of_short_checks_is_not_kept_waiting(shard: Shard) -> None:
    """Not even by the first long checks, of which nothing is known."""
    await shard.queue.set_weight("short", 1.0)
    fleet = FairFleet(shard, 8, {"long": lambda: 600.0, "short": lambda: 5.0})
    await fleet.run(HOUR_S)
    pauses = [after - before for before, after in pairwise(fleet.started_s["short"])]
    assert max(pauses) < 60.0
    assert fleet.shares()["short"] > 0.4


@pytest.mark.slow
async def test_a_tenant_that_was_idle_has_not_saved_up(shard: Shard) -> None:
    await shard.queue.set_weight("often", 1.0)
    fleet = FairFleet(shard, 4, {"often": lambda: 1.0, "seldom": lambda: 1.0})
    await fleet.run(60.0)
    fleet.idle.add("seldom")
    await fleet.run(200.0)
    fleet.idle.clear()
    fleet.used_s.clear()
    await fleet.run(20.0)
    assert fleet.shares()["often"] > 0.4


async def test_priorities_have_accounts_of_their_own(shard: Shard) -> None:
    """What a tenant used alone in one does not count against it in the other."""
    await shard.queue.set_weight("a", 1.0)
    for _ in range(3):
        await shard.submit(*(f"a {n}" for n in range(10)), tenant="a", priority=2)
        jobs = (await shard.claim(want=10)).jobs
        await shard.claim(want=0, settle=[_used(settlement(job), 60_000) for job in jobs])
        await shard.lapse()
    for tenant in ("a", "b"):
        await shard.submit(*(f"{tenant}{n}" for n in range(10)), tenant=tenant, priority=0)
    first = [job.request_id[0] for job in (await shard.claim(want=2)).jobs]
    assert sorted(first) == ["a", "b"]


@pytest.mark.parametrize("way", ["by turns", "by weights", "warm", "one for one"])
async def test_tenants_that_are_alike_have_like_parts_after_each_claim(
    shard: Shard, way: str
) -> None:
    """Whatever a claim asks for; and each one's requests keep their order."""
    had: dict[str, list[str]] = {f"t{number}": [] for number in range(5)}
    if way == "warm":
        await shard.warm("w", "state")
    for tenant in had:
        if way == "by weights":
            await shard.queue.set_weight(tenant, 3.0)
            await shard.submit(tenant, tenant=tenant)
            job = await shard.job()
            await shard.claim(want=0, settle=[_used(settlement(job), 100)])
    for tenant in had:
        names = (f"{tenant} {number:02}" for number in range(12))
        await shard.submit(*names, tenant=tenant, affinity=("state",) if way == "warm" else ())
    done: list[Settlement] = []
    for want in [1] * 60 if way == "one for one" else (7, 1, 11, 2, 3, 4, 5, 6, 9, 12):
        jobs = (await shard.claim(want=want, settle=done)).jobs
        assert len(jobs) == want
        done = [settlement(job) for job in jobs] if way == "one for one" else []
        for job in jobs:
            had[job.tenant].append(job.request_id)
        counts = [len(names) for names in had.values()]
        assert max(counts) - min(counts) <= 1
    assert all(names == sorted(names) for names in had.values())


async def test_more_tenants_than_a_claim_looks_at_are_all_served(shard: Shard) -> None:
    await shard.queue.set_weight("t1", 2.0)
    for number in range(250):
        await shard.submit(f"r{number}", f"s{number}", tenant=f"t{number}")
    got = [job.request_id for _ in range(60) for job in (await shard.claim(want=10)).jobs]
    assert len(got) == len(set(got)) == 500


async def test_what_goes_back_unfinished_is_not_charged(shard: Shard) -> None:
    await shard.queue.set_weight("t", 1.0)
    await shard.submit("one", "two")
    await shard.claim(want=0, settle=[_used(settlement(await shard.job()), 5000)])
    before = shard.dump().shares
    job = await shard.job()
    assert shard.dump().shares["a:1"]["t"] == (10_000.0, 5000.0)
    await shard.queue.release("w", [(job.request_id, job.token)])
    assert shard.dump().shares == before == {"a:1": {"t": (5000.0, 5000.0)}}
    job = await shard.job()
    await shard.queue.release("w", [(job.request_id, job.token)], how="retry")
    assert shard.dump().shares["a:1"]["t"] == (10_000.0, 5000.0)


async def test_numbers_that_are_none_starve_nobody(shard: Shard) -> None:
    """As another program or an old release may have left them."""
    shard.server.hset(
        shard.queue.keys.of("weights"), mapping={"t": "nan", "u": "inf", "v": "0", "w": "2"}
    )
    shard.server.hset(f"{shard.tag}:shares:a:1", mapping={"": "nan", "t": "nan nan", "u": "- -"})
    for tenant in "tuvw":
        await shard.submit(f"{tenant}1", f"{tenant}2", tenant=tenant)
    for _ in range(8):
        await shard.claim(want=0, settle=[_used(settlement(await shard.job()), 5000)])
    assert set(shard.dump().shares["a:1"]) == set("tuvw")
    assert all(
        math.isfinite(number) for each in shard.dump().shares["a:1"].values() for number in each
    )


async def test_a_queue_without_weights_keeps_no_accounts(shard: Shard) -> None:
    await shard.submit("one", "two")
    await shard.queue.set_weight("t", 2.0)
    job = await shard.job()
    await shard.queue.set_weight("t", None)
    shard.server.delete(f"{shard.tag}:shares:a:1")
    await shard.claim(want=1, settle=[_used(settlement(job), 5000)])
    found = shard.dump()
    assert not found.shares
    assert found.hashes["tally"]["u:a:t"] == found.hashes["tally"]["u_ms:a"] == "5000"


async def test_of_a_hundred_tenants_cpu_time_is_counted_by_name(shard: Shard) -> None:
    names = [f"t{number}" for number in range(105)]
    for name in names:
        await shard.submit(name, tenant=name)
    jobs = (await shard.claim(want=105)).jobs
    done = [_used(settlement(job), 7) for job in jobs]
    assert all((await shard.claim(want=0, settle=done)).accepted)
    tallies = (await shard.queue.status()).tallies
    named = {name: n for name, n in tallies.items() if name.startswith("u:a:t")}
    assert len(named) == 100
    assert set(named.values()) == {7}
    assert (tallies["u:a:"], tallies["u_ms:a"]) == (35, 735)
    # A day later those that used nothing make room.
    for _ in range(2):
        shard.advance(86_400_000)
        await shard.queue.renew("w")
    await shard.submit("new", tenant="new")
    await shard.claim(want=0, settle=[_used(settlement(await shard.job()), 9)])
    tallies = (await shard.queue.status()).tallies
    assert {name: n for name, n in tallies.items() if name.startswith("u:a:")} == {
        "u:a:": 35,
        "u:a:new": 9,
    }


async def test_a_result_that_is_settled_twice_or_fenced_is_counted_once(shard: Shard) -> None:
    await shard.submit("one")
    job = await shard.job()
    done = _used(settlement(job), 100)
    for _ in range(2):
        assert (await shard.claim(want=0, settle=[done])).accepted == (True,)
    late = structs.replace(done, token="another")
    assert (await shard.claim(want=0, settle=[late])).accepted == (False,)
    assert (await shard.queue.status()).tallies["u:a:t"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_any_tenants_have_their_parts(shard: Shard, seed: int) -> None:
    chance = Random(seed)
    names = [f"t{number}" for number in range(chance.randint(2, 5))]
    weights = {name: chance.choice((0.5, 1.0, 2.0, 5.0)) for name in names}
    costs = {name: lognormal(chance, chance.choice((10.0, 30.0, 100.0))) for name in names}
    for name, weight in weights.items():
        await shard.queue.set_weight(name, weight)
    fleet = FairFleet(shard, 8, costs)
    await fleet.run(HOUR_S / 2)
    fleet.used_s.clear()
    await fleet.run(HOUR_S)
    shares = fleet.shares()
    for name, weight in weights.items():
        assert shares[name] == pytest.approx(weight / sum(weights.values()), abs=0.08)


def _used(done: Settlement, cpu_ms: int) -> Settlement:
    return structs.replace(done, cpu_ms=cpu_ms)
