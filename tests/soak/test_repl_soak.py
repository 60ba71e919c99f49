"""The soak of the repl driver in a short form."""

from __future__ import annotations

import pytest
from soak.repl_soak import Tally, storm
from support.lean.sites import Site

from leanq.queue.settings import Settings


@pytest.mark.slow
@pytest.mark.timeout(480)
async def test_every_request_is_answered_rightly(settings: Settings, site: Site) -> None:
    tally = Tally()
    await storm(settings, site, 1000, 7, tally)
    assert tally.wrong == []
    assert tally.verdicts.total() >= 1000
    # Some have crashed and some were replaced, or this has shown nothing.
    assert len(tally.processes) > 6
