"""Has Lean elaborate a source with holes once. Processes then stand behind its prefix
(:mod:`leanq.lean.fork_server.standing`), and snapshots serve other machines.

A snapshot's name is the hash of its source. It serves every trial in one of the source's holes,
since Lean resumes where two texts begin to differ. A candidate's code made it, so it only decides
where a search goes on. A tactic that closes a proof is compiled without it.

Both are made for sources that come often enough. No request waits for one or fails by one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from cachetools import LRUCache

from leanq.errors import LeanQError
from leanq.lean.fork_server.standing import StandingPrefixes
from leanq.lean.process import Lean, Run, Slot, limits_of, read_run
from leanq.lean.recipes import snapshot_key, text_hash
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.snapshots.store import Snapshots
from leanq.queue.requests import Request
from leanq.states import States

log = logging.getLogger("leanq.worker")

_SAVED = "prefix.snapshot"
# Saving takes several times as long as elaborating, and the elaboration was within a budget.
_SAVE_CPU_FACTOR, _SAVE_EXTRA_S = 20.0, 120.0

# A snapshot that Lean cannot load looks like a candidate that kills Lean.
_DOUBTFUL = ("crashed", "memory")
# One error for each hole: the first hundred must not hide the others.
_OPTIONS = ("-Dweak.maxErrors=1000000",)
_SOURCES_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """When a source is worth a process or a snapshot: after so many texts with it, and so many CPU
    seconds for elaborating it. A process costs two elaborations. A snapshot costs three to four,
    and serves other machines too."""

    stand_after: int = 2
    stand_from_s: float = 0.1
    save_after: int = 4
    save_from_s: float = 0.5


@dataclass(slots=True)
class _Seen:
    """How often texts of a source ran, and the CPU seconds of its last elaboration."""

    count: int = 0
    replay_s: float = 0.0


class Prefixes:
    """The processes and snapshots behind the sources of one environment."""

    def __init__(self, lean: Lean, snapshots: Snapshots | None, rules: PrefixRules) -> None:
        self._lean = lean
        able = lean.environment.toolchain.can_snapshot
        self.snapshots = snapshots if able else None
        self._rules = rules
        self._fingerprint = lean.environment.fingerprint
        self.saving: asyncio.Task[None] | None = None
        self._seen: LRUCache[str, _Seen] = LRUCache(_SOURCES_REMEMBERED)
        self._standing = None
        if lean.forks is not None:
            self._standing = StandingPrefixes(lean.environment, lean.forks, slots=lean.slots)

    def holds(self, key: str) -> bool:
        """Returns whether a process stands behind a prefix of this text, or this machine has its
        snapshot on disk."""
        stands = self._standing is not None and self._standing.holds(key)
        return stands or self._on_disk(key)

    def _on_disk(self, key: str) -> bool:
        return self.snapshots is not None and self.snapshots.holds(key)

    async def run(
        self, slot: Slot, source: str, code: str, request: Request, states: States
    ) -> Run:
        """Runs ``code``, which differs from ``source`` in its holes alone. It uses the source's
        snapshot if there is one; Lean's messages do not depend on it."""
        key = snapshot_key(self._fingerprint, text_hash(source))
        limits, snapshots = limits_of(request), self.snapshots
        seen = self._seen.setdefault(key, _Seen())
        seen.count += 1
        standing = self._standing
        if standing and (done := await standing.run(key, source, code, limits)):
            run = await read_run(done, limits, compiled=True)
            if run.outcome.verdict not in _DOUBTFUL:
                self._consider(key, source, seen, states)
                return replace(run, way="warm")
        warm, damaged = self._on_disk(key), self._damaged(states)
        snapshot = await snapshots.fetch(key, states) if snapshots else None
        if snapshot:
            run = await self._lean.run(
                slot, code, limits, options=_OPTIONS, load=snapshot, compile_=False
            )
            if run.outcome.verdict not in _DOUBTFUL:
                return replace(run, way="warm" if warm else "cold")
        run = await self._lean.run(
            slot, code, limits, options=_OPTIONS, compile_=False, tenant=request.tenant
        )
        seen.replay_s = run.done.exit.cpu_s
        rules, is_sound = self._rules, run.outcome.verdict not in _DOUBTFUL
        is_worth_it = seen.count >= rules.stand_after and seen.replay_s >= rules.stand_from_s
        if standing and is_worth_it and is_sound and not run.done.exit.stopped:
            command = self._lean.command(_OPTIONS)
            await standing.expect(key, source, code, command, run.done, limits)
        self._consider(key, source, seen, states)
        if snapshots and snapshot and is_sound:
            await snapshots.damaged(key, states)
        failed = snapshot is not None or self._damaged(states) > damaged
        return replace(run, way="failed" if failed else "replayed")

    def _damaged(self, states: States) -> int:
        here = self.snapshots.cache.damaged if self.snapshots else 0
        return here + states.counts["damaged"]

    def _consider(self, key: str, source: str, seen: _Seen, states: States) -> None:
        """Begins to make a snapshot that is worth it, unless another is being made. Each takes a
        core, and more memory than a request."""
        rules = self._rules
        if self.snapshots is None or self.saving or self.snapshots.holds(key):
            return
        if seen.count >= rules.save_after and seen.replay_s >= rules.save_from_s:
            self.saving = asyncio.create_task(self._save(key, source, seen.replay_s, states))
            self.saving.add_done_callback(self._saved)

    def _saved(self, task: asyncio.Task[None]) -> None:
        self.saving = None
        if not task.cancelled() and (fault := task.exception()):
            log.error("a snapshot was not made", exc_info=fault)

    async def close(self) -> None:
        """Stops making snapshots, and ends the standing processes."""
        if self._standing is not None:
            await self._standing.close()
        if self.saving:
            self.saving.cancel()
            await asyncio.gather(self.saving, return_exceptions=True)

    async def _save(self, key: str, source: str, replay_s: float, states: States) -> None:
        assert self.snapshots is not None
        cpu_s = _SAVE_CPU_FACTOR * replay_s + _SAVE_EXTRA_S
        limits = Limits(cpu_s=cpu_s, wall_s=5 * cpu_s, memory_bytes=16 << 30)
        try:
            # Several machines often get steps on one state together.
            if not await states.begin_snapshot(key):
                return
            async with self._lean.slot() as slot:
                options = [f"--incr-save={_SAVED}"]
                await self._lean.run(slot, source, limits, options=options, compile_=False)
                file = slot.left / _SAVED
                if not file.is_file():
                    return
                await self.snapshots.keep(key, file, states)
        except LeanQError as error:
            log.warning("a snapshot was not kept: %s", error)
