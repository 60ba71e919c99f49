"""The route to one cluster: a client for each shard, chosen by the request id."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from leanq.errors import (
    ClosedError,
    LeanQError,
    NotPermittedError,
    UnavailableError,
    UnknownStateError,
)
from leanq.lean.goals.recipes import read_recipe
from leanq.producer.request_builder import PreparedRequest, Whereabouts, whereabouts
from leanq.producer.route import RouteOptions, Waiter
from leanq.producer.shard_client import ShardClient
from leanq.queue.client_queue import ClientQueue
from leanq.queue.keys import shard_of
from leanq.queue.settings import Settings, without_password
from leanq.queue.shard import Shard, backoff_s, refusal
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


# Warns when a client's requests wait while no worker is alive, or an operator holds them back.
#
# While replies come from an environment, the watch asks nothing. After some seconds of silence it
# asks the queue who serves the environment, and again at intervals that double.

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
