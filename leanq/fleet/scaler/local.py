"""This machine as a scaler's target: each worker is a process, which ends with the scaler."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping

from leanq.errors import UsageError
from leanq.fleet.scaler.jobs import Job, JobTarget
from leanq.queue.settings import JOB_VARIABLE


class LocalTarget(JobTarget):
    """Worker processes on this machine.

    Args:
        worker: options of ``leanq worker``, as on a command line.
        environ: their environment variables, which name the queue.
        as_json: whether they log JSON lines to the scaler's standard error.

    Raises:
        UsageError: the options cannot be read.
    """

    def __init__(
        self,
        worker: str,
        environ: Mapping[str, str],
        environments: Collection[str],
        *,
        as_json: bool = False,
    ) -> None:
        super().__init__(environments)
        options = options_of(worker) + ["--json"] * as_json
        self._command = [sys.executable, "-m", "leanq", "worker", *options]
        self._environ = environ
        # Processes with the monotonic time of their start, without those that were told to go.
        self._workers: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self._going: list[subprocess.Popen[bytes]] = []

    async def jobs(self, environment: str) -> list[Job]:
        self._going = [process for process in self._going if process.poll() is None]
        alive = {name: each for name, each in self._workers.items() if each[0].poll() is None}
        self._workers, now_s = alive, time.monotonic()
        return [Job(name, name, False, now_s - since_s) for name, (_, since_s) in alive.items()]

    async def start(self, environment: str, count: int) -> None:
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        name = secrets.token_hex(6)
        environ = {**self._environ, JOB_VARIABLE: name}
        # In a session of its own: Ctrl-C then reaches the scaler alone, which drains its workers.
        process = subprocess.Popen(
            self._command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._workers[name] = process, time.monotonic()

    async def end(self, ids: Collection[str], ready: Collection[str]) -> None:
        for name in ids:
            process, _ = self._workers.pop(name)
            process.send_signal(signal.SIGTERM)
            self._going.append(process)

    async def close(self) -> None:
        processes = [*self._going, *(process for process, _ in self._workers.values())]
        for process in processes:
            # This does nothing if the process has ended.
            process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(asyncio.to_thread(process.wait) for process in processes))


def options_of(worker: str) -> list[str]:
    """Returns the options in a text; raises UsageError."""
    try:
        return shlex.split(worker)
    except ValueError as error:
        raise UsageError(f"--worker {worker!r} cannot be read: {error}") from None
