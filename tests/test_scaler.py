"""The loop around the scaler's decision, and whom it orders from: processes here, or Kubernetes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from conftest import eventually
from fleets import until
from kube_standin import KubeStandin
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User
from sandboxes import running
from terminals import Terminal, ended, wait_for_line
from test_metrics import parsed, port_in, scrape

from leanq.client import LeanQClient
from leanq.config import Settings
from leanq.errors import TargetError
from leanq.fleet import Glance, Told, decisions_of, glance
from leanq.queue import Queue
from leanq.scaling import Decision, ScaleSettings, Stats
from leanq.scaling.kube import KubernetesTarget
from leanq.scaling.loop import Scaler
from leanq.scaling.targets import LocalTarget, Ordered
from leanq.transitions import Status

NOBODY = Glance(0.0, Status({}, {}, (), (), {}, 0), {})
# What the scaler's Role allows; k8s/base has the same.
ALLOWED = {
    ("create", "leases"),
    ("get", "leases"),
    ("update", "leases"),
    ("get", "deployments/scale"),
    ("patch", "deployments/scale"),
    ("get", "pods"),
    ("list", "pods"),
    ("watch", "pods"),
    ("patch", "horizontalpodautoscalers"),
}


# The loop


class Recorder:
    """A target that does as it is told at once."""

    def __init__(self) -> None:
        self.orders: list[int] = []
        self.leading = True
        self.broken = False

    async def leads(self) -> bool:
        return self.leading

    async def look(self, _environment: str, _seen: Glance) -> Ordered:
        if self.broken:
            raise TargetError("out of reach")
        return Ordered(self.orders[-1] if self.orders else 0)

    async def order(self, _environment: str, workers: int, _seen: Glance) -> None:
        self.orders.append(workers)

    async def close(self) -> None:
        pass


class Loop:
    """A scaler whose time is set by the test."""

    def __init__(self, settings: Settings, **how: Any) -> None:
        self.now = 1000.0
        self.target = Recorder()
        self.told: list[tuple[Decision, Stats]] = []
        sizes = {"echo": ScaleSettings(**how)}

        def tell(_name: str, decision: Decision, stats: Stats) -> None:
            self.told.append((decision, stats))

        self.scaler = Scaler(
            settings, self.target, sizes, tell=tell, who="tester", clock=lambda: self.now
        )

    async def tick(self) -> Decision:
        self.now += 15
        await self.scaler.tick()
        return self.told[-1][0]


@pytest.fixture
def lean(settings: Settings) -> Iterator[LeanQClient]:
    with LeanQClient(settings) as made:
        yield made


async def test_a_backlog_is_ordered_for_and_an_empty_queue_is_not(
    settings: Settings, queue: Queue, lean: LeanQClient
) -> None:
    loop = Loop(settings, slots=2, most=50)
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
    await queue.claim("sweeper", ["echo"], 1, busy=0, token="t" * 12 + ":")
    await queue.release("sweeper", [], leave=True)


async def lean_knows(settings: Settings, count: int) -> bool:
    lanes = (await glance(settings)).lanes
    return "echo" in lanes and lanes["echo"].waiting == count


async def test_one_that_does_not_lead_orders_nothing(settings: Settings, queue: Queue) -> None:
    loop = Loop(settings, least=3)
    loop.target.leading = False
    assert (await loop.tick()).target == 3
    assert loop.target.orders == []
    loop.target.leading = True
    await loop.tick()
    assert loop.target.orders == [3]


async def test_without_statistics_the_order_is_held(settings: Settings, queue: Queue) -> None:
    loop = Loop(settings, least=3)
    await loop.tick()
    loop.scaler._settings = replace(settings, url="unix:///no/such/place")
    for _ in range(5):
        decision = await loop.tick()
    assert (decision.reason, decision.target) == ("stale", 3)
    samples = {(name, labels): value for name, labels, value in loop.scaler.samples()}
    assert samples["leanq_up", ()] == 0
    assert samples["leanq_scaler_stale", ("echo",)] == 1


async def test_a_target_in_trouble_is_asked_again(settings: Settings, queue: Queue) -> None:
    loop = Loop(settings, least=2)
    loop.target.broken = True
    loop.now += 15
    await loop.scaler.tick()
    assert ("leanq_scaler_errors_total", ("echo",), 1) in list(loop.scaler.samples())
    loop.target.broken = False
    await loop.tick()
    assert loop.target.orders == [2]


async def test_the_one_that_leads_tells_the_queue(settings: Settings, queue: Queue) -> None:
    loop = Loop(settings, least=3)
    loop.target.leading = False
    await loop.tick()
    assert (await queue.status()).decisions == {}
    loop.target.leading = True
    decision = await loop.tick()
    told = decisions_of(await queue.status())["echo"]
    assert told == Told(told.at, 3, 0, decision.reason, decision.text, "tester")
    assert told.at == pytest.approx(time.time(), abs=60)
    assert 0 < await queue.call(lambda c: c.pttl(queue.keys.scaler)) <= 600_000


# Processes on this machine


async def test_workers_on_this_machine(settings: Settings, queue: Queue) -> None:
    environ = {**os.environ, "LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix}
    target = LocalTarget("--driver echo --slots 1", environ)
    assert await target.look("echo", NOBODY) == Ordered(0)
    await target.order("echo", 2, NOBODY)
    try:
        ordered = await target.look("echo", NOBODY)
        assert (ordered.order, len(ordered.starting_s)) == (2, 2)
        await eventually(lambda: workers_are(settings, 2))
        ordered = await target.look("echo", await glance(settings))
        assert (ordered.order, ordered.starting_s, len(ordered.started_s)) == (2, (), 2)
        await target.order("echo", 1, await glance(settings))
        assert (await target.look("echo", await glance(settings))).order == 1
        await eventually(lambda: workers_are(settings, 1))
    finally:
        pids = [worker.process.pid for worker in target._workers]
        await target.close()
    assert not any(map(running, pids))
    await eventually(lambda: workers_are(settings, 0))


async def workers_are(settings: Settings, count: int) -> bool:
    return len((await glance(settings)).status.workers) == count


def test_a_fleet_follows_a_burst_up_and_down(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    options = ["--target", "local", "--worker", "--driver echo --slots 4", "--slots", "4"]
    pace = ["--env", "echo", "--every", "0.3s", "--deadline", "9s", "--ceiling", "3"]
    pace += ["--settle", "2s"]
    scaler = terminal.start("scale", *options, *pace, "--port", "0", "--json")
    port = port_in(wait_for_line(scaler.stderr, "metrics at"))
    with LeanQClient(settings) as lean:
        futures = [lean.echo(b"%d" % n, delay_s=0.2) for n in range(150)]
        assert [future.result(60) for future in futures] == [b"%d" % n for n in range(150)]
    finished = 'leanq_requests_finished_total{environment="echo",verdict="echo"}'
    until(lambda: parsed(scrape(port)[1]).get(finished) == 150)
    seen = parsed(scrape(port)[1])
    assert seen["leanq_up"] == seen["leanq_scaler_leader"] == 1
    targets: list[int] = []
    assert scaler.stdout is not None
    for line in scaler.stdout:
        targets.append(json.loads(line)["target"])
        # Nothing waits, so it goes down to nobody again.
        if max(targets) > 0 and targets[-1] == 0:
            break
    until(lambda: terminal.run("status", "--json").lines[0]["scaler"]["echo"]["target"] == 0)
    assert "scaler    echo: 0 workers, before " in terminal.run("status").out
    assert 1 < max(targets) <= 3
    scaler.send_signal(signal.SIGINT)
    assert ended(scaler).code == 0


# Kubernetes


@pytest.fixture
def cluster() -> Iterator[KubeStandin]:
    with KubeStandin() as made:
        made.put(
            "deployments",
            "leanq-worker",
            spec={"replicas": 3},
            status={"replicas": 3, "selector": "app=leanq,part=worker"},
        )
        yield made
        assert {(verb, kind) for verb, kind, _ in made.calls} <= ALLOWED


@pytest.fixture
async def kube(cluster: KubeStandin) -> AsyncIterator[KubernetesTarget]:
    target = new_target(cluster, "one")
    yield target
    await target.close()


def new_target(cluster: KubeStandin, identity: str, **options: Any) -> KubernetesTarget:
    config = SingleConfig(
        context_name="test",
        context=Context(cluster="test", namespace="fleet"),
        cluster=Cluster(server=cluster.url),
        user=User(),
    )
    return KubernetesTarget(
        "fleet",
        options.pop("deployment", "leanq-worker"),
        identity=identity,
        config=config,
        **options,
    )


def pod(cluster: KubeStandin, name: str, age_s: float, ready_after_s: float | None) -> None:
    born = datetime.now(UTC) - timedelta(seconds=age_s)
    ready = ready_after_s is not None
    at = born + timedelta(seconds=ready_after_s or 0)
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": stamp(at)}
    cluster.put(
        "pods",
        name,
        metadata={
            "uid": name,
            "creationTimestamp": stamp(born),
            "labels": {"app": "leanq", "part": "worker"},
        },
        status={"phase": "Running", "conditions": [condition]},
    )


def stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_pods_that_start_and_have_started(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    pod(cluster, "old", 900, 60)
    pod(cluster, "young", 30, None)
    cluster.put("pods", "other", metadata={"creationTimestamp": stamp(datetime.now(UTC))})
    first = await kube.look("default", NOBODY)
    assert (first.order, first.started_s) == (3, ())
    assert first.starting_s == pytest.approx((30,), abs=3)
    pod(cluster, "young", 90, 80)
    second = await kube.look("default", NOBODY)
    assert (second.starting_s, second.started_s) == ((), (80.0,))
    assert (await kube.look("default", NOBODY)).started_s == ()


async def test_an_order_is_a_patch_of_the_scale(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    await kube.order("default", 7, NOBODY)
    assert cluster.objects["deployments", "leanq-worker"]["spec"] == {"replicas": 7}
    assert cluster.calls == [("patch", "deployments/scale", "leanq-worker")]


async def test_a_deployment_for_each_environment_and_an_autoscaler(cluster: KubeStandin) -> None:
    least = {"minReplicas": 1, "maxReplicas": 9, "scaleTargetRef": {"kind": "x", "name": "y"}}
    cluster.put("horizontalpodautoscalers", "leanq-big", spec=least)
    target = new_target(cluster, "one", deployment="leanq-{env}", hpa="leanq-{env}")
    for wanted in (5, 0):
        await target.order("big", wanted, NOBODY)
        spec = cluster.objects["horizontalpodautoscalers", "leanq-big"]["spec"]
        assert spec == least | {"minReplicas": max(1, wanted)}
    await target.close()


async def test_of_two_scalers_one_leads(cluster: KubeStandin, kube: KubernetesTarget) -> None:
    other = new_target(cluster, "two")
    assert [await kube.leads(), await other.leads(), await kube.leads()] == [True, False, True]
    assert cluster.objects["leases", "leanq-scaler"]["spec"]["holderIdentity"] == "one"
    # A holder that is silent for longer than its lease has gone.
    other._other_since_s -= 1000
    assert await other.leads() is False  # it was renewed since
    other._other_since_s -= 1000
    assert await other.leads() is True
    assert await kube.leads() is False
    await other.close()


async def test_whoever_writes_second_does_not_lead(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    other = new_target(cluster, "two")
    both = await asyncio.gather(kube.leads(), other.leads())
    assert sorted(both) == [False, True]
    await other.close()


@pytest.mark.parametrize(
    ("verb", "kind", "code"),
    [
        ("get", "leases", 403),
        ("get", "deployments/scale", 500),
        ("patch", "deployments/scale", 403),
    ],
)
async def test_a_refusal_is_the_targets_trouble(
    cluster: KubeStandin, kube: KubernetesTarget, verb: str, kind: str, code: int
) -> None:
    cluster.refuse[verb, kind] = code
    call = {
        "leases": kube.leads,
        "deployments/scale": partial(kube.look, "default", NOBODY),
        "patch": partial(kube.order, "default", 1, NOBODY),
    }
    with pytest.raises(TargetError, match="not allowed here"):
        await call[verb if verb == "patch" else kind]()


async def test_a_cluster_that_is_gone_is_the_targets_trouble() -> None:
    with KubeStandin() as gone:
        pass
    target = new_target(gone, "one")
    with pytest.raises(TargetError, match="no answer"):
        await target.look("default", NOBODY)
    await target.close()


def test_no_cluster_and_options_that_make_no_sense(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    done = terminal.run("scale", "--target", "k8s")
    assert done.code == 2
    assert "no Kubernetes cluster" in done.err
    done = terminal.run("scale", "--target", "print", "--floor", "5", "--ceiling", "2")
    assert (done.code, "makes no sense" in done.err) == (2, True)
    done = terminal.run("scale", "--target", "local", "--worker", "'x")
    assert (done.code, "cannot be read" in done.err) == (2, True)
