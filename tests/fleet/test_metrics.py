"""Metrics: named well, counted rightly, and shown to every scraper."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import tempfile
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.cluster import free_ports
from support.fleets import counts, until, working
from support.gateway.gateways import Scripted, new_gateway
from support.lean.sandboxes import PYTHON, python
from support.metrics import parsed, port_in, scrape
from support.queue.queues import Queue
from support.servers import own_server
from support.terminals import Terminal, ended, samples, wait_for_line
from support.trainers.replays import open_memory
from support.waiting import eventually

from leanq import __version__
from leanq.client import AsyncLeanQClient
from leanq.commands.worker import metrics_page
from leanq.fleet import prometheus, tracing
from leanq.fleet.prometheus import Page, exposition, fleet_samples
from leanq.fleet.stats import Times, environments_of, fleet_stats
from leanq.lean.driver import EchoDriver
from leanq.lean.environment import Environment
from leanq.lean.sandbox.sandbox import Limits, Sandbox
from leanq.local import running
from leanq.queue import metrics
from leanq.queue.metrics import (
    BUCKETS_S,
    CAMPAIGNS,
    COUNTS,
    FLEET,
    GATEWAY,
    PROCESS,
    SCALER,
    WORKER,
)
from leanq.queue.requests import Reply, Request
from leanq.queue.results import tallies_of, times_of
from leanq.queue.settings import Settings
from leanq.worker import Worker

METRICS = (*FLEET, *SCALER, *WORKER, *CAMPAIGNS, *GATEWAY, *PROCESS)


class _Refuses(EchoDriver):
    async def run(self, request: Request) -> Reply:
        return Reply("incomplete", reason="sorry", cpu_s=1.5)


# Names


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"leanq(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")
        assert metric.text.endswith(".")
        assert set(metric.labels) <= {
            *("environment", "tenant", "state", "verdict", "input", "term"),
            *("reason", "program", "event", "kind", "memory", "lean", "kernel"),
            *("shard", "route", "status", "version"),
        }


# Exemplars


async def test_the_latest_sampled_request_is_an_exemplar_and_has_its_spans(
    settings: Settings, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the HTTP request to what a scraper sees, with an attempt that was lost."""
    monkeypatch.setattr(metrics, "EXEMPLARS", fresh := {})
    monkeypatch.setattr(prometheus, "EXEMPLARS", fresh)
    provider, seen = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    made = tracing.Tracer(provider.get_tracer("test"), provider.force_flush)
    monkeypatch.setattr(tracing, "_made", [made])
    worker = Worker(settings, [_Refuses()], slots=1)
    async with new_gateway(settings) as gateway:

        async def check(trace: str, flags: str, **fields: float) -> Any:
            given = {"traceparent": f"00-{trace * 32}-{'d' * 16}-{flags}"}
            text = {"code": f"-- {trace}", "environment": "echo", **fields}
            return (await gateway.http.post("/v1/check", json=text, headers=given)).json()

        first = asyncio.create_task(check("a", "01"))
        await eventually(counts(queue, "submitted", 1))
        late = asyncio.create_task(check("e", "01", deadline_s=0.001))
        await eventually(counts(queue, "submitted", 2))
        (job,) = (await queue.claim("first", ["echo"], 1, busy=0, token="t:")).jobs
        await queue.release("first", [(job.request_id, job.token)], how="retry", leave=True)
        async with running(worker):
            ends = [await first, await late, await check("c", "01"), await check("b", "00")]
            with (
                metrics_page(worker, 0, "127.0.0.1") as of_worker,
                Page(0, gateway.metrics.samples) as of_gateway,
            ):
                (count,) = await asyncio.to_thread(_exemplars, of_worker)
                found = await asyncio.to_thread(_exemplars, of_gateway)
    assert [end["verdict"] for end in ends] == ["incomplete", "expired", *["incomplete"] * 2]
    (bucket,) = (each for each in found if each.name != count.name)
    assert (count.name, count.labels) == ("leanq_worker_requests_total", {"verdict": "incomplete"})
    edge = BUCKETS_S[bisect_left(BUCKETS_S, bucket.exemplar.value)]
    labels = {"route": "/v1/check", "le": f"{edge:g}"}
    assert (bucket.name, bucket.labels) == ("leanq_http_request_seconds_bucket", labels)
    assert count.exemplar.labels == bucket.exemplar.labels == {"trace_id": "c" * 32}

    of_all: list[Any] = [*seen.get_finished_spans()]
    traces = {each.context.trace_id for each in of_all}
    assert traces == {int(name * 32, 16) for name in "ace"}
    # What has not run has no phases.
    of_late = {each.name for each in of_all if each.context.trace_id == int("e" * 32, 16)}
    assert of_late == {"POST /v1/check", "check echo", "send echo"}
    spans = [each for each in of_all if each.context.trace_id == int("a" * 32, 16)]
    names = {each.context.span_id: each.name for each in spans} | {int("d" * 16, 16): "caller"}
    assert {each.name: names[each.parent.span_id] for each in spans} == {
        "POST /v1/check": "caller",
        "check echo": "POST /v1/check",
        **dict.fromkeys(("send echo", "reply"), "check echo"),
        **dict.fromkeys(("waited", "lost", "process echo"), "send echo"),
        **dict.fromkeys(("claimed", "elaborated"), "process echo"),
    }
    # Of two of one name the last: behind the attempt that was lost.
    by_name = {each.name: each for each in spans}
    chain = [by_name[name] for name in ("lost", "waited", "claimed", "elaborated", "reply")]
    assert all(before.end_time == after.start_time for before, after in pairwise(chain))
    process = by_name["process echo"]
    ran = (chain[2].start_time, chain[3].end_time)
    assert (process.start_time, process.end_time) == ran
    assert process.attributes["messaging.client.id"] == ends[0]["worker"]
    assert process.attributes["leanq.attempt"] == 2
    lost = {"messaging.client.id": "first", "leanq.end": "its worker failed at it"}
    assert by_name["lost"].attributes == lost


