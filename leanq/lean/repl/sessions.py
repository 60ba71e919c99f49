"""The processes of a worker's REPL: lends them to requests, keeps a spare, and replaces them.

There are as many as slots, and a spare that has elaborated the last wanted header. When a process
goes, for whatever reason, the spare takes its place, and another starts while requests run. With
many headers, a process has several, and the spare serves as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leanq.errors import ReplError, SandboxError, ToolchainError
from leanq.lean.environment import Environment
from leanq.lean.repl.program import ReplProgram
from leanq.lean.repl.session import Recycling, Session, header_key
from leanq.lean.sandbox.sandbox import Sandbox
from leanq.lean.syntax import Header

log = logging.getLogger("leanq.worker")

# Each takes as much memory as its imports, and the next to come takes little time.
_MOST_HEADERS = 4


@dataclass(eq=False)
class Sessions:
    """The REPL in one environment, for at most ``slots`` requests at a time."""

    environment: Environment
    program: ReplProgram
    slots: int
    rules: Recycling
    hidden: Sequence[Path] = ()
    nice: int = 0
    # The one used last comes last.
    idle: list[Session] = field(default_factory=list)
    count: int = 0
    starting: set[asyncio.Task[None]] = field(default_factory=set)
    ending: set[asyncio.Task[None]] = field(default_factory=set)
    _sandboxes: list[Sandbox] = field(default_factory=list)
    _wanted: Header | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_known: bool = False
    _closed: bool = False

    async def open(self) -> None:
        """Starts one, to see whether it serves this environment. Raises ToolchainError if it does
        not run in a sandbox or speak the REPL's protocol, or is of another Lean."""
        async with self._opening:
            if self._is_known:
                return
            session = await self._start()
            try:
                version = await session.version()
            except ReplError as error:
                raise ToolchainError(
                    f"{self.program} does not answer like a REPL in the sandbox, where it can "
                    f"read the environment, its own folder and the system's: {error}"
                ) from None
            finally:
                # It has imported something by now.
                await asyncio.shield(self._retire(session))
            ours = self.environment.toolchain.version
            if version != ours:
                raise ToolchainError(
                    f"{self.program} is of Lean {version}, and the environment "
                    f"{self.environment.name} of Lean {ours}; build the REPL with that toolchain"
                )
            self._is_known = True
        self._replenish()

    async def close(self) -> None:
        """Ends those that are idle now, and the others when they come back."""
        self._closed = True
        for task in self.starting:
            task.cancel()
        await asyncio.gather(*self.starting, return_exceptions=True)
        while self.idle:
            self._retire(self.idle.pop())
        while self.ending:
            await asyncio.wait(self.ending)
        while self._sandboxes:
            await self._sandboxes.pop().close()

    @contextlib.asynccontextmanager
    async def take(
        self, header: Header, state: str = "", *, pristine: bool = False
    ) -> AsyncIterator[Session]:
        """Lends a process for one request, if possible with its header and this state. A
        ``pristine`` one has elaborated nothing of any candidate."""
        if not self._is_known:
            await self.open()
        session = await self._next(header_key(header), state, pristine)
        self._replenish()
        try:
            yield session
        finally:
            if header_key(header) in session.headers:
                self._wanted = header
            if self._closed or not session.usable or session.is_worn(self.rules):
                await asyncio.shield(self._retire(session))
            else:
                self.idle.append(session)
            self._replenish()

    async def _next(self, key: str, state: str, pristine: bool) -> Session:
        while True:
            await self._drop_unusable()
            if found := self._pick(key, state, pristine):
                self.idle.remove(found)
                return found
            if self.count > self.slots and self.idle:
                await asyncio.shield(self._retire(self.idle.pop(0)))
            # With as many requests as slots, a missing one is about to come.
            if self.count <= self.slots or not self.starting:
                return await self._start()
            await asyncio.wait(self.starting, return_when=asyncio.FIRST_COMPLETED)

    def _pick(self, key: str, state: str, pristine: bool) -> Session | None:
        """Returns the best idle one; of equals, the one used last."""

        def rank(session: Session) -> int:
            known = session.headers
            return 4 * (state in session.states) + 2 * (key in known) + (not known)

        fit = [
            session
            for session in self.idle[::-1]
            if (key in session.headers or len(session.headers) < _MOST_HEADERS)
            and not (pristine and session.requests)
        ]
        return max(fit, key=rank, default=None)

    async def _drop_unusable(self) -> None:
        ended = [session for session in self.idle if not session.usable]
        self.idle = [session for session in self.idle if session not in ended]
        for task in [self._retire(session) for session in ended]:
            await asyncio.shield(task)

    async def _start(self) -> Session:
        self.count += 1
        try:
            if self._sandboxes:
                sandbox = self._sandboxes.pop()
            else:
                readable = (*self.environment.readable(), *self.program.readable)
                sandbox = await Sandbox.open(readable=readable, hidden=self.hidden, nice=self.nice)
            variables = self.environment.sandbox_env(sandbox.scratch)
            try:
                return await Session.start(sandbox, self.program.argv, variables)
            except BaseException:
                await sandbox.close()
                raise
        except BaseException:
            self.count -= 1
            raise

    def _retire(self, session: Session) -> asyncio.Task[None]:
        """Ends a process in a task of its own, which no cancellation of a request can stop."""
        task = asyncio.create_task(self._end(session))
        self.ending.add(task)
        task.add_done_callback(self.ending.discard)
        return task

    async def _end(self, session: Session) -> None:
        sandbox = session.sandbox
        with contextlib.suppress(SandboxError):
            await session.end()
        self.count -= 1
        if sandbox.alive:
            await asyncio.to_thread(sandbox.clear)
        if sandbox.alive and not self._closed:
            self._sandboxes.append(sandbox)
        else:
            await sandbox.close()

    def _replenish(self) -> None:
        if self._closed or self.idle or self.starting or self.count > self.slots:
            return
        task = asyncio.create_task(self._start_spare())
        self.starting.add(task)
        task.add_done_callback(self.starting.discard)

    async def _start_spare(self) -> None:
        # If that fails, the next request starts its own and gets the error.
        try:
            session = await self._start()
        except SandboxError as error:
            log.warning("no spare REPL: %s", error)
            return
        try:
            if self._wanted:
                await session.load(self._wanted)
        except (ReplError, SandboxError) as error:
            log.warning("no spare REPL: %s", error)
        finally:
            if session.usable and not self._closed:
                self.idle.append(session)
            else:
                await asyncio.shield(self._retire(session))
