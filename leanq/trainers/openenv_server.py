"""An OpenEnv server: an agent proves a theorem tactic by tactic over a fleet.

``reset`` opens a statement, ``step`` tries a tactic on a proof state, ``state`` says how far the
episode is. An episode's reward is 1 once the whole proof is verified against the statement. A step
without a verdict of Lean's has the reward None, and the episode goes on. If the fleet cannot be
reached, the server answers with an error and no reward.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, Unpack
from uuid import uuid4

from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from leanq.errors import InvalidRequestError, StalledError, TooLargeError, UsageError
from leanq.producer.request_builder import Check
from leanq.queue.requests import LEAN_VERDICTS
from leanq.trainers.feedback import feedback
from leanq.trainers.search import Prover, opened, reply_of, verified

_T = TypeVar("_T")


class TacticAction(Action):
    """A tactic to try on ``node``, or on the last state that was reached."""

    tactic: str = Field(description="A tactic, such as `intro h` or `simp`.")
    node: int | None = Field(None, ge=0, description="The number of a state of this episode.")


class GoalsObservation(Observation):
    """The outcome of a tactic.

    ``verdict`` and ``feedback`` are those of the step, or of the whole proof once no goal is left.
    ``node`` is the number of the state that the next tactic is tried on by default, and ``goals``
    are that state's.
    """

    statement: str
    verdict: str | None = None
    feedback: str = ""
    node: int = 0
    goals: list[str] = Field(default_factory=list)


class ProofState(State):
    """How far an episode is: its statement, its states and the tactics that led to each."""

    statement: str | None = None
    proof: str | None = None
    states: list[str] = Field(default_factory=list)
    tactics: list[list[str]] = Field(default_factory=list)


class LeanEnvironment(Environment[TacticAction, GoalsObservation, ProofState]):
    """The episodes of one session.

    Args:
        lean: the client; sessions share it.
        problems: statements for ``reset(index=...)``: Lean text with one ``sorry`` each.
        max_steps: an episode without a proof ends after so many tactics.
        stall_s: the fleet counts as stalled after so many seconds without a reply.
        options: of each request, such as ``timeout_s``, ``env`` and ``tenant``.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self,
        lean: Prover,
        problems: Sequence[str] = (),
        *,
        max_steps: int = 64,
        stall_s: float = 900.0,
        **options: Unpack[Check],
    ) -> None:
        super().__init__()
        self._lean, self._problems = lean, problems
        self._max_steps, self._stall_s = max_steps, stall_s
        self._options = options
        self._state = ProofState()
        self._goals: list[list[str]] = []
        self._node = 0
        self._done = True

    def reset(self, *_: Any, **__: Any) -> GoalsObservation:
        """Not supported; use ``reset_async``."""
        raise NotImplementedError

    def step(self, *_: Any, **__: Any) -> GoalsObservation:
        """Not supported; use ``step_async``."""
        raise NotImplementedError

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        statement: str | None = None,
        index: int | None = None,
        **_: Any,
    ) -> GoalsObservation:
        """Opens the given statement, the problem at ``index``, or a problem drawn by ``seed``.

        Raises:
            UsageError: there is no such problem, or Lean refuses the statement.
            StalledError, QueueError: the fleet does not answer.
        """
        text = statement if statement is not None else self._problem(index, seed)
        state, goal = await self._answer(opened(self._lean.check(text, **self._options)))
        self._state = ProofState(
            episode_id=episode_id or str(uuid4()), statement=text, states=[state], tactics=[[]]
        )
        self._goals = [[goal]]
        self._node, self._done = 0, False
        return self._seen("incomplete", "", None)

    async def step_async(
        self, action: TacticAction, timeout_s: float | None = None, **_: Any
    ) -> GoalsObservation:
        """Tries a tactic.

        Args:
            timeout_s: a shorter limit than ``stall_s``, in seconds.

        Raises:
            UsageError: the episode has ended, or has no such state.
            StalledError, QueueError: the fleet does not answer; try the step again.
        """
        if self._done or self._state.statement is None:
            raise UsageError("the episode has ended, or none has begun: reset first")
        node = self._node if action.node is None else action.node
        if node >= len(self._state.states):
            raise UsageError(
                f"there is no state {node}; the episode has {len(self._state.states)} states"
            )
        try:
            reply = await self._answer(
                reply_of(self._lean.step(self._state.states[node], action.tactic, **self._options)),
                timeout_s,
            )
        except (InvalidRequestError, TooLargeError) as error:
            # Lean could not read it; that is the model's fault.
            return self._ended("rejected", str(error), 0.0)
        tactics = [*self._state.tactics[node], action.tactic]
        if reply.verdict == "accepted":
            code, reply = await verified(
                self._lean,
                self._state.statement,
                tactics,
                self._options,
                lambda pending: self._answer(reply_of(pending), timeout_s),
            )
            self._done = reply.verdict == "accepted"
            if self._done:
                self._state.proof = code
        elif reply.verdict == "incomplete" and reply.state:
            self._state.states.append(reply.state)
            self._state.tactics.append(tactics)
            self._goals.append(list(reply.goals))
            self._node = len(self._state.states) - 1
        elif reply.verdict in LEAN_VERDICTS:
            self._node = node
        reward = float(self._done) if reply.verdict in LEAN_VERDICTS else None
        return self._ended(reply.verdict or "", feedback(reply), reward)

    @property
    def state(self) -> ProofState:
        """The episode's state."""
        return self._state

    def _ended(self, verdict: str, said: str, reward: float | None) -> GoalsObservation:
        self._state.step_count += 1
        self._done = self._done or self._state.step_count >= self._max_steps
        return self._seen(verdict, said, reward)

    def _seen(self, verdict: str, said: str, reward: float | None) -> GoalsObservation:
        proved = self._state.proof is not None
        return GoalsObservation(
            done=self._done,
            reward=reward,
            statement=self._state.statement or "",
            verdict=verdict,
            feedback=said,
            node=self._node,
            goals=[] if proved else self._goals[self._node],
        )

    def _problem(self, index: int | None, seed: int | None) -> str:
        if not self._problems:
            raise UsageError("name a statement: this server has no problems of its own")
        if index is None:
            index = random.Random(seed).randrange(len(self._problems))
        if not 0 <= index < len(self._problems):
            raise UsageError(f"there is no problem {index}; there are {len(self._problems)}")
        return self._problems[index]

    async def _answer(self, answer: Awaitable[_T], timeout_s: float | None = None) -> _T:
        stall_s = min(self._stall_s, timeout_s or self._stall_s)
        try:
            async with asyncio.timeout(stall_s):
                return await answer
        except TimeoutError:
            raise StalledError(
                f"the fleet did not answer within {stall_s:g} seconds; are there workers, and is "
                "the environment paused? (leanq status)"
            ) from None


def make_app(
    lean: Prover,
    problems: Sequence[str] = (),
    *,
    sessions: int = 256,
    max_steps: int = 64,
    stall_s: float = 900.0,
    **options: Unpack[Check],
) -> FastAPI:
    """Returns the server's application, for any ASGI server; arguments as for
    ``LeanEnvironment``.

    Args:
        sessions: how many episodes are open at once.
    """

    def new() -> LeanEnvironment:
        return LeanEnvironment(lean, problems, max_steps=max_steps, stall_s=stall_s, **options)

    app: FastAPI = create_fastapi_app(
        new,
        TacticAction,
        GoalsObservation,
        max_concurrent_envs=sessions,
        env_name="leanq",
        state_cls=ProofState,
    )
    return app
