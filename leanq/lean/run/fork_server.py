"""The worker's side of the fork server: chooses headers to preload, and keeps sandboxes behind
them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import re
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from leanq.errors import SandboxError
from leanq.lean.environment import Environment
from leanq.lean.run.evaluators import evaluators
from leanq.lean.run.headers import forkable_header
from leanq.lean.run.headers_memory import HeadersMemory, Ready
from leanq.lean.run.pass_memory import PassMemory
from leanq.lean.run.preloaded import letters, own_arguments
from leanq.lean.run.programs import runs_programs
from leanq.lean.run.proof import (
    BARE_HEADER,
    SHARED,
    DiffersError,
    Key,
    Prover,
    RunBytes,
    Trial,
    header_trial,
    memory_of,
    says_otherwise,
    short,
)
from leanq.lean.run.zygote_client import FORK_TIMEOUT_S, HeaderFailsError, Zygote
from leanq.lean.sandbox.sandbox import Limits, Sandbox
from leanq.queue.metrics import count
from leanq.queue.tasks import run_apart, to_its_end

log = logging.getLogger("leanq.worker")

_HEADERS_REMEMBERED = 1024
_PENDING_COMPARISONS = 4
# The sandboxes in wait behind all headers together, for each that has been taken at once.
_MOST_IDLE = 4
# In a row: a machine that is short of something for a moment has it again by then.
_MOST_REFUSALS = 100
_NEVER = 1 << 30
# Searches that keep what they have found in the imports for the next one in the same process, and
# the option after which Lean adds up times until its process ends.
_REMEMBERS = re.compile(r"exact\?|apply\?|rw\?|rewrites\?|hint|try\?|#find|library_search|profiler")
_READ_AT_ONCE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class ForkRules:
    """When a header is preloaded: with so many texts, since it takes as much CPU time as a start of
    Lean, and the proof as another one. The first one of an environment is preloaded with its first
    text, and so is one whose proof is remembered. One of ``compare_every`` texts runs both ways
    later on; 0 for none. ``shares``: whether a fork may serve a few texts of one tenant. To prove
    that costs what it saves of ``share_after`` texts."""

    preload_after: int = 2
    share_after: int = 24
    compare_every: int = 500
    shares: bool = True


@dataclass(slots=True)
class _Preloaded:
    """A header that is preloaded and proved, or is about to be. ``near``: if it is about to be,
    nothing is left to do but its own import and proof. ``served``: how many texts. ``is_proving``:
    that its forks may serve several. ``used_s``: the monotonic time of its last use."""

    zygote: Zygote | None = None
    used_s: float = 0.0
    near: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    served: int = 0
    is_proving: bool = False
    idle: deque[Sandbox] = field(default_factory=deque)
    taken: int = 0
    lent: int = 0
    shares: bool = False
    making: asyncio.Task[None] | None = None

    def best(self, command: Sequence[str], tenant: str | None, *, full: bool) -> list[Sandbox]:
        """Returns the idle sandboxes for a text, the best first. If there are enough of them
        (``full``), a fork that waits for another tenant's text ends for this one."""
        own = [each for each in self.idle if each.waits_for(tenant)]
        ready = [each for each in self.idle if each.is_prepared(command)]
        others = [each for each in self.idle if each.waits and each not in own]
        return [*own, *ready, *(others if full else [])]

    def begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        """Begins to preload or to prove it. ``tasks``: where the task is kept until it ends."""
        self.making = asyncio.create_task(work)
        tasks.add(self.making)
        self.making.add_done_callback(tasks.discard)
        # It may be cancelled before it begins.
        self.making.add_done_callback(lambda _: self.settled.set())

    async def end(self) -> None:
        if self.making is not None:
            self.making.cancel()
            await asyncio.gather(self.making, return_exceptions=True)
        while self.idle:  # and one that is taken meanwhile may be closed there
            await self.idle.popleft().close()
        if self.zygote is not None:
            await self.zygote.close()


