"""The lean driver: the ``lean`` program of any toolchain, one process per request.

A check compiles the candidate in a sandbox. What Lean would accept is audited: the compiled
result is read as data, and Lean is asked about the imported constants that it rests on, in a
process that never sees the candidate. See :mod:`leanq.drivers.audit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import AuditError, SandboxError, ToolchainError
from ..sandbox import Finished, Limits, Sandbox
from ..wire import LEAN_VERDICTS, Message, Reply, Request, Verdict
from .audit import Findings, ImportedAxioms, audit
from .environment import Environment
from .messages import Printed, judge, last_words
from .olean import Module, read_module
from .source import Header, name_examples, split_header

# The module under which every candidate is compiled; no library calls its own so.
_MODULE = "LeanqSubmission"
# An example that is compiled under a name is no less right for being a definition.
_NAMED_OPTIONS = ("-Dweak.linter.defProp=false", "-Dweak.warn.classDefReducibility=false")
# As much can be read in the time that another thread takes to start.
_PRINTED_AT_ONCE_BYTES = 20_000
_CHECK_CHANGES_EVERY_S = 5.0
_HEADERS_REMEMBERED = 256
# Asking for axioms only imports and prints, but a library may be large and a disk cold.
_ASK_LIMITS = Limits(cpu_s=300.0, wall_s=900.0, memory_bytes=8 << 30)


class LeanDriver:
    """Checks in one environment, with at most ``slots`` sandboxes.

    Args:
        open_environment: opens the environment, and again after its files have changed.
        hidden: folders that a candidate must not see, where the machine can hide them.
        nice: niceness of the Lean processes.
    """

    def __init__(
        self,
        open_environment: Callable[[], Environment],
        *,
        slots: int,
        hidden: Sequence[Path] = (),
        nice: int = 0,
    ) -> None:
        self._open_environment = open_environment
        self._environment = open_environment()
        self.lane = self._environment.name
        self._slots = slots
        self._hidden = tuple(hidden)
        self._nice = nice
        self._idle: list[Sandbox] = []
        self._looked_at_s = time.monotonic()
        self._looking = asyncio.Lock()
        self._axioms: OrderedDict[tuple[str, ...], ImportedAxioms] = OrderedDict()

    @property
    def about(self) -> Mapping[str, object]:
        toolchain = self._environment.toolchain
        return {
            "driver": "lean",
            "lean": toolchain.version,
            "commit": toolchain.commit,
            "fingerprint": self._environment.fingerprint,
        }

    async def open(self) -> None:
        opened = await asyncio.gather(*(self._new_sandbox() for _ in range(self._slots)))
        self._idle.extend(opened)
        # The wheel's Lean is known to. Any other could be a wrapper around files that are out of
        # sight there, and would seem to crash on each candidate.
        if self._environment.toolchain.source != "wheel":
            await self._try_lean(opened[0])

    async def _try_lean(self, sandbox: Sandbox) -> None:
        """Raises ToolchainError where Lean does not run in the sandbox."""
        done = await _lean(sandbox, self._environment, ["--version"], _ASK_LIMITS)
        if done.exit.code != 0:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise ToolchainError(
                f"{self._environment.toolchain} does not run in the sandbox, where it can read its "
                "own prefix, the libraries and the system's folders"
                f"{': ' + said.splitlines()[-1] if said else ''}; name the program itself with "
                "--lean or LEANQ_LEAN, not a wrapper"
            )

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in self._idle))
        self._idle.clear()

    async def run(self, request: Request) -> Reply:
        if request.op != "check":
            return Reply(error=f"the lean driver cannot {request.op}")
        await self._notice_changes()
        environment = self._environment
        if request.replay and environment.toolchain.replay_command is None:
            version = environment.toolchain.version
            return Reply(error=f"Lean {version} here has no leanchecker to replay with")
        started = time.monotonic()
        check = _Check(request, environment)
        async with self._sandbox() as sandbox:
            reply = await check.compile(sandbox)
        if check.module is not None:
            reply = await self._audited(check, reply)
        return replace(reply, wall_s=time.monotonic() - started)

    async def _audited(self, check: _Check, reply: Reply) -> Reply:
        assert check.module is not None
        started = time.monotonic()
        try:
            findings = await audit(
                check.module,
                allowed=check.request.allow_axioms,
                environment_allowed=check.environment.allowed_axioms,
                imported=self._imported(check.environment, check.header),
            )
        except AuditError as error:
            return _unaudited(reply, error)
        spent_s = check.audit_s + time.monotonic() - started
        return replace(_after_audit(reply, findings), audit_s=spent_s)

    def _imported(self, environment: Environment, header: Header) -> ImportedAxioms:
        """What is known of the axioms behind the imports of ``header``."""
        key = (environment.fingerprint, str(header.is_prelude), *header.imports)
        known = self._axioms.get(key)
        if known is None:

            async def ask(source: str) -> str:
                return await self._ask(environment, source)

            known = self._axioms[key] = ImportedAxioms(header, ask, environment.find_olean)
            if len(self._axioms) > _HEADERS_REMEMBERED:
                self._axioms.popitem(last=False)
        self._axioms.move_to_end(key)
        return known

    async def _ask(self, environment: Environment, source: str) -> str:
        """What Lean prints about a source of ours, which imports the environment alone."""
        async with self._sandbox() as sandbox:
            file = sandbox.scratch / f"{_MODULE}.lean"
            file.write_bytes(source.encode())
            done = await _lean(sandbox, environment, ["--json", file.name], _ASK_LIMITS)
        if done.exit.code not in (0, 1):
            raise SandboxError(f"Lean could not be asked for axioms: {done.exit}")
        return done.stdout.decode(errors="replace")

    # Sandboxes

    @contextlib.asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox]:
        environment = self._environment
        sandbox = self._idle.pop() if self._idle else await self._new_sandbox()
        try:
            yield sandbox
        finally:
            # What was opened for other files must not serve the changed environment.
            if sandbox.alive and environment is self._environment:
                sandbox.clear()
                self._idle.append(sandbox)
            else:
                await sandbox.close()

    async def _new_sandbox(self) -> Sandbox:
        return await Sandbox.open(
            readable=self._environment.readable(), hidden=self._hidden, nice=self._nice
        )

    async def _notice_changes(self) -> None:
        """Takes a new fingerprint when the environment's files have changed."""
        if time.monotonic() - self._looked_at_s < _CHECK_CHANGES_EVERY_S:
            return
        async with self._looking:
            if time.monotonic() - self._looked_at_s < _CHECK_CHANGES_EVERY_S:
                return
            if await asyncio.to_thread(self._environment.changed):
                self._environment = await asyncio.to_thread(self._open_environment)
                await self.close()
            self._looked_at_s = time.monotonic()