def _exemplars(page: Any) -> list[Any]:
    """The samples of a page that have an example, for those that ask for such."""
    url = f"http://127.0.0.1:{page.port}/metrics"
    assert "trace_id" not in httpx2.get(url).text
    text = httpx2.get(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}).text
    families = text_string_to_metric_families(text)
    return [each for family in families for each in family.samples if each.exemplar]


# Times


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_times_are_counted_to_two_digits(waited_s: float, ran_s: float) -> None:
    tallies = tallies_of({("echo", times_of(waited_s, ran_s)): 2})
    sums = {what: tallies[f"{what}_ms:echo"] / 2 for what in "wrt"}
    for what, ms in sums.items():
        bucket = bisect_left(BUCKETS_S, ms / 1000)
        assert {name: n for name, n in tallies.items() if name.startswith(f"{what}:")} == {
            f"{what}:echo:{bucket}": 2
        }
    for what, s in (("w", waited_s), ("r", ran_s)):
        assert sums[what] == pytest.approx(s * 1000, rel=0.051, abs=0.5001)
    assert sums["t"] == sums["w"] + sums["r"]


# The fleet's


async def test_every_request_is_counted_in_its_environment(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    worker = Worker(settings, [EchoDriver()], slots=3)
    async with running(worker):
        for delay_s in (0.0, 0.03):
            payloads = [lean.echo(bytes([n]), delay_s=delay_s) for n in range(20)]
            for payload in payloads:
                await payload
        await eventually(counts(queue, "settled", 40))
        seen = await fleet_stats(settings)
        assert seen.memory_bytes > 100_000
        environment = seen.environments["echo"]
        assert (environment.workers, environment.slots, environment.busy, environment.running) == (
            1,
            3,
            0,
            0,
        )
    status = await queue.status()
    environment = environments_of(status)["echo"]
    assert (environment.submitted, dict(environment.finished)) == (40, {"echo": 40})
    for times in (environment.waited, environment.ran, environment.took):
        assert sum(times.counts) == 40
    # Those of 30 ms, and not the others unless the machine was slow.
    edge = bisect_left(BUCKETS_S, 0.03)
    assert sum(environment.ran.counts[edge:]) >= 20
    assert 0.6 <= environment.ran.sum_s <= environment.took.sum_s
    assert environment.took.sum_s == pytest.approx(environment.waited.sum_s + environment.ran.sum_s)
    assert (environment.workers, environment.slots) == (0, 0)


async def test_cpu_time_is_counted_by_environment_and_tenant(
    settings: Settings, queue: Queue
) -> None:
    await queue.set_weight("b", 2.5)
    async with running(Worker(settings, [_Refuses()], slots=1)):
        for tenant, count in (("a", 1), ("b", 2)):
            async with AsyncLeanQClient(settings, tenant=tenant) as lean:
                for number in range(count):
                    await lean.check(f"theorem t{number}{tenant} : False := sorry", env="echo")
        await eventually(counts(queue, "reason:sorry", 3))
        found = list(fleet_samples(await fleet_stats(settings)))
    await queue.set_weight("b", None)
    assert environments_of(await queue.status())["echo"].reasons == {"sorry": 3}
    assert ("leanq_cpu_seconds_total", ("echo",), 4.5) in found
    assert ("leanq_tenant_cpu_seconds_total", ("echo", "a"), 1.5) in found
    assert ("leanq_tenant_cpu_seconds_total", ("echo", "b"), 3.0) in found
    assert ("leanq_tenant_weight", ("b",), 2.5) in found


async def test_other_ends_are_counted_as_well(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient
) -> None:
    futures = [lean.echo(b"x", delay_s=1) for _ in range(3)]
    tasks = [asyncio.ensure_future(future) for future in futures]
    await eventually(counts(queue, "submitted", 3))
    for task in tasks:
        task.cancel()
    await eventually(counts(queue, "verdict:cancelled", 3))
    environment = environments_of(await queue.status())["echo"]
    assert (environment.submitted, dict(environment.finished)) == (3, {"cancelled": 3})
    found = list(fleet_samples(await fleet_stats(settings)))
    assert ("leanq_requests_reason_total", ("echo", "withdrawn"), 3) in found
    await queue.claim("sweeper", ["echo"], 1, busy=0, token="t" * 12 + ":")
    await queue.release("sweeper", [], leave=True)


def _of_server(settings: Settings) -> dict[str, float]:
    """Returns the figures of the one shard's server, by the end of the name."""
    found = parsed(exposition(fleet_samples(asyncio.run(fleet_stats(settings)))))
    start, end = "leanq_redis_", '{shard="0"}'
    return {name[len(start) : -len(end)]: found[name] for name in found if name.startswith(start)}


@pytest.mark.slow
def test_a_servers_own_troubles_are_told() -> None:
    """Of a real server: its replica, its disk, its CPU."""
    primary, other = map(str, free_ports(2))
    disk = Path(tempfile.mkdtemp(prefix="leanq-t-", dir="/tmp"))
    limits = ("--maxmemory", "100mb", "--maxclients", "77")
    with own_server("--port", primary, "--dir", str(disk), *limits) as server:
        seen = _of_server(server.settings)
        assert seen["memory_bytes"] > 100_000
        assert (seen["memory_limit_bytes"], seen["connections_limit"]) == (100 << 20, 77)
        assert 1 <= seen["connections"] < 10
        assert (seen["replicas"], seen["persistence_failing"], seen["fsync_delays_total"]) == (
            0,
        ) * 3
        with own_server("--port", other, "--replicaof", f"127.0.0.1 {primary}") as replica:
            until(lambda: _of_server(server.settings)["replicas"] == 1)
            assert _of_server(server.settings)["replica_lag_seconds"] < 30
            replica.stop()
            until(lambda: _of_server(server.settings)["replicas"] == 0)
        with redis.Redis.from_url(server.settings.url) as connection:
            connection.eval("for _ = 1, 1e7 do end", 0)
            shutil.rmtree(disk)
            with contextlib.suppress(redis.ResponseError):
                connection.bgsave()
        until(lambda: _of_server(server.settings)["persistence_failing"] == 1)
        assert _of_server(server.settings)["cpu_seconds_total"] > seen["cpu_seconds_total"]


async def test_all_samples_are_of_known_metrics(settings: Settings, queue: Queue) -> None:
    known = {metric.name: metric for metric in FLEET}
    await queue.register("w", b"", {"core": b""})
    async with open_memory(settings):
        found = list(fleet_samples(await fleet_stats(settings)))
    await queue.release("w", [], leave=True)
    for name, labels, value in found:
        assert len(labels) == len(known[name].labels)
        assert isinstance(value, Times) == (known[name].kind == "histogram")
    unlabelled = {
        *("leanq_requests_finished_total", "leanq_requests_reason_total"),
        *("leanq_tenant_cpu_seconds_total", "leanq_tenant_weight", "leanq_tenant_waiting"),
        "leanq_other_release_requests",
    }
    assert {name for name, _, _ in found} == set(known) - unlabelled


# Pages


def test_a_page() -> None:
    times = Times()
    times.counts[0], times.counts[-1], times.sum_s = 3, 1, 4000.0
    well = [False]
    read = [
        ("leanq_up", (), 1),
        ("leanq_requests", ("a", "waiting"), 5),
        ("leanq_requests", ("b", "waiting"), 7),
        ("leanq_requests_finished_total", ("a", "accepted"), 2),
        ("leanq_request_wait_seconds", ("a",), times),
    ]
    with Page(0, lambda: read, lambda: well[0]) as page:
        assert scrape(page.port, "/healthz")[0] == 503
        well[0] = True
        assert scrape(page.port, "/healthz") == (200, "ok\n")
        assert scrape(page.port, "/other")[0] == 404
        code, text = scrape(page.port)
        assert code == 200
    found = parsed(text)
    assert found["leanq_up"] == 1
    assert found['leanq_requests{environment="b",state="waiting"}'] == 7
    assert found['leanq_requests_finished_total{environment="a",verdict="accepted"}'] == 2
    assert found['leanq_request_wait_seconds_bucket{environment="a",le="0.005"}'] == 3
    assert found['leanq_request_wait_seconds_bucket{environment="a",le="3600"}'] == 3
    assert found['leanq_request_wait_seconds_bucket{environment="a",le="+Inf"}'] == 4
    assert found['leanq_request_wait_seconds_count{environment="a"}'] == 4
    assert found['leanq_request_wait_seconds_sum{environment="a"}'] == 4000
    # Of the process, whatever it is.
    assert found[f'leanq_build_info{{version="{__version__}"}}'] == 1
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert 0 < found["process_open_fds"] <= found["process_max_fds"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [("pass", None), ("import os; os.abort()", "signal"), ("while True: pass", "cpu")],
)
async def test_deaths_are_counted_by_reason(code: str, reason: str | None) -> None:
    before = COUNTS.copy()
    sandbox = await Sandbox.open(readable=PYTHON)
    limits = Limits(cpu_s=0.3, wall_s=20, memory_bytes=1 << 30)
    await sandbox.run(python(code), env={}, limits=limits)
    await sandbox.close()
    new = COUNTS - before
    assert new.pop(("leanq_lean_starts_total", "lean")) == 1
    assert new == ({("leanq_lean_deaths_total", reason): 1} if reason else {})


async def test_ends_that_leanq_brings_about_are_no_deaths() -> None:
    before = COUNTS.copy()
    limits = Limits(cpu_s=20, wall_s=20, memory_bytes=1 << 30)
    asleep = python("import time; time.sleep(60)")
    sandbox = await Sandbox.open(readable=PYTHON)
    process = await sandbox.start(asleep, env={}, limits=limits)
    assert (await process.kill()).stopped == "killed"
    # As one that waits for its input when its worker ends.
    await sandbox.start(asleep, env={}, limits=limits)
    await sandbox.close()
    assert {name for name, *_ in COUNTS - before} == {"leanq_lean_starts_total"}


# From the command line


@pytest.fixture
def place(terminal: Terminal, settings: Settings) -> Terminal:
    """A terminal that uses a queue of its own."""
    terminal.use(settings)
    return terminal


async def test_a_worker_tells_how_long_its_oldest_request_runs(settings: Settings) -> None:
    driver = Scripted()
    async with AsyncLeanQClient(settings) as lean, working(settings, driver, slots=2) as worker:
        assert worker.longest_run_s == 0
        held = [asyncio.create_task(lean.check(f"-- held {n}")) for n in range(2)]
        await eventually(lambda: len(driver.running) == 2)
        before_s = worker.longest_run_s
        await eventually(lambda: worker.longest_run_s > before_s + 0.2 > 0.2)
        with metrics_page(worker, 0, "127.0.0.1") as page:
            assert isinstance(page, Page)
            found = parsed((await asyncio.to_thread(scrape, page.port))[1])
            assert found["leanq_worker_longest_run_seconds"] > before_s + 0.2
        driver.gate.set()
        await asyncio.gather(*held)
        await eventually(lambda: worker.longest_run_s == 0)


@pytest.mark.slow
def test_a_worker_and_the_exporter(place: Terminal, core: Environment) -> None:
    worker = place.start("worker", "--slots", "2", "--metrics-port", "0")
    port = port_in(wait_for_line(worker.stderr, "metrics of this worker"))
    wait_for_line(worker.stderr, "serves")
    assert scrape(port, "/healthz")[0] == 200
    # No other address of this machine serves it, unless --metrics-host names that.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)
    assert place.run("submit", *samples("and_swap", "wrong")).code == 1
    found = parsed(scrape(port)[1])
    assert found['leanq_worker_slots{state="idle"}'] == 2
    assert found['leanq_worker_requests_total{verdict="accepted"}'] == 1
    assert found['leanq_lean_starts_total{program="lean"}'] >= 2

    exporter = place.start("metrics", "--port", "0", "--metrics-host", "0.0.0.0")
    port = port_in(wait_for_line(exporter.stderr, "metrics at"))
    found = parsed(scrape(port)[1])
    assert found["leanq_up"] == 1
    socket.create_connection(("127.0.0.2", port), 5).close()
    assert found['leanq_slots{environment="default",state="idle"}'] == 2
    verdict = 'leanq_requests_finished_total{{environment="default",verdict="{}"}}'
    assert found[verdict.format("rejected")] == 1
    exporter.send_signal(signal.SIGTERM)
    assert ended(exporter).code == 0

    assert "leanq_up 1.0" in place.run("metrics", "--once").out.splitlines()
    done = place.run("metrics", "--once", "--json")
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.out.splitlines()]
    assert {"metric": "leanq_up", "labels": [], "value": 1} in lines
    worker.send_signal(signal.SIGTERM)
    assert ended(worker).code == 0
    # By its last heartbeat at the latest.
    count = 'leanq_request_run_seconds_count{environment="default"} 2.0'
    assert count in place.run("metrics", "--once").out.splitlines()


