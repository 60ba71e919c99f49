"""The soak of campaigns in a short form."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.campaign_soak import Plan, soak

from leanq.lean.environment import Environment


@pytest.mark.slow
def test_a_disturbed_campaign_ends_as_an_undisturbed_one(core: Environment, cache: Path) -> None:
    kinds = ("coordinator", "server")
    outcome = soak(Plan(60, 2, 7, 60.0, kinds, window=8), cache)
    assert outcome.faults == []
    assert [kind for kind, _, _ in outcome.resumed] in ([*kinds], [*reversed(kinds)])
    assert {"accepted", "rejected", "incomplete"} <= outcome.verdicts.keys()
