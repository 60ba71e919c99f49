"""The route to one cluster: a client for each shard, chosen by the request id."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from leanq.errors import ClosedError, LeanQError, UnavailableError, UnknownStateError
from leanq.lean.recipes import read_recipe
from leanq.producer.request_builder import PreparedRequest, Whereabouts, whereabouts
from leanq.producer.route import RouteOptions, Waiter
from leanq.producer.shard_client import ShardClient
from leanq.producer.worker_watch import WorkerWatch
from leanq.queue.client_queue import ClientQueue
from leanq.queue.keys import shard_of
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard, backoff_s
from leanq.states import RedisStates


class ShardRouter:
    """The route to all shards of one cluster, over connections of its own.

    ``on_trouble``: called when a call to a shard fails, or a submit is slow.
    """

    def __init__(
        self,
        queues: Sequence[ClientQueue],
        options: RouteOptions,
        on_trouble: Callable[[], None] | None = None,
    ) -> None:
        self.shards = [ShardClient(queue, options, on_trouble) for queue in queues]
        self._queue = queues[0]
        self._states = RedisStates([queue.shard for queue in queues])
        self._unavailable_timeout_s = options.unavailable_timeout_s
        self._worker_watch = WorkerWatch(queues[0], self.shards, options)
        self._watching: asyncio.Task[None] | None = None
        # The waiters of requests whose state is being looked up.
        self._finding: dict[Waiter, asyncio.Task[None]] = {}

    @classmethod
    def to(
        cls,
        settings: Settings,
        options: RouteOptions,
        on_trouble: Callable[[], None] | None = None,
    ) -> ShardRouter:
        return cls([ClientQueue(shard) for shard in Shard.each(settings)], options, on_trouble)

    async def open(self) -> None:
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
        self._watching = asyncio.create_task(self._worker_watch.run())

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
        for environment, known in (await self._queue.shard.fingerprints()).items():
            if known == fingerprint:
                return whereabouts(recipe, environment)
        raise UnknownStateError(
            f"the state {state} is of an environment with the fingerprint {fingerprint[:12]}, "
            "which no worker offers"
        )

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        submission = prepared.submission
        if prepared.request.state and not submission.environment:
            self._finding[waiter] = asyncio.create_task(self._send_once_found(prepared, waiter))
        else:
            self._shard(submission.request_id).send(submission, waiter)

    def attach(self, request_id: str, waiter: Waiter) -> None:
        self._shard(request_id).attach(request_id, waiter)

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        if finding := self._finding.pop(waiter, None):
            finding.cancel()
            return True
        return self._shard(request_id).cancel(request_id, waiter)

    async def close(self, *, withdraw: bool) -> None:
        finding, self._finding = self._finding, {}
        tasks = [*finding.values(), *filter(None, [self._watching])]
        for task in tasks:
            task.cancel()
        for waiter in finding:
            waiter.ended(ClosedError("the client was closed before the request ended"))
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(shard.close(withdraw=withdraw) for shard in self.shards))

    async def _send_once_found(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        end: Whereabouts | LeanQError
        try:
            end = await self.find(prepared.request.state)
        except LeanQError as error:
            end = error
        if self._finding.pop(waiter, None) is None:
            return
        if isinstance(end, LeanQError):
            waiter.ended(end)
        else:
            self.send(prepared.at(end), waiter)

    def _shard(self, request_id: str) -> ShardClient:
        # Most queues have one shard, which each request id then names.
        return self.shards[0 if len(self.shards) == 1 else shard_of(request_id)]