class _Check:
    """One candidate on its way: compiled, and read for the audit.

    ``module`` is what the audit looks at, and None where no audit is due.
    """

    def __init__(self, request: Request, environment: Environment) -> None:
        self.request = request
        self.environment = environment
        self.header = split_header(request.code)
        self.module: Module | None = None
        self.audit_s = 0.0
        self._limits = Limits(
            cpu_s=request.timeout_s,
            wall_s=request.wall_s,
            memory_bytes=request.memory_mb << 20,
        )

    async def compile(self, sandbox: Sandbox) -> Reply:
        """Lean's verdict; where it accepts, ``module`` is what the audit has to look at."""
        olean = sandbox.scratch / f"{_MODULE}.olean"
        done, printed = await self._lean(sandbox, self.request.code, self._limits)
        verdict, messages = _judged(done, printed, compiled=olean.is_file())
        reply = Reply(
            verdict=verdict,
            messages=messages,
            fingerprint=self.environment.fingerprint,
            cpu_s=done.exit.cpu_s,
        )
        if verdict != "accepted" or not (self.request.audit or self.request.replay):
            return reply
        started = time.monotonic()
        if self.request.replay:
            reply = await self._replay(sandbox, reply)
        if self.request.audit and reply.verdict == "accepted":
            reply = await self._read(sandbox, olean, reply)
        self.audit_s = time.monotonic() - started
        return replace(reply, audit_s=self.audit_s)

    async def _read(self, sandbox: Sandbox, olean: Path, reply: Reply) -> Reply:
        """Reads the compiled result, with every example under a name of ours."""
        salt = f"leanq_{secrets.token_hex(8)}"
        named = await asyncio.to_thread(name_examples, self.request.code, salt)
        if named is not None:
            sandbox.clear()
            # The same work once more must not fail for a budget that it only just kept.
            twice = replace(
                self._limits, cpu_s=2 * self._limits.cpu_s, wall_s=2 * self._limits.wall_s
            )
            done, printed = await self._lean(sandbox, named, twice, _NAMED_OPTIONS)
            if not olean.is_file():
                verdict, messages = _judged(done, printed, compiled=False)
                if verdict not in LEAN_VERDICTS:
                    return replace(reply, verdict=verdict, messages=messages)
                why = next(m.text for m in messages if m.severity == "error")
                return _unaudited(reply, AuditError(f"its examples, given names: {why}"))
        try:
            self.module = await asyncio.to_thread(read_module, olean)
        except AuditError as error:
            return _unaudited(reply, error)
        return reply

    async def _replay(self, sandbox: Sandbox, reply: Reply) -> Reply:
        """Lets the toolchain's own checker replay the result in the kernel."""
        command = self.environment.toolchain.replay_command
        assert command is not None
        variables = _variables(sandbox, self.environment)
        variables["LEAN_PATH"] = f"{sandbox.scratch}:{variables['LEAN_PATH']}"
        done = await sandbox.run(
            [*command, _MODULE], env=variables, cwd=sandbox.scratch, limits=self._limits
        )
        if done.exit.stopped:
            verdict, messages = _judged(done, Printed(b""), compiled=True)
            return replace(reply, verdict=verdict, messages=(*reply.messages, *messages))
        if done.exit.code == 0:
            return reply
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-2000:]
        return _rejected(reply, f"leanq: the kernel does not accept it when replayed\n{said}")

    async def _lean(
        self, sandbox: Sandbox, code: str, limits: Limits, options: Sequence[str] = ()
    ) -> tuple[Finished, Printed]:
        (sandbox.scratch / f"{_MODULE}.lean").write_bytes(code.encode())
        args = [*options, "--json", "-o", f"{_MODULE}.olean", f"{_MODULE}.lean"]
        done = await _lean(sandbox, self.environment, args, limits)
        if len(done.stdout) < _PRINTED_AT_ONCE_BYTES:
            return done, Printed(done.stdout)
        return done, await asyncio.to_thread(Printed, done.stdout)


