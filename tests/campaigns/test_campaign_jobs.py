"""Campaigns as jobs of a real RQ, and what is withdrawn from the queue and asked for again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from rq.serializers import JSONSerializer
from support.campaigns.campaigns import Desk, Judge, desk_at
from support.fleets import Recorder, look, serving, until
from support.metrics import parsed, port_in, scrape
from support.servers import own_server
from support.terminals import Process, Terminal, wait_for_line

from leanq.campaigns.campaign import State
from leanq.queue.settings import Settings


@pytest.fixture
def worker(desk: Desk, driver: Recorder) -> Process:
    """One that runs campaigns."""
    return desk.start_worker()


def is_at(desk: Desk, id_: str, rows: int) -> Callable[[], bool]:
    """Whether a campaign says that so many of its rows are done."""
    return lambda: desk.look(id_).rows == rows


def held(driver: Recorder, count: int = 1) -> None:
    until(lambda: len(driver.running) == count)


def finishes(desk: Desk, *ids: str) -> None:
    """Waits for the end, and sees to it that there is one record for each row, in order."""
    for id_ in ids:
        sent = desk.reaches(id_, "finished")
        found = desk.results(id_)
        count = len(Path(sent.campaign.data).read_text().splitlines())
        assert [record["id"] for record in found] == [*range(count)]
        assert (sent.rows, sent.total, sum(sent.counts.values())) == (count,) * 3


def rq_info(desk: Desk) -> str:
    """What RQ's own command shows."""
    url = desk.terminal.environ["LEANQ_URL"]
    command = [sys.executable, "-c", "from rq.cli import main; main()", "info", "--url", url]
    command += ["--serializer", "json", desk.campaigns.queue.name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


class Dashboard:
    """What rq-dashboard shows."""

    def __init__(self, desk: Desk) -> None:
        from rq_dashboard import web
        from rq_dashboard.cli import make_flask_app

        app = make_flask_app(None, None, None, "")
        app.config["RQ_DASHBOARD_REDIS_URL"] = desk.terminal.environ["LEANQ_URL"]
        web.config.serializer = JSONSerializer
        web.setup_rq_connection(app)
        self._client = app.test_client()
        self._queue = desk.campaigns.queue.name

    def jobs(self, registry: str) -> list[str]:
        path = f"/0/data/jobs/{self._queue}/{registry}/10/asc/1.json"
        answer = self._client.get(path)
        assert answer.status_code == 200, answer.data
        return [job["id"] for job in answer.json["jobs"]]

    def job(self, id_: str) -> dict[str, object]:
        answer = self._client.get(f"/0/data/job/{id_}.json")
        assert answer.status_code == 200, answer.data
        return dict(answer.json)


@pytest.mark.slow
def test_any_worker_tells_prometheus_of_all_campaigns(desk: Desk, driver: Recorder) -> None:
    run = ("campaign", "worker", "--metrics-port", "0")
    worker, other = (desk.terminal.start(*run, stdout=subprocess.DEVNULL) for _ in range(2))
    said = "metrics of this campaign worker"
    ports = [port_in(wait_for_line(each.stderr, said)) for each in (worker, other)]
    desk.send("a", "held", "b")
    desk.send("c", options=("--in", "1h"))
    held(driver)
    nowhere = (str(desk.folder / "none.jsonl"), "--out", str(desk.folder / "none.out"))
    desk.reaches(desk.run("submit", *nowhere, "--shape", "plain").strip(), "failed")

    def told(port: int) -> dict[str, float]:
        return parsed(scrape(port)[1])

    until(lambda: told(ports[0])["leanq_campaign_rows"] >= 2)
    for port in ports:
        found = told(port)
        states = {name: found[f'leanq_campaigns{{state="{name}"}}'] for name in get_args(State)}
        assert {name: count for name, count in states.items() if count} == {
            "running": 1,
            "scheduled": 1,
            "failed": 1,
        }
    driver.let_go()


@pytest.mark.slow
def test_without_rqs_server_a_worker_tells_of_its_process_alone(
    terminal: Terminal, settings: Settings
) -> None:
    with own_server() as server, desk_at(terminal, settings, server.settings.url):
        worker = terminal.start("campaign", "worker", "--metrics-port", "0")
        port = port_in(wait_for_line(worker.stderr, "metrics of this campaign worker"))

        def tells() -> bool:
            code, page = scrape(port)
            assert code == 200
            assert "leanq_build_info" in page
            return "leanq_campaign" in page

        assert tells()
        server.stop()
        assert not tells()
        server.start()
        assert tells()


@pytest.mark.slow
def test_from_the_queue_to_the_results(desk: Desk, driver: Recorder, worker: Process) -> None:
    first = desk.send("a", "held", "b")
    second = desk.send("c", "d")
    until(is_at(desk, first, 2))
    assert desk.look(first).state == "running"
    shown = desk.run("list").splitlines()
    assert shown == [
        f"{second}  queued  c1.jsonl: 0 rows",
        f"{first}  running  c0.jsonl: 2 of 3 rows; 2 echoed",
    ]
    told = [json.loads(line) for line in desk.run("list", "--json").splitlines()]
    assert [(each["id"], each["state"], each["rows"]) for each in told] == [
        (second, "queued", 0),
        (first, "running", 2),
    ]
    lines = desk.run("show", first).splitlines()
    assert lines[0] == shown[1]
    assert f"  data      {desk.folder}/c0.jsonl" in lines
    assert f"  results   {desk.folder}/c0.out" in lines
    # As RQ's own tools show it.
    info, dashboard = rq_info(desk), Dashboard(desk)
    assert f"{desk.campaigns.queue.name}" in info
    assert "1 workers, 1 queues" in info
    assert (dashboard.jobs("queued"), dashboard.jobs("started")) == ([second], [first])
    assert "c0.jsonl" in str(dashboard.job(first)["description"])
    driver.let_go()
    finishes(desk, first, second)
    assert Counter(driver.started) == Counter([b"a", b"held", b"b", b"c", b"d"])
    assert {*dashboard.jobs("finished")} == {first, second}
    assert dashboard.job(first)["status"] == "finished"
    (record,) = (json.loads(line) for line in desk.run("show", first, "--json").splitlines())
    assert (record["state"], record["counts"], record["error"]) == ("finished", {"echoed": 3}, None)
    assert not os.path.exists(f"{desk.folder}/c0.out.part")


@pytest.mark.slow
def test_a_running_campaign_is_paused_and_resumed(
    desk: Desk, driver: Recorder, settings: Settings, worker: Process
) -> None:
    id_ = desk.send("a", "held", "b")
    until(is_at(desk, id_, 2))
    assert desk.run("pause", id_).split()[1] in ("pausing", "paused")
    desk.reaches(id_, "paused")
    # What was in flight is withdrawn.
    until(lambda: driver.stopped == [b"held"])
    assert not look(settings).priorities
    assert desk.terminal.run("campaign", "pause", id_).code == 2
    assert f"{id_}  paused" in desk.run("list")
    assert desk.run("resume", id_).split()[1] in ("queued", "running")
    held(driver)
    driver.let_go()
    finishes(desk, id_)
    assert Counter(driver.started) == Counter([b"a", b"b", b"held", b"held"])
    found = "2 of 3 rows have results; at the pace so far the rest takes "
    assert f"\n  resumed   {found}" in desk.run("show", id_)


@pytest.mark.slow
def test_one_is_paused_and_resumed_in_quick_succession(
    desk: Desk, driver: Recorder, worker: Process
) -> None:
    id_ = desk.send("a", "held")
    held(driver)
    for turn in range(6):
        desk.reaches(id_, "running")
        desk.campaigns.pause(id_)
        # Before its coordinator has seen it, or when that is just putting it away.
        if turn % 2:
            until(lambda: driver.running == [])
        desk.campaigns.resume(id_)
        assert desk.look(id_).state not in ("paused", "pausing")
    held(driver)
    driver.let_go()
    finishes(desk, id_)


@pytest.mark.slow
def test_one_is_paused_before_it_starts(desk: Desk, driver: Recorder, worker: Process) -> None:
    running = desk.send("held")
    held(driver)
    queued = desk.send("a")
    later = desk.send("b", options=("--in", "1h"))
    soon = desk.send("c", options=("--in", "1s"))
    assert [desk.look(each).state for each in (queued, later)] == ["queued", "scheduled"]
    assert "starts    20" in desk.run("show", later)
    starts_at = desk.look(later).starts_at
    assert starts_at
    assert 3000 < (starts_at - desk.look(later).submitted_at).total_seconds() < 4200
    for id_ in (queued, later):
        assert desk.run("pause", id_).split()[1] == "paused"
    driver.let_go()
    finishes(desk, running, soon)
    # Its turn has come, and it was put away.
    until(lambda: queued in desk.campaigns.queue.scheduled_job_registry)
    assert desk.look(queued).state == "paused"
    assert desk.run("resume", queued).split()[1] in ("queued", "running", "finished")
    finishes(desk, queued)
    assert desk.run("resume", later).split()[1] == "scheduled"
    assert desk.run("cancel", later).split()[1] == "cancelled"
    assert b"b" not in driver.started


@pytest.mark.slow
def test_one_is_cancelled_and_retried(
    desk: Desk, driver: Recorder, settings: Settings, worker: Process
) -> None:
    running = desk.send("a", "held")
    until(is_at(desk, running, 1))
    queued = desk.send("b")
    assert desk.run("cancel", queued).split()[1] == "cancelled"
    assert desk.run("cancel", running).split()[1] in ("cancelling", "cancelled")
    desk.reaches(running, "cancelled")
    until(lambda: driver.stopped == [b"held"])
    assert not look(settings).priorities
    # What had come is kept.
    assert os.path.exists(f"{desk.folder}/c0.out.part")
    assert not os.path.exists(f"{desk.folder}/c0.out")
    assert b"b" not in driver.started
    driver.let_go()
    for id_ in (running, queued):
        assert desk.run("retry", id_).split()[1] in ("queued", "running", "finished")
    finishes(desk, running, queued)
    assert Counter(driver.started) == Counter([b"a", b"held", b"held", b"b"])


@pytest.mark.slow
def test_only_rows_without_a_verdict_are_checked_again(desk: Desk, settings: Settings) -> None:
    judge = Judge()
    with serving(settings, judge):
        desk.start_worker()
        codes = ("accepted 1", "timeout 2", "rejected 3", "crashed 4")
        id_ = desk.send(*codes, environment="default")
        finishes(desk, id_)
        assert desk.look(id_).counts == {"accepted": 1, "timeout": 1, "rejected": 1, "crashed": 1}
        desk.run("retry", id_)
        finishes(desk, id_)
        assert desk.look(id_).counts["accepted"] == 3
    found = [record["verdict"] for record in desk.results(id_)]
    assert found == ["accepted", "accepted", "rejected", "accepted"]
    assert Counter(judge.started) == Counter(
        {b"accepted 1": 1, b"timeout 2": 2, b"rejected 3": 1, b"crashed 4": 2}
    )
