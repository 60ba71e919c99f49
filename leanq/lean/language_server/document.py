"""One process of Lean's language server, ``lean --worker``, and its one document.

It has imported a header, and reads texts with this header one after another. Each is a change of
the document. Limits are those of each text alone.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from leanq.errors import LanguageServerError, SandboxError
from leanq.lean.diagnostics import Printed
from leanq.lean.environment import Environment
from leanq.lean.language_server.protocol import (
    Diagnostic,
    Frames,
    Incoming,
    Places,
    Told,
    frame,
    messages_of,
)
from leanq.lean.sandbox.sandbox import Exit, Finished, Limits, Process, Sandbox, Usage
from leanq.queue.tasks import run_apart

# Imports depend on the machine alone, not on the candidate: a library may be large, a disk cold.
_HEADER_LIMITS = Limits(cpu_s=300.0, wall_s=900.0, memory_bytes=16 << 30)
# Between texts it has nothing to do.
_IDLE_LIMITS = Limits(cpu_s=10.0, wall_s=math.inf, memory_bytes=4 << 30, look_s=1.0)
# CPU time between two texts; with more, a text has left something running.
_RESTLESS_S = 0.05
_MOST_MESSAGE_BYTES = 32 << 20
# Of all until an answer. A worker reads it in its own time, which no budget of the text counts.
_MOST_ANSWER_BYTES = 64 << 20
_READ_AT_ONCE = 50
# `lean` ends at so many errors, the server does not.
_MOST_ERRORS = 100
# Told one by one, as without this all come with each new one.
_CAPABILITIES = {"lean": {"incrementalDiagnosticSupport": True}}
_URI = "file:///leanq-document.lean"
# A message that holds one of them would read otherwise with plain Lean.
_OWN = (_URI, "Elab.inServer", "server.reportDelayMs")
_MOST_STEP = 1 << 20


class _Goals(msgspec.Struct):
    goals: tuple[str, ...] = ()


@dataclass(eq=False)
class Document:
    """One process, from :meth:`start`. ``texts``: how many it has read."""

    sandbox: Sandbox
    _process: Process
    texts: int = 0
    memory_bytes: int = 0
    spoiled: bool = False
    _header_bytes: int = 0
    _version: int = 0
    _asked: int = 0
    _text: str = ""
    _frames: Frames = field(default_factory=lambda: Frames(_MOST_MESSAGE_BYTES))
    _born_s: float = field(default_factory=time.monotonic)

    @classmethod
    async def start(
        cls, environment: Environment, sandbox: Sandbox, header: str, options: Sequence[str] = ()
    ) -> Document:
        """Starts Lean in a sandbox that runs nothing, and imports the header. Raises SandboxError
        if Lean cannot start, and LanguageServerError if it does not import the header."""
        # Lean would ask Lake how to build the document, which belongs to no project.
        variables = {**environment.sandbox_env(sandbox.scratch), "LAKE": "/nonexistent"}
        argv = [
            *environment.toolchain.command,
            *environment.options,
            *options,
            "--worker",
            "-Dserver.reportDelayMs=0",
            _URI,
        ]
        process = await sandbox.start(argv, env=variables, limits=_HEADER_LIMITS)
        document = cls(sandbox, process)
        process.write(frame("initialize", {"processId": None, "capabilities": _CAPABILITIES}, 0))
        try:
            _, printed = await document.read(header, _HEADER_LIMITS)
        except BaseException:
            document.spoiled = True
            raise
        if printed.messages:
            document.spoiled = True
            said = printed.messages[0].text
            raise LanguageServerError(f"its header cannot be imported: {said}")
        document.texts, document._header_bytes = 0, document.memory_bytes
        return document

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._born_s

    @property
    def grown_bytes(self) -> int:
        """The memory that texts have added to what the header takes."""
        return self.memory_bytes - self._header_bytes

    @property
    def usable(self) -> bool:
        return not self.spoiled and not self._process.ended

    async def read(self, text: str, limits: Limits) -> tuple[Finished, Printed]:
        """Has Lean read a text, and returns what it says, as of a Lean that ended. Raises
        LanguageServerError if the process died, met a limit or cannot be trusted: then it tells
        nothing of the text. Raises SandboxError if the machine failed."""
        self.spoiled = True
        began_s = time.monotonic()
        idle = await self._renew(limits)
        if self.texts and idle.cpu_s > _RESTLESS_S:
            raise LanguageServerError("a text before left something running")
        self._text = text
        self.texts += 1
        diagnostics = await self._elaborate(text)
        if len(diagnostics) > 1:
            # Messages come as threads find them. Told once more, they come in Lean's order.
            diagnostics = await self._elaborate(text)
        used = await self._renew(_IDLE_LIMITS)
        self.memory_bytes = used.memory_bytes
        printed = await self._printed(diagnostics)
        if any(own in message.text for message in printed.messages for own in _OWN):
            raise LanguageServerError("a message tells of the document, or of the server's options")
        self.spoiled = False
        code = 1 if printed.failed or printed.exhausted else 0
        wall_s = time.monotonic() - began_s
        exit_ = Exit(code, None, None, used.cpu_s, wall_s, used.memory_bytes)
        return Finished(exit_, b"", b""), printed

    async def goals(
        self, places: Sequence[tuple[int, int]], limits: Limits, most_bytes: int
    ) -> tuple[list[tuple[str, ...]], float]:
        """Returns the goals before the tactic at each place of the last text that was read: lines
        from 1, columns from 0 in code points. None there is an empty tuple. Places are left out
        once ``most_bytes`` are told. Returns the CPU seconds as well. Errors as of :meth:`read`."""
        self.spoiled = True
        await self._renew(limits)
        positions = Places(self._text)
        goals: list[tuple[str, ...]] = []
        for line, column in places:
            asked = {"textDocument": {"uri": _URI}, "position": positions.units(line, column)}
            answer = None
            async for message in self._answer("$/lean/plainGoal", asked):
                answer = message
            try:
                told = msgspec.json.decode(answer.result, type=_Goals | None) if answer else None
            except msgspec.MsgspecError as error:
                raise LanguageServerError(f"the goals cannot be read: {error}") from None
            before = told.goals if told else ()
            most_bytes -= sum(len(goal.encode(errors="replace")) for goal in before)
            if most_bytes < 0:
                break
            goals.append(before)
        used = await self._renew(_IDLE_LIMITS)
        self.spoiled = False
        return goals, used.cpu_s

    async def _elaborate(self, text: str) -> list[Diagnostic]:
        """Changes the document to a text, and returns what Lean says of it once it has ended."""
        is_new, self._version = not self._version, self._version + _step()
        told = Told(self._version)
        self._process.write(self._change(text, is_new=is_new))
        asked = {"uri": _URI, "version": self._version}
        async for message in self._answer("textDocument/waitForDiagnostics", asked):
            told.take(message)
            if told.errors >= _MOST_ERRORS:
                raise LanguageServerError("the text has more errors than Lean tells")
        return told.diagnostics

    def _change(self, text: str, *, is_new: bool) -> bytes:
        name = {"uri": _URI, "version": self._version}
        if is_new:
            opened = {**name, "languageId": "lean4", "text": text}
            params = {"textDocument": opened, "dependencyBuildMode": "never"}
            return frame("textDocument/didOpen", params)
        changed = {"textDocument": name, "contentChanges": [{"text": text}]}
        return frame("textDocument/didChange", changed)

    async def _answer(self, method: str, params: dict[str, object]) -> AsyncIterator[Incoming]:
        """Asks, and yields all that Lean says until its answer, which is the last."""
        self._asked += _step()
        self._process.write(frame(method, params, self._asked))
        told_bytes = 0
        while chunk := await self._process.read():
            told_bytes += len(chunk)
            if told_bytes > _MOST_ANSWER_BYTES:
                raise LanguageServerError("Lean's language server prints too much")
            for message in self._frames.take(chunk):
                # Requests of the server's have numbers of their own.
                if message.method is None and message.id == self._asked:
                    if message.error is not None:
                        said = bytes(message.error)[:500].decode(errors="replace")
                        raise LanguageServerError(f"Lean's language server refuses: {said}")
                    yield message
                    return
                yield message
        exit_ = await self._process.wait()
        raise LanguageServerError(f"Lean's language server has ended: {exit_}")

    async def _printed(self, diagnostics: Sequence[Diagnostic]) -> Printed:
        text = self._text

        def read() -> Printed:
            return Printed(messages_of(text, diagnostics))

        return await run_apart(read, at_once=len(diagnostics) < _READ_AT_ONCE)

    async def _renew(self, limits: Limits) -> Usage:
        """Sets new limits, and returns the usage since those before."""
        try:
            return await self._process.renew(limits)
        except SandboxError as error:
            raise LanguageServerError(f"Lean's language server has ended: {error}") from None


def _step() -> int:
    """Returns how much larger the next number is. No text can print an answer for a later one."""
    return 1 + secrets.randbelow(_MOST_STEP)
