"""``leanq status --watch``: a look each second, in place on a terminal, in lines elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import termios
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from support.fleets import Recorder, connections, serving, until
from support.queue.queues import Queue
from support.servers import own_server
from support.terminals import Process, Terminal, ended, read_terminal, screen, wait_for_line

from leanq.client import LeanQClient
from leanq.commands.status import _Rates, _record_of, _view
from leanq.fleet.stats import EnvironmentStats, FleetStats, decisions_of
from leanq.queue.results import Status, WorkerRow
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_info

NOTHING = Status({}, {}, (), (), {}, 0)


@pytest.fixture
def place(terminal: Terminal, settings: Settings) -> Terminal:
    """A terminal that uses a queue of its own."""
    terminal.use(settings)
    return terminal


def looks(process: Process, until_seen: Any) -> list[dict[str, Any]]:
    """The JSON lines that are printed up to the one that is looked for."""
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        found.append(json.loads(line))
        if until_seen(found[-1]):
            return found
    raise AssertionError(f"ended before: {found[-1:]}")


def stop(process: Process) -> None:
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert (done.code, done.err) == (0, "")


def test_each_look_is_an_object(place: Terminal, settings: Settings) -> None:
    driver = Recorder()
    with serving(settings, driver, slots=2), LeanQClient(settings) as lean:
        process = place.start("status", "--watch", "--json")
        (first,) = looks(process, lambda look: True)
        assert first["environments"]["echo"] == {
            "driver": "echo",
            "waiting": 0,
            "paused": 0,
            "oldest_s": 0,
            "submitted_per_s": None,
            "finished_per_s": None,
            "cpu_s": 0.0,
            "tenants_cpu_s": {},
            "running": 0,
            "slots_busy": 0,
            "slots_idle": 2,
            "workers": 1,
            "fingerprints": {},
        }
        held = [lean.echo(b"held", deadline_s=100) for _ in range(5)]
        busy = looks(process, lambda look: look["environments"]["echo"]["waiting"])[-1]
        assert busy["environments"]["echo"]["slots_busy"] == 2
        assert busy["environments"]["echo"]["submitted_per_s"] > 0
        assert busy["environments"]["echo"]["finished_per_s"] == 0
        driver.let_go()
        assert [future.result(20) for future in held] == [b"held"] * 5
        seen = looks(process, lambda look: look["verdicts"] == {"echo": 5})
        assert seen[-1]["environments"]["echo"]["finished_per_s"] > 0
        assert [look["at_s"] for look in seen] == sorted(look["at_s"] for look in seen)
        # As without --watch.
        (plain,) = place.run("status", "--json").lines
        assert list(seen[-1]) == list(plain)
        stop(process)


@pytest.mark.slow
def test_plain_looks_are_blocks_of_lines(place: Terminal, settings: Settings) -> None:
    # Even where the user forces colours.
    environ = {"FORCE_COLOR": "1", "TERM": "xterm"}
    with serving(settings, slots=2):
        process = place.start("status", "--watch", environ=environ)
        looked_for = ("leanq  ", "waiting  ", "ENVIRONMENT", "echo ", "1 worker alive", "WORKER")
        shown = [wait_for_line(process.stdout, text) for text in (*looked_for, *looked_for)]
        stop(process)
    assert not any("\x1b" in line for line in shown)
    assert shown[2].split() == [
        *("ENVIRONMENT", "WAITING", "OLDEST", "IN/S", "OUT/S", "RUNNING", "SLOTS", "WORKERS")
    ]
    assert shown[3].split() == ["echo", "0", "–", "–", "–", "0", "2", "1"]
    assert shown[9].split() == ["echo", "0", "–", "0.0", "0.0", "0", "2", "1"]


@pytest.mark.slow
def test_all_looks_are_over_one_connection(place: Terminal) -> None:
    with own_server() as server:
        place.use(server.settings)
        process = place.start("status", "--watch", "--json")
        looks(process, lambda look: True)
        first = connections(server.settings)
        looks(process, lambda look: True)
        assert len(first) == 1
        assert connections(server.settings) == first
        stop(process)


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(place: Terminal) -> None:
    with own_server() as server:
        place.use(server.settings)
        process = place.start("status", "--watch", "--json")
        (first,) = looks(process, lambda look: True)
        assert "error" not in first
        server.stop()
        gone = looks(process, lambda look: "error" in look)[-1]
        assert "no answer from" in gone["error"]
        server.start()
        looks(process, lambda look: "error" not in look)
        # One that hangs says nothing, which is said as well, and does not keep Ctrl-C waiting.
        server.send(signal.SIGSTOP)
        hung = looks(process, lambda look: "error" in look)[-1]
        assert re.fullmatch(r"no answer for \d+ s", hung["error"])
        stop(process)


@pytest.mark.slow
def test_it_begins_without_a_server(place: Terminal) -> None:
    place.environ["LEANQ_URL"] = "unix://:secret@/no/such/place"
    process = place.start("status", "--watch")
    line = wait_for_line(process.stdout, "error  ")
    assert "/no/such/place" in line
    assert "secret" not in line
    wait_for_line(process.stdout, "error  ")
    stop(process)


def test_a_terminal_is_drawn_over(place: Terminal, settings: Settings) -> None:
    with serving(settings, slots=2), LeanQClient(settings) as lean, screen() as (ours, theirs):
        assert lean.echo(b"x").result(20) == b"x"
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        process = place.start("status", "--watch", stdout=theirs, environ={"TERM": "xterm"})
        os.close(theirs)
        shown = b""
        # Two whole looks.
        while shown.count(b"worker alive") < 2:
            shown += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        rest = read_terminal(ours)
        assert ended(process).code == 0
    text = shown.decode()
    assert text.startswith("\x1b[?1049h")
    for words in ("RUNNING", "finished    1: 1 echo", "1 worker alive", "SERVES"):
        assert words in text
    # It leaves the screen as it was, and below that what it showed last.
    before, _, after = (text + rest).partition("\x1b[?1049l")
    assert "\x1b[?25h" in before + after
    assert "finished    1: 1 echo" in after


def test_what_was_noted_fits_a_terminal(place: Terminal, settings: Settings) -> None:
    with serving(settings, slots=1), LeanQClient(settings) as lean:
        assert lean.echo(b"x").result(20) == b"x"

        def since() -> str:
            done = place.run("status", "--since", "1h")
            assert (done.code, done.err) == (0, "")
            return str(done.out)

        until(lambda: "Finished in all: 1 echo" in since())
        titles, *rows, means, _ = since().splitlines()
    assert titles.split()[:4] == ["FROM", "SUBMITTED", "FINISHED", "ACCEPTED"]
    assert rows
    assert means.startswith("WAIT and RUN are means")
    assert all(len(line) <= 80 for line in (titles, *rows, means))


def test_what_was_noted_is_written_as_parquet(
    place: Terminal, settings: Settings, tmp_path: Path
) -> None:
    out = tmp_path / "history.parquet"
    with serving(settings, slots=1), LeanQClient(settings) as lean:
        assert lean.echo(b"x").result(20) == b"x"

        def finished() -> list[dict[str, Any]]:
            done = place.run("status", "--since", "1h", "--out", str(out))
            assert (done.code, done.err) == (0, "")
            rows = pq.read_table(out).to_pylist()
            assert f"{out}: {len(rows)} rows of 60 min" in done.out
            return [row for row in rows if row["what"] == "finished"]

        until(finished)
        (row,) = finished()
    assert (row["part"], row["value"]) == ("echo", 1.0)
    assert row["start"].tzinfo is not None
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "history.parquet"), "--since 24h"),
        (("--since", "1h", "--out", "absent/history.parquet"), "No such file or directory"),
    ],
)
def test_a_history_that_cannot_be_written(
    place: Terminal, arguments: tuple[str, ...], said: str
) -> None:
    done = place.run("status", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_no_more_than_a_day_is_noted(place: Terminal) -> None:
    done = place.run("status", "--since", "2d")
    assert (done.code, done.out) == (2, "")
    assert "24h" in done.err


def test_watch_and_since_exclude_each_other(place: Terminal) -> None:
    done = place.run("status", "--watch", "--since", "1h")
    assert (done.code, done.out) == (2, "")
    assert "--watch" in done.err
    assert "--since" in done.err


# What is shown


def glanced(at_s: float, submitted: int, finished: int, status: Status = NOTHING) -> FleetStats:
    environment = EnvironmentStats(submitted=submitted, finished=Counter({"accepted": finished}))
    return FleetStats(at_s, status, {"default": environment})


def test_rates_are_over_the_last_looks_and_begin_anew_after_a_loss() -> None:
    rates = _Rates()
    rates.add(glanced(0.0, 100, 50))
    assert rates.of("default") is None
    rates.add(glanced(2.0, 110, 51))
    assert rates.of("default") == (5.0, 0.5)
    for second in range(3, 30):
        rates.add(glanced(float(second), 110, 51))
    assert rates.of("default") == (0.0, 0.0)
    # A replica that knows of less took over.
    rates.add(glanced(30.0, 105, 51))
    assert rates.of("default") is None
    rates.add(glanced(31.0, 106, 53))
    assert rates.of("default") == (1.0, 2.0)


def shown(
    status: Status, environments: dict[str, EnvironmentStats], height: int, trouble: str = ""
) -> list[str]:
    """The lines that a terminal of this height shows."""
    console = Console(width=100, height=height, force_terminal=False)
    seen = FleetStats(time.time(), status, environments)
    rates = _Rates()
    rates.add(seen)
    record = _record_of(Settings(url="redis://:secret@host"), seen, rates)
    with console.capture() as captured:
        console.print(_view(record, trouble, console))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_view_fits_the_terminal_with_the_busiest_first() -> None:
    info = pack_info({"slots": 4, "environments": ["default"]})
    rows = [WorkerRow(f"w{n}", 9.0 if n else -1.0, n % 5, info) for n in range(300)]
    told = {"at": time.time(), "target": 9, "order": 3, "reason": "backlog", "text": "much waits"}
    decisions = {"e7": json.dumps({**told, "who": "s"}).encode()}
    counters = {"warm_hits": 5, "reaped": 2, "verdict:accepted": 7}
    status = replace(NOTHING, workers=tuple(rows), decisions=decisions, counters=counters)
    environments = {f"e{n}": EnvironmentStats(waiting=n) for n in range(8)}
    for height in (16, 24, 50):
        lines = shown(status, environments, height)
        assert len(lines) <= height
    assert len(lines) == height
    assert lines[1] == "queue       redis://:***@host"
    assert [line.split()[0] for line in lines if re.match(r"e\d", line)] == [
        f"e{n}" for n in reversed(range(8))
    ]
    text = "\n".join(lines)
    told = r"scaler      e7: 9 workers wanted, 3 before \(backlog, \d\.\d s ago, s\): much waits"
    assert re.search(told, text)
    assert "5 of 5 requests went to a worker that had their header or state loaded" in text
    # None of many reads like a fault.
    status = replace(status, counters=counters | {"warm_hits": 0, "warm_misses": 714})
    assert not any("warm" in line for line in shown(status, environments, 50))
    assert "2 requeued after an expired lease" in text
    assert "7: 7 accepted" in text
    first = lines.index("299 workers alive, 1 expired lease") + 2
    assert lines[first:]
    assert all(line.split()[1:3] == ["4", "4"] for line in lines[first:])
    few = shown(status, environments, 16)
    assert "and 4 more" in few


def test_names_do_not_steer_the_terminal_and_trouble_is_shown() -> None:
    status = replace(NOTHING, workers=(WorkerRow("\x1b[2Jw [red]x", 9.0, 0, b""),))
    text = "\n".join(shown(status, {}, 24, trouble="no answer for 3 s"))
    assert "\x1b" not in text
    assert "�[2Jw [red]x" in text
    assert "no answer for 3 s" in text
    assert "the last look was 0 s ago" in text


async def test_decisions_that_are_old_or_no_decisions_are_not_shown(queue: Queue) -> None:
    good = {"at": time.time(), "target": 1, "order": 2, "reason": "r", "text": "t", "who": "w"}
    values = {"good": good, "old": {**good, "at": time.time() - 700}, "part": {"at": time.time()}}
    values |= {"list": [], "odd": {**good, "target": float("inf")}, "none": {**good, "at": None}}
    data = {name: json.dumps(value).encode() for name, value in values.items()}
    await queue.publish_decisions({**data, "bytes": b"\xff", "deep": b"[" * 100_000})
    assert set(decisions_of(await queue.status())) == {"good"}
