"""The worker's side of the fork server: which headers are preloaded, and sandboxes behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from leanq.errors import SandboxError
from leanq.lean.environment import Environment
from leanq.lean.fork_server.proof import PROOF_LIMITS, RunBytes, Trial, compiled_by, trials
from leanq.lean.pass_memory import PassMemory, libraries_of
from leanq.lean.sandbox.monitor import MESSAGE_BYTES
from leanq.lean.sandbox.sandbox import Limits, Sandbox, Supervisor, spawn
from leanq.lean.sandbox.scratch import empty
from leanq.lean.syntax import split_header
from leanq.queue.metrics import count

log = logging.getLogger("leanq.worker")

_ZYGOTE = "leanq.lean.fork_server.zygote"
# Importing maps the files of a whole library, from a disk that may be cold.
_READY_TIMEOUT_S = 900.0
_FORK_TIMEOUT_S = 30.0
_HEADERS_REMEMBERED = 1024
_PENDING_PROOFS = 4
_NEVER = 1 << 30
# A header that nothing can be hidden in: whatever stands here, no tokenizer takes for a command.
# Possessive, or a hostile header would have two readings for each of its lines, and all of them
# would be tried. `all` behind `import` is always the modifier, as for Lean.
_PLAIN_HEADER = re.compile(
    r"(?:module\s++)?+(?:prelude\s++)?+(?:(?:public\s++)?+(?:meta\s++)?+import\s++(?:all\s++)?+"
    r"[A-Za-z_][A-Za-z0-9_']*+(?:\.[A-Za-z_][A-Za-z0-9_']*+)*+\s++)*+",
    re.ASCII,
)
# libuv's loop runs in a thread of the zygote, which no fork has.
_NEEDS_LOOP = re.compile(r"UV|Async|Timer|Socket|Signal|TCP|UDP|DNS|Http|sleep", re.IGNORECASE)

Key = tuple[str, tuple[str, ...]]


def forkable_header(environment: Environment, code: str) -> str | None:
    """The header that a zygote can have imported for this text; None: Lean has to start for it."""
    header = split_header(code)
    text = header.text + "\n"
    if not _PLAIN_HEADER.fullmatch(text) or _NEEDS_LOOP.search(code, len(header.text)):
        return None
    return None if environment.missing(header) else text


@dataclass(frozen=True, slots=True)
class ForkRules:
    """When a header is preloaded, and what is asked of it then.

    Attributes:
        preload_after: texts with a header after which it is preloaded, where its proof is
            remembered: preloading takes as much CPU time as so many starts of Lean.
        prove_after: the same where it is to be proved first.
        compare_every: one of so many texts is run both ways later on; 0: none.
        memory_bytes: what all preloaded headers of an environment may hold; the one used least
            recently goes first.
    """

    preload_after: int = 3
    prove_after: int = 20
    compare_every: int = 500
    memory_bytes: int = 2 << 30


def memory_of(environment: Environment, header: str, command: Sequence[str]) -> PassMemory:
    """Where it is remembered that a header is proved, for Lean with these arguments."""
    words = (environment.fingerprint, header, *command)
    return PassMemory(environment, "fork-server", libraries_of(environment), *words)


class _HeaderFailsError(SandboxError):
    """A header with errors has messages about its whole text, so nothing goes on behind it."""


class Zygote:
    """A process that has imported a header."""

    memory_bytes: int
    """Its own memory, files that it maps left out."""

    def __init__(self, channel: socket.socket, supervisor: Supervisor, scratch: Path) -> None:
        """Use :meth:`open`."""
        self.memory_bytes = 0
        self.alive = True
        self._channel = channel
        self._supervisor = supervisor
        self._scratch = scratch
        self._loop = asyncio.get_running_loop()
        self._one_at_a_time = asyncio.Lock()
        self._readable = asyncio.Event()

    @classmethod
    async def open(
        cls,
        libraries: Sequence[Path],
        arguments: Sequence[str],
        header: str,
        env: Mapping[str, str],
    ) -> Zygote:
        """Imports a header. SandboxError: that is not possible here."""
        scratch = Path(tempfile.mkdtemp(prefix="leanq-"))
        hello = {
            "folders": [str(scratch)],
            "namespaces": True,
            "env": {**env, "HOME": str(scratch), "TMPDIR": str(scratch)},
            "libraries": [str(each) for each in libraries],
            "arguments": list(arguments),
            "header": header,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.send(json.dumps(hello).encode())
            zygote = cls(ours, spawn(theirs, _ZYGOTE), scratch)
        ours.setblocking(False)
        try:
            ready, _ = await zygote._answer(_READY_TIMEOUT_S)
            if ready.get("ready") != 0:
                if code := ready.get("ready"):
                    raise _HeaderFailsError(f"alone it ends with code {code}")
                raise SandboxError(ready.get("refused", "the process that preloads has died"))
            zygote.memory_bytes = ready["memory_bytes"]
        except BaseException:
            await zygote.close()
            raise
        return zygote

    @property
    def pid(self) -> int:
        """Its supervisor's process id."""
        return self._supervisor.pid

    async def fork(self, channel: socket.socket) -> Supervisor:
        """A supervisor whose programs begin behind the header, for :meth:`Sandbox.open`."""
        asked = asyncio.create_task(self._fork(channel))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            # An answer that is not waited for would be taken for that to the next question. Not
            # even another cancellation leaves earlier.
            while not asked.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([asked])
            with contextlib.suppress(SandboxError):
                supervisor = asked.result()
                supervisor.kill()
                await supervisor.end()
            raise

    async def _fork(self, channel: socket.socket) -> Supervisor:
        async with self._one_at_a_time:
            try:
                socket.send_fds(self._channel, [b'{"fork": true}'], [channel.fileno()])
            except OSError as error:
                self.alive = False
                raise SandboxError(f"the fork server has died: {error}") from error
            answer, fds = await self._answer(_FORK_TIMEOUT_S)
        if "forked" not in answer:
            self.alive = False
            raise SandboxError(answer.get("refused", "the fork server has died"))
        return Supervisor(fds[0])

    async def close(self) -> None:
        """Ends it, and everything that was forked from it."""
        self.alive = False
        # A socket that is closed while it is watched would leave its number so: nothing that gets
        # the number next would be heard.
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel)
        self._channel.close()
        self._readable.set()
        await self._supervisor.end()
        if self._scratch.exists():
            empty(str(self._scratch))
            self._scratch.rmdir()

    async def _answer(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """Its next message; empty when it has died or does not answer."""
        if self._channel.fileno() < 0:
            return {}, []
        self._readable.clear()
        self._loop.add_reader(self._channel, self._readable.set)
        try:
            async with asyncio.timeout(timeout_s):
                await self._readable.wait()
            packet, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        except (TimeoutError, OSError):
            return {}, []
        finally:
            if self._channel.fileno() >= 0:
                self._loop.remove_reader(self._channel)
        return (json.loads(packet) if packet else {}), list(fds)


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

    Before a header serves, half a dozen texts are run behind it and by a Lean that starts anew, and
    all bytes are compared; a pass is remembered on this machine. Later the same is done with a
    share of the texts that come. At the first difference the fork server is given up for as long as
    the environment is open.

    Args:
        hidden: folders that a candidate must not see.
        nice: niceness of what is forked.
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
        self._proving: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hidden = tuple(hidden)
        self._nice = nice
        self._seen: LRUCache[Key, int] = LRUCache(_HEADERS_REMEMBERED)
        self._preloaded: dict[Key, _Preloaded] = {}  # the one used least recently first
        self._rng = random.Random()
        self._closed = False
        self.unavailable = ""
        """Why there is no fork server here; empty where there is."""

    def pids(self) -> list[int]:
        """The processes that have imported a header, or their supervisors."""
        return [each.zygote.pid for each in self._preloaded.values() if each.zygote]

    def key(self, code: str, command: Sequence[str]) -> Key | None:
        """Names what a zygote would have to have imported for this text; None: none could."""
        if self.unavailable or self._closed:
            return None
        header = forkable_header(self._environment, code)
        return None if header is None else (header, tuple(command))

    async def take(self, key: Key) -> Sandbox | None:
        """A sandbox whose Lean has imported a header; None: there is none by now.

        What comes again is preloaded.
        """
        found = self._preloaded.get(key)
        if found is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] in (self._rules.preload_after, self._rules.prove_after):
                self._expect(key, remembered=self._seen[key] < self._rules.prove_after)
            return None
        if found.zygote is None or not found.zygote.alive:
            return None
        self._preloaded[key] = self._preloaded.pop(key)
        found.taken += 1
        self._idle.clear()
        try:
            while found.idle:
                sandbox = found.idle.popleft()
                if sandbox.alive:
                    return sandbox
                await sandbox.close()
            return await self._open(found.zygote)
        except BaseException as error:
            found.taken -= 1
            if not any(each.taken for each in self._preloaded.values()):
                self._idle.set()
            if not isinstance(error, SandboxError):
                raise
            self._give_up(str(error))
            return None

    async def give_back(self, key: Key, sandbox: Sandbox) -> None:
        """Takes back what :meth:`take` gave, emptied."""
        found = self._preloaded.get(key)
        if found is not None:
            found.taken -= 1
        if not any(each.taken for each in self._preloaded.values()):
            self._idle.set()
        if found is None or self._closed or self.unavailable or not sandbox.alive:
            await sandbox.close()
            return
        sandbox.clear()
        found.idle.append(sandbox)
        self.prepare(key, sandbox)

    async def lend(self, key: Key) -> Sandbox:
        """A sandbox whose Lean has imported a header, for as long as :meth:`end` is not called.

        Preloads the header where that is still to do.

        Raises:
            SandboxError: that is not possible here.
        """
        found = self._preloaded.get(key)
        if found is not None and found.making is not None:
            await asyncio.shield(found.making)
            found = self._preloaded.get(key)
        if found is None:
            self._expect(key, remembered=False)
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
        """Ends what was lent."""
        if found := self._preloaded.get(key):
            found.lent -= 1
        await sandbox.close()

    async def preload(self, header: str, command: Sequence[str], *, anew: bool = False) -> None:
        """Preloads a header for Lean with these arguments; ``anew``: and proves it, whatever is
        remembered.

        Raises:
            SandboxError: that is not possible here.
        """
        key = (header, tuple(command))
        found = self._preloaded[key] = _Preloaded()
        memory = memory_of(self._environment, *key)
        remembered = not anew and await asyncio.to_thread(memory.is_kept)
        try:
            await self._preload(key, found, memory if remembered else None)
        except BaseException:
            self._preloaded.pop(key, None)
            raise

    def is_due(self) -> bool:
        """Whether the next text is one of those that are run both ways."""
        if not self._rules.compare_every or len(self._proving) >= _PENDING_PROOFS:
            return False
        return self._rng.random() < 1 / self._rules.compare_every

    def prove(self, key: Key, code: str, limits: Limits, seen: RunBytes) -> None:
        """Runs a text again by a Lean that starts anew, in an idle moment."""
        task = asyncio.create_task(self._prove(key, code, limits, seen))
        self._proving.add(task)
        task.add_done_callback(self._proving.discard)

    def prepare(self, key: Key, sandbox: Sandbox) -> None:
        """Forks ahead of the next text."""
        with contextlib.suppress(SandboxError):
            sandbox.prepare(
                key[1], env=self._environment.sandbox_env(sandbox.scratch), cwd=sandbox.scratch
            )

    async def close(self) -> None:
        """Ends all of it, but for what is taken, which ends when it is given back."""
        self._closed = True
        for task in self._proving:
            task.cancel()
        await asyncio.gather(*self._proving, return_exceptions=True)
        for key in list(self._preloaded):
            await self._drop(key)

    def _expect(self, key: Key, *, remembered: bool) -> None:
        """Begins to preload a header; where ``remembered``, only if its proof is."""
        found = self._preloaded[key] = _Preloaded()
        found.making = asyncio.create_task(self._make(key, found, remembered))

    async def _make(self, key: Key, found: _Preloaded, remembered: bool) -> None:
        try:
            memory = memory_of(self._environment, *key)
            if await asyncio.to_thread(memory.is_kept):
                await self._preload(key, found, memory)
            elif remembered:
                self._preloaded.pop(key, None)
            else:
                await self._preload(key, found, None)
        except _HeaderFailsError as error:
            log.info("Lean starts anew for each text with the header %r: %s", key[0], error)
            self._preloaded.pop(key, None)
            self._seen[key] = -_NEVER
        except (SandboxError, OSError) as error:
            self._preloaded.pop(key, None)
            self._give_up(str(error))

    async def _preload(self, key: Key, found: _Preloaded, passed: PassMemory | None) -> None:
        """Preloads a header, and proves it unless it has passed."""
        memory = passed or memory_of(self._environment, *key)
        started_s = time.monotonic()
        zygote = await self._new_zygote(key)
        try:
            if not passed:
                await self._prove_header(key, zygote)
                await asyncio.to_thread(memory.keep)
        except BaseException:
            await zygote.close()
            raise
        count("leanq_fork_server_total", "preloaded")
        took_s = time.monotonic() - started_s
        log.info("preloaded %r in %.1f s, %d MB", key[0], took_s, zygote.memory_bytes >> 20)
        found.zygote = zygote
        await self._make_room(key)

    async def _new_zygote(self, key: Key, env: Mapping[str, str] | None = None) -> Zygote:
        """A process that has imported a header, with these environment variables besides."""
        header, command = key
        toolchain = self._environment.toolchain
        return await Zygote.open(
            toolchain.shared_libraries,
            command[len(toolchain.command) :],
            header,
            {**self._environment.process_env(), **(env or {})},
        )

    async def _prove(self, key: Key, code: str, limits: Limits, seen: RunBytes) -> None:
        await self._idle.wait()
        try:
            async with contextlib.AsyncExitStack() as stack:
                sandbox = await self._new_sandbox(stack)
                plain = await self._outcome(sandbox, key, Trial(code), limits)
                count("leanq_fork_server_total", "compared")
                if not (different := seen.difference(plain)):
                    return
                again = await self._outcome(sandbox, key, Trial(code), limits)
                # A text that asks for the time or the weather says something else each time. And
                # what the import takes is within the limits of a Lean that starts anew alone.
                if not plain.difference(again) and plain.stopped is None:
                    await asyncio.to_thread(memory_of(self._environment, *key).forget)
                    self._give_up(_says_otherwise(key, different))
        except (SandboxError, OSError) as error:
            log.warning("a text was not run both ways: %s", error)

    async def _prove_header(self, key: Key, zygote: Zygote) -> None:
        """Raises SandboxError where a text comes out differently behind a header."""
        async with contextlib.AsyncExitStack() as stack:
            plain = await self._new_sandbox(stack)
            forked = await self._new_sandbox(stack, zygote)
            for trial in trials(key[0]):
                behind = forked
                if trial.env:  # which Lean reads where it starts
                    other = await self._new_zygote(key, trial.env)
                    stack.push_async_callback(other.close)
                    behind = await self._new_sandbox(stack, other)
                seen = await self._outcome(behind, key, trial, PROOF_LIMITS)
                expected = await self._outcome(plain, key, trial, PROOF_LIMITS)
                if different := seen.difference(expected):
                    raise SandboxError(_says_otherwise(key, different))

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
        """A sandbox for as long as the stack is open."""
        sandbox = await self._open(zygote)
        stack.push_async_callback(sandbox.close)
        return sandbox

    async def _make_room(self, newest: Key) -> None:
        for key in list(self._preloaded):
            held = sum(f.zygote.memory_bytes for f in self._preloaded.values() if f.zygote)
            if held <= self._rules.memory_bytes or key == newest:
                return
            if not self._preloaded[key].taken and not self._preloaded[key].lent:
                await self._drop(key)

    async def _drop(self, key: Key) -> None:
        found = self._preloaded.pop(key)
        if found.making is not None:
            found.making.cancel()
            await asyncio.gather(found.making, return_exceptions=True)
        while found.idle:  # of which one that is taken meanwhile may be closed there
            await found.idle.popleft().close()
        if found.zygote is not None:
            await found.zygote.close()

    async def _open(self, zygote: Zygote | None) -> Sandbox:
        """A sandbox behind a preloaded header, or one where Lean starts anew."""
        return await Sandbox.open(
            readable=self._environment.readable(),
            hidden=self._hidden,
            nice=self._nice,
            start=zygote.fork if zygote else None,
        )

    def _give_up(self, why: str) -> None:
        if not self.unavailable:
            count("leanq_fork_server_total", "given_up")
            log.warning("the fork server is given up, Lean starts anew for each text: %s", why)
            self.unavailable = why


def _says_otherwise(key: Key, different: str) -> str:
    return f"behind {key[0]!r} Lean says something else: {different}"


async def fault_of_forks(environment: Environment, header: str) -> str:
    """Why texts with this header cannot be run in forks here; empty where they can."""
    if not environment.toolchain.shared_libraries:
        return "this toolchain has no shared library"
    forks = ForkServer(environment, ForkRules())
    command = [*environment.toolchain.command, "-o", "Proof.olean", "--json", "--stdin"]
    try:
        await forks.preload(header, command, anew=True)
    except (SandboxError, OSError) as error:
        return str(error)
    else:
        return ""
    finally:
        await forks.close()
