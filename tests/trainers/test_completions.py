"""What models write becomes the candidate that a person would check."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq import Pool
from leanq.lean.completions import candidate_of
from leanq.trainers.rewards import LeanReward

_TABLE = tomllib.loads(Path(__file__).with_name("completions.toml").read_text())
STATEMENTS: dict[str, str] = _TABLE.pop("statements")
CANDIDATES: dict[str, str] = _TABLE.pop("candidates")
SHAPES: dict[str, dict[str, Any]] = _TABLE
HEADER = "prelude\nimport Core\n"


def statement_of(name: str) -> str:
    return HEADER + STATEMENTS[SHAPES[name]["statement"]]


def lines(text: str) -> list[str]:
    """The lines that say something."""
    return [line.rstrip() for line in text.split("\n") if line.strip()]


def test_there_are_enough_shapes() -> None:
    assert len(SHAPES) > 60


@pytest.mark.parametrize("name", SHAPES)
def test_the_candidate_is_the_one_a_person_would_check(name: str) -> None:
    made = candidate_of(statement_of(name), SHAPES[name]["completion"])
    assert lines(made) == lines(HEADER + CANDIDATES[SHAPES[name]["candidate"]])


@given(st.text(), st.sampled_from(sorted(STATEMENTS)))
def test_any_answer_becomes_a_text(completion: str, name: str) -> None:
    assert isinstance(candidate_of(HEADER + STATEMENTS[name], completion), str)


@pytest.mark.slow
async def test_each_shape_earns_what_a_person_would_give(pool: Pool) -> None:
    score = LeanReward(pool)
    statements = [statement_of(name) for name in SHAPES]
    rewards = await score(
        completions=[row["completion"] for row in SHAPES.values()], statement=statements
    )
    expected = {name: float(row["reward"]) for name, row in SHAPES.items()}
    assert dict(zip(SHAPES, rewards, strict=True)) == expected
