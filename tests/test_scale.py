"""How the scaler decides: what must hold for any statistics, and the policies by example."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from leanq.errors import UsageError
from leanq.scale import Decision, DecisionReason, Memory, ScaleSettings, Stats, decide

TICK_S = 15.0
SLOTS = 4


@st.composite
def anything(draw: st.DrawFn) -> Stats:
    """Any statistics that hang together."""
    ready = draw(st.integers(0, 500))
    slots = ready * draw(st.sampled_from((1, 4, 30)))
    busy = draw(st.integers(0, slots))
    finished = draw(st.integers(0, 10**6))
    queued = draw(st.integers(0, 10**6))
    return Stats(
        time_s=draw(st.floats(0, 1e9)),
        queued=queued,
        leased=busy + draw(st.integers(0, 50)),
        oldest_s=draw(st.floats(0, 5000)) if queued else 0.0,
        submitted=finished + queued,
        finished=finished,
        busy_s=finished * draw(st.floats(0.001, 600)),
        ready=ready,
        ready_slots=slots,
        busy_slots=busy,
        idle_workers=draw(st.integers(0, ready)) if busy else ready,
        starting_s=tuple(draw(st.lists(st.floats(0, 3000), max_size=20))),
        started_s=tuple(draw(st.lists(st.floats(1, 3000), max_size=20))),
        order=draw(st.integers(0, 1200)),
        age_s=draw(st.sampled_from((0.0, 5.0, 61.0))),
    )


@st.composite
def settings(draw: st.DrawFn) -> ScaleSettings:
    least = draw(st.integers(0, 20))
    return ScaleSettings(
        slots=draw(st.sampled_from((1, 4, 64))),
        min_workers=least,
        max_workers=draw(st.integers(max(least, 1), 1000)),
        deadline_s=draw(st.floats(60, 3600)),
        work_s=draw(st.floats(0.01, 600)),
        drain_s=draw(st.floats(1, 900)),
    )


def later(stats: Stats, seconds: float, **changes: object) -> Stats:
    return dataclasses.replace(stats, time_s=stats.time_s + seconds, **changes)  # type: ignore[arg-type]


def worked(stats: Stats, requests: int, **changes: object) -> Stats:
    """A tick later, in which so many requests of a second came and were finished."""
    return later(
        stats, TICK_S, submitted=stats.submitted + requests, finished=stats.finished + requests,
        busy_s=stats.busy_s + requests, **changes,
    )  # fmt: skip


def steady(busy: int, workers: int) -> tuple[Stats, Memory]:
    """A fleet of 4 slots each that has done requests of a second for a while, and its memory."""
    stats = Stats(time_s=0.0, ready=workers, ready_slots=SLOTS * workers, order=workers)
    memory = Memory()
    for tick in range(60):
        done = round(tick * TICK_S * busy)
        stats = dataclasses.replace(
            stats,
            time_s=tick * TICK_S,
            leased=busy,
            busy_slots=busy,
            idle_workers=workers - math.ceil(busy / SLOTS),
            submitted=done + busy,
            finished=done,
            busy_s=float(done),
        )
        memory = decide(stats, ScaleSettings(slots=SLOTS, work_s=1.0), memory).memory
    return stats, memory


@pytest.mark.slow
@given(st.lists(anything(), min_size=1, max_size=5), settings())
def test_the_same_decisions_in_the_same_words_every_time(
    many: list[Stats], chosen: ScaleSettings
) -> None:
    def all_of_them() -> list[Decision]:
        decisions, memory = [], Memory()
        for stats in many:
            decisions.append(decide(stats, chosen, memory))
            memory = decisions[-1].memory
        return decisions

    assert all_of_them() == all_of_them()


@pytest.mark.slow
@given(st.lists(anything(), min_size=1, max_size=5), settings())
def test_every_decision_is_bounded_and_explained(many: list[Stats], chosen: ScaleSettings) -> None:
    memory = Memory()
    for stats in many:
        decision = decide(stats, chosen, memory)
        memory = decision.memory
        assert decision.reason in get_args(DecisionReason)
        assert decision.text
        assert all(isinstance(v, float) and math.isfinite(v) for v in decision.terms.values())
        if decision.reason == "stale":
            assert decision.target == stats.order
        else:
            assert chosen.min_workers <= decision.target <= chosen.max_workers


@pytest.mark.slow
@given(anything(), settings(), st.floats(60.1, 1e6))
def test_old_statistics_change_nothing(stats: Stats, chosen: ScaleSettings, age_s: float) -> None:
    memory = decide(dataclasses.replace(stats, age_s=0.0), chosen).memory
    decision = decide(later(stats, TICK_S, age_s=age_s), chosen, memory)
    assert (decision.target, decision.reason) == (stats.order, "stale")
    assert decision.memory == memory


@pytest.mark.slow
@given(anything(), st.lists(anything(), max_size=4))
def test_none_only_where_nothing_waits_and_nothing_runs(stats: Stats, past: list[Stats]) -> None:
    chosen, memory = ScaleSettings(), Memory()
    for earlier in past:
        memory = decide(earlier, chosen, memory).memory
    if decide(stats, chosen, memory).target == 0:
        assert stats.queued + stats.leased == 0 or (stats.order == 0 and stats.age_s > 60)


@given(anything(), st.integers(1, 10**6))
def test_a_longer_queue_never_gets_fewer_workers(stats: Stats, more: int) -> None:
    stats = dataclasses.replace(stats, age_s=0.0)
    longer = dataclasses.replace(stats, queued=stats.queued + more)
    assert decide(longer, ScaleSettings()).target >= decide(stats, ScaleSettings()).target


@pytest.mark.slow
@given(st.integers(0, 100_000), st.integers(0, 50), st.floats(0, 2000), st.floats(0.5, 60))
def test_what_has_been_ordered_is_not_ordered_again(
    queued: int, workers: int, oldest_s: float, work_s: float
) -> None:
    chosen = ScaleSettings(slots=SLOTS, work_s=work_s, max_workers=10**6)
    busy = SLOTS * workers
    stats = Stats(
        time_s=0.0, queued=queued, leased=busy, oldest_s=oldest_s, order=workers, ready=workers,
        ready_slots=busy, busy_slots=busy,
    )  # fmt: skip
    first = decide(stats, chosen)
    assume(first.target > workers)
    starting = (0.0,) * (first.target - workers)
    again = dataclasses.replace(stats, order=first.target, starting_s=starting)
    assert decide(again, chosen).target == first.target
    # Not even where the provider has none and they never come.
    late = dataclasses.replace(again, starting_s=(3000.0,) * len(starting))
    assert decide(late, chosen).target == first.target


@given(anything(), settings())
def test_a_new_scaler_takes_nothing_away(stats: Stats, chosen: ScaleSettings) -> None:
    assert decide(stats, chosen).target >= min(stats.order, chosen.max_workers)


def test_a_burst_is_ordered_within_its_deadline_at_once() -> None:
    stats, memory = steady(busy=2, workers=1)
    burst = worked(stats, 30, queued=60_000, leased=4, busy_slots=4)
    decision = decide(burst, ScaleSettings(slots=SLOTS, work_s=1.0), memory)
    assert decision.reason == "backlog"
    # 60,000 slot seconds in 250 s, of which a start takes the slow tenth 150 s: 600 slots.
    assert 140 <= decision.target <= 150


def test_a_steady_fleet_is_left_alone() -> None:
    stats, memory = steady(busy=90, workers=24)
    decision = decide(worked(stats, 1350), ScaleSettings(slots=SLOTS), memory)
    assert (decision.target, decision.reason) == (24, "enough")


def test_the_load_is_given_workers_before_a_queue_forms() -> None:
    stats, memory = steady(busy=90, workers=10)
    decision = decide(worked(stats, 1350), ScaleSettings(slots=SLOTS), memory)
    assert (decision.target, decision.reason) == (24, "load")  # 90 + 0.5 √90 slots


@pytest.mark.parametrize("held", [False, True])
def test_what_operators_hold_back_is_no_load(held: bool) -> None:
    """Where all that comes is held back, the fleet shrinks as if nothing came."""
    stats, memory = steady(busy=90, workers=24)
    stats = dataclasses.replace(stats, leased=0, busy_slots=0, idle_workers=24)
    decision = decide(stats, ScaleSettings(slots=SLOTS), memory)
    for _ in range(40):
        came = stats.submitted + 1350
        stats = later(
            stats, TICK_S, submitted=came, order=decision.target, ready=decision.target,
            ready_slots=SLOTS * decision.target, idle_workers=decision.target,
            held=stats.held + 1350 if held else 0,
        )  # fmt: skip
        decision = decide(stats, ScaleSettings(slots=SLOTS), decision.memory)
    assert decision.target == (0 if held else 24)


def test_idle_workers_go_by_halves_after_a_while_and_at_last_all() -> None:
    stats, memory = steady(busy=90, workers=24)
    targets, reasons = [], []
    for _ in range(60):
        order = targets[-1] if targets else 24
        stats = later(
            stats, TICK_S, leased=0, busy_slots=0, ready=order, ready_slots=SLOTS * order,
            idle_workers=order, order=order,
        )  # fmt: skip
        decision = decide(stats, ScaleSettings(slots=SLOTS), memory)
        memory = decision.memory
        targets.append(decision.target)
        reasons.append(decision.reason)
    assert targets[0] == 24
    assert targets == sorted(targets, reverse=True)
    assert all(b >= a - max(1, a // 2) for a, b in pairwise(targets))
    assert {"settling", "idle", "empty"} <= set(reasons)
    assert targets[-1] == 0


def test_each_decision_says_plainly_why() -> None:
    stats, memory = steady(busy=4, workers=2)
    chosen = ScaleSettings(slots=SLOTS)
    two = {"ready": 2, "order": 2, "ready_slots": 2 * SLOTS}
    idle = dataclasses.replace(stats, leased=0, busy_slots=0, idle_workers=2, **two)
    texts = [decide(idle, chosen).text]
    for _ in range(40):
        idle = later(idle, TICK_S)
        decision = decide(idle, chosen, memory)
        memory = decision.memory
        texts.append(decision.text)
    one = dataclasses.replace(idle, ready=1, ready_slots=SLOTS)
    texts.append(decide(one, chosen).text)
    assert {text.rpartition(": ")[2] for text in texts} >= {
        "0 workers would do, but it is too soon to tell",
        "0 workers would do, if that lasts",
        "1 worker would do, so 1 of the idle go",
        "0 workers would do, so 1 of the idle go",
    }
    assert "; 2 workers ready, 2 ordered; " in texts[0]
    assert "; 1 worker ready, 2 ordered; " in texts[-1]


def test_workers_that_run_long_requests_are_left_to_end_them() -> None:
    chosen = ScaleSettings(slots=SLOTS, work_s=180.0)
    stats = Stats(time_s=0.0, ready=20, ready_slots=80, order=20, leased=20, busy_slots=20)
    memory = Memory()
    for _ in range(40):
        stats = later(stats, TICK_S)
        decision = decide(stats, chosen, memory)
        memory = decision.memory
        assert decision.target == 20
    assert decision.reason == "busy"
    assert decide(later(stats, TICK_S, idle_workers=3), chosen, memory).target == 17


def test_long_requests_are_known_before_the_first_of_them_ends() -> None:
    stats, memory = Stats(time_s=0.0, order=5, ready=5, ready_slots=20, busy_slots=20), Memory()
    for _ in range(9):
        decision = decide(stats, ScaleSettings(work_s=1.0), memory)
        stats, memory = later(stats, TICK_S, leased=20, queued=100), decision.memory
    assert decision.terms["work_s"] > 100


def test_a_new_scaler_knows_the_work_of_an_old_fleet() -> None:
    stats = Stats(time_s=0.0, finished=10_000, busy_s=70_000.0)
    assert decide(stats, ScaleSettings()).terms["work_s"] == pytest.approx(7)


def test_counters_that_went_back_are_no_rates() -> None:
    stats, memory = steady(busy=90, workers=24)
    rolled_back = later(stats, TICK_S, finished=5, submitted=5, busy_s=5.0)
    decision = decide(rolled_back, ScaleSettings(slots=SLOTS), memory)
    assert decision.terms["requests_per_s"] == 0
    assert decision.target == 24


def test_a_clock_that_went_back_holds_nothing_up() -> None:
    stats, memory = steady(busy=90, workers=24)
    memory = decide(later(stats, -600.0), ScaleSettings(slots=SLOTS), memory).memory
    assert [at for at, _ in memory.enough] == [stats.time_s - 600]
    assert memory.known_s == 0


@pytest.mark.parametrize(
    "wrong",
    [{"min_workers": 3, "max_workers": 2}, {"max_workers": 0}, {"slots": 0}, {"deadline_s": 0.0},
     {"spread": -1.0}, {"work_s": math.nan}],
)  # fmt: skip
def test_settings_without_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ScaleSettings(**wrong)  # type: ignore[arg-type]
