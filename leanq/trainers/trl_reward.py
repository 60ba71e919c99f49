"""A reward function for TRL's trainers (GRPOTrainer, RLOOTrainer and their like).

:class:`leanq.trainers.LeanReward` is one by itself. This one also writes verdicts to the trainer's
log. It imports nothing of TRL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from leanq.trainers.rewards import Completion, LeanReward


class TrlReward(LeanReward):
    """``GRPOTrainer(reward_funcs=TrlReward(), ...)``: it takes the arguments of
    :class:`leanq.trainers.LeanReward`.

    A completion without a verdict of Lean's has the reward None, which TRL turns into nan and
    leaves out of the group's mean. For each batch it logs ``lean/accepted`` (the share),
    ``lean/no_reward`` (the share left out) and a share for each other verdict. For each completion
    it logs the columns ``lean_verdict`` and ``lean_reason``.
    """

    async def __call__(
        self, completions: Sequence[Completion], **columns: Any
    ) -> list[float | None]:
        """Returns the rewards, in the order of the completions.

        Args:
            completions: what the model wrote.
            columns: the data set's columns, the statements among them, and TRL's ``log_extra`` and
                ``log_metric``.

        Raises:
            StalledError: the fleet does not answer; training ends, and resumes from its checkpoint.
            QueueError: the queue cannot be reached.
        """
        scores = await self.scores(self._statements(columns), completions, self.tags_of(columns))
        verdicts = [score.reply.verdict if score.reply else "unread" for score in scores]
        log_extra: Callable[[str, list[Any]], None] | None = columns.get("log_extra")
        if log_extra:
            log_extra("lean_verdict", list(verdicts))
            log_extra("lean_reason", [(s.reply.reason if s.reply else None) or "" for s in scores])
        log_metric: Callable[[str, float], None] | None = columns.get("log_metric")
        if log_metric and scores:
            counts = Counter({"accepted": 0}) | Counter(map(str, verdicts))
            for verdict in ("accepted", *sorted(counts.keys() - {"accepted"})):
                log_metric(f"lean/{verdict}", counts[verdict] / len(scores))
            missing = sum(score.reward is None for score in scores)
            log_metric("lean/no_reward", missing / len(scores))
        return [score.reward for score in scores]
