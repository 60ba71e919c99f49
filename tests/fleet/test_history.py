"""History by the minute: kept for a day, and outliving the workers that note it."""

from __future__ import annotations

import pytest
from support.queue.shards import Shard
from support.terminals import Terminal, ended, samples, wait_for_line

from leanq.fleet.history import Measure, Period, measures, periods
from leanq.fleet.stats import Times, environments_of
from leanq.lean.environment import Environment
from leanq.queue.metrics import BUCKETS_S
from leanq.queue.results import Status, read_minute, read_stats
from leanq.queue.settings import Settings

MINUTE_MS = 60_000


async def test_a_minute_is_noted_once_and_a_day_is_kept(shard: Shard) -> None:
    first = shard.now_ms // MINUTE_MS
    for _ in range(3):
        await shard.queue.renew("w")
    (note,) = await shard.queue.minutes(0)
    assert note["minute"] == first
    for number in range(1, 4):
        shard.advance(MINUTE_MS)
        await shard.submit(f"0-{number}")
        await shard.queue.renew("w")
        shard.server.hincrby(f"{shard.tag}:stats", "t:a:4", 1)
        shard.server.hincrby(f"{shard.tag}:stats", "w:a:4", 1)
    notes = await shard.queue.minutes(first + 1)
    assert [(n["minute"] - first, n.get("s:a"), n.get("t:a:4")) for n in notes] == [
        # As it was before the request that came first.
        (1, None, None),
        (2, 1, 1),
        (3, 2, 2),
    ]
    assert not any("w:a:4" in n for n in notes)
    key = f"{shard.tag}:minutes"
    shard.server.zadd(key, {f"old {n}".encode(): n for n in range(2000)})
    shard.advance(MINUTE_MS)
    await shard.queue.renew("w")
    assert shard.server.zcard(key) == 1500
    # What another program has put there is passed over.
    assert all("minute" in note for note in await shard.queue.minutes(first))


def note(minute: int, **totals: int) -> dict[str, int]:
    return {"minute": minute, **{name.replace("__", ":"): n for name, n in totals.items()}}


def test_differences_count_for_the_period_of_the_first() -> None:
    notes = [
        note(100, s__a=10, f__a__accepted=4, r_ms__a=1000, waiting__a=6, workers=2),
        note(101, s__a=15, f__a__accepted=9, r_ms__a=6000, waiting__a=1, workers=3),
        # No worker was there for a while.
        note(130, s__a=15, f__a__accepted=10, f__a__rejected=2, r_ms__a=7000, w_ms__a=500),
        note(131, s__a=16, s__b=3),
    ]
    one, two, three = periods([notes], 40 * 60)
    assert one == Period(100 * 60, 60, 5, one.finished, 0.0, 5.0, 6, 2)
    assert one.finished == {"accepted": 5}
    assert (two.start_s, two.finished, two.waited_s) == (
        101 * 60,
        {"accepted": 1, "rejected": 2},
        0.5,
    )
    assert (three.start_s, three.submitted, three.workers) == (130 * 60, 4, 0)
    early, late = periods([notes], 24 * 3600)
    assert (early.length_s, early.submitted, early.workers, early.waiting) == (1800, 5, 3, 6)
    assert (late.submitted, late.workers) == (4, 0)


def test_shards_add_up_and_a_rolled_back_counter_takes_nothing() -> None:
    one = [note(60, s__a=5, workers=4, waiting__a=2), note(61, s__a=8)]
    two = [note(60, s__a=7, workers=3, waiting__a=1), note(61, s__a=6)]
    (period,) = periods([one, two], 600)
    assert (period.submitted, period.waiting, period.workers) == (3, 3, 4)


def test_what_waits_in_shards_that_noted_different_minutes_adds_up() -> None:
    one = [note(60, waiting__a=5), note(65, waiting__a=3), note(70)]
    two = [note(61, waiting__a=7), note(66, waiting__a=1), note(70)]
    (period,) = periods([one, two], 600, length_s=600)
    assert period.waiting == 12


def test_cpu_time_by_tenant() -> None:
    before = {"minute": 60, "u_ms:a": 1000, "u:a:x": 1000, "u:b:x": 0}
    after = {"minute": 61, "u_ms:a": 4000, "u:a:x": 3500, "u:a:": 500, "u_ms:b": 700, "u:b:x": 700}
    (period,) = periods([[before, after]], 600)
    assert period.cpu_s == pytest.approx(3.7)
    assert period.tenants_cpu_s == pytest.approx({"x": 3.2, "": 0.5})


