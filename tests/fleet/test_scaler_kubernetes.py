"""Kubernetes as the scaler's target, by a stand-in for its API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User
from support.fleet.kube_standin import KubeStandin

from leanq.errors import TargetError, UsageError
from leanq.fleet.scaler.kubernetes import KubernetesTarget
from leanq.fleet.stats import FleetStats
from leanq.queue import wire
from leanq.queue.results import Status, WorkerRow

NO_WORKERS = FleetStats(0.0, Status({}, {}, (), (), {}, 0), {})
COST = "controller.kubernetes.io/pod-deletion-cost"
# What the scaler's Role allows; k8s/base has the same.
ALLOWED = {
    ("create", "leases"),
    ("get", "leases"),
    ("update", "leases"),
    ("get", "deployments/scale"),
    ("patch", "deployments/scale"),
    ("list", "pods"),
    ("patch", "pods"),
    ("patch", "horizontalpodautoscalers"),
}


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
    first = await kube.look("default", NO_WORKERS)
    assert (first.order, first.started_s) == (3, ())
    assert first.starting_s == pytest.approx((30,), abs=3)
    pod(cluster, "young", 90, 80)
    second = await kube.look("default", NO_WORKERS)
    assert (second.starting_s, second.started_s) == ((), (80.0,))
    assert (await kube.look("default", NO_WORKERS)).started_s == ()


async def test_an_order_is_a_patch_of_the_scale(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    await kube.order("default", 7, NO_WORKERS)
    assert cluster.objects["deployments", "leanq-worker"]["spec"] == {"replicas": 7}
    assert cluster.calls == [("patch", "deployments/scale", "leanq-worker")]


def seen(at_s: float = 0.0, **held: int) -> FleetStats:
    """Workers, by their pods' names, and how many requests each holds."""
    rows = (
        WorkerRow(f"{host}-1-x", 10.0, count, wire.pack_info({"host": host, "pid": 1}))
        for host, count in held.items()
    )
    return FleetStats(at_s, Status({}, {}, tuple(rows), (), {}, 0), {})


def fleet(cluster: KubeStandin, size: int, ready: int | None = None) -> None:
    """Pods p0, p1, …, the last of them not ready, and a Deployment of that size."""
    cluster.objects["deployments", "leanq-worker"]["spec"] = {"replicas": size}
    for n in range(size):
        pod(cluster, f"p{n}", 900, 60 if n < (size if ready is None else ready) else None)


def marked(cluster: KubeStandin) -> set[str]:
    costs = {
        name: item["metadata"].get("annotations", {}).get(COST)
        for (kind, name), item in cluster.objects.items()
        if kind == "pods"
    }
    assert set(costs.values()) <= {None, "-1"}
    return {name for name, cost in costs.items() if cost}


async def shrunk(kube: KubernetesTarget, workers: int, look: FleetStats) -> None:
    await kube.look("default", look)
    await kube.order("default", workers, look)


