"""The worker's side of the judge: starts its processes, and reads their answers.

The processes and their pool share limits and answers, so they stand in one file.
A judge's process serves one header. It has a sandbox that no candidate ever enters, and answers
through a pipe that no candidate ever holds. See :mod:`leanq.lean.judge.judge_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from cachetools import LRUCache, TTLCache
from msgspec import structs

from leanq.errors import AuditError, LeanQError, SandboxError
from leanq.lean.environment import Environment, module_parts, python_folders
from leanq.lean.judge.judge_lean import HONEST, forged, judge_lean
from leanq.lean.judge.kernel_images import KernelImages
from leanq.lean.judge.known_names import COMPARED
from leanq.lean.run.headers_memory import HeadersMemory, Ready
from leanq.lean.run.image import Name
from leanq.lean.run.layouts import Damaged
from leanq.lean.run.olean import Survey, read_parts
from leanq.lean.run.pass_memory import Libraries, PassMemory, libraries_of
from leanq.lean.sandbox.sandbox import PACKAGE, Limits, Process, Sandbox, bare_python
from leanq.lean.text import Header, split_header

log = logging.getLogger("leanq.worker")

# A library may be large and a disk cold.
_IMPORT_LIMITS = Limits(cpu_s=300.0, wall_s=900.0, memory_bytes=16 << 30)
_IDLE_LIMITS = Limits(cpu_s=10.0, wall_s=math.inf, memory_bytes=4 << 30, look_s=1.0)
_SELF_TEST_LIMITS = Limits(cpu_s=60.0, wall_s=360.0, memory_bytes=4 << 30)
# A short budget is for Lean's work on the text; judging has at least so much.
_LEAST_CPU_S, _LEAST_MEMORY_BYTES = 10.0, 512 << 20
# The process's limits for its child are lower, so that only the child is lost.
_MARGIN_S, _MARGIN_BYTES = 5.0, 256 << 20
_MOST_ANSWERED_BYTES = 64 << 20
_AGAIN_S = 30.0  # until a self-test that could not be run is tried again
# How many headers' waits are remembered.
_PLACES_REMEMBERED = 256
# For how many headers a judge starts without what prints statements, and until that is tried again.
_SILENT_REMEMBERED, _SILENT_S = 256, 600.0

_NOTHING = Survey(frozenset(), (), frozenset())


class Judgement(msgspec.Struct, frozen=True):
    """The judge's answer about a file.

    Attributes:
        proved: whether the kernel has accepted every constant; otherwise ``rule``, ``limit`` or
            ``unavailable`` says why.
        rule: the rule by which the file is denied, or "".
        limit: the limit that the judge ran into, or "".
        disagrees: the words of a kernel that does not take what another Lean has taken, or "".
        unavailable: why there is no kernel here, or "".
        text: the rule's words.
        ended: whether Lean read the text to its end.
        survey: the file's own axioms, and the imported constants that it leads to.
        theorems: the theorems that it declares; for a verification, the target's.
        more_theorems: how many more there are.
        statements: each theorem's statement in Lean's words; "" if it cannot be printed, None if
            it was not asked for.
        behind: the axioms behind each constant that was asked for.
        unsettled: names that may mean something else than the kernel takes for granted, and why.
        differences: how a candidate differs from its target: name, rule and words.
        nodes: how many expressions were rebuilt.
        fills_value: whether what fills a hole is more than a proof.
        ran_at: where the text declares each constant that it ran: the line and the column.
        kernel: the version of the Lean whose kernel judged; None where none did.
        cpu_s: CPU seconds that judging took.
        peak_bytes: the most memory that the judge's fork has held so far, Lean's library and header
            included.
    """

    proved: bool = False
    rule: str = ""
    limit: str = ""
    disagrees: str = ""
    unavailable: str = ""
    text: str = ""
    ended: bool = False
    survey: Survey = _NOTHING
    theorems: tuple[str, ...] = ()
    more_theorems: int = 0
    statements: tuple[str | None, ...] = ()
    behind: tuple[frozenset[str], ...] = ()
    unsettled: dict[str, str] = {}
    differences: tuple[tuple[str, str, str], ...] = ()
    nodes: int = 0
    fills_value: bool = False
    ran_at: tuple[tuple[int, int] | None, ...] = ()
    kernel: str | None = None
    cpu_s: float = 0.0
    peak_bytes: int = 0


class _Said(msgspec.Struct):
    """A line of the judge's process about files; see :mod:`leanq.lean.judge.judge_process`."""

    answer: Judgement
    statements: list[str]
    cpu_s: float
    peak_bytes: int


