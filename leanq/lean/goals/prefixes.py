"""What Lean has made of what texts begin with: standing processes and snapshots.

A snapshot's name is the hash of its source. It serves every trial in one of the source's holes,
since Lean resumes where two texts begin to differ. A candidate's code made it, so it only decides
where a search goes on. A tactic that closes a proof is compiled without it.

Both are made for sources that come often enough. No request waits for one or fails by one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cachetools import LRUCache

from leanq.errors import LeanQError, SandboxError
from leanq.lean.environment import Environment
from leanq.lean.goals.recipes import snapshot_key, text_hash
from leanq.lean.goals.snapshots import Snapshots
from leanq.lean.run.fork_server import ForkServer
from leanq.lean.run.headers_memory import Ready
from leanq.lean.run.process import Lean, Run, Slot, limits_of, read_run
from leanq.lean.run.proof import Key
from leanq.lean.run.zygote import ANSWER, ENDS, FLAG, PREFIX, REQUEST
from leanq.lean.sandbox.sandbox import Exit, Finished, Limits, Process, Sandbox, Usage
from leanq.lean.text import split_header, tokens
from leanq.queue.metrics import count
from leanq.queue.requests import Request
from leanq.queue.tasks import run_apart
from leanq.states import States

# The worker's side of processes that stand behind a prefix: makes, finds, asks and ends them.
#
# A text with a hole runs many times, each time with another tactic in the hole. The text before
# the hole's command is its *prefix*; theorems behind one file of definitions share it. A process
# of :mod:`leanq.lean.run.zygote` has elaborated the prefix, and elaborates the rest of each text
# in a fork.
#
# Lean's messages about a text are then those about the prefix, followed by those about the rest.
# The first text tests this: a Lean that read all of it has run it, too. If a process says anything
# else it is ended, and its prefix never gets another.

log = logging.getLogger("leanq.worker")

# The most memory above that behind its prefix, since it has nothing to keep of a request. Each
# request's limits count from the current memory, and would let it grow each time. Texts and answers
# pass through its memory.
_GROWTH_BYTES = 128 << 20
# Between requests it has nothing to do, and its scratch folder is empty. The less memory a process
# has left, the more often it is looked at.
_IDLE_LIMITS = Limits(
    cpu_s=10.0, wall_s=math.inf, memory_bytes=256 << 20, look_s=5.0, scratch_bytes=16 << 20
)
# It ends its forks itself. If a fork prevents that, both are ended a little later.
_SPARE_S = 5.0
_REFUSED_REMEMBERED = 1024
_ENDS_REMEMBERED = 4096
_STANDING_REMEMBERED = 1024
_READ_AT_ONCE = 1000
_MODIFIER = "private|protected|public|noncomputable|unsafe|partial|nonrec|local|scoped"
_COMMAND = re.compile(
    f"{_MODIFIER}|theorem|lemma|example|def|abbrev|instance|structure|inductive|class|opaque|axiom|"
    "mutual|section|namespace|open|variable|universe|set_option|attribute|@|/--"
)
# Lines that stand before a command and belong to it.
_BEFORE_COMMAND = re.compile(rf"{_MODIFIER}|in|\]|/--")


def prefix_end(code: str, offset: int) -> int:
    """Returns where the command begins that holds this offset, as far as can be told without Lean;
    0 if it cannot. A command begins a line."""
    found, before = 0, ""
    for token in tokens(code):
        if token.start > offset:
            break
        begins_line = token.start == 0 or code[token.start - 1] == "\n"
        if begins_line and _COMMAND.fullmatch(token.text) and not _BEFORE_COMMAND.fullmatch(before):
            found = token.start
        before = token.text
    return found


def first_difference(one: str, other: str) -> int:
    """Returns the first offset at which two texts differ; without one, the shorter one's length."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(eq=False)
