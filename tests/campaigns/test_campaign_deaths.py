"""Campaigns whose coordinators, workers and servers die are resumed, and check nothing twice."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator

import pytest
import rq
from rq.command import send_shutdown_command
from support.campaigns.campaigns import (
    RESUMED_S,
    Desk,
    coordinator_of,
    desk_at,
    has_ended,
    start_again,
    stop_worker,
)
from support.fleets import Recorder, look, serving, until
from support.servers import Server, own_server
from support.terminals import Terminal, ended

from leanq.queue.settings import Settings

pytestmark = pytest.mark.slow

ROWS = [f"row {number}" for number in range(20)]
HELD = [f"held {number}" for number in range(3)]
KEPT = ("--appendonly", "yes")


@pytest.fixture
def stored(terminal: Terminal) -> Iterator[Server]:
    """A server that keeps what it knew when it is started again."""
    with own_server(*KEPT) as made:
        yield made


def restart(server: Server) -> None:
    server.stop()
    start_again(server)


def amid(desk: Desk, driver: Recorder) -> str:
    """Sends a campaign that is then in the middle: what has come is in its journal."""
    id_ = desk.send(*ROWS, *HELD)
    until(lambda: desk.look(id_).rows == len(ROWS) and len(driver.running) == len(HELD))
    return id_


def finishes(desk: Desk, driver: Recorder, id_: str) -> None:
    """Lets a campaign end; no row was checked twice, for what is in flight is waited for."""
    driver.let_go()
    desk.reaches(id_, "finished")
    assert [record["id"] for record in desk.results(id_)] == [*range(len(ROWS + HELD))]
    assert Counter(driver.started) == Counter(row.encode() for row in ROWS + HELD)


@pytest.mark.slow
def test_a_coordinator_is_killed(desk: Desk, driver: Recorder, settings: Settings) -> None:
    worker = desk.start_worker()
    id_ = amid(desk, driver)
    for _ in range(2):
        coordinator = coordinator_of(worker)
        os.kill(coordinator, signal.SIGKILL)
        coordinator_of(worker, after=coordinator)
        desk.reaches(id_, "running")
        # Its progress is not lost.
        assert desk.look(id_).rows == len(ROWS)
    finishes(desk, driver, id_)
    assert look(settings).counters["submitted"] == len(ROWS + HELD)


@pytest.mark.slow
def test_a_worker_is_killed(desk: Desk, driver: Recorder) -> None:
    worker = desk.start_worker()
    id_ = amid(desk, driver)
    coordinator = coordinator_of(worker)
    # Another one was killed between RQ's list and its registry, so that this is in neither.
    queue = desk.campaigns.queue
    taken = desk.send()
    desk.connection.lmove(queue.key, queue.intermediate_queue_key)
    other = desk.start_worker()
    worker.kill()
    until(lambda: has_ended(coordinator))
    # The other worker finds out by itself.
    desk.reaches(taken, "finished")
    coordinator_of(other)
    finishes(desk, driver, id_)


@pytest.mark.slow
def test_a_worker_is_stopped(desk: Desk, driver: Recorder) -> None:
    worker = desk.start_worker()
    id_ = amid(desk, driver)
    coordinator = coordinator_of(worker)
    assert "fail" not in stop_worker(worker)
    assert has_ended(coordinator)
    assert desk.look(id_).state == "queued"
    desk.start_worker()
    finishes(desk, driver, id_)


@pytest.mark.slow
def test_a_worker_obeys_shutdown_commands_of_rq(desk: Desk, driver: Recorder) -> None:
    worker = desk.start_worker()
    (name,) = (worker.name for worker in rq.Worker.all(queue=desk.campaigns.queue))
    send_shutdown_command(desk.connection, name)
    assert ended(worker).code == 0


@pytest.mark.slow
def test_a_worker_out_of_work_is_stopped(desk: Desk, driver: Recorder) -> None:
    worker = desk.start_worker()
    stop_worker(worker)
    assert desk.run("worker", "--burst") == ""


@pytest.mark.slow
def test_the_server_is_restarted(terminal: Terminal, stored: Server) -> None:
    driver = Recorder()
    with desk_at(terminal, stored.settings) as desk, serving(stored.settings, driver):
        desk.start_worker()
        id_ = amid(desk, driver)
        restart(stored)
        finishes(desk, driver, id_)


@pytest.mark.slow
def test_rqs_server_is_away(
    terminal: Terminal, stored: Server, settings: Settings, driver: Recorder
) -> None:
    """The campaign goes on without it, and is finished when it is back."""
    with desk_at(terminal, settings, stored.settings.url) as desk:
        worker = desk.start_worker()
        id_ = amid(desk, driver)
        coordinator = coordinator_of(worker)
        stored.stop()
        part = desk.folder / "c0.out.part"
        driver.let_go()
        until(lambda: not part.exists(), RESUMED_S)
        # RQ cannot know yet, as its server is down.
        until(lambda: has_ended(coordinator), 2 * RESUMED_S)
        start_again(stored)
        finishes(desk, driver, id_)


@pytest.mark.slow
def test_rqs_server_goes_and_the_worker_is_stopped(
    terminal: Terminal, stored: Server, settings: Settings, driver: Recorder
) -> None:
    with desk_at(terminal, settings, stored.settings.url) as desk:
        worker, idle = desk.start_worker(), desk.start_worker()
        id_ = amid(desk, driver)
        stored.stop()
        # Both at once, as each tries for a while to tell the server.
        for each in (worker, idle):
            each.send_signal(signal.SIGTERM)
        assert [ended(each).code for each in (worker, idle)] == [0, 0]
        start_again(stored)
        desk.start_worker()
        finishes(desk, driver, id_)


@pytest.mark.slow
def test_one_is_resumed_and_the_worker_that_pauses_it_dies(desk: Desk, driver: Recorder) -> None:
    desk.start_worker()
    id_ = amid(desk, driver)
    desk.run("pause", id_)
    until(lambda: id_ in desk.campaigns.queue.scheduled_job_registry)
    # As if the worker had died before it looked for the user's command.
    desk.connection.hset(f"{desk.campaigns.queue.name}:{id_}", "command", "")
    assert desk.look(id_).state != "paused"
    desk.reaches(id_, "running")
    driver.let_go()
    desk.reaches(id_, "finished")
    assert [record["id"] for record in desk.results(id_)] == [*range(len(ROWS + HELD))]


@pytest.mark.slow
def test_one_whose_coordinators_all_die_fails(desk: Desk, driver: Recorder) -> None:
    worker = desk.start_worker()
    id_ = desk.send(*HELD)
    until(lambda: len(driver.running) == len(HELD))
    stop_worker(worker)
    # As if the last twenty had been killed as well.
    with contextlib.closing(sqlite3.connect(f"{desk.folder}/c0.out.part")) as journal, journal:
        journal.execute("UPDATE meta SET value = '20' WHERE name = 'fruitless_starts'")
    desk.start_worker()
    error = "the campaign has failed: 20 coordinators in a row died without a single result"
    assert desk.reaches(id_, "failed").error == error
    assert f"{id_}  failed ({error})" in desk.run("list")
    driver.let_go()
    desk.run("retry", id_)
    desk.reaches(id_, "finished")
