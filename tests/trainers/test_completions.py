"""What models write becomes the candidates that a person would check, and earns what it should."""

from __future__ import annotations

import asyncio
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lean.libraries import NoLibraryError, layouts, library

from leanq import Pool
from leanq.lean.goals.completions import MAX_CANDIDATES, candidates_of
from leanq.trainers.rewards import LeanReward

_TABLE = tomllib.loads(Path(__file__).with_name("completions.toml").read_text())
STATEMENTS: dict[str, str] = _TABLE.pop("statements")
CANDIDATES: dict[str, str] = _TABLE.pop("candidates")
SHAPES: dict[str, dict[str, Any]] = _TABLE
HEADER = "prelude\nimport Core\n"
# A header as problem sets have it, for a full library.
LONG_HEADER = "import Lean\nset_option maxHeartbeats 400000\nopen Nat\n\n"
# Pieces of which models' answers are made, and of which a hostile one could be.
PIECES = [
    *("```lean4\n", "```\n", "```", "~~~\n", "> ", "<think>", "</think>", "<|message|>", "<|end|>"),
    *("theorem t : p := h\n", "theorem t : p := by\n", "theorem Foo.bar (hp : p) : q := ", "sorry"),
    *(
        "namespace Foo\n",
        "end Foo\n",
        "section\n",
        "end\n",
        "open Nat in\n",
        "@[simp] ",
        "/-",
        "-/",
    ),
    *(
        "  exact h.right\n",
        "by simp",
        "⊢ q\n",
        "This is prose.\n",
        "\\boxed{",
        "}",
        '{"a": "',
        '"}',
    ),
    *("\\begin{lean}\n", "\\end{lean}\n", "import Core\n", "lemma aux : p := h\n", "aux", "\n\n"),
]


def statement_of(name: str, header: str = HEADER) -> str:
    return header + STATEMENTS[SHAPES[name]["statement"]]


def lines(text: str) -> list[str]:
    """The lines that say something."""
    return [line.rstrip() for line in text.split("\n") if line.strip()]


def test_there_are_enough_shapes() -> None:
    assert len(SHAPES) >= 150


@pytest.mark.parametrize("name", [name for name in SHAPES if "candidate" in SHAPES[name]])
def test_the_candidate_is_the_one_a_person_would_check(name: str) -> None:
    made = candidates_of(statement_of(name), SHAPES[name]["completion"])
    place = SHAPES[name].get("checks", 1) - 1 if SHAPES[name]["reward"] else 0
    assert lines(made[place]) == lines(HEADER + CANDIDATES[SHAPES[name]["candidate"]])


@given(
    st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join)),
    st.sampled_from(sorted(STATEMENTS)),
)
def test_any_answer_becomes_a_few_texts_of_its_own_words(completion: str, name: str) -> None:
    statement = HEADER + STATEMENTS[name]
    made = candidates_of(statement, completion)
    assert 1 <= len(made) <= MAX_CANDIDATES
    assert len({*made}) == len(made)
    # What stands in a candidate stands in the answer or the statement, but for what joins them.
    given_words = Counter(f"{completion} {statement} {statement} by end Foo".split())
    for text in made:
        for word in text.split():
            assert word in given_words or any(word in each for each in given_words), text


@pytest.mark.parametrize("limit", [MAX_CANDIDATES])
def test_no_more_than_a_few_are_made_of_many_attempts(limit: int) -> None:
    attempts = [
        f"```lean\ntheorem t : p := h{n}\n```\n```lean\nexact h{n}\n```\n" for n in range(99)
    ]
    made = candidates_of("theorem t : p := sorry", "".join(attempts))
    assert made == tuple(f"theorem t : p := h{98 - n}" for n in range(limit))
    in_one = "".join(f"theorem t : p := h{n}\n" for n in range(99))
    assert candidates_of("theorem t : p := sorry", in_one) == made


class Counting:
    """A pool that counts the verifications of each statement's text."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.checks = 0

    def verify(self, target: str | None, code: str, **options: Any) -> Any:
        self.checks += 1
        return self._pool.verify(target, code, **options)

    def check(self, code: str, **options: Any) -> Any:
        return self._pool.check(code, **options)

    def step(self, state: str, tactic: str, **options: Any) -> Any:
        return self._pool.step(state, tactic, **options)


async def earned(pool: Pool, header: str) -> dict[str, tuple[float | None, int]]:
    """The reward of each shape, and how many checks it took."""

    async def one(name: str) -> tuple[float | None, int]:
        counting = Counting(pool)
        completion = SHAPES[name]["completion"].replace(HEADER, header)
        statement = statement_of(name, header)
        [reward] = await LeanReward(counting)(completions=[completion], statement=[statement])
        return reward, counting.checks

    return dict(zip(SHAPES, await asyncio.gather(*map(one, SHAPES)), strict=True))


def expected() -> dict[str, tuple[float, int]]:
    return {name: (float(row["reward"]), row.get("checks", 1)) for name, row in SHAPES.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_each_shape_earns_what_a_person_would_give(pool: Pool) -> None:
    assert await earned(pool, HEADER) == expected()


@pytest.fixture(params=layouts())
def full_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A toolchain with a full library."""
    try:
        lean = library(request.param).lean
    except NoLibraryError as error:
        pytest.skip(str(error))
    with Pool(lean=str(lean), slots=1) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_shape_earns_the_same_with_a_full_library(full_pool: Pool) -> None:
    assert await earned(full_pool, LONG_HEADER) == expected()
