"""The loop around the scaler's decision, and processes here as whom it orders from."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from support.fleet.scalers import Loop
from support.fleets import ask, until, working
from support.lean.sandboxes import children, running
from support.metrics import parsed, port_in, scrape
from support.queue.queues import Queue
from support.servers import Server
from support.terminals import Terminal, ended, wait_for_line
from support.waiting import eventually

from leanq.cli import cli
from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import UnknownEnvironmentError
from leanq.fleet.scaler.local import LocalTarget
from leanq.fleet.scaler.targets import Ordered
from leanq.fleet.stats import DecisionRecord, FleetStats, decisions_of, fleet_stats, unsized
from leanq.queue.results import Status
from leanq.queue.settings import Settings

NO_WORKERS = FleetStats(0.0, Status({}, {}, (), (), {}, 0), {})


# The loop


@pytest.fixture
def lean(settings: Settings) -> Iterator[LeanQClient]:
    with LeanQClient(settings) as made:
        yield made


async def test_what_a_scaler_sizes_is_known_before_its_first_worker(
    settings: Settings, queue: Queue
) -> None:
    await queue.register("w", b"", {"other": b""})
    async with AsyncLeanQClient(settings) as lean:
        with pytest.raises(UnknownEnvironmentError, match="known: other"):
            await ask(lean, b"refused")
        await Loop(settings, slots=1, max_workers=1).tick()
        asked = asyncio.create_task(ask(lean, b"taken"))
        async with working(settings):
            assert (await asked).payload == b"taken"
    await queue.release("w", [], leave=True)


async def test_a_backlog_is_ordered_for_and_an_empty_queue_is_not(
    settings: Settings, queue: Queue, lean: LeanQClient
) -> None:
    loop = Loop(settings, slots=2, max_workers=50)
    assert (await loop.tick()).target == 0
    futures = [lean.echo(bytes([n]), delay_s=1) for n in range(200)]
    await eventually(lambda: lean_knows(settings, 200))
    decision = await loop.tick()
    assert 1 <= decision.target == loop.target.orders[-1] <= 50
    assert loop.told[-1][1].queued == 200
    # The same again orders nothing more.
    again = await loop.tick()
    assert again.target == decision.target
    samples = {(name, labels): value for name, labels, value in loop.scaler.samples()}
    assert samples["leanq_up", ()] == 1
    assert samples["leanq_scaler_leader", ()] == 1
    assert samples["leanq_scaler_target_workers", ("echo",)] == decision.target
    assert samples["leanq_scaler_input", ("echo", "queued")] == 200
    for future in futures:
        future.cancel()
    # One that is claimed before it is withdrawn would have to be settled.
    await eventually(lambda: lean_knows(settings, 0))
    await queue.claim("sweeper", ["echo"], 1, busy=0, token="t" * 12 + ":")
    await queue.release("sweeper", [], leave=True)


async def lean_knows(settings: Settings, count: int) -> bool:
    environments = (await fleet_stats(settings)).environments
    return "echo" in environments and environments["echo"].waiting == count


async def test_one_that_does_not_lead_orders_nothing(settings: Settings, queue: Queue) -> None:
    loop = Loop(settings, min_workers=3)
    loop.target.leading = False
    assert (await loop.tick()).target == 3
    assert loop.target.orders == []
    loop.target.leading = True
    await loop.tick()
    assert loop.target.orders == [3]


async def test_without_statistics_the_order_is_held(one: Server) -> None:
    loop = Loop(one.settings, min_workers=3)
    await loop.tick()
    one.stop()
    for _ in range(5):
        decision = await loop.tick()
    assert (decision.reason, decision.target) == ("stale", 3)
    samples = {(name, labels): value for name, labels, value in loop.scaler.samples()}
    assert samples["leanq_up", ()] == 0
    assert samples["leanq_scaler_stale", ("echo",)] == 1


async def test_a_target_in_trouble_is_asked_again(settings: Settings, queue: Queue) -> None:
    loop = Loop(settings, min_workers=2)
    loop.target.broken = True
    loop.now += 15
    await loop.scaler.tick()
    assert ("leanq_scaler_errors_total", ("echo",), 1) in list(loop.scaler.samples())
    loop.target.broken = False
    await loop.tick()
    assert loop.target.orders == [2]


async def test_the_one_that_leads_tells_the_queue(settings: Settings, queue: Queue) -> None:
    loop = Loop(settings, min_workers=3)
    loop.target.leading = False
    await loop.tick()
    assert (await queue.status()).decisions == {}
    loop.target.leading = True
    decision = await loop.tick()
    told = decisions_of(await queue.status())["echo"]
    assert told == DecisionRecord(told.at, 3, 0, decision.reason, decision.text, "tester")
    assert told.at == pytest.approx(time.time(), abs=60)
    assert 0 < await queue.call(lambda c: c.pttl(queue.keys.of("scaler"))) <= 600_000


# Processes on this machine


@pytest.mark.slow
async def test_workers_on_this_machine(settings: Settings, queue: Queue) -> None:
    environ = {**os.environ, "LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix}
    before = set(children(os.getpid()))
    target = LocalTarget("--driver echo --slots 1", environ, ["echo"])
    assert await target.look("echo", NO_WORKERS) == Ordered(0)
    await target.order("echo", 2, NO_WORKERS)
    try:
        ordered = await target.look("echo", NO_WORKERS)
        assert (ordered.order, len(ordered.starting_s)) == (2, 2)
        await eventually(lambda: workers_are(settings, 2))
        ordered = await target.look("echo", await fleet_stats(settings))
        assert (ordered.order, ordered.starting_s, len(ordered.started_s)) == (2, (), 2)
        await target.order("echo", 1, await fleet_stats(settings))
        assert (await target.look("echo", await fleet_stats(settings))).order == 1
        await eventually(lambda: workers_are(settings, 1))
    finally:
        pids = set(children(os.getpid())) - before
        assert pids
        await target.close()
    assert not any(map(running, pids))
    await eventually(lambda: workers_are(settings, 0))


@pytest.mark.slow
async def test_the_idle_one_goes(settings: Settings, queue: Queue, lean: LeanQClient) -> None:
    environ = {**os.environ, "LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix}
    target = LocalTarget("--driver echo --slots 1", environ, ["echo"])
    await target.order("echo", 2, NO_WORKERS)
    try:
        await eventually(lambda: workers_are(settings, 2))
        future = lean.echo(b"long", delay_s=60)
        await eventually(lambda: running_are(settings, 1))
        seen = await fleet_stats(settings)
        (busy,) = (row.worker for row in seen.status.workers if row.held)
        await target.look("echo", seen)
        await target.order("echo", 1, seen)
        await eventually(lambda: workers_are(settings, 1))
        assert [row.worker for row in (await fleet_stats(settings)).status.workers] == [busy]
        future.cancel()
    finally:
        await target.close()


async def running_are(settings: Settings, count: int) -> bool:
    return sum(row.held for row in (await fleet_stats(settings)).status.workers) == count


async def workers_are(settings: Settings, count: int) -> bool:
    return len((await fleet_stats(settings)).status.workers) == count


@pytest.mark.slow
def test_a_fleet_follows_a_burst_up_and_down(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    options = ["--target", "local", "--worker", "--driver echo --slots 4", "--slots", "4"]
    pace = ["--env", "echo", "--every", "0.3s", "--deadline", "9s", "--max-workers", "3"]
    pace += ["--scale-down-delay", "2s"]
    scaler = terminal.start("scale", *options, *pace, "--port", "0", "--json")
    port = port_in(wait_for_line(scaler.stderr, "metrics of this scaler"))
    with LeanQClient(settings) as lean:
        futures = [lean.echo(b"%d" % n, delay_s=0.2) for n in range(150)]
        assert [future.result(60) for future in futures] == [b"%d" % n for n in range(150)]
    finished = 'leanq_requests_finished_total{environment="echo",verdict="echo"}'
    until(lambda: parsed(scrape(port)[1]).get(finished) == 150)
    # On a busy machine a look may be older than two of these short intervals.
    until(lambda: parsed(scrape(port)[1])["leanq_up"] == 1)
    assert parsed(scrape(port)[1])["leanq_scaler_leader"] == 1
    targets: list[int] = []
    assert scaler.stdout is not None
    for line in scaler.stdout:
        targets.append(json.loads(line)["target"])
        # Nothing waits, so it goes down to no worker again.
        if max(targets) > 0 and targets[-1] == 0:
            break
    until(lambda: terminal.run("status", "--json").lines[0]["scaler"]["echo"]["target"] == 0)
    assert "scaler      echo: 0 workers wanted, " in terminal.run("status").out
    assert 1 < max(targets) <= 3
    scaler.send_signal(signal.SIGINT)
    done = ended(scaler)
    assert done.code == 0
    # Those of its workers, too.
    lines = [json.loads(line) for line in done.err.splitlines()]
    assert any("serves" in line["message"] for line in lines)


@pytest.mark.slow
def test_no_cluster_and_options_that_make_no_sense(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    done = terminal.run("scale", "--target", "k8s")
    assert done.code == 2
    assert "no Kubernetes cluster" in done.err
    done = terminal.run("scale", "--target", "print", "--min-workers", "5", "--max-workers", "2")
    assert (done.code, "expected 0 ≤ min_workers" in done.err) == (2, True)
    done = terminal.run("scale", "--target", "local", "--worker", "'x")
    assert (done.code, "cannot be read" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("local --deployment x", "--deployment is for --target k8s, got --target local"),
        ("print --worker x", "--worker is for --target local or ray, got --target print"),
        ("local --env a --env b", "--target local starts workers of one kind, got 2 environments"),
        ("ray --env a --env b", "got 2 environments; put {env} into --worker, as in"),
        ("k8s --env a --env b", "2 environments would size 'leanq-worker' in turns"),
        ("k8s --env a --env b --hpa x", "2 environments would size 'x' in turns"),
        ("print --deadline 300", "'300' is not a duration; expected 90s, 30m, 24h or 1d"),
    ],
)
def test_options_that_do_not_go_together(settings: Settings, options: str, text: str) -> None:
    words = ["scale", "--url", settings.url, "--target", *options.split()]
    done = CliRunner().invoke(cli, words)
    assert text in (done.output or "") + str(done.exception)
    assert done.exit_code != 0


# Environments that are in no scaler's hands


async def test_requests_that_no_scaler_sizes_are_warned_of(
    settings: Settings, queue: Queue, lean: LeanQClient, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(settings, environment="default")
    await loop.tick()
    future = lean.echo(b"waits", delay_s=1)
    await eventually(lambda: lean_knows(settings, 1))
    await loop.tick()
    await loop.tick()
    warned = [each for each in caplog.messages if "no scaler sizes" in each]
    assert warned == [
        "1 request waits in echo, which no scaler sizes (this one: default) and no worker offers: "
        "name it with --env, or start workers for it"
    ]
    assert ("leanq_scaler_unsized_requests", ("echo",), 1) in list(loop.scaler.samples())
    assert unsized(await fleet_stats(settings), []) == {"echo": 1}
    # What another scaler sizes is in good hands.
    other = Loop(settings)
    await other.tick()
    assert unsized(await fleet_stats(settings), []) == {}
    await loop.tick()
    assert not [
        each for each in loop.scaler.samples() if each[0] == "leanq_scaler_unsized_requests"
    ]
    future.cancel()
    await eventually(lambda: lean_knows(settings, 0))
    await queue.claim("sweeper", ["echo"], 1, busy=0, token="t" * 12 + ":")
    await queue.release("sweeper", [], leave=True)


@pytest.mark.slow
async def test_status_names_what_no_scaler_sizes(
    terminal: Terminal, settings: Settings, queue: Queue, lean: LeanQClient
) -> None:
    terminal.use(settings)
    future = lean.echo(b"waits", delay_s=1)
    await eventually(lambda: lean_knows(settings, 1))
    assert "unserved    1 request of echo, which no living worker offers" in (
        terminal.run("status").out
    )
    await Loop(settings, environment="default").tick()
    said = terminal.run("status").out
    assert "unsized     1 request of echo, which no scaler sizes" in said
    await Loop(settings).tick()
    said = terminal.run("status").out
    assert "unsized" not in said
    assert "unserved" not in said
    future.cancel()
    await eventually(lambda: lean_knows(settings, 0))
    await queue.claim("sweeper", ["echo"], 1, busy=0, token="t" * 12 + ":")
    await queue.release("sweeper", [], leave=True)
