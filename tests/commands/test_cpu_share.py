"""Workers that take a share of a machine's CPUs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from support.fleets import look, until
from support.required import missing
from support.terminals import Terminal, samples, wait_for_line

from leanq.lean.sandbox.cgroup import children
from leanq.queue.settings import Settings
from leanq.queue.wire import unpack_info

CPUS = sorted(os.sched_getaffinity(0))


def kept(share: float) -> list[int]:
    """The CPUs of a process that keeps to a share of them, as a child of its own has them."""
    code = (
        "import subprocess, sys; from leanq.commands.worker import cpus, keep_to; "
        f"keep_to({share}); print(cpus(), flush=True); "
        "subprocess.run([sys.executable, '-c', 'import os; print(*os.sched_getaffinity(0))'])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    count, rest = said.stdout.splitlines()
    assert int(count) == len(rest.split())
    return sorted(map(int, rest.split()))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.5, 0.51, 0.99, 1])
def test_a_share_is_rounded_up_and_never_nothing(share: float) -> None:
    least = share * len(CPUS)
    found = kept(share)
    assert least <= len(found) < least + 1
    assert found == CPUS[-len(found) :]


@pytest.mark.slow
def test_lean_processes_keep_to_the_share(settings: Settings, terminal: Terminal) -> None:
    if len(CPUS) < 2:
        missing("a second CPU")
    terminal.use(settings)
    worker = terminal.start("worker", "--cpu-share", "0.5", stdout=subprocess.DEVNULL)
    wait_for_line(worker.stderr, "serves")
    half = set(CPUS[-((len(CPUS) + 1) // 2) :])
    (row,) = look(settings).workers
    assert unpack_info(row.info)["slots"] == len(half)
    assert terminal.run("submit", *samples("and_swap")).code == 0

    # Lean overflows its stack after some twenty seconds.
    running = terminal.start("submit", *samples("stack_overflow"), stdout=subprocess.DEVNULL)
    until(terminal.busy)
    family = [worker.pid]
    for parent in family:  # which grows meanwhile
        with contextlib.suppress(OSError):  # it has just ended
            family += children(str(parent))
            assert os.sched_getaffinity(parent) == half
    assert len(family) > 3
    running.terminate()
    running.wait(60)  # it withdraws its request while there is a worker that can be told


@pytest.mark.slow
@pytest.mark.parametrize("share", ["0", "-0.5", "1.5", "half"])
def test_what_is_no_share(terminal: Terminal, share: str) -> None:
    done = terminal.run("worker", "--url", "redis://127.0.0.1:1", "--cpu-share", share)
    assert done.code == 2
    assert "--cpu-share" in done.err
