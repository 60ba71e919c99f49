"""A tactic on a state that a process of the REPL holds, or gets by replaying its recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from msgspec.structs import replace

from leanq.lean.diagnostics import Printed, classify_printed, is_budget, reason_of
from leanq.lean.recipes import MAX_LEVELS, Tactic, record_after
from leanq.lean.repl.protocol import OpenGoal, Refused, Stepped
from leanq.lean.repl.session import Session, TimedOutError, opened_at, outcome_of
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.steps.goals import sorry_at
from leanq.lean.steps.holes import Draft, are_plain, draft_trial
from leanq.lean.steps.moves import Move, left_open, outcome_apart
from leanq.lean.syntax import Header, place_of, tokens
from leanq.queue.requests import Message, Reply, Request, Sorry, Verdict
from leanq.states import States

_UNREAD = re.compile(r"<input>:(\d+):(\d+): ")
_SEVERAL = re.compile(r"[\n;]")
_LACKING = re.compile(r"instance|synthesize|universe")


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One tactic on one state; ``trust``: the REPL's word that a proof is complete is enough."""

    session: Session
    move: Move
    header: Header
    limits: Limits
    trust: bool

    async def run(self, request: Request, states: States) -> Reply | None:
        """Returns the reply; None if Lean itself has to give it. Raises ReplError if the process
        has to be replaced, and QueueFullError if there is no room to keep the next state."""
        try:
            live = await self._revive()
        except TimedOutError:
            return None
        if live is None:
            return None
        answer, lines_before = await self._try(self.move.tactic.text, live)
        if isinstance(answer, Refused):
            return await self._refused(self._failed(answer, lines_before))
        reply = self._told(answer)
        if reply.verdict != "accepted":
            return await self._refused(reply)
        move = self.move
        if answer.goals or move.tactic.holes:
            return await self._go_on(left_open(reply), answer, states)
        if self.trust and answer.is_completed:
            return replace(reply, verdict="unjudged", reason="trusted_step")
        # Only Lean itself audits, and can tell what is left open elsewhere.
        if request.audit or not move.is_whole:
            return None
        draft = draft_trial(move.recipe, move.tactic)
        return move.closed(draft, await self._whole(draft))

    async def _revive(self) -> int | None:
        """Returns the state's number in the process, replayed from the live part of its recipe;
        None if it leads there no more."""
        session, recipe = self.session, self.move.recipe
        chain = [state for state, _ in recipe.records()]
        depth = max((n for n, state in enumerate(chain) if state in session.states), default=0)
        if depth == 0:
            if (found := await self._open_source()) is None:
                return None
            depth = 1
            session.states[chain[1]] = found
        for tactic, state in zip(recipe.tactics[depth - 1 :], chain[depth + 1 :], strict=True):
            if (live := session.states.get(chain[depth])) is None:
                return None
            answer, _ = await self._try(tactic.text, live)
            if (after := _after(answer, tactic)) is None:
                return None
            session.hold(state, after)
            depth += 1
        return session.states.get(chain[depth])

    async def _open_source(self) -> int | None:
        """Returns the number of the goal in the source's open hole, by elaborating the source."""
        session, recipe = self.session, self.move.recipe
        source = recipe.source
        read = await session.elaborate(source.code, self.header, self.limits)
        if outcome_of(read).verdict != "incomplete":
            return None
        met = opened_at(source.holes, source.code, read.sorries).get(recipe.opened)
        return met.proof_state if met else None

    async def _try(self, tactic: str, proof_state: int) -> tuple[Stepped | Refused, int]:
        """Returns the answer to a tactic, and how many lines stood before it. The REPL reads one
        tactic, and would take the next line for its arguments. So several stand in a bracket."""
        if not _SEVERAL.search(tactic):
            return await self.session.run_tactic(tactic, proof_state, self.limits), 0
        return await self.session.run_tactic(f"(\n{tactic}\n)", proof_state, self.limits), 1

    async def _refused(self, reply: Reply) -> Reply | None:
        """Returns the reply to a failed tactic, once it is sure that it fails in the source as
        well. A proof state lacks its command's own scope (``open … in``), names of universes, and
        in older versions instances from the context. It also counts its budget otherwise."""
        move, said = self.move, " ".join(message.text for message in reply.messages)
        body = move.recipe.source.code[self.header.end_offset :]
        doubtful = reply.verdict == "exhausted" or _LACKING.search(said)
        if not (doubtful or any(token.text == "in" for token in tokens(body))):
            return reply
        draft = draft_trial(move.recipe, move.tactic)
        whole = await self._whole(draft)
        outcome = outcome_apart(draft, whole)
        if outcome.verdict in ("rejected", "exhausted"):
            return replace(outcome, messages=move.told(draft, whole.messages))
        return None

    async def _whole(self, draft: Draft) -> Reply:
        answer = await self.session.elaborate(draft.text, self.header, self.limits)
        return self.session.whole(answer, self.header)

    def _failed(self, answer: Refused, lines_before: int) -> Reply:
        text, line, column = answer.reason, 1, 0
        if place := _UNREAD.match(text):
            text = text[place.end() :]
            line, column = max(1, int(place[1]) - lines_before), int(place[2])
        message = self.move.given.message(Message("error", line, column, text))
        verdict: Verdict = "exhausted" if is_budget(message) else "rejected"
        return Reply(verdict, (message,), reason=reason_of(verdict, [message]))

    def _told(self, answer: Stepped) -> Reply:
        """Returns Lean's messages about a tactic, except about what it leaves open."""
        printed = Printed(answer.messages)
        reply = classify_printed(printed)
        if reply.verdict == "incomplete":
            reply = replace(reply, verdict="accepted", reason=None)
        # The REPL does not know where in a tactic anything happened.
        messages = [Message(each.severity, 1, 0, each.text) for each in printed.messages]
        messages += [Message("information", 1, 0, text) for text in answer.traces]
        return replace(reply, messages=tuple(map(self.move.given.message, messages)))

    async def _go_on(self, reply: Reply, answer: Stepped, states: States) -> Reply | None:
        """Returns the next state: the goals that are left, else the hole of the tactic itself."""
        move, tactic, session = self.move, self.move.tactic, self.session
        sorries: tuple[Sorry, ...] = ()
        goals = answer.goals
        records: dict[str, bytes] = {}
        held: dict[str, OpenGoal] = {}
        if tactic.holes:
            # Of several holes, the REPL does not tell which is which.
            if not _has_one(answer, tactic) or not are_plain(tactic.text, tactic.holes):
                return None
            (met,) = answer.sorries
            state = None
            if move.recipe.levels < MAX_LEVELS:
                state, record = move.opened(tactic, [0])[0]
                records[state], held[state] = record, met
            line, column = place_of(tactic.text, tactic.holes[0].offset)
            sorries = (sorry_at(*move.given.place(line, column), met.goal, state),)
            if not goals:
                reply, goals = replace(reply, state=state), (met.goal,)
        if answer.goals:
            state, record = record_after(move.state, tactic)
            records[state] = record
            held[state] = OpenGoal(answer.proof_state, "", None)
            reply = replace(reply, state=state)
        await states.keep(records)
        for state, opened in held.items():
            session.hold(state, opened)
        return replace(reply, goals=goals, sorries=sorries)


def _after(answer: Stepped | Refused, tactic: Tactic) -> OpenGoal | None:
    """Replays a tactic of a recipe; returns its state, if it is the same as before."""
    if not isinstance(answer, Stepped) or Printed(answer.messages).failed:
        return None
    if tactic.opened is None:
        return OpenGoal(answer.proof_state, "", None) if answer.goals else None
    return answer.sorries[0] if _has_one(answer, tactic) else None


def _has_one(answer: Stepped, tactic: Tactic) -> bool:
    return len(tactic.holes) == 1 == len(answer.sorries)
