"""The script that runs a worker beside a program which comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.fleets import look, until
from support.paths import ROOT
from support.terminals import Process, Terminal, ended, samples, wait_for_line

from leanq.queue.settings import Settings

SCRIPT = str(ROOT / "deploy/spare-cpus.sh")


def start(terminal: Terminal, settings: Settings, **variables: str) -> Process:
    terminal.use(settings)
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **variables}
    environ.setdefault("SPARE_FREE_GB", "0.001")
    return terminal.start(environ=environ, program=["bash", SCRIPT], stdout=subprocess.DEVNULL)


# Looks at a process whose children end all the time, as long as it lives.
LOOKS = """
eval "$(sed -n '/^look_below/,/^}/p' "$1")"
(for ((n = 0; n < 2000; n++)); do (exit 0) & (exit 0) & wait; done) &
worker=$!
while kill -0 "$worker" 2>/dev/null; do look_below; done
"""


def living(settings: Settings) -> int:
    return sum(row.lease_s > 0 for row in look(settings).workers)


@pytest.mark.slow
def test_it_leaves_the_machine_while_it_is_told_to(settings: Settings, terminal: Terminal) -> None:
    busy = Path(terminal.file("busy", ""))
    script = start(terminal, settings, SPARE_STOP=str(busy))
    assert wait_for_line(script.stderr, "is there: no worker runs")
    busy.unlink()
    until(lambda: living(settings) == 1, 60.0)
    # Lean overflows its stack after some twenty seconds.
    running = terminal.start("submit", *samples("stack_overflow"), stdout=subprocess.DEVNULL)
    until(terminal.busy)
    busy.touch()
    assert wait_for_line(script.stderr, "is there: no worker runs")
    until(lambda: not terminal.busy() and living(settings) == 0, 30.0)
    busy.unlink()
    # Its request came back at once, and runs again.
    until(terminal.busy, 60.0)
    running.terminate()
    running.wait(60)
    script.terminate()
    assert ended(script).code == 0
    until(lambda: living(settings) == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ({"SPARE_GB": "0.01"}, "it took more than 0.01 GB: no worker runs"),
        ({"SPARE_FREE_GB": "100000"}, "less than 100000 GB are available: no worker runs"),
    ],
)
def test_its_memory_is_capped(
    settings: Settings, terminal: Terminal, variable: dict[str, str], text: str
) -> None:
    script = start(terminal, settings, SPARE_STOP=str(terminal.folder / "none"), **variable)
    assert wait_for_line(script.stderr, text)
    until(lambda: living(settings) == 0)
    script.terminate()
    assert ended(script).code == 0


@pytest.mark.slow
def test_processes_that_end_under_its_look_do_not_hold_it() -> None:
    subprocess.run(["bash", "-c", LOOKS, "bash", SCRIPT], check=True, timeout=120.0)
