"""What leanq's operations make of each recorded dialogue: verdicts, goals, places, states.

The table, ``transcript_operations.json``, holds what each recording means. A check is the text of
a command behind those of the environments that it was run in, without an audit. What the driver
leaves to Lean itself is ``Lean's``: nothing is left to prove, and the REPL's word for it is not
enough. What is ``completed`` is that as well, unless the REPL is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.lean.sites import Site, check
from support.paths import TRANSCRIPTS

from leanq.lean.recipes import Source, Tactic, record_after, record_id
from leanq.lean.repl.driver import ReplDriver
from leanq.lean.steps.holes import find_holes
from leanq.lean.steps.moves import Move
from leanq.queue.requests import Reply, Request
from leanq.states import States


@dataclass(frozen=True)
class Check:
    """A text, its verdict, the places of messages (a severity's first letter, line and column, and
    those of the end), and its holes with line, column and goal."""

    code: str
    verdict: str
    messages: list[list[Any]] = field(default_factory=list)
    sorries: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """A tactic on the state of this number, in the order in which they came up: of each row the
    state of what is left, then those of its holes. Of its messages the first lines."""

    state: int
    tactic: str
    verdict: str
    goals: list[str] = field(default_factory=list)
    sorries: list[list[Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def read_table() -> dict[str, list[Check | Step]]:
    rows = json.loads(Path(__file__).with_name("transcript_operations.json").read_text())
    return {
        name: [Check(**row) if "code" in row else Step(**row) for row in operations]
        for name, operations in rows.items()
    }


TABLE = read_table()
# Between them messages, holes, and steps of every verdict.
QUICK = {"app_type_mismatch2", "pickle_open_scoped", "proof_branching"}
LEANS = Reply(error="Lean's")


@dataclass
class Trials:
    """In the place of Lean itself, which has other libraries here than the recordings had."""

    async def run(self, _move: Move, _request: Request, _states: States) -> Reply:
        return LEANS


@pytest.mark.skipif(not TRANSCRIPTS.exists(), reason=f"there are no transcripts in {TRANSCRIPTS}")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TABLE]
)
@pytest.mark.parametrize(
    "trust", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "trusting"]
)
async def test_operations(
    site: Site, name: str, trust: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (TRANSCRIPTS / f"{name}.in").exists():
        pytest.skip(f"{name} is not in {TRANSCRIPTS}")
    know = ["--know", str(TRANSCRIPTS), "--only", name]
    driver = await site.standin(*know, trust_steps=trust)
    monkeypatch.setattr(type(driver.opened), "step", Trials().run)
    states: list[str] = []
    for row in TABLE[name]:
        if isinstance(row, Check):
            states += await assert_check(driver, row)
        else:
            states += await assert_step(driver, states, row, trust=trust)


async def assert_check(driver: ReplDriver, row: Check) -> list[str]:
    reply = await driver.run(check(row.code, audit=False))
    # What nothing audited is not accepted, whatever the REPL says of it.
    if row.verdict == "accepted":
        assert (reply.verdict, reply.reason) == ("unjudged", "not_audited")
    else:
        assert reply.verdict == row.verdict
    places = [[m.severity[0], m.line, m.column, m.end_line, m.end_column] for m in reply.messages]
    assert places == row.messages
    assert [[s.line, s.column, s.goal] for s in reply.sorries] == row.sorries
    source = Source(driver.kept.environment.fingerprint, row.code, find_holes(row.code))
    parent = record_id(source.record())
    expected = [record_after(parent, number)[0] for number in range(len(row.sorries))]
    assert [s.state for s in reply.sorries] == expected
    return expected


async def assert_step(
    driver: ReplDriver, states: Sequence[str], row: Step, *, trust: bool
) -> list[str]:
    state = states[row.state]
    reply = await driver.run(Request("step", state=state, tactic=row.tactic))
    if row.verdict in ("Lean's", "completed") and not (trust and row.verdict == "completed"):
        assert reply.error == LEANS.error
        return []
    assert reply.error is None
    assert reply.verdict == ("unjudged" if row.verdict == "completed" else row.verdict)
    assert [m.text.partition("\n")[0] for m in reply.messages] == row.messages
    assert list(reply.goals) == row.goals
    assert [[s.line, s.column, s.goal] for s in reply.sorries] == row.sorries
    made: list[Any] = []
    holes = find_holes(row.tactic)
    if row.goals:
        made.append(record_after(state, Tactic(row.tactic, holes))[0])
    assert reply.state == (made[0] if made else None)
    made += [record_after(state, Tactic(row.tactic, holes, n))[0] for n in range(len(row.sorries))]
    assert [s.state for s in reply.sorries] == made[1:]
    return made
