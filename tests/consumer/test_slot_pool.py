"""The slots that a worker's consumers share, part by part and with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.consumer.slot_pool import Average, CircuitBreaker, SlotCounter, SlotPool
from leanq.errors import WorkerError
from leanq.queue.settings import Settings


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_counter_counts_what_runs_and_what_is_reserved() -> None:
    slots = SlotCounter(3)
    slots.take(isolated=False)
    slots.take(isolated=True)
    assert (slots.free, slots.taken, slots.isolated) == (1, 2, 1)
    with slots.reserve(1):
        assert slots.reserved == 1
    with pytest.raises(RuntimeError), slots.reserve(1):
        raise RuntimeError
    slots.give(isolated=True)
    slots.give(isolated=False)
    assert (slots.free, slots.taken, slots.isolated, slots.reserved) == (3, 0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_turns_are_taken_in_the_order_of_asking(events: list[tuple[str, bool]]) -> None:
    changes: list[None] = []
    pool = SlotPool(6, lambda: changes.append(None), pause_after_failure_s=2.0)
    model: list[str] = []
    for consumer, asks in events:
        if asks:
            if consumer not in model:
                model.append(consumer)
            part = 6 // len(model) if model[0] == consumer else 0
            assert pool.share(consumer, ahead=False) == part
        else:
            was_there = consumer in model
            if was_there:
                model.remove(consumer)
            changes.clear()
            pool.end_turn(consumer)
            # Another one may go on.
            assert bool(changes) == (was_there and bool(model))


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=30))
def test_an_average_lies_between_the_least_and_the_most(durations: list[float]) -> None:
    average = Average()
    assert average.value_s == 0.0
    for seconds in durations:
        average.add(seconds)
    slack = 1e-9 * max(durations)
    assert min(durations) - slack <= average.value_s <= max(durations) + slack


def test_an_average_follows_the_newest() -> None:
    average = Average()
    average.add(1.0)
    average.add(2.0)
    assert average.value_s == pytest.approx(1.2)


def test_a_breaker_pauses_after_a_failure_and_gives_up_after_several_in_a_row() -> None:
    clock, error = Clock(), WorkerError("no Lean")
    breaker = CircuitBreaker(2.0, clock)
    assert breaker.closed
    breaker.failed(error)
    assert not breaker.closed
    clock.now_s += 2.0
    assert breaker.closed
    breaker.failed(error)
    breaker.succeeded()
    for _ in range(Settings.max_attempts - 1):
        breaker.failed(error)
    assert breaker.fault is None
    breaker.failed(error)
    assert breaker.fault is error
    breaker.pause(0.5)
    assert breaker.paused_until_s == clock.now_s + 0.5


def test_a_pool_gives_each_consumer_its_part() -> None:
    changes: list[None] = []
    pool = SlotPool(10, lambda: changes.append(None), pause_after_failure_s=2.0)
    assert pool.share("a", ahead=False) == 10
    assert pool.share("b", ahead=False) == 0
    assert pool.share("a", ahead=False) == 5
    with pool.slots.reserve(5):
        assert pool.share("a", ahead=False) == 3
    pool.end_turn("a")
    assert changes
    assert pool.share("b", ahead=False) == 10
    assert pool.share("a", ahead=False) == 0
    pool.end_turn("b")
    assert pool.share("a", ahead=False) == 10
    for _ in range(10):
        pool.slots.take(isolated=False)
    assert pool.share("a", ahead=False) == 0
    changes.clear()
    pool.give(isolated=False)
    assert changes
    assert pool.share("a", ahead=False) == 1


@pytest.mark.parametrize(
    ("run_s", "call_s", "ahead"),
    # Short ones are claimed ahead: one for each slot, and two where a call takes longer than a run;
    # never more than 64.
    [(0.5, 0.1, 0), (0.01, 0.001, 10), (0.001, 0.0015, 20), (0.001, 1.0, 64), (0.0, 0.1, 0)],
)
def test_a_pool_claims_short_requests_ahead(run_s: float, call_s: float, ahead: int) -> None:
    pool = SlotPool(10, lambda: None, pause_after_failure_s=2.0)
    pool.run_time.add(run_s)
    pool.call_time.add(call_s)
    assert pool.share("a", ahead=False) == 10
    assert pool.share("a", ahead=True) == 10 + ahead
    pool.slots.waiting = ahead
    assert pool.share("a", ahead=True) == 10


def test_a_pool_claims_nothing_while_it_may_not() -> None:
    clock = Clock()
    pool = SlotPool(4, lambda: None, pause_after_failure_s=2.0, clock=clock)

    def may_claim() -> bool:
        assert (pool.available > 0) == (pool.share("a", ahead=True) > 0)
        return pool.available > 0

    assert may_claim()
    pool.breaker.failed(WorkerError("no Lean"))
    assert not may_claim()
    clock.now_s += 2.0
    assert may_claim()
    pool.slots.take(isolated=True)
    assert not may_claim()
    pool.give(isolated=True)
    # A quarantined request waits for an empty worker, and is claimed by one.
    pool.emptying = True
    assert may_claim()
    pool.slots.take(isolated=False)
    assert not may_claim()
    pool.emptying = False
    assert may_claim()
    pool.draining = True
    assert not may_claim()
