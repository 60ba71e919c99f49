"""Which headers a fleet's texts have: the script against a model, and tenants who try to choose."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from support.queue.queues import Queue
from support.queue.shards import Shard, with_test_clock

import leanq.queue.shard
from leanq.local import EmbeddedServer
from leanq.queue.headers import LEAST_TEXTS, MOST_BYTES, MOST_PRELOADED, HeadersUsed, HeaderUse
from leanq.queue.settings import Settings
from leanq.states import RedisStates

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
MAX_TENANTS, MAX_HEADERS = 3, 2
HOT = Path(leanq.queue.shard.__file__).parent / "lua/parts/hot.lua"
TENANTS, HEADERS = "stuvw", [f"import {name}\n" for name in "ABCDE"]


def bound(name: str) -> int:
    (found,) = re.findall(rf"{name} = (\d+)", HOT.read_text())
    return int(found)


def small(name: str) -> str:
    """A script with the test's clock, and tables that are soon full."""
    text = with_test_clock(name)
    text = text.replace("MAX_TENANTS = 64", f"MAX_TENANTS = {MAX_TENANTS}")
    return text.replace("MAX_HEADERS = 16", f"MAX_HEADERS = {MAX_HEADERS}")


def sha(header: str) -> str:
    return hashlib.sha1(header.encode(), usedforsecurity=False).hexdigest()


class Model:
    """The counts of each tenant's headers."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, float]] = {}

    def advance(self, hours: int) -> None:
        for counts in self.counts.values():
            for header, n in list(counts.items()):
                counts[header] = n * 0.5**hours
                if counts[header] < 0.5:
                    del counts[header]

    def note(self, tenant: str, header: str, n: int) -> None:
        if tenant not in self.counts and len(self.counts) >= MAX_TENANTS:
            least = min(self.counts, key=lambda name: (self.total(name), name))
            total, mine = self.total(least), self.counts[least]
            left = total - n
            kept = {name: m * left // total for name, m in mine.items()} if left > 0 else {}
            self.counts[least] = {name: m for name, m in kept.items() if m >= 0.5}
            if not kept:
                del self.counts[least]
            if left > 0:
                return
        mine = self.counts.setdefault(tenant, {})
        if header not in mine and len(mine) >= MAX_HEADERS:
            least = min(mine, key=lambda name: (mine[name], sha(name)))
            if mine[least] > n:
                mine[least] -= n
                if mine[least] < 0.5:
                    del mine[least]
                return
            del mine[least]
        mine[header] = mine.get(header, 0) + n

    def total(self, tenant: str) -> float:
        return sum(self.counts[tenant].values())

    def votes(self) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for tenant, counts in self.counts.items():
            for header, n in counts.items():
                found[header] += n / (self.total(tenant) + 10)
        return dict(found)

    def texts(self, header: str) -> float:
        return sum(counts.get(header, 0) for counts in self.counts.values())


async def hot(queue: Queue, *, most: int = 99, least: float = 0) -> list[str]:
    found = await queue.run("hot_headers", fingerprint="f", most=most, least=least)
    return [text.decode() for text in found]


notes = st.tuples(st.sampled_from(TENANTS), st.sampled_from(HEADERS), st.integers(1, 40))
steps = st.lists(st.one_of(st.lists(notes, min_size=1, max_size=6), st.integers(1, 4)), max_size=12)


@pytest.mark.slow
@profile(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps)
def test_the_script_counts_as_the_model_does(
    server: EmbeddedServer, steps: list[int | list[tuple[str, str, int]]]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(leanq.queue.shard, "script_text", small)
        asyncio.run(follows_the_model(server, steps))


async def follows_the_model(
    server: EmbeddedServer, steps: list[int | list[tuple[str, str, int]]]
) -> None:
    queue = Queue(Settings.load(server.url, {"LEANQ_PREFIX": "hot-headers"}))
    model, now_ms = Model(), 1_000_000
    with redis.Redis.from_url(server.url) as connection:
        try:
            connection.set(f"{queue.keys.tag}:clock", now_ms)
            await queue.register("w", b"", {"a": b""})
            for step in steps:
                if isinstance(step, int):
                    now_ms += step * HOUR_MS
                    model.advance(step)
                connection.set(f"{queue.keys.tag}:clock", now_ms)
                if isinstance(step, list):
                    await queue.renew("w", headers=[HeaderUse("f", *note) for note in step])
                    for note in step:
                        model.note(*note)
                votes = model.votes()
                found = await hot(queue)
                assert sorted(found) == sorted(votes)
                assert all(votes[a] >= votes[b] - 1e-9 for a, b in pairwise(found))
                assert (
                    await hot(queue, most=1, least=5)
                    == [header for header in found if model.texts(header) >= 5][:1]
                )
        finally:
            await queue.close()
            if keys := list(connection.scan_iter("{hot-headers:*")):
                connection.delete(*keys)


async def served(shard: Shard, tenant: str, *headers: str, n: int = 1) -> None:
    """As a worker tells it: what it has served of a tenant goes with its heartbeat."""
    used = HeadersUsed()
    for header in headers:
        for _ in range(n):
            used.add("f", tenant, header)
    await shard.queue.renew("w", headers=used.take())


def size_bytes(shard: Shard) -> int:
    keys = [f"{shard.tag}:{kind}:f" for kind in ("hot", "texts")]
    return sum(int(shard.server.memory_usage(key) or 0) for key in keys)


async def test_a_tenant_with_ten_thousand_headers_displaces_nobodys(shard: Shard) -> None:
    await served(shard, "honest", "import Lib\n", n=40)
    for start in range(0, 10_000, 100):
        await served(shard, "hostile", *(f"import X{start + n}\n" for n in range(100)), n=5)
        await served(shard, "honest", "import Lib\n")
    states = RedisStates([shard.queue])
    assert (await states.hot_headers("f"))[0] == "import Lib\n"
    assert shard.server.hlen(f"{shard.tag}:texts:f") <= bound("MAX_TEXTS")
    assert size_bytes(shard) < 64 << 10
    # Once that ends, its place is an hour's or two.
    shard.advance(12 * HOUR_MS)
    await served(shard, "honest", "import Lib\n", n=40)
    assert await states.hot_headers("f") == ["import Lib\n"]


async def test_a_flood_of_tenants_fights_for_one_place(shard: Shard) -> None:
    for number in range(bound("MAX_TENANTS")):
        await served(shard, f"honest{number}", "import Lib\n", f"import Own{number}\n", n=40)
    for number in range(500):
        await served(shard, f"t{number}", f"import X{number}\n", n=20)
    tenants = shard.server.hkeys(f"{shard.tag}:hot:f")
    assert len(tenants) == bound("MAX_TENANTS")
    assert sum(name.startswith(b"honest") for name in tenants) == len(tenants) - 1
    assert (await hot(shard.queue))[0] == "import Lib\n"


async def test_before_a_header_stand_at_most_as_many_as_tenants_votes_allow(shard: Shard) -> None:
    """A header that is a fourth of one tenant's use, and hostile tenants with a header each."""
    for _ in range(4):
        await served(shard, "honest", *(f"import Own{n}\n" for n in range(4)), n=400)
    for number in range(5):
        headers = (f"import X{number}{n}\n" for n in range(16))
        await served(shard, f"hostile{number}", *headers, n=4000)
    assert {f"import Own{n}\n" for n in range(4)} == set((await hot(shard.queue))[:4])


