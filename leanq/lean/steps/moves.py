"""A tactic on a state before Lean runs, and Lean's answer about it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from leanq.lean.diagnostics import is_budget, reason_of
from leanq.lean.environment import Environment
from leanq.lean.recipes import Recipe, Tactic, read_recipe, record_after
from leanq.lean.steps.holes import Draft, Given, find_holes, misfit, read_tactic
from leanq.queue.requests import Message, Reply, Request
from leanq.states import States


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
