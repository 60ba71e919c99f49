"""A check: compiles a text, and judges it if Lean would accept it.

The candidate's process only makes claims. If it claims success, the compiled file is read once. A
judge that never ran the candidate derives from these bytes what counts: see
:mod:`leanq.lean.judge.judge`. A process that never sees the candidate asks Lean about the imported
constants behind the file: see :mod:`leanq.lean.judge.declarations`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from cachetools import LRUCache
from msgspec.structs import replace

from leanq.errors import AuditError
from leanq.fleet.shown import some_of
from leanq.lean.environment import STANDARD_AXIOMS
from leanq.lean.judge.closing import Marks
from leanq.lean.judge.declarations import Ended, ImportedAxioms, audit
from leanq.lean.judge.examples import (
    Examples,
    examples_in,
    may_have_examples,
    may_name_sorry,
    names_sorry,
    writes_sorry,
)
from leanq.lean.judge.judge_client import JudgeLimitError, Judgement, Judges, Parts
from leanq.lean.outcome import noted
from leanq.lean.run.evaluators import evaluators
from leanq.lean.run.library_syntax import Evaluators
from leanq.lean.run.olean import read_bytes, read_parts
from leanq.lean.run.process import Evaluated, Lean, Run, Slot, limits_of, olean
from leanq.lean.run.programs import acts_outside, runs_programs
from leanq.lean.text import Header, place_of, split_header, tokens
from leanq.queue.metrics import count
from leanq.queue.requests import LEAN_VERDICTS, Failure, Reason, Reply, Request, Theorem
from leanq.queue.tasks import run_apart

# An example that is compiled under a name is no less right for being a definition.
NAMED_OPTIONS = ("-Dweak.linter.defProp=false", "-Dweak.warn.classDefReducibility=false")
# Lean's notes about a text, its examples among them.
_NOTES = "notes.ilean"
_MOST_NOTES_BYTES = 64 << 20
_HEADERS_REMEMBERED = 256
_MOST_LOGGED = 500
_MOST_SHOWN = 80
# What Lean puts around the name of a declaration that it makes up or hides.
_MADE_UP = re.compile(r"^_private\..*?\.0\.|\._@\..*")
_AT_ONCE_CHARS, _AT_ONCE_BYTES = 1000, 1 << 18

log = logging.getLogger("leanq.worker")


class Auditor:
    """Judges and audits in one environment, and remembers the axioms behind its imports."""

    def __init__(self, lean: Lean, judges: Judges) -> None:
        self.judges = judges
        self._lean = lean
        self._known: LRUCache[tuple[str, ...], ImportedAxioms] = LRUCache(_HEADERS_REMEMBERED)
        self._has_evaluators = False

    async def runs_programs(self, code: str) -> str | None:
        """Returns the part of a text that lets it run programs of its own in this environment, by
        its words."""
        return await self._told_by_words(runs_programs, code)

    async def ran_programs(
        self, code: str, runs: Sequence[Evaluated | None], places: Sequence[tuple[int, int] | None]
    ) -> str | None:
        """Returns what shows that a text ran programs of its own, or could have where nobody has
        watched one of its runs.

        Args:
            runs: what Lean evaluated in each run; None if nobody watched.
            places: where the text declares each of :func:`_ran`, by its compiled file.
        """
        at = dict(zip(_ran(runs), places, strict=False))
        seen = [each for each in runs if each is not None]
        free = next((each.free for each in seen if each.free), "")
        ran = free or next((each.first for each in seen if each.first), "")
        is_clear = len(seen) == len(runs) and not ran
        word = None
        if not free or at.get(free) is None:
            judging = partial(runs_programs, is_watched=len(seen) == len(runs) and not free)
            word = await self._told_by_words(acts_outside if is_clear else judging, code)
        said = f"it ran `{_MADE_UP.sub('', ran)}`{_shown(code, at.get(ran))}" if ran else ""
        if word is None:
            return f"{said} while it was compiled" if free else None
        where = _shown(code, _place_of_word(code, word))
        return (
            f"{word!r}{where} lets it run programs while it is compiled{said and f', and {said}'}"
        )

    async def _told_by_words(
        self, rule: Callable[[str, Evaluators], str | None], code: str
    ) -> str | None:
        def look() -> str | None:
            return rule(code, evaluators(self._lean.environment))

        at_once = self._has_evaluators and len(code) < _AT_ONCE_CHARS
        found = await run_apart(look, at_once=at_once)
        self._has_evaluators = True
        return found

    def imported(self, header: Header) -> ImportedAxioms:
        key = (str(header.is_prelude), *header.imports)
        if key not in self._known:
            find_olean, read = self._lean.environment.find_olean, self.judges.axioms
            self._known[key] = ImportedAxioms(header, self._lean.ask, find_olean, read)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class Target:
    """A target that a candidate has to prove, compiled on its own.

    Attributes:
        ending: the name of the declaration behind its text.
        theorems: the theorems to prove; none means all that the text declares.
        holes: definitions whose values the candidate may choose; None for all that are a sorry.
        is_whole: whether the candidate has to have all that the target declares, beside the
            theorems.
        marks: the markers around holes, if the candidate has to fill one of several; see
            `leanq.lean.judge.closing.Marks`.
        examples: the names of ours for the examples of both.
    """

    file: Parts
    ending: Sequence[str]
    theorems: Sequence[Sequence[str | int]] = ()
    holes: Sequence[str] | None = ()
    is_whole: bool = False
    marks: Marks | None = None
    examples: Sequence[str] = ()

    def order(self) -> dict[str, Any]:
        names = ("theorems", "holes", "is_whole", "examples")
        order = {name: getattr(self, name) for name in names} | {"target_ending": self.ending}
        if self.marks is None:
            return order | {"op": "verify", "unfilled": ""}
        marks = self.marks._asdict()
        return order | {"op": "close", "unfilled": self.marks.unfilled, "marks": marks}


async def check(
    lean: Lean,
    auditor: Auditor,
    request: Request,
    code: str,
    *,
    target: Target | None = None,
    options: Sequence[str] = (),
) -> Reply:
    """Returns the verdict on a text, and on how it proves a target, by the request's rules."""
    compilation = Compilation(lean, request, code, target=target, options=options)
    async with lean.slot() as slot:
        reply = await compilation.compile(slot)
    return await compilation.judge(auditor, reply)


