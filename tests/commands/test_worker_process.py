"""The process of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Iterator

import pytest
from support.fleets import until
from support.lean.sandboxes import children
from support.paths import SAMPLES
from support.terminals import Terminal, ended, wait_for_line

from leanq.client import LeanQClient
from leanq.commands.worker import run_until_stopped
from leanq.lean.driver import EchoDriver
from leanq.queue.settings import Settings
from leanq.worker import Worker


class Stopped(Worker):
    """Ends at once, and says how many objects the collector passes over."""

    async def run(self) -> None:
        self.frozen = gc.get_freeze_count()


async def test_collections_pass_over_what_was_imported(settings: Settings) -> None:
    worker = Stopped(settings, [EchoDriver()], slots=1)
    try:
        async with asyncio.timeout(30.0):
            await run_until_stopped(worker)
    finally:
        gc.unfreeze()
    assert worker.frozen > 10_000


def below(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs."""
    with contextlib.suppress(OSError):
        for child in children(pid):
            yield child
            yield from below(child)


@pytest.mark.slow
def test_a_worker_drains_though_its_processes_are_signalled_as_well(
    terminal: Terminal, settings: Settings
) -> None:
    """Slurm sends SIGTERM to every process of a job that it preempts or cancels."""
    terminal.use(settings)
    worker = terminal.start("worker", "--slots", "1", "--grace", "60")
    wait_for_line(worker.stderr, "serves")
    with LeanQClient(settings) as lean:
        text = (SAMPLES / "heartbeats.lean").read_text()
        future = lean.check(text.replace("maxHeartbeats 2000", "maxHeartbeats 10000"))
        until(future.running)
        worker.send_signal(signal.SIGTERM)

        def signalled() -> bool:
            for pid in below(worker.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            return future.done()

        until(signalled)
        result = future.result()
    assert (result.verdict, result.attempts) == ("exhausted", 1)
    assert ended(worker).code == 0
