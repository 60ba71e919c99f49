"""The soak of the fork server in a short form."""

from __future__ import annotations

import pytest
from soak.fork_soak import Tally, storm
from support.lean.sites import Site


@pytest.mark.slow
@pytest.mark.timeout(480)
async def test_verdicts_and_zygotes_stay_what_they_are(site: Site) -> None:
    tally = Tally()
    await storm(site, 200, 3, tally)
    assert tally.wrong == []
    assert tally.verdicts.total() == 200
    assert tally.kills > 0
