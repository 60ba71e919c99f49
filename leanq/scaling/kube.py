"""Kubernetes as a scaler's target: a Deployment's size, or the least of its autoscaler.

Of several scalers the one that holds a Lease acts. Whether its holder is alive is judged by whether
it still renews it, as seen here, and never by comparing clocks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Iterable
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

from ..errors import TargetError, UsageError
from ..fleet import Glance
from .targets import Ordered

_LEASE = "leanq-scaler"
_NOT_FOUND, _CONFLICT = 404, 409
_T = TypeVar("_T")


class KubernetesTarget:
    """The Deployments of one namespace, one for each environment.

    Args:
        deployment: the Deployment's name; ``{env}`` in it stands for the environment's.
        hpa: of a HorizontalPodAutoscaler, likewise; then its ``minReplicas`` is set instead.
        identity: of this scaler, unlike any other's.
        lease_s: after so long without a renewal another scaler takes over.

    Raises:
        UsageError: there is no cluster to be found.
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
    ) -> None:
        self._namespace = namespace
        self._deployment = deployment
        self._hpa = hpa
        self._identity = identity
        self._lease_s = lease_s
        # The holder and its renewal as seen last, and when they were first seen so.
        self._other: tuple[object, ...] = ()
        self._other_since_s = 0.0
        self._ready: dict[str, set[str]] = {}
        try:
            self._client = AsyncClient(config=config, namespace=namespace)
        except (ConfigError, OSError) as error:
            raise UsageError(f"no Kubernetes cluster to scale in: {error}") from None

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
            self._other, self._other_since_s = seen, time.monotonic()
        silent_s = time.monotonic() - self._other_since_s
        if spec.holderIdentity and silent_s <= (spec.leaseDurationSeconds or self._lease_s):
            return False
        return await self._renewed(lease)

    async def look(self, environment: str, seen: Glance) -> Ordered:
        name = self._deployment.format(env=environment)
        scale = await _asked(self._client.get(Deployment.Scale, name))
        labels = _labels(scale.status.selector if scale.status else None)
        now = datetime.now(UTC)
        starting: list[float] = []
        started: list[float] = []
        ready: set[str] = set()
        async for pod in _each(self._client.list(Pod, labels=labels)):
            meta, status = pod.metadata, pod.status
            if not meta or not meta.creationTimestamp or meta.deletionTimestamp:
                continue
            since = _ready_since(pod)
            if since is not None:
                ready.add(str(meta.uid))
                if meta.uid not in self._ready.get(name, {meta.uid}):
                    started.append((since - meta.creationTimestamp).total_seconds())
            elif not status or status.phase in (None, "Pending", "Running"):
                starting.append((now - meta.creationTimestamp).total_seconds())
        self._ready[name] = ready
        order = scale.spec.replicas if scale.spec else 0
        return Ordered(order or 0, tuple(starting), tuple(started))

    async def order(self, environment: str, workers: int, seen: Glance) -> None:
        if self._hpa:
            # It cannot be less than one, and from zero only the Deployment's own size leads away.
            name, patch = self._hpa.format(env=environment), {"minReplicas": max(1, workers)}
            await _asked(self._client.patch(HorizontalPodAutoscaler, name, {"spec": patch}))
            return
        name = self._deployment.format(env=environment)
        await _asked(self._client.patch(Deployment.Scale, name, {"spec": {"replicas": workers}}))

    async def close(self) -> None:
        await self._client.close()

    def _lease(self) -> Lease:
        spec = LeaseSpec(
            holderIdentity=self._identity,
            leaseDurationSeconds=self._lease_s,
            renewTime=datetime.now(UTC),
        )
        return Lease(metadata=ObjectMeta(name=_LEASE, namespace=self._namespace), spec=spec)

    async def _renewed(self, lease: Lease) -> bool:
        """Whether the lease, as it was read, is now ours."""
        assert lease.metadata
        mine = self._lease()
        assert mine.metadata
        # Whoever has written meanwhile wins.
        mine.metadata.resourceVersion = lease.metadata.resourceVersion
        return await self._written(self._client.replace(mine))

    async def _written(self, call: Awaitable[object]) -> bool:
        try:
            await _asked(call)
        except _ConflictError:
            return False
        return True


class _MissingError(TargetError):
    """There is no such object."""


class _ConflictError(TargetError):
    """Somebody else was faster."""


async def _asked(call: Awaitable[_T]) -> _T:
    """What the API server answers; raises TargetError."""
    try:
        return await call
    except ApiError as error:
        raise _refusal(error) from None
    except httpx.HTTPError as error:
        raise TargetError(f"no answer from the API server: {error!r}") from None


def _refusal(error: ApiError) -> TargetError:
    kinds = {_NOT_FOUND: _MissingError, _CONFLICT: _ConflictError}
    kind = kinds.get(error.status.code or 0, TargetError)
    return kind(f"the API server refuses: {error.status.message}")


async def _each(items: object) -> AsyncIterator[Pod]:
    try:
        async for item in items:  # type: ignore[attr-defined]
            yield item
    except ApiError as error:
        raise _refusal(error) from None
    except httpx.HTTPError as error:
        raise TargetError(f"no answer from the API server: {error!r}") from None


def _labels(selector: str | None) -> dict[str, Any]:
    """A selector as the API server prints it, ``a=b,c=d``."""
    pairs: Iterable[str] = selector.split(",") if selector else ()
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _ready_since(pod: Pod) -> datetime | None:
    conditions = (pod.status.conditions if pod.status else None) or []
    for condition in conditions:
        if condition.type == "Ready" and condition.status == "True":
            return condition.lastTransitionTime
    return None
