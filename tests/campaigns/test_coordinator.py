"""Coordinators in one process: windows, what they withdraw, how they resume, what they refuse."""

from __future__ import annotations

import asyncio
import json
import re
import resource
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.fleets import Recorder, working
from support.servers import own_server
from support.waiting import eventually

from leanq.campaigns import coordinator as module
from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import Command, Plan, Progress
from leanq.campaigns.dataset import Fields, open_dataset
from leanq.campaigns.dataset.row import FIRST_ROWS
from leanq.campaigns.journal import Journal
from leanq.campaigns.results import read_results
from leanq.campaigns.traces.sources import of_campaign
from leanq.client import AsyncLeanQClient
from leanq.errors import ToolchainError, UnavailableError, UnknownEnvironmentError, UsageError
from leanq.queue.requests import Failure, Message, Reply, Request
from leanq.queue.settings import Settings

pytestmark = pytest.mark.usefixtures("swept")


class Judge(Recorder):
    """Gives the verdict with which a text begins, at once or, after ``held``, when it is let go."""

    def __init__(self) -> None:
        super().__init__("default")
        self.is_broken = True

    def hold(self) -> None:
        """Texts that begin with ``held`` wait again."""
        self.gate.clear()

    async def run(self, request: Request) -> Reply:
        return await super().run(structs.replace(request, payload=request.code.encode()))

    async def answer(self, request: Request) -> Reply:
        if request.code.startswith("held"):
            await self.gate.wait()
        verdict: Any = request.code.split()[-1]
        if request.op == "verify" and not request.code.startswith(request.target):
            failed = (Failure("t", "statement_differs", f"expected {request.target}"),)
            return Reply("rejected", reason="statement_differs", failed=failed)
        if request.code.startswith("import Broken") and self.is_broken:
            messages = (Message("warning", 1, 0, "leanq: Lean cannot read Broken.olean"),)
            return Reply("unjudged", reason="library_unreadable", messages=messages)
        if request.code.startswith("import"):
            text = "unknown module prefix 'Mathlib'\nNo directory 'Mathlib' in the search path"
            messages = (Message("error", 1, 0, text),)
            return Reply(verdict, reason="unknown_import", messages=messages)
        return Reply(verdict=verdict)


@dataclass
class Observed:
    """An observer that keeps what is reported, and gives the command of its test."""

    command: Command = "run"
    updates: list[Progress] = field(default_factory=list)
    bad_rows: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)

    @property
    def counts(self) -> Mapping[str, int]:
        return self.updates[-1].counts if self.updates else {}

    async def update(self, progress: Progress) -> Command:
        self.updates.append(progress)
        return self.command

    def resumes(self, text: str) -> None:
        self.resumed.append(text)

    def bad_row(self, line: int, error: str) -> None:
        self.bad_rows.append((line, error))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@dataclass
class Stage:
    """A campaign over rows of a test's own."""

    settings: Settings
    folder: Path
    judge: Judge
    observer: Observed

    def campaign(self, *rows: object, **plan: Any) -> Campaign:
        data = self.folder / "data.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        fields = Fields(problem=plan.pop("problem", None))
        return Campaign(str(data), str(self.folder / "out.jsonl"), fields, Plan(**plan))

    async def run(self, campaign: Campaign, **how: Any) -> Command:
        async with AsyncLeanQClient(self.settings, **how) as client:
            return await campaign.run(client, self.observer)

    def records(self) -> list[dict[str, Any]]:
        return list(read_results(str(self.folder / "out.jsonl")))

    def verdicts(self) -> list[str | None]:
        return [record["verdict"] for record in self.records()]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMMIT_S", 0.02)


@pytest.fixture
async def stage(settings: Settings, tmp_path: Path) -> AsyncIterator[Stage]:
    judge = Judge()
    async with working(settings, judge, slots=64):
        yield Stage(settings, tmp_path, judge, Observed())


def row(number: int, *codes: str, **more: Any) -> dict[str, Any]:
    code: Any = codes[0] if len(codes) == 1 else list(codes)
    return {"id": number, "code": code, **more}


