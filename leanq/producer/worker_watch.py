"""Warns when a client's requests wait while no worker is alive, or an operator holds them back.

While replies come from an environment, the watch asks nothing. After some seconds of silence it
asks the queue who serves the environment, and again at intervals that double.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from leanq.errors import NotPermittedError, UnavailableError
from leanq.producer.route import RouteOptions
from leanq.producer.shard_client import ShardClient
from leanq.queue.client_queue import ClientQueue
from leanq.queue.settings import without_password
from leanq.queue.shard import refusal

log = logging.getLogger("leanq.client")

_MAX_INTERVAL_S = 600.0
_OTHER_RELEASE = "start workers of this release, or use a client of theirs"


class Silence:
    """Finds silent environments: requests wait there, and none was answered for ``first_s``.

    Each later interval is twice as long.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        # When each is due, and the interval after that.
        self._due: dict[str, tuple[float, float]] = {}

    def due(self, waiting: AbstractSet[str], answered: AbstractSet[str], now_s: float) -> list[str]:
        """Returns the environments to look into now."""
        silent = waiting - answered
        self._due = {name: at for name, at in self._due.items() if name in silent}
        found = []
        for name in sorted(silent):
            at_s, interval_s = self._due.get(name, (now_s + self._first_s, 2 * self._first_s))
            if now_s >= at_s:
                found.append(name)
                at_s, interval_s = now_s + interval_s, min(_MAX_INTERVAL_S, 2 * interval_s)
            self._due[name] = at_s, interval_s
        return found


class WorkerWatch:
    """Watches over the environments of one cluster for a client.

    ``queue``: any shard of the cluster; every worker serves all of them.
    """

    def __init__(
        self, queue: ClientQueue, shards: Sequence[ShardClient], options: RouteOptions
    ) -> None:
        self._queue = queue
        self._shards = shards
        self._no_worker = options.no_worker
        self._every_s = options.timings.no_worker_s
        self._silence = Silence(self._every_s)

    async def run(self) -> None:
        """Watches until it is cancelled; returns at once if the client waits in silence."""
        while self._no_worker != "wait":
            await asyncio.sleep(self._every_s / 2)
            waiting = self._waiting()
            answered = {
                name for shard in self._shards for name in shard.outstanding.take_answered()
            }
            if due := self._silence.due(waiting.keys(), answered, time.monotonic()):
                try:
                    served, paused = await self._queue.served(), await self._queue.shard.paused()
                    refused = await refusal(self._queue.shard)
                    unread = {name: await self._queue.unread(name) for name in due}
                except NotPermittedError as error:
                    names = ", ".join(due)
                    log.warning("whether a worker is alive for %s is unknown: %s", names, error)
                    return
                except UnavailableError:
                    # The client itself reports a server that is out of reach.
                    continue
                self._look(served, paused, refused, unread)

    def _waiting(self) -> dict[str, Counter[str]]:
        """Counts waiting requests by environment, and there by tenant."""
        waiting: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for shard in self._shards:
            for (environment, tenant), count in shard.outstanding.waiting().items():
                waiting[environment][tenant] += count
        return waiting

    def _look(
        self,
        served: AbstractSet[str],
        paused: Mapping[str, float],
        refused: str,
        unread: Mapping[str, str],
    ) -> None:
        """Warns of requests that wait. ``unread``: by environment, why no worker reads them."""
        # Some may have ended while the server was asked.
        waiting = self._waiting()
        for name, why in unread.items():
            if name not in waiting:
                continue
            if f"e:{name}" in paused:
                # An operator may hold them back, and stop the workers, to save costs.
                _warn_of_pause("environment", "--env", name, waiting[name].total())
                continue
            for tenant, count in waiting[name].items():
                if f"t:{tenant}" in paused:
                    _warn_of_pause("tenant", "--tenant", tenant, count)
            if name in served:
                if why:
                    log.warning("requests for %r wait: %s; %s", name, why, _OTHER_RELEASE)
                continue
            count = waiting[name].total()
            requests = f"{_requests(count)} of this client {'waits' if count == 1 else 'wait'}"
            text = (
                f"no worker is alive for the environment {name!r} at "
                f"{without_password(self._queue.shard.settings.url)}: {requests}; "
                f"start one with 'leanq worker', or check the environment's name "
                f"(workers are alive for: {', '.join(sorted(served)) or 'none'})"
            )
            if why:
                text = f"{text}; {why}: {_OTHER_RELEASE}"
            if refused:
                text = f"{text}; a worker knocks and is refused: {refused}"
            if self._no_worker == "warn":
                log.warning("%s", text)
            else:
                for shard in self._shards:
                    shard.give_up(name, text)


def _warn_of_pause(what: str, option: str, name: str, count: int) -> None:
    log.warning(
        "the %s %r is paused: %s of this client will run once an operator resumes it "
        "(leanq resume %s %s)",
        *(what, name, _requests(count), option, name),
    )


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
