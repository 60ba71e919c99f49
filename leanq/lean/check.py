"""A check: a text compiled, and audited where Lean would accept it.

The compiled result is read as data, and Lean is asked about the imported constants that it rests
on, in a process that never sees the candidate. See :mod:`leanq.lean.audit.audit`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from leanq.errors import AuditError
from leanq.lean.audit.audit import Findings, ImportedAxioms, audit
from leanq.lean.audit.olean import Module, read_module
from leanq.lean.diagnostics import Printed
from leanq.lean.process import MODULE, Lean, Run, limits_of, olean
from leanq.lean.sandbox.sandbox import Sandbox
from leanq.lean.snapshots.store import LocalSnapshot
from leanq.lean.syntax import Header, name_examples, split_header
from leanq.queue.requests import LEAN_VERDICTS, Message, Reply, Request

# An example that is compiled under a name is no less right for being a definition.
_NAMED_OPTIONS = ("-Dweak.linter.defProp=false", "-Dweak.warn.classDefReducibility=false")
_HEADERS_REMEMBERED = 256


class Auditor:
    """Audits in one environment, and remembers which axioms are behind what it imports."""

    def __init__(self, lean: Lean) -> None:
        self._lean = lean
        self._known: OrderedDict[tuple[str, ...], ImportedAxioms] = OrderedDict()

    async def findings(self, module: Module, header: Header, allowed: Sequence[str]) -> Findings:
        """What a compiled text rests on; raises AuditError."""
        environment = self._lean.environment
        return await audit(
            module,
            allowed=allowed,
            environment_allowed=environment.allowed_axioms,
            imported=self._imported(header),
        )

    def _imported(self, header: Header) -> ImportedAxioms:
        key = (str(header.is_prelude), *header.imports)
        known = self._known.get(key)
        if known is None:
            find_olean = self._lean.environment.find_olean
            known = self._known[key] = ImportedAxioms(header, self._lean.ask, find_olean)
            if len(self._known) > _HEADERS_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known


async def check(
    lean: Lean,
    auditor: Auditor,
    request: Request,
    code: str,
    *,
    load: LocalSnapshot | None = None,
) -> Reply:
    """Lean's verdict on ``code`` within the request's budgets, by its rules.

    ``load``: a snapshot of the text's header, which none but imports have made.
    """
    compilation = Compilation(lean, request, code, load)
    async with lean.sandbox() as sandbox:
        run = await lean.run(sandbox, code, limits_of(request), load=load)
        reply = await compilation.judge(sandbox, run)
    return await compilation.audit(auditor, reply)


class Compilation:
    """One candidate on its way: compiled, judged, and audited where that is due."""

    def __init__(
        self, lean: Lean, request: Request, code: str, load: LocalSnapshot | None = None
    ) -> None:
        self._header = split_header(code)
        self._module: Module | None = None
        self._lean = lean
        self._request = request
        self._code = code
        self._load = load

    async def judge(self, sandbox: Sandbox, run: Run) -> Reply:
        """Lean's verdict by a run that compiled the code in this sandbox."""
        request = self._request
        verdict, messages = run.judged()
        reply = Reply(
            verdict=verdict,
            messages=messages,
            fingerprint=self._lean.environment.fingerprint,
            cpu_s=run.done.exit.cpu_s,
        )
        if verdict != "accepted" or not (request.audit or request.replay):
            return reply
        started = time.monotonic()
        if request.replay:
            reply = await self._replay(sandbox, reply)
        if request.audit and reply.verdict == "accepted":
            reply = await self._read(sandbox, reply)
        return replace(reply, audit_s=time.monotonic() - started)

    async def audit(self, auditor: Auditor, reply: Reply) -> Reply:
        """The last word on what :meth:`judge` has said."""
        if self._module is None:
            return reply
        started = time.monotonic()
        try:
            allowed = self._request.allow_axioms
            found = await auditor.findings(self._module, self._header, allowed)
        except AuditError as error:
            return _unaudited(reply, error)
        spent_s = reply.audit_s + time.monotonic() - started
        return replace(_after_audit(reply, found), audit_s=spent_s)

    async def _read(self, sandbox: Sandbox, reply: Reply) -> Reply:
        """Reads the compiled result, with every example under a name of ours."""
        salt = f"leanq_{secrets.token_hex(8)}"
        named = await asyncio.to_thread(name_examples, self._code, salt)
        if named is not None:
            # The same work once more must not fail for a budget that it only just kept.
            run = await self._lean.run(
                sandbox,
                named,
                limits_of(self._request, 2.0),
                options=_NAMED_OPTIONS,
                load=self._load,
            )
            if not run.compiled:
                verdict, messages = run.judged()
                if verdict not in LEAN_VERDICTS:
                    return replace(reply, verdict=verdict, messages=messages)
                why = next(m.text for m in messages if m.severity == "error")
                return _unaudited(reply, AuditError(f"its examples, given names: {why}"))
        try:
            self._module = await asyncio.to_thread(read_module, olean(sandbox))
        except AuditError as error:
            return _unaudited(reply, error)
        return reply

    async def _replay(self, sandbox: Sandbox, reply: Reply) -> Reply:
        """Lets the toolchain's own checker replay the result in the kernel."""
        command = self._lean.environment.toolchain.replay_command
        assert command is not None
        variables = self._lean.variables(sandbox)
        variables["LEAN_PATH"] = f"{sandbox.scratch}:{variables['LEAN_PATH']}"
        done = await sandbox.run(
            [*command, MODULE],
            env=variables,
            cwd=sandbox.scratch,
            limits=limits_of(self._request),
        )
        if done.exit.stopped:
            verdict, messages = Run(done, Printed(b""), compiled=True).judged()
            return replace(reply, verdict=verdict, messages=(*reply.messages, *messages))
        if done.exit.code == 0:
            return reply
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-2000:]
        return _rejected(reply, f"leanq: the kernel does not accept it when replayed\n{said}")


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