async def test_no_more_are_in_flight_than_the_window_allows(stage: Stage) -> None:
    rows = [row(n, f"{n} accepted") for n in range(40)]
    rows.append(row(40, *(f"held {n} rejected" for n in range(20))))
    running = asyncio.create_task(stage.run(stage.campaign(*rows, window=5)))
    await eventually(lambda: len(stage.judge.running) == 5)
    stage.judge.let_go()
    assert await running == "finished"
    assert stage.judge.most == 5
    assert stage.verdicts() == 40 * ["accepted"] + 20 * ["rejected"]
    assert [record["sample"] for record in stage.records()[40:]] == list(range(20))
    assert stage.observer.updates[-1] == Progress(41, 41, {"accepted": 40, "rejected": 20})


async def test_large_texts_are_few_at_a_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_IN_FLIGHT_BYTES", 1000)
    rows = [row(n, f"held {n}{400 * 'x'} accepted") for n in range(12)]
    running = asyncio.create_task(stage.run(stage.campaign(*rows)))
    # The third was begun while the first two were not yet more than that.
    await eventually(lambda: len(stage.judge.running) == 3)
    stage.judge.let_go()
    await running
    assert stage.judge.most == 3


async def test_records_are_in_the_order_of_rows(stage: Stage) -> None:
    rows = [row(1, "held accepted"), row(2, "rejected"), row(3, "incomplete")]
    running = asyncio.create_task(stage.run(stage.campaign(*rows, window=8)))
    await eventually(
        lambda: bool(
            stage.observer.updates and sum(stage.observer.updates[-1].counts.values()) == 2
        )
    )
    stage.judge.let_go()
    await running
    assert [record["id"] for record in stage.records()] == [1, 2, 3]


async def test_blank_lines_are_no_rows(stage: Stage) -> None:
    campaign = stage.campaign(row(1, "accepted"), row(2, "held accepted"), row(3, "rejected"))
    data = Path(campaign.data)
    data.write_text("\n" + data.read_text().replace("\n", "\n \n\n"))
    running = asyncio.create_task(stage.run(campaign))
    updates = stage.observer.updates
    await eventually(
        lambda: updates and updates[-1] == Progress(3, 2, {"accepted": 1, "rejected": 1})
    )
    stage.observer.command = "pause"
    await running
    updates.clear()
    stage.observer.command = "run"
    stage.judge.let_go()
    assert await stage.run(campaign) == "finished"
    assert updates[-1] == Progress(3, 3, {"accepted": 2, "rejected": 1})
    assert [record["line"] for record in stage.records()] == [2, 5, 8]


async def test_bad_rows_stand_in_the_results_and_stop_nothing(stage: Stage) -> None:
    campaign = stage.campaign(
        row(1, "accepted"),
        {"id": 2},
        row(1, "rejected"),
        "no object",
        row(3, "\0"),
        row(4, "rejected"),
    )
    await stage.run(campaign)
    assert stage.verdicts() == ["accepted", None, None, None, None, "rejected"]
    told = [(record["line"], record["error"]) for record in stage.records() if "error" in record]
    assert sorted(stage.observer.bad_rows) == told
    assert told[1] == (3, "line 1 has the same id")
    assert [line for line, _ in told] == [2, 3, 4, 5]


async def test_a_wrong_field_name_stops_before_anything_is_written(stage: Stage) -> None:
    rows = [{"id": n, "proof": "accepted"} for n in range(3)]
    campaign = stage.campaign(*rows)
    with pytest.raises(UsageError) as raised:
        await stage.run(campaign)
    assert str(raised.value) == (
        f"{campaign.data} has no field 'code' in its first 3 rows, but 'id', 'proof'; "
        "name the right one with --code-field"
    )
    assert [path.name for path in stage.folder.iterdir()] == ["data.jsonl"]
    with pytest.raises(UsageError, match="no field 'of' in its first 3 rows"):
        await stage.run(replace(campaign, fields=Fields(code="proof", problem="of")))
    assert await stage.run(replace(campaign, fields=Fields(code="proof"))) == "finished"
    assert stage.verdicts() == 3 * ["accepted"]


async def test_a_field_that_comes_later_is_not_wrong(stage: Stage) -> None:
    rows = [{"id": n} for n in range(FIRST_ROWS - 1)]
    await stage.run(stage.campaign(*rows, row(100, "accepted")))
    assert stage.verdicts() == [None] * (FIRST_ROWS - 1) + ["accepted"]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [25, 26])