_read = msgspec.json.Decoder(_Said).decode


class JudgeLimitError(Exception):
    """The judge ran into a limit, which says nothing of the file."""


class _LostError(Exception):
    """A judge's process has died of something else than its limits."""


Parts = Sequence[bytes]
"""The bytes of one compiled file, in its parts."""


class Judges:
    """The judges of one environment: as many processes as ``slots``, and more for other headers
    within a limit of memory.

    Args:
        environment: the one that they import from, and whose library they load.
        slots: how many files are judged at a time.
        hidden: folders to hide from a process, if the machine can.
        nice: niceness of the processes.
        prints: whether they print statements.
        alone: whether each file is judged in a process of its own; otherwise a few files of one
            tenant follow one another in one process.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        slots: int,
        hidden: Sequence[Path] = (),
        nice: int = 0,
        prints: bool = True,
        alone: bool = False,
        memory: HeadersMemory | None = None,
    ) -> None:
        self._environment = environment
        self._lean = lean = judge_lean(environment.toolchain)
        self._images = KernelImages(environment, lean) if lean.is_foreign else None
        self._hidden, self._nice = tuple(hidden), nice
        self._free = asyncio.Semaphore(slots)
        self._pool = _Pool(self._new, memory or HeadersMemory())
        self._ahead: set[asyncio.Task[None]] = set()
        self._again_s = math.inf
        self._prints, self._alone = prints, alone
        self._last_prints = prints
        # Headers with which a judge starts only if it does not print.
        self._silent: TTLCache[_Start, bool] = TTLCache(_SILENT_REMEMBERED, _SILENT_S)
        self._self_test: asyncio.Task[str] | None = None
        self._libraries: Libraries = ("", ())
        self._memory: PassMemory | None = None

    @property
    def kernel(self) -> str:
        """The version of the kernel that judges; "" if there is none here."""
        return self._lean.version

    @property
    def progress(self) -> str:
        """Says how many kernel images are made while some are being made; "" at other times."""
        return self._images.progress if self._images is not None else ""

    async def describe(self) -> str:
        """Returns which kernel judges, and from what; after a passed self-test."""
        version = self._environment.toolchain.version
        if self._images is None:
            return f"the kernel of Lean {version}, which is the environment's"
        found = await asyncio.to_thread(self._images.prepare, _library(self._environment).modules)
        return (
            f"Lean {version} compiles, the kernel of Lean {self.kernel} judges; images of "
            f"{found.modules} modules and {found.constants} constants, from {found.layout}; "
            f"{COMPARED} names that the kernel knows mean what it takes for granted"
        )

    async def prepare(self) -> tuple[str, Mapping[str, str]]:
        """Makes the images of all modules ahead, if the kernel needs any.

        Returns:
            What was made, and why some modules cannot be transcribed.
        """
        if self._images is None:
            return "", {}
        found, faults = await asyncio.to_thread(self._images.prepare_all)
        return f"images of {found.modules} modules and {found.constants} constants", faults

    def open(self) -> None:
        """Begins the self-test, unless a pass is remembered; files wait for it."""
        self._again_s = math.inf
        self._self_test = asyncio.create_task(self.self_test(anew=False))

    async def unavailable(self) -> str:
        """Returns why nothing can be judged here, or ""."""
        if self._self_test is None or asyncio.get_running_loop().time() > self._again_s:
            self.open()
        assert self._self_test is not None
        return await asyncio.shield(self._self_test)

    async def close(self) -> None:
        """Ends every process."""
        for task in filter(None, (self._self_test, *self._ahead)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._pool.close()

    def expect(self, header: Header) -> None:
        """Begins to start a process for files with this header, if none is there."""
        start = self._possible(_Start.of(header)._replace(prints=self._last_prints))

        async def begin() -> None:
            # Without a kernel it is another start, which takes no time.
            if not await self.unavailable():
                await self._pool.fill(start)

        task = asyncio.create_task(begin())
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)

    async def judge(
        self,
        header: Header,
        file: Parts,
        ending: Sequence[str],
        limits: Limits,
        tenant: str | None = None,
        *,
        statements: bool = True,
    ) -> Judgement:
        """Judges whether the file compiled from a text with this header is proved.

        Args:
            tenant: whose file it is; None: no other file is judged in its process.
            statements: whether to print those of its theorems.

        Raises:
            SandboxError: this machine failed.
        """
        order = {"op": "judge", "ending": ending, "tenant": tenant, "statements": statements}
        return await self.ask(header, [file], order, limits)

    async def axioms(
        self, header: Header, names: Sequence[Name]
    ) -> Mapping[Name, frozenset[str]] | None:
        """Returns the axioms behind constants that a header imports, as the kernel has them; None
        where the environment's own Lean has to tell.

        Raises:
            JudgeLimitError: the judge cannot tell within its limits.
            AuditError: there is no such constant.
        """
        if self._images is None or await self.unavailable():
            return None
        order = {"op": "axioms", "names": names, "statements": False}
        found = await self._asked(_Start.of(header), [], order, _SELF_TEST_LIMITS)
        if found.unavailable:
            return None
        if found.limit:
            raise JudgeLimitError(f"the axioms behind its imports are not known: {found.limit}")
        if found.rule:
            raise AuditError(found.text)
        return dict(zip(names, found.behind, strict=True))

    async def ask(
        self, header: Header, files: Sequence[Parts], order: Mapping[str, Any], limits: Limits
    ) -> Judgement:
        """Judges files by an order: ``judge`` a text's file, ``verify`` a target and a candidate,
        or ``examples``, a text's file and one with a name for each of its examples. ``ran`` in an
        order has the constants that the text ran; their places come back.

        Raises:
            SandboxError: this machine failed.
        """
        if self._alone:
            order = {**order, "tenant": None}
        unavailable = await self.unavailable()
        if not unavailable and not await self._has_tested_libraries():
            unavailable = "Lean's library is another one than its self-test was run with"
        start = _Start.of(header)._replace(has_kernel=not unavailable)
        found = await self._asked(start, files, order, limits)
        if found.unavailable and unavailable:
            return structs.replace(found, unavailable=unavailable)
        return found

    async def _asked(
        self, start: _Start, files: Sequence[Parts], order: Mapping[str, Any], limits: Limits
    ) -> Judgement:
        limits = replace(
            limits,
            cpu_s=max(limits.cpu_s, _LEAST_CPU_S),
            memory_bytes=max(limits.memory_bytes, _LEAST_MEMORY_BYTES),
        )
        start = start._replace(prints=order.get("statements", True))
        async with self._free:
            try:
                return await self._asked_once(start, files, order, limits)
            except _LostError as error:
                # As when the machine is short of memory, of which this file knows nothing.
                log.warning("a file is judged once more: %s", error)
            try:
                return await self._asked_once(start, files, order, limits)
            except _LostError as error:
                return Judgement(limit=str(error))

    async def _asked_once(
        self, start: _Start, files: Sequence[Parts], order: Mapping[str, Any], limits: Limits
    ) -> Judgement:
        self._last_prints = start.prints
        async with self._pool.process(self._possible(start), order.get("tenant")) as process:
            return await process.ask(order, files, limits)

    def _possible(self, start: _Start) -> _Start:
        """Returns the start without what prints statements, if it cannot be had."""
        prints = start.prints and self._prints and start not in self._silent
        return start._replace(prints=prints)

    async def _new(self, start: _Start) -> _JudgeProcess:
        """Starts a process. Printing takes a fifth of that."""
        process = await self._started(start)
        if not process.usable and start.prints:
            await process.close()
            process = await self._started(start._replace(prints=False))
            # If it does not start either, that tells nothing of what printing takes.
            if process.usable:
                self._silent[start] = True
                log.warning(
                    "statements behind one header are not printed for %d s: the judge does not "
                    "start with what that takes",
                    _SILENT_S,
                )
        return process

    async def _started(self, start: _Start) -> _JudgeProcess:
        lean, path = self._lean, self._environment.folders()
        if not start.has_kernel:
            lean = replace(lean, libraries=())
        elif self._images is not None:
            try:
                # Without imports, too: the library tells which names are its own.
                prepared = await asyncio.to_thread(self._images.prepare, start.modules)
                path = (prepared.folder,)
            except (AuditError, OSError) as error:
                lean = replace(lean, libraries=(), fault=str(error))
        order = {
            "libraries": [str(each) for each in lean.libraries],
            "fault": lean.fault,
            "is_foreign": lean.is_foreign,
            "path": [str(each) for each in path],
            "modules": start.modules,
            "is_module": start.is_module,
            "library": _library(self._environment).modules,
            "prints": start.prints,
        }
        folders = (*python_folders(), PACKAGE, *path, *(file.parent for file in lean.libraries))
        sandbox = await self._sandbox(*folders)
        process = await _JudgeProcess.start(sandbox, self._environment, start, order)
        if process.unavailable and start.has_kernel:
            # A clean-up may have deleted images.
            if self._images is not None and await asyncio.to_thread(self._images.forget_lost):
                await process.close()
                return await self._started(start)
            # The next file may find a module that was lost, or room on a full disk.
            process.serves = None
        return process

    async def self_test(self, *, anew: bool = True) -> str:
        """Judges an honest file and forged ones, if ``anew`` whatever is remembered; returns what
        is wrong with this judge, or ""."""
        self._libraries = self._found_libraries()
        try:
            images = self._images
            state = [await asyncio.to_thread(images.library_state)] if images else []
            memory = PassMemory(self._environment, "judge", self._libraries, *state)
            self._memory = memory
            if not anew and await asyncio.to_thread(memory.is_kept):
                return ""
            wrong = await self._tested()
        except (LeanQError, Damaged, IndexError, OSError) as error:
            self._again_s = asyncio.get_running_loop().time() + _AGAIN_S
            return f"the judge's self-test could not be run: {error}"
        if wrong:
            log.warning("nothing can be accepted here, and is unjudged instead: %s", wrong)
            await asyncio.to_thread(memory.forget)
        else:
            await asyncio.to_thread(memory.keep)
        return wrong

    async def _has_tested_libraries(self) -> bool:
        found, memory = self._found_libraries(), self._memory
        if found != self._libraries and memory and await asyncio.to_thread(memory.holds_for, found):
            self._libraries = found
        return found == self._libraries

    def _found_libraries(self) -> Libraries:
        return libraries_of(self._environment, self._lean.libraries)

    async def _tested(self) -> str:
        honest = await self._compiled(HONEST)
        order = {"op": "judge", "ending": ["", ""]}
        expected = [(honest, ""), *((forged, "kernel_refused") for forged in forged(honest))]
        for file, rule in expected:
            found = await self._tried(_Start(), [[file]], order)
            if found.unavailable:
                return found.unavailable
            said = "kernel_refused" if found.disagrees else found.rule
            if said != rule or found.proved == bool(rule):
                said = said or ("proved" if found.proved else "nothing")
                return (
                    f"the judge fails its self-test with {self._environment.toolchain.version}: "
                    f"{said}, expected {rule or 'proved'}"
                )
        return "" if self._images is None else await self._names_tested()

    async def _tried(
        self, start: _Start, files: Sequence[Parts], order: Mapping[str, Any]
    ) -> Judgement:
        """Returns the judge's answer for a self-test; raises SandboxError if it came to none, as on
        a machine that is short of memory."""
        found = await self._asked(start, files, order, _SELF_TEST_LIMITS)
        if found.limit or found.rule == "not_started":
            raise SandboxError(found.limit or found.unavailable)
        return found

    async def _names_tested(self) -> str:
        """Returns which names may mean something else in the environment than to the kernel."""
        library = _library(self._environment)
        found = await self._tried(library, [], {"op": "names", "statements": False})
        if why := found.unavailable or found.text:
            return why
        said = "; ".join(f"{name} ({why})" for name, why in found.unsettled.items())
        return said and (
            "the judge's kernel takes for granted what some names mean, and this library's may "
            f"mean something else: {said}"
        )

    async def _compiled(self, text: str) -> bytes:
        """Compiles a text of ours without imports."""
        sandbox = await self._sandbox()
        try:
            toolchain = self._environment.toolchain
            done = await sandbox.run(
                [*toolchain.command, "-o", "SelfTest.olean", "--stdin"],
                env=self._environment.sandbox_env(sandbox.scratch),
                limits=_SELF_TEST_LIMITS,
                stdin=text.encode(),
            )
            if done.exit.code != 0:
                raise AuditError("Lean does not compile the self-test")
            [file] = await asyncio.to_thread(read_parts, sandbox.left / "SelfTest.olean")
            return file
        finally:
            await sandbox.close()

    async def _sandbox(self, *folders: Path) -> Sandbox:
        wanted = dict.fromkeys((*self._environment.readable(), *folders))
        readable = tuple(path for path in wanted if path.exists())
        return await Sandbox.open(readable=readable, hidden=self._hidden, nice=self._nice)


class _Start(NamedTuple):
    """How a process starts.

    Attributes:
        modules: those that it imports.
        is_module: whether it judges files of the module system.
        has_kernel: whether it may use one.
        prints: whether it loads what prints statements.
    """

    modules: tuple[Name, ...] = ()
    is_module: bool = False
    has_kernel: bool = True
    prints: bool = True

    @classmethod
    def of(cls, header: Header) -> _Start:
        """Returns the start with the imports of a header, and with those that Lean adds."""
        imports = [*([] if header.is_prelude else ["Init"]), *header.imports]
        return cls(tuple(dict.fromkeys(map(module_parts, imports))), header.is_module)


def _library(environment: Environment) -> _Start:
    """Returns the start with the imports of a text without a header."""
    return _Start.of(split_header(environment.header))


@dataclass(eq=False, slots=True)
class _Place:
    """The processes of one start that import or judge. ``waited_s``: how long files have waited for
    those that judge, since the last one started; ``import_s``: how long that took."""

    starting: int = 0
    judging: int = 0
    waited_s: float = 0.0
    import_s: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Wakes the files that wait."""
        self.changed.set()
        self.changed = asyncio.Event()


