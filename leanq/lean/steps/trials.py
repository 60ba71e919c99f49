"""Goals and steps: what is left to prove in the holes of a text, and the effect of a tactic.

Lean reads the text with the tactics in the hole from the start (see :mod:`leanq.lean.steps.holes`),
and says what is left. A tactic that leaves nothing has closed this hole. Then the whole text is
checked as any other, with its audit and from the start, so that nothing made by a candidate's own
code takes part.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from leanq.lean.check import Auditor, Compilation
from leanq.lean.diagnostics import noted
from leanq.lean.prefixes import Prefixes
from leanq.lean.process import Lean, Run, Slot, limits_of
from leanq.lean.recipes import MAX_LEVELS, Tactic, record_after
from leanq.lean.steps.goals import keep_opened, look, sorries_of
from leanq.lean.steps.holes import Draft, draft_probe, draft_trial, find_holes, read_goals
from leanq.lean.steps.moves import Move, left_open, outcome_apart
from leanq.lean.targets import Targets, named_as_in_source
from leanq.queue.requests import Reply, Request, Sorry
from leanq.states import States

_UNFILLED = "exact sorry"
# Lean prints all that a tactic sees, as it is. A text can set such options as well.
_OPTION = re.compile(r"\bpp\b")
_RAW = tuple(
    f"-Dweak.pp.{each}=true"
    for each in ("raw", "auxDecls", "implementationDetailHyps", "showLetValues")
)
# A goal can stand for what has closed it. Only `?_` is a new one.
_NAMED_GOAL = re.compile(r"\?(?!_(?:[\s,;:()\[\]{}⟨⟩]|\Z))")
# Lean hides what has closed a goal under variables, while that waits for another goal: it prints a
# goal that is applied to them. An argument stands behind a name or a bracket.
_HIDDEN = re.compile(r"(?:^|\(|[^\w)}'\"] |\[mdata [^?]*)\?[\w.]+ ", re.MULTILINE)


@dataclass(frozen=True)
class Trials:
    """Goals and steps in one environment."""

    lean: Lean
    auditor: Auditor
    prefixes: Prefixes
    targets: Targets

    async def sorries(self, request: Request, states: States) -> tuple[Sorry, ...]:
        """Returns every ``sorry`` of a checked text, with its goal and its state; without a goal it
        has no state either. Raises QueueFullError if there is no room to keep the states."""
        code = request.code
        holes = await asyncio.to_thread(find_holes, code)
        if not holes:
            return ()
        async with self.lean.slot() as slot:

            async def run(draft: Draft) -> Reply:
                done = await self.prefixes.run(slot, code, draft.text, request, states)
                return done.outcome

            seen = await look(holes, run, lambda forms: draft_probe(code, holes, forms))
        return await keep_opened(code, seen, self.lean.environment.fingerprint, states)

    async def step(self, move: Move, request: Request, states: States) -> Reply:
        """Tries the tactic of a request on a state. Raises QueueFullError if there is no room to
        keep the next state."""
        reply = await _Step(self, move, request, states).run()
        warm = self.prefixes.holds(move.recipe.snapshot_key)
        return structs.replace(reply, fingerprint=self.lean.environment.fingerprint, warm=warm)


@dataclass(frozen=True)
class _Step:
    """One tactic on one state."""

    trials: Trials
    move: Move
    request: Request
    states: States

    async def run(self) -> Reply:
        move = self.move
        draft = draft_trial(move.recipe, move.tactic)
        async with self.trials.lean.slot() as slot:
            run = await self._try(slot, draft)
            outcome = outcome_apart(draft, run.outcome)
            left = [m for m in outcome.messages if draft.is_left(m)]
            *outside, _ = draft.left_over(outcome.messages)
            messages = move.told(draft, outcome.messages)
            reply = structs.replace(outcome, messages=messages, way=run.way)
            if outcome.verdict not in ("accepted", "incomplete"):
                return reply
            goals = tuple(goal for message in left for goal in read_goals(message))
            if goals or move.tactic.holes:
                return await self._go_on(slot, left_open(reply), goals)
        return await self._close(reply, outside)

    async def _try(self, slot: Slot, draft: Draft) -> Run:
        code, prefixes = self.move.recipe.source.code, self.trials.prefixes
        return await prefixes.run(slot, code, draft.text, self.request, self.states)

    async def _go_on(self, slot: Slot, reply: Reply, goals: tuple[str, ...]) -> Reply:
        """Returns the next state: the goals that are left, else the first hole of the tactic
        itself."""
        move, tactic = self.move, self.move.tactic
        sorries: tuple[Sorry, ...] = ()
        if tactic.holes:

            async def run(draft: Draft) -> Reply:
                return (await self._try(slot, draft)).outcome

            seen = await look(
                tactic.holes, run, lambda forms: draft_trial(move.recipe, tactic, probes=forms)
            )
            tactic = Tactic(tactic.text, seen.holes)
            # Others would refuse a deeper one.
            numbers = seen.goals if move.recipe.levels < MAX_LEVELS else ()
            opened = await asyncio.to_thread(move.opened, tactic, numbers)
            await self.states.keep(dict(opened.values()))
            sorries = sorries_of(tactic.text, seen, opened, move.given.place)
        state: str | None
        if goals:
            state, record = record_after(move.state, tactic)
            await self.states.keep({state: record})
        else:
            first = next((sorry for sorry in sorries if sorry.state), Sorry(1, 0))
            state, goals = first.state, () if first.goal is None else (first.goal,)
        return structs.replace(reply, state=state, goals=goals, sorries=sorries)

    async def _program(self) -> str | None:
        """Returns the part of the source or of the tactics that runs programs, which could find the
        stand-in and prove by it."""
        recipe = self.move.recipe
        tactics = [tactic.text for tactic in (*recipe.tactics, self.move.tactic)]
        return await self.trials.auditor.runs_programs("\n".join([recipe.source.code, *tactics]))

    async def _without_tactic(self, stand_in: str) -> tuple[Draft, Draft]:
        """Drafts the text with the tactic's own hole open, and a stand-in for all others; and the
        same with a tactic that shows the hole's goals."""
        recipe, unfilled = self.move.recipe, Tactic(_UNFILLED)
        draft = draft_trial(recipe, unfilled)
        outside: Sequence[int] = ()
        if recipe.tactics:
            # The tactic may have closed all of these goals.
            async with self.trials.lean.slot() as slot:
                run = await self._try(slot, draft)
            *outside, others = draft.left_over(run.outcome.messages)
            unfilled = Tactic("\n;\n".join([_UNFILLED] * (1 + others)))
        opened = draft_trial(recipe, unfilled, stand_in=stand_in, outside=outside)
        return opened, draft_trial(recipe, Tactic("skip"), stand_in=stand_in, outside=outside)

    async def _unseen(self, draft: Draft, stand_in: str) -> list[str]:
        """Returns the ends of the names of those stand-ins that no tactic in the hole can see.

        Lean's view of the hole's goals is whole and has none of them, and the tactic names no goal.
        """
        move = self.move
        if _OPTION.search(draft.text) or _NAMED_GOAL.search(move.tactic.text):
            return []
        limits = limits_of(self.request)
        async with self.trials.lean.slot() as slot:
            run = await self.trials.lean.run(slot, draft.text, limits, options=_RAW, compile_=False)
        outcome = outcome_apart(draft, run.outcome)
        goals = "".join(m.text for m in outcome.messages if draft.is_left(m))
        if outcome.verdict != "incomplete" or not goals or _HIDDEN.search(goals):
            return []
        return [name.removeprefix(stand_in) for name in draft.stand_ins if name not in goals]

    async def _close(self, reply: Reply, outside: Sequence[int]) -> Reply:
        """Nothing is left. Verifies the whole text against its source, so that the tactics have
        changed nothing but the contents of the holes."""
        started = time.monotonic()
        move = self.move
        # No library search offers such a name, and no tactic can know it.
        others = not move.is_whole or any(outside)
        stand_in = f"_leanq_{secrets.token_hex(8)}_" if others else ""
        draft = draft_trial(move.recipe, move.tactic, stand_in=stand_in, outside=outside)
        allowed = (*self.request.allow_axioms, *draft.stand_ins)
        trusted = self.request.trust_programs or not stand_in
        word = None if trusted else await self._program()
        if word is not None:
            return _unverified(reply, word)
        request = structs.replace(self.request, allow_axioms=allowed)
        source = move.recipe.source.code
        stand_ins: tuple[str, ...] = ()
        shown: Draft | None = None
        stated = source
        if stand_in:
            stand_ins = (f"_leanq_{move.state[:16]}_", stand_in)
            opened, shown = await self._without_tactic(stand_ins[0])
            stated = opened.text
        target, salt = await self.trials.targets.of_source(source, draft.text, self.request, stated)
        target = replace(target, stand_ins=stand_ins)
        text, options = await asyncio.to_thread(named_as_in_source, draft.text, source, salt)

        compilation = Compilation(self.trials.lean, request, text, target=target, options=options)
        async with self.trials.lean.slot() as slot:
            compiled = await compilation.compile(slot)
        checked = await compilation.judge(self.trials.auditor, compiled)
        if shown and {failure.rule for failure in checked.failed} == {"hole_uses_hole"}:
            # Recursion moves variables, and what other holes are about can depend on the tactic.
            unseen = await self._unseen(shown, stand_ins[0])
            if unseen:
                target = replace(target, unseen=unseen)
                checked = await compilation.judge(self.trials.auditor, compiled, target)
        checked = structs.replace(checked, theorems=())
        return structs.replace(
            move.closed(draft, checked),
            cpu_s=reply.cpu_s + checked.cpu_s,
            audit_s=time.monotonic() - started,
            way=reply.way,
        )


def _unverified(reply: Reply, word: str) -> Reply:
    text = (
        f"nothing is left to prove here, but {word!r} lets the text run programs while "
        "other goals are open, so leanq cannot vouch for it"
    )
    return noted(reply, text, verdict="unverified", reason="runs_programs")
