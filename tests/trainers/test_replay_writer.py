"""What rewards write into a replay memory, and what trouble with it does to them: nothing."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field

import pytest
from support.servers import Server
from support.trainers.replays import names, open_memory

from leanq.client import AsyncLeanQClient
from leanq.errors import UsageError
from leanq.queue.requests import Reply, Verdict
from leanq.queue.settings import Settings
from leanq.trainers import replay_writer
from leanq.trainers.replay_entry import ReplayBounds
from leanq.trainers.replay_writer import ReplayWriter
from leanq.trainers.rewards import LeanReward

STATEMENT = "theorem t (p : Prop) (h : p) : p := sorry"


@dataclass
class Verifier:
    """Gives the verdict that a text is the name of, in the Redis of a test."""

    settings: Settings
    tenant: str = "team"
    asked: list[str] = field(default_factory=list)

    async def verify(self, target: str | None, code: str, **_: object) -> Reply:
        self.asked.append(code)
        verdict: Verdict = code  # type: ignore[assignment]
        return Reply(verdict, reason=None if code == "accepted" else "lean_error")

    async def check(self, code: str, **_: object) -> Reply:
        raise NotImplementedError

    async def step(self, state: str, tactic: str, **_: object) -> Reply:
        raise NotImplementedError


def as_it_is(_: str, completion: str) -> str:
    return completion


async def test_a_reward_writes_what_was_settled_with_tags_of_the_data(settings: Settings) -> None:
    async with open_memory(settings) as memory:
        score = LeanReward(
            Verifier(settings), extract=as_it_is, memory="m", tag_columns=["problem"]
        )
        earned = await score(
            completions=["accepted", "rejected", "timeout"],
            statement=[STATEMENT] * 3,
            problem=["a", "b", 3],
        )
        assert earned == [1.0, 0.0, None]
        await asyncio.to_thread(score.close)
        batch = await memory.read()
        assert {entry.text: (entry.verdict, entry.rewards) for entry in batch} == {
            "accepted": ("accepted", {"lean": 1.0}),
            "rejected": ("rejected", {"lean": 0.0}),
            # Nothing was said about the proof.
            "timeout": ("timeout", {}),
        }
        tags = {entry.text: entry.tags for entry in batch}
        assert tags["rejected"] == {"tenant": "team", "problem": "b"}


async def test_a_writer_has_tags_and_bounds_and_is_used_from_many_loops(settings: Settings) -> None:
    bounds = ReplayBounds(entries=50, weighted=True)
    writer = ReplayWriter("m", settings, bounds=bounds, tags={"policy": "step-100"})
    score = LeanReward(Verifier(settings), extract=as_it_is, memory=writer, tenant="other")

    def train() -> None:
        for _ in range(3):
            asyncio.run(score(completions=["accepted"], statement=[STATEMENT]))

    await asyncio.gather(asyncio.to_thread(train), asyncio.to_thread(train))
    await asyncio.to_thread(score.close)
    # It is the caller's, and goes on.
    writer.add(Reply("rejected"), "last")
    writer.add(Reply(), "an echo")
    await asyncio.to_thread(writer.close)
    async with open_memory(settings, bounds) as memory:
        batch = await memory.read()
        assert names(batch) == ["accepted"] * 6 + ["last"]
        assert batch.entries[0].tags == {"policy": "step-100", "tenant": "other"}
        # A verdict alone earns nothing.
        assert batch.entries[-1].rewards == {}
        assert writer.dropped == 0


async def test_a_memory_out_of_reach_changes_no_reward_and_is_counted(
    one: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_writer, "_TIMEOUT_S", 0.1)
    writer = ReplayWriter("m", one.settings)
    score = LeanReward(Verifier(one.settings), extract=as_it_is, memory=writer)
    one.stop()
    with caplog.at_level(logging.WARNING, "leanq.replay"):
        for _ in range(3):
            assert await score(completions=["accepted"] * 9, statement=[STATEMENT] * 9) == [1.0] * 9
        await asyncio.to_thread(writer.close)
    assert writer.dropped == 27
    assert len([each for each in caplog.records if each.name == "leanq.replay"]) == 1


async def test_other_bounds_change_no_reward_and_are_counted(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_memory(settings, ReplayBounds(entries=10)) as memory:
        writer = ReplayWriter("m", settings, bounds=ReplayBounds(entries=20))
        score = LeanReward(Verifier(settings), extract=as_it_is, memory=writer)
        assert await score(completions=["accepted"], statement=[STATEMENT]) == [1.0]
        await asyncio.to_thread(writer.close)
        assert writer.dropped == 1
        assert "drop it first" in caplog.text
        assert len(await memory.read()) == 0


async def test_what_no_memory_takes_is_counted_in_the_memory_too(settings: Settings) -> None:
    async with open_memory(settings) as memory:
        writer = ReplayWriter("m", settings)
        writer.add(Reply("rejected"), "x" * (1 << 20))
        writer.add(Reply("rejected"), "\ud800")
        writer.add(Reply("rejected"), "a", earned=float("nan"))
        writer.add(Reply("rejected"), "b", tags={"a": 5})  # type: ignore[dict-item]
        writer.add(Reply("rejected"), "good")
        await asyncio.to_thread(writer.close)
        assert names(await memory.read()) == ["good"]
        assert (writer.dropped, (await memory.stats()).dropped) == (4, 4)


def test_a_forked_child_writes_by_itself(settings: Settings) -> None:
    writer = ReplayWriter("m", settings)
    writer.add(Reply("accepted"), "parent")
    child = os.fork()
    if not child:
        status = 1
        try:
            writer.add(Reply("accepted"), "child")
            writer.close()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    writer.close()
    assert status == 0

    async def look() -> list[str]:
        async with open_memory(settings) as memory:
            return sorted(names(await memory.read()))

    assert asyncio.run(look()) == ["child", "parent"]


def test_a_name_that_is_none_is_refused_at_once(settings: Settings) -> None:
    with pytest.raises(UsageError, match="replay memory"):
        LeanReward(Verifier(settings), extract=as_it_is, memory="no name")
    with pytest.raises(UsageError, match="gateway"):
        # It asks nobody before it is opened.
        LeanReward(AsyncLeanQClient("https://leanq.invalid", key="k"), memory="m")
    score = LeanReward(Verifier(settings), extract=as_it_is, memory="m", tag_columns=["problem"])
    with pytest.raises(UsageError, match="'problem' for tags"):
        asyncio.run(score(completions=["accepted"], statement=[STATEMENT]))
