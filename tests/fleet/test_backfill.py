"""History for Prometheus: what promtool makes of the notes, and what is left out."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import msgpack
import pytest
from support.terminals import Terminal

from leanq.fleet.backfill import TimedSample, timeline
from leanq.fleet.prometheus import openmetrics
from leanq.queue.metrics import FLEET
from leanq.queue.queue import Queue
from leanq.queue.settings import Settings
from tests.fleet.test_history import note

SUBMITTED = "leanq_requests_submitted_total"
FINISHED = "leanq_requests_finished_total"


def series(samples: list[TimedSample], name: str, *labels: str) -> dict[int, float]:
    found = [(at_s, value) for n, own, value, at_s in samples if (n, own) == (name, labels)]
    assert found == sorted(found, key=lambda each: each[0])
    return dict(found)


def test_totals_grow_within_the_minute_of_their_note() -> None:
    notes = [
        note(100, s__a=10, f__a__accepted=4, r_ms__a=1000, w_ms__a=9, waiting__a=6, workers=2),
        note(101, s__a=14, f__a__accepted=8, r_ms__a=5000, waiting__a=1, workers=3),
        # Nobody was there for a while; what happened before that had happened in minute 101.
        note(130, s__a=22, f__a__accepted=8, f__a__rejected=2, r_ms__a=7000),
    ]
    samples = list(timeline([notes], 0, 131 * 60))
    submitted = series(samples, SUBMITTED, "a")
    assert list(submitted) == list(range(6000, 131 * 60, 15))
    assert [submitted[at] for at in (6000, 6015, 6030, 6060)] == [10, 11, 12, 14]
    assert [submitted[at] for at in (6075, 6105, 6120, 6990, 7800)] == [16, 20, 22, 22, 22]
    rejected = series(samples, FINISHED, "a", "rejected")
    assert (rejected[6000], rejected[6090], rejected[7845]) == (0, 1, 2)
    assert series(samples, "leanq_slot_busy_seconds_total", "a")[6120] == 7.0
    assert series(samples, "leanq_requests", "a", "waiting") == {6000: 6, 6060: 1}
    assert series(samples, "leanq_workers", "alive") == {6000: 2, 6060: 3}
    names = {name for name, *_ in samples}
    assert names <= {metric.name for metric in FLEET}
    cut = list(timeline([notes], 6040, 6100))
    assert list(series(cut, SUBMITTED, "a")) == [6045, 6060, 6075, 6090]
    assert series(cut, "leanq_workers", "alive") == {6060: 3}


def test_shards_add_up_and_nothing_ever_falls() -> None:
    one = [note(60, s__a=5, workers=4, waiting__a=2), note(61, s__a=8), note(63, s__a=8)]
    # Its first note is later, and a failover has made it forget.
    two = [note(61, s__a=7, workers=5, waiting__a=1), note(62, s__a=6), note(63, s__a=9)]
    samples = list(timeline([one, two, [{}]], 0, 64 * 60))
    submitted = series(samples, SUBMITTED, "a")
    assert [submitted[minute * 60] for minute in (60, 61, 62, 63)] == [12, 15, 15, 18]
    assert list(submitted.values()) == sorted(submitted.values())
    assert series(samples, "leanq_workers", "alive") == {3600: 4, 3660: 5}
    assert series(samples, "leanq_requests", "a", "waiting") == {3600: 2, 3660: 1}


def test_no_notes() -> None:
    assert list(timeline([[], [{}]], 0, 10_000)) == []
    assert openmetrics([]) == "# EOF\n"


async def test_promtool_makes_blocks_of_it(
    terminal: Terminal, settings: Settings, queue: Queue, tmp_path: Path
) -> None:
    terminal.use(settings)
    minute = int(time.time() // 60) - 300
    notes = {
        minute: {"s:a": 0, "waiting:a": 9, "workers": 2},
        minute + 1: {"s:a": 600, "f:a:accepted": 540, "r_ms:a": 60_000, "waiting:a": 3},
        # Prometheus still writes this one.
        minute + 200: {"s:a": 1000, "f:a:accepted": 1000, "r_ms:a": 120_000},
    }
    for at, totals in notes.items():
        data = msgpack.packb([at, totals])
        await queue.call(lambda c, at=at, data=data: c.zadd(queue.keys.minutes, {data: at}))
    done = terminal.run("metrics", "--since", "6h")
    assert (done.code, done.err) == (0, "")
    rows = terminal.run("metrics", "--since", "6h", "--json").lines
    assert {row["metric"] for row in rows} == set(
        re.findall(r"^(leanq\w+)\{", done.out, re.MULTILINE)
    )
    assert max(row["at_s"] for row in rows) < time.time() - 3 * 3600
    dumped = blocks_of(done.out, tmp_path)
    # Those that were printed a moment later may go on a little longer.
    last_s = max(at_s for *_, at_s in dumped)
    assert sorted(dumped) == sorted(
        (row["metric"], sorted(row["labels"]), row["value"], row["at_s"])
        for row in rows
        if row["at_s"] <= last_s
    )
    submitted = [
        (at_s - minute * 60, n) for name, _, n, at_s in sorted(dumped) if name == SUBMITTED
    ]
    assert submitted[:5] == [(0, 0), (15, 150), (30, 300), (45, 450), (60, 600)]


def blocks_of(text: str, folder: Path) -> list[tuple[str, list[str], float, int]]:
    """What promtool makes of a text, and reads back: names, labels' values, values, times."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (.ci/run installs it)")
    file, blocks = folder / "history.om", folder / "data"
    file.write_text(text)

    def tsdb(*arguments: str | Path) -> str:
        command = [promtool, "tsdb", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tsdb("create-blocks-from", "openmetrics", file, blocks)
    # Where Prometheus writes it has made this long since.
    (blocks / "wal").mkdir()
    found = []
    for line in tsdb("dump", blocks).splitlines():
        match = re.fullmatch(r"\{(.*)\} (\S+) (\d+)", line)
        assert match, line
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
        name = labels.pop("__name__")
        found.append((name, sorted(labels.values()), float(match[2]), int(match[3]) // 1000))
    return found


@pytest.mark.parametrize("text", ["3h", "10m", "24"])
def test_what_prometheus_still_writes_is_not_for_us(
    terminal: Terminal, settings: Settings, text: str
) -> None:
    terminal.use(settings)
    done = terminal.run("metrics", "--since", text)
    assert (done.code, done.out) == (2, "")
    assert "3h" in done.err or "write 30m" in done.err
