"""Lean's own language server: one process for a header reads text after text.

A header that comes again gets a process, which serves the texts of one tenant. Only texts that run
no programs share one. A process is replaced after a number of texts, at a size, at an age, and
after anything odd. It never decides what is accepted: such a text is compiled by a Lean of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from cachetools import LRUCache

from leanq.errors import LanguageServerError, SandboxError
from leanq.lean.environment import Environment
from leanq.lean.outcome import Printed
from leanq.lean.run.evaluators import evaluators
from leanq.lean.run.programs import runs_programs
from leanq.lean.run.protocol import (
    Diagnostic,
    Frames,
    Incoming,
    Places,
    Told,
    frame,
    is_out_of_order,
    messages_of,
)
from leanq.lean.sandbox.sandbox import Exit, Finished, Limits, Process, Sandbox, Usage
from leanq.lean.text import split_header, tokens
from leanq.queue.metrics import count
from leanq.queue.requests import MAX_GOALS_BYTES, Request, Tactic
from leanq.queue.tasks import run_apart

# Where the tactics of a text begin and end. Lean's language server then tells their goals.
#
# The server names no places, so layout decides: the tactics of a block begin in one column, and a
# block begins behind ``by``, ``·`` or the arrow of a case. A term that looks the same counts, too.

_MOST_TACTICS = 2000
_CASES = frozenset({"|", "case", "next"})
_SIGNS = frozenset("<;>=")
_OPENING, _CLOSING = frozenset("([{⟨"), frozenset(")]}⟩")


@dataclass(slots=True)
class TacticSpan:
    """A tactic, or a bullet with the tactics behind it: its line from 1, its column from 0 in code
    points, where it starts and ends in the text, and which block it is of."""

    line: int
    column: int
    start: int
    end: int
    block: int
    is_bullet: bool


@dataclass(slots=True)
class _Block:
    """Tactics that begin in one column, within so many brackets."""

    number: int
    column: int
    depth: int
    found: list[TacticSpan] = field(default_factory=list)


def tactic_places(text: str) -> list[tuple[int, int]]:
    """Returns where tactics may begin: lines from 1, columns from 0 in code points. The first
    2,000 of a text; takes time in its length alone."""
    return [(each.line, each.column) for each in tactics_of(text) if not each.is_bullet]


def tactics_of(text: str) -> list[TacticSpan]:
    """Returns what may be the tactics of a text, in its order: the first 2,000."""
    found: list[TacticSpan] = []
    numbers = itertools.count()
    # The innermost last.
    blocks: list[_Block] = []
    line, line_start, counted = 1, 0, 0
    begun_line, line_word = 0, ""
    # The signs just read that belong together, such as ``<;>``.
    signs, opens, depth, ended = "", False, 0, 0

    def close() -> None:
        for each in blocks.pop().found[-1:]:
            each.end = ended

    for token in tokens(text):
        line += text.count("\n", counted, token.start)
        line_start = text.rfind("\n", 0, token.start) + 1 if line != begun_line else line_start
        counted = token.start
        column = token.start - line_start
        depth -= token.text in _CLOSING
        while blocks and (blocks[-1].depth > depth or _is_next(token.text, blocks[-1], depth)):
            close()
        if line != begun_line:
            begun_line, line_word = line, token.text
            while blocks and blocks[-1].column > column:
                close()
            begins = bool(blocks) and blocks[-1].column == column and token.text != "|"
        else:
            begins = False
        if opens:
            blocks.append(_Block(next(numbers), column, depth))
            begins = token.text != "|"
        # Behind `;` and `<;>` the block goes on.
        begins = begins or (bool(blocks) and signs in (";", "<;>"))
        if begins:
            if len(found) == _MOST_TACTICS:
                break
            block = blocks[-1]
            for each in block.found[-1:]:
                each.end = ended - len(signs)
            made = TacticSpan(line, column, token.start, token.end, block.number, token.text == "·")
            block.found.append(made)
            found.append(made)
        signs = signs + token.text if token.text in _SIGNS else ""
        opens = token.text in ("by", "·") or (signs == "=>" and line_word in _CASES)
        depth += token.text in _OPENING
        ended = token.end
    while blocks:
        close()
    return found


def _is_next(token: str, block: _Block, depth: int) -> bool:
    """Returns whether a token ends a block within brackets, as the next term there."""
    return token == "," and block.depth == depth > 0


# One process of Lean's language server, ``lean --worker``, and its one document.
#
# It has imported a header, and reads texts with this header one after another. Each is a change of
# the document. Limits are those of each text alone.

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


log = logging.getLogger("leanq.worker")


class Key(NamedTuple):
    """Texts of one process share this: a tenant, the header as they write it, Lean's options."""

    tenant: str
    header: str
    options: tuple[str, ...] = ()