@dataclass(eq=False)
class Compilation:
    """One candidate: compiles it, and judges it if that is due.

    ``unmarked``: what it is without the target's marks.

    Attributes:
        fills_value: whether a judge has seen that what fills a hole is more than a proof.
    """

    lean: Lean
    request: Request
    code: InitVar[str]
    target: Target | None = None
    options: Sequence[str] = ()
    unmarked: str = ""
    fills_value: bool = False
    _file: Parts | None = None
    _named: Parts | None = None
    _examples: Examples | None = None
    _example_names: tuple[str, ...] = ()
    _names_sorry: bool = False
    _evaluated: list[Evaluated | None] = field(default_factory=list)

    def __post_init__(self, code: str) -> None:
        self._header, self._ended = split_header(code), Ended.of(code)
        is_noted = may_have_examples(code) or may_name_sorry(code)
        is_noted = is_noted and self.target is None and self.request.audit
        self._notes = ("-i", _NOTES) if is_noted else ()

    @property
    def _vouches(self) -> bool:
        """Whether the verdict holds for the text as it is read: a program of its own could put
        another file in the place of this one, or state other things around other tactics."""
        return self.target is None or bool(self.unmarked)

    @property
    def _written(self) -> str:
        return self.unmarked or self._ended.code

    async def compile(self, slot: Slot) -> Reply:
        """Returns Lean's verdict, which stands unless it is ``accepted``."""
        if not self.request.audit:
            return await self._run(slot, self._ended.code)
        ended = self._ended
        reply, was_read = await self._run(slot, ended.text), True
        if reply.verdict == "rejected" and ended.is_involved(reply.messages):
            # Lean's errors have to be about the text as it is.
            reply, was_read = await self._run(slot, ended.code), False
        reply = replace(reply, messages=ended.own(reply.messages))
        if reply.verdict == "incomplete" and self.target is not None and self.target.marks:
            # Other holes are open, and the judge tells whether this one is.
            reply = replace(reply, verdict="accepted", reason=None)
        if reply.verdict != "accepted":
            return reply
        if not was_read:
            return _unread(reply)
        started = time.monotonic()
        reply = await self._read(slot, reply)
        return replace(reply, audit_s=time.monotonic() - started)

    async def _run(self, slot: Slot, text: str) -> Reply:
        options, fingerprint = (*self.options, *self._notes), self.lean.environment.fingerprint
        limits, tenant = limits_of(self.request), self.request.tenant
        run = await self.lean.run(slot, text, limits, options=options, tenant=tenant)
        outcome = run.outcome
        if outcome.verdict == "accepted" and run.evaluated is None and await self._is_doubted():
            watched = await self.lean.watch(slot, text, limits, options=options)
            if watched is not None:
                run = watched
                outcome = replace(run.outcome, cpu_s=run.outcome.cpu_s + outcome.cpu_s)
        self._evaluated = [run.evaluated]
        return replace(outcome, fingerprint=fingerprint, spent=run.spent)

    async def _is_doubted(self) -> bool:
        """Returns whether a text's words alone would refuse it."""
        if not self._vouches or self.request.trust_programs or not self.request.audit:
            return False

        def look() -> bool:
            return runs_programs(self._written, evaluators(self.lean.environment)) is not None

        return await asyncio.to_thread(look)

    async def judge(self, auditor: Auditor, reply: Reply) -> Reply:
        """Returns the final verdict on the result of :meth:`compile`."""
        if self._file is None or reply.verdict != "accepted":
            return reply
        started = time.monotonic()
        judgement = await self._judgement(auditor.judges, self._file)
        self.fills_value |= judgement.fills_value
        reply = replace(reply, cpu_s=reply.cpu_s + judgement.cpu_s, kernel=judgement.kernel)
        reply = await self._after_judge(auditor, reply, judgement)
        return replace(reply, audit_s=reply.audit_s + time.monotonic() - started)

    async def _judgement(self, judges: Judges, file: Parts) -> Judgement:
        files = [file]
        order: dict[str, Any] = {
            "op": "judge",
            "ending": self._ended.name,
            "tenant": self.request.tenant,
            "statements": self.request.statements,
            "ran": _ran(self._evaluated),
        }
        if self.target is not None:
            files = [self.target.file, file]
            order |= self.target.order() | {"allowed": self.request.allow_axioms}
        elif self._examples is not None and self._named is not None:
            files = [file, self._named]
            order |= {
                "notes": self._example_names,
                "names": self._examples.names,
                "places": self._examples.places,
                "op": "examples",
            }
        return await judges.ask(self._header, files, order, limits_of(self.request))

    async def _after_judge(self, auditor: Auditor, reply: Reply, found: Judgement) -> Reply:
        if found.limit:
            return _unjudged(reply, "judge_limit", f"the judge could not finish: {found.limit}")
        if found.rule:
            return _denied(reply, found)
        theorems = tuple(map(Theorem, found.theorems, found.statements))
        reply = replace(reply, theorems=theorems, more_theorems=found.more_theorems)
        if found.differences:
            return _differing(reply, tuple(Failure(*each) for each in found.differences))
        if not found.ended:
            return _unread(reply)
        try:
            findings = await audit(
                found.survey,
                allowed=self.request.allow_axioms,
                environment_allowed=STANDARD_AXIOMS,
                imported=auditor.imported(self._header),
            )
        except AuditError as error:
            return _unaudited(reply, error)
        except JudgeLimitError as error:
            return _unjudged(reply, "judge_limit", str(error))
        reply = replace(reply, axioms=findings.axioms)
        if findings.forbidden:
            text = f"it declares or rests on axioms not allowed: {some_of(findings.forbidden)}"
            if findings.leads:
                text += "; {} rests on {}".format(*findings.leads)
            return _rejected(reply, "forbidden_axiom", text)
        if findings.incomplete or self._names_sorry:
            text = "it rests on sorryAx"
            if not findings.incomplete:
                text = "it names sorryAx, so Lean may have dropped a declaration without an error"
            return noted(reply, text, verdict="incomplete", reason="sorry")
        if found.disagrees:
            return _disagreed(reply, found.disagrees)
        if not found.proved:
            text = f"it cannot be judged here: {found.unavailable}"
            return _unjudged(reply, "judge_unavailable", text)
        if self._vouches:
            # The marks' own lines stand before those that the judge tells.
            places = () if self.unmarked else found.ran_at
            why = await auditor.ran_programs(self._written, self._evaluated, places)
            if why is not None:
                return _programmed(reply, why, trusted=self.request.trust_programs)
        return reply

    async def _read(self, slot: Slot, reply: Reply) -> Reply:
        try:
            file = await _parts(olean(slot))
            if self._notes:
                notes = await asyncio.to_thread(read_bytes, slot.left / _NOTES, _MOST_NOTES_BYTES)
                code = self._ended.code
                self._names_sorry = may_name_sorry(code) and (
                    writes_sorry(code) or await asyncio.to_thread(names_sorry, notes, file)
                )
                reply = await self._read_examples(slot, reply, notes)
        except AuditError as error:
            return _unaudited(reply, error)
        self._file = file
        return reply

    async def _read_examples(self, slot: Slot, reply: Reply, notes: bytes) -> Reply:
        at_once = len(notes) < _AT_ONCE_BYTES
        self._example_names = await run_apart(examples_in, notes, at_once=at_once)

        def named() -> Examples:
            declared = evaluators(self.lean.environment).tokens
            return Examples.of(self._ended.text, secrets.token_hex(8), declared)

        examples = await asyncio.to_thread(named)
        if not examples.names and not self._example_names:
            return reply
        if examples.doubt:
            return _told_apart(reply, examples.doubt)
        # The same work once more must not fail for a budget that it only just kept.
        limits, options = limits_of(self.request, 2.0), (*self.options, *self._notes)
        run = await self.lean.run(slot, examples.text, limits, options=options)
        reply = replace(reply, cpu_s=reply.cpu_s + run.done.exit.cpu_s)
        if not run.compiled:
            return _unnamed(reply, run)
        self._evaluated.append(run.evaluated)
        self._examples, self._named = examples, await _parts(olean(slot))
        return reply


