"""Settings that disagree with those of the fleet are noticed at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import redis
from support.fleets import Recorder, short_lease, working
from support.queue.queues import Queue
from support.terminals import Terminal
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import UsageError
from leanq.lean.driver import EchoDriver
from leanq.queue.keys import shape_key
from leanq.queue.settings import Settings
from leanq.queue.shard import announce_shape, check_shape
from leanq.worker import Worker

OTHER_SHARDS = "this queue has 1 shard, LEANQ_SHARDS is 3 here"
OTHER_LEASE = "the workers of this queue have a lease of 10 s, LEANQ_LEASE_S is 30 here"


@pytest.fixture
def three(settings: Settings) -> Settings:
    return replace(settings, shards=3)


async def test_a_client_that_expects_other_shards_says_so(
    settings: Settings, three: Settings
) -> None:
    async with working(settings, EchoDriver()):
        started_s = time.monotonic()
        with pytest.raises(UsageError, match=OTHER_SHARDS):
            async with AsyncLeanQClient(three):
                pass
        with pytest.raises(UsageError, match=OTHER_SHARDS):
            await asyncio.to_thread(LeanQClient, three)
        assert time.monotonic() - started_s < 20
        # The lease is the workers' affair.
        async with AsyncLeanQClient(replace(settings, lease_s=30.0)) as lean:
            assert await lean.echo(b"x") == b"x"


async def test_a_worker_that_differs_does_not_join(settings: Settings, three: Settings) -> None:
    async with working(settings, EchoDriver()) as first:
        for other, text in (
            (three, OTHER_SHARDS),
            (replace(settings, lease_s=30.0), OTHER_LEASE),
        ):
            with pytest.raises(UsageError, match=text):
                await Worker(other, [Recorder()], slots=1).run()
            queue = Queue(other)
            assert {row.worker for row in (await queue.status()).workers} <= {first.id}
            await queue.close()


async def test_an_empty_fleet_may_get_another_shape(settings: Settings, three: Settings) -> None:
    async with working(settings, EchoDriver()):
        pass
    async with AsyncLeanQClient(three) as lean, working(three, EchoDriver()):
        assert await lean.echo(b"x") == b"x"
        with pytest.raises(UsageError, match="this queue has 3 shards, LEANQ_SHARDS is 1 here"):
            async with AsyncLeanQClient(settings):
                pass


async def test_a_fleet_whose_leases_have_expired_is_empty(three: Settings) -> None:
    dead, queue = Queue(replace(three, shards=1)), Queue(three)
    await announce_shape(dead)
    await dead.register("dead", b"", {"echo": b""})
    with pytest.raises(UsageError, match=OTHER_SHARDS):
        await announce_shape(queue)
    with redis.Redis.from_url(three.url) as server:
        server.zadd(dead.keys.of("workers"), {"dead": 1})
    await check_shape(queue)
    await announce_shape(queue)
    await dead.release("dead", [], leave=True)
    for each in (dead, queue):
        await each.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"shards": "1"},
        {"shards": "\xff", "lease_s": "10"},
        {"shards": "0", "lease_s": "10"},
        {"shards": "9" * 30, "lease_s": "10"},
    ],
)
async def test_what_is_no_shape_stops_no_process(
    settings: Settings, fields: dict[str, str]
) -> None:
    with redis.Redis.from_url(settings.url) as connection:
        connection.hset(shape_key(settings.prefix), mapping=fields)
    async with AsyncLeanQClient(settings) as lean, working(settings, EchoDriver()):
        assert await lean.echo(b"x") == b"x"


@pytest.mark.slow
async def test_commands_that_expect_other_shards_say_so(
    terminal: Terminal, settings: Settings
) -> None:
    terminal.use(settings)
    terminal.environ["LEANQ_SHARDS"] = "3"
    async with working(settings, EchoDriver()):
        for command in (("status",), ("worker", "--driver", "echo")):
            done = await asyncio.to_thread(terminal.run, *command)
            assert (done.code, done.out) == (2, "")
            assert OTHER_SHARDS in done.err
            assert len(done.err.splitlines()) == 1
        shown = (await asyncio.to_thread(terminal.run, "doctor")).out.splitlines()
        failed = [line for line in shown if line.split()[:2] == ["FAILED", "server"]]
        assert OTHER_SHARDS in "".join(failed), shown


async def test_a_fleet_that_the_server_forgot_writes_it_again(
    settings: Settings, three: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """As after FLUSHALL, or a failover to a replica that had nothing yet."""
    hasty = short_lease(settings, 1.0)
    async with working(hasty, EchoDriver()) as worker:
        other = Queue(three)
        with redis.Redis.from_url(settings.url) as connection:
            connection.delete(*connection.keys(f"{{{settings.prefix}:*"))
            await eventually(lambda: bool(connection.exists(shape_key(settings.prefix))))
        await eventually(lambda: f"no longer knew worker {worker.id}" in caplog.text)
        with pytest.raises(UsageError, match=OTHER_SHARDS):
            await check_shape(other)
        async with AsyncLeanQClient(hasty) as lean:
            assert await lean.echo(b"x") == b"x"
        await other.close()
