"""The cost model: what it says at first, what it learns, and what holds whatever it has learned."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.lean.snapshots.cost_model import Costs, Line

seconds = st.floats(1e-4, 1e3)
sizes = st.integers(1, 4 << 30)
keys = st.sampled_from("abc")
Observation = Callable[[Costs], None]
observations = st.lists(
    st.one_of(
        st.builds(lambda key, s: lambda costs: costs.replayed(key, s), keys, seconds),
        st.builds(lambda s: lambda costs: costs.loaded(s), seconds),
        st.builds(lambda b, s, r: lambda costs: costs.saved(b, s, r), sizes, seconds, seconds),
        st.builds(lambda b, s: lambda costs: costs.shipped(b, s), sizes, seconds),
        st.builds(lambda b, s: lambda costs: costs.fetched(b, s), sizes, seconds),
    ),
    max_size=40,
)


def learned(seen: list[Observation]) -> Costs:
    costs = Costs()
    for observe in seen:
        observe(costs)
    return costs


def test_large_texts_are_worth_it_and_small_ones_not() -> None:
    costs = Costs()
    assert costs.worth_saving("k", 2.7)
    assert costs.worth_saving("k", 60.0)
    assert not costs.worth_saving("k", 0.1)
    assert not costs.worth_saving("k", 0.0)
    assert 0.1 < costs.summary["least_replay_s"] < 1.0


@pytest.mark.slow
@given(observations, keys, seconds, seconds)
def test_what_takes_longer_is_worth_no_less(
    seen: list[Observation], key: str, one: float, other: float
) -> None:
    costs = learned(seen)
    short, long = sorted((one, other))
    assert costs.worth_saving(key, short) <= costs.worth_saving(key, long)


@pytest.mark.slow
@given(observations, keys, st.floats(0, 1))
def test_what_elaborates_quicker_than_it_loads_is_never_worth_it(
    seen: list[Observation], key: str, share: float
) -> None:
    costs = learned(seen)
    assert not costs.worth_saving(key, share * costs.load_s(0))
    assert not costs.worth_loading(share * costs.load_s(0))


@pytest.mark.slow
@given(observations, seconds)
def test_summary_says_what_is_decided(seen: list[Observation], replay_s: float) -> None:
    costs = learned(seen)
    least_s = costs.summary["least_replay_s"]
    assert least_s > 0
    # For a text that was not seen before.
    if not math.isclose(replay_s, least_s, rel_tol=1e-6):
        assert costs.worth_saving("new", replay_s) == (replay_s > least_s)
    decided = costs.summary["worth"] + costs.summary["not_worth"]
    assert decided == (0 if math.isclose(replay_s, least_s, rel_tol=1e-6) else 1)
    assert costs.summary["loaded"] <= len(seen)


def test_slow_saving_is_learned_and_forgotten() -> None:
    costs = Costs()
    for _ in range(30):
        costs.saved(150_000_000, 600.0, 2.7)
    assert costs.summary["save_s"] == pytest.approx(400, rel=0.1)
    assert not costs.worth_saving("k", 2.7)
    for _ in range(30):
        costs.saved(150_000_000, 6.0, 2.7)
    assert costs.worth_saving("k", 2.7)


def test_size_is_learned() -> None:
    costs = Costs()
    for _ in range(30):
        costs.saved(600_000_000, 6.0, 2.7)
    assert costs.summary["bytes_per_replay_s"] * 2.7 == pytest.approx(600_000_000, rel=0.1)


def test_slow_server_is_learned() -> None:
    costs = Costs()
    for _ in range(40):
        costs.shipped(150_000_000, 60.0)
        costs.fetched(150_000_000, 30.0)
    assert costs.summary["ship_s"] == pytest.approx(40, rel=0.1)
    assert costs.summary["fetch_s"] == pytest.approx(20, rel=0.1)
    assert not costs.worth_saving("k", 2.7)
    assert not costs.worth_loading(2.7)


def test_texts_that_never_come_again_are_not_worth_it() -> None:
    costs = Costs()
    for number in range(300):
        costs.replayed(f"k{number}", 2.7)
    assert costs.expected_uses("new") < 1
    assert not costs.worth_saving("new", 2.7)
    # But this one does.
    for _ in range(12):
        costs.replayed("mine", 2.7)
    assert costs.expected_uses("mine") == 11
    assert costs.worth_saving("mine", 2.7)
    assert not costs.worth_saving("new", 2.7)


def test_loads_say_that_texts_come_again() -> None:
    costs = Costs()
    before = costs.expected_uses("new")
    for _ in range(50):
        costs.loaded(0.1)
    assert costs.expected_uses("new") > before
    for number in range(2000):
        costs.replayed(str(number), 1.0)
    # What counts is the present.
    assert costs.expected_uses("new") < 1
    for _ in range(20_000):
        costs.loaded(0.1)
    assert 100 < costs.expected_uses("new") <= 1000


@given(st.floats(1e-6, 1e6))
def test_one_bad_moment_decides_nothing(observed: float) -> None:
    line = Line(fixed=1.0, slope=2.0)
    line.learn(3.0, observed)
    assert 0.75 < line.at(3.0) / 7.0 < 1.35
    for _ in range(100):
        line.learn(3.0, observed)
    assert line.at(3.0) == pytest.approx(observed, rel=0.05)


def test_memory_of_texts_is_bounded() -> None:
    costs = Costs()
    for _ in range(100):
        costs.replayed("often", 1.0)
    assert costs.expected_uses("often") == 99
    for number in range(10_000):
        costs.replayed(str(number), 1.0)
    assert costs.expected_uses("often") < 1
