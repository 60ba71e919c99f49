"""The queue and its server: wake-ups, inboxes, keys, scripts, and a server in trouble."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from importlib import resources
from itertools import islice, pairwise
from urllib.parse import urlsplit

import pytest
from msgspec import structs
from redis.client import Monitor
from support.queue.queues import Queue
from support.queue.shards import LARGE, LEASE_MS, Shard, lasting_of, open_shard, settlement
from support.trainers.replays import attempts
from support.waiting import eventually

import leanq.queue.keys
from leanq.errors import QueueFullError, UnavailableError, UsageError
from leanq.local import EmbeddedServer
from leanq.queue.headers import HeaderUse
from leanq.queue.results import PriorityRow, Settlement, Stop, Wakeup, WorkerRow
from leanq.queue.settings import Settings
from leanq.queue.shard import backoff_s
from leanq.states import Packed, RedisStates
from leanq.trainers.replay import ReplayMemory


async def waiting_for_wakeup(shard: Shard) -> asyncio.Task[Wakeup | Stop | None]:
    """Worker w, which waits already on the server."""
    task = asyncio.create_task(shard.queue.wait_wakeup("w", ["a"], 30.0))
    await eventually(shard.is_waited_for)
    return task


# Wake-ups


async def test_submit_wakes_a_worker(shard: Shard) -> None:
    woken = await waiting_for_wakeup(shard)
    await shard.submit("r1", "r2")
    assert await woken == Wakeup()
    assert shard.wakeup() == 1
    assert await shard.queue.wait_wakeup("w", ["a"], 1.0) == Wakeup()
    assert await shard.queue.wait_wakeup("w", ["a"], 0.01) is None


async def test_wakeup_holds_as_many_tokens_as_are_needed_but_few(shard: Shard) -> None:
    await shard.submit("r1", "r2", "r3")
    assert shard.wakeup() == 3
    await shard.submit("r4")
    assert shard.wakeup() == 3
    await shard.submit(*(f"q{number}" for number in range(100)))
    assert shard.wakeup() == 16
    await shard.queue.notify("a")
    assert shard.wakeup() == 16


async def test_a_worker_that_leaves_requests_waiting_wakes_the_next(shard: Shard) -> None:
    await shard.submit("r1", "r2", "r3")
    shard.server.delete(shard.queue.keys.of("wakeup", "a"))
    await shard.claim(want=2)
    assert shard.wakeup() == 1
    await shard.queue.wait_wakeup("w", ["a"], 1.0)
    await shard.claim(want=2)
    assert shard.wakeup() == 0
    # One that could not answer the wake-up passes it on.
    await shard.queue.notify("a")
    assert shard.wakeup() == 1


async def test_claim_that_met_only_withdrawn_requests_wakes_the_next(shard: Shard) -> None:
    withdrawn = [f"r{number}" for number in range(1000)]
    await shard.submit("first", *withdrawn, "live")
    await shard.queue.cancel(withdrawn)
    assert (await shard.job()).request_id == "first"
    shard.server.delete(shard.queue.keys.of("wakeup", "a"))
    assert (await shard.claim(want=4)).jobs == ()
    assert shard.wakeup() == 1
    assert [job.request_id for job in (await shard.claim(want=4)).jobs] == ["live"]


async def test_work_that_comes_back_wakes_a_worker(shard: Shard) -> None:
    await shard.submit("r")
    await shard.claim("dead")
    shard.server.delete(shard.queue.keys.of("wakeup", "a"))
    shard.advance(LEASE_MS)
    await shard.queue.reap()
    assert shard.wakeup() == 1


async def test_stop_list_ends_the_wait_and_goes_first(shard: Shard) -> None:
    await shard.submit("r1", "r2")
    await shard.claim()
    shard.server.delete(shard.queue.keys.of("wakeup", "a"))
    waiting = await waiting_for_wakeup(shard)
    await shard.queue.notify_worker("w")
    assert await waiting is None
    await shard.queue.notify("a")
    await shard.queue.cancel(["r2", "r1"])
    assert [await shard.queue.wait_wakeup("w", ["a"], 1.0) for _ in range(3)] == [
        Stop("r2"),
        Stop("r1"),
        Wakeup(),
    ]


async def test_cancelled_wait_leaves_the_connection_usable(shard: Shard) -> None:
    waiting = await waiting_for_wakeup(shard)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await eventually(lambda: not shard.is_waited_for())
    await shard.submit("r1", "r2")
    assert await shard.queue.wait_wakeup("w", ["a"], 5.0) == Wakeup()


# Inboxes


async def test_inbox_can_be_read_again_until_it_is_read_on(shard: Shard) -> None:
    queue = shard.queue
    assert await queue.read_inbox("c", "0-0", 1) == ("0-0", [])
    await shard.submit("r1", "r2", "r3")
    jobs = (await shard.claim()).jobs
    await shard.settle(jobs[0], jobs[1])
    position, pairs = await queue.read_inbox("c", "0-0", 1000)
    assert pairs == [(job.request_id, settlement(job).reply) for job in jobs[:2]]
    assert await queue.read_inbox("c", "0-0", 1000) == (position, pairs)
    await shard.settle(jobs[2])
    end, pairs = await queue.read_inbox("c", position, 1000)
    assert [request_id for request_id, _ in pairs] == ["r3"]
    assert [request_id for request_id, _ in shard.dump().inbox["c"]] == ["r3"]
    assert await queue.read_inbox("c", end, 1) == (end, [])
    assert shard.dump().inbox == {"c": []}
    # The replies themselves stay for clients that come later.
    assert None not in await queue.replies(["r1", "r2", "r3"])


async def test_an_inbox_lives_as_long_as_it_is_read(shard: Shard) -> None:
    async def reply(request_id: str) -> int:
        await shard.submit(request_id)
        await shard.settle(await shard.job())
        return int(shard.server.pttl(inbox))

    inbox, full_ms = shard.queue.keys.of("inbox", "c"), shard.settings.reply_ttl_s * 1000
    assert full_ms / 2 < await reply("first") <= full_ms
    shard.server.pexpire(inbox, int(full_ms / 4))
    # Not with each reply, which would be one more command for each.
    assert await reply("second") <= full_ms / 4
    await shard.queue.read_inbox("c", "0-0", 1, extend=False)
    assert shard.server.pttl(inbox) <= full_ms / 4
    await shard.queue.read_inbox("c", "0-0", 1)
    assert shard.server.pttl(inbox) > full_ms / 2


async def test_waiting_reader_is_woken(shard: Shard) -> None:
    await shard.submit("r")
    job = await shard.job()
    reading = asyncio.create_task(shard.queue.read_inbox("c", "0-0", 30_000))
    await eventually(shard.is_waited_for)
    await shard.settle(job)
    assert (await reading)[1] == [("r", settlement(job).reply)]
    await shard.queue.drop_inbox("c")
    assert not shard.dump().inbox


async def test_large_reply_is_fetched_by_its_key(shard: Shard) -> None:
    await shard.submit("fits", "large")
    fits, large = (await shard.claim()).jobs
    replies = {"fits": b"\x93" * 16_384, "large": b"\x93" * 16_385}
    settle = [
        Settlement(job.request_id, job.token, "echo", replies[job.request_id])
        for job in (fits, large)
    ]
    await shard.claim(want=0, settle=settle)
    _, pairs = await shard.queue.read_inbox("c", "0-0", 1000)
    assert pairs == [("fits", replies["fits"]), ("large", b"16385")]
    assert await shard.queue.replies(["large", "gone"]) == [replies["large"], None]


async def test_thousands_of_replies_of_one_call_reach_the_inbox(shard: Shard) -> None:
    request_ids = [f"r{number}" for number in range(5000)]
    for start in range(0, 5000, 1000):
        await shard.submit(*request_ids[start : start + 1000])
    await shard.queue.cancel(request_ids)
    position, found = "0-0", list[str]()
    while len(found) < 5000:
        position, pairs = await shard.queue.read_inbox("c", position, 1000)
        found += [request_id for request_id, _ in pairs]
    assert found == request_ids


# What people and tools see


async def test_status_counts(shard: Shard) -> None:
    await shard.queue.register("w", b"info", {"a": b"about", "b": b""})
    await shard.submit("r1", "r2", "r3")
    shard.advance(1500)
    await shard.submit("r4", tenant="u")
    await shard.submit("r5", priority=0)
    jobs = (await shard.claim(want=2)).jobs
    assert [job.request_id for job in jobs] == ["r5", "r1"]
    await shard.settle(jobs[0])
    shard.advance(500)
    status = await shard.queue.status()
    assert status.counters == {
        "submitted": 5,
        "claimed": 2,
        "settled": 1,
        "verdict:accepted": 1,
        "waiting:a": 3,
        "turn:a": 2,
    }
    assert status.environments == {"a": b"about", "b": b""}
    assert status.workers == (WorkerRow("w", 9.5, 1, b"info"),)
    row = PriorityRow("a", 1, tenants=2, waiting=3, oldest_s=2.0, fullest={"t": 2})
    assert status.priorities == (row,)
    assert (status.quarantined, status.dead) == ({}, 0)
    await shard.quarantined("r6", environment="b")
    assert (await shard.queue.status()).quarantined == {"b": 1}


async def live_a_full_life(shard: Shard) -> None:
    """Every transition, so that a key of every kind is left."""
    queue = shard.queue
    queue.settings = replace(queue.settings, remember_s=60.0)
    await queue.register("w", b"info", {"a": b"", "b": b"", "b2": b""}, {"a": "print"})
    await shard.quarantined("killer")
    await queue.release("w", [("killer", (await shard.job()).token)], how="retry")
    await shard.submit("ended", "withdrawn", "leased", "waits")
    ended, *_ = (await shard.claim(want=3)).jobs
    await shard.settle(ended)
    await queue.cancel(["withdrawn"])
    await shard.submit("disagreed", environment="b")
    disputed = settlement(await shard.job(environments=["b"]))
    await shard.claim(want=0, settle=[structs.replace(disputed, reason="kernels_disagree")])
    await shard.submit("remembered", environment="b", digest="told")
    told = settlement(await shard.job(environments=["b"]))
    await shard.claim(want=0, settle=[structs.replace(told, fingerprint="print")])
    await shard.submit("leader", "follower", environment="b", digest="twice")
    await shard.claim(environments=["b"])
    await shard.quarantined("quarantined", environment="b")
    assert (await shard.claim(environments=["b"], busy=2)).must_empty
    await shard.warm("w", "state", environment="b2")
    await shard.submit("unreadable", environment="b2")
    shard.server.set(queue.keys.request("unreadable"), b"\x04")
    await shard.claim(environments=["b2"])
    assert await queue.lookup("c", ["leased", "waits", "gone"]) == [True, True, False]
    await queue.reconcile("w", [])
    await queue.renew("w", headers=[HeaderUse("f", "t", "import Init\n", 1)])
    await queue.reap()
    await queue.notify("a")
    await queue.notify_worker("w")
    await queue.status()
    states = RedisStates([queue])
    await states.keep({"0" * 64: b"Rsource"})
    assert await states.begin_snapshot("key")
    assert not await states.begin_snapshot("key")
    assert await states.keep_snapshot("key", Packed(b"manifest", (b"chunk",)))
    await states.collect()
    async with ReplayMemory("m", shard.settings) as memory:
        assert await memory.write(attempts(["text"])) == 1
        assert await memory.publish({"policy": "first"})
    await queue.read_inbox("c", "0-0", 1)
    await queue.environments()
    await queue.publish_decisions({"a": b"{}"})
    await shard.submit("first", "later")
    await queue.cancel(["later"])
    await shard.submit("large", body=LARGE)
    # Of a client that died before its call.
    shard.server.set(queue.keys.upload("call", "large"), LARGE, px=60_000)
    await queue.set_weight("t", 2.0)
    await shard.claim(want=1)
    await shard.submit("parked", tenant="held")
    await queue.set_paused("tenant", "held", paused=True)


TYPES = {"sorted set": b"zset"}


async def test_every_key_stands_in_the_table_and_lives_as_long_as_it_says(shard: Shard) -> None:
    row = re.compile(r"\| ``:(\w+).*?`` \| (.*?) \|.*\| (.*?) \|")
    table = row.findall(leanq.queue.keys.__doc__ or "")
    await live_a_full_life(shard)
    shard.server.delete(f"{shard.tag}:clock", f"{lasting_of(shard.tag)}:clock")
    names = [key.decode() for key in shard.server.scan_iter(f"*{shard.settings.prefix}*")]
    tags = f"{shard.tag}:", f"{lasting_of(shard.tag)}:"
    assert all(name.startswith(tags) for name in names)
    found = {
        (
            name.split("}:")[1].partition(":")[0],
            shard.server.type(name),
            shard.server.ttl(name) >= 0,
        )
        for name in names
    }
    assert found == {
        (kind, TYPES.get(of, of.encode()), ends == "time-to-live") for kind, of, ends in table
    }


async def test_every_command_of_every_script_stays_within_the_hash_tag(shard: Shard) -> None:
    with Monitor(shard.server.connection_pool) as monitor:  # type: ignore[no-untyped-call]
        await live_a_full_life(shard)
        shard.server.echo("the end")
        commands = set()
        while (seen := monitor.next_command())["command"] != "ECHO the end":
            if seen["client_type"] == "lua":
                commands.add(seen["command"].split()[0])
                keys = [word for word in seen["command"].split() if "{" in word]
                assert all(lasting_of(shard.tag) in key for key in keys)
                assert keys or seen["command"] == "TIME"
    assert commands >= {"HSET", "GETRANGE", "MSET", "XADD", "LPOP", "ZADD", "UNLINK"}


def test_scripts_say_whether_a_full_memory_stops_them() -> None:
    first = {
        file.name.removesuffix(".lua"): file.read_text().partition("\n")[0]
        for file in (resources.files("leanq.queue") / "lua").iterdir()
        if file.name.endswith(".lua")
    }
    flags = {
        "submit": "",
        "state_keep": "",
        "snapshot_keep": "",
        "replay_write": "",
        "replay_sample": " flags=no-writes",
        "others": " flags=no-writes",
        "hot_headers": " flags=no-writes",
        "reconcile": " flags=no-writes",
        "status": " flags=no-writes",
    }
    assert first == {name: "#!lua" + flags.get(name, " flags=allow-oom") for name in first}
    assert first.keys() >= {"claim", "cancel", "release", "renew", "reap", *flags}


# A server in trouble


async def test_scripts_are_sent_again_after_the_server_forgot_them(shard: Shard) -> None:
    await shard.submit("r")
    shard.server.script_flush()
    assert await shard.settle(await shard.job()) == (True,)


@pytest.fixture
async def own(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shard]:
    """On a server that no other test needs."""
    with EmbeddedServer() as server:
        async with open_shard(replace(settings, url=server.url), monkeypatch) as opened:
            yield opened


async def test_full_memory_refuses_what_adds_and_lets_the_rest_drain(own: Shard) -> None:
    shard, queue = own, own.queue
    await shard.submit("settled", "cancelled", "released", "claimed", "waits")
    settled, _, released = (await shard.claim(want=3)).jobs
    await shard.quarantined("poisoned", environment="b")
    shard.server.config_set("maxmemory", "1mb")
    with pytest.raises(QueueFullError) as refused:
        await shard.submit("refused")
    assert refused.value.retry_after_s > 0
    claimed = await shard.claim(want=1, settle=[settlement(settled)])
    assert (claimed.accepted, claimed.jobs[0].request_id) == ((True,), "claimed")
    assert await queue.cancel(["cancelled"]) == [True]
    assert await queue.release("w", [("released", released.token)]) == 1
    job = (await shard.claim(environments=["b"])).jobs[0]
    assert await queue.release("w", [(job.request_id, job.token)], how="retry") == 1
    assert await queue.lookup("d", ["waits", "claimed"]) == [True, True]
    assert (await queue.renew("w")).held == 1
    await queue.register("w", b"", {"a": b""})
    await queue.notify_worker("w")
    await queue.notify("a")
    await queue.reap()
    assert (await queue.reconcile("w", ["claimed"])) == ((), [])
    assert (await queue.status()).dead == 1
    assert len((await queue.read_inbox("c", "0-0", 1))[1]) == 3
    assert await queue.wait_wakeup("w", ["a"], 1.0) == Stop("cancelled")
    with pytest.raises(QueueFullError):
        await shard.submit("refused")
    shard.server.config_set("maxmemory", "0")
    assert len(await shard.submit("refused")) == 1


@pytest.mark.parametrize("trouble", ["down", "wrong password", "no server"])
async def test_server_out_of_reach_is_named_without_its_password(
    settings: Settings, trouble: str
) -> None:
    with EmbeddedServer() as server:
        password = urlsplit(server.url).password or "missing"
        url = {
            "down": server.url,
            "wrong password": server.url.replace(password, "secret"),
            # Not to be taken for a server without memory, whatever its name.
            "no server": "unix://:secret@/BLOOM/server.sock",
        }[trouble]
        queue = Queue(replace(settings, url=url))
        calls: list[Callable[[], Awaitable[object]]] = [
            queue.ping,
            lambda: queue.submit("c", []),
            lambda: queue.renew("w"),
            lambda: queue.wait_wakeup("w", ["a"], 0.01),
            lambda: queue.read_inbox("c", "0-0", 1),
        ]
        try:
            if trouble == "down":
                await queue.ping()
                server.close()
            for call in calls:
                with pytest.raises(UnavailableError) as refused:
                    await call()
                text = str(refused.value)
                assert "server.sock" in text
                assert not any(hidden in text for hidden in (password, "secret", "\n"))
        finally:
            await queue.close()


async def test_connection_is_made_again_after_a_loss(shard: Shard) -> None:
    waiting = await waiting_for_wakeup(shard)
    shard.server.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(UnavailableError):
        await waiting
    await shard.submit("r1", "r2")
    assert await shard.queue.wait_wakeup("w", ["a"], 5.0) == Wakeup()


def test_unknown_option_in_the_url_is_a_wrong_url(settings: Settings) -> None:
    with pytest.raises(UsageError, match="colour"):
        Queue(replace(settings, url="redis://:secret@localhost?colour=red"))


def test_waiting_times_double_up_to_a_bound() -> None:
    class Most(random.Random):
        def uniform(self, a: float, b: float) -> float:
            assert a == 0
            return b

    bounds = list(islice(backoff_s(Most(), base_s=1.0, max_s=10.0), 8))
    assert bounds[0] == 1.0
    assert all(late == min(10.0, 2 * early) for early, late in pairwise(bounds))
