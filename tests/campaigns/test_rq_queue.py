"""Campaigns in RQ without a server: submitted, listed, shown, paused, resumed, cancelled, retried.

RQ's data is in fakeredis and its worker is this process. The coordinator is a script of the test's:
what a real one does, and what becomes of it when it dies, is tested elsewhere with real servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import fakeredis
import pytest
import rq
from rq.serializers import JSONSerializer

from leanq.campaigns import rq_job
from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import End, Progress
from leanq.campaigns.rq_queue import CampaignQueue, Campaigns, queue_name
from leanq.errors import UnavailableError, UsageError

DONE = Progress(2, 2, {"accepted": 1, "timeout": 1})


class Worker(rq.SimpleWorker):
    """RQ's worker that runs jobs in its own process."""

    queue_class = CampaignQueue


class Office:
    """A user who submits campaigns, and a worker that runs those that are due."""

    def __init__(self, folder: Any, connection: Any) -> None:
        self.folder, self.connection = folder, connection
        self.campaigns = Campaigns(connection, "t")
        self.amid: Callable[[str], None] = lambda _id: None
        self.retries: list[bool] = []

    def submit(self, name: str = "a", **how: Any) -> str:
        data = self.folder / f"{name}.jsonl"
        data.write_text('{"id": 1, "code": "x"}\n{"id": 2, "code": "y"}\n')
        return self.campaigns.submit(Campaign(str(data), str(self.folder / name)), **how)

    def work(self) -> None:
        """Runs all campaigns that are due."""
        names = [queue_name("t")]
        worker = Worker(names, connection=self.connection, serializer=JSONSerializer)
        worker.work(burst=True, logging_level="CRITICAL")

    def state(self, id_: str) -> str:
        return self.campaigns.show(id_).state