async def test_a_wrong_environment_is_warned_of_once(stage: Stage, wrong: int) -> None:
    codes = ["import Mathlib rejected"] * wrong + ["rejected"] * (50 - wrong)
    rows = [row(n, code) for n, code in enumerate([*codes, *(["import A rejected"] * 60)])]
    await stage.run(stage.campaign(*rows, window=1))
    expected = (
        "26 of the first 50 results have the reason unknown_import in the environment 'default': "
        "unknown module prefix 'Mathlib' No directory 'Mathlib' in the search path; is it the "
        "environment that the data is written for?"
    )
    assert stage.observer.warnings == ([expected] if wrong > 25 else [])
    assert Counter(record["reason"] for record in stage.records())["unknown_import"] == wrong + 60


async def test_a_small_campaign_in_a_wrong_environment_warns_at_its_end(stage: Stage) -> None:
    await stage.run(stage.campaign(row(1, "import Mathlib rejected"), row(2, "import A rejected")))
    (warning,) = stage.observer.warnings
    assert warning.startswith("2 of the first 2 results have the reason unknown_import")


async def test_a_library_that_cannot_be_read_stops_the_campaign(stage: Stage) -> None:
    campaign = stage.campaign(row(1, "accepted"), row(2, "import Broken accepted"), window=1)
    with pytest.raises(ToolchainError, match=r"line 2 imports .* Broken\.olean; mend the library"):
        await stage.run(campaign)
    stage.judge.is_broken = False
    assert await stage.run(campaign) == "finished"
    assert stage.verdicts() == ["accepted", "accepted"]


async def test_rows_with_a_target_are_verified_against_it(stage: Stage) -> None:
    campaign = stage.campaign(
        row(1, "p accepted", "q accepted", goal="p"),
        row(2, "p accepted"),
        row(3, "p accepted", goal=7),
    )
    await stage.run(replace(campaign, fields=Fields(target="goal")))
    assert stage.verdicts() == ["accepted", "rejected", None, None]
    proved, other, missing, odd = stage.records()
    assert (proved["failed"], proved["reason"]) == ([], None)
    assert other["reason"] == "statement_differs"
    assert other["failed"] == [{"name": "t", "rule": "statement_differs", "text": "expected p"}]
    # Without its target, a row is not checked by an easier rule.
    assert missing["error"] == "the field 'goal' is missing"
    assert odd["error"] == "the field 'goal' is a number; it must be a text"


