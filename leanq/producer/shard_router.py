"""A client for each shard, and the router between them: a request id names its shard."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from leanq.errors import ClosedError, LeanQError, UnavailableError, UnknownStateError
from leanq.lean.recipes import read_recipe
from leanq.producer.request_builder import PreparedRequest, Whereabouts, whereabouts
from leanq.producer.shard_client import Done, ShardClient
from leanq.queue.keys import shard_of
from leanq.queue.queue import Queue, backoff_s
from leanq.states import RedisStates


class StateLocator:
    """Finds where states can be stepped, over the connections of the client's shard_clients."""

    def __init__(self, queues: Sequence[Queue], unavailable_timeout_s: float) -> None:
        self._queues = queues
        self._states = RedisStates(queues)
        self._unavailable_timeout_s = unavailable_timeout_s

    async def find(self, state: str) -> Whereabouts:
        """Where ``state`` can be stepped.

        Raises:
            UnknownStateError: nobody knows it, or it is of an environment that nobody offers.
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
        for environment, known in (await self._queues[0].fingerprints()).items():
            if known == fingerprint:
                return whereabouts(recipe, environment)
        raise UnknownStateError(
            f"the state {state} is of an environment with the fingerprint {fingerprint[:12]}, "
            "which no worker offers"
        )


class Route(Protocol):
    """Where a client's requests go; all on one event loop."""

    async def open(self) -> None:
        """Raises UnavailableError when no server answers."""

    def send(self, call: PreparedRequest[Any], done: Done) -> None:
        """Submits; ``done`` is called once, with the end, unless it was cancelled before."""

    def attach(self, request_id: str, done: Done) -> None:
        """Waits for a request that was submitted before."""

    def cancel(self, request_id: str, done: Done) -> bool:
        """Withdraws; False where ``done`` has been called already."""

    async def close(self, *, withdraw: bool) -> None:
        """Ends everything; what is outstanding is withdrawn, or runs on."""


class ShardRouter:
    """All shards of the queue, with the methods of a :class:`ShardClient`."""

    def __init__(self, shard_clients: Sequence[ShardClient], state_locator: StateLocator) -> None:
        self._each = shard_clients
        self._state_locator = state_locator
        # RequestBuilder whose state is being found.
        self._finding: dict[tuple[str, Done], asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Raises UnavailableError when one of the shards' servers does not answer."""
        ends = await asyncio.gather(*(d.open() for d in self._each), return_exceptions=True)
        faults = [end for end in ends if end]
        if faults:
            opened = [d for d, end in zip(self._each, ends, strict=True) if end is None]
            await asyncio.gather(*(d.close(withdraw=False) for d in opened))
            raise faults[0]

    def start(self) -> None:
        """Opens whether or not the servers answer."""
        for shard_client in self._each:
            shard_client.start()

    def send(self, call: PreparedRequest[Any], done: Done) -> None:
        """Submits, once it is known where."""
        submission = call.submission
        if call.state and not submission.environment:
            task = asyncio.get_running_loop().create_task(self._find(call, done))
            self._finding[submission.request_id, done] = task
        else:
            self._each[shard_of(submission.request_id)].send(submission, done)

    def attach(self, request_id: str, done: Done) -> None:
        self._each[shard_of(request_id)].attach(request_id, done)

    def cancel(self, request_id: str, done: Done) -> bool:
        if task := self._finding.pop((request_id, done), None):
            task.cancel()
            return True
        return self._each[shard_of(request_id)].cancel(request_id, done)

    async def close(self, *, withdraw: bool) -> None:
        finding, self._finding = self._finding, {}
        for (_, done), task in finding.items():
            task.cancel()
            done(ClosedError("the client was closed before the request ended"))
        await asyncio.gather(*finding.values(), return_exceptions=True)
        await asyncio.gather(*(d.close(withdraw=withdraw) for d in self._each))

    async def _find(self, call: PreparedRequest[Any], done: Done) -> None:
        submission = call.submission
        end: LeanQError | None = None
        try:
            where = await self._state_locator.find(call.state)
        except LeanQError as error:
            end = error
        if self._finding.pop((submission.request_id, done), None) is None:
            return
        if end:
            done(end)
        else:
            found = replace(submission, environment=where.environment, affinity=where.warmth)
            self._each[shard_of(submission.request_id)].send(found, done)