@pytest.mark.slow
def test_an_exporter_without_a_server(place: Terminal) -> None:
    place.environ["LEANQ_URL"] = "unix:///no/such/place"
    exporter = place.start("metrics", "--port", "0")
    port = port_in(wait_for_line(exporter.stderr, "metrics at"))
    found = parsed(scrape(port)[1])
    assert {name for name in found if not name.startswith("process_")} == {
        "leanq_up",
        f'leanq_build_info{{version="{__version__}"}}',
    }
    assert found["leanq_up"] == 0
    exporter.send_signal(signal.SIGINT)
    assert ended(exporter).code == 0
    assert place.run("metrics", "--once").code == 3


@pytest.mark.slow
def test_an_exporter_of_a_silent_server_answers_before_prometheus_gives_up(
    terminal: Terminal,
) -> None:
    """Or else the alert would be that the exporter is gone."""
    with own_server() as server:
        terminal.use(server.settings)
        exporter = terminal.start("metrics", "--port", "0")
        port = port_in(wait_for_line(exporter.stderr, "metrics at"))
        assert parsed(scrape(port)[1])["leanq_up"] == 1
        server.send(signal.SIGSTOP)
        try:
            asked_s = monotonic()
            assert parsed(scrape(port)[1])["leanq_up"] == 0
            assert monotonic() - asked_s < 10
        finally:
            server.send(signal.SIGCONT)
        exporter.send_signal(signal.SIGTERM)
        assert "no answer from unix://" in ended(exporter).err


def test_a_port_that_is_taken(place: Terminal) -> None:
    with Page(0, list) as page:
        done = place.run("metrics", "--port", str(page.port))
    assert done.code == 2
    assert f"cannot serve metrics on port {page.port}" in done.err
