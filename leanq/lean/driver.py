"""Drivers turn operations into Lean's answers, or answer themselves: an echo."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec.structs import replace

from leanq.errors import (
    LanguageServerError,
    QueueFullError,
    RecipeError,
    SandboxError,
    UnavailableError,
    UsageError,
)
from leanq.lean.environment import Environment, Watch, cache_folder
from leanq.lean.goals.holes import is_genuine
from leanq.lean.goals.prefixes import Prefixes, PrefixRules
from leanq.lean.goals.recipes import pack_export, read_recipe, unpack_export
from leanq.lean.goals.snapshots import SnapshotCache, Snapshots
from leanq.lean.goals.steps import Trials, other_environment, read_move
from leanq.lean.goals.targets import Targets
from leanq.lean.judge.check import Auditor, check
from leanq.lean.judge.judge_client import Judges
from leanq.lean.outcome import moved_up, noted
from leanq.lean.run.documents import DocumentRules, Documents
from leanq.lean.run.fork_server import ForkRules, ForkServer
from leanq.lean.run.headers import forkable_header, prepared
from leanq.lean.run.headers_memory import HeadersMemory, default_bytes
from leanq.lean.run.process import Lean, limits_of
from leanq.lean.run.profile import profile
from leanq.lean.run.toolchain import UNREADABLE, shown
from leanq.lean.text import split_header
from leanq.queue.requests import LEAN_VERDICTS, Message, Reply, Request, Sorry
from leanq.queue.settings import Settings
from leanq.queue.shard import backoff_s
from leanq.states import MemoryStates, States


class Driver(Protocol):
    """Answers requests of one environment, whose name clients ask for. ``about``: facts for people:
    fingerprint, versions, and as ``degraded`` why it is slower here than it should be."""

    environment: str

    @property
    def about(self) -> Mapping[str, object]: ...

    async def open(self, states: States) -> None:
        """Gets ready to answer, with states kept there; raises WorkerError if it never will."""

    async def describe(self) -> str:
        """Returns a line for people: the program, its origin, and whether it can accept."""

    async def run(self, request: Request) -> Reply:
        """Returns Lean's verdict, the infrastructure's, or why the request makes no sense here.
        ``warm`` in it: the processes left running make other requests with the same first affinity
        fast. A cancellation waits until all that it started has stopped.

        Raises ToolchainError if Lean does not work on this machine, whatever the request was, and
        WorkerError if this machine failed at the request, which may have broken it.
        """

    async def prove(self) -> None:
        """Tries whether it can answer; raises WorkerError if it cannot."""

    async def close(self) -> None:
        """Ends every process that it started."""


# The echo driver answers a payload after a delay: for load tests, benchmarks, simulated fleets.


class EchoDriver:
    """Serves the environment ``echo``."""

    environment = "echo"

    @property
    def about(self) -> Mapping[str, object]:
        return {"driver": "echo"}

    async def open(self, _states: States) -> None:
        pass

    async def describe(self) -> str:
        return "an echo, without any Lean"

    async def run(self, request: Request) -> Reply:
        if request.op != "echo":
            return Reply(error=f"the echo driver cannot {request.op}; it runs no Lean")
        started = time.monotonic()
        if request.delay_s > 0:
            await asyncio.sleep(request.delay_s)
        return Reply(payload=request.payload, wall_s=time.monotonic() - started)

    async def prove(self) -> None:
        pass

    async def close(self) -> None:
        pass


# The lean driver: the ``lean`` program of any toolchain, one process at a time per request.

log = logging.getLogger("leanq.worker")

_CHECK_CHANGES_EVERY_S = 5.0
_LIBRARIES_TOLD = 50
# A library that is replaced while a text is read has it read again.
_READINGS = 3
_CHANGING = "the library's files change while the text is read; wait until they are built"
_INCOMPLETE = (
    "a library that the text imports lacks a module that its other modules import; reinstall it, "
    "or Lean where it is Lean's own"
)
_FORK_RULES = ForkRules()
_PREFIX_RULES = PrefixRules()
_DOCUMENT_RULES = DocumentRules()
# Lean says so of tactics and names that its own library would bring.
_LACKING = re.compile(
    r"unknown (?:tactic|namespace)|[Uu]nknown (?:identifier|constant)"
    r"|could not synthesize a `Repr`"
)
_CORE_NOTE = Message(
    "information",
    1,
    0,
    "leanq: this text is read behind leanq's small Core, without Lean's own library: logic, "
    "natural numbers and lists, but no `omega`, `exact?`, `conv`, `#eval`, integers or sets. For "
    "these, or Mathlib, install Lean and name a Lake project that is built: "
    "leanq up --env NAME=FOLDER",
)
_MARKED = (
    "the text begins with a byte order mark, which Lean does not read; save it as UTF-8 without one"
)
_UNREAD = (
    "Lean cannot read a library that the text imports, and says nothing of the text. The library "
    "was built by another Lean, or is damaged; build it again with {}: {}"
)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Opened(Trials):
    """All of one opening of the environment. ``whole``: headers that lack nothing."""

    documents: Documents
    libraries: tuple[str, ...]
    whole: set[str] = field(default_factory=set, kw_only=True)

    async def close(self) -> None:
        await self.prefixes.close()
        await self.auditor.judges.close()
        await self.lean.close()
        await self.documents.close()


def worker_cache(settings: Settings) -> SnapshotCache:
    """Returns a place for a worker's snapshots, which all its environments share."""
    folder = cache_folder(None, os.environ) / "snapshots"
    return SnapshotCache(folder, settings.cache_mb << 20)