class Verifier(AsyncLeanQClient):
    """Gives the verdict that a proof names, and keeps what it was asked."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.asked: dict[str, str] = {}

    async def verify(self, target: Any, code: Any, *_: Any, **options: Any) -> Reply:
        self.asked[options["request_id"]] = code
        verdict: Any = code.split()[-1]
        return Reply(verdict)


async def test_an_answer_is_read_as_rewards_read_it(stage: Stage) -> None:
    """All that may be its proof is tried, until one proves the statement."""

    def answer(*ends: str) -> str:
        blocks = [f"```lean\ntheorem t : p := h{n} {end}\n```" for n, end in enumerate(ends)]
        return "\nOr:\n".join(blocks)

    statement = "theorem t : p := by sorry"
    answers = {
        "accepted": answer("accepted", "rejected", "rejected"),
        "rejected": answer("rejected", "rejected"),
        "timeout": answer("rejected", "timeout", "rejected"),
    }
    campaign = stage.campaign(
        *(row(n, each, goal=statement) for n, each in enumerate(answers.values()))
    )
    campaign = replace(campaign, fields=Fields(target="goal", parts=True))
    client = Verifier(stage.settings)
    assert await campaign.run(client, stage.observer) == "finished"
    assert stage.verdicts() == list(answers)
    assert len(client.asked) == 3 + 2 + 3
    # The record is about the text that decided.
    traces = list(of_campaign(campaign.out, None, Counter()))
    assert [trace["text"].split()[-1] for trace in traces] == list(answers)


# First success


async def test_problems_without_a_success_are_counted_also_when_resumed(stage: Stage) -> None:
    rows = [
        row(1, "rejected", "accepted"),
        row(2, "rejected"),
        row(3, "held accepted"),
        {"id": 4, "code": 7},
    ]
    campaign = stage.campaign(*rows, first_success=True)
    running = asyncio.create_task(stage.run(campaign))
    updates = stage.observer.updates
    await eventually(lambda: bool(updates) and updates[-1].rows == 3)
    assert updates[-1].unsolved == 2
    stage.observer.command = "pause"
    assert await running == "paused"
    stage.observer.command = "run"
    stage.judge.let_go()
    assert await stage.run(campaign) == "finished"
    assert updates[-1].unsolved == 1
    Path(campaign.out).unlink()
    assert await stage.run(replace(campaign, plan=Plan())) == "finished"
    assert updates[-1].unsolved is None


@pytest.mark.parametrize("listed", [True, False])
async def test_a_success_ends_the_other_attempts(stage: Stage, listed: bool) -> None:
    codes = ("held 1 accepted", "held 2 accepted", "accepted", "3 accepted", "4 rejected")
    rows = [row(1, *codes)] if listed else [row(n, c, of="p") for n, c in enumerate(codes)]
    rows.append(row(9, "rejected", of="q"))
    problem = None if listed else "of"
    campaign = stage.campaign(*rows, first_success=True, window=3, problem=problem)
    await stage.run(campaign)
    # Those that had begun are stopped, and the others never begin.
    assert sorted(stage.judge.stopped) == [b"held 1 accepted", b"held 2 accepted"]
    assert len(stage.judge.started) == 4
    assert stage.verdicts() == [
        *("cancelled", "cancelled", "accepted", "cancelled", "cancelled", "rejected")
    ]


async def test_attempts_after_a_success_of_long_ago_are_not_sent(stage: Stage) -> None:
    rows = [row(1, "accepted", of="p"), row(2, "rejected", of="q"), row(3, "rejected", of="p")]
    await stage.run(stage.campaign(*rows, first_success=True, window=1, problem="of"))
    assert stage.verdicts() == ["accepted", "rejected", "cancelled"]
    assert stage.judge.started == [b"accepted", b"rejected"]


class Gun(AsyncLeanQClient):
    """Lets ``first`` succeed in the moment in which ``second`` has begun, and the next is sent."""

    async def check(self, code: str, **_: Any) -> Reply:
        if code == "first":
            self.fired = asyncio.get_running_loop().create_future()
            await self.fired
            return Reply("accepted")
        if code == "second":
            self.fired.set_result(None)
        return await asyncio.get_running_loop().create_future()


async def test_an_attempt_that_was_just_sent_when_another_succeeds(stage: Stage) -> None:
    campaign = stage.campaign(row(1, "first", "second", "third"), first_success=True)
    assert await campaign.run(Gun(stage.settings), stage.observer) == "finished"
    assert stage.verdicts() == ["accepted", "cancelled", "cancelled"]


# Ends before the end


async def test_what_was_in_flight_is_submitted_again_and_runs_once(stage: Stage) -> None:
    """A coordinator that vanishes withdraws nothing, and its successor waits for the same runs."""
    rows = [row(n, f"{n} accepted") for n in range(5)] + [row(9, "held accepted")]
    campaign = stage.campaign(*rows)
    async with AsyncLeanQClient(stage.settings) as client:
        running = asyncio.create_task(campaign.run(client, stage.observer))
        await eventually(lambda: b"held accepted" in stage.judge.running)
        await eventually(
            lambda: (
                stage.observer.updates[-1].counts == {"accepted": 5}
                if stage.observer.updates
                else False
            )
        )
        # As SIGKILL would: neither the journal nor the queue hears of it.
        stash = {p: p.read_bytes() for p in stage.folder.iterdir() if p.name != "data.jsonl"}
        await client.close(withdraw=False)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    for path, content in stash.items():
        path.write_bytes(content)
    stage.judge.let_go()
    assert await stage.run(campaign) == "finished"
    assert stage.verdicts() == 6 * ["accepted"]
    assert Counter(stage.judge.started).most_common(1)[0][1] == 1


@pytest.mark.parametrize("command", ["pause", "cancel"])
async def test_a_paused_or_cancelled_campaign_withdraws_and_can_be_resumed(
    stage: Stage, command: Command
) -> None:
    campaign = stage.campaign(row(1, "accepted"), row(2, "held accepted"))
    running = asyncio.create_task(stage.run(campaign))
    await eventually(lambda: b"held accepted" in stage.judge.running)
    # What has ended is told of, too.
    await eventually(lambda: stage.observer.counts == {"accepted": 1})
    stage.observer.command = command
    assert await running == {"pause": "paused", "cancel": "cancelled"}[command]
    await eventually(lambda: stage.judge.stopped == [b"held accepted"])
    assert not Path(campaign.out).exists()
    assert stage.observer.resumed == []
    stage.observer.command = "run"
    stage.judge.let_go()
    assert await stage.run(campaign) == "finished"
    (found,) = stage.observer.resumed
    told = r"1 of 2 rows have results; at the pace so far the rest takes ([\d.]+) s"
    match = re.fullmatch(told, found)
    assert match, found
    assert float(match[1]) < 60
    assert stage.verdicts() == ["accepted", "accepted"]
    assert Counter(stage.judge.started) == {b"accepted": 1, b"held accepted": 2}


async def test_a_resumed_campaign_says_what_is_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = stage.campaign(row(0, "accepted"), *({"id": n} for n in range(1, 1200)))
    pace = "; at the pace so far the rest takes 42 s"
    for found, row_s, left in ((1100, 0.42, pace), (1, None, "")):
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "found_rows", found)
            patch.setattr(Journal, "row_s", row_s)
            await stage.run(campaign)
        assert stage.observer.resumed.pop() == f"{found:,} of 1,200 rows have results{left}"
        Path(campaign.out).unlink()


async def test_a_server_that_stays_away_leaves_the_rows_for_later(
    stage: Stage, tmp_path: Path
) -> None:
    with own_server() as server:
        stage.settings = server.settings
        campaign = stage.campaign(row(1, "accepted"), row(2, "held accepted"))
        async with working(server.settings, stage.judge):
            running = asyncio.create_task(stage.run(campaign, unavailable_timeout_s=0.2))
            await eventually(lambda: b"held accepted" in stage.judge.running)
            server.stop()
            with pytest.raises(UnavailableError):
                await running
            server.start()
            stage.judge.let_go()
            assert await stage.run(campaign) == "finished"
    assert stage.verdicts() == ["accepted", "accepted"]
    assert stage.observer.bad_rows == []


async def test_a_disk_that_is_full_leaves_the_rows_for_later(stage: Stage) -> None:
    campaign = stage.campaign(row(1, "held accepted"), row(2, "accepted"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    running = asyncio.create_task(stage.run(campaign))
    await eventually(lambda: b"held accepted" in stage.judge.running)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"out.jsonl.(part) cannot be written"):
            await running
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    stage.judge.let_go()
    assert await stage.run(campaign) == "finished"
    # Nothing was withdrawn, since the next coordinator could not know of it.
    assert stage.verdicts() == ["accepted", "accepted"]
    assert stage.judge.stopped == []
    assert stage.observer.bad_rows == []


async def test_an_environment_that_no_worker_offers(stage: Stage) -> None:
    campaign = stage.campaign(row(1, "accepted"), options={"env": "elsewhere"})
    with pytest.raises(UnknownEnvironmentError, match="elsewhere"):
        await stage.run(campaign)
    assert stage.observer.bad_rows == []


@pytest.mark.slow
async def test_a_campaign_whose_coordinators_all_die_fails(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_FRUITLESS_STARTS", 2)
    campaign = stage.campaign(row(1, "accepted"))
    # A coordinator that ends with an error has not died.
    for _ in range(3):
        with pytest.raises(UnknownEnvironmentError):
            await stage.run(replace(campaign, plan=Plan(options={"env": "elsewhere"})))
    Path(campaign.out + ".part").unlink()
    purpose = campaign.purpose(open_dataset(campaign.data, campaign.fields))
    for _ in range(2):
        Journal(campaign.out, purpose).close()
    with pytest.raises(UsageError, match="has failed: 2 coordinators in a row died"):
        await stage.run(campaign)
