"""Rewards and clients as Ray and verl carry them: pickled after use, at work in another process."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.required import missing
from support.trainers.replays import open_memory

from leanq import AsyncLeanQClient, LeanQClient, Pool
from leanq.errors import ClosedError, UsageError
from leanq.queue.settings import Settings
from leanq.trainers import LeanReward, ReplayWriter, by_goals_left, by_place_of_error, proof_text

# The session's fleet has to begin before the module's pool, which looks for processes left behind.
pytestmark = pytest.mark.usefixtures("fleet")

STATEMENT = "theorem t (p q : Prop) (h : And p q) : And q p := sorry"
ANSWERS = ["And.intro h.right h.left", "h"]
SCORES = f"""
import asyncio, pickle, sys
reward = pickle.loads(sys.stdin.buffer.read())
print(asyncio.run(reward(completions={ANSWERS!r}, statement=[{STATEMENT!r}] * 2)))
reward.close()
"""
VERIFIES = f"""
import pickle, sys
with pickle.loads(sys.stdin.buffer.read()) as lean:
    print(lean.verify({STATEMENT!r}, {STATEMENT!r}).result(60).verdict)
"""


def dumps_of(module: str) -> Callable[[object], bytes]:
    if importlib.util.find_spec(module) is None:
        missing(module)
    dumps: Callable[[object], bytes] = importlib.import_module(module).dumps
    return dumps


def told(program: str, pickled: bytes, cache: Path) -> str:
    """What a new process prints that gets the bytes alone."""
    environ = {"PATH": "/usr/bin:/bin", "LEANQ_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, input=pickled, env=environ, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["pickle", "cloudpickle"])
async def test_a_used_reward_goes_on_elsewhere(module: str, pool: Pool, cache: Path) -> None:
    dumps = dumps_of(module)
    reward = LeanReward(pool, extract=proof_text, partial=by_goals_left(0.5), timeout_s=30)
    expected = await reward(completions=ANSWERS, statement=[STATEMENT] * 2)
    assert expected == [1.0, 0.0]
    assert told(SCORES, dumps(reward), cache) == "[1.0, 0.0]"
    # What was pickled goes on too.
    assert await reward(completions=ANSWERS, statement=[STATEMENT] * 2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("module", ["pickle", "cloudpickle"])
async def test_a_used_reward_of_a_fleet_goes_on_elsewhere(
    module: str, fleet: Settings, cache: Path
) -> None:
    dumps = dumps_of(module)
    with LeanQClient(fleet) as lean:
        memory = ReplayWriter("m", fleet)
        reward = LeanReward(lean, memory=memory, partial=by_place_of_error())
        assert await reward(completions=ANSWERS[:1], statement=[STATEMENT]) == [1.0]
        # The process knows no URL but the pickled one.
        assert told(SCORES, dumps(reward), cache) == "[1.0, 0.0]"
        assert told(VERIFIES, dumps(lean), cache) == "incomplete"
        memory.close()
    async with open_memory(fleet) as entries:
        # Both processes write what is their own, in any order.
        earned = sorted(each.rewards["lean"] for each in await entries.read())
        assert earned == [0.0, 1.0, 1.0]


@pytest.mark.slow
async def test_a_reward_finds_the_queue_where_it_is_unpickled(
    fleet: Settings, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = pickle.dumps(LeanReward())
    monkeypatch.setenv("LEANQ_URL", fleet.url)
    monkeypatch.setenv("LEANQ_PREFIX", fleet.prefix)
    copied: LeanReward = pickle.loads(unused)
    assert await copied(completions=ANSWERS, statement=[STATEMENT] * 2) == [1.0, 0.0]
    used = pickle.dumps(copied)
    await asyncio.to_thread(copied.close)
    assert told(SCORES, used, cache) == "[1.0, 0.0]"


def test_a_copy_is_as_it_was_and_stays_closed_if_it_was(settings: Settings) -> None:
    with LeanQClient(settings, tenant="team") as lean:
        copied: LeanQClient = pickle.loads(pickle.dumps(lean))
        assert repr(copied) == repr(lean)
        assert copied.tenant == "team"
        copied.close()
    with pytest.raises(ClosedError):
        pickle.loads(pickle.dumps(lean)).check("theorem t : p := h")


def test_a_copy_within_the_process_is_a_client_of_its_own(pool: Pool) -> None:
    with copy.deepcopy(pool) as other:
        assert other.verify(STATEMENT, STATEMENT).result(60).verdict == "incomplete"
    assert pool.verify(STATEMENT, STATEMENT).result(60).verdict == "incomplete"


async def test_a_client_of_an_event_loop_says_what_to_do(settings: Settings) -> None:
    lean: Any = AsyncLeanQClient(settings)
    copied: AsyncLeanQClient = pickle.loads(pickle.dumps(lean))
    assert copied.settings == settings
    async with lean:
        with pytest.raises(UsageError, match="before 'async with', or use a LeanQClient"):
            pickle.dumps(LeanReward(lean))
    assert pickle.dumps(lean)


def test_a_function_of_ones_own_is_pickled_by_cloudpickle(pool: Pool) -> None:
    reward = LeanReward(pool, extract=lambda statement, _: statement)
    assert pickle.loads(dumps_of("cloudpickle")(reward))