_HEADERS_REMEMBERED = 1024
# Texts until a header without a process is tried again: the machine may have lacked memory.
_TRIED_AGAIN_AFTER = 200


@dataclass(frozen=True, slots=True)
class DocumentRules:
    """When a header gets a process, and how long that serves.

    Attributes:
        served_from: the header's text with which a process starts. The first text costs an import
            either way.
        texts, age_s: how many texts a process reads, and how old it gets.
        memory_bytes: what texts may add to the memory that the header takes.
        compare_every: one of so many rejections is looked at by a new Lean; 0 for none.
        spare: how many processes stay beside one for each slot.
    """

    served_from: int = 2
    texts: int = 500
    memory_bytes: int = 512 << 20
    age_s: float = 3600.0
    compare_every: int = 500
    spare: int = 2


@dataclass(eq=False)
class Documents:
    """The processes of one environment, for at most ``slots`` texts at a time."""

    environment: Environment
    slots: int
    rules: DocumentRules = DocumentRules()
    hidden: Sequence[Path] = ()
    nice: int = 0
    unavailable: str = ""
    """Why no text is read here any more; empty if texts are."""
    # The one used last comes last.
    _idle: list[tuple[Key, Document]] = field(default_factory=list)
    _count: int = 0
    _seen: LRUCache[Key, int] = field(default_factory=lambda: LRUCache(_HEADERS_REMEMBERED))
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _rng: random.Random = field(default_factory=random.Random)
    _closed: bool = False

    async def read(self, key: Key, text: str, limits: Limits) -> tuple[Finished, Printed] | None:
        """Returns what Lean says of a text with this header; None if a Lean of its own has to say
        it, as where the text takes more than half of its time here."""
        if not self._is_wanted(key) or await self._runs_programs(text):
            return None
        async with self.lend(key) as document:
            if document is None:
                return None
            try:
                done, printed = await document.read(text, _half(limits))
            except LanguageServerError as error:
                log.info("a Lean of its own reads a text: %s", error)
                count("leanq_language_server_total", "refused")
                return None
        if is_out_of_order(text, printed.messages):
            count("leanq_language_server_total", "refused")
            return None
        count("leanq_language_server_total", "read")
        return done, printed

    async def tactics(self, request: Request, limits: Limits) -> tuple[tuple[Tactic, ...], float]:
        """Returns the tactics of a text with the goals before each, and the CPU seconds for that.
        Raises LanguageServerError or SandboxError if Lean does not tell them."""
        text = request.code
        places = await run_apart(lambda: tactic_places(text), at_once=False)
        if not places:
            return (), 0.0
        key = Key(request.tenant, split_header(text).text)
        programs = await self._runs_programs(text)
        async with self.lend(key) as document:
            if document is None:
                raise LanguageServerError(
                    self.unavailable or "Lean's language server does not serve the text's header"
                )
            done, _ = await document.read(text, limits)
            goals, cpu_s = await document.goals(places, limits, MAX_GOALS_BYTES)
            # Nothing that programs left behind may meet another text.
            document.spoiled = programs
        told = zip(places, goals, strict=False)
        tactics = tuple(Tactic(*place, before) for place, before in told if before)
        return tactics, done.exit.cpu_s + cpu_s

    def is_compared(self) -> bool:
        """Returns whether a new Lean has to look at a rejection as well."""
        every = self.rules.compare_every
        return bool(every) and self._rng.random() < 1 / every

    def compare(self, read: Printed, plain: Printed) -> None:
        """Gives the language server up if a new Lean does not reject what it has rejected."""
        if read.failed and not plain.failed:
            said = next(m.text for m in read.messages if m.severity == "error")
            self.give_up(f"it rejected a text that a new Lean takes: {said[:500]}")
        elif sorted(read.messages, key=str) != sorted(plain.messages, key=str):
            count("leanq_language_server_total", "differs")

    def give_up(self, why: str) -> None:
        """Reads no text any more."""
        if not self.unavailable:
            count("leanq_language_server_total", "given_up")
            log.warning("Lean's language server is given up: %s", why)
            self.unavailable = why
        self._drop_idle(all_=True)

    @contextlib.asynccontextmanager
    async def lend(self, key: Key) -> AsyncIterator[Document | None]:
        """Lends a process that has imported the header, or None if there is to be none now."""
        document = await self._take(key)
        try:
            yield document
        finally:
            if document is not None:
                self._idle.append((key, document))
                self._drop_idle()

    async def close(self) -> None:
        """Ends those that are idle now, and the others when they come back."""
        self._closed = True
        self._drop_idle(all_=True)
        while self._ending:
            await asyncio.wait(self._ending)

    def _is_wanted(self, key: Key) -> bool:
        if self.unavailable or self._closed:
            return False
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] >= self.rules.served_from

    async def _runs_programs(self, text: str) -> bool:
        def look() -> bool:
            return runs_programs(text, evaluators(self.environment)) is not None

        return await run_apart(look, at_once=False)

    async def _take(self, key: Key) -> Document | None:
        self._drop_idle()
        for place in range(len(self._idle) - 1, -1, -1):
            if self._idle[place][0] == key:
                return self._idle.pop(place)[1]
        if self._count >= self.slots + self.rules.spare:
            if not self._idle:
                return None
            self._end(self._idle.pop(0)[1])
        return await self._start(key)

    async def _start(self, key: Key) -> Document | None:
        self._count += 1
        sandbox: Sandbox | None = None
        try:
            sandbox = await Sandbox.open(
                readable=self.environment.readable(), hidden=self.hidden, nice=self.nice
            )
            document = await Document.start(self.environment, sandbox, key.header, key.options)
        except BaseException as error:
            self._count -= 1
            if sandbox is not None:
                await sandbox.close()
            if not isinstance(error, LanguageServerError | SandboxError):
                raise
            log.info("Lean's language server does not serve a header: %s", error)
            self._seen[key] = -_TRIED_AGAIN_AFTER
            return None
        count("leanq_language_server_total", "started")
        return document

    def _drop_idle(self, *, all_: bool = False) -> None:
        """Ends the idle processes that must not read another text."""
        rules = self.rules
        kept = []
        for key, each in self._idle:
            worn = (
                each.texts >= rules.texts
                or each.grown_bytes > rules.memory_bytes
                or each.age_s > rules.age_s
            )
            if all_ or self._closed or self.unavailable or worn or not each.usable:
                self._end(each)
            else:
                kept.append((key, each))
        self._idle = kept

    def _end(self, document: Document) -> None:
        """Ends a process in a task of its own, which no cancellation of a request can stop."""
        self._count -= 1
        task = asyncio.create_task(document.sandbox.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _half(limits: Limits) -> Limits:
    """Returns the limits of a text that a Lean of its own may have to read as well. The language
    server takes up to twice as long as ``lean``, so its limits must not decide."""
    return replace(limits, cpu_s=limits.cpu_s / 2, wall_s=limits.wall_s / 2)