class _Pool:
    """Processes, idle ones within a budget of memory.

    A file waits for the process that imports its header. It also waits for one that judges another
    file, until such waits have taken as long as an import: then a further process starts.

    Args:
        new: starts a process.
    """

    def __init__(
        self, new: Callable[[_Start], Awaitable[_JudgeProcess]], memory: HeadersMemory
    ) -> None:
        self._new, self._memory = new, memory
        memory.join(self.ready)
        self._closed = False
        self._idle: list[_JudgeProcess] = []
        self._places: LRUCache[_Start, _Place] = LRUCache(_PLACES_REMEMBERED)

    @contextlib.asynccontextmanager
    async def process(self, start: _Start, tenant: str | None) -> AsyncIterator[_JudgeProcess]:
        """Yields a process that judges for nobody else meanwhile: if possible an idle one that has
        judged for this tenant."""
        place = self._place(start)
        while (process := self._take(start, tenant)) is None:
            left_s = place.import_s - place.waited_s
            if not place.starting and (not place.judging or left_s <= 0):
                process = await self._started(start, place)
                break
            began_s, changed, imports = time.monotonic(), place.changed, place.starting > 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if imports else left_s):
                    await changed.wait()
            if not imports:
                place.waited_s += time.monotonic() - began_s
        place.judging += 1
        try:
            yield process
        finally:
            place.judging -= 1
            await self._put(process, place)

    async def fill(self, start: _Start) -> None:
        """Starts a process, if there is none."""
        place = self._place(start)
        is_idle = any(each.serves == start for each in self._idle)
        if self._closed or is_idle or place.starting or place.judging:
            return
        with contextlib.suppress(SandboxError):  # a file's own start will tell
            await self._put(await self._started(start, place), place)

    async def close(self) -> None:
        """Ends the idle processes now, and the others when they come back."""
        self._closed = True
        idle, self._idle = self._idle, []
        await asyncio.gather(*(each.close() for each in idle))
        self._memory.leave(self.ready)

    def ready(self) -> Iterator[Ready]:
        """Yields the idle processes."""
        for each in self._idle:
            yield Ready(each.used_s, each.held_bytes, partial(self._evict, each))

    async def _evict(self, process: _JudgeProcess) -> bool:
        if process not in self._idle:
            return False
        self._idle.remove(process)
        await process.close()
        return True

    def _place(self, start: _Start) -> _Place:
        # One that prints serves texts without statements, too.
        return self._places.setdefault(start._replace(prints=True), _Place())

    def _take(self, start: _Start, tenant: str | None) -> _JudgeProcess | None:
        # One that was used long ago, rather than the fork of a tenant who is at work.
        for process in sorted(self._idle, key=lambda each: (each.tenant != tenant, each.used_s)):
            if process.serves in (start, start._replace(prints=True)):
                self._idle.remove(process)
                return process
        return None

    async def _started(self, start: _Start, place: _Place) -> _JudgeProcess:
        place.starting += 1
        try:
            process = await self._new(start)
        finally:
            place.starting -= 1
            place.tell()
        place.import_s, place.waited_s = process.import_s, 0.0
        return process

    async def _put(self, process: _JudgeProcess, place: _Place) -> None:
        """Keeps a process for the next file, if it can be asked again, and memory allows."""
        is_kept = not self._closed and process.usable and process.serves is not None
        if is_kept:
            process.used_s = time.monotonic()
            self._idle.insert(0, process)
        place.tell()
        if is_kept:
            await self._memory.make_room()
        else:
            await process.close()