def test_times_by_bucket_are_those_of_the_period() -> None:
    before = {"minute": 60, "t:a:3": 10, "t:a:5": 1, "t:b:3": 7}
    after = {"minute": 61, "t:a:3": 12, "t:a:5": 1, "t:b:3": 8, "t:b:0": 4, "t:a:99": 1, "t:a:x": 1}
    (period,) = periods([[before, after]], 600)
    assert period.took == [4, 0, 0, 3] + [0] * (len(BUCKETS_S) - 3)
    (period,) = periods([[before, after]], 600, environments=["b"])
    assert period.took[:4] == [4, 0, 0, 1]


def test_measures_of_all_shards_by_the_minute() -> None:
    one = [
        {"minute": 60, "s:a": 5, "workers": 4, "waiting:a": 2, "f:a:accepted": 1, "s:b": 1},
        {
            "minute": 61,
            "s:a": 8,
            "workers": 4,
            "f:a:accepted": 3,
            "t:a:0": 2,
            "t:a:17": 1,
            "s:b": 0,
        },
        {
            "minute": 65,
            "s:a": 8,
            "f:a:accepted": 3,
            "u_ms:a": 1500,
            "u:a:x": 1500,
            "r_ms:a": 20,
            # The totals of now have these from the beginning on, and no note has them.
            "c:a:sorry": 9,
            "w:a:1": 7,
            "r:a:2": 7,
        },
    ]
    two = [{"minute": 60, "workers": 3, "waiting:a": 1}, {"minute": 61, "f:a:accepted": 4}]
    assert measures([one, two, [note(7)]]) == [
        Measure(3600, "", "workers", "", 4),
        Measure(3600, "a", "finished", "accepted", 6),
        Measure(3600, "a", "submitted", "", 3),
        Measure(3600, "a", "took", "0.005", 2),
        Measure(3600, "a", "took", "inf", 1),
        Measure(3600, "a", "waiting", "", 3),
        Measure(3660, "", "workers", "", 4),
        Measure(3660, "a", "cpu_s", "", 1.5),
        Measure(3660, "a", "ran_s", "", 0.02),
        Measure(3660, "a", "tenant_cpu_s", "x", 1.5),
    ]
    assert measures([]) == []


@pytest.mark.parametrize("kind", "wrt")
def test_a_total_of_no_bucket_is_left_out(kind: str) -> None:
    found = {f"{kind}:a:{part}": 1 for part in ("9" * 5000, "18", "-1", "x", "")}
    notes = [{"minute": 60, "s:a": 1}, {"minute": 61, "s:a": 3, **found}]
    assert measures([notes]) == [Measure(3600, "a", "submitted", "", 2)]
    (period,) = periods([notes], 600)
    assert (period.submitted, sum(period.took)) == (2, 0)
    status = Status({}, {}, (), (), {}, 0, tallies={"s:a": 3, **found})
    (stats,) = environments_of(status).values()
    assert (stats.submitted, stats.waited, stats.ran, stats.took) == (3, *3 * [Times()])


def test_a_count_that_is_no_number_is_zero() -> None:
    odd = {b"s:a": b"x", b"s:b": b"inf", b"s:c": b"nan", b"s:d": b"2.0"}
    assert read_stats(odd.items())[1] == {"s:a": 0, "s:b": 0, "s:c": 0, "s:d": 2}


def test_no_notes() -> None:
    assert periods([[], [note(5)], [{}]], 3600) == []
    assert read_minute(b"nonsense") == read_minute(b"\x92\x01\x02") == {}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["24", "h", "-1h", "1w", ""])
def test_a_time_that_is_none(terminal: Terminal, text: str) -> None:
    done = terminal.run("status", "--since", text)
    assert done.code == 2
    assert "expected 90s, 30m, 24h or 1d" in done.err


@pytest.mark.slow
def test_what_a_fleet_did_that_is_gone(
    terminal: Terminal, settings: Settings, core: Environment
) -> None:
    terminal.use(settings)
    worker = terminal.start("worker", "--slots", "1")
    wait_for_line(worker.stderr, "serves")
    assert terminal.run("submit", *samples("and_swap", "wrong")).code == 1
    worker.terminate()
    assert ended(worker).code == 0
    rows = terminal.run("status", "--since", "1h", "--json").lines
    assert sum(row["submitted"] for row in rows) == 2
    assert sum(row["finished"].get("rejected", 0) for row in rows) == 1
    assert sum(row["ran_s"] for row in rows) > 0.05
    assert "1 rejected" in terminal.run("status", "--since", "1d").out
