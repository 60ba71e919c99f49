"""Says when a consumer claims: one state, which named events alone change.

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

In an empty cell the event cannot happen; ``=`` changes nothing. A wake-up is never lost: after
``notified`` a claim stays due until one has been sent after it.

Two facts stand beside the demand:

- ``listening``: the listener waits for the environments' wake-ups. A worker without a free slot
leaves them to idle workers, so a request that ends there makes a claim due.
- ``in_doubt``: the server may believe that this worker holds other requests than it does.
``reconcile`` settles that.
"""

from __future__ import annotations

from enum import Enum, auto


class Demand(Enum):
    """Says whether a claim is due; the module's table explains each value."""

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
    """The state of one consumer; a new one has a claim due."""

    def __init__(self) -> None:
        self.demand = Demand.DUE
        self.listening = True
        self.in_doubt = False

    @property
    def claim_is_due(self) -> bool:
        return self.demand in (Demand.DUE, Demand.BACKLOG)

    @property
    def claims_ahead(self) -> bool:
        """Returns whether to claim more requests than slots are free, if requests are short."""
        return self.demand is Demand.BACKLOG

    def notified(self) -> None:
        """Notes that requests may wait: a wake-up came, or a renewal saw some."""
        self.demand = _AFTER_NOTICE.get(self.demand, self.demand)

    def request_ended(self) -> None:
        """Notes that a request has ended here, and its slot is free."""
        # A listener that has heard nothing since the last claim need not ask again.
        if self.demand is not Demand.QUIET or not self.listening:
            self.notified()

    def claim_sent(self) -> None:
        """Notes that a claim is under way; it may not see what arrives from here on."""
        assert self.claim_is_due, f"a claim was sent in {self.demand}"
        self.demand = Demand.CLAIMING

    def claim_answered(self, *, got_all: bool, ask_again: bool, expect_more: bool) -> None:
        """Notes the answer to the claim.

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
        """Notes that a call failed, which may have happened all the same."""
        self.demand = Demand.DUE
        self.in_doubt = True

    def compared(self, *, equal: bool) -> None:
        """Notes whether the server's count of this worker's requests equals the worker's own."""
        self.in_doubt = not equal

    def should_listen_again(self, available: int) -> bool:
        """Returns whether to call the listener back, which left the wake-ups to others."""
        return not self.listening and available > 0 and not self.claim_is_due