@dataclass(eq=False)
class ForkServer:
    """The zygotes of one environment, which all slots of a worker share.

    Before a header serves, it is proved (:mod:`leanq.lean.run.proof`). Later, a share of
    the texts runs both ways. The first repeatable difference gives the fork server up, but for two
    exceptions, which have the header proved again. A text with programs of its own can tell a fork
    from a newly started Lean, and say so. A text can run out of a budget at another place, since a
    fork makes an object more or less.
    """

    environment: Environment
    rules: ForkRules
    hidden: Sequence[Path] = ()
    nice: int = 0
    memory: HeadersMemory = field(default_factory=HeadersMemory)
    slots: int = 1
    """How many headers texts may have preloaded at once."""
    expects: Callable[[Key], None] = lambda key: None
    """Called when a header begins to be preloaded."""
    unavailable: str = ""
    """Why there is no fork server here; empty if there is."""
    unshared: str = ""
    """Why each text has a fork of its own; empty if forks serve several."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _making: set[asyncio.Task[None]] = field(default_factory=set)
    _seen: LRUCache[Key, int] = field(default_factory=lambda: LRUCache(_HEADERS_REMEMBERED))
    _preloaded: dict[Key, _Preloaded] = field(default_factory=dict)
    _refusals: int = 0
    _most_taken: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        self._prover = Prover(self.environment, self.hidden, self.nice)
        self.comparisons = Comparisons(self, self._prover, self.rules.compare_every)
        self.idle.set()
        self.memory.join(self.ready)
        if not self.environment.toolchain.shared_libraries:
            self._say_given_up("this toolchain has no shared library, libleanshared.so")
        if not self.rules.shares:
            self.unshared = "it is told so"

    def pids(self) -> list[int]:
        """The processes that have imported a header, or their supervisors."""
        return [each.zygote.supervisor.pid for each in self._preloaded.values() if each.zygote]

    def key(self, code: str, command: Sequence[str]) -> Key | None:
        """Returns a text's header, if a zygote could import it and fork such a Lean."""
        if self.unavailable or self._closed:
            return None
        if letters(own_arguments(command)) is None:
            return None
        return forkable_header(self.environment, code)

    async def may_share(self, key: Key, code: str) -> bool:
        """Returns whether the fork for this text may have served others, and may serve more."""
        found = self._preloaded.get(key)
        if self.unshared or found is None or not found.shares or _REMEMBERS.search(code):
            return False

        def look() -> bool:
            return runs_programs(code, evaluators(self.environment)) is None

        return await run_apart(look, at_once=len(code) < _READ_AT_ONCE_CHARS)

    async def take(
        self,
        key: Key,
        command: Sequence[str],
        tenant: str | None = None,
        *,
        patience_s: float = math.inf,
    ) -> Sandbox | None:
        """Returns a sandbox behind a header, if there is one: at best with a fork that has served
        this tenant, or else with a Lean that waits for its text with this command.

        A header that is likely to come again is preloaded. Its texts wait for that at most
        ``patience_s``, since to import it themselves would take as long, and a processor more. At
        0 none is preloaded.
        """
        if key not in self._preloaded and patience_s:
            await self._consider(key)
        found = self._preloaded.get(key)
        if found is None:
            return None
        if found.zygote is None and found.near and patience_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await found.settled.wait()
        if found.zygote is None or not found.zygote.alive or self._preloaded.get(key) is not found:
            return None
        found.served += 1
        is_due = found.served % self.rules.share_after == 0
        if is_due and not found.shares and not found.is_proving:
            found.begin(self._share(key, found), self._making)
        found.used_s = time.monotonic()
        found.taken += 1
        self._most_taken = max(self._most_taken, self._taken())
        self.idle.clear()
        began_s = time.monotonic()
        try:
            idle = sum(len(each.idle) for each in self._preloaded.values())
            full = idle >= _MOST_IDLE * self._most_taken
            for sandbox in found.best(command, tenant, full=full):
                found.idle.remove(sandbox)
                if sandbox.alive:
                    sandbox.shares = found.shares
                    return sandbox
                await sandbox.close()
            sandbox = await self._prover.open(found.zygote)
        except BaseException as error:
            found.taken -= 1
            if not self._taken():
                self.idle.set()
            if not isinstance(error, SandboxError):
                raise
            hangs = time.monotonic() - began_s > FORK_TIMEOUT_S
            await self._refused(error, is_death=hangs or not found.zygote.alive)
            return None
        self._refusals = 0
        sandbox.shares = found.shares
        return sandbox

    async def is_ready(self, key: Key) -> bool:
        """Has a header preloaded, if need be; returns whether it is."""
        self.expect(key)
        if key not in self._preloaded:
            return False
        await self._preloaded[key].settled.wait()
        found = self._preloaded.get(key)
        return found is not None and found.zygote is not None and found.zygote.alive

    async def give_back(self, key: Key, sandbox: Sandbox, command: Sequence[str]) -> None:
        """Takes back a sandbox from :meth:`take`; its next text is likely to need this command."""
        found = self._preloaded.get(key)
        if found is not None:
            found.taken -= 1
            found.used_s = time.monotonic()
        if not self._taken():
            self.idle.set()
        if found is None or self._closed or self.unavailable or not sandbox.alive:
            await sandbox.close()
            if self.unavailable:
                await self.give_up(self.unavailable)
            return
        sandbox.clear()
        found.idle.append(sandbox)
        sandbox.shares = found.shares
        if not sandbox.waits:
            with contextlib.suppress(SandboxError):  # forks ahead of the next text
                env = self.environment.sandbox_env(sandbox.scratch)
                sandbox.prepare(command, env=env)
        idle = [each.idle for each in self._preloaded.values() if each.idle]
        if sum(map(len, idle)) > _MOST_IDLE * self._most_taken:
            await idle[0].popleft().close()

    async def lend(self, key: Key) -> Sandbox:
        """Lends a sandbox behind a header, which is preloaded first if need be, until :meth:`end`.
        Raises SandboxError if that is not possible here."""
        if not await self.is_ready(key):
            raise SandboxError("the header is not preloaded")
        found = self._preloaded[key]
        found.lent += 1
        try:
            return await self._prover.open(found.zygote)
        except BaseException:
            found.lent -= 1
            raise

    async def end(self, key: Key, sandbox: Sandbox) -> None:
        if found := self._preloaded.get(key):
            found.lent -= 1
            found.used_s = time.monotonic()
        await sandbox.close()

    async def preload(self, key: Key, *, anew: bool = False) -> None:
        """Preloads a header, and proves that its forks serve several texts; raises SandboxError if
        it cannot be preloaded."""
        found = self._preloaded[key] = _Preloaded()
        try:
            await self._preload(key, found, anew=anew)
            await self._share(key, found, anew=anew)
        except BaseException:
            self._preloaded.pop(key, None)
            raise
        finally:
            found.settled.set()

    def ready(self) -> Iterator[Ready]:
        """Yields each header that is preloaded."""
        for key, found in self._preloaded.items():
            if found.zygote is not None:
                yield Ready(found.used_s, found.zygote.memory_bytes, partial(self.evict, key))

    async def evict(self, key: Key) -> bool:
        """Ends a header's processes if no text is behind it; returns whether they have ended."""
        found = self._preloaded.get(key)
        if found is None or found.zygote is None or found.taken or found.lent:
            return False
        await self._drop(key)
        return True

    async def close(self) -> None:
        """Ends everything, except taken sandboxes, which end when they come back."""
        self._closed = True
        await self.comparisons.close()
        for task in self._making:
            task.cancel()
        await asyncio.gather(*self._making, return_exceptions=True)
        for key in list(self._preloaded):
            await self._drop(key)
        self.memory.leave(self.ready)

    def expect(self, key: Key, *, near: bool = False) -> None:
        """Begins to preload a header in the background, unless it is preloaded or cannot be.
        ``near``: this machine's forks, or the header's, are known to be proved."""
        refused = self._seen.get(key, 0) < 0
        if refused or key in self._preloaded or self.unavailable or self._closed:
            return
        found = self._preloaded[key] = _Preloaded(near=near)
        found.begin(self._make(key, found), self._making)
        self.expects(key)

    async def _consider(self, key: Key) -> None:
        """Begins to preload the header of a text, if it is likely to come again."""
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen < 0:
            return
        passes = [memory_of(self.environment, each) for each in (key, BARE_HEADER)]
        is_proved, near = await asyncio.to_thread(_first_and_any, passes)
        is_likely = is_proved or seen >= self.rules.preload_after or not self._preloaded
        imports = sum(each.zygote is None for each in self._preloaded.values())
        if is_likely and imports < self.slots:
            self.expect(key, near=near)

    def _taken(self) -> int:
        return sum(each.taken for each in self._preloaded.values())

    async def _make(self, key: Key, found: _Preloaded) -> None:
        try:
            await self._preload(key, found)
            if await asyncio.to_thread(memory_of(self.environment, key, SHARED).is_kept):
                await self._share(key, found)
        except (SandboxError, OSError) as error:
            self._preloaded.pop(key, None)
            found.settled.set()  # its texts do not wait for what is tried now
            if isinstance(error, HeaderFailsError) and await self._prover.is_header_wrong(key):
                log.info("Lean starts anew for texts with the header %s: %s", short(key), error)
                self._seen[key] = -_NEVER
            else:
                await self._doubt(key, error)

    async def _doubt(self, key: Key, fault: Exception) -> None:
        """Tells by a header without imports if none can be preloaded, or a candidate's alone."""
        try:
            if key != BARE_HEADER:
                await self._prover.prove_machine(anew=True)
                count("leanq_fork_server_total", "header_refused")
                log.warning("Lean starts anew for texts with the header %s: %s", short(key), fault)
                self._seen[key] = -_NEVER
                return
        except (SandboxError, OSError) as error:
            log.info("nor can a header without imports be preloaded: %s", error)
        await self.give_up(str(fault))

    async def _preload(self, key: Key, found: _Preloaded, *, anew: bool = False) -> None:
        """Preloads a header, and proves it ``anew``, or if no pass is remembered."""
        memory = memory_of(self.environment, key)
        started_s = time.monotonic()
        if not anew and await asyncio.to_thread(memory.is_kept):
            found.near = True
            zygote = await self._prover.new_zygote(key)
        else:
            await self._prover.prove_machine(anew=anew)
            found.near = True
            zygote = await self._prover.proved_zygote(key)
            await asyncio.to_thread(memory.keep)
        count("leanq_fork_server_total", "preloaded")
        took_s = time.monotonic() - started_s
        log.info("preloaded %s in %.1f s, %d MB", short(key), took_s, zygote.memory_bytes >> 20)
        found.zygote, found.used_s = zygote, time.monotonic()
        found.settled.set()
        await self.memory.make_room()

    async def _share(self, key: Key, found: _Preloaded, *, anew: bool = False) -> None:
        """Has forks serve several texts each, once that is proved, ``anew`` or unless a pass is
        remembered."""
        zygote = found.zygote
        if self.unshared or zygote is None or zygote.unwatched:
            return
        memory = memory_of(self.environment, key, SHARED)
        found.is_proving = True
        try:
            if anew or not await asyncio.to_thread(memory.is_kept):
                await self._prover.prove_sharing(key, zygote)
                await asyncio.to_thread(memory.keep)
            # The first time, this reads all libraries.
            await asyncio.to_thread(evaluators, self.environment)
            found.shares = True
        except DiffersError as error:
            self.share_no_more(str(error))
        except (SandboxError, OSError) as error:
            log.info("forks behind %s serve one text each: %s", short(key), error)
        finally:
            found.is_proving = False

    def share_no_more(self, why: str) -> None:
        """Gives each text a fork of its own from now on."""
        if not self.unshared:
            count("leanq_fork_server_total", "unshared")
            log.warning("each text has a fork of its own from now on: %s", why)
            self.unshared = why

    async def _drop(self, key: Key) -> None:
        found = self._preloaded.pop(key, None)
        if found is None:  # another task ends it
            return
        self._seen.pop(key, None)  # it may come again
        await to_its_end(found.end())

    async def _refused(self, error: SandboxError, *, is_death: bool) -> None:
        """Notes that there is no fork for a text; ``is_death``: nor will there be."""
        if not is_death:
            count("leanq_fork_server_total", "refused")
            self._refusals += 1
            if self._refusals < _MOST_REFUSALS:
                log.info("Lean starts for a text: %s", error)
                return
        await self.give_up(str(error))

    async def give_up(self, why: str) -> None:
        """Preloads nothing any more, and ends what is preloaded once no text is behind it."""
        if not self.unavailable:
            self._say_given_up(why)
        if not self._taken():
            for key in list(self._preloaded):
                await self._drop(key)

    def _say_given_up(self, why: str) -> None:
        count("leanq_fork_server_total", "given_up")
        log.warning("the fork server is given up, Lean starts anew for each text: %s", why)
        self.unavailable = why


