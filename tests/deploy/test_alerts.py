"""Each alert fires, in a real Prometheus, over a real fault. A minute of its rules takes a second.

What cannot be had so stands in ``BY_PROMTOOL_ALONE``, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import redis
from msgspec import structs
from support.campaigns.campaigns import Desk
from support.cluster import free_ports
from support.fleet.manifests import read
from support.fleet.prometheus import prometheus
from support.fleet.scalers import Loop
from support.fleets import ask, counter, echo_body, new_token, serving, submission, until, working
from support.gateway.gateways import key_file, new_gateway, reply_with
from support.gateway.pages import bury
from support.metrics import port_in
from support.producer.troubled_machine import COMPILER, TroubledMachine
from support.queue.queues import Queue
from support.queue.stores import packed
from support.required import missing
from support.servers import Server, own_server
from support.terminals import Terminal, wait_for_line
from support.waiting import eventually

import leanq.gateway.app
from leanq.client import AsyncLeanQClient
from leanq.commands.worker import metrics_page
from leanq.errors import LeanQError, ToolchainError
from leanq.fleet.prometheus import Page, Sample, counted_samples, fleet_samples
from leanq.fleet.stats import fleet_stats
from leanq.gateway.keys import KeyFile
from leanq.lean.driver import EchoDriver
from leanq.queue.keys import new_request_id
from leanq.queue.requests import Reply, Request, Verdict
from leanq.queue.results import Settlement, Submission
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply
from leanq.states import RedisStates

pytestmark = pytest.mark.slow

FLEET = (
    *("LeanQNoWorkers", "LeanQStalled", "LeanQBacklogWillNotClear", "LeanQHeldBack"),
    *("LeanQIdleWhileWorkWaits", "LeanQDeadLetters", "LeanQCrashes", "LeanQWorkersVanish"),
    *("LeanQLateResults", "LeanQUnjudged", "LeanQTimeouts", "LeanQFingerprintsDiffer"),
    *("LeanQWorkersDegraded", "LeanQSnapshotsThrash", "LeanQLeanBroken", "LeanQTenantFloods"),
    *("LeanQOtherRelease", "LeanQRequestsLost"),
)
SERVERS = (
    *("LeanQRedisMemoryHigh", "LeanQRedisMemoryFull", "LeanQRedisConnections"),
    *("LeanQRedisReplicas", "LeanQRedisPersistence", "LeanQRedisSlowDisk", "LeanQRedisErrors"),
)
ALONE = ("LeanQOldestWaiting", "LeanQRedisUnreachable", "LeanQExporterGone")
SCALERS = (
    *("LeanQScalerTwoLeaders", "LeanQScalerErrors", "LeanQUnsizedRequests", "LeanQTooFewWorkers"),
    *("LeanQScalerWithoutLeader", "LeanQScalerStale"),
)
GATEWAY = (
    *("LeanQGatewayKeysRefused", "LeanQGatewayLimits", "LeanQGatewayConnections"),
    *("LeanQGatewayMemory", "LeanQGatewaySlow", "LeanQGatewayErrors"),
)
CAMPAIGNS = ("LeanQCampaignStalled", "LeanQCampaignFailed", "LeanQCampaignWorkersGone")
BY_PROMTOOL_ALONE = {
    "LeanQRedisBusy": "a server's thread needs a CPU to itself, which a machine of tests has not",
    "LeanQWorkerStands": "a request has to run for a minute and a half, which no test waits for",
}


def test_each_alert_fires_here_or_says_why_not() -> None:
    groups = read("deploy/observability/alerts.yaml")["groups"]
    fired = [*FLEET, *SERVERS, *ALONE, *SCALERS, *GATEWAY, *CAMPAIGNS, *BY_PROMTOOL_ALONE]
    assert sorted(fired) == sorted(rule["alert"] for group in groups for rule in group["rules"])


def _page(settings: Settings) -> Page:
    """An exporter of the fleet's, in a thread."""

    def look() -> Iterable[Sample]:
        return fleet_samples(asyncio.run(fleet_stats(settings)))

    return Page(0, look)


@contextlib.asynccontextmanager
async def again_and_again(
    pause_s: float, *each: Callable[[], Awaitable[object]]
) -> AsyncIterator[None]:
    """Does each of these with pauses between, until the context ends."""

    async def forever(once: Callable[[], Awaitable[object]]) -> None:
        while True:
            await once()
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(forever(once)) for once in each]
        yield
        for task in tasks:
            task.cancel()


