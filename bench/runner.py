"""Runs one measurement: a server, a worker and a client, each in its own process; ends them all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from load import WORKER_PID, Plan
from servers import server

HERE = Path(__file__).resolve().parent
_STOP_S = 5.0


@dataclass
class Outcome:
    """The client's figures by name; if it failed, also why."""

    figures: dict[str, float] = field(default_factory=dict)
    failed: str = ""


def measure(
    module: str,
    plan: Plan,
    python: str = sys.executable,
    variant: str = "",
    tree: Path = HERE.parent,
) -> Outcome:
    """Runs ``peers.MODULE`` with that interpreter on a fresh server; always ends all processes.

    ``tree``: the checkout of leanq, unless a peer has its own interpreter.
    """
    command = [python, "-P", "-m", f"peers.{module}"]
    # A peer's own environment sees only its own packages and these files.
    paths = [str(HERE), *([str(tree)] if python == sys.executable else [])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    outcome = Outcome()
    with (
        server() as url,
        tempfile.TemporaryFile() as errors,
        ended([*command, "worker", url, variant], variables, subprocess.DEVNULL, errors) as worker,
        ended(
            [*command, "client", url, plan.text(), variant],
            {**variables, WORKER_PID: str(worker.pid)},
            subprocess.PIPE,
            errors,
        ) as client,
    ):
        outcome.failed = _await_end(client, worker, plan.limit_s)
        if outcome.failed:
            os.killpg(client.pid, signal.SIGKILL)
        said, _ = client.communicate()
        if outcome.failed or client.returncode:
            outcome.failed = (outcome.failed + last_line(errors)).rstrip(": ")
    for line in said.splitlines():
        outcome.figures |= json.loads(line)
    return outcome


def _await_end(
    client: subprocess.Popen[bytes], worker: subprocess.Popen[bytes], within_s: float
) -> str:
    """Waits for the client, which prints less than a pipe holds; returns its failure."""
    deadline = time.monotonic() + within_s
    while client.poll() is None:
        if worker.poll() is not None:
            return "the worker ended: "
        if time.monotonic() > deadline:
            return f"no end after {within_s:.0f} s: "
        time.sleep(0.05)
    return ""


@contextlib.contextmanager
def ended(
    command: Sequence[str], variables: Mapping[str, str], stdout: int, errors: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command; on leaving, asks its whole group to end, then kills it."""
    with subprocess.Popen(
        command, env=variables, stdout=stdout, stderr=errors, start_new_session=True
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.communicate(timeout=_STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def last_line(errors: IO[bytes]) -> str:
    """Returns the last line on standard error: an exception and its message."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:300]


def leave_on_sigterm() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, with all that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
