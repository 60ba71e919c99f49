"""Errors as problem details."""

from __future__ import annotations

import logging

import pytest

from leanq.errors import UnavailableError
from leanq.gateway.problems import problem_of


def test_callers_are_not_told_where_the_server_is(caplog: pytest.LogCaptureFixture) -> None:
    error = UnavailableError("no answer from redis://leanq-client@10.0.0.3:6379/0: refused")
    with caplog.at_level(logging.WARNING, "leanq.gateway"):
        problem = problem_of(error)
    assert (problem["status"], problem["type"]) == (503, "urn:leanq:unavailable")
    assert "10.0.0.3" not in str(problem)
    assert "10.0.0.3" in caplog.text
