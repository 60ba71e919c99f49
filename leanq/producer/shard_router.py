"""A dispatcher for each shard, and the switch between them: a rid says whose it is."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from leanq.errors import ClosedError, LeanQError, UnavailableError, UnknownStateError
from leanq.lean.recipes import read_recipe
from leanq.producer.request_builder import Call, Whereabouts, whereabouts
from leanq.producer.shard_client import Dispatcher, Done
from leanq.queue.keys import shard_of
from leanq.queue.queue import Queue, backoff_s
from leanq.states import RedisStates


class Finder:
    """Finds where states can be stepped, over the connections of the client's dispatchers."""

    def __init__(self, queues: Sequence[Queue], patience_s: float) -> None:
        self._queues = queues
        self._states = RedisStates(queues)
        self._patience_s = patience_s

    async def find(self, state: str) -> Whereabouts:
        """Where ``state`` can be stepped.

        Raises:
            UnknownStateError: nobody knows it, or it is of an environment that nobody offers.
            UnavailableError: no server answered for ``patience_s``.
        """
        give_up_s = time.monotonic() + self._patience_s
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
        for lane, known in (await self._queues[0].fingerprints()).items():
            if known == fingerprint:
                return whereabouts(recipe, lane)
        raise UnknownStateError(
            f"the state {state} is of an environment with the fingerprint {fingerprint[:12]}, "
            "which no worker offers"
        )


class Route(Protocol):
    """Where a client's requests go; all on one event loop."""

    async def open(self) -> None:
        """Raises UnavailableError when no server answers."""

    def send(self, call: Call[Any], done: Done) -> None:
        """Submits; ``done`` is called once, with the end, unless it was cancelled before."""

    def attach(self, rid: str, done: Done) -> None:
        """Waits for a request that was submitted before."""

    def cancel(self, rid: str, done: Done) -> bool:
        """Withdraws; False where ``done`` has been called already."""

    async def close(self, *, withdraw: bool) -> None:
        """Ends everything; what is outstanding is withdrawn, or runs on."""


class Switch:
    """All shards of the queue, with the methods of a :class:`Dispatcher`."""

    def __init__(self, dispatchers: Sequence[Dispatcher], finder: Finder) -> None:
        self._each = dispatchers
        self._finder = finder
        # Calls whose state is being found.
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
        for dispatcher in self._each:
            dispatcher.start()

    def send(self, call: Call[Any], done: Done) -> None:
        """Submits, once it is known where."""
        submission = call.submission
        if call.state and not submission.lane:
            task = asyncio.get_running_loop().create_task(self._find(call, done))
            self._finding[submission.rid, done] = task
        else:
            self._each[shard_of(submission.rid)].send(submission, done)

    def attach(self, rid: str, done: Done) -> None:
        self._each[shard_of(rid)].attach(rid, done)

    def cancel(self, rid: str, done: Done) -> bool:
        if task := self._finding.pop((rid, done), None):
            task.cancel()
            return True
        return self._each[shard_of(rid)].cancel(rid, done)

    async def close(self, *, withdraw: bool) -> None:
        finding, self._finding = self._finding, {}
        for (_, done), task in finding.items():
            task.cancel()
            done(ClosedError("the client was closed before the request ended"))
        await asyncio.gather(*finding.values(), return_exceptions=True)
        await asyncio.gather(*(d.close(withdraw=withdraw) for d in self._each))

    async def _find(self, call: Call[Any], done: Done) -> None:
        submission = call.submission
        end: LeanQError | None = None
        try:
            where = await self._finder.find(call.state)
        except LeanQError as error:
            end = error
        if self._finding.pop((submission.rid, done), None) is None:
            return
        if end:
            done(end)
        else:
            found = replace(submission, lane=where.lane, affinity=where.warmth)
            self._each[shard_of(submission.rid)].send(found, done)