@dataclass(frozen=True)
class Comparisons:
    """Runs one of ``every`` texts both ways, in idle moments; none at 0. The first repeatable
    difference gives the fork server up."""

    forks: ForkServer
    prover: Prover
    every: int
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _rng: random.Random = field(default_factory=random.Random)

    def is_due(self) -> bool:
        if not self.every or len(self._running) >= _PENDING_COMPARISONS:
            return False
        return self._rng.random() < 1 / self.every

    def begin(
        self,
        key: Key,
        command: Sequence[str],
        code: str,
        limits: Limits,
        seen: RunBytes,
        *,
        is_further: bool,
    ) -> None:
        """Runs a text again by a newly started Lean, in an idle moment. ``is_further``: its fork
        had served others before."""
        trial = Trial(code, args=own_arguments(command))
        task = asyncio.create_task(self._compare(key, trial, limits, seen, is_further=is_further))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _compare(
        self, key: Key, trial: Trial, limits: Limits, seen: RunBytes, *, is_further: bool
    ) -> None:
        await self.forks.idle.wait()
        try:
            if different := await self._difference(key, trial, limits, seen, is_further=is_further):
                raise DiffersError(says_otherwise(key, different))
        except DiffersError as error:
            await asyncio.to_thread(memory_of(self.prover.environment, key).forget)
            await self.forks.give_up(str(error))
        except (SandboxError, OSError) as error:
            log.warning("a text was not run both ways: %s", error)

    async def _blame_earlier(self, key: Key, trial: Trial, different: str, *runs: RunBytes) -> None:
        """Gives each text a fork of its own, if a text says something else behind others alone."""
        if not await asyncio.to_thread(self.prover.can_tell, trial.text, *runs):
            await asyncio.to_thread(memory_of(self.prover.environment, key, SHARED).forget)
            self.forks.share_no_more(says_otherwise(key, f"{different} of a text after others"))

    async def _difference(
        self, key: Key, trial: Trial, limits: Limits, seen: RunBytes, *, is_further: bool
    ) -> str:
        """Returns the repeatable difference of a text in a fork; empty if there is none, or the
        text itself causes it. Raises DiffersError if a text of ours differs, too."""
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await self.prover.new_sandbox(stack)
            plain = await self.prover.outcome(sandbox, trial, limits)
            count("leanq_fork_server_total", "compared")
            # Only a newly started Lean counts the import against the limits.
            if not (different := seen.difference(plain)) or plain.stopped is not None:
                return ""
            # A text that asks for the time says something else each time.
            forked = await self.forks.lend(key)
            stack.push_async_callback(self.forks.end, key, forked)
            if plain.difference(await self.prover.outcome(sandbox, trial, limits)):
                return ""
            alone = await self.prover.outcome(forked, trial, limits)
            if seen.difference(alone):
                if is_further and not alone.difference(plain):
                    await self._blame_earlier(key, trial, different, seen, plain)
                return ""
            if not await asyncio.to_thread(self.prover.can_tell, trial.text, seen, plain):
                return different
            count("leanq_fork_server_total", "told_apart")
            log.info("a text that can tell a fork says something else in one: %s", different)
            found = self.forks._preloaded.get(key)
            if found is not None and found.zygote is not None:
                await self.prover.prove(key, found.zygote, [header_trial(key)])
        return ""


def _first_and_any(passes: Sequence[PassMemory]) -> tuple[bool, bool]:
    """Returns whether the first pass is remembered, and whether one of them is."""
    found = [each.is_kept() for each in passes]
    return found[0], any(found)


async def fault_of_forks(environment: Environment, header: str, *, anew: bool = True) -> str:
    """Returns why texts with this header cannot run in forks here; empty if they can. ``anew``:
    whatever pass is remembered."""
    forks = ForkServer(environment, ForkRules())
    if forks.unavailable:
        return forks.unavailable
    try:
        await forks.preload(header, anew=anew)
    except (SandboxError, OSError) as error:
        return str(error)
    else:
        return ""
    finally:
        await forks.close()