def _ran(runs: Sequence[Evaluated | None]) -> list[str]:
    """Returns the constants of a text's own that its runs have told."""
    told = (name for each in runs if each is not None for name in (each.first, each.free))
    return [*dict.fromkeys(name for name in told if name)]


def _place_of_word(code: str, word: str) -> tuple[int, int] | None:
    starts = (token.start for token in tokens(code) if code.startswith(word, token.start))
    offset = next(starts, -1)
    return None if offset < 0 else place_of(code, offset)


def _shown(code: str, place: tuple[int, int] | None) -> str:
    """Returns a place in a text, and its line."""
    lines = code.split("\n")
    if place is None or not 0 < place[0] <= len(lines):
        return ""
    line, column = place
    words = lines[line - 1].strip()
    cut = f"{words[:_MOST_SHOWN]}…" if len(words) > _MOST_SHOWN else words
    return f" (line {line}, column {column}: {cut})"


async def _parts(path: Path) -> Parts:
    """Returns the bytes of a file that Lean has written, in their parts; raises AuditError."""
    parts = (path, *(path.with_name(path.name + end) for end in (".server", ".private")))
    # No process is left that could write to them.
    size_bytes = sum(os.lstat(each).st_size for each in parts if os.path.lexists(each))
    return await run_apart(read_parts, path, at_once=size_bytes < _AT_ONCE_BYTES)