# A fleet


class _Ends(EchoDriver):
    """A driver whose requests all end in one way, and which is not as others are."""

    def __init__(self, environment: str, verdict: Verdict = "accepted", mark: str = "1") -> None:
        self.environment = environment
        self._verdict = verdict
        self._mark = mark

    @property
    def about(self) -> dict[str, object]:
        about: dict[str, object] = {"driver": "echo", "fingerprint": self._mark * 64}
        return about | {"degraded": "its fork server does not serve"}

    async def run(self, request: Request) -> Reply:
        await asyncio.sleep(request.delay_s)
        return structs.replace(reply_with(self._verdict), cpu_s=0.1)


class _Broken(_Ends):
    """Lean does not work there, and does not come to an end when it is tried."""

    async def run(self, request: Request) -> Reply:
        raise ToolchainError("no such file")

    async def prove(self) -> None:
        await asyncio.Event().wait()


async def _lapse(queue: Queue) -> None:
    """A worker claims a request, dies, and comes back too late with its result."""
    request_id, ghost, token = new_request_id(1), new_token(), new_token()
    before = await counter(queue, "reaped")

    async def claimed() -> bool:
        return bool((await queue.claim(ghost, ["ghosts"], 1, busy=0, token=token)).jobs)

    async def reaped() -> bool:
        await queue.reap()
        return await counter(queue, "reaped") > before

    try:
        await queue.register(ghost, b"", {"ghosts": b""})
        await queue.submit("nobody", [_item(request_id, "ghosts")])
        await eventually(claimed)
        await eventually(reaped)
        late = Settlement(request_id, token, "accepted", pack_reply(token, Reply("accepted")))
        await queue.claim(ghost, ["ghosts"], 0, busy=0, token=new_token(), settlements=[late])
    finally:
        await queue.cancel([request_id])
        await queue.release(ghost, [], leave=True)


def _item(request_id: str, environment: str, delay_s: float = 0.0) -> Submission:
    item = submission(request_id, echo_body(b"", delay_s))
    return structs.replace(item, environment=environment)


@pytest.mark.usefixtures("swept")
async def test_a_fleet_in_trouble(settings: Settings, tmp_path: Path) -> None:
    settings = replace(settings, lease_s=1.0, snapshot_mb=1, max_attempts=1000)
    queue = Queue(settings)
    waiting = [new_request_id(1) for _ in range(700)]
    where = ["nobody", "paused", "idle", "broken", *["backlog"] * 687]
    states = RedisStates([queue])
    kept = iter(range(1_000_000))

    async def keep() -> None:
        await states.keep_snapshot(f"k{next(kept)}", packed(os.urandom(200_000)))

    async with contextlib.AsyncExitStack() as stack:
        lean = await stack.enter_async_context(AsyncLeanQClient(settings))
        for driver in (
            _Ends("crashing", "crashed"),
            _Ends("unjudged", "unjudged"),
            _Ends("slow", "timeout"),
            _Ends("well"),
            _Ends("well", mark="2"),
        ):
            await stack.enter_async_context(working(settings, driver))
        await stack.enter_async_context(working(settings, _Ends("backlog"), slots=1))
        broken = await stack.enter_async_context(working(settings, _Broken("broken")))
        idle = await stack.enter_async_context(working(settings, _Ends("idle")))
        idle.slot_pool.breaker.pause(3600.0)
        await queue.register("gone", b"", {"nobody": b"", "paused": b""})
        await queue.release("gone", [], leave=True)
        await queue.set_paused("environment", "paused", paused=True)
        # Another release wrote one request, and the server lost where the other one waits.
        other = structs.replace(_item("0-other", "nobody"), tenant="other")
        await queue.submit("nobody", [other, structs.replace(other, request_id="0-lost")])
        await queue.call(lambda c: c.set(queue.keys.request("0-other"), b"\x04"))
        place = queue.keys.of("wait", "nobody", 1, "other")
        await queue.call(lambda c: c.lrem(place, 1, "0-lost"))
        await queue.claim("gone", ["nobody"], 1, busy=0, token="gone:")
        page = stack.enter_context(_page(settings))
        own = stack.enter_context(metrics_page(broken, 0, "127.0.0.1"))
        assert isinstance(own, Page)
        seen = stack.enter_context(prometheus(tmp_path, [page.port, own.port]))
        # Another one uses what the tenant of the long queue does, while Prometheus looks.
        others = [_item(each, "backlog", 2.0) for each in waiting[-9:]]
        await queue.submit("nobody", [structs.replace(each, tenant="other") for each in others])
        await queue.submit(
            "nobody", [_item(*each, 4.0) for each in zip(waiting, where, strict=False)]
        )
        asked = [
            lambda name=name: ask(lean, os.urandom(8), environment=name)
            for name in ("crashing", "unjudged", "slow", "well")
        ]
        async with (
            again_and_again(1.0, *asked),
            again_and_again(0.1, lambda: _lapse(queue), keep),
        ):
            await seen.fires("LeanQNoWorkers")
            await bury(settings, new_request_id(1), tenant="t", code="x", environment="backlog")
            await seen.fires(*FLEET)
        await queue.cancel([*waiting, "0-lost"])
        await queue.set_paused("environment", "paused", paused=False)
    await queue.close()


