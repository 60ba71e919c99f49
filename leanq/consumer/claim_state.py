"""When a consumer claims: one state, changed by named events and by nothing else.

``Demand`` says whether a claim is due:

| demand | meaning |
| --- | --- |
| QUIET | no claim is due; the wake-up will say when there is more |
| EXPECTING | no claim is due before one of the running requests ends |
| DUE | a claim is due |
| BACKLOG | a claim is due, and the last one left requests behind: claim ahead of free slots too |
| CLAIMING | a claim is under way |
| RECLAIMING | a claim is under way, and another one is due after it |

| event | QUIET | EXPECTING | DUE | BACKLOG | CLAIMING | RECLAIMING |
| --- | --- | --- | --- | --- | --- | --- |
| ``notified`` | DUE | DUE | = | = | RECLAIMING | = |
| ``request_ended``, listening | = | DUE | = | = | RECLAIMING | = |
| ``request_ended``, not listening | DUE | DUE | = | = | RECLAIMING | = |
| ``claim_sent`` | | | CLAIMING | CLAIMING | | |
| ``claim_answered``, all that was wanted came | | | | | BACKLOG | BACKLOG |
| ``claim_answered``, ask again | | | | | DUE | DUE |
| ``claim_answered``, more is to be expected | | | | | EXPECTING | DUE |
| ``claim_answered``, else | | | | | QUIET | DUE |
| ``disconnected`` | DUE | DUE | DUE | DUE | DUE | DUE |

An empty cell is an event that cannot happen then, ``=`` one that changes nothing. A wake-up is
never lost: after ``notified`` a claim stays due until one has been sent after it.

Two facts stand beside the demand. ``listening``: whether the listener waits for the environments'
wake-ups; a worker without a free slot leaves them to idle workers, so what ends there makes a
claim due. ``in_doubt``: whether the server may believe that this worker holds other requests than
it does, which ``reconcile`` settles.
"""

from __future__ import annotations

from enum import Enum, auto


class Demand(Enum):
    """Whether a claim is due; the table is at the top of the module."""

    QUIET = auto()
    EXPECTING = auto()
    DUE = auto()
    BACKLOG = auto()
    CLAIMING = auto()
    RECLAIMING = auto()


_AFTER_NOTICE = {
    Demand.QUIET: Demand.DUE,
    Demand.EXPECTING: Demand.DUE,
    Demand.CLAIMING: Demand.RECLAIMING,
}


class ClaimState:
    """The state of one consumer; a new one has a claim due.

    Attributes:
        demand: whether a claim is due.
        listening: whether the listener waits for the environments' wake-ups.
        in_doubt: whether to reconcile with the server.
    """

    def __init__(self) -> None:
        self.demand = Demand.DUE
        self.listening = True
        self.in_doubt = False

    @property
    def claim_is_due(self) -> bool:
        """Returns whether a claim is to be sent, as soon as there are free slots."""
        return self.demand in (Demand.DUE, Demand.BACKLOG)

    @property
    def claims_ahead(self) -> bool:
        """Returns whether to claim more requests than slots are free, if requests are short."""
        return self.demand is Demand.BACKLOG

    def notified(self) -> None:
        """Requests may wait: a wake-up, a renewal that saw some."""
        self.demand = _AFTER_NOTICE.get(self.demand, self.demand)

    def request_ended(self) -> None:
        """A request has ended here, and its slot is free."""
        # A listener that has heard nothing since the last claim need not ask again.
        if self.demand is not Demand.QUIET or not self.listening:
            self.notified()

    def claim_sent(self) -> None:
        """A claim is under way, and may not see what arrives from here on."""
        assert self.claim_is_due, f"a claim was sent in {self.demand}"
        self.demand = Demand.CLAIMING

    def claim_answered(self, *, got_all: bool, ask_again: bool, expect_more: bool) -> None:
        """The claim was answered.

        Args:
            got_all: as many requests came as were wanted, so others may be left.
            ask_again: a quarantined request waits until all has ended here.
            expect_more: a claim should go with the call that settles the next request.
        """
        again = self.demand is Demand.RECLAIMING
        assert again or self.demand is Demand.CLAIMING, f"a claim was answered in {self.demand}"
        if got_all:
            self.demand = Demand.BACKLOG
        elif ask_again or again:
            self.demand = Demand.DUE
        else:
            self.demand = Demand.EXPECTING if expect_more else Demand.QUIET

    def disconnected(self) -> None:
        """A call failed, and may have happened all the same."""
        self.demand = Demand.DUE
        self.in_doubt = True

    def compared(self, *, equal: bool) -> None:
        """The server said how many requests this worker holds: as many as it does, or not."""
        self.in_doubt = not equal

    def reconciled(self) -> None:
        """Both sides agree on what this worker holds."""
        self.in_doubt = False

    def should_listen_again(self, available: int) -> bool:
        """Whether the listener, which left the wake-ups to others, should be called back."""
        return not self.listening and available > 0 and not self.claim_is_due
