"""Traces of what clients have recorded, with the goals before and after each tactic."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.campaigns.traces import check_again, read_traces
from support.terminals import Terminal

from leanq.campaigns.traces import Exported, export_traces
from leanq.client import AsyncLeanQClient
from leanq.errors import UsageError
from leanq.local import Pool
from leanq.producer.recording import SUFFIX
from leanq.queue.settings import Settings
from leanq.trainers.testing import FakeLeanQClient


def test_goals_before_and_after_each_tactic(tmp_path: Path) -> None:
    source, out = tmp_path / "recorded", tmp_path / "traces"
    with FakeLeanQClient(record=source) as lean:
        lean.fleet.on("intro", "incomplete", op="step")
        labels = {"problem": 7, "policy": "a"}
        (hole,) = lean.check("theorem t : p := by sorry", labels=labels).result().sorries
        assert hole.state
        left = lean.step(hole.state, "intro", labels={"policy": "a"}).result()
        assert left.state
        lean.step(left.state, "exact h").result()
        lean.step(left.state, "exact h").result()
        lean.verify(None, "theorem u : q := h", theorems=["u"], allow_axioms=["a"]).result()
    done = export_traces([str(source)], str(out))
    assert done == Exported(written=4, shards=1, known=1, skipped={})
    text, first, last, verified = read_traces(out)
    assert [row["op"] for row in (text, first, last, verified)] == [
        *("check", "step", "step"),
        "verify",
    ]
    assert (text["problem"], json.loads(text["labels"])) == ("7", labels)
    assert (first["problem"], json.loads(first["labels"])) == (None, {"policy": "a"})
    assert (last["labels"], last["target"], last["id"]) == (None, None, None)
    assert (first["text"], first["parent"], first["state"]) == ("intro", hole.state, left.state)
    assert (first["goals_before"], first["goals_after"]) == ([hole.goal], list(left.goals))
    assert (last["parent"], last["goals_before"]) == (left.state, list(left.goals))
    assert (last["verdict"], last["state"], last["goals_after"]) == ("accepted", None, [])
    assert (text["goals_before"], text["parent"]) == (None, None)
    assert (text["tags"], verified["tags"]) == ([], [])
    assert (verified["target_theorems"], verified["allow_axioms"]) == (["u"], ["a"])
    assert datetime(2020, 1, 1, tzinfo=UTC) < text["ended"] <= last["ended"]


def test_goals_that_another_client_came_by_later_in_the_order(tmp_path: Path) -> None:
    source, out = tmp_path / "recorded", tmp_path / "traces"
    with FakeLeanQClient(record=source / "b") as one:
        (hole,) = one.check("theorem t : p := by sorry").result().sorries
        with FakeLeanQClient(one.fleet, record=source / "a") as other:
            assert hole.state
            other.step(hole.state, "exact h").result()
            other.step("f" * 64, "exact h", env="default").result()
    export_traces([str(source / "a"), str(source / "b")], str(out))
    known, unknown, _ = read_traces(out)
    assert (known["goals_before"], unknown["goals_before"]) == ([hole.goal], None)


def test_a_journal_that_grows_and_one_that_is_damaged(tmp_path: Path) -> None:
    source, out = tmp_path / "recorded", tmp_path / "traces"
    with FakeLeanQClient(record=source) as lean:
        for n in range(3):
            lean.check(f"-- {n}").result()
        (path,) = source.glob(f"*{SUFFIX}")
        assert export_traces([str(path)], str(out)).written == 3
        lean.check("-- 3").result()
        done = export_traces([str(path)], str(out))
        assert (done.written, done.known, done.skipped) == (1, 3, {})
    path.write_bytes(path.read_bytes().replace(b"-- 1", b"-- 7") + b"torn")
    done = export_traces([str(path)], str(tmp_path / "other"))
    assert (done.written, done.skipped) == (3, {"unreadable": 2})
    assert [row["text"] for row in read_traces(tmp_path / "other")] == ["-- 0", "-- 2", "-- 3"]
    with pytest.raises(UsageError, match="has no journal"):
        export_traces([str(out)], str(tmp_path / "third"))


@pytest.mark.slow
def test_recorded_steps_are_checked_again_from_the_file_alone(
    terminal: Terminal, fleet: Settings, pool: Pool
) -> None:
    """What a client has recorded and what a campaign has left, in one folder."""
    statement = "theorem t (p q : Prop) (h : p) (k : q) : p ∧ q := by "

    async def play() -> None:
        async with AsyncLeanQClient(fleet, record=terminal.folder / "recorded") as lean:
            (hole,) = (await lean.check(statement + "sorry", labels={"problem": "t"})).sorries
            assert hole.state
            left = await lean.step(hole.state, "constructor")
            assert (left.verdict, len(left.goals)) == ("incomplete", 2)
            assert left.state
            for tactic in ("exact k", "exact h\nexact k", "nonsense", "skip", "sorry"):
                await lean.step(left.state, tactic)
            half = await lean.step(left.state, "exact h")
            assert half.state
            await lean.step(half.state, "assumption")
            await lean.verify(statement + "sorry", statement + "exact ⟨h, k⟩")
            await lean.verify(statement + "sorry", "theorem t : True := trivial")
            assert [
                r.verdict
                async for r in lean.amap(["theorem v (p : Prop) (h : p) : p := h", "oops"])
            ] == [
                "accepted",
                "rejected",
            ]

    terminal.use(fleet)
    asyncio.run(play())
    data = {"id": 1, "formal_statement": statement, "proof": ["exact ⟨h, k⟩", "assumption"]}
    terminal.file("data.jsonl", json.dumps(data))
    assert terminal.run("campaign", "run", "data.jsonl", "--out", "out.jsonl").code == 1
    done = terminal.run("export-traces", "out.jsonl", "recorded", "--out", "traces")
    assert done.code == 0, done
    rows = read_traces(terminal.folder / "traces")
    steps = [row for row in rows if row["op"] == "step"]
    assert len(steps) == 8
    assert all(row["goals_before"] for row in steps)
    assert {row["verdict"] for row in steps} == {"accepted", "incomplete", "rejected"}
    assert all(row["goals_after"] for row in steps if row["verdict"] == "incomplete")
    for path in (terminal.folder / "recorded").iterdir():
        os.remove(path)
    check_again(pool, rows)
