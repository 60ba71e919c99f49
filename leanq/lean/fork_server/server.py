"""The worker's side of the fork server: chooses headers to preload, and keeps sandboxes behind
them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cachetools import LRUCache

from leanq.errors import SandboxError
from leanq.lean.audit.evaluators import evaluators
from leanq.lean.audit.programs import runs_programs
from leanq.lean.environment import Environment
from leanq.lean.fork_server.headers import forkable_header
from leanq.lean.fork_server.proof import (
    BARE_HEADER,
    MACHINE_TRIALS,
    PROOF_LIMITS,
    RunBytes,
    Trial,
    compiled_by,
    header_trials,
    memory_of,
)
from leanq.lean.fork_server.zygote_client import FORK_TIMEOUT_S, HeaderFailsError, Zygote
from leanq.lean.sandbox.sandbox import Limits, Sandbox
from leanq.queue.metrics import count
from leanq.queue.tasks import to_its_end

log = logging.getLogger("leanq.worker")

_HEADERS_REMEMBERED = 1024
_PENDING_COMPARISONS = 4
# The sandboxes in wait behind all headers together, for each that has been taken at once.
_MOST_IDLE = 4
# In a row: a machine that is short of something for a moment has it again by then.
_MOST_REFUSALS = 100
_NEVER = 1 << 30
_MOST_NAMED_CHARS = 200

Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ForkRules:
    """When a header is preloaded, and how it is checked then.

    Attributes:
        preload_after: a header is preloaded after so many texts. That takes as much CPU time as so
            many starts of Lean, and twice as much with the proof.
        compare_every: one of so many texts runs both ways later on; 0 for none.
        memory_bytes: the most memory of all preloaded headers of an environment; the one used least
            recently goes first.
    """

    preload_after: int = 3
    compare_every: int = 500
    memory_bytes: int = 2 << 30


class _DiffersError(SandboxError):
    """Lean says something else in a fork."""


@dataclass(slots=True)
class _Preloaded:
    """A header that is preloaded and proved, or is about to be."""

    zygote: Zygote | None = None
    idle: deque[Sandbox] = field(default_factory=deque)
    taken: int = 0
    lent: int = 0
    making: asyncio.Task[None] | None = None


class ForkServer:
    """The zygotes of one environment, which all slots of a worker share.

    Before a header serves, texts run behind it and by a newly started Lean, and all bytes are
    compared. Six texts run behind a header without imports, once for each environment, and two
    behind each header. This machine remembers a pass. Later, a share of the texts runs both ways,
    too. The first repeatable difference gives the fork server up for as long as the environment is
    open. There are two exceptions, which only have the header proved again. A text with programs of
    its own can tell a fork from a newly started Lean, and say so. A text can run out of a budget at
    another place, since a fork makes an object more or less.

    Args:
        hidden: folders to hide from candidates.
        nice: niceness of the forks.
    """

    def __init__(
        self,
        environment: Environment,
        rules: ForkRules,
        *,
        hidden: Sequence[Path] = (),
        nice: int = 0,
    ) -> None:
        self._environment = environment
        self._rules = rules
        self._comparing: set[asyncio.Task[None]] = set()
        self._making: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hidden = tuple(hidden)
        self._nice = nice
        self._seen: LRUCache[Key, int] = LRUCache(_HEADERS_REMEMBERED)
        self._preloaded: dict[Key, _Preloaded] = {}  # the one used least recently first
        self._rng = random.Random()
        self._refusals = 0
        self._most_taken = 0
        self._closed = False
        self.unavailable = ""
        """Why there is no fork server here; empty if there is."""
        if not environment.toolchain.shared_libraries:
            self._say_given_up("this toolchain has no shared library, libleanshared.so")

    def pids(self) -> list[int]:
        """The processes that have imported a header, or their supervisors."""
        return [each.zygote.supervisor.pid for each in self._preloaded.values() if each.zygote]

    def key(self, code: str, command: Sequence[str]) -> Key | None:
        """Returns the name of the header that a zygote would import for this text; None if none
        could."""
        if self.unavailable or self._closed:
            return None
        header = forkable_header(self._environment, code)
        return None if header is None else (header, tuple(command))

    async def take(self, key: Key) -> Sandbox | None:
        """Returns a sandbox behind a header; None if there is none yet. A repeated header is
        preloaded."""
        found = self._preloaded.get(key)
        if found is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] >= self._rules.preload_after and not self._making:
                self._expect(key)
            return None
        if found.zygote is None or not found.zygote.alive:
            return None
        self._preloaded[key] = self._preloaded.pop(key)
        found.taken += 1
        self._most_taken = max(self._most_taken, self._taken())
        self._idle.clear()
        began_s = time.monotonic()
        try:
            while found.idle:
                sandbox = found.idle.popleft()
                if sandbox.alive:
                    return sandbox
                await sandbox.close()
            sandbox = await self._open(found.zygote)
        except BaseException as error:
            found.taken -= 1
            if not self._taken():
                self._idle.set()
            if not isinstance(error, SandboxError):
                raise
            hangs = time.monotonic() - began_s > FORK_TIMEOUT_S
            await self._refused(error, is_death=hangs or not found.zygote.alive)
            return None
        self._refusals = 0
        return sandbox

    async def give_back(self, key: Key, sandbox: Sandbox) -> None:
        """Takes back an emptied sandbox from :meth:`take`."""
        found = self._preloaded.get(key)
        if found is not None:
            found.taken -= 1
        if not self._taken():
            self._idle.set()
        if found is None or self._closed or self.unavailable or not sandbox.alive:
            await sandbox.close()
            await self._end_unused()
            return
        sandbox.clear()
        found.idle.append(sandbox)
        self.prepare(key, sandbox)
        idle = [each.idle for each in self._preloaded.values() if each.idle]
        if sum(map(len, idle)) > _MOST_IDLE * self._most_taken:
            await idle[0].popleft().close()

    async def lend(self, key: Key) -> Sandbox:
        """Lends a sandbox whose Lean has imported a header, until :meth:`end` is called.

        Preloads the header if that has not been done.

        Raises:
            SandboxError: it is not possible here.
        """
        found = self._preloaded.get(key)
        if found is not None and found.making is not None:
            await asyncio.shield(found.making)
            found = self._preloaded.get(key)
        if found is None:
            self._expect(key)
            found = self._preloaded[key]
            assert found.making is not None
            await asyncio.shield(found.making)
        if found.zygote is None or not found.zygote.alive:
            raise SandboxError("the header is not preloaded")
        found.lent += 1
        try:
            return await self._open(found.zygote)
        except BaseException:
            found.lent -= 1
            raise

    async def end(self, key: Key, sandbox: Sandbox) -> None:
        """Ends the lent sandbox."""
        if found := self._preloaded.get(key):
            found.lent -= 1
        await sandbox.close()

    async def preload(self, header: str, command: Sequence[str], *, anew: bool = False) -> None:
        """Preloads a header for Lean with these arguments; ``anew`` proves it whatever is
        remembered.

        Raises:
            SandboxError: it is not possible here.
        """
        key = (header, tuple(command))
        found = self._preloaded[key] = _Preloaded()
        try:
            await self._preload(key, found, anew=anew)
        except BaseException:
            self._preloaded.pop(key, None)
            raise

    def is_due(self) -> bool:
        """Returns whether the next text is to run both ways."""
        if not self._rules.compare_every or len(self._comparing) >= _PENDING_COMPARISONS:
            return False
        return self._rng.random() < 1 / self._rules.compare_every

    def compare(self, key: Key, code: str, limits: Limits, seen: RunBytes) -> None:
        """Runs a text again by a newly started Lean, in an idle moment."""
        task = asyncio.create_task(self._compare(key, code, limits, seen))
        self._comparing.add(task)
        task.add_done_callback(self._comparing.discard)

    def prepare(self, key: Key, sandbox: Sandbox) -> None:
        """Forks ahead of the next text."""
        with contextlib.suppress(SandboxError):
            sandbox.prepare(
                key[1], env=self._environment.sandbox_env(sandbox.scratch), cwd=sandbox.scratch
            )

    async def close(self) -> None:
        """Ends everything, except taken sandboxes, which end when they come back."""
        self._closed = True
        tasks = [*self._comparing, *self._making]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key in list(self._preloaded):
            await self._drop(key)

    def _expect(self, key: Key) -> None:
        """Begins to preload a header."""
        found = self._preloaded[key] = _Preloaded()
        found.making = asyncio.create_task(self._make(key, found))
        self._making.add(found.making)
        found.making.add_done_callback(self._making.discard)

    def _taken(self) -> int:
        return sum(each.taken for each in self._preloaded.values())

    async def _make(self, key: Key, found: _Preloaded) -> None:
        try:
            await self._preload(key, found)
        except (SandboxError, OSError) as error:
            self._preloaded.pop(key, None)
            if isinstance(error, HeaderFailsError) and await self._is_header_wrong(key):
                log.info("Lean starts anew for texts with the header %s: %s", _short(key), error)
                self._refuse_header(key)
            else:
                await self._doubt(key, error)

    async def _doubt(self, key: Key, fault: Exception) -> None:
        """Decides whether no header can be preloaded, or this one alone, which a candidate has
        chosen. It proves a header without imports."""
        try:
            if key[0] != BARE_HEADER:
                await self._prove_machine(key[1], anew=True)
                count("leanq_fork_server_total", "header_refused")
                log.warning("Lean starts anew for texts with the header %s: %s", _short(key), fault)
                self._refuse_header(key)
                return
        except (SandboxError, OSError) as error:
            log.info("nor can a header without imports be preloaded: %s", error)
        await self._give_up(str(fault))

    async def _is_header_wrong(self, key: Key) -> bool:
        """Returns whether a newly started Lean refuses a header, too."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                plain = await self._new_sandbox(stack)
                seen = await self._outcome(plain, key, Trial(key[0]), PROOF_LIMITS)
            except (SandboxError, OSError):
                return True  # which tells nothing of forks
        return seen.code != 0

    def _refuse_header(self, key: Key) -> None:
        self._seen[key] = -_NEVER

    async def _preload(self, key: Key, found: _Preloaded, *, anew: bool = False) -> None:
        """Preloads a header, and proves it unless a pass is remembered; ``anew`` proves it in any
        case."""
        memory = memory_of(self._environment, *key)
        started_s = time.monotonic()
        passed = not anew and await asyncio.to_thread(memory.is_kept)
        if not passed:
            await self._prove_machine(key[1], anew=anew)
        zygote = await self._new_zygote(key)
        try:
            if not passed:
                await self._prove(key, zygote, header_trials(key[0]))
                await asyncio.to_thread(memory.keep)
        except BaseException:
            await zygote.close()
            raise
        count("leanq_fork_server_total", "preloaded")
        took_s = time.monotonic() - started_s
        log.info("preloaded %s in %.1f s, %d MB", _short(key), took_s, zygote.memory_bytes >> 20)
        found.zygote = zygote
        await self._make_room(key)

    async def _new_zygote(self, key: Key, env: Mapping[str, str] | None = None) -> Zygote:
        """Starts a process that has imported a header, with these additional environment
        variables."""
        header, command = key
        toolchain = self._environment.toolchain
        return await Zygote.open(
            toolchain.prefix and toolchain.prefix / "bin" / "lean",
            toolchain.shared_libraries,
            command[len(toolchain.command) :],
            header,
            {**self._environment.process_env(), **(env or {})},
        )

    async def _compare(self, key: Key, code: str, limits: Limits, seen: RunBytes) -> None:
        await self._idle.wait()
        try:
            if different := await self._difference(key, code, limits, seen):
                raise _DiffersError(_says_otherwise(key, different))
        except _DiffersError as error:
            await asyncio.to_thread(memory_of(self._environment, *key).forget)
            await self._give_up(str(error))
        except (SandboxError, OSError) as error:
            log.warning("a text was not run both ways: %s", error)

    async def _difference(self, key: Key, code: str, limits: Limits, seen: RunBytes) -> str:
        """Returns the repeatable difference of a text in a fork; empty if there is none, or the
        text itself causes it. Raises _DiffersError if a text of ours differs, too."""
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await self._new_sandbox(stack)
            plain = await self._outcome(sandbox, key, Trial(code), limits)
            count("leanq_fork_server_total", "compared")
            # Only a newly started Lean counts the import against the limits.
            if not (different := seen.difference(plain)) or plain.stopped is not None:
                return ""
            # A text that asks for the time says something else each time.
            forked = await self.lend(key)
            stack.push_async_callback(self.end, key, forked)
            for each, before in ((sandbox, plain), (forked, seen)):
                if before.difference(await self._outcome(each, key, Trial(code), limits)):
                    return ""
            if not await asyncio.to_thread(self._can_tell, code, seen, plain):
                return different
            count("leanq_fork_server_total", "told_apart")
            log.info("a text that can tell a fork says something else in one: %s", different)
            zygote = self._preloaded[key].zygote if key in self._preloaded else None
            if zygote is not None:
                await self._prove(key, zygote, header_trials(key[0]))
        return ""

    def _can_tell(self, code: str, *runs: RunBytes) -> bool:
        """Returns whether a text may say something else in a fork, though forks are as they should
        be."""
        found = evaluators(self._environment)
        return any(each.exhausted for each in runs) or runs_programs(code, found) is not None

    async def _prove_machine(self, command: tuple[str, ...], *, anew: bool = False) -> None:
        """Proves that forks work here, behind a header without imports. Texts that need no library
        show this in a tenth of the time.

        Raises:
            SandboxError: no header can be preloaded here.
        """
        key = BARE_HEADER, command
        memory = memory_of(self._environment, *key)
        if not anew and await asyncio.to_thread(memory.is_kept):
            return
        zygote = await self._new_zygote(key)
        try:
            await self._prove(key, zygote, MACHINE_TRIALS)
        finally:
            await zygote.close()
        await asyncio.to_thread(memory.keep)

    async def _prove(self, key: Key, zygote: Zygote, trials: Sequence[Trial]) -> None:
        """Raises _DiffersError if a text comes out differently behind a header."""
        async with contextlib.AsyncExitStack() as stack:
            plain = await self._new_sandbox(stack)
            forked = await self._new_sandbox(stack, zygote)
            for trial in trials:
                behind = forked
                if trial.env:  # which Lean reads at its start
                    other = await self._new_zygote(key, trial.env)
                    stack.push_async_callback(other.close)
                    behind = await self._new_sandbox(stack, other)
                for _ in range(2):
                    seen = await self._outcome(behind, key, trial, PROOF_LIMITS)
                    expected = await self._outcome(plain, key, trial, PROOF_LIMITS)
                    if not (seen.was_ended or expected.was_ended):
                        break
                if different := seen.difference(expected):
                    raise _DiffersError(_says_otherwise(key, different))

    async def _outcome(self, sandbox: Sandbox, key: Key, trial: Trial, limits: Limits) -> RunBytes:
        sandbox.clear()
        done = await sandbox.run(
            key[1],
            env={**self._environment.sandbox_env(sandbox.scratch), **trial.env},
            cwd=sandbox.scratch,
            limits=limits,
            stdin=trial.text.encode(),
        )
        return await asyncio.to_thread(RunBytes.of, done, compiled_by(key[1], sandbox.left))

    async def _new_sandbox(
        self, stack: contextlib.AsyncExitStack, zygote: Zygote | None = None
    ) -> Sandbox:
        """Returns a sandbox for as long as the stack is open."""
        sandbox = await self._open(zygote)
        stack.push_async_callback(sandbox.close)
        return sandbox

    async def _make_room(self, newest: Key) -> None:
        for key in list(self._preloaded):
            held = sum(f.zygote.memory_bytes for f in self._preloaded.values() if f.zygote)
            if held <= self._rules.memory_bytes or key == newest:
                return
            found = self._preloaded.get(key)
            if found is not None and not found.taken and not found.lent:
                await self._drop(key)

    async def _drop(self, key: Key) -> None:
        found = self._preloaded.pop(key, None)
        if found is None:  # another task ends it
            return
        self._seen.pop(key, None)  # it may come again
        await to_its_end(self._end(found))

    async def _end(self, found: _Preloaded) -> None:
        if found.making is not None:
            found.making.cancel()
            await asyncio.gather(found.making, return_exceptions=True)
        while found.idle:  # and one that is taken meanwhile may be closed there
            await found.idle.popleft().close()
        if found.zygote is not None:
            await found.zygote.close()

    async def _open(self, zygote: Zygote | None) -> Sandbox:
        """Opens a sandbox behind a preloaded header, or one in which Lean starts anew."""
        return await Sandbox.open(
            readable=self._environment.readable(),
            hidden=self._hidden,
            nice=self._nice,
            scratch_root=zygote.scratch if zygote else None,
            start=zygote.fork if zygote else None,
        )

    async def _refused(self, error: SandboxError, *, is_death: bool) -> None:
        """Notes that there is no fork for a text; ``is_death``: nor will there be."""
        if not is_death:
            count("leanq_fork_server_total", "refused")
            self._refusals += 1
            if self._refusals < _MOST_REFUSALS:
                log.info("Lean starts for a text: %s", error)
                return
        await self._give_up(str(error))

    async def _give_up(self, why: str) -> None:
        if not self.unavailable:
            self._say_given_up(why)
        await self._end_unused()

    def _say_given_up(self, why: str) -> None:
        count("leanq_fork_server_total", "given_up")
        log.warning("the fork server is given up, Lean starts anew for each text: %s", why)
        self.unavailable = why

    async def _end_unused(self) -> None:
        """Ends the zygotes of a fork server that is given up, once no text is behind one."""
        if self.unavailable and not self._taken():
            for key in list(self._preloaded):
                await self._drop(key)


def _says_otherwise(key: Key, different: str) -> str:
    return f"behind {_short(key)} Lean says something else: {different}"


def _short(key: Key) -> str:
    """Returns the header as the log names it."""
    return repr(textwrap.shorten(key[0], _MOST_NAMED_CHARS, placeholder=" …"))


async def fault_of_forks(environment: Environment, header: str) -> str:
    """Returns why texts with this header cannot run in forks here; empty if they can."""
    forks = ForkServer(environment, ForkRules())
    if forks.unavailable:
        return forks.unavailable
    command = [*environment.toolchain.command, "-o", "Proof.olean", "--json", "--stdin"]
    try:
        await forks.preload(header, command, anew=True)
    except (SandboxError, OSError) as error:
        return str(error)
    else:
        return ""
    finally:
        await forks.close()
