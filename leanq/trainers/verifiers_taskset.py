"""An environment for `verifiers` (0.4): theorems as tasks, proved in one turn or in several.

``verifiers`` finds an environment by the name of a top-level module. Write one that exports these
two, and name it to ``vf-eval`` or prime-rl::

    from leanq.trainers.verifiers_taskset import LeanEnv, LeanTaskset
    __all__ = ["LeanEnv", "LeanTaskset"]

The reward of an episode is ``leanq.trainers.LeanReward``'s for the last reply. If that has
none, or the fleet does not answer, the episode has an error and no reward.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from cachetools import LRUCache

from leanq.errors import NoRewardError, UsageError
from leanq.producer.request_builder import Check
from leanq.trainers.feedback import feedback
from leanq.trainers.rewards import LeanReward, Score, lean_text, proof_text

__all__ = ["LeanEnv", "LeanTaskset"]

_PROMPT = "Prove this theorem in Lean 4. Answer with the whole text in one ```lean block.\n\n{}"


class LeanData(vf.TaskData):
    """A theorem: ``statement`` is Lean text whose proof is ``sorry``."""

    statement: str


class LeanTaskConfig(vf.TaskConfig):
    """How candidates are verified (``--env.taskset.task.*``).

    Attributes:
        environment: the fleet's environment; the default one unless given.
        timeout_s: CPU seconds of a candidate.
        stall_s: the fleet counts as stalled after so many seconds without a reply.
        proof_only: whether models write the proof alone, instead of the whole text.
    """

    environment: str | None = None
    timeout_s: float = 60.0
    stall_s: float = 900.0
    proof_only: bool = False


class LeanTask(vf.Task[LeanData, vf.State, LeanTaskConfig]):
    """One theorem."""

    @vf.reward  # type: ignore[untyped-decorator, unused-ignore]
    async def proved(self, trace: Any) -> float:
        """Returns 1 if the last reply proves the statement, else 0; raises if nothing was said
        about it."""
        score = await self.score_of(trace.last_reply)
        if score.reward is None:
            verdict = score.reply.verdict if score.reply else "no reply"
            raise NoRewardError(f"the candidate has no verdict of Lean's: {verdict}")
        return score.reward

    async def score_of(self, text: str) -> Score:
        """Returns the score of a reply.

        Raises:
            StalledError, QueueError: as of ``leanq.trainers.LeanReward.scores``.
        """
        made = self._reward
        # The last turn asks twice: for its feedback and for the reward.
        key = (made, self.data.statement, text)
        if key in _scores:
            return _scores[key]
        (score,) = await made.scores([self.data.statement], [text])
        if score.reward is not None:
            _scores[key] = score
        return score

    async def said_of(self, score: Score) -> str:
        """Returns what to tell a model about its candidate: Lean's messages, and the goals that are
        left."""
        if score.reply is None:
            return "This is no text that Lean reads."
        return feedback(await self._reward.with_goals(score.reply, score.candidate))

    @property
    def _reward(self) -> LeanReward:
        config = self.config
        return _reward(config.environment, config.timeout_s, config.stall_s, config.proof_only)


_scores: LRUCache[tuple[LeanReward, str, str], Score] = LRUCache(4096)


class LeanTasksetConfig(vf.TasksetConfig):
    """The theorems (``--env.taskset.*``).

    Attributes:
        data: a JSONL file; each row has a statement, and may have an ``id``.
        column: the field with the statement.
        prompt: the question to the model; ``{}`` stands for the statement.
    """

    data: Path = Path("problems.jsonl")
    column: str = "statement"
    prompt: str = _PROMPT
    task: LeanTaskConfig = LeanTaskConfig()


class LeanTaskset(vf.Taskset[LeanTask, LeanTasksetConfig]):
    """The theorems of a JSONL file."""

    def load(self) -> Iterator[LeanTask]:
        """Yields the tasks; raises UsageError if the file or a row cannot be read."""
        try:
            lines = self.config.data.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.config.data}: {error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                statement = row[self.config.column]
                if not isinstance(statement, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                raise UsageError(
                    f"{self.config.data}:{number}: expected a JSON object with the text "
                    f"{self.config.column!r}"
                ) from None
            data = LeanData(
                id=str(row.get("id", number)),
                prompt=self.config.prompt.replace("{}", statement),
                statement=statement,
            )
            yield LeanTask(data, self.config.task)


class LeanEnvConfig(vf.EnvConfig):
    """The prover, and the number of its turns (``--env.*``)."""

    # A chat without tools needs no sandbox.
    prover: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())
    turns: int = 1
    """After each turn but the last, the model is told what Lean said, with the goals that are
    left."""


class LeanEnv(vf.Env[LeanEnvConfig]):
    """A model proves a theorem, in one turn or with Lean's messages fed back."""

    async def run(self, task: LeanTask, agents: Any) -> None:
        """Runs one episode. If the fleet stalls, the episode has that error."""
        if self.config.turns < 2:
            await agents.prover.run(task)
            return
        async with agents.prover.interaction(task) as conversation:
            segment = await conversation.turn()
            for _ in range(self.config.turns - 1):
                if segment.terminated:
                    break
                score = await task.score_of(segment.last_reply)
                if score.reward == 1.0:
                    break
                said = await task.said_of(score)
                segment = await conversation.turn(f"{said}\n\nTry again, with the whole text.")


@functools.cache
def _reward(
    environment: str | None, timeout_s: float, stall_s: float, proof_only: bool
) -> LeanReward:
    """Returns one reward function, with one client, for all tasks of a process."""
    options: Check = {"timeout_s": timeout_s}
    if environment is not None:
        options["env"] = environment
    extract = proof_text if proof_only else lean_text
    return LeanReward(extract=extract, stall_s=stall_s, **options)