@dataclass(eq=False)
class LeanDriver:
    """All operations in one environment, with at most ``slots`` sandboxes. ``open_environment`` is
    called again after its files have changed. Without a ``cache`` no snapshots are made or loaded,
    and without rules for ``forks`` Lean starts for each text. ``hidden`` are folders to hide from
    candidates. With ``judge_alone`` each file is judged in a process of its own. ``memory`` is the
    budget of what stands ready, here and in other environments."""

    open_environment: Callable[[], Environment]
    _: KW_ONLY
    slots: int
    cache: SnapshotCache | None = None
    hidden: Sequence[Path] = ()
    nice: int = 0
    prefixes: PrefixRules = _PREFIX_RULES
    forks: ForkRules | None = _FORK_RULES
    documents: DocumentRules = _DOCUMENT_RULES
    judge_alone: bool = False
    trust_steps: bool = False
    memory: HeadersMemory | None = None

    def __post_init__(self) -> None:
        self._memory = self.memory or HeadersMemory(default_bytes(self.slots))
        self._states: States = MemoryStates()
        self.opened = self._open(self.open_environment())
        self.environment = self.opened.lean.environment.name
        self._looked_at_s = time.monotonic()
        self._looking = asyncio.Lock()
        self._watch = Watch()
        self._watched: Opened | None = None
        self._rng = random.Random()
        self._beside: list[asyncio.Task[None]] = []

    @property
    def about(self) -> Mapping[str, object]:
        lean = self.opened.lean
        environment = lean.environment
        about: dict[str, object] = {
            "driver": "lean",
            "lean": environment.toolchain.version,
            "commit": environment.toolchain.commit,
            "fingerprint": environment.fingerprint,
            "project": environment.project.name if environment.project else None,
            "libraries": self.opened.libraries[:_LIBRARIES_TOLD],
            "options": shown(environment.options),
        }
        judges = self.opened.auditor.judges
        if judges.kernel:
            about["kernel"] = judges.kernel
        slow = [judges.progress] if judges.progress else []
        if lean.forks is not None and lean.forks.unavailable:
            slow.append(f"Lean starts anew for each text: {lean.forks.unavailable}")
        elif lean.forks is not None and lean.forks.rules.shares and lean.forks.unshared:
            slow.append(f"each text has a fork of its own: {lean.forks.unshared}")
        if slow:
            about["degraded"] = "; ".join(slow)
        return about

    async def describe(self) -> str:
        opened = self.opened
        why = await opened.auditor.judges.unavailable()
        judge = f"nothing is accepted here, for {why}" if why else "the judge works"
        return f"{opened.lean.environment.toolchain}; {judge}"

    async def open(self, states: States) -> None:
        self._states = states
        # Its self-test takes as long, and does not wait for this.
        self.opened.auditor.judges.open()
        await self.opened.lean.open()
        self._beside = [
            asyncio.create_task(self._preload()),
            asyncio.create_task(self._memory.tend()),
        ]

    async def _preload(self) -> None:
        """Preloads the headers that the fleet's texts have, the most used first, or those that were
        named ahead of any text. Texts are served meanwhile."""
        lean = self.opened.lean
        environment, forks = lean.environment, lean.forks
        if forks is None:
            return
        headers = await self._until_available(
            lambda: self._states.hot_headers(environment.fingerprint)
        )
        for header in headers or await asyncio.to_thread(prepared, environment):
            # Another release may have kept what this one would not import.
            if forkable_header(environment, header) == header:
                await forks.is_ready(header)

    def _note_header(self, request: Request, code: str, reply: Reply) -> None:
        """Tells the fleet which header a text had that Lean has answered."""
        lean = self.opened.lean
        serves = lean.forks is not None and not lean.forks.unavailable
        if serves and reply.verdict in LEAN_VERDICTS:
            header = forkable_header(lean.environment, code)
            if header is not None:
                self._states.note_header(lean.environment.fingerprint, request.tenant, header)

    async def prove(self) -> None:
        """Raises WorkerError if Lean, or its environment, is broken on this machine."""
        await self._notice_changes(at_once=True)
        await self.opened.lean.prove()

    async def close(self) -> None:
        self._watch.close()
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        await self.opened.close()

    async def run(self, request: Request) -> Reply:
        await self._notice_changes()
        answer = {
            "check": self._profile if request.profile else self._check,
            "verify": self._verify,
            "step": self._step,
            "export": self._export,
            "import": self._import,
        }.get(request.op)
        if answer is None:
            return Reply(error=f"the lean driver cannot {request.op}")
        started = time.monotonic()
        for _ in range(_READINGS):
            opened = self.opened
            reply = await self._answer(answer, request)
            if not await self._is_of_others(opened, request, reply):
                break
        else:
            reply = noted(reply, _CHANGING, verdict="unjudged", reason="judge_unavailable")
        if reply.verdict == "accepted" and not request.audit:
            reply = replace(reply, verdict="unjudged", reason="not_audited")
        if request.code and _may_be_of_imports(request.code, reply):
            reply = await self._of_imports(request.code, reply)
        elif request.target and reply.error:
            environment = self.opened.lean.environment
            target = environment.header_for(request.target) + request.target
            reply = await self._of_library(split_header(target).text, reply, may_lack=True)
        return replace(reply, wall_s=time.monotonic() - started)

    async def _of_imports(self, code: str, reply: Reply) -> Reply:
        """Returns the reply to a text of which an error may be about its imports: if Lean says the
        same of the header alone, the library is to blame."""
        environment = self.opened.lean.environment
        header = split_header(environment.header_for(code) + code)
        missing = await asyncio.to_thread(environment.missing, header)
        # A library with a hole has perhaps another one, and a library's root imports all of it.
        source = environment.roots(missing) if missing else header.text
        blamed = await self._of_library(source, reply)
        if blamed is not reply or reply.reason != "unknown_import":
            return blamed
        if not missing:
            return replace(reply, reason="lean_error")
        why = await asyncio.to_thread(environment.explain_import, code)
        return noted(reply, why, "error")

    async def _of_library(self, source: str, reply: Reply, *, may_lack: bool = False) -> Reply:
        """Returns the reply, or one that blames the library, if Lean cannot import this header
        alone. ``may_lack``: it may import what there is not."""
        opened = self.opened
        if not source or source in opened.whole:
            return reply
        unread, lacks = await opened.lean.try_imports(source)
        if unread:
            why = _UNREAD.format(opened.lean.environment.toolchain, unread)
            reply = replace(reply, error=None)
            return noted(reply, why, verdict="unjudged", reason="library_unreadable")
        if lacks and may_lack:
            return reply
        if lacks:
            return noted(reply, _INCOMPLETE, verdict="unjudged", reason="judge_unavailable")
        opened.whole.add(source)
        return reply

    async def _is_of_others(self, opened: Opened, request: Request, reply: Reply) -> bool:
        """Returns whether a reply may be about other files than its fingerprint; opens the
        environment anew if they have changed."""
        # A library that is rebuilt or deleted makes no candidate wrong.
        if reply.reason in ("unknown_import", "process_died"):
            return await self._notice_changes(at_once=True)
        if reply.verdict not in LEAN_VERDICTS:
            return False
        # What a header names may import a file that was replaced.
        await self._notice_changes(at_once=True)
        return self.opened is not opened

    async def _answer(
        self, answer: Callable[[Request], Awaitable[Reply]], request: Request
    ) -> Reply:
        """Returns an operation's reply about the text as the client sent it."""
        environment = self.opened.lean.environment
        header = environment.header_for(request.code) if request.code else ""
        try:
            reply = await answer(replace(request, code=header + request.code))
        except (UsageError, QueueFullError) as error:
            return Reply(error=str(error))
        reply = without_header(reply, header.count("\n"))
        errors = (message.text for message in reply.messages if message.severity == "error")
        if header and reply.verdict == "rejected" and any(map(_LACKING.match, errors)):
            reply = replace(reply, messages=(*reply.messages, _CORE_NOTE))
        if reply.verdict == "rejected" and request.code.startswith("\ufeff"):
            reply = noted(reply, _MARKED)
        return reply

    async def _profile(self, request: Request) -> Reply:
        return await profile(self.opened.lean, request)

    async def _check(self, request: Request) -> Reply:
        opened = self.opened
        reply = await check(opened.lean, opened.auditor, request, request.code)
        self._note_header(request, request.code, reply)
        reply = await self._with_goals(reply, request)
        if reply.verdict != "incomplete":
            return reply
        return await self._with_sorries(reply, lambda: opened.sorries(request, self._states))

    async def _with_goals(self, reply: Reply, request: Request) -> Reply:
        """Adds the goals before each tactic if they are asked for, or a message that says why there
        are none."""
        if not request.goals or reply.verdict not in LEAN_VERDICTS:
            return reply
        try:
            tactics, cpu_s = await self.opened.documents.tactics(request, limits_of(request))
        except (LanguageServerError, SandboxError) as error:
            return noted(reply, f"the goals before tactics are not known: {error}")
        return replace(reply, tactics=tactics, cpu_s=reply.cpu_s + cpu_s)

    async def _with_sorries(
        self, reply: Reply, sorries: Callable[[], Awaitable[tuple[Sorry, ...]]]
    ) -> Reply:
        """Adds the sorries of an incomplete text, whose states are kept with that."""
        try:
            return replace(reply, sorries=await self._until_available(sorries))
        except QueueFullError as error:
            return noted(reply, f"its states were not kept: {error}")

    async def _verify(self, request: Request) -> Reply:
        opened = self.opened
        target = await opened.targets.of_request(request)
        reply = await check(opened.lean, opened.auditor, request, request.code, target=target)
        self._note_header(request, request.code, reply)
        return await self._with_goals(reply, request)

    async def _step(self, request: Request) -> Reply:
        return await self._until_available(lambda: self._stepped(request))

    async def _stepped(self, request: Request) -> Reply:
        opened = self.opened
        move = await read_move(request, self._states, opened.lean.environment)
        if isinstance(move, Reply):
            return move
        code = move.recipe.source.code
        try:
            reply = await opened.step(move, request, self._states, trusts=self.trust_steps)
        except UsageError as error:
            # Its source does not compile any more.
            reply = Reply(error=str(error))
            return await self._of_library(split_header(code).text, reply, may_lack=True)
        self._note_header(request, code, reply)
        return await self._of_imports(code, reply) if _may_be_of_imports(code, reply) else reply

    async def _export(self, request: Request) -> Reply:
        records = await self._until_available(lambda: self._states.recall(request.state))
        if records is None:
            return Reply(error=f"the state {request.state} is not known here, or no longer")
        return Reply(payload=pack_export(read_recipe(request.state, records)))

    async def _import(self, request: Request) -> Reply:
        environment = self.opened.lean.environment
        recipe = await asyncio.to_thread(unpack_export, request.payload)
        if not await asyncio.to_thread(is_genuine, recipe):
            raise RecipeError("the exported state is of a recipe to which no steps lead")
        if recipe.source.fingerprint != environment.fingerprint:
            raise RecipeError(other_environment(recipe, environment))
        records = recipe.records()
        await self._until_available(lambda: self._states.keep(dict(records)))
        return Reply(state=records[-1][0], fingerprint=environment.fingerprint)

    async def _until_available(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Returns what ``work`` returns, and tries again while Redis is out of reach. If it takes
        too long, the request's lease or run timeout ends, and another worker gets the request."""
        pauses = backoff_s(self._rng)
        while True:
            try:
                return await work()
            except UnavailableError as error:
                log.warning("%s", error)
                await asyncio.sleep(next(pauses))

    def _open(self, environment: Environment) -> Opened:
        snapshots = None
        if self.cache:
            snapshots = Snapshots(self.cache, environment.folders())
        forks = None
        if self.forks:
            forks = ForkServer(
                environment,
                self.forks,
                hidden=self.hidden,
                nice=self.nice,
                memory=self._memory,
                slots=self.slots,
            )
        documents = Documents(
            environment, self.slots, self.documents, hidden=self.hidden, nice=self.nice
        )
        lean = Lean(
            environment,
            slots=self.slots,
            forks=forks,
            documents=documents,
            hidden=self.hidden,
            nice=self.nice,
            inbox_root=self.cache.inbox_root if self.cache else None,
        )
        judges = Judges(
            environment,
            slots=self.slots,
            hidden=self.hidden,
            nice=self.nice,
            alone=self.judge_alone,
            memory=self._memory,
        )
        if forks is not None:
            # Its texts will be judged, and a judge imports for as long.
            forks.expects = lambda header: judges.expect(split_header(header))
        auditor, prefixes = Auditor(lean, judges), Prefixes(lean, snapshots, self.prefixes)
        targets = Targets(lean)
        return Opened(lean, auditor, prefixes, targets, documents, environment.libraries())

    async def _notice_changes(self, *, at_once: bool = False) -> bool:
        """Takes a new fingerprint if the environment's files have changed; returns whether they
        have. It looks every few seconds, or ``at_once``."""
        if not at_once and time.monotonic() - self._looked_at_s < _CHECK_CHANGES_EVERY_S:
            return False
        asked, asked_s = self.opened, time.monotonic()
        if at_once and self._watched is asked and self._watch.is_quiet():
            return False
        async with self._looking:
            if self._looked_at_s < asked_s:
                before = self.opened
                if self._watched is not before:
                    self._watch.close()
                    self._watch = await asyncio.to_thread(Watch, before.lean.environment)
                    self._watched = before
                # A change behind the look's beginning may have gone unseen.
                began_s = time.monotonic()
                self._watch.begin()
                if await asyncio.to_thread(before.lean.environment.changed):
                    environment = await asyncio.to_thread(self.open_environment)
                    environment = environment.after(before.lean.environment)
                    opened = self._open(environment)
                    try:
                        await opened.lean.prove()
                    except BaseException:
                        await opened.close()
                        raise
                    self.opened = opened
                    await before.close()
                self._looked_at_s = began_s
        return self.opened is not asked


def _may_be_of_imports(code: str, reply: Reply) -> bool:
    """Returns whether Lean died, the judge could not work, or an error says that an import is
    missing, or stands where the header is."""
    if reply.verdict != "rejected":
        # A fork has imported the library before it was damaged, and the judge has not.
        return reply.verdict == "crashed" or reply.reason == "judge_unavailable"
    last_line = split_header(code).text.count("\n") + 1
    errors = (each for each in reply.messages if each.severity == "error")
    return reply.reason == "unknown_import" or any(
        each.line <= last_line and UNREADABLE.search(each.text) for each in errors
    )


def without_header(reply: Reply, lines: int) -> Reply:
    """Returns a reply about a text behind a header of so many lines as one about the text alone."""
    if not lines:
        return reply
    messages = tuple(moved_up(message, lines) for message in reply.messages)
    sorries = tuple(
        replace(sorry, line=sorry.line - lines, end_line=sorry.end_line and sorry.end_line - lines)
        for sorry in reply.sorries
    )
    tactics = tuple(replace(each, line=each.line - lines) for each in reply.tactics)
    told = reply.profile
    if told is not None:
        rows = (replace(each, line=max(1, each.line - lines)) for each in told.declarations)
        told = replace(told, declarations=tuple(rows))
    return replace(reply, messages=messages, sorries=sorries, tactics=tactics, profile=told)
