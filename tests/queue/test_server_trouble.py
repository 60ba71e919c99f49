"""What befalls a server that stands alone: restarts, failovers, a full memory, silence."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis
from support.cluster import free_ports
from support.fleets import Recorder, kill_connections, working
from support.queue.queues import Queue
from support.servers import Server, own_server
from support.streams import stream
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.commands.doctor import server_findings
from leanq.errors import LostError, UnavailableError
from leanq.queue.operator_queue import look
from leanq.queue.settings import Settings

LASTING = ("--appendonly", "yes", "--appendfsync", "always")


def short(server: Server, lease_s: float = 1.2) -> Settings:
    return replace(server.settings, lease_s=lease_s)


async def counters(settings: Settings, *names: str) -> list[int]:
    found = (await look(settings)).counters
    return [found.get(name, 0) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("options", [LASTING, ()], ids=["with its data", "without"])
async def test_restarts(options: tuple[str, ...]) -> None:
    with own_server(*options) as server:
        settings = short(server)
        async with stream(settings) as made:
            for _ in range(3):
                await made.goes_on()
                server.stop()
                await asyncio.to_thread(server.start)
            await made.goes_on()


@pytest.mark.slow
async def test_a_server_that_takes_long_to_load() -> None:
    with own_server(*LASTING) as server:
        settings = short(server)
        with redis.Redis.from_url(settings.url) as connection:
            pipe = connection.pipeline(transaction=False)
            for number in range(10_000):
                pipe.set(f"filler{number}", number)
            pipe.execute()
        async with stream(settings) as made:
            await made.goes_on()
            server.stop()
            server.options += ("--key-load-delay", "100")
            await asyncio.to_thread(server.start)
            assert await asyncio.to_thread(says_that_it_loads, settings)
            await made.goes_on()


def says_that_it_loads(settings: Settings) -> bool:
    with redis.Redis.from_url(settings.url) as connection:
        try:
            connection.get("x")
        except redis.exceptions.BusyLoadingError:
            return True
    return False


async def test_cut_connections() -> None:
    with own_server() as server:
        settings = short(server, 4.0)
        async with stream(settings) as made:
            for _ in range(5):
                await made.goes_on()
                await asyncio.to_thread(kill_connections, settings)
            await made.goes_on()
        assert await counters(settings, "reaped") == [0]


@pytest.mark.slow
async def test_a_silence_longer_than_the_lease_takes_no_work_away() -> None:
    with own_server() as server:
        settings = short(server, 3.0)
        async with stream(settings) as made:
            await made.goes_on()
            before = await counters(settings, "reaped", "fenced")
            server.send(signal.SIGSTOP)
            # As long as two leases.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2 * settings.lease_s):
                    await made.goes_on(more=10_000)
            server.send(signal.SIGCONT)
            await made.goes_on(more=100)
            assert await counters(settings, "reaped", "fenced") == before


@pytest.mark.slow
async def test_a_full_memory_drains_and_goes_on() -> None:
    with own_server() as server:
        settings = short(server)
        async with stream(settings, size_bytes=1000) as made:
            await made.goes_on()
            server.configure("maxmemory", "1")
            # What is in flight ends, and nothing is taken in.
            await eventually(lambda: _is_empty(settings))
            server.configure("maxmemory", "0")
            await made.goes_on()


async def test_a_worker_joins_a_full_server_and_stays() -> None:
    with own_server("--maxmemory", "1") as server:
        settings = short(server)
        async with working(settings):
            with redis.Redis.from_url(settings.url) as connection:
                # It has no place any more, and enters the fleet again.
                connection.flushall()

            async def is_known() -> bool:
                return bool((await look(settings)).workers)

            await eventually(is_known)
            server.configure("maxmemory", "0")
            async with AsyncLeanQClient(settings) as lean:
                assert await lean.echo(b"x") == b"x"


async def _is_empty(settings: Settings) -> bool:
    status = await look(settings)
    return not status.priorities and not any(row.held for row in status.workers)


@pytest.mark.slow
async def test_eviction_of_whatever_may_be_evicted_loses_no_request() -> None:
    with own_server("--maxmemory-policy", "volatile-lru") as server:
        settings = short(server)
        async with stream(settings, size_bytes=30_000) as made:
            await made.goes_on()
            with redis.Redis.from_url(settings.url) as connection:
                used = connection.info("memory")["used_memory"]
                server.configure("maxmemory", str(used + 500_000))
                await made.goes_on(more=300)
                assert connection.info("stats")["evicted_keys"] > 0


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Server, Server, Settings]]:
    """A master, its replica, and a queue whose URL names both."""
    ports = free_ports(2)
    with (
        own_server(*LASTING, "--port", str(ports[0])) as first,
        own_server(*LASTING, "--port", str(ports[1])) as second,
    ):
        call(second, "REPLICAOF", "127.0.0.1", ports[0])
        url = f"redis://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
        yield first, second, Settings(url=url, lease_s=1.2)


def call(server: Server, *words: str | int) -> object:
    with redis.Redis.from_url(server.settings.url) as connection:
        return connection.execute_command(*words)


def is_linked(server: Server) -> bool:
    with redis.Redis.from_url(server.settings.url) as connection:
        return bool(connection.info("replication").get("master_link_status") == "up")


@pytest.mark.slow
async def test_promotion_of_a_replica(pair: tuple[Server, Server, Settings]) -> None:
    first, second, settings = pair
    await eventually(lambda: is_linked(second))
    async with stream(settings) as made:
        await made.goes_on()
        # The master dies and forgets its last writes, as replication is asynchronous.
        first.stop()
        call(second, "REPLICAOF", "NO", "ONE")
        await made.goes_on()
        # The old one comes back as a replica, and then they change places in good order: those
        # connected meet READONLY.
        await asyncio.to_thread(first.start)
        call(first, "REPLICAOF", "127.0.0.1", settings.url.rpartition(":")[2])
        await eventually(lambda: is_linked(first))
        call(second, "FAILOVER")
        await eventually(lambda: call(second, "ROLE")[0] == b"slave")
        await made.goes_on()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgotten", "done"),
    [
        (("submit",), ("submit",)),
        (("submit", "claim"), ("submit", "claim")),
        (("submit", "claim", "settle"), ("submit", "claim", "settle")),
        (("claim",), ("submit", "claim")),
        (("claim", "settle"), ("submit", "claim", "settle")),
        (("settle",), ("submit", "claim", "settle")),
    ],
    ids=lambda steps: " ".join(steps),
)
async def test_a_replica_that_never_had_the_last_writes(
    pair: tuple[Server, Server, Settings], forgotten: tuple[str, ...], done: tuple[str, ...]
) -> None:
    """Whatever it lacks, who sent a request has its reply, and who else asks is told."""
    first, second, settings = pair
    await eventually(lambda: is_linked(second))
    async with working(settings):
        # Its environment is known from now on.
        pass
    driver = Recorder()
    payloads = [b"held", b"held, of a size that no script carries".ljust(100_000)]
    ids = [f"0-{number}" for number in range(len(payloads))]
    async with contextlib.AsyncExitStack() as at_end, AsyncLeanQClient(settings) as lean:
        sent: list[asyncio.Task[bytes]] = []

        async def step(name: str) -> None:
            match name:
                case "submit":
                    for payload, request_id in zip(payloads, ids, strict=True):
                        echo = lean.echo(payload, request_id=request_id)
                        sent.append(asyncio.create_task(echo))
                    await eventually(lambda: has_submitted(settings, len(payloads)))
                case "claim":
                    await at_end.enter_async_context(working(settings, driver))
                    await eventually(lambda: sorted(driver.running) == sorted(payloads))
                case "settle":
                    driver.gate.set()
                    assert await asyncio.gather(*sent) == payloads

        for name in done:
            if name == forgotten[0]:
                assert call(first, "WAIT", 1, 20_000) == 1
                call(second, "REPLICAOF", "NO", "ONE")
            await step(name)
        first.stop()
        async with AsyncLeanQClient(settings) as other:
            attached = [asyncio.create_task(other.attach(request_id)) for request_id in ids]
            for name in ("claim", "settle"):
                if name not in done:
                    await step(name)
            ends = await asyncio.gather(*attached, return_exceptions=True)
        for end, payload in zip(ends, payloads, strict=True):
            assert isinstance(end, LostError) or getattr(end, "payload", None) == payload, end
        # A worker has nothing left that the new primary believes it to have.
        await eventually(lambda: is_empty(settings))


async def has_submitted(settings: Settings, count: int) -> bool:
    return await counters(settings, "submitted") == [count]


async def is_empty(settings: Settings) -> bool:
    status = await look(settings)
    return not status.priorities and not any(row.held for row in status.workers)


@pytest.mark.slow
async def test_workers_and_clients_start_where_the_first_host_is_the_replica(
    pair: tuple[Server, Server, Settings],
) -> None:
    _, second, settings = pair
    await eventually(lambda: is_linked(second))
    hosts = settings.url.removeprefix("redis://").split(",")
    turned = replace(settings, url=f"redis://{hosts[1]},{hosts[0]}")
    async with stream(turned) as made:
        await made.goes_on()


async def test_where_all_servers_are_replicas_that_is_said(
    pair: tuple[Server, Server, Settings],
) -> None:
    first, _, settings = pair
    call(first, "REPLICAOF", "127.0.0.1", settings.url.rpartition(":")[2])
    queue = Queue(settings)
    try:
        said = r"(?i)read.only.*; no other server that was named takes writes"
        with pytest.raises(UnavailableError, match=said):
            await queue.call(lambda client: client.set("x", "y"))
    finally:
        await queue.close()


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b":1\r\n", b"*0\r\n", b"$0\r\n\r\n", b"*2\r\n*0\r\n:1\r\n"]
)
async def test_what_is_no_redis_is_told_from_one(answer: bytes) -> None:
    """To whatever it is asked it gives an answer of Redis' protocol that means nothing."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(65536):
            # As many answers as commands have come.
            writer.write(answer * request.count(b"*"))
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(UnavailableError, match="what answers there is no Redis"):
            await asyncio.wait_for(look(Settings(f"redis://{host}:{port}")), 60)


async def test_the_doctor_repeats_what_a_server_says_to_whoever_connects() -> None:
    """As Redis does in protected mode to other machines, and with too many clients."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-DENIED Redis is running in protected mode\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        (found,) = await server_findings(f"redis://{host}:{port}")
    assert not found.works
    assert found.text.endswith("it says: DENIED Redis is running in protected mode")
