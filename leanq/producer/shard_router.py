"""The route to one cluster: a client for each shard, chosen by the request id."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from leanq.errors import ClosedError, LeanQError, UnavailableError, UnknownStateError
from leanq.lean.recipes import read_recipe
from leanq.producer.request_builder import PreparedRequest, Whereabouts, whereabouts
from leanq.producer.route import ClientTimings, NoWorker, Waiter, WhenFull
from leanq.producer.shard_client import ShardClient
from leanq.producer.worker_watch import WorkerWatch
from leanq.queue.client_queue import ClientQueue
from leanq.queue.keys import shard_of
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard, backoff_s
from leanq.states import RedisStates


class StateLocator:
    """Finds where states can be stepped, over the connections of the shards' clients."""

    def __init__(self, shards: Sequence[Shard], unavailable_timeout_s: float) -> None:
        self._shards = shards
        self._states = RedisStates(shards)
        self._unavailable_timeout_s = unavailable_timeout_s

    async def find(self, state: str) -> Whereabouts:
        """Returns where ``state`` can be stepped.

        Raises:
            UnknownStateError: the queue does not know it, or no worker offers its environment.
            UnavailableError: no server answered for ``unavailable_timeout_s``.
        """
        give_up_s = time.monotonic() + self._unavailable_timeout_s
        for pause_s in backoff_s(random.Random()):
            try:
                return await self._find(state)
            except UnavailableError:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError

    async def _find(self, state: str) -> Whereabouts:
        records = await self._states.recall(state)
        if records is None:
            raise UnknownStateError(
                f"the state {state} is not known here, or no longer; check its source again, or "
                "import it"
            )
        recipe = read_recipe(state, records)
        fingerprint = recipe.source.fingerprint
        for environment, known in (await self._shards[0].fingerprints()).items():
            if known == fingerprint:
                return whereabouts(recipe, environment)
        raise UnknownStateError(
            f"the state {state} is of an environment with the fingerprint {fingerprint[:12]}, "
            "which no worker offers"
        )


class ShardRouter:
    """The route to all shards of one cluster.

    Args:
        shards: the client of each shard, in order.
        state_locator: finds the environment of a state.
        worker_watch: warns when requests wait and no worker is alive for them.
    """

    def __init__(
        self,
        shards: Sequence[ShardClient],
        state_locator: StateLocator,
        worker_watch: WorkerWatch,
    ) -> None:
        self.shards = shards
        self._state_locator = state_locator
        self._worker_watch = worker_watch
        self._watching: asyncio.Task[None] | None = None
        # Requests whose state is being looked up; waiters differ by identity.
        self._finding: dict[tuple[str, int], tuple[Waiter, asyncio.Task[None]]] = {}

    @classmethod
    def connect(
        cls,
        settings: Settings,
        *,
        when_full: WhenFull,
        unavailable_timeout_s: float,
        no_worker: NoWorker,
        timings: ClientTimings,
        shares_ends: bool = False,
        on_trouble: Callable[[], None] | None = None,
    ) -> ShardRouter:
        """Returns the route to the cluster of ``settings``, over connections of its own."""
        shards = Shard.each(settings)
        queues = [ClientQueue(shard) for shard in shards]
        clients = [
            ShardClient(
                queue,
                when_full=when_full,
                unavailable_timeout_s=unavailable_timeout_s,
                timings=timings,
                shares_ends=shares_ends,
                on_trouble=on_trouble,
            )
            for queue in queues
        ]
        watch = WorkerWatch(queues[0], clients, no_worker=no_worker, every_s=timings.no_worker_s)
        return cls(clients, StateLocator(shards, unavailable_timeout_s), watch)

    async def open(self) -> None:
        """Opens the route; raises UnavailableError when a shard's server does not answer."""
        ends = await asyncio.gather(
            *(shard.open() for shard in self.shards), return_exceptions=True
        )
        faults = [end for end in ends if end]
        if faults:
            opened = [shard for shard, end in zip(self.shards, ends, strict=True) if end is None]
            await asyncio.gather(*(shard.close(withdraw=False) for shard in opened))
            raise faults[0]
        self._watch()

    def start(self) -> None:
        """Opens the route even if servers do not answer."""
        for shard in self.shards:
            shard.start()
        self._watch()

    def _watch(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._worker_watch.run())

    async def find(self, state: str) -> Whereabouts:
        """Returns where ``state`` can be stepped; raises as :meth:`StateLocator.find`."""
        return await self._state_locator.find(state)

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        """Submits a request once its environment is known."""
        submission = prepared.submission
        if prepared.request.state and not submission.environment:
            task = asyncio.get_running_loop().create_task(self._find(prepared, waiter))
            self._finding[submission.request_id, id(waiter)] = waiter, task
        else:
            self._shard(submission.request_id).send(submission, waiter)

    def attach(self, request_id: str, waiter: Waiter) -> None:
        """Waits for a request that was submitted before."""
        self._shard(request_id).attach(request_id, waiter)

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        """Withdraws a request; returns False if it has ended already."""
        if found := self._finding.pop((request_id, id(waiter)), None):
            found[1].cancel()
            return True
        return self._shard(request_id).cancel(request_id, waiter)

    async def close(self, *, withdraw: bool) -> None:
        """Ends every outstanding request; ``withdraw`` also withdraws them from the queue."""
        finding, self._finding = self._finding, {}
        tasks = [task for _, task in finding.values()]
        if self._watching:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        for waiter, _ in finding.values():
            waiter.ended(ClosedError("the client was closed before the request ended"))
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(shard.close(withdraw=withdraw) for shard in self.shards))

    async def _find(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        submission = prepared.submission
        error: LeanQError | None = None
        try:
            where = await self._state_locator.find(prepared.request.state)
        except LeanQError as fault:
            error = fault
        if self._finding.pop((submission.request_id, id(waiter)), None) is None:
            return
        if error:
            waiter.ended(error)
        else:
            found = structs.replace(
                submission, environment=where.environment, affinity=where.warmth
            )
            self._shard(submission.request_id).send(found, waiter)

    def _shard(self, request_id: str) -> ShardClient:
        # Most queues have one shard, which each request id then names.
        return self.shards[0 if len(self.shards) == 1 else shard_of(request_id)]
