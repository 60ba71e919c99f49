"""Which process of Lean's language server reads which text.

A header that comes again gets a process, which serves the texts of one tenant. Only texts that run
no programs share one. A process is replaced after a number of texts, at a size, at an age, and
after anything odd. It never decides what is accepted: such a text is compiled by a Lean of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from cachetools import LRUCache

from leanq.errors import LanguageServerError, SandboxError
from leanq.lean.audit.evaluators import evaluators
from leanq.lean.audit.programs import runs_programs
from leanq.lean.diagnostics import Printed
from leanq.lean.environment import Environment
from leanq.lean.language_server.document import Document
from leanq.lean.language_server.protocol import is_out_of_order
from leanq.lean.language_server.tactics import tactic_places
from leanq.lean.sandbox.sandbox import Finished, Limits, Sandbox
from leanq.lean.syntax import split_header
from leanq.queue.metrics import count
from leanq.queue.requests import MAX_GOALS_BYTES, Request, Tactic
from leanq.queue.tasks import run_apart

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