class StandingPrefix:
    """A process behind one prefix, from :meth:`open`, and its memory after the last request."""

    sandbox: Sandbox
    _process: Process
    _prefix: str
    memory_bytes: int = 0
    busy: bool = False
    _most_bytes: int = 0
    _printed: bytes = b""
    _received: bytes = b""

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        argv: Sequence[str],
        env: Mapping[str, str],
        prefix: str,
        limits: Limits,
    ) -> StandingPrefix:
        """Elaborates a prefix, in a sandbox behind its header. Raises SandboxError if it exceeds
        these limits, or Lean finds errors in it."""
        process = await sandbox.start([*argv, FLAG], env=env, limits=limits)
        standing = cls(sandbox, process, prefix)
        text = prefix.encode()
        process.write(PREFIX.pack(len(text)) + text)
        status, _, standing._printed, _ = await standing._answer(limits)
        if status:
            await process.kill()
            raise SandboxError(f"alone it ends with code {status}")
        standing.memory_bytes = (await process.renew(_IDLE_LIMITS)).memory_bytes
        standing._most_bytes = standing.memory_bytes + _GROWTH_BYTES
        return standing

    @property
    def alive(self) -> bool:
        return not self._process.ended

    async def run(self, code: str, limits: Limits) -> Finished:
        """Returns Lean's output about a text that begins with the prefix; ``cpu_s`` is that of its
        rest. Raises SandboxError if the process has ended, perhaps with this text."""
        assert code.startswith(self._prefix)
        self.busy = True
        started_s = time.monotonic()
        watched = replace(limits, cpu_s=limits.cpu_s + _SPARE_S, wall_s=limits.wall_s + _SPARE_S)
        await self._renew(watched)
        rest = code[len(self._prefix) :].encode()
        self._process.discard()
        self._process.write(REQUEST.pack(len(rest), limits.cpu_s, limits.wall_s) + rest)
        status, end, stdout, stderr = await self._answer(limits)
        used = await self._renew(_IDLE_LIMITS)
        self.busy = False
        wall_s = time.monotonic() - started_s
        ended = Exit.of(status, stopped=ENDS[end], cpu_s=used.cpu_s, wall_s=wall_s, peak_bytes=0)
        return Finished(ended, self._printed + stdout, stderr)

    async def _renew(self, limits: Limits) -> Usage:
        used = await self._process.renew(limits)
        self.memory_bytes = used.memory_bytes
        if used.memory_bytes > self._most_bytes:
            await self._process.kill()
            raise SandboxError("the process behind a prefix holds more memory than its prefix")
        return used

    async def _answer(self, limits: Limits) -> tuple[int, int, bytes, bytes]:
        status, end, stdout_bytes, stderr_bytes = ANSWER.unpack(await self._read(ANSWER.size))
        if end >= len(ENDS) or stdout_bytes + stderr_bytes > limits.output_bytes:
            await self._process.kill()
            raise SandboxError("the process behind a prefix gave no answer that can be read")
        return status, end, await self._read(stdout_bytes), await self._read(stderr_bytes)

    async def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            chunk = await self._process.read()
            if not chunk:
                exit_ = await self._process.wait()
                raise SandboxError(f"the process behind a prefix has ended: {exit_}")
            self._received += chunk
        found, self._received = self._received[:size], self._received[size:]
        return found


@dataclass(slots=True)
class _Prefix:
    """The processes behind one prefix; each serves one request at a time. ``sources``: the names of
    the sources that are known to begin with it. ``used_s``: the monotonic time of its last use."""

    key: Key
    command: Sequence[str]
    text: str
    processes: list[StandingPrefix] = field(default_factory=list)
    making: asyncio.Task[None] | None = None
    used_s: float = field(default_factory=time.monotonic)
    sources: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(_STANDING_REMEMBERED))


