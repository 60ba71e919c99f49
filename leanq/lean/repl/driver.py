"""The repl driver: all operations in one environment, by the REPL as far as it can be trusted.

A process of the REPL says in milliseconds what Lean rejects, and what is left to prove. A text that
would be accepted gets a Lean of its own, which compiles and audits it as in the lean driver. So
does a request that the REPL could not answer: its process died, or its output was not one answer.
This request is first tried in a process that has seen no other candidate, if the first one had.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from msgspec.structs import replace

from leanq.errors import ReplError
from leanq.lean.diagnostics import Printed
from leanq.lean.environment import Environment
from leanq.lean.lean_driver import LeanDriver, Opened
from leanq.lean.process import limits_of
from leanq.lean.repl.program import find_repl
from leanq.lean.repl.session import Recycling, Session, TimedOutError, opened_at
from leanq.lean.repl.sessions import Sessions
from leanq.lean.repl.steps import LiveStep
from leanq.lean.steps.goals import keep_opened
from leanq.lean.steps.moves import read_move
from leanq.lean.syntax import Header, can_act, split_header
from leanq.queue.requests import (
    LEAN_VERDICTS,
    MAX_INFOTREE_BYTES,
    Reply,
    Request,
    without_infotree,
)
from leanq.states import States

log = logging.getLogger("leanq.worker")

_ODD_BLANK = re.compile(r"\t|\r(?!\n)")

_Work = Callable[[Session], Awaitable[Reply | None]]


@dataclass(frozen=True)
class _Kept(Opened):
    sessions: Sessions

    @property
    def environment(self) -> Environment:
        return self.lean.environment

    async def close(self) -> None:
        await self.sessions.close()
        await super().close()


@dataclass(eq=False)
class ReplDriver(LeanDriver):
    """All operations in one environment. ``command`` starts the REPL: see :func:`find_repl`.
    ``rules`` say when a process is replaced. With ``trust_steps`` a step rests on the REPL's word
    that a proof is complete, which is known to be wrong at times."""

    command: str
    _: KW_ONLY
    rules: Recycling
    trust_steps: bool = False

    gives_infotrees: ClassVar[bool] = True

    @property
    def about(self) -> Mapping[str, object]:
        return {**super().about, "driver": "repl"}

    async def open(self, states: States) -> None:
        await super().open(states)
        await self.kept.sessions.open()

    async def _check(self, request: Request) -> Reply:
        # One environment from here to the end, even if its files change meanwhile.
        kept, header = self.kept, split_header(request.code)

        async def work(session: Session) -> Reply | None:
            return await self._elaborated(kept, session, request, header)

        reply = await self._by_repl(kept, header, "", [request.code[header.end_offset :]], work)
        tree = None if reply is None else reply.infotree
        if reply is None or (reply.verdict == "accepted" and request.audit):
            reply = await super()._check(request)
        return _with_infotree(reply, tree) if request.infotree else reply

    async def _elaborated(
        self, kept: _Kept, session: Session, request: Request, header: Header
    ) -> Reply | None:
        """Returns the verdict on a text, and its states; None if Lean itself has to give it."""
        code, limits = request.code, limits_of(request)
        try:
            answer = await session.elaborate(code, header, limits, request.infotree)
        except TimedOutError as error:
            return error.reply
        reply = replace(session.whole(answer, header), infotree=answer.infotree)
        if reply.verdict != "incomplete":
            return reply
        # A text can silence the warning that it has holes.
        if answer.sorries and not Printed(answer.messages).sorry and request.audit:
            return None
        seen = await session.see(code, header, answer, limits)
        fingerprint = kept.environment.fingerprint
        reply = await self._with_sorries(
            reply, lambda: keep_opened(code, seen, fingerprint, self._states)
        )
        for number, opened in opened_at(seen.holes, code, answer.sorries).items():
            if reply.sorries and (state := reply.sorries[number].state):
                session.hold(state, opened)
        return reply

    async def _stepped(self, request: Request) -> Reply:
        kept = self.kept
        move = await read_move(request, self._states, kept.environment)
        if isinstance(move, Reply):
            return move
        source, tactics = move.recipe.source.code, [*move.recipe.tactics, move.tactic]
        header = split_header(source)
        texts = [source[header.end_offset :], *(tactic.text for tactic in tactics)]

        async def work(session: Session) -> Reply | None:
            was_live = move.state in session.states
            limits, trust = limits_of(request), self.trust_steps
            step = LiveStep(session, move, header, limits, trust=trust)
            try:
                reply = await step.run(request, self._states)
            except TimedOutError as error:
                reply = error.reply
            return reply and replace(reply, way="warm" if was_live else "replayed", warm=True)

        reply = await self._by_repl(kept, header, move.state, texts, work)
        return reply or await kept.step(move, request, self._states)

    async def _by_repl(
        self, kept: _Kept, header: Header, state: str, texts: Iterable[str], work: _Work
    ) -> Reply | None:
        """Returns the result of ``work`` in a process with this header, and perhaps this state, for
        which Lean elaborates these texts; None if no process can give one."""
        # Lean refuses some blanks, which are lost when headers are compared.
        if _ODD_BLANK.search(header.text):
            return None
        # A text that may act by itself has to be the last in its process, or later ones would see
        # its effects.
        acts = False
        for text in texts:
            acts = acts or can_act(text) or await kept.auditor.runs_programs(text) is not None
        for pristine in (False, True):
            async with kept.sessions.take(header, state, pristine=pristine) as session:
                session.spoiled = session.spoiled or acts
                was_pristine = not session.requests
                try:
                    if not await session.load(header):
                        break
                    before_s = session.cpu_s
                    reply = await work(session)
                except ReplError as error:
                    log.info("%s", error)
                    session.spoiled = True
                    if was_pristine:
                        break
                    continue
            cpu_s, fingerprint = session.cpu_s - before_s, kept.environment.fingerprint
            return reply and replace(reply, cpu_s=cpu_s, fingerprint=fingerprint)
        return None

    def _open(self, environment: Environment) -> Opened:
        program = find_repl(self.command, environment, os.environ)
        sessions = Sessions(
            environment, program, self.slots, self.rules, hidden=self.hidden, nice=self.nice
        )
        return _Kept(**vars(super()._open(environment)), sessions=sessions)

    @property
    def kept(self) -> _Kept:
        assert isinstance(self.opened, _Kept)
        return self.opened


def _with_infotree(reply: Reply, tree: bytes | None) -> Reply:
    """Adds the REPL's infotree to the reply of a request that asked for one."""
    if reply.verdict not in LEAN_VERDICTS | {"unjudged"}:
        return replace(reply, infotree=None)
    if tree is None:
        return without_infotree(reply, "no process of the REPL has elaborated the text")
    if len(tree) > MAX_INFOTREE_BYTES:
        why = f"it has {len(tree)} bytes, and a reply may have {MAX_INFOTREE_BYTES} of it"
        return without_infotree(reply, f"{why}; ask for fewer nodes, or a shorter text")
    return replace(reply, infotree=tree)
