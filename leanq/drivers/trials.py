"""Goals and steps: what is left to prove in the holes of a text, and what a tactic makes of it.

Lean is given the text with the tactics in the hole (see :mod:`leanq.drivers.holes`), all from the
start, and says what is left. A tactic that leaves nothing has closed the proof as far as this
hole goes: then the whole text is checked as any other, audit and all, from the start: what a
candidate's own code has made has no part in it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..recipes import (
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
from ..sandbox import Sandbox
from ..states import States
from ..wire import LEAN_VERDICTS, Message, Reply, Request, Sorry, Verdict
from .check import Auditor, Compilation, check
from .holes import (
    Draft,
    Given,
    draft_probe,
    draft_trial,
    find_holes,
    misfit,
    read_goals,
    read_tactic,
)
from .messages import is_budget
from .prefixes import Prefixes
from .program import Lean, Run

_FLIPPED: Mapping[Form, Form] = {"term": "tactic", "tactic": "term"}
_MOST_PROBES = 4


@dataclass(frozen=True, slots=True)
class _Seen:
    """The holes of a text as Lean sees them, and the goals of those that it shows, by number."""

    holes: tuple[Hole, ...]
    goals: Mapping[int, str]


class Trials:
    """Goals and steps in one environment."""

    def __init__(self, lean: Lean, auditor: Auditor, prefixes: Prefixes) -> None:
        self._lean = lean
        self._auditor = auditor
        self._prefixes = prefixes

    async def sorries(self, request: Request, states: States) -> tuple[Sorry, ...]:
        """Every ``sorry`` of a checked text, with its goal and its state.

        Those of which Lean shows no goal have no state either.

        Raises:
            QueueFullError: there is no room to keep the states.
        """
        code = request.code
        holes = await asyncio.to_thread(find_holes, code)
        if not holes:
            return ()
        async with self._lean.sandbox() as sandbox:

            async def run(draft: Draft) -> Run:
                return await self._prefixes.run(sandbox, code, draft.text, request, states)

            seen = await _look(holes, run, lambda forms: draft_probe(code, holes, forms))
        source = Source(self._lean.environment.fingerprint, code, seen.holes)
        record = source.record()
        source_id = record_id(record)
        opened = {number: record_after(source_id, number) for number in seen.goals}
        await states.keep({source_id: record, **dict(opened.values())})
        return _sorries(code, seen, opened)

    async def step(self, request: Request, states: States) -> Reply:
        """What becomes of a state by a tactic.

        Raises:
            QueueFullError: there is no room to keep the next state.
        """
        records = await states.recall(request.state)
        if records is None:
            return Reply(error=f"the state {request.state} is not known here, or no longer")
        recipe = read_recipe(request.state, records)
        fingerprint = self._lean.environment.fingerprint
        if recipe.source.fingerprint != fingerprint:
            return Reply(error=other_environment(recipe, self._lean.environment.name, fingerprint))
        given, tactic, message = await asyncio.to_thread(_read, request.tactic)
        if message:
            return Reply("rejected", (message,), fingerprint=fingerprint)
        step = _Step(self, recipe, given, tactic, request, states)
        reply = await step.run()
        warm = self._prefixes.holds(recipe.snapshot_key)
        return replace(reply, fingerprint=fingerprint, warm=warm)


class _Step:
    """One tactic on one state."""

    def __init__(
        self,
        trials: Trials,
        recipe: Recipe,
        given: Given,
        tactic: Tactic,
        request: Request,
        states: States,
    ) -> None:
        self._lean, self._prefixes = trials._lean, trials._prefixes
        self._auditor = trials._auditor
        self._recipe = recipe
        self._given = given
        self._request = request
        self._states = states
        self._tactic = tactic

    async def run(self) -> Reply:
        draft = draft_trial(self._recipe, self._tactic)
        # What closes a proof without any other hole can be checked as it was tried.
        is_whole = not (self._tactic.holes or self._others())
        async with self._lean.sandbox() as sandbox:
            run = await self._try(sandbox, draft, compile_=is_whole)
            verdict, messages = run.judged()
            left = [m for m in messages if draft.is_left(m)]
            counted = [m for m in messages if draft.level(m) is None]
            verdict = _verdict(verdict, counted)
            outside = draft.left_outside(messages)
            cpu_s = run.done.exit.cpu_s
            reply = Reply(verdict, self._of_tactic(draft, messages), cpu_s=cpu_s, way=run.way)
            if verdict not in ("accepted", "incomplete"):
                return reply
            goals = tuple(goal for message in left for goal in read_goals(message))
            if goals or self._tactic.holes:
                return await self._go_on(sandbox, replace(reply, verdict="incomplete"), goals)
            if is_whole and not any(outside) and run.way in ("replayed", "failed"):
                started = time.monotonic()
                compilation = Compilation(self._lean, self._request, draft.text)
                checked = await compilation.judge(sandbox, run)
                checked = await compilation.audit(self._auditor, checked)
                return self._closed(reply, draft, checked, time.monotonic() - started)
        return await self._close(reply, outside)

    async def _try(self, sandbox: Sandbox, draft: Draft, *, compile_: bool = False) -> Run:
        code = self._recipe.source.code
        return await self._prefixes.run(
            sandbox, code, draft.text, self._request, self._states, compile_=compile_
        )

    async def _go_on(self, sandbox: Sandbox, reply: Reply, goals: tuple[str, ...]) -> Reply:
        """The next state: the goals that are left, else the first hole of the tactic itself."""
        recipe, tactic = self._recipe, self._tactic
        sorries: tuple[Sorry, ...] = ()
        if tactic.holes:

            async def run(draft: Draft) -> Run:
                return await self._try(sandbox, draft)

            seen = await _look(
                tactic.holes, run, lambda forms: draft_trial(recipe, tactic, probes=forms)
            )
            tactic = Tactic(tactic.text, seen.holes)
            # Deeper ones would be no recipe that others read.
            numbers = seen.goals if recipe.levels < MAX_LEVELS else ()
            opened = await asyncio.to_thread(self._opened, tactic, numbers)
            await self._states.keep(dict(opened.values()))
            sorries = _sorries(tactic.text, seen, opened)
        if goals:
            state, record = record_after(self._request.state, tactic)
            await self._states.keep({state: record})
            return replace(reply, state=state, goals=goals, sorries=self._placed(sorries))
        first = next((sorry for sorry in sorries if sorry.state), Sorry(1, 0))
        goals = () if first.goal is None else (first.goal,)
        return replace(reply, state=first.state, goals=goals, sorries=self._placed(sorries))

    def _opened(self, tactic: Tactic, numbers: Iterable[int]) -> dict[int, tuple[str, bytes]]:
        state = self._request.state
        return {number: record_after(state, replace(tactic, opened=number)) for number in numbers}

    async def _close(self, reply: Reply, outside: Sequence[int]) -> Reply:
        """Nothing is left: the whole text has to stand a check."""
        started = time.monotonic()
        # A name that no library search offers, and that no tactic can have known.
        others = self._others() or any(outside)
        stand_in = f"_leanq_{secrets.token_hex(8)}" if others else ""
        draft = draft_trial(self._recipe, self._tactic, stand_in=stand_in, outside=outside)
        allowed = (*self._request.allow_axioms, *([stand_in] if stand_in else []))
        request = replace(self._request, allow_axioms=allowed)
        checked = await check(self._lean, self._auditor, request, draft.text)
        checked = replace(checked, cpu_s=reply.cpu_s + checked.cpu_s)
        return self._closed(reply, draft, checked, time.monotonic() - started, stand_in)

    def _closed(
        self, reply: Reply, draft: Draft, checked: Reply, check_s: float, stand_in: str = ""
    ) -> Reply:
        """What the check of the whole text says of the step."""
        axioms = checked.axioms and tuple(
            sorted({"sorryAx" if name == stand_in else name for name in checked.axioms})
        )
        messages = self._of_tactic(draft, checked.messages)
        if checked.verdict == "incomplete" and not messages:
            why = "leanq: the proof, or what stands before it, rests on sorryAx"
            messages = (Message("warning", 1, 0, why),)
        return replace(checked, messages=messages, axioms=axioms, audit_s=check_s, way=reply.way)

    def _others(self) -> bool:
        """Whether the text has holes beside the one in which the proof was closed."""
        recipe = self._recipe
        opened = 1 + sum(tactic.opened is not None for tactic in recipe.tactics)
        holes = len(recipe.source.holes) + sum(len(tactic.holes) for tactic in recipe.tactics)
        return holes > opened

    def _of_tactic(self, draft: Draft, messages: Sequence[Message]) -> tuple[Message, ...]:
        """What concerns the tactic, with places in it; an error elsewhere is its fault as well."""
        told = [self._given.message(draft.of_trial(m)) for m in messages if draft.is_trial(m)]
        elsewhere = [
            replace(message, line=1, column=0, end_line=None, end_column=None)
            for message in messages
            if not draft.is_trial(message)
            and draft.level(message) is None
            and (message.severity == "error" or message.text.startswith("leanq: "))
        ]
        if any(message.severity == "error" for message in told):
            return tuple(told)
        return (*told, *elsewhere)

    def _placed(self, sorries: Sequence[Sorry]) -> tuple[Sorry, ...]:
        places = (self._given.place(sorry.line, sorry.column) for sorry in sorries)
        return tuple(
            replace(sorry, line=line, column=column)
            for sorry, (line, column) in zip(sorries, places, strict=True)
        )


def _read(text: str) -> tuple[Given, Tactic, Message | None]:
    """A tactic, and why it could leave its hole, if it could."""
    given = read_tactic(text)
    return given, Tactic(given.text, find_holes(given.text)), misfit(text)


def other_environment(recipe: Recipe, name: str, fingerprint: str) -> str:
    """Why a state makes no sense in an environment."""
    theirs = recipe.source.fingerprint
    return (
        f"the state is of an environment with the fingerprint {theirs[:12]}, and {name!r} has "
        f"{fingerprint[:12]} here; check its source again"
    )


async def _look(
    holes: tuple[Hole, ...],
    run: Callable[[Draft], Awaitable[Run]],
    draft_with: Callable[[Mapping[int, Form]], Draft],
) -> _Seen:
    """Has Lean show the goals of holes, and finds their forms by that."""
    missing = {number: hole.form for number, hole in enumerate(holes)}
    goals: dict[int, str] = {}
    forms: dict[int, Form] = {}
    for _ in range(_MOST_PROBES):
        draft = draft_with(missing)
        done = await run(draft)
        verdict, messages = done.judged()
        if verdict not in LEAN_VERDICTS:
            break
        found = draft.goals(messages)
        goals |= found
        forms |= {number: missing.pop(number) for number in found}
        # Where one block was misread, Lean may have gone no further, and the others can be right.
        misread = [number for number in missing if draft.is_misread(number, messages)]
        if not missing or not (found or misread):
            break
        missing |= {number: _FLIPPED[missing[number]] for number in misread}
    known = (replace(hole, form=forms.get(number, "unknown")) for number, hole in enumerate(holes))
    return _Seen(tuple(known), goals)


def _sorries(text: str, seen: _Seen, opened: Mapping[int, tuple[str, bytes]]) -> tuple[Sorry, ...]:
    """The holes of a text with their places, goals and states."""
    sorries: list[Sorry] = []
    line, counted = 1, 0
    for number, hole in enumerate(seen.holes):
        line += text.count("\n", counted, hole.offset)
        counted = hole.offset
        column = hole.offset - (text.rfind("\n", 0, hole.offset) + 1)
        state, _ = opened.get(number, (None, b""))
        sorries.append(Sorry(line, column, seen.goals.get(number), state))
    return tuple(sorries)


def _verdict(verdict: Verdict, messages: Sequence[Message]) -> Verdict:
    """The verdict once the messages that goals are left are set aside."""
    errors = [message for message in messages if message.severity == "error"]
    if verdict in ("rejected", "exhausted") and not errors:
        return "incomplete"
    if verdict == "rejected" and all(is_budget(message) for message in errors):
        return "exhausted"
    return verdict
