"""The state that says when a consumer claims, without a server."""

from __future__ import annotations

import re

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from leanq.consumer import claim_state
from leanq.consumer.claim_state import ClaimState, Demand

ANSWERS = {
    "claim_answered, all that was wanted came": (True, False, False),
    "claim_answered, ask again": (False, True, False),
    "claim_answered, more is to be expected": (False, False, True),
    "claim_answered, else": (False, False, False),
}


def happen(state: ClaimState, event: str) -> None:
    """Applies an event as the table of the module names it."""
    name, _, case = event.partition(", ")
    if name == "request_ended":
        state.listening = case == "listening"
        state.request_ended()
    elif name == "claim_answered":
        got_all, ask_again, expect_more = ANSWERS[event]
        state.claim_answered(got_all=got_all, ask_again=ask_again, expect_more=expect_more)
    else:
        getattr(state, name)()


def table() -> list[tuple[str, Demand, str]]:
    """(event, demand before, what the cell says) for each cell of the second table."""
    assert claim_state.__doc__
    rows = [line.strip("| ").split("|") for line in claim_state.__doc__.splitlines() if "|" in line]
    cells = [[cell.strip().replace("``", "") for cell in row] for row in rows]
    (start,) = (number for number, row in enumerate(cells) if row[0] == "event")
    demands = [Demand[name] for name in cells[start][1:]]
    body = cells[start + 2 :]
    # An empty cell at the end of a line was stripped away with its bar.
    return [
        (row[0], demand, row[column] if column < len(row) else "")
        for row in body
        for column, demand in enumerate(demands, 1)
    ]


@pytest.mark.parametrize(("event", "before", "after"), table())
def test_the_table_is_what_happens(event: str, before: Demand, after: str) -> None:
    state = ClaimState()
    state.demand = before
    if not after:
        with pytest.raises(AssertionError, match=re.escape(str(before))):
            happen(state, event)
        return
    happen(state, event)
    assert state.demand is (before if after == "=" else Demand[after])


def test_the_table_has_all_events_and_demands() -> None:
    cells = table()
    assert {before for _, before, _ in cells} == set(Demand)
    methods = {"notified", "request_ended", "claim_sent", "claim_answered", "disconnected"}
    assert {event.partition(",")[0] for event, _, _ in cells} == methods
    assert len(cells) == 9 * len(Demand)


class Consuming(RuleBasedStateMachine):
    """Any order of events that a consumer can meet; what must hold in all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClaimState()
        # What the demand has to answer for: a notice since the last claim was sent.
        self.owed = True
        self.under_way = False

    @rule()
    def notified(self) -> None:
        self.state.notified()
        self.owed = True

    @rule()
    def ended(self) -> None:
        expected = self.state.demand is Demand.EXPECTING or not self.state.listening
        self.state.request_ended()
        self.owed = self.owed or expected

    @rule(listening=st.booleans())
    def listens(self, listening: bool) -> None:
        self.state.listening = listening

    @precondition(lambda self: self.state.claim_is_due)
    @rule()
    def sent(self) -> None:
        self.state.claim_sent()
        self.owed, self.under_way = False, True

    @precondition(lambda self: self.under_way)
    @rule(got_all=st.booleans(), ask_again=st.booleans(), expect_more=st.booleans())
    def answered(self, got_all: bool, ask_again: bool, expect_more: bool) -> None:
        self.state.claim_answered(got_all=got_all, ask_again=ask_again, expect_more=expect_more)
        self.under_way = False
        assert self.state.claims_ahead == got_all
        if got_all or ask_again:
            assert self.state.claim_is_due

    @rule()
    def disconnected(self) -> None:
        self.state.disconnected()
        self.under_way = False
        assert self.state.claim_is_due
        assert self.state.in_doubt

    @rule(equal=st.booleans())
    def compared(self, equal: bool) -> None:
        self.state.compared(equal=equal)
        assert self.state.in_doubt != equal

    @rule()
    def reconciled(self) -> None:
        self.state.compared(equal=True)
        assert not self.state.in_doubt

    @invariant()
    def no_notice_is_lost(self) -> None:
        if self.owed:
            assert self.state.claim_is_due or self.state.demand is Demand.RECLAIMING

    @invariant()
    def one_claim_at_a_time(self) -> None:
        claiming = self.state.demand in (Demand.CLAIMING, Demand.RECLAIMING)
        assert claiming == self.under_way

    @invariant()
    def the_listener_is_called_back_only_when_it_helps(self) -> None:
        if self.state.should_listen_again(available=1):
            assert not self.state.listening
            assert not self.state.claim_is_due
        assert not self.state.should_listen_again(available=0)


test_any_order_of_events = Consuming.TestCase
