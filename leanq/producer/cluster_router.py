"""The route to several clusters: it picks one by weight for each request, which stays there.

When a cluster is down, the router withdraws requests that it has not acknowledged and sends them to
another one. A request that moves may run twice. It ends once, since its waiter is with one cluster
at a time.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from cachetools import LRUCache
from msgspec import Struct

from leanq.errors import (
    ClosedError,
    LeanQError,
    LostError,
    RequestError,
    UnavailableError,
    UnknownStateError,
)
from leanq.producer.outstanding import Awaited
from leanq.producer.request_builder import PreparedRequest, Whereabouts
from leanq.producer.route import CallingBack, Clusters, RouteOptions, Waiter
from leanq.producer.shard_router import ShardRouter
from leanq.queue.client_queue import ClientQueue
from leanq.queue.requests import Reply
from leanq.queue.scripts import script_text
from leanq.queue.settings import Settings, without_password
from leanq.queue.shard import Shard, backoff_s

# How many states to remember with their cluster, which then need no lookup.
_STATES_REMEMBERED = 100_000


class Cluster:
    """One of the clusters.

    Attributes:
        name: its URL without the password, the same for all clients.
        up: whether it answered when it was last probed.
        watch: the task that probes it after trouble, until it answers.
        waiting: the requests that it has not acknowledged, by request id.
    """

    router: ShardRouter

    def __init__(self, settings: Settings, probe_s: float) -> None:
        self.settings = settings
        self.name = without_password(settings.url)
        self.up = True
        self.watch: asyncio.Task[None] | None = None
        self.waiting: dict[str, _Routed] = {}
        self._probe_s = probe_s

    async def fault(self) -> UnavailableError | None:
        """Probes the cluster on connections of its own; returns why it cannot be used, or None."""
        # Probe with a write that changes nothing: a replica would answer a read.
        name = f"probe-{secrets.token_urlsafe(12)}"
        try:
            async with asyncio.timeout(self._probe_s), Shard.every(self.settings) as shards:
                await asyncio.gather(*(ClientQueue(shard).drop_inbox(name) for shard in shards))
        except UnavailableError as error:
            return error
        except TimeoutError:
            return UnavailableError(f"no answer from {self.name} for {self._probe_s:g} s")
        return None


class _Routed(Struct, eq=False):
    """A request and the cluster that it is in; also the waiter that the cluster has for it."""

    router: ClusterRouter
    request_id: str
    prepared: PreparedRequest[Any]
    waiter: Waiter
    cluster: Cluster | None = None
    # Clusters from which it was withdrawn: they would answer its request id with ``cancelled``.
    left: tuple[Cluster, ...] = ()
    finding: asyncio.Task[None] | None = None

    def acknowledged(self) -> None:
        if self.cluster:
            self.cluster.waiting.pop(self.request_id, None)
        self.waiter.acknowledged()

    def ended(self, end: Reply | LeanQError) -> None:
        self.router.request_ended(self, end)

    def withdraw(self) -> None:
        if self.finding:
            self.finding.cancel()
        if self.cluster:
            self.cluster.waiting.pop(self.request_id, None)
            self.cluster.router.cancel(self.request_id, self)


class _Attached(Struct, eq=False):
    """A request whose id does not say where it is, so every cluster is asked for it."""

    router: ClusterRouter
    request_id: str
    waiter: Waiter
    asked: dict[Cluster, Waiter] = {}
    best: Reply | LeanQError | None = None

    def ask(self, clusters: Sequence[Cluster]) -> None:
        self.asked = {
            cluster: CallingBack(partial(self._answered, cluster), self.waiter.acknowledged)
            for cluster in clusters
        }
        for cluster, question in list(self.asked.items()):
            cluster.router.attach(self.request_id, question)

    def withdraw(self) -> None:
        for cluster, question in self.asked.items():
            cluster.router.cancel(self.request_id, question)

    def _answered(self, cluster: Cluster, end: Reply | LeanQError) -> None:
        del self.asked[cluster]
        if isinstance(end, Reply):
            self.router.learn(cluster, end)
        if self.best is None or _worth(end) > _worth(self.best):
            self.best = end
        # Do not wait for the other answers, nor withdraw those runs, which may be other callers'.
        is_over = not self.asked or _worth(end) == _FINAL
        if is_over and self.router.outstanding.holds(self):
            self.router.outstanding.end(self.request_id, self.best)


_FINAL = 3


def _worth(end: Reply | LeanQError) -> int:
    """Ranks one cluster's answer about a request that may be in another."""
    if isinstance(end, LostError):
        return 0
    if isinstance(end, Reply) and end.verdict == "cancelled":
        # The request may have been withdrawn here because it went elsewhere.
        return 1
    return _FINAL if isinstance(end, Reply | RequestError) else 2


