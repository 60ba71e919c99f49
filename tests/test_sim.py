"""The simulated fleets: repeatable, and nothing is made or lost in them."""

from __future__ import annotations

import dataclasses

import pytest

from leanq.scale import Memory, ScaleSettings, Stats
from sim.fleet import Fleet
from sim.measure import difference, figures, interval, quantile
from sim.parts import Outcome, Policy, View
from sim.policies import Deadline, by_reference, policies
from sim.report import verdict
from sim.scenarios import STEADY, TEN, Scenario, bursts, poisson

SMALL = Scenario(
    "small",
    "a little of everything",
    poisson(lambda t: 5 if t < 900 else 0.5, 5, 1200),
    1800,
    workers=6,
    life_s=600.0,
    storms=((600, 0.5),),
    stock_outs=((700, 800),),
    outages=((300, 400),),
    restarts=((500, 560),),
    mark_s=400,
)
POLICIES = tuple(policies(STEADY, 0))


def run(scenario: Scenario, policy: str, seed: int = 1) -> Outcome:
    return Fleet(
        scenario, policies(scenario, seed)[policy](), seed, idle_first=policy == "deadline"
    ).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_or_is_left(policy: str) -> None:
    outcome = run(SMALL, policy)
    assert outcome.submitted > 3000
    assert outcome.submitted == outcome.finished + outcome.lost + outcome.left
    # Those that run at the end are left, and have not been waited for to the end.
    assert outcome.finished <= len(outcome.waits_s) <= outcome.finished + outcome.left
    assert min(outcome.waits_s) >= 0
    assert outcome.work_s <= outcome.slot_s


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_says_everything(policy: str) -> None:
    assert run(SMALL, policy) == run(SMALL, policy)
    assert run(SMALL, policy).waits_s != run(SMALL, policy, seed=2).waits_s


def test_laws_are_compared_on_the_same_arrivals() -> None:
    assert len({run(SMALL, policy).submitted for policy in POLICIES}) == 1


def test_a_backlog_is_cleared_by_its_deadline_and_the_fleet_goes_home() -> None:
    burst = dataclasses.replace(SMALL, arrivals=bursts([60.0], 4000), workers=1, mark_s=120)
    quiet = dataclasses.replace(burst, life_s=1e9, storms=(), stock_outs=(), outages=())
    outcome = run(quiet, "deadline")
    assert outcome.left == outcome.lost == 0
    assert outcome.clear_s is not None
    assert outcome.clear_s < 600
    assert outcome.orders[-1][1] == 0


def test_nothing_is_claimed_while_the_server_is_away() -> None:
    away = dataclasses.replace(SMALL, outages=((300, 900),), storms=(), life_s=1e9)
    waiting = dict(run(away, "deadline").queue)
    during = [count for at, count in waiting.items() if 300 < at < 900]
    assert during == sorted(during)
    assert during[-1] > 2000


def test_no_machine_is_had_while_there_are_none() -> None:
    none = dataclasses.replace(SMALL, stock_outs=((0, 1700),), storms=(), life_s=1e9, outages=())
    outcome = run(dataclasses.replace(none, workers=1), "deadline")
    assert outcome.slot_s <= 4 * none.until_s + 100 * outcome.most_workers * 4


@pytest.mark.slow
def test_the_burst_meets_its_target_from_a_seed_of_no_report() -> None:
    [burst] = (scenario for scenario in TEN if scenario.name == "burst")
    found = figures(burst, run(burst, "deadline", seed=77_777))
    assert found["clear_s"] is not None
    assert found["cost"] is not None
    assert found["clear_s"] < 300
    assert found["cost"] < 3.0
    assert found["lost"] == found["left"] == 0


def test_intervals_hold_the_mean_and_pairs_cancel_what_they_share() -> None:
    values = [float(n % 7) for n in range(30)]
    mean, low, high = interval(values)
    assert low < mean < high
    ours, theirs = ([{"cost": value + more} for value in values] for more in (1.0, 0.0))
    assert difference(ours, theirs, "cost") == pytest.approx((1.0, 1.0, 1.0))
    assert quantile(values, 0.95) == 6
    assert quantile([1.0, 2.0], 0.5) == 1


@pytest.mark.parametrize(
    ("cost", "wait", "word"),
    [
        (-1.0, -20.0, "better in both"),
        (-1.0, 14.0, "better in cost, equal in wait"),
        (-1.0, 16.0, "cheaper, slower"),
        (1.0, 1.0, "worse in both"),
        (1.0, -1.0, "dearer, faster"),
    ],
)
def test_verdicts(cost: float, wait: float, word: str) -> None:
    ours = [{"cost": 2 + cost, "p99_s": 100 + wait}] * 3
    assert verdict({"deadline": ours, "reference": [{"cost": 2.0, "p99_s": 100.0}] * 3}) == word


BACKLOG = Scenario(
    "backlog", "3,000 at once", bursts([60.0], 3000), 1800, work_s=lambda _: 2.0, spread=0.5
)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_only_the_reference_flaps_without_an_autoscaler_above_it(seed: int) -> None:
    def alone(policy: Policy) -> Outcome:
        return Fleet(BACKLOG, policy, seed, idle_first=True).run()

    class Bare:
        """The reference policy at each decision, without an autoscaler."""

        def __init__(self) -> None:
            self.restart()

        def __call__(self, view: View) -> int:
            wanted, self._memory = by_reference(view.stats, self._memory, most=100)
            return wanted

        def restart(self) -> None:
            self._memory = Memory()

    reference = alone(Bare())
    assert reference.reversals >= 5
    # Up for the backlog, and down when it is done.
    deadline = alone(Deadline(ScaleSettings(slots=4, max_workers=100)))
    assert deadline.reversals <= 1
    assert (reference.left, deadline.left) == (0, 0)
    assert deadline.slot_s < reference.slot_s


@pytest.mark.parametrize(
    ("queued", "per_minute", "workers", "wanted"),
    [
        (600, 60, 2, 6),  # (60 + 600/5) / 30
        (60, 60, 2, 3),  # (60 + 12) / 30 = 2.4
        (59, 60, 2, 1),
        (0, 0, 3, 1),
        (5000, 0, 3, 7),
        (5000, 60, 0, 7),
        (100_000, 60, 3, 1000),
    ],
)
def test_the_reference(queued: int, per_minute: int, workers: int, wanted: int) -> None:
    then = Stats(time_s=0.0, ready=workers, order=7)
    _, memory = by_reference(then, Memory(), 1000)
    now = dataclasses.replace(then, time_s=60.0, queued=queued, finished=per_minute)
    assert by_reference(now, memory, 1000)[0] == wanted
