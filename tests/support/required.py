"""What tests cannot do without."""

from __future__ import annotations

import os

import pytest

CI = os.environ.get("CI") == "true"


def missing(what: str) -> None:
    """Skips at a user's and fails in CI, where everything has to be there."""
    if CI:
        pytest.fail(f"{what} is missing, and CI must test with it")
    pytest.skip(f"{what} is missing")
