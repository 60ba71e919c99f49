"""What clients and commands take for several clusters, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.fleets import Recorder, look, serving
from support.servers import own_server

from leanq.cli import cli
from leanq.client import AsyncLeanQClient
from leanq.errors import UsageError
from leanq.producer.route import Clusters
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import Settings


class Accepting(Recorder):
    """Takes any code for proved."""

    async def run(self, _request: Request) -> Reply:
        return Reply("accepted")


@pytest.mark.parametrize(
    ("url", "weights", "why"),
    [
        ([], None, "at least one URL"),
        (["redis://:pw@a", "redis://:pw@a"], None, "named twice"),
        (["redis://a", "redis://b"], [1], "1 weights for 2 clusters"),
        (["redis://a", "redis://:pw@b"], [1, -1], r"of redis://:\*\*\*@b is -1"),
        (["redis://a", "redis://b"], [1, math.nan], "is nan"),
        (["redis://a", "redis://b"], [1, math.inf], "is inf"),
        (["redis://a", "redis://b"], [0, 0], "all weights are 0"),
        ("redis://a*0 redis://b*0", None, "all weights are 0"),
        ("redis://a*1 redis://b", [1, 1], "give them once"),
        ("redis://a*-1 redis://b", None, "not a Redis URL"),
        (["redis://a redis://b", "redis://c"], None, "names 2 clusters"),
        ([Settings("redis://a"), Settings("redis://b", shards=2)], None, "number of shards"),
        ("redis://a*3", None, "not a Redis URL"),
    ],
)
def test_wrong_settings(url: Any, weights: list[float] | None, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        AsyncLeanQClient(url, weights=weights)
    assert "pw" not in str(refused.value)


def test_wrong_changes_change_nothing() -> None:
    urls = "redis://:pw@a*3 redis://b"
    client, clusters = AsyncLeanQClient(urls), Clusters.load(urls, None, {})
    for weights in ({"redis://:pw@c": 1}, {"redis://b": -1}, {"redis://:pw@a": 0, "redis://b": 0}):
        with pytest.raises(UsageError) as refused:
            client.set_weights(weights)
        assert "pw" not in str(refused.value)
        with pytest.raises(UsageError):
            clusters.change(weights)
    assert [clusters.weight(each.url) for each in clusters.each] == [3, 1]


def test_submit_takes_several_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{n}.lean" for n in range(20)]
    for file in files:
        file.write_text(f"-- {file.name}")
    with (
        own_server() as one,
        own_server() as other,
        serving(one.settings, Accepting("default")),
        serving(other.settings, Accepting("default")),
    ):
        text = f"{one.settings.url}*1 {other.settings.url}*2"
        arguments = ["submit", "--json", "--url", text, *map(str, files)]
        assert cli.main(arguments, standalone_mode=False) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {line["file"] for line in lines} == {str(file) for file in files}
        counts = [look(each.settings).counters["submitted"] for each in (one, other)]
        assert sum(counts) == 20
        assert all(counts)


@pytest.mark.parametrize("command", ["status", "worker", "reap", "metrics"])
def test_every_other_command_takes_one(command: str) -> None:
    with pytest.raises(UsageError, match="names 2 clusters; only clients"):
        cli.main([command, "--url", "redis://a redis://b"], standalone_mode=False)
