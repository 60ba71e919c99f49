"""The soak of the sandbox in a short form."""

from __future__ import annotations

import pytest
from soak.walls_soak import Tally, storm
from support.lean.sites import Site


@pytest.mark.slow
async def test_nothing_gets_out_and_nothing_stays(site: Site) -> None:
    tally = Tally()
    await storm(site, 40, 5, tally)
    assert tally.wrong == []
    assert tally.verdicts.total() == 80