def _unnamed(reply: Reply, run: Run) -> Reply:
    """Returns the verdict on a text that does not compile with a name for an example."""
    outcome = run.outcome
    if outcome.verdict not in LEAN_VERDICTS:
        return replace(
            reply, verdict=outcome.verdict, reason=outcome.reason, messages=outcome.messages
        )
    why = next(m.text for m in outcome.messages if m.severity == "error")
    return _told_apart(reply, f"with a name for one, Lean says: {why}")


def _told_apart(reply: Reply, why: str) -> Reply:
    """Returns the verdict on a text whose examples cannot be judged by names for them."""
    text = (
        f"Lean accepts it, but its examples cannot be judged: {why}. State what they state "
        "as theorems, or verify it against a target"
    )
    return noted(reply, text, verdict="unverified", reason="statement_differs")


def _denied(reply: Reply, found: Judgement) -> Reply:
    """Returns the verdict by the rule that the judge names."""
    match found.rule:
        case "unknown_layout":
            text = f"the judge does not know this Lean's files: {found.text}"
            return _unjudged(reply, "judge_unavailable", text)
        case "not_started":
            # It has not looked at the file, so it does not say that this ends too early.
            text = f"it cannot be judged here: {found.unavailable}"
            return _unjudged(reply, "judge_unavailable", text)
        case "kernels_disagree":
            return _disagreed(reply, found.text)
        case "told_apart":
            return _told_apart(reply, found.text)
        case "kernel_refused" | "reserved_name" as reason:
            return _rejected(reply, reason, found.text)
    raise AssertionError(found.rule)