@pytest.fixture
def office(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    with contextlib.closing(fakeredis.FakeStrictRedis()) as connection:
        made = Office(tmp_path, connection)

        async def run(
            campaign: Campaign, _client: Any, observer: Any, *, retry: bool, name: str
        ) -> End:
            made.retries.append(retry)
            job = rq.get_current_job()
            assert job is not None
            assert name == job.id
            await observer.update(Progress(2, 1, {"accepted": 1}))
            made.amid(job.id)
            ends: dict[str, End] = {"run": "finished", "pause": "paused", "cancel": "cancelled"}
            end = ends[await observer.update(DONE)]
            if end == "finished":
                (tmp_path / campaign.out).write_text("")
            return end

        monkeypatch.setenv("LEANQ_URL", "unix:///-")
        monkeypatch.setattr(rq_job, "AsyncLeanQClient", contextlib.nullcontext)
        monkeypatch.setattr(Campaign, "run", run)
        yield made


def test_a_campaign_is_queued_runs_and_finishes(office: Office) -> None:
    id_ = office.submit()
    assert office.state(id_) == "queued"
    office.amid = lambda id_: assert_running(office, id_)
    office.work()
    status = office.campaigns.show(id_)
    assert (status.state, status.rows, status.total) == ("finished", 2, 2)
    assert status.counts == {"accepted": 1, "timeout": 1}
    assert (status.error, office.retries) == (None, [False])


def assert_running(office: Office, id_: str) -> None:
    assert office.state(id_) == "running"
    assert office.campaigns.show(id_).rows == 1


def test_all_campaigns_are_listed_whatever_their_state(office: Office) -> None:
    finished = office.submit("a")
    office.work()
    cancelled, queued = office.submit("b"), office.submit("c")
    office.campaigns.cancel(cancelled)
    scheduled = office.submit("d", delay_s=3600)
    waiting = office.submit("e", after=[queued])
    assert {each.id: each.state for each in office.campaigns.list()} == {
        finished: "finished",
        cancelled: "cancelled",
        queued: "queued",
        scheduled: "scheduled",
        waiting: "waiting",
    }
    assert office.campaigns.show(waiting).after == [queued]
    status = office.campaigns.show(scheduled)
    assert status.starts_at is not None
    assert 3590 < (status.starts_at - status.submitted_at).total_seconds() < 3610


def test_a_running_campaign_is_paused_and_resumed(office: Office) -> None:
    id_ = office.submit()

    def pause(id_: str) -> None:
        office.campaigns.pause(id_)
        assert office.state(id_) == "pausing"

    office.amid = pause
    office.work()
    assert office.state(id_) == "paused"
    assert office.campaigns.show(id_).counts == DONE.counts
    office.amid = lambda _id: None
    office.work()
    assert office.state(id_) == "paused"
    office.campaigns.resume(id_)
    assert office.state(id_) == "queued"
    office.work()
    assert office.state(id_) == "finished"
    # It resumes from its journal; nothing is checked again.
    assert office.retries == [False, False]


def test_one_that_is_resumed_while_it_is_being_paused_is_requeued(office: Office) -> None:
    id_ = office.submit()
    office.amid = office.campaigns.pause
    office.work()
    # The user's command came when the worker had read the last one, and then the worker died.
    office.connection.hset(f"{queue_name('t')}:{id_}", "command", "")
    assert office.state(id_) == "queued"
    office.campaigns.requeue_all_resumed()
    office.amid = lambda _id: None
    office.work()
    assert office.state(id_) == "finished"


def test_one_is_paused_before_it_starts(office: Office) -> None:
    id_ = office.submit()
    office.campaigns.pause(id_)
    office.work()
    assert (office.state(id_), office.retries) == ("paused", [])
    office.campaigns.resume(id_)
    office.work()
    assert office.state(id_) == "finished"


def test_a_running_campaign_is_cancelled_and_retried(office: Office) -> None:
    id_ = office.submit()
    office.amid = office.campaigns.cancel
    office.work()
    assert office.state(id_) == "cancelled"
    office.amid = lambda _id: None
    office.campaigns.retry(id_)
    office.work()
    assert office.state(id_) == "finished"


def test_a_finished_campaign_is_retried_for_rows_without_a_verdict(office: Office) -> None:
    id_ = office.submit()
    for _ in range(2):
        office.work()
        assert office.state(id_) == "finished"
        office.campaigns.retry(id_)
    office.work()
    assert office.retries == [False, True, True]


def test_a_failed_campaign_keeps_its_error_until_it_is_retried(office: Office) -> None:
    id_ = office.submit()
    data = office.folder / "a.jsonl"
    text = data.read_text()
    data.unlink()
    office.work()
    status = office.campaigns.show(id_)
    assert (status.state, "No such file" in str(status.error)) == ("failed", True)
    data.write_text(text)
    office.campaigns.retry(id_)
    assert office.campaigns.show(id_).error is None
    office.work()
    assert office.state(id_) == "finished"


def test_a_queue_out_of_reach_delays_the_next_start(office: Office) -> None:
    def fail(_id: str) -> None:
        raise UnavailableError("no Redis answers")

    id_ = office.submit()
    office.amid = fail
    office.work()
    status = office.campaigns.show(id_)
    assert (status.state, status.error) == ("scheduled", "no Redis answers")


def test_one_starts_when_those_it_waits_for_have_finished(office: Office) -> None:
    first = office.submit("a")
    second = office.submit("b", after=[first])
    third = office.submit("c", after=[first, second])
    states = lambda: [office.state(each) for each in (first, second, third)]  # noqa: E731
    office.campaigns.pause(first)
    office.work()
    assert states() == ["paused", "waiting", "waiting"]
    office.campaigns.pause(third)
    assert office.state(third) == "paused"
    office.campaigns.resume(third)
    # A cancelled campaign has not finished.
    office.campaigns.cancel(first)
    office.work()
    assert states() == ["cancelled", "waiting", "waiting"]
    office.campaigns.retry(first)
    office.work()
    assert states() == ["finished", "finished", "finished"]
    # One that has finished need not be waited for.
    fourth = office.submit("d", after=[first])
    office.work()
    assert office.state(fourth) == "finished"


def test_a_paused_campaign_is_cancelled_and_retried(office: Office) -> None:
    id_ = office.submit()
    office.amid = office.campaigns.pause
    office.work()
    office.campaigns.cancel(id_)
    assert office.state(id_) == "cancelled"
    office.amid = lambda _id: None
    office.campaigns.retry(id_)
    office.work()
    assert office.state(id_) == "finished"


@pytest.mark.parametrize("died", [False, True])
def test_results_of_changed_data_are_not_retried(office: Office, died: bool) -> None:
    id_ = office.submit()
    office.work()
    if died:
        # A retry that was killed before its first transaction leaves this.
        (office.folder / "a.part").touch()
    (office.folder / "a.jsonl").write_text('{"id": 3, "code": "z"}\n')
    office.campaigns.retry(id_)
    office.work()
    assert "has changed since" in str(office.campaigns.show(id_).error)


@pytest.mark.parametrize(
    ("state", "allowed"),
    [
        ("queued", {"pause", "cancel"}),
        ("scheduled", {"pause", "cancel"}),
        ("paused", {"resume", "cancel"}),
        ("finished", {"retry"}),
        ("cancelled", {"retry"}),
    ],
)
def test_commands_that_a_state_does_not_allow_say_which_do(
    office: Office, state: str, allowed: set[str]
) -> None:
    for command in ("pause", "resume", "cancel", "retry"):
        id_ = office.submit(command, delay_s=3600 if state == "scheduled" else 0)
        if state == "paused":
            office.campaigns.pause(id_)
        elif state == "finished":
            office.work()
        elif state == "cancelled":
            office.campaigns.cancel(id_)
        assert office.state(id_) == state
        if command in allowed:
            getattr(office.campaigns, command)(id_)
        else:
            with pytest.raises(UsageError, match=f"is {state}; expected "):
                getattr(office.campaigns, command)(id_)
        if state != "finished":
            office.connection.flushall()


def test_unknown_campaigns_and_other_jobs_are_no_campaigns(office: Office) -> None:
    other = office.campaigns.queue.enqueue("os.getcwd")
    for id_ in ("nothing", other.id):
        with pytest.raises(UsageError, match="no campaign"):
            office.campaigns.show(id_)
    assert [*office.campaigns.list()] == []
    with pytest.raises(UsageError, match="not both"):
        office.submit(after=["x"], delay_s=1)