@dataclass(eq=False)
class StandingPrefixes:
    """The processes of one environment that stand behind prefixes: at most ``slots`` behind one."""

    environment: Environment
    forks: ForkServer
    slots: int
    # By the hash of the prefix.
    _prefixes: dict[bytes, _Prefix] = field(default_factory=dict)
    _refused: LRUCache[bytes, bool] = field(default_factory=lambda: LRUCache(_REFUSED_REMEMBERED))
    # The ends of prefixes and their hashes, by a source's name and the offset of a hole.
    # Finding an end means to read the source, which takes longer than a step behind it.
    _ends: LRUCache[tuple[str, int], tuple[int, bytes]] = field(
        default_factory=lambda: LRUCache(_ENDS_REMEMBERED)
    )
    _closed: bool = False

    def __post_init__(self) -> None:
        self.forks.memory.join(self.ready)

    def ready(self) -> Iterator[Ready]:
        """Yields each prefix with its processes."""
        for name, found in self._prefixes.items():
            if found.processes:
                held = sum(each.memory_bytes for each in found.processes)
                yield Ready(found.used_s, held, partial(self._evict, name))

    def holds(self, source_key: str) -> bool:
        """Returns whether a process is known to stand behind a prefix of this source."""
        return any(
            source_key in found.sources and any(each.alive for each in found.processes)
            for found in self._prefixes.values()
        )

    async def run(self, source_key: str, source: str, code: str, limits: Limits) -> Finished | None:
        """Runs a text that differs from a source in its holes; returns None if no process can do it
        now. ``source_key`` names exactly this source."""
        stand = any(source.startswith(found.text) for found in self._prefixes.values())
        if self.forks.unavailable or not stand:
            return None
        _, name = await self._end_of_prefix(source_key, source, code)
        found = self._prefixes.get(name)
        if found is None:
            return None
        found.sources[source_key] = True
        for standing in list(found.processes):
            if standing.busy:
                continue
            if standing.alive:
                found.used_s = time.monotonic()
                return await self._ask(name, found, standing, code, limits)
            await self._lose(name, found, standing)
        return None

    async def expect(
        self,
        source_key: str,
        source: str,
        code: str,
        command: Sequence[str],
        done: Finished,
        limits: Limits,
    ) -> None:
        """Begins to put a process behind the prefix of a text that has run by itself, unless
        another is being made. Each takes a core, which requests need as well."""
        if self._makes():
            return
        end, name = await self._end_of_prefix(source_key, source, code)
        key = self.forks.key(source, command)
        is_header_alone = not source[split_header(source).end_offset : end].strip()
        if self._closed or key is None or name in self._refused or is_header_alone:
            return
        found = self._prefixes.get(name)
        if self._makes() or (found and len(found.processes) >= self.slots):
            return
        made = _Prefix(key, command, source[:end])
        found = found or self._prefixes.setdefault(name, made)
        found.sources[source_key] = True
        found.making = asyncio.create_task(self._make(name, found, code, done, limits))

    def _makes(self) -> bool:
        return any(found.making for found in self._prefixes.values())

    async def settled(self) -> None:
        making = [found.making for found in self._prefixes.values() if found.making]
        await asyncio.gather(*making, return_exceptions=True)

    async def close(self) -> None:
        self._closed = True
        for name in list(self._prefixes):
            await self._drop(name)
        self.forks.memory.leave(self.ready)

    async def _end_of_prefix(self, source_key: str, source: str, code: str) -> tuple[int, bytes]:
        """Returns where the prefix ends that a source shares with a text, and the prefix's hash."""
        offset = first_difference(source, code)
        known = self._ends.get((source_key, offset))
        if known is None:
            # Reading megabytes takes seconds, and nothing else may have to wait for it.
            at_once = len(source) < _READ_AT_ONCE
            end = await run_apart(prefix_end, source, offset, at_once=at_once)
            known = self._ends[source_key, offset] = end, text_hash(source[:end])
        return known

    async def _ask(
        self, name: bytes, found: _Prefix, standing: StandingPrefix, code: str, limits: Limits
    ) -> Finished | None:
        try:
            done = await standing.run(code, limits)
        except BaseException as error:
            await self._lose(name, found, standing)
            if not isinstance(error, SandboxError):
                raise
            log.info("a process behind a prefix is lost: %s", error)
            return None
        count("leanq_fork_server_total", "continued")
        return done

    async def _lose(self, name: bytes, found: _Prefix, standing: StandingPrefix) -> None:
        """Makes room for another process in the place of one that serves no more."""
        if standing not in found.processes:  # it is being ended, with its prefix
            return
        found.processes.remove(standing)
        if not found.processes and not found.making and self._prefixes.get(name) is found:
            del self._prefixes[name]  # or the texts of all lost ones would be kept
        await self.forks.end(found.key, standing.sandbox)

    async def _make(
        self,
        name: bytes,
        found: _Prefix,
        code: str,
        done: Finished,
        limits: Limits,
    ) -> None:
        sandbox, is_kept = None, False
        try:
            sandbox = await self.forks.lend(found.key)
            env = self.environment.sandbox_env(sandbox.scratch)
            standing = await StandingPrefix.open(sandbox, found.command, env, found.text, limits)
            again = await standing.run(code, limits)
            if (again.stdout, again.exit.code) != (done.stdout, done.exit.code):
                raise SandboxError("Lean says something else behind it")
            found.processes.append(standing)
            is_kept = True
            count("leanq_fork_server_total", "stood")
            found.used_s = time.monotonic()
            await self.forks.memory.make_room()
        except (SandboxError, OSError) as error:
            log.info(
                "no process stands behind a prefix of %d characters: %s", len(found.text), error
            )
            # Without a sandbox the machine was short of something, whatever the prefix.
            if sandbox is not None:
                self._refused[name] = True
        finally:
            if sandbox is not None and not is_kept:
                await self.forks.end(found.key, sandbox)
            found.making = None
            if not found.processes:
                self._prefixes.pop(name, None)

    async def _evict(self, name: bytes) -> bool:
        """Ends the processes behind a prefix if none is in use; returns whether they have ended."""
        found = self._prefixes.get(name)
        if found is None or found.making or any(each.busy for each in found.processes):
            return False
        await self._drop(name)
        return True

    async def _drop(self, name: bytes) -> None:
        found = self._prefixes.pop(name)
        if found.making is not None:
            found.making.cancel()
            await asyncio.gather(found.making, return_exceptions=True)
        while found.processes:  # requests that lose theirs change it meanwhile
            await self.forks.end(found.key, found.processes.pop().sandbox)


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
