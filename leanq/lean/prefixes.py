"""What Lean has made of what texts begin with, so that it need not elaborate that again: processes
that stand behind a prefix (:mod:`leanq.lean.fork_server.standing`), and snapshots.

There are two kinds of snapshots, named by the hash of their text: of an import header, which serves
every text that begins with it, and of a whole source, which serves every trial in one of its holes,
since Lean takes up its work where two texts begin to differ. The former is made by imports alone
and may serve anything. The latter was made by a candidate's code, so what rests on it decides
nothing but where a search goes on: whatever closes a proof is compiled without it.

Snapshots are made beside the requests, when the costs say so. No request waits for one, and none
fails by one: what cannot be loaded is dropped, and Lean runs without.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from cachetools import LRUCache
from msgspec import structs

from leanq.errors import LeanQError
from leanq.lean.fork_server.standing import StandingPrefixes
from leanq.lean.process import Lean, Run, Slot, limits_of, read_run
from leanq.lean.recipes import snapshot_key, text_hash
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.snapshots.cache import Tally
from leanq.lean.snapshots.cost_model import Costs
from leanq.lean.snapshots.store import LocalSnapshot, Snapshots
from leanq.lean.syntax import split_header
from leanq.queue.requests import Reply, Request, Way
from leanq.states import States

log = logging.getLogger("leanq.worker")

_SAVED = "prefix.snapshot"
# Costs are compared in CPU time, which a busy machine does not stretch. Saving takes several times
# as long as elaborating, and what it saves was within a budget.
_SAVE_CPU_FACTOR, _SAVE_EXTRA_S = 20.0, 120.0

# A snapshot that Lean cannot load, and a candidate that kills it, look alike.
_DOUBTFUL = ("crashed", "memory")
# An error a hole: the first hundred must not hide the others.
_OPTIONS = ("-Dweak.maxErrors=1000000",)
_HEADERS_REMEMBERED = 256
_IMPORTS_SEEN = 3


@dataclass(slots=True)
class _Imports:
    """Runs that imported one header: how many, and the CPU time of the shortest."""

    count: int = 0
    least_s: float = math.inf


class Prefixes:
    """The snapshots of one environment.

    Attributes:
        counts: how texts with holes were run.
    """

    def __init__(self, lean: Lean, snapshots: Snapshots | None, costs: Costs) -> None:
        self._lean = lean
        able = lean.environment.toolchain.can_snapshot
        self.snapshots = snapshots if able else None
        self._costs = costs
        self._fingerprint = lean.environment.fingerprint
        self.saving: asyncio.Task[None] | None = None
        self._imports: LRUCache[str, _Imports] = LRUCache(_HEADERS_REMEMBERED)
        self.counts: Counter[Way] = Counter()
        self._standing = None
        if lean.forks is not None:
            self._standing = StandingPrefixes(lean.environment, lean.forks, slots=lean.slots)

    @property
    def tally(self) -> Tally:
        """What became of this machine's snapshots."""
        return self.snapshots.tally if self.snapshots else Tally()

    def holds(self, key: str) -> bool:
        """Whether a process stands behind a prefix of this text, or this machine has its snapshot
        on its disk."""
        if self._standing is not None and self._standing.holds(key):
            return True
        return self._on_disk(key)

    def _on_disk(self, key: str) -> bool:
        return self.snapshots is not None and self.snapshots.holds(key)

    async def with_header(
        self,
        code: str,
        work: Callable[[LocalSnapshot | None], Awaitable[Reply]],
        states: States,
    ) -> Reply:
        """What ``work`` makes of the snapshot of the text's header, or without; warm where the
        header's snapshot is on the disk."""
        text = split_header(code).text
        key = self._key(text)
        header = await self._header(key, states)
        reply = await work(header)
        if header is None:
            self._imported(key, text, reply.cpu_s, states)
        elif reply.verdict in _DOUBTFUL:
            reply = await work(None)
            if reply.verdict not in _DOUBTFUL:
                await self._drop(key, states)
        return structs.replace(reply, warm=self.holds(key))

    async def run(
        self,
        slot: Slot,
        source: str,
        code: str,
        request: Request,
        states: States,
        *,
        compile_: bool = False,
    ) -> Run:
        """Runs ``code``, which differs from ``source`` in its holes alone.

        With the source's snapshot if there is one. What Lean says does not depend on it.

        Args:
            compile_: whether to compile the code, if it has to be elaborated from the start.
        """
        key = self._key(source)
        if run := await self._continued(key, source, code, request):
            return self._counted(run, "warm")
        warm, damaged = self._on_disk(key), self._damaged(states)
        snapshot = await self._load(key, states)
        if snapshot:
            run = await self._run(slot, code, request, snapshot, False)
            if run.outcome.verdict not in _DOUBTFUL:
                self._costs.loaded(run.done.exit.cpu_s)
                return self._counted(run, "warm" if warm else "cold")
        run = await self._replay(slot, code, request, states, compile_)
        self._costs.replayed(key, run.done.exit.cpu_s)
        await self._expect(key, source, code, request, run)
        self._consider(key, source, run.done.exit.cpu_s, states, header=False)
        if snapshot and run.outcome.verdict not in _DOUBTFUL:
            await self._drop(key, states)
        failed = snapshot is not None or self._damaged(states) > damaged
        return self._counted(run, "failed" if failed else "replayed")

    async def _continued(self, key: str, source: str, code: str, request: Request) -> Run | None:
        """A run behind the prefix of the source, where a process stands there."""
        if self._standing is None:
            return None
        limits = limits_of(request)
        done = await self._standing.run(key, source, code, limits)
        if done is None:
            return None
        run = await read_run(done, limits, compiled=True)
        if run.outcome.verdict in _DOUBTFUL:
            return None
        self._costs.continued()
        return run

    async def _expect(self, key: str, source: str, code: str, request: Request, run: Run) -> None:
        """Puts a process behind the prefix of what was run, where that is worth it."""
        cpu_s = run.done.exit.cpu_s
        if self._standing is None or run.done.exit.stopped or run.outcome.verdict in _DOUBTFUL:
            return
        if self._costs.worth_standing(key, cpu_s):
            command, limits = self._lean.command(_OPTIONS), limits_of(request)
            await self._standing.expect(key, source, code, command, run.done, limits)

    async def _replay(
        self, slot: Slot, code: str, request: Request, states: States, compile_: bool
    ) -> Run:
        text = split_header(code).text
        key = self._key(text)
        header = await self._header(key, states)
        run = await self._run(slot, code, request, header, compile_)
        if header is None:
            self._imported(key, text, run.done.exit.cpu_s, states)
        elif run.outcome.verdict in _DOUBTFUL:
            run = await self._run(slot, code, request, None, compile_)
            if run.outcome.verdict not in _DOUBTFUL:
                await self._drop(key, states)
        return run

    def _damaged(self, states: States) -> int:
        return self.tally.damaged + states.counts["damaged"]

    def _counted(self, run: Run, way: Way) -> Run:
        self.counts[way] += 1
        return replace(run, way=way)

    def _key(self, text: str) -> str:
        """Names the snapshot of a header or a source."""
        return snapshot_key(self._fingerprint, text_hash(text))

    async def _header(self, key: str, states: States) -> LocalSnapshot | None:
        """The snapshot of a header, where there is one and importing takes longer."""
        seen = self._imports.get(key)
        if seen is None or not self._costs.worth_loading(seen.least_s):
            return None
        return await self._load(key, states)

    def _imported(self, key: str, header: str, cpu_s: float, states: States) -> None:
        """Takes note of a run that imported this header itself."""
        seen = self._imports.setdefault(key, _Imports())
        seen.count += 1
        seen.least_s = min(seen.least_s, cpu_s)
        # What takes least has done hardly more than import.
        if seen.count >= _IMPORTS_SEEN:
            self._consider(key, header + "\n", seen.least_s, states, header=True)

    def _consider(
        self, key: str, text: str, replay_s: float, states: States, *, header: bool
    ) -> None:
        """Begins to make a snapshot that is worth it, unless another is being made: each takes a
        core and more memory than a request."""
        if self.snapshots is None or self.saving or self.snapshots.holds(key):
            return
        if self._costs.worth_saving(key, replay_s):
            self.saving = asyncio.create_task(self._save(key, text, replay_s, states, header))
            self.saving.add_done_callback(self._saved)

    def _saved(self, task: asyncio.Task[None]) -> None:
        self.saving = None
        if not task.cancelled() and (fault := task.exception()):
            log.error("a snapshot was not made", exc_info=fault)

    async def close(self) -> None:
        """Gives up what is being made, and ends what stands."""
        if self._standing is not None:
            await self._standing.close()
        if self.saving:
            self.saving.cancel()
            await asyncio.gather(self.saving, return_exceptions=True)

    async def _run(
        self,
        slot: Slot,
        code: str,
        request: Request,
        load: LocalSnapshot | None,
        compile_: bool,
    ) -> Run:
        return await self._lean.run(
            slot,
            code,
            limits_of(request),
            options=_OPTIONS,
            load=load,
            compile_=compile_,
        )

    async def _load(self, key: str, states: States) -> LocalSnapshot | None:
        if self.snapshots is None:
            return None
        return await self.snapshots.fetch(key, states)

    async def _drop(self, key: str, states: States) -> None:
        if self.snapshots is not None:
            await self.snapshots.damaged(key, states)

    async def _save(
        self, key: str, text: str, replay_s: float, states: States, header: bool
    ) -> None:
        assert self.snapshots is not None
        cpu_s = _SAVE_CPU_FACTOR * replay_s + _SAVE_EXTRA_S
        limits = Limits(cpu_s=cpu_s, wall_s=5 * cpu_s, memory_bytes=16 << 30)
        flag = "--incr-header-save" if header else "--incr-save"
        try:
            # Steps on one state often come together, to several machines.
            if not await states.begin_snapshot(key):
                return
            async with self._lean.slot() as slot:
                run = await self._lean.run(
                    slot, text, limits, options=[f"{flag}={_SAVED}"], compile_=False
                )
                file = slot.left / _SAVED
                if not file.is_file():
                    return
                size_bytes = file.stat().st_size
                self._costs.saved(size_bytes, run.done.exit.cpu_s, replay_s)
                await self.snapshots.keep(key, file, states)
        except LeanQError as error:
            log.warning("a snapshot was not kept: %s", error)
