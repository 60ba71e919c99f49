"""Several clusters under one client: each request goes to one of them, by weight, and stays there.

A cluster is chosen by hashing, so that identical requests of all clients meet, and so that a change
of the weights moves no more than it has to. What a cluster has not acknowledged goes to another one
when it is down, and is withdrawn from it. It may so run twice, but its callback is with one cluster
at a time, so it ends once.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from leanq.errors import (
    ClosedError,
    InvalidRequestError,
    LeanQError,
    LostError,
    RequestError,
    UnavailableError,
    UnknownStateError,
    UsageError,
)
from leanq.producer.request_builder import PreparedRequest
from leanq.producer.shard_client import Done, ShardClient, WhenFull
from leanq.producer.shard_router import ShardRouter, StateLocator
from leanq.queue.queue import Queue, backoff_s, every_shard
from leanq.queue.requests import Reply
from leanq.queue.results import Attached, Queued, Submission, Submitted
from leanq.queue.scripts import script_text
from leanq.queue.settings import Settings, each_cluster, without_password

_MOST = 1e9


class Clusters:
    """A client's clusters, and their weights, which any thread may change at any time.

    Raises:
        UsageError: no cluster, one twice, unlike numbers of shards, or weights that are none.
    """

    def __init__(self, each: Sequence[tuple[Settings, float]]) -> None:
        self.each = tuple(settings for settings, _ in each)
        if not each:
            raise UsageError("a client needs at least one URL")
        if len({settings.url for settings in self.each}) < len(self.each):
            raise UsageError("a cluster is named twice")
        if len({settings.shards for settings in self.each}) > 1:
            raise UsageError("clusters of one client must have the same number of shards")
        self._weights = _checked({settings.url: weight for settings, weight in each})

    @classmethod
    def load(
        cls,
        url: str | Settings | Sequence[str | Settings],
        weights: Sequence[float] | None,
        environ: Mapping[str, str],
    ) -> Clusters:
        """The clusters at ``url``, which is one, several, or a text that names several."""
        named: list[tuple[str | Settings, float | None]]
        if isinstance(url, str):
            named = [*each_cluster(url)]
        elif isinstance(url, Settings):
            named = [(url, None)]
        else:
            named = [(each, None) for each in url]
        if weights is not None:
            if any(weight is not None for _, weight in named):
                raise UsageError("the weights stand in the URL and beside it; give them once")
            if len(weights) != len(named):
                raise UsageError(f"there are {len(weights)} weights for {len(named)} clusters")
            named = [(each, weight) for (each, _), weight in zip(named, weights, strict=True)]
        return cls(
            [
                (
                    each if isinstance(each, Settings) else Settings.load(each, environ),
                    1.0 if weight is None else weight,
                )
                for each, weight in named
            ]
        )

    def weight(self, url: str) -> float:
        """The weight of the cluster at ``url``."""
        return self._weights[url]

    def change(self, weights: Mapping[str, float]) -> None:
        """Changes the weights of the clusters at these URLs; the others keep theirs.

        Raises:
            UsageError: not a cluster of this client, or weights that are none.
        """
        for url in weights:
            if url not in self._weights:
                raise UsageError(f"the client has no cluster {without_password(url)!r}")
        # A new one, so that nobody reads it half changed.
        self._weights = _checked({**self._weights, **weights})


def _checked(weights: dict[str, float]) -> dict[str, float]:
    for url, weight in weights.items():
        if not 0 <= weight <= _MOST:
            name = without_password(url)
            raise UsageError(f"the weight of {name} is {weight:g}; it must lie in 0 to {_MOST:g}")
    if not any(weights.values()):
        raise UsageError("all weights are 0; requests must be able to go somewhere")
    return weights


_PROBE_S = 3.0
# A submit without an answer for so long is looked into; it may be a network that swallows all.
_SLOW_S = 2.0
# States whose cluster need not be looked up.
_STATES_REMEMBERED = 100_000


class _Cluster:
    """One of the clusters, and what it has not acknowledged."""

    def __init__(self, settings: Settings, way: SeveralClusters, when_full: WhenFull) -> None:
        self.settings = settings
        # The same for all clients, whoever they log in as.
        self.name = without_password(settings.url).encode()
        self.up = True
        self.watch: asyncio.Task[None] | None = None
        self.waiting: dict[str, _Sent] = {}
        queues = [_Watched(settings, shard, self, way) for shard in range(settings.shards)]
        self.state_locator = StateLocator(queues, way.unavailable_timeout_s)
        self.shard_router = ShardRouter(
            [
                ShardClient(q, when_full=when_full, unavailable_timeout_s=way.unavailable_timeout_s)
                for q in queues
            ],
            self.state_locator,
        )

    async def fault(self) -> UnavailableError | None:
        """Why nothing can be sent there, if so; asked on connections of its own."""
        # A write that changes nothing, since a replica could be read.
        name = f"probe-{secrets.token_urlsafe(12)}"
        try:
            async with asyncio.timeout(_PROBE_S), every_shard(self.settings) as queues:
                await asyncio.gather(*(queue.drop_inbox(name) for queue in queues))
        except UnavailableError as error:
            return error
        except TimeoutError:
            return UnavailableError(f"no answer from {self.name.decode()} for {_PROBE_S:g} s")
        return None


class _Watched(Queue):
    """A shard that tells what it acknowledges, and of trouble."""

    def __init__(
        self, settings: Settings, shard: int, cluster: _Cluster, way: SeveralClusters
    ) -> None:
        super().__init__(settings, shard)
        self._cluster = cluster
        self._trouble = partial(way.look_after, cluster)

    async def submit(self, client: str, batch: Sequence[Submission]) -> list[Submitted]:
        slow = asyncio.get_running_loop().call_later(_SLOW_S, self._trouble)
        try:
            answers = await super().submit(client, batch)
        finally:
            slow.cancel()
        for item, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Queued | Attached):
                self._cluster.waiting.pop(item.request_id, None)
        return answers

    async def read_inbox(
        self, client: str, after: str, block_ms: int
    ) -> tuple[str, list[tuple[str, bytes]]]:
        try:
            return await super().read_inbox(client, after, block_ms)
        except UnavailableError:
            self._trouble()
            raise

    async def run(self, name: str, args: Sequence[Any]) -> Any:
        try:
            return await super().run(name, args)
        except UnavailableError:
            self._trouble()
            raise


class _Sent:
    """A request, and the callback that its cluster has for it."""

    __slots__ = ("call", "cluster", "done", "finding", "left", "way")

    def __init__(self, way: SeveralClusters, call: PreparedRequest[Any], done: Done) -> None:
        self.way = way
        self.call = call
        self.done = done
        self.cluster: _Cluster | None = None
        # Those that it was withdrawn from: the same request id would be answered there with that.
        self.left: tuple[_Cluster, ...] = ()
        self.finding: asyncio.Task[None] | None = None

    def __call__(self, end: Reply | LeanQError) -> None:
        self.way.ended(self, end)

    def withdraw(self, request_id: str) -> None:
        if self.finding:
            self.finding.cancel()
        if self.cluster:
            self.cluster.waiting.pop(request_id, None)
            self.cluster.shard_router.cancel(request_id, self)


class _Awaited:
    """A request that is asked for everywhere, since its request id does not say where it is."""

    def __init__(self, way: SeveralClusters, request_id: str, done: Done) -> None:
        self._way = way
        self._request_id = request_id
        self.done = done
        self._asked: dict[_Cluster, Done] = {}
        self._best: Reply | LeanQError | None = None

    def ask(self, clusters: Sequence[_Cluster]) -> None:
        self._asked = {cluster: partial(self._answered, cluster) for cluster in clusters}
        for cluster, done in list(self._asked.items()):
            cluster.shard_router.attach(self._request_id, done)

    def withdraw(self, request_id: str) -> None:
        for cluster, done in self._asked.items():
            cluster.shard_router.cancel(request_id, done)

    def _answered(self, cluster: _Cluster, end: Reply | LeanQError) -> None:
        del self._asked[cluster]
        if isinstance(end, Reply):
            self._way.learn(cluster, end)
        if self._best is None or _worth(end) > _worth(self._best):
            self._best = end
        # What others still say is not waited for, nor withdrawn: their runs may be somebody's.
        if not self._asked or _worth(end) == _FINAL:
            self._way.told(self._request_id, self, self._best)


_FINAL = 3


def _worth(end: Reply | LeanQError) -> int:
    """How much the answer of one cluster tells of a request that may be in another."""
    if isinstance(end, LostError):
        return 0
    if isinstance(end, Reply) and end.verdict == "cancelled":
        # Perhaps withdrawn here since it went elsewhere.
        return 1
    return _FINAL if isinstance(end, Reply | RequestError) else 2


class SeveralClusters:
    """All clusters of a client, with the methods of a :class:`ShardRouter`."""

    def __init__(
        self, clusters: Clusters, *, when_full: WhenFull, unavailable_timeout_s: float
    ) -> None:
        self.unavailable_timeout_s = unavailable_timeout_s
        self._clusters = clusters
        self._each = [_Cluster(settings, self, when_full) for settings in clusters.each]
        self._outstanding: dict[str, _Sent | _Awaited] = {}
        # Where states were made.
        self._homes: OrderedDict[str, _Cluster] = OrderedDict()
        self._closed = False

    async def open(self) -> None:
        """Raises UnavailableError when none of the clusters answers."""
        # Whoever forks amid an import inherits half of it.
        script_text("submit")
        faults = await asyncio.gather(*(cluster.fault() for cluster in self._each))
        if all(faults) and faults[0]:
            raise faults[0]
        for cluster, fault in zip(self._each, faults, strict=True):
            cluster.up = fault is None
            cluster.shard_router.start()
            if fault:
                self.look_after(cluster)

    def send(self, call: PreparedRequest[Any], done: Done) -> None:
        """Submits to the cluster of the call's state, else to one by weight."""
        request_id = call.submission.request_id
        if request_id in self._outstanding:
            done(InvalidRequestError(f"this client already waits for request {request_id}"))
            return
        sent = self._outstanding[request_id] = _Sent(self, call, done)
        if not call.state:
            self._place(sent, self._choose(sent) or self._choose(sent, down=True))
        elif home := self._homes.get(call.state):
            self._place(sent, home)
        else:
            sent.finding = asyncio.get_running_loop().create_task(self._find(sent))

    def attach(self, request_id: str, done: Done) -> None:
        if request_id in self._outstanding:
            done(InvalidRequestError(f"this client already waits for request {request_id}"))
            return
        awaited = self._outstanding[request_id] = _Awaited(self, request_id, done)
        awaited.ask(self._each)

    def cancel(self, request_id: str, done: Done) -> bool:
        entry = self._outstanding.get(request_id)
        if entry is None or entry.done != done:
            return False
        del self._outstanding[request_id]
        entry.withdraw(request_id)
        return True

    async def close(self, *, withdraw: bool) -> None:
        self._closed = True
        tasks = [cluster.watch for cluster in self._each if cluster.watch]
        for sent in list(self._outstanding.values()):
            if isinstance(sent, _Sent) and sent.finding and not sent.cluster:
                tasks.append(sent.finding)
                self.ended(sent, ClosedError("the client was closed before the request ended"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(
            *(cluster.shard_router.close(withdraw=withdraw) for cluster in self._each)
        )

    def ended(self, sent: _Sent, end: Reply | LeanQError) -> None:
        """A request has ended, where it was."""
        request_id = sent.call.submission.request_id
        del self._outstanding[request_id]
        if sent.cluster:
            sent.cluster.waiting.pop(request_id, None)
            if isinstance(end, Reply):
                self.learn(sent.cluster, end)
        sent.done(end)

    def told(self, request_id: str, awaited: _Awaited, end: Reply | LeanQError) -> None:
        """What the clusters say of a request that was asked for. Only the first time counts."""
        if self._outstanding.get(request_id) is awaited:
            del self._outstanding[request_id]
            awaited.done(end)

    def look_after(self, cluster: _Cluster) -> None:
        """Something is wrong there."""
        if cluster.watch is None and not self._closed:
            cluster.watch = asyncio.get_running_loop().create_task(self._watch(cluster))

    async def _watch(self, cluster: _Cluster) -> None:
        """Until it answers, nothing new goes there, and what it may not have goes elsewhere."""
        try:
            for pause_s in backoff_s(random.Random()):
                if await cluster.fault() is None:
                    break
                cluster.up = False
                self._move_from(cluster)
                await asyncio.sleep(pause_s)
            cluster.up = True
        finally:
            cluster.watch = None

    def _move_from(self, cluster: _Cluster) -> None:
        for request_id, sent in list(cluster.waiting.items()):
            # With nowhere to go, it stays and is tried here as well as looked after.
            if to := self._choose(sent):
                del cluster.waiting[request_id]
                cluster.shard_router.cancel(request_id, sent)
                sent.left += (cluster,)
                self._place(sent, to)

    def _choose(self, sent: _Sent, *, down: bool = False) -> _Cluster | None:
        """By rendezvous hashing, in proportion to the weights: one that answers, or any."""
        submission = sent.call.submission
        key = (submission.digest or submission.request_id).encode()
        best, least = None, math.inf
        for cluster in self._each:
            weight = self._clusters.weight(cluster.settings.url)
            if weight and (cluster.up or down) and cluster not in sent.left:
                drawn = int.from_bytes(blake2b(cluster.name + key, digest_size=6).digest()) + 1
                # Exponential with the weight as its rate, so it is the least in proportion to that.
                time = -math.log(drawn / (2**48 + 1)) / weight
                if time < least:
                    best, least = cluster, time
        return best

    def _place(self, sent: _Sent, cluster: _Cluster | None) -> None:
        assert cluster, "some weight is above 0"
        sent.cluster = cluster
        if not sent.call.state:
            # Others need not know the state.
            cluster.waiting[sent.call.submission.request_id] = sent
        cluster.shard_router.send(sent.call, sent)

    async def _find(self, sent: _Sent) -> None:
        """Looks the call's state up in every cluster, and goes where it is known first."""
        error: LeanQError = UnknownStateError("no cluster")
        state = sent.call.state
        looks = {asyncio.create_task(c.state_locator.find(state)): c for c in self._each}
        try:
            pending = set(looks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for look in done:
                    try:
                        where = look.result()
                    except LeanQError as fault:
                        # Whoever did not answer may know it.
                        if isinstance(error, UnknownStateError):
                            error = fault
                        continue
                    submission = sent.call.submission
                    environment, warmth = (
                        submission.environment or where.environment,
                        submission.affinity,
                    )
                    submission = replace(
                        submission, environment=environment, affinity=warmth or where.warmth
                    )
                    sent.call = replace(sent.call, submission=submission)
                    self._remember(state, looks[look])
                    self._place(sent, looks[look])
                    return
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
        self.ended(sent, error)

    def learn(self, cluster: _Cluster, reply: Reply) -> None:
        """The states of a reply are where it came from."""
        for state in (reply.state, *(sorry.state for sorry in reply.sorries)):
            if state is not None:
                self._remember(state, cluster)

    def _remember(self, state: str, cluster: _Cluster) -> None:
        self._homes[state] = cluster
        self._homes.move_to_end(state)
        while len(self._homes) > _STATES_REMEMBERED:
            self._homes.popitem(last=False)