async def test_idle_workers_pods_are_marked_before_the_order(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    fleet(cluster, 4)
    await shrunk(kube, 2, seen(p0=2, p1=0, p2=1, p3=0))
    assert marked(cluster) == {"p1", "p3"}
    assert cluster.objects["deployments", "leanq-worker"]["spec"] == {"replicas": 2}
    assert cluster.calls[2:] == [
        ("patch", "pods", "p1"),
        ("patch", "pods", "p3"),
        ("patch", "deployments/scale", "leanq-worker"),
    ]


async def test_who_has_been_idle_for_longest_goes_first(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    fleet(cluster, 4)
    await kube.look("default", seen(0, p0=0, p1=0, p2=0, p3=1))
    await kube.look("default", seen(15, p0=1, p1=0, p2=0, p3=1))
    await shrunk(kube, 2, seen(30, p0=0, p1=0, p2=0, p3=0))
    assert marked(cluster) == {"p1", "p2"}


async def test_pods_that_are_not_ready_go_anyway(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    fleet(cluster, 4, ready=3)
    await shrunk(kube, 2, seen(p0=0, p1=0, p2=3))
    assert len(marked(cluster)) == 1


async def test_a_marked_one_that_is_busy_again_loses_its_mark(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    fleet(cluster, 3)
    await shrunk(kube, 2, seen(p0=0, p1=1, p2=1))
    assert marked(cluster) == {"p0"}
    # It has not gone: another client has made the Deployment larger again.
    cluster.objects["deployments", "leanq-worker"]["spec"] = {"replicas": 3}
    await shrunk(kube, 2, seen(15, p0=1, p1=1, p2=0))
    assert marked(cluster) == {"p2"}
    # What is right already is not written again.
    before = len(cluster.calls)
    cluster.objects["deployments", "leanq-worker"]["spec"] = {"replicas": 3}
    await shrunk(kube, 2, seen(30, p0=1, p1=1, p2=0))
    assert ("patch", "pods", "p2") not in cluster.calls[before:]


async def test_marks_that_fail_stop_nothing(
    cluster: KubeStandin, kube: KubernetesTarget, caplog: pytest.LogCaptureFixture
) -> None:
    fleet(cluster, 4)
    look = seen(p0=0, p1=0, p2=0, p3=0)
    cluster.refuse["patch", "pods"] = 403
    with caplog.at_level(logging.WARNING, "leanq.scaler"):
        for workers in (3, 2):
            await shrunk(kube, workers, look)
            spec = cluster.objects["deployments", "leanq-worker"]["spec"]
            assert spec == {"replicas": workers}
    assert [record.message for record in caplog.records] == [
        "idle workers' pods cannot be marked to go first: the API server refuses: not allowed here"
    ]
    # One refusal is enough for each order.
    assert [call[:2] for call in cluster.calls].count(("patch", "pods")) == 2
    del cluster.refuse["patch", "pods"]
    await kube.look("default", look)
    del cluster.objects["pods", "p0"]
    # The stand-in deletes no pod, so of four pods two are thought to go.
    await kube.order("default", 0, look)
    assert marked(cluster) == {"p1"}
    assert cluster.objects["deployments", "leanq-worker"]["spec"] == {"replicas": 0}
    assert len(caplog.records) == 1


async def test_only_the_deployments_own_pods_are_marked(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    fleet(cluster, 2)
    cluster.put("pods", "other", metadata={"creationTimestamp": stamp(datetime.now(UTC))})
    look = seen(other=0, elsewhere=0, p0=1, p1=1)
    odd = WorkerRow("odd", 10.0, 0, wire.pack_info({"host": ["p0"]}))
    rows = (odd, WorkerRow("odder", 10.0, 0, b"nonsense"), *look.status.workers)
    await shrunk(kube, 1, FleetStats(0.0, Status({}, {}, rows, (), {}, 0), {}))
    # No worker is idle, so the one goes that holds least.
    assert len(marked(cluster) & {"p0", "p1"}) == len(marked(cluster)) == 1


@pytest.mark.slow
async def test_a_large_step_is_made_in_several(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    fleet(cluster, 150, ready=140)
    look = seen(**{f"p{n}": 0 for n in range(140)})
    await shrunk(kube, 20, look)
    assert cluster.objects["deployments", "leanq-worker"]["spec"] == {"replicas": 40}
    assert len(marked(cluster)) == 100


async def test_an_autoscaler_lets_others_go(cluster: KubeStandin) -> None:
    least = {"minReplicas": 3, "maxReplicas": 9, "scaleTargetRef": {"kind": "x", "name": "y"}}
    cluster.put("horizontalpodautoscalers", "leanq-worker", spec=least)
    fleet(cluster, 3)
    target = new_target(cluster, "one", hpa="leanq-worker")
    await shrunk(target, 1, seen(p0=0, p1=0, p2=0))
    assert marked(cluster) == set()
    await target.close()


async def test_a_deployment_for_each_environment_and_an_autoscaler(cluster: KubeStandin) -> None:
    least = {"minReplicas": 1, "maxReplicas": 9, "scaleTargetRef": {"kind": "x", "name": "y"}}
    cluster.put("horizontalpodautoscalers", "leanq-big", spec=least)
    target = new_target(cluster, "one", deployment="leanq-{env}", hpa="leanq-{env}")
    for wanted in (5, 0):
        await target.order("big", wanted, NO_WORKERS)
        spec = cluster.objects["horizontalpodautoscalers", "leanq-big"]["spec"]
        assert spec == least | {"minReplicas": max(1, wanted)}
    await target.close()


async def test_of_two_scalers_one_leads(cluster: KubeStandin, kube: KubernetesTarget) -> None:
    now_s = 1000.0
    other = new_target(cluster, "two", clock=lambda: now_s)
    assert [await kube.leads(), await other.leads(), await kube.leads()] == [True, False, True]
    assert cluster.objects["leases", "leanq-scaler"]["spec"]["holderIdentity"] == "one"
    # A holder that is silent for longer than its lease has gone.
    now_s += 1000
    assert await other.leads() is False  # it was renewed since
    now_s += 1000
    assert await other.leads() is True
    assert await kube.leads() is False
    await other.close()


async def test_the_scaler_that_writes_second_does_not_lead(
    cluster: KubeStandin, kube: KubernetesTarget
) -> None:
    other = new_target(cluster, "two")
    both = await asyncio.gather(kube.leads(), other.leads())
    assert sorted(both) == [False, True]
    await other.close()


@pytest.mark.slow
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
        "deployments/scale": partial(kube.look, "default", NO_WORKERS),
        "patch": partial(kube.order, "default", 1, NO_WORKERS),
    }
    with pytest.raises(TargetError, match="not allowed here"):
        await call[verb if verb == "patch" else kind]()


async def test_a_cluster_that_is_gone_is_the_targets_trouble() -> None:
    with KubeStandin() as gone:
        pass
    target = new_target(gone, "one")
    with pytest.raises(TargetError, match="no answer"):
        await target.look("default", NO_WORKERS)
    await target.close()


# What a hurried operator writes


@pytest.mark.parametrize("text", ["a: [", "a: 1", "", "just text", "clusters: 5"])
def test_a_kubeconfig_of_another_shape_is_said(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(UsageError, match="the kubeconfig cannot be read"):
        KubernetesTarget("default", "leanq-worker", identity="a")


@pytest.mark.parametrize("name", ["leanq-{environment}", "leanq-{", "leanq-{env}}"])
def test_other_braces_than_the_environments_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"only {env} may stand in braces"):
        KubernetesTarget("default", name, identity="a")