# Its server


async def test_servers_in_trouble(tmp_path: Path) -> None:
    """One waits for its disk, has lost its replica and has few connections left; the other has no
    memory, and cannot save."""
    if COMPILER is None:
        missing("a compiler (cc)")
    machine = TroubledMachine(tmp_path / "machine")
    (port,) = free_ports(1)
    options = ("--port", str(port), "--appendonly", "yes", "--maxclients", "60")
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(own_server(*options, environ=machine.environ))
        # As few connections, since Prometheus takes both for the same shard.
        full = stack.enter_context(own_server("--maxclients", "60"))
        replica = stack.enter_context(own_server("--replicaof", f"127.0.0.1 {port}"))
        there, here = (
            stack.enter_context(redis.Redis.from_url(server.settings.url))
            for server in (slow, full)
        )
        until(lambda: there.info("replication")["connected_slaves"] == 1)
        pages = [_page(slow.settings), _page(full.settings), Page(0, counted_samples)]
        ports = [stack.enter_context(page).port for page in pages]
        # The server counts a write that has waited for two seconds; seconds have none of these.
        seen = stack.enter_context(prometheus(tmp_path, ports, minute_s=4.0))
        await seen.tells("leanq_redis_replicas == 1")
        replica.stop()
        machine.slow_down(4.0)
        for _ in range(50):
            held = stack.enter_context(socket.socket(socket.AF_UNIX))
            held.connect(f"{slow.folder}/server.sock")
        # A file without room for a single byte ends what saves.
        assert full.process
        resource.prlimit(full.process.pid, resource.RLIMIT_FSIZE, (1, 1))
        here.bgsave()
        here.config_set("maxmemory", here.info("memory")["used_memory"])

        async def write() -> None:
            await asyncio.to_thread(there.incr, "written")

        async def submit() -> None:
            with contextlib.suppress(LeanQError):
                await lean.echo(b"x")

        async with (
            AsyncLeanQClient(full.settings, when_full="raise", no_worker="wait") as lean,
            again_and_again(0.1, write, submit),
        ):
            await seen.fires(*SERVERS)


async def test_a_server_and_its_exporter_go(
    one: Server, terminal: Terminal, tmp_path: Path
) -> None:
    terminal.use(one.settings)
    exporter = terminal.start("metrics", "--port", "0")
    port = port_in(wait_for_line(exporter.stderr, "metrics at"))
    with prometheus(tmp_path, [port]) as seen:
        await seen.tells("leanq_up == 1")
        one.stop()
        await seen.fires("LeanQRedisUnreachable")
        exporter.kill()
        await seen.fires("LeanQExporterGone")


async def test_a_request_waits_for_an_hour(tmp_path: Path) -> None:
    """By the clock of a server, which jumps."""
    if COMPILER is None:
        missing("a compiler (cc)")
    machine = TroubledMachine(tmp_path / "machine")
    with own_server(environ=machine.environ) as server:
        queue = Queue(server.settings)
        await queue.register("gone", b"", {"echo": b""})
        await queue.submit("nobody", [submission(new_request_id(1), echo_body(b""))])
        await queue.close()
        machine.set_clock(3700.0)
        with _page(server.settings) as page, prometheus(tmp_path, [page.port]) as seen:
            await seen.fires("LeanQOldestWaiting")