async def test_what_was_not_served_often_or_lately_is_not_preloaded(shard: Shard) -> None:
    states = RedisStates([shard.queue])
    await served(shard, "t", "import Once\n", n=LEAST_TEXTS - 1)
    assert await states.hot_headers("f") == []
    await served(shard, "t", "import Once\n")
    assert await states.hot_headers("f") == ["import Once\n"]
    assert await states.hot_headers("g") == []
    for kind in ("hot", "texts"):
        assert 0 < shard.server.pttl(f"{shard.tag}:{kind}:f") <= DAY_MS
    shard.advance(HOUR_MS)
    assert await states.hot_headers("f") == []


async def test_huge_headers_and_many_stay_out_of_a_heartbeat() -> None:
    used = HeadersUsed()
    used.add("f", "hostile", "import " + "X" * MOST_BYTES)
    assert used.take() == []
    for number in range(10_000):
        used.add("f", "hostile", f"import X{number}\n")
        used.add("f", f"t{number}", "import Y\n")
    used.add("f", "hostile", "import X0\n")
    taken = used.take()
    assert len(taken) == 32
    assert taken[0] == ("f", "hostile", "import X0\n", 2)
    assert sum(row.tenant == "hostile" for row in taken) == 1
    assert used.take() == []


@pytest.mark.parametrize("kind", ["hot", "texts"])
async def test_a_key_of_another_kind_costs_no_heartbeat(shard: Shard, kind: str) -> None:
    shard.server.set(f"{shard.tag}:{kind}:f", "no hash")
    try:
        await served(shard, "t", "import Lib\n", n=40)
        assert await hot(shard.queue) == []
    finally:
        shard.server.delete(f"{shard.tag}:{kind}:f")


async def test_a_row_that_is_none_counts_nothing(shard: Shard) -> None:
    for row in (b"", b"\xc1", b"\x91\x01", b"\x92\x01\x81\xa1x\xa1y", b"\x92\xa1x\x80"):
        shard.server.hset(f"{shard.tag}:hot:f", "t", row)
        assert await hot(shard.queue) == []
    await served(shard, "t", "import Lib\n", n=40)
    assert await hot(shard.queue, most=MOST_PRELOADED) == ["import Lib\n"]
