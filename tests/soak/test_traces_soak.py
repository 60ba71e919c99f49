"""The soak of traces in a short form."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.traces_soak import soak

from leanq.lean.environment import Environment


@pytest.mark.slow
def test_rows_of_a_campaign_have_the_same_verdicts_again(core: Environment, cache: Path) -> None:
    outcome = soak(4, 5, cache)
    assert outcome.faults == []
    assert outcome.verdicts == {"accepted": 12, "rejected": 4, "incomplete": 4}
