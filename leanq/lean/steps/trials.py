"""Goals and steps: what is left to prove in the holes of a text, and the effect of a tactic.

Lean reads the text with the tactics in the hole from the start (see :mod:`leanq.lean.steps.holes`),
and says what is left. A tactic that leaves nothing has closed this hole. The text is then compiled
and judged from the start, so that nothing made by a candidate's own code takes part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from leanq.lean.check import Auditor, Compilation, Target
from leanq.lean.diagnostics import noted
from leanq.lean.prefixes import Prefixes
from leanq.lean.process import Lean, Run, Slot
from leanq.lean.recipes import MAX_LEVELS, Tactic, record_after
from leanq.lean.steps.goals import Seen, keep_opened, look, sorries_of
from leanq.lean.steps.holes import (
    Claim,
    Draft,
    draft_beside,
    draft_claims,
    draft_probe,
    draft_trial,
    find_holes,
    read_goals,
    reads_blocks,
)
from leanq.lean.steps.moves import Move, left_open, outcome_apart
from leanq.lean.targets import Targets, UncompiledError, named_as_in_source
from leanq.queue.requests import Reply, Request, Sorry
from leanq.states import States


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
        holes = await asyncio.to_thread(find_holes, code, doubtful=True)
        if not holes:
            return ()
        async with self.lean.slot() as slot:

            async def run(draft: Draft) -> Reply:
                done = await self.prefixes.run(slot, code, draft.text, request, states)
                return done.outcome

            seen = await look(holes, run, lambda forms: draft_probe(code, holes, forms))
        return await keep_opened(code, seen, self.lean.environment.fingerprint, states)

    async def step(
        self, move: Move, request: Request, states: States, *, trusts: bool = False
    ) -> Reply:
        """Tries the tactic of a request on a state. With ``trusts``, Lean's word that it leaves
        nothing stands unjudged. Raises QueueFullError if there is no room to keep the next
        state."""
        reply = await _Step(self, move, request, states, trusts).run()
        warm = self.prefixes.holds(move.recipe.snapshot_key)
        return structs.replace(reply, fingerprint=self.lean.environment.fingerprint, warm=warm)


@dataclass(frozen=True)
class _Step:
    """One tactic on one state."""

    trials: Trials
    move: Move
    request: Request
    states: States
    trusts: bool

    async def run(self) -> Reply:
        move = self.move
        draft = draft_trial(move.recipe, move.tactic)
        async with self.trials.lean.slot() as slot:
            run = await self._try(slot, draft)
            outcome = outcome_apart(draft, run.outcome)
            left = [m for m in outcome.messages if draft.is_left(m)]
            level = draft.level_around(outcome.messages)
            messages = move.told(draft, outcome.messages)
            reply = structs.replace(outcome, messages=messages, way=run.way)
            if outcome.verdict not in ("accepted", "incomplete"):
                return reply
            goals = tuple(goal for message in left for goal in read_goals(message))
            seen = await self._look(slot)
            if goals or seen.holes:
                return await self._go_on(left_open(reply), goals, seen)
        if self.move.tactic.holes:
            # It only has names that look like holes.
            move = replace(self.move, tactic=Tactic(self.move.tactic.text))
            return await replace(self, move=move)._end(reply, level)
        return await self._end(reply, level)

    async def _end(self, reply: Reply, level: int) -> Reply:
        """Nothing is left in the hole."""
        if self.trusts:
            text = "Lean says that nothing is left, and no judge has looked at it (--trust-steps)"
            return noted(reply, text, verdict="unjudged", reason="trusted_step")
        return await self._close(reply, level)

    async def _try(self, slot: Slot, draft: Draft) -> Run:
        code, prefixes = self.move.recipe.source.code, self.trials.prefixes
        return await prefixes.run(slot, code, draft.text, self.request, self.states)

    async def _look(self, slot: Slot) -> Seen:
        """Returns the tactic's own holes."""
        move, tactic = self.move, self.move.tactic
        if not tactic.holes:
            return Seen((), {})

        async def run(draft: Draft) -> Reply:
            return (await self._try(slot, draft)).outcome

        return await look(
            tactic.holes, run, lambda forms: draft_trial(move.recipe, tactic, probes=forms)
        )

    async def _go_on(self, reply: Reply, goals: tuple[str, ...], seen: Seen) -> Reply:
        """Returns the next state: the goals that are left, else the first hole of the tactic
        itself."""
        move, tactic = self.move, Tactic(self.move.tactic.text, seen.holes)
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

    async def _level_left(self) -> int:
        """Returns the innermost block around the hole in which a step has left goals, and told so;
        -1 if there is none. What Lean says of a block now, a tactic may have put there."""
        recipe = self.move.recipe
        opening = [place for place, each in enumerate(recipe.tactics) if each.opened is not None]
        for level, place in reversed([*enumerate(opening)]):
            before = structs.replace(recipe, tactics=recipe.tactics[:place])
            draft = draft_trial(before, recipe.tactics[place])
            async with self.trials.lean.slot() as slot:
                run = await self._try(slot, draft)
            if any(map(draft.is_left, run.outcome.messages)):
                return level
        return -1

    async def _close(self, reply: Reply, level: int) -> Reply:
        """Nothing is left in the hole. Verifies the whole text against its source, or else what the
        hole holds against what it stated when it was opened.

        Args:
            level: of the innermost block with goals left; -1 if there is none.
        """
        started = time.monotonic()
        move, source = self.move, self.move.recipe.source.code
        is_whole = move.is_whole and level < 0
        # Lean says less of a text with goals left.
        is_right = level < 0
        if level >= 0:
            level = await self._level_left()
        draft, cpu_s = draft_trial(move.recipe, move.tactic), reply.cpu_s
        if is_whole:
            checked, _ = await self._judged(draft, [Claim("", None)])
        else:
            if (symbol := reads_blocks(source)) is not None and not self.request.trust_programs:
                return _unverified(reply, symbol)
            unmarked = draft.text
            draft, claims = draft_claims(move.recipe, move.tactic, level)
            try:
                checked, fills_value = await self._judged(draft, claims, unmarked)
                if checked.verdict == "accepted" and fills_value:
                    # No proof tells values apart, but what is beside this one may.
                    cpu_s += checked.cpu_s
                    seen, claim = draft_beside(move.recipe, move.tactic, claims[-1])
                    beside, _ = await self._judged(seen, [claim])
                    if beside.verdict != "accepted":
                        draft, checked = seen, beside
            except UncompiledError as error:
                return _unmarked(reply, error.why)
            if checked.reason == "lean_error" and is_right:
                errors = (m.text for m in checked.messages if m.severity == "error")
                return _unmarked(reply, next(errors))
        return structs.replace(
            move.closed(draft, checked, is_whole=is_whole),
            cpu_s=cpu_s + checked.cpu_s,
            audit_s=time.monotonic() - started,
            way=reply.way,
        )

    async def _judged(
        self, draft: Draft, claims: Sequence[Claim], unmarked: str = ""
    ) -> tuple[Reply, bool]:
        """Compiles a draft, and judges it by each claim; returns whether what fills a hole is a
        value, too. Raises UncompiledError if a claim's other text does not compile.

        ``unmarked``: the draft's text without markers.
        """
        trials, source = self.trials, self.move.recipe.source.code
        targets = list[Target]()
        for claim in claims:
            target, salt = await trials.targets.of_source(
                source, draft.text, self.request, claim.opened, claim.marks
            )
            targets.append(target)
        text, options = await asyncio.to_thread(named_as_in_source, draft.text, source, salt)
        compilation = Compilation(
            trials.lean, self.request, text, target=targets[0], options=options, unmarked=unmarked
        )
        async with trials.lean.slot() as slot:
            checked = await compilation.compile(slot)
        axioms = set[str]()
        for target in targets:
            compilation.target = target
            checked = await compilation.judge(trials.auditor, checked)
            axioms |= {*(checked.axioms or ())}
        known = None if checked.axioms is None else (*sorted(axioms),)
        checked = structs.replace(checked, theorems=(), axioms=known)
        return checked, compilation.fills_value


def _unmarked(reply: Reply, why: str) -> Reply:
    text = (
        "nothing is left to prove here, but the text does not compile with a marker around each "
        "hole, so this one cannot be judged beside others; write what closes these into the text "
        f"first, and check the text again. Lean says: {why}"
    )
    return noted(reply, text, "error", verdict="rejected", reason="hole_open")


def _unverified(reply: Reply, symbol: str) -> Reply:
    text = (
        f"nothing is left to prove here, but a notation with {symbol!r} could read a tactic "
        "otherwise than an open hole, so leanq cannot vouch for it; verify the text with the "
        "tactics against its source"
    )
    return noted(reply, text, verdict="unverified", reason="runs_programs")
