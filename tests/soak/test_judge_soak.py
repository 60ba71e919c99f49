"""The soak of the judge in a short form, and what it is explained by."""

from __future__ import annotations

import random

import pytest
from soak.judge_soak import Explainer, Tally, samples, storm
from support.lean.images import Lean
from support.lean.mutations import MUTATIONS, Sample, mutated
from support.lean.second_kernel import UnconfirmedError

from leanq.lean.environment import Environment
from leanq.lean.run.image import Image


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


@pytest.fixture(scope="module")
def honest(lean: Lean) -> list[Sample]:
    return samples(lean)


def core(lean: Lean) -> bytes:
    path = lean.environment.find_olean("Core")
    assert path
    return path.read_bytes()


@pytest.mark.slow
async def test_nothing_is_accepted_that_is_not_explained(lean: Lean, honest: list[Sample]) -> None:
    tally = Tally()
    await storm(lean.environment, honest, 200, 7, tally)
    assert tally.wrong == []
    total = tally.total()
    assert total.total() == 200
    # Some were refused as damaged, some by the kernel, and some accepted, or this shows nothing.
    assert total["unreadable"] > 20
    assert total["kernel_refused"] > 10
    assert total["accepted: the same constants"] > 20


@pytest.mark.slow
def test_the_second_kernel_confirms_what_is_honest(lean: Lean, honest: list[Sample]) -> None:
    for sample in honest:
        assert Explainer(sample, core(lean)).confirm_honest() > 4


@pytest.mark.slow
def test_the_second_kernel_confirms_no_other_proof(lean: Lean, honest: list[Sample]) -> None:
    [sample] = [each for each in honest if each.name == "trees"]
    image = Image([sample.data])
    raws = image.constants()
    explainer = Explainer(sample, core(lean))

    def with_value_of(name: str, other: str) -> bytes:
        data = bytearray(sample.data)
        at = 8 * (raws[name,].value + 2)
        data[at : at + 8] = (raws[other,].body or 0).to_bytes(8, "little")
        return bytes(data)

    for name, other in (
        ("late", "swap"),
        ("swap", "late"),
        ("mirrored", "late"),
        ("late", "later"),
    ):
        with pytest.raises(UnconfirmedError):
            explainer.why(with_value_of(name, other))
    assert explainer.why(with_value_of("later", "late")) == "proved, says the second kernel"


@pytest.mark.slow
def test_a_seed_makes_the_same_files(honest: list[Sample]) -> None:
    for kind in MUTATIONS:
        one, other = (mutated(honest[0], kind, random.Random(3)) for _ in range(2))
        assert one == other
