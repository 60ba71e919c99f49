"""Goals of the holes in a text, and tactics tried on them.

Lean reads the text with the tactics in the hole from the start (see :mod:`leanq.lean.goals.holes`),
and says what is left. A tactic that leaves nothing has closed this hole. The text is then compiled
and judged from the start, so that nothing made by a candidate's own code takes part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from leanq.lean.environment import Environment
from leanq.lean.goals.holes import (
    Claim,
    Draft,
    Given,
    draft_beside,
    draft_claims,
    draft_probe,
    draft_trial,
    find_holes,
    misfit,
    read_goals,
    read_tactic,
    reads_blocks,
)
from leanq.lean.goals.prefixes import Prefixes
from leanq.lean.goals.recipes import (
    MAX_LEVELS,
    Form,
    Hole,
    Recipe,
    Source,
    Tactic,
    read_recipe,
    record_after,
    record_id,
)
from leanq.lean.goals.targets import Targets, UncompiledError, named_as_in_source
from leanq.lean.judge.check import Auditor, Compilation, Target
from leanq.lean.outcome import is_budget, noted, reason_of
from leanq.lean.run.process import Lean, Run, Slot
from leanq.queue.requests import LEAN_VERDICTS, Message, Reply, Request, Sorry
from leanq.states import States

# The goals in the holes of a text, and the states of these goals.

_FLIPPED: Mapping[Form, Form] = {"term": "tactic", "tactic": "term"}
_MOST_PROBES = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """The holes of a text as Lean sees them, and the goals that it shows, by number."""

    holes: tuple[Hole, ...]
    goals: Mapping[int, str]


async def look(
    holes: tuple[Hole, ...],
    run: Callable[[Draft], Awaitable[Reply]],
    draft_with: Callable[[Mapping[int, Form]], Draft],
) -> Seen:
    """Has Lean show the goals of holes, and finds their forms by that. Those of no known form are
    left out unless they have a goal.

    ``run``: returns Lean's answer on a draft.
    """
    doubtful = {number for number, hole in enumerate(holes) if hole.form == "unknown"}
    forms, goals = await _look(
        {number: hole.form for number, hole in enumerate(holes) if number not in doubtful},
        run,
        draft_with,
        _FLIPPED,
    )
    if doubtful:
        found = await _look(dict.fromkeys(doubtful, "tactic"), run, draft_with, {})
        forms, goals = forms | found[0], goals | found[1]
    kept = [number for number in range(len(holes)) if number in goals or number not in doubtful]
    return Seen(
        tuple(Hole(holes[number].offset, forms.get(number, "unknown")) for number in kept),
        {place: goals[number] for place, number in enumerate(kept) if number in goals},
    )


async def _look(
    missing: dict[int, Form],
    run: Callable[[Draft], Awaitable[Reply]],
    draft_with: Callable[[Mapping[int, Form]], Draft],
    flipped: Mapping[Form, Form],
) -> tuple[dict[int, Form], dict[int, str]]:
    """Returns the forms and the goals of those holes, by their first guesses, of which Lean shows a
    goal.

    ``flipped``: the second guesses.
    """
    goals: dict[int, str] = {}
    forms: dict[int, Form] = {}
    for _ in range(_MOST_PROBES if missing else 0):
        draft = draft_with(missing)
        outcome = await run(draft)
        if outcome.verdict not in LEAN_VERDICTS:
            break
        messages = outcome.messages
        found = draft.goals(messages)
        goals |= found
        forms |= {number: missing.pop(number) for number in found}
        # After one misread block Lean may have stopped, so the others can be right.
        misread = [number for number in missing if draft.is_misread(number, messages)]
        missing |= {number: flipped.get(missing[number], "unknown") for number in misread}
        if not (found or misread):
            # The text may catch the errors of tactics, but not those of a term in one.
            caught = [number for number, form in missing.items() if form == "tactic"]
            if not caught:
                break
            missing |= dict.fromkeys(caught, "caught")
        missing = {number: form for number, form in missing.items() if form != "unknown"}
        if not missing:
            break
    return forms, goals


def sorry_at(line: int, column: int, goal: str | None, state: str | None) -> Sorry:
    """Returns the hole that begins here."""
    return Sorry(line, column, goal, state, end_line=line, end_column=column + len("sorry"))


def sorries_of(
    text: str,
    seen: Seen,
    opened: Mapping[int, tuple[str, bytes]],
    placed: Callable[[int, int], tuple[int, int]] = lambda line, column: (line, column),
) -> tuple[Sorry, ...]:
    """The holes of a text with their goals and states, and their places as ``placed``."""
    sorries: list[Sorry] = []
    line, counted = 1, 0
    for number, hole in enumerate(seen.holes):
        line += text.count("\n", counted, hole.offset)
        counted = hole.offset
        column = hole.offset - (text.rfind("\n", 0, hole.offset) + 1)
        state, _ = opened.get(number, (None, b""))
        sorries.append(sorry_at(*placed(line, column), seen.goals.get(number), state))
    return tuple(sorries)


async def keep_opened(code: str, seen: Seen, fingerprint: str, states: States) -> tuple[Sorry, ...]:
    """Returns the holes of a checked text, once the states of those with a goal are kept. Raises
    QueueFullError if there is no room to keep them."""
    record = Source(fingerprint, code, seen.holes).record()
    source = record_id(record)
    opened = {number: record_after(source, number) for number in seen.goals}
    await states.keep({source: record, **dict(opened.values())})
    return sorries_of(code, seen, opened)


# A tactic on a state before Lean runs, and Lean's answer about it.


@dataclass(frozen=True, slots=True)
class Move:
    """A tactic on a state: the state's recipe, and the tactic as given and as kept."""

    state: str
    recipe: Recipe
    given: Given
    tactic: Tactic

    @property
    def is_whole(self) -> bool:
        """True if the text has no other hole than the one for this tactic."""
        recipe = self.recipe
        opened = 1 + sum(tactic.opened is not None for tactic in recipe.tactics)
        holes = len(recipe.source.holes) + sum(len(tactic.holes) for tactic in recipe.tactics)
        return holes <= opened and not self.tactic.holes

    def opened(self, tactic: Tactic, numbers: Iterable[int]) -> dict[int, tuple[str, bytes]]:
        """Returns the states in the holes of the tactic with these numbers, and their records."""
        return {n: record_after(self.state, structs.replace(tactic, opened=n)) for n in numbers}

    def told(self, draft: Draft, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Returns the messages about the tactic, with places in it. An error elsewhere is its fault
        as well."""
        told = [self.given.message(draft.of_trial(m)) for m in messages if draft.is_trial(m)]
        elsewhere = [
            structs.replace(message, line=1, column=0, end_line=None, end_column=None)
            for message in messages
            if not draft.is_trial(message)
            and draft.level(message) is None
            and (message.severity == "error" or message.is_ours)
        ]
        if any(message.severity == "error" for message in told):
            elsewhere = [message for message in elsewhere if message.is_ours]
        return (*told, *elsewhere)

    def closed(self, draft: Draft, checked: Reply, *, is_whole: bool) -> Reply:
        """Returns the judgement as the reply to a tactic that left nothing to prove."""
        axioms = checked.axioms
        if not is_whole and checked.verdict == "accepted":
            # The other holes are open.
            axioms = tuple(sorted({"sorryAx", *(axioms or ())}))
        messages = self.told(draft, checked.messages)
        if checked.verdict == "incomplete" and not messages:
            why = "leanq: the proof, or what stands before it, rests on sorryAx"
            messages = (Message("warning", 1, 0, why),)
        return structs.replace(checked, messages=messages, axioms=axioms)


async def read_move(request: Request, states: States, environment: Environment) -> Move | Reply:
    """Reads the request for a step, or says why it makes no sense here."""
    records = await states.recall(request.state)
    if records is None:
        return Reply(error=f"the state {request.state} is not known here, or no longer")
    recipe = read_recipe(request.state, records)
    fingerprint = environment.fingerprint
    if recipe.source.fingerprint != fingerprint:
        return Reply(error=other_environment(recipe, environment))
    given, tactic, message = await asyncio.to_thread(_read, request.tactic)
    if message:
        return Reply("rejected", (message,), reason="lean_error", fingerprint=fingerprint)
    return Move(request.state, recipe, given, tactic)


def outcome_apart(draft: Draft, outcome: Reply) -> Reply:
    """Returns the verdict on a draft without the messages that goals are left."""
    counted = [message for message in outcome.messages if draft.level(message) is None]
    errors = [message for message in counted if message.severity == "error"]
    verdict = outcome.verdict
    if verdict in ("rejected", "exhausted") and not errors:
        verdict = "incomplete"
    elif verdict == "rejected" and all(is_budget(message) for message in errors):
        verdict = "exhausted"
    if verdict == outcome.verdict and verdict not in ("rejected", "exhausted"):
        return outcome
    return structs.replace(outcome, verdict=verdict, reason=reason_of(verdict, counted))


def left_open(reply: Reply) -> Reply:
    """Returns the reply to a tactic that worked and leaves goals."""
    return structs.replace(reply, verdict="incomplete", reason="goals_remain")


def other_environment(recipe: Recipe, environment: Environment) -> str:
    """Returns why a state makes no sense in an environment."""
    theirs, ours = recipe.source.fingerprint, environment.fingerprint
    return (
        f"the state is of an environment with the fingerprint {theirs[:12]}, and "
        f"{environment.name!r} has {ours[:12]} here; check its source again"
    )


def _read(text: str) -> tuple[Given, Tactic, Message | None]:
    """Returns a tactic, and why it could leave its hole, if it could."""
    given = read_tactic(text)
    return given, Tactic(given.text, find_holes(given.text, doubtful=True)), misfit(text)


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
