"""Writes replies into a replay memory for rewards and campaigns, which must neither fail nor wait
for it."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from leanq.errors import InvalidRequestError, NoRewardError, TooLargeError, UsageError
from leanq.producer.future_client import LoopThread
from leanq.queue.requests import Reply, reward
from leanq.queue.settings import Settings
from leanq.trainers.replay import ReplayMemory
from leanq.trainers.replay_entry import ReplayBounds, ReplayEntry

# The process keeps replies for so long while the server is away, and then drops them.
_TIMEOUT_S = 10.0


class ReplayWriter:
    """Writes into a replay memory in the background, from any thread and event loop.

    Entries that cannot be written are counted, and logged once a minute; no error is raised. In a
    forked child the writer goes on with a connection of its own.

    Args:
        name: the memory's.
        url: the Redis, as for ``leanq.trainers.ReplayMemory``.
        bounds: how much the memory keeps, if this writer is the first to use it.
        tags: tags of every entry, such as the policy's version.

    Raises:
        UsageError: a malformed argument, or no queue is found.
    """

    def __init__(
        self,
        name: str,
        url: str | Settings | None = None,
        *,
        bounds: ReplayBounds | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._new = partial(
            ReplayMemory, name, url, bounds=bounds, unavailable_timeout_s=_TIMEOUT_S
        )
        self._memory = self._new()
        self._tags = dict(tags or {})
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._dropped_before = 0

    def __getstate__(self) -> dict[str, Any]:
        # The entries of this process stay here.
        left_out = {"_lock": None, "_thread": None, "_memory": None, "_dropped_before": 0}
        return {**self.__dict__, **left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _memory=state["_new"]())

    @property
    def dropped(self) -> int:
        """How many entries of this process were not written."""
        return self._dropped_before + self._memory.dropped

    def add(
        self,
        reply: Reply,
        text: str,
        *,
        earned: float | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Writes a reply's entry in the background, unless the reply is an echo's.

        Args:
            reply: the reply.
            text: the text that was tried.
            earned: the reward, under the name ``lean``; none unless given, since a verdict alone
                does not tell what had to be proved.
            tags: tags of this entry, beside the writer's.
        """
        if reply.verdict is None:
            return
        rewards = {} if earned is None else {"lean": earned}
        entry = partial(
            ReplayEntry.of, reply, text, rewards=rewards, tags={**self._tags, **(tags or {})}
        )
        thread, memory = self._running()
        thread.call(partial(_add, memory, entry))

    def close(self) -> None:
        """Writes what was added, as far as the server takes it; the writer can be used again."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread and thread.is_here:
            atexit.unregister(self.close)
            thread.stop(self._memory.close)

    def _running(self) -> tuple[LoopThread, ReplayMemory]:
        with self._lock:
            if self._thread is None or not self._thread.is_here:
                self._dropped_before += self._memory.dropped
                self._thread, self._memory = LoopThread("leanq-replay"), self._new()
                # A trainer that ends may not know of this object.
                atexit.register(self.close)
            return self._thread, self._memory


def writer_for(memory: str | ReplayWriter, client: Any) -> ReplayWriter:
    """Returns ``memory`` if it is a writer; otherwise a writer for the memory of that name in the
    Redis of ``client``.

    Raises:
        UsageError: the client speaks to a gateway, or the name is malformed.
    """
    if isinstance(memory, ReplayWriter):
        return memory
    clusters = getattr(client, "clusters", None)
    if clusters is not None and not clusters:
        raise UsageError("a replay memory is in the Redis itself; a gateway has none")
    return ReplayWriter(memory, clusters[0] if clusters else getattr(client, "settings", None))


def _add(memory: ReplayMemory, entry: partial[ReplayEntry]) -> None:
    try:
        memory.add(entry())
    except (InvalidRequestError, TooLargeError) as error:
        memory.drop_unsent(1, str(error))


def earned_by(reply: Reply) -> float | None:
    """Returns the reward of a verification; None without a verdict of Lean's."""
    try:
        return reward(reply.verdict)
    except NoRewardError:
        return None
