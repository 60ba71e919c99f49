"""Campaigns that write into a replay memory, also into one that makes trouble."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.campaigns.campaigns import Judge
from support.fleets import working
from support.servers import Server
from support.trainers.replays import open_memory

from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import Command, Plan, Progress
from leanq.campaigns.dataset import Fields
from leanq.campaigns.results import read_results
from leanq.client import AsyncLeanQClient
from leanq.errors import UsageError
from leanq.queue.settings import Settings
from leanq.trainers import replay_writer
from leanq.trainers.replay import ReplayMemory

ROWS: list[dict[str, Any]] = [
    {"id": "a", "code": ["accepted 1", "rejected 2"], "tags": ["algebra", "easy"], "target": "t"},
    {"id": "b", "code": ["timeout 3"], "target": "t"},
    {"id": "c"},
]


class Warned:
    """An observer that keeps what it is warned of."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def resumes(self, text: str) -> None:
        pass

    async def update(self, progress: Progress) -> Command:
        return "run"

    def bad_row(self, line: int, error: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
async def judge(settings: Settings) -> AsyncIterator[Judge]:
    judge = Judge()
    async with working(settings, judge):
        yield judge


def made(folder: Path, *, target: str | None = "target") -> Campaign:
    data = folder / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    out, fields = str(folder / "run-1.jsonl"), Fields(tags="tags", target=target)
    return Campaign(str(data), out, fields, Plan({"tenant": "team"}), replay="m")


async def test_what_a_campaign_settles_goes_into_its_memory(
    settings: Settings, judge: Judge, tmp_path: Path
) -> None:
    campaign, seen = made(tmp_path), Warned()
    async with open_memory(settings) as memory:
        async with AsyncLeanQClient(settings) as client:
            assert await campaign.run(client, seen) == "finished"
        entries = {entry.text: entry for entry in await memory.read()}
        assert {text: (each.verdict, each.rewards) for text, each in entries.items()} == {
            "accepted 1": ("accepted", {"lean": 1.0}),
            "rejected 2": ("rejected", {"lean": 0.0}),
            "timeout 3": ("timeout", {}),
        }
        assert entries["rejected 2"].tags == {
            "campaign": "run-1.jsonl",
            "tenant": "team",
            "id": "a",
            "sample": "1",
            "tags": "algebra,easy",
        }
    assert not [text for text in seen.warnings if "replay" in text]
    assert Campaign.of_results(campaign.out).replay == "m"


async def test_entries_say_of_which_problem_they_are(
    settings: Settings, judge: Judge, tmp_path: Path
) -> None:
    campaign = made(tmp_path)
    of_problems = replace(campaign, fields=replace(campaign.fields, problem="id"))
    async with open_memory(settings) as memory:
        async with AsyncLeanQClient(settings) as client:
            assert await of_problems.run(client, Warned()) == "finished"
        found = sorted(entry.tags["problem"] for entry in await memory.read())
        assert found == ["a", "a", "b"]


async def test_a_campaign_without_targets_pays_nothing(
    settings: Settings, judge: Judge, tmp_path: Path
) -> None:
    async with open_memory(settings) as memory:
        async with AsyncLeanQClient(settings) as client:
            assert await made(tmp_path, target=None).run(client, Warned()) == "finished"
        entries = {entry.text: entry for entry in await memory.read()}
        assert {text: (each.verdict, each.rewards) for text, each in entries.items()} == {
            "accepted 1": ("accepted", {}),
            "rejected 2": ("rejected", {}),
            "timeout 3": ("timeout", {}),
        }


async def test_a_memory_that_takes_nothing_ends_no_campaign(
    settings: Settings,
    judge: Judge,
    one: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    campaign, seen = made(tmp_path), Warned()
    monkeypatch.setattr(replay_writer, "_TIMEOUT_S", 0.1)

    def elsewhere(name: str, *_: object, **how: Any) -> ReplayMemory:
        return ReplayMemory(name, one.settings, **how)

    # The memory's server is gone, and the queue's is not.
    monkeypatch.setattr(replay_writer, "ReplayMemory", elsewhere)
    one.stop()
    async with AsyncLeanQClient(settings) as client:
        assert await campaign.run(client, seen) == "finished"
    assert "the replay memory m lacks 3 entries" in seen.warnings
    verdicts = [record["verdict"] for record in read_results(campaign.out)]
    assert verdicts == ["accepted", "rejected", "timeout", None]


async def test_a_gateway_has_no_memory(tmp_path: Path) -> None:
    # It asks nobody before it is opened.
    client = AsyncLeanQClient("https://leanq.invalid", key="k")
    with pytest.raises(UsageError, match="gateway"):
        await made(tmp_path).run(client, Warned())


def test_a_campaign_of_before_has_no_memory(tmp_path: Path) -> None:
    spec = made(tmp_path).spec()
    del spec["replay"]
    assert Campaign.of(spec) == replace(made(tmp_path), replay=None)
