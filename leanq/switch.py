"""A dispatcher for each shard, and the switch between them: a rid says whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .dispatch import Dispatcher, Done
from .keys import shard_of
from .transitions import Submission


class Switch:
    """All shards of the queue, with the methods of a :class:`Dispatcher`."""

    def __init__(self, dispatchers: Sequence[Dispatcher]) -> None:
        self._each = dispatchers

    async def open(self) -> None:
        """Raises UnavailableError when one of the shards' servers does not answer."""
        ends = await asyncio.gather(*(d.open() for d in self._each), return_exceptions=True)
        faults = [end for end in ends if end]
        if faults:
            opened = [d for d, end in zip(self._each, ends, strict=True) if end is None]
            await asyncio.gather(*(d.close(withdraw=False) for d in opened))
            raise faults[0]

    def send(self, submission: Submission, done: Done) -> None:
        self._each[shard_of(submission.rid)].send(submission, done)

    def attach(self, rid: str, done: Done) -> None:
        self._each[shard_of(rid)].attach(rid, done)

    def cancel(self, rid: str, done: Done) -> bool:
        return self._each[shard_of(rid)].cancel(rid, done)

    async def close(self, *, withdraw: bool) -> None:
        await asyncio.gather(*(d.close(withdraw=withdraw) for d in self._each))
