"""A worker's place in the fleet: it says what it offers, and what answers there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from leanq.errors import UsageError
from leanq.fleet.stats import environments_of
from leanq.lean.driver import Driver
from leanq.queue import wire
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.results import Status
from leanq.queue.shard import announce_shape
from leanq.queue.worker_queue import WorkerQueue

log = logging.getLogger("leanq.worker")


@dataclass(eq=False)
class Membership:
    """Registers a worker in one shard, and again if the shard forgets it or an environment changes.

    ``info``: what the worker says of itself. ``may_be_known``: whether the shard may know the
    worker, even if its answer was lost.
    """

    _worker: str
    _queue: WorkerQueue
    _drivers: Mapping[str, Driver]
    _info: Mapping[str, object]
    may_be_known: bool = False
    # The environments' descriptions as this worker published them.
    _published: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    async def join(self) -> None:
        """Enters the fleet; raises UnavailableError."""
        about = self._about
        # Only the worker itself is degraded; the rest describes the environment.
        degraded = {name: said["degraded"] for name, said in about.items() if "degraded" in said}
        environments = {
            name: wire.pack_info({k: v for k, v in said.items() if k != "degraded"})
            for name, said in about.items()
        }
        fingerprints = {
            environment: str(said.get("fingerprint", "")) for environment, said in about.items()
        }
        before = await self._queue.shard.fingerprints()
        info = wire.pack_info({**self._info, "fingerprints": fingerprints, "degraded": degraded})
        self.may_be_known = True
        await self._queue.register(self._worker, info, environments, fingerprints)
        self._published = about
        # Ask which workers are alive only if an environment had another fingerprint before.
        if any(known and before.get(name, known) != known for name, known in fingerprints.items()):
            self._warn_of_others(fingerprints, await OperatorQueue(self._queue.shard).status())

    async def rejoin(self) -> None:
        """Enters the fleet again after the server may have forgotten everything."""
        log.warning(
            "shard %d no longer knew worker %s, as after a lease that expired, a failover or a "
            "FLUSHALL: it joins again",
            *(self._queue.shard.keys.shard, self._worker),
        )
        if self._queue.shard.keys.shard == 0:
            try:
                await announce_shape(self._queue.shard)
            except UsageError as error:
                # Another fleet was faster to begin anew; the requests that this worker holds go on.
                log.error("%s", error)
        await self.join()

    async def publish_changes(self) -> None:
        """Publishes a changed environment, whose remembered verdicts then count no longer."""
        if self._about != self._published:
            await self.join()

    def _warn_of_others(self, fingerprints: Mapping[str, str], status: Status) -> None:
        """Warns if living workers offer another environment under a name of this worker's."""
        for name, stats in environments_of(status).items():
            ours = fingerprints.get(name)
            others = {found: n for found, n in stats.fingerprints.items() if found != ours}
            if others and ours:
                said = ", ".join(f"{found[:12]} ({n})" for found, n in others.items())
                log.warning(
                    "other workers offer another environment as %r: its fingerprint is %s here and "
                    "%s there, so verdicts depend on the worker; give each a name of its own, or "
                    "bring Lean and the libraries to the same version everywhere",
                    name,
                    ours[:12],
                    said,
                )

    @property
    def _about(self) -> dict[str, Mapping[str, object]]:
        return {environment: driver.about for environment, driver in self._drivers.items()}