class _JudgeProcess:
    """One process, which judges one file at a time.

    Attributes:
        serves: how it has started; None if it shall serve no second file.
        unavailable: why it has no kernel, "" if it has one.
        usable: whether it can be asked again.
        tenant: whose file it has judged last, if others of this tenant may follow.
        version: its kernel's Lean.
        import_s: how long its start took.
        used_s: the monotonic time of its last use.
        held_bytes: its own memory once it has imported. Its child has as much again, though nothing
            is copied.
    """

    def __init__(self, sandbox: Sandbox, process: Process, serves: _Start) -> None:
        """Use :meth:`start`."""
        self.serves: _Start | None = serves
        self.unavailable = ""
        self.usable = False
        self.tenant: str | None = None
        self.version = ""
        self._sandbox, self._process = sandbox, process
        self._unread = b""
        self.held_bytes = 0
        self.import_s = self.used_s = 0.0

    @classmethod
    async def start(
        cls, sandbox: Sandbox, environment: Environment, start: _Start, order: Mapping[str, Any]
    ) -> _JudgeProcess:
        """Starts a process, which then owns the sandbox; raises SandboxError if it cannot be
        started."""
        began_s = time.monotonic()
        try:
            process = await sandbox.start(
                bare_python("leanq.lean.judge.judge_process"),
                env=environment.sandbox_env(sandbox.scratch),
                limits=_IMPORT_LIMITS,
            )
            made = cls(sandbox, process, start)
            process.write(json.dumps(order).encode() + b"\n")
            ready = await made._line()
            if ready is None:
                made.unavailable = "the judge does not start here"
            else:
                said = json.loads(ready)
                made.unavailable, made.held_bytes = said["ready"], said["held_bytes"]
                made.usable = True
                made.version, made.import_s = said["version"], time.monotonic() - began_s
                await process.renew(_IDLE_LIMITS)
        except BaseException:
            await sandbox.close()
            raise
        return made

    async def ask(
        self, order: Mapping[str, Any], files: Sequence[Parts], limits: Limits
    ) -> Judgement:
        """Returns its answer about files. After a missing answer it is not usable any more.

        Raises:
            _LostError: it has died of something else than its limits.
            SandboxError: this machine failed.
        """
        if not self.usable:
            return Judgement(rule="not_started", unavailable=self.unavailable)
        self.usable = False
        self.tenant = order.get("tenant")
        process = self._process
        if process.ended:
            raise _LostError("the judge's process has died before it had the file")
        frame = {
            "tenant": None,
            "statements": True,
            **order,
            "sizes": [[len(part) for part in parts] for parts in files],
            "cpu_s": math.ceil(limits.cpu_s),
            "memory_bytes": limits.memory_bytes,
        }
        size_bytes = sum(len(part) for parts in files for part in parts)
        margin_bytes = _MARGIN_BYTES + self.held_bytes + 2 * size_bytes
        process.renew_untold(
            replace(
                limits,
                cpu_s=limits.cpu_s + _MARGIN_S,
                memory_bytes=limits.memory_bytes + margin_bytes,
                output_bytes=_MOST_ANSWERED_BYTES,
            )
        )
        process.write(json.dumps(frame).encode() + b"\n")
        for parts in files:
            for part in parts:
                process.write(part)
        line = await self._line()
        if line is None:
            if (end := await process.wait()).stopped is None:
                raise _LostError(f"the judge's process has died with the file: {end}")
            return Judgement(limit="the judge was stopped by a limit")
        process.renew_untold(_IDLE_LIMITS)
        said = _read(line)
        self.usable = True
        found = said.answer
        missing = "" if frame["statements"] else None
        has_looked = not found.limit and not found.rule
        return structs.replace(
            found,
            unavailable=self.unavailable if has_looked else "",
            statements=(*said.statements, *(missing for _ in found.theorems))[
                : len(found.theorems)
            ],
            kernel=None if self.unavailable or found.limit else self.version,
            cpu_s=said.cpu_s,
            peak_bytes=said.peak_bytes,
        )

    async def close(self) -> None:
        """Ends the process."""
        self.usable = False
        await self._sandbox.close()

    async def _line(self) -> bytes | None:
        """Returns its next line; None at its end. Raises SandboxError if the sandbox failed."""
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            piece = await self._process.read()
            if not piece:
                await self._process.wait()
                return None
            pieces.append(piece)
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        return line