async def _lean(
    sandbox: Sandbox, environment: Environment, args: Sequence[str], limits: Limits
) -> Finished:
    return await sandbox.run(
        [*environment.toolchain.command, *environment.options, *args],
        env=_variables(sandbox, environment),
        cwd=sandbox.scratch,
        limits=limits,
    )


def _variables(sandbox: Sandbox, environment: Environment) -> dict[str, str]:
    scratch = str(sandbox.scratch)
    return {**environment.process_env(), "HOME": scratch, "TMPDIR": scratch}


def _judged(
    done: Finished, printed: Printed, *, compiled: bool
) -> tuple[Verdict, tuple[Message, ...]]:
    verdict = judge(printed, done.exit, done.stderr, compiled=compiled)
    if verdict in ("crashed", "memory"):
        return verdict, (*printed.messages, last_words(done.exit, done.stderr))
    return verdict, printed.messages


def _after_audit(reply: Reply, findings: Findings) -> Reply:
    reply = replace(reply, axioms=findings.axioms)
    if findings.forbidden:
        names = ", ".join(findings.forbidden)
        return _rejected(reply, f"leanq: it declares or rests on axioms not allowed: {names}")
    if findings.incomplete:
        note = Message("warning", 1, 0, "leanq: it rests on sorryAx")
        return replace(reply, verdict="incomplete", messages=(*reply.messages, note))
    return reply


def _unaudited(reply: Reply, error: AuditError) -> Reply:
    """What cannot be audited is never accepted."""
    return _rejected(reply, f"leanq: the compiled result cannot be audited: {error}")


def _rejected(reply: Reply, text: str) -> Reply:
    note = Message("error", 1, 0, text)
    return replace(reply, verdict="rejected", messages=(*reply.messages, note))
