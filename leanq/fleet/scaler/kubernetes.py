"""Kubernetes as a scaler's target: sets a Deployment's size, or its autoscaler's minimum.

A Deployment's controller chooses the pods that go by their ``pod-deletion-cost``, so the scaler
marks the pods of idle workers before it asks for fewer. Of several scalers, the holder of a Lease
acts, until another sees that the holder no longer renews it; clocks are never compared.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx2 as httpx
from lightkube import AsyncClient
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.autoscaling_v2 import HorizontalPodAutoscaler
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Pod

from leanq.errors import TargetError, UsageError
from leanq.fleet.scaler.targets import Idleness, Ordered, named
from leanq.fleet.stats import FleetStats
from leanq.queue.wire import info_of

log = logging.getLogger("leanq.scaler")

_COST, _GOES_FIRST = "controller.kubernetes.io/pod-deletion-cost", "-1"
# Pods marked for one order. A larger step is made in several, to spare the API server.
_MOST_MARKS = 100
_LEASE = "leanq-scaler"
_NOT_FOUND, _CONFLICT = 404, 409
_T = TypeVar("_T")


@dataclass(slots=True)
class _Seen:
    """A Deployment at the last look: its order, its pods that are not ready, and by name whether
    each ready pod is marked."""

    order: int
    unready: int
    marked: dict[str, bool]


class KubernetesTarget:
    """The Deployments of one namespace, one for each environment.

    Args:
        deployment: the Deployment's name; ``{env}`` in it stands for the environment's.
        hpa: a HorizontalPodAutoscaler's name, likewise; then its ``minReplicas`` is set instead.
        identity: this scaler's name, unlike any other's.
        lease_s: another scaler takes over after so many seconds without a renewal.

    Raises:
        UsageError: no cluster is found, or a name has other ``{…}`` than ``{env}``.
    """

    def __init__(
        self,
        namespace: str,
        deployment: str,
        *,
        hpa: str | None = None,
        identity: str,
        lease_s: int = 45,
        config: SingleConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name in filter(None, (deployment, hpa)):
            if set("{}") & set(named(name, "")):
                raise UsageError(f"in the name {name!r} only {{env}} may stand in braces")
        self._namespace = namespace
        self._deployment = deployment
        self._hpa = hpa
        self._identity = identity
        self._lease_s = lease_s
        self._clock = clock
        # The other holder and its last renewal, and since when they have been so.
        self._other: tuple[object, ...] = ()
        self._other_since_s = 0.0
        self._seen: dict[str, _Seen] = {}
        self._idleness = Idleness()
        self._marks_fail = False
        try:
            self._client = AsyncClient(config=config, namespace=namespace)
        except (ConfigError, OSError) as error:
            raise UsageError(f"no Kubernetes cluster to scale in: {error}") from None
        except Exception as error:
            # lightkube fails in any way on a kubeconfig of another shape.
            raise UsageError(
                "no Kubernetes cluster to scale in: the kubeconfig cannot be read "
                f"({type(error).__name__}: {' '.join(str(error).split())}); "
                "'kubectl config view' with the same KUBECONFIG says what is wrong with it"
            ) from None

    async def leads(self) -> bool:
        try:
            lease = await _asked(self._client.get(Lease, _LEASE))
        except _MissingError:
            return await self._written(self._client.create(self._lease()))
        spec = lease.spec or LeaseSpec()
        if spec.holderIdentity == self._identity:
            return await self._renewed(lease)
        seen = (spec.holderIdentity, spec.renewTime)
        if seen != self._other:
            self._other, self._other_since_s = seen, self._clock()
        silent_s = self._clock() - self._other_since_s
        if spec.holderIdentity and silent_s <= (spec.leaseDurationSeconds or self._lease_s):
            return False
        return await self._renewed(lease)

    async def look(self, environment: str, seen: FleetStats) -> Ordered:
        name = named(self._deployment, environment)
        scale = await _asked(self._client.get(Deployment.Scale, name))
        labels = _labels(scale.status.selector if scale.status else None)
        now = datetime.now(UTC)
        before = self._seen.get(name)
        starting: list[float] = []
        started: list[float] = []
        marked: dict[str, bool] = {}
        async for pod in _each(self._client.list(Pod, labels=labels)):
            meta, status = pod.metadata, pod.status
            if not meta or not meta.creationTimestamp or meta.deletionTimestamp:
                continue
            since = _ready_since(pod)
            if since is not None:
                pod_name = str(meta.name)
                marked[pod_name] = (meta.annotations or {}).get(_COST) == _GOES_FIRST
                if before and pod_name not in before.marked:
                    started.append((since - meta.creationTimestamp).total_seconds())
            elif not status or status.phase in (None, "Pending", "Running"):
                starting.append((now - meta.creationTimestamp).total_seconds())
        order = (scale.spec.replicas if scale.spec else 0) or 0
        self._seen[name] = _Seen(order, len(starting), marked)
        self._idleness.note(seen)
        return Ordered(order, tuple(starting), tuple(started))

    async def order(self, environment: str, workers: int, seen: FleetStats) -> None:
        if self._hpa:
            # The minimum is at least one, and only the Deployment's own size leads away from zero.
            # No pod is marked: when the autoscaler lets pods go, others will be idle.
            name, patch = named(self._hpa, environment), {"minReplicas": max(1, workers)}
            await _asked(self._client.patch(HorizontalPodAutoscaler, name, {"spec": patch}))
            return
        name = named(self._deployment, environment)
        known = self._seen.get(name)
        if known and workers < known.order:
            workers = max(workers, known.order - known.unready - _MOST_MARKS)
            await self._mark(known, known.order - known.unready - workers, seen)
        await _asked(self._client.patch(Deployment.Scale, name, {"spec": {"replicas": workers}}))

    async def close(self) -> None:
        await self._client.close()

    async def _mark(self, known: _Seen, count: int, seen: FleetStats) -> None:
        """Marks so many pods to go first, and no others; a mark that fails stops nothing."""
        # Workers write their host into Redis, so it is only compared with our pods' names.
        hosts = [str(info_of(row.info).get("host")) for row in self._idleness.first_to_go(seen)]
        going = [host for host in hosts if host in known.marked][: max(0, count)]
        for name, marked in known.marked.items():
            if marked == (name in going):
                continue
            patch = {"metadata": {"annotations": {_COST: None if marked else _GOES_FIRST}}}
            try:
                await _asked(self._client.patch(Pod, name, patch))
            except _MissingError:
                continue
            except TargetError as error:
                if not self._marks_fail:
                    log.warning("idle workers' pods cannot be marked to go first: %s", error)
                self._marks_fail = True
                return
            self._marks_fail = False

    def _lease(self) -> Lease:
        spec = LeaseSpec(
            holderIdentity=self._identity,
            leaseDurationSeconds=self._lease_s,
            renewTime=datetime.now(UTC),
        )
        return Lease(metadata=ObjectMeta(name=_LEASE, namespace=self._namespace), spec=spec)

    async def _renewed(self, lease: Lease) -> bool:
        """Returns whether the lease, as it was read, is now ours."""
        assert lease.metadata
        mine = self._lease()
        assert mine.metadata
        # If another scaler wrote in the meantime, it wins.
        mine.metadata.resourceVersion = lease.metadata.resourceVersion
        return await self._written(self._client.replace(mine))

    async def _written(self, call: Awaitable[object]) -> bool:
        try:
            await _asked(call)
        except _ConflictError:
            return False
        return True


class _MissingError(TargetError):
    """The object does not exist."""


class _ConflictError(TargetError):
    """Another scaler was faster."""


async def _asked(call: Awaitable[_T]) -> _T:
    """Returns the API server's answer; raises TargetError."""
    with _faults_as_target_errors():
        return await call


async def _each(items: object) -> AsyncIterator[Pod]:
    with _faults_as_target_errors():
        async for item in items:  # type: ignore[attr-defined]
            yield item


@contextlib.contextmanager
def _faults_as_target_errors() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        kinds = {_NOT_FOUND: _MissingError, _CONFLICT: _ConflictError}
        kind = kinds.get(error.status.code or 0, TargetError)
        raise kind(f"the API server refuses: {error.status.message}") from None
    except httpx.HTTPError as error:
        raise TargetError(f"no answer from the API server: {error!r}") from None


def _labels(selector: str | None) -> dict[str, Any]:
    """Returns the labels of a selector as the API server prints it, ``a=b,c=d``."""
    pairs: Iterable[str] = selector.split(",") if selector else ()
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _ready_since(pod: Pod) -> datetime | None:
    conditions = (pod.status.conditions if pod.status else None) or []
    for condition in conditions:
        if condition.type == "Ready" and condition.status == "True":
            return condition.lastTransitionTime
    return None