class ClusterRouter:
    def __init__(self, clusters: Clusters, options: RouteOptions) -> None:
        self._weights = clusters
        self.clusters: list[Cluster] = []
        for settings in clusters.each:
            cluster = Cluster(settings, options.timings.probe_s)
            cluster.router = ShardRouter.to(settings, options, partial(self.look_after, cluster))
            self.clusters.append(cluster)
        self.outstanding = Awaited[_Routed | _Attached]()
        # The cluster in which each state was made.
        self._homes: LRUCache[str, Cluster] = LRUCache(_STATES_REMEMBERED)
        self._closed = False

    async def open(self) -> None:
        # Read the script now: a fork during an import inherits half of it.
        script_text("submit")
        faults = await asyncio.gather(*(cluster.fault() for cluster in self.clusters))
        if all(faults) and faults[0]:
            raise faults[0]
        for cluster, fault in zip(self.clusters, faults, strict=True):
            cluster.up = fault is None
            cluster.router.start()
            if fault:
                self.look_after(cluster)

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        sent = _Routed(self, prepared.submission.request_id, prepared, waiter)
        if not self.outstanding.enter(sent):
            return
        if not prepared.request.state:
            self._assign(sent, self._choose(sent) or self._choose(sent, down=True))
        elif home := self._homes.get(prepared.request.state):
            self._assign(sent, home)
        else:
            sent.finding = asyncio.get_running_loop().create_task(self._find(sent))

    def attach(self, request_id: str, waiter: Waiter) -> None:
        attached = _Attached(self, request_id, waiter)
        if self.outstanding.enter(attached):
            attached.ask(self.clusters)

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        entry = self.outstanding.get(request_id)
        if entry is None or not self.outstanding.withdraw(request_id, waiter):
            return False
        entry.withdraw()
        return True

    async def close(self, *, withdraw: bool) -> None:
        self._closed = True
        tasks = [cluster.watch for cluster in self.clusters if cluster.watch]
        for sent in list(self.outstanding.values()):
            if isinstance(sent, _Routed) and sent.finding and not sent.cluster:
                tasks.append(sent.finding)
                self.request_ended(
                    sent, ClosedError("the client was closed before the request ended")
                )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(
            *(cluster.router.close(withdraw=withdraw) for cluster in self.clusters)
        )

    def request_ended(self, sent: _Routed, end: Reply | LeanQError) -> None:
        if sent.cluster:
            sent.cluster.waiting.pop(sent.request_id, None)
            if isinstance(end, Reply):
                self.learn(sent.cluster, end)
        self.outstanding.end(sent.request_id, end)

    def look_after(self, cluster: Cluster) -> None:
        """Probes a cluster that fails, or is slow, until it answers."""
        if cluster.watch is None and not self._closed:
            cluster.watch = asyncio.get_running_loop().create_task(self._watch(cluster))

    async def _watch(self, cluster: Cluster) -> None:
        """Sends new and unacknowledged requests elsewhere until the cluster answers."""
        try:
            for pause_s in backoff_s(random.Random()):
                if await cluster.fault() is None:
                    break
                cluster.up = False
                self.move_from(cluster)
                await asyncio.sleep(pause_s)
            cluster.up = True
        finally:
            cluster.watch = None

    def move_from(self, cluster: Cluster) -> None:
        """Sends requests that a cluster has not acknowledged elsewhere."""
        for request_id, sent in list(cluster.waiting.items()):
            # With no other cluster, the request stays here.
            if to := self._choose(sent):
                del cluster.waiting[request_id]
                cluster.router.cancel(request_id, sent)
                sent.left += (cluster,)
                self._assign(sent, to)

    def _choose(self, sent: _Routed, *, down: bool = False) -> Cluster | None:
        """Chooses a cluster by rendezvous hashing in proportion to the weights.

        ``down``: clusters that do not answer count, too.
        """
        submission = sent.prepared.submission
        key = (submission.digest or submission.request_id).encode()
        best, least = None, math.inf
        for cluster in self.clusters:
            weight = self._weights.weight(cluster.settings.url)
            if weight and (cluster.up or down) and cluster not in sent.left:
                drawn = (
                    int.from_bytes(blake2b(cluster.name.encode() + key, digest_size=6).digest()) + 1
                )
                # Exponential with the weight as its rate, so the least in proportion to it.
                time = -math.log(drawn / (2**48 + 1)) / weight
                if time < least:
                    best, least = cluster, time
        return best

    def _assign(self, sent: _Routed, cluster: Cluster | None) -> None:
        assert cluster, "some weight is above 0"
        sent.cluster = cluster
        if not sent.prepared.request.state:
            # A request with a state never moves: other clusters need not know the state.
            cluster.waiting[sent.request_id] = sent
        cluster.router.send(sent.prepared, sent)

    async def _find(self, sent: _Routed) -> None:
        """Looks the request's state up in every cluster, and goes to the first that knows it."""
        error: LeanQError = UnknownStateError("no cluster")
        state = sent.prepared.request.state

        async def look(cluster: Cluster) -> tuple[Cluster, Whereabouts]:
            return cluster, await cluster.router.find(state)

        looks = [asyncio.create_task(look(cluster)) for cluster in self.clusters]
        try:
            for first in asyncio.as_completed(looks):
                try:
                    cluster, where = await first
                except LeanQError as fault:
                    # A cluster that did not answer may know it.
                    if isinstance(error, UnknownStateError):
                        error = fault
                    continue
                sent.prepared = sent.prepared.at(where)
                self._homes[state] = cluster
                self._assign(sent, cluster)
                return
        finally:
            for task in looks:
                task.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
        self.request_ended(sent, error)

    def learn(self, cluster: Cluster, reply: Reply) -> None:
        """Notes that the states of a reply are in the cluster that it came from."""
        for state in (reply.state, *(sorry.state for sorry in reply.sorries)):
            if state is not None:
                self._homes[state] = cluster