# A scaler


async def test_scalers_in_trouble(one: Server, tmp_path: Path) -> None:
    """Two act, on a target that fails, and want workers that do not come; then none acts, on old
    figures."""
    queue = Queue(one.settings)
    await queue.register("gone", b"", {"other": b""})
    await queue.release("gone", [], leave=True)
    await queue.submit("nobody", [_item(new_request_id(1), "other")])
    await queue.close()
    loops = [Loop(one.settings, min_workers=5), Loop(one.settings, min_workers=5)]
    with contextlib.ExitStack() as stack:
        for loop in loops:
            await loop.tick()
            loop.target.broken = True
        pages = [Page(0, loop.scaler.samples) for loop in loops]
        ports = [stack.enter_context(page).port for page in pages]
        seen = stack.enter_context(prometheus(tmp_path, ports))

        async def tick() -> None:
            for loop in loops:
                loop.now += 15
                await loop.scaler.tick()

        async with again_and_again(0.5, tick):
            await seen.fires(*SCALERS[:-2])
            for loop in loops:
                loop.target.broken = loop.target.leading = False
            one.stop()
            await seen.fires(*SCALERS[-2:])


# A gateway


def _as(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def test_a_gateway_in_trouble(
    one: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers flood it, it has few connections and much in memory; then its queue is lost."""
    monkeypatch.setattr(leanq.gateway.app, "most_connections", lambda: 20)
    keys = KeyFile(key_file(tmp_path, {"secret": "alice", "rate_per_s": 0.001}, {"secret": "bob"}))
    taken = bytearray(450_000_000)
    taken[::4096] = bytes(b"x" * len(taken[::4096]))
    async with new_gateway(one.settings, keys=keys, environment="echo") as gateway:

        async def ask_as(secret: str) -> None:
            # Until it knows that its queue is lost, it waits.
            with contextlib.suppress(httpx2.TimeoutException):
                await gateway.http.post(
                    "/v1/check", json={"code": "x"}, headers=_as(secret), timeout=2.0
                )

        async def hold_up() -> None:
            time.sleep(0.5)  # noqa: ASYNC251

        async with contextlib.AsyncExitStack() as stack:
            page = stack.enter_context(Page(0, gateway.metrics.samples))
            seen = stack.enter_context(prometheus(tmp_path, [page.port]))
            # Those without a key give way to one another, and silent ones are closed.
            many = [
                await stack.enter_async_context(
                    httpx2.AsyncClient(base_url=gateway.url, headers=_as("bob"))
                )
                for _ in range(17)
            ]

            async def stay() -> None:
                for each in many:
                    await each.get("/v1/status")

            callers = (lambda: ask_as("alice"), lambda: ask_as("mallory"), stay)
            async with again_and_again(0.1, *callers):
                await seen.fires(*GATEWAY[:-2])
            async with again_and_again(0.1, hold_up):
                await seen.fires(GATEWAY[-2])
            one.stop()
            async with again_and_again(0.1, lambda: ask_as("bob")):
                await seen.fires(GATEWAY[-1])
    del taken


# Campaigns


async def test_campaigns_in_trouble(desk: Desk, settings: Settings, tmp_path: Path) -> None:
    """One's data has gone, one waits for workers, and then the campaign worker dies."""
    worker = desk.terminal.start(
        "campaign", "worker", "--metrics-port", "0", stdout=subprocess.DEVNULL
    )
    port = port_in(wait_for_line(worker.stderr, "metrics of this campaign worker"))
    with prometheus(tmp_path, [port]) as seen:
        await seen.tells('leanq_campaigns{state="failed"} == 0')
        worker.send_signal(signal.SIGSTOP)  # or it might read the data first
        desk.send("x")
        (desk.folder / "c0.jsonl").unlink()
        worker.send_signal(signal.SIGCONT)
        await seen.fires("LeanQCampaignFailed")
        waits = desk.send("x")
        await seen.fires("LeanQCampaignStalled")
        worker.kill()
        worker.wait()
        await seen.fires("LeanQCampaignWorkersGone")
    with serving(settings, _Ends("echo")):
        desk.start_worker()
        desk.reaches(waits, "finished")