def _differing(reply: Reply, failed: tuple[Failure, ...]) -> Reply:
    """Returns the verdict on a text that is not what its target states."""
    reply, first = replace(reply, failed=failed), failed[0]
    if first.rule in ("hole_open", "hole_uses_hole", "hole_left_out"):
        return _rejected(reply, cast("Reason", first.rule), f"{first.name}: {first.text}")
    text = f"it is not what the target states: {first.name}: {first.rule}: {first.text}"
    return _rejected(reply, "statement_differs", text)


def _programmed(reply: Reply, why: str, *, trusted: bool) -> Reply:
    """Returns the verdict on a text that can replace its own result."""
    if trusted:
        return replace(reply, reason="runs_programs")
    text = (
        f"Lean accepts it, but {why}, so leanq cannot vouch for the result; verify it against a "
        "target, or vouch for it yourself (--trust-programs)"
    )
    return noted(reply, text, verdict="unverified", reason="runs_programs")


def _disagreed(reply: Reply, why: str) -> Reply:
    """Returns the verdict on a text that the environment's Lean takes, and the judge's does not."""
    count("leanq_kernels_disagree_total")
    log.warning("the kernels disagree on a text, an attack or a limit: %s", why[:_MOST_LOGGED])
    text = f"the kernel of Lean {reply.kernel} does not: {why}"
    return _unjudged(reply, "kernels_disagree", text)


def _unread(reply: Reply) -> Reply:
    text = "Lean has not read the text to its end, as after `#exit`; remove what stops it"
    return _rejected(reply, "not_read_to_end", text)


def _unaudited(reply: Reply, error: AuditError) -> Reply:
    """Returns the verdict on a text that cannot be audited, which is never accepted."""
    return _rejected(reply, "kernel_refused", f"the compiled result cannot be audited: {error}")


def _rejected(reply: Reply, reason: Reason, text: str) -> Reply:
    return noted(reply, text, "error", verdict="rejected", reason=reason)


def _unjudged(reply: Reply, reason: Reason, why: str) -> Reply:
    return noted(reply, f"Lean accepts it, and {why}", verdict="unjudged", reason=reason)
