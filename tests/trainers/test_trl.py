"""TRL's reward function, called as TRL calls it; `make test-trainers` has TRL itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from leanq.errors import UsageError
from leanq.trainers.rewards import LeanReward
from leanq.trainers.testing import FakeLeanQClient


@pytest.fixture
def fake_lean() -> Iterator[FakeLeanQClient]:
    with FakeLeanQClient() as client:
        yield client


async def test_verdicts_are_logged_beside_the_rewards(fake_lean: FakeLeanQClient) -> None:
    fake_lean.fleet.on("slow", "timeout")
    fake_lean.fleet.on("wrong", "rejected")
    columns: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    rewards = await LeanReward(fake_lean)(
        completions=["right", "wrong", "slow", "\0"],
        prompts=["p"] * 4,
        completion_ids=[[0]] * 4,
        statement=["s"] * 4,
        trainer_state=object(),
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert rewards == [1.0, 0.0, None, 0.0]
    assert columns["lean_verdict"] == ["accepted", "rejected", "timeout", "unread"]
    assert columns["lean_reason"] == ["", "lean_error", "cpu_time", ""]
    shares = {"lean/accepted", "lean/rejected", "lean/timeout", "lean/unread", "lean/no_reward"}
    assert metrics == dict.fromkeys(shares, 0.25)


async def test_earlier_releases_log_nothing(fake_lean: FakeLeanQClient) -> None:
    score = LeanReward(fake_lean)
    assert await score(completions=[], statement=[]) == []
    assert await score(completions=["right"], statement=["s"]) == [1.0]
    with pytest.raises(UsageError, match="no column 'statement'"):
        await score(completions=["right"], prompts=["p"])
