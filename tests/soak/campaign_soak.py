"""The soak of campaigns: real Lean, while coordinators, workers and the server are killed.

A campaign runs on two workers of leanq's and two of RQ's, of which some are killed at random
moments, and the server as well. It has to end with one record for each row, the same as of a run
without kills, and nothing may have been checked twice.
``make soak-campaign`` does it with 5,000 rows and five kills, the tests with some.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.campaigns.campaigns import RESUMED_S, Desk, desk_at, start_again
from support.command_server import command_server
from support.fleets import look
from support.lean.sandboxes import children
from support.servers import Server, own_server
from support.terminals import SAMPLES, Process, Terminal, ended, new_terminal, wait_for_line

from leanq.campaigns.results import read_results

KINDS = ("coordinator", "campaign worker", "worker", "server")
_SAME = ("id", "line", "verdict", "messages", "sorries", "axioms", "code_hash", "error")
# Of a hundred rows: so many of each sample.
_MIX = {
    "and_swap": 30,
    "or_swap": 20,
    "standalone": 10,
    "wrong": 16,
    "syntax_error": 8,
    "incomplete": 10,
    "silent_sorry": 5,
    "heartbeats": 1,
}
# Kills come up to this part of the campaign, and so many seconds later for each row at most.
_LATEST, _MOMENT_S = 0.6, 2e-3


@dataclass(frozen=True)
class Plan:
    """How much, and what is killed when: in turn, if there are enough kills."""

    rows: int
    kills: int
    seed: int
    seconds: float
    kinds: Sequence[str] = KINDS
    window: int = 200


@dataclass
class Outcome:
    """What a run came to; ``faults`` must be empty."""

    plan: Plan
    quiet_s: float = 0.0
    stormy_s: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    resumed: list[tuple[str, int, float]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        plan = self.plan
        lines = [f"{plan.rows} rows, {plan.kills} kills, seed {plan.seed}"]
        lines += [f"undisturbed {self.quiet_s:.0f} s, disturbed {self.stormy_s:.0f} s"]
        lines += [", ".join(f"{count} {name}" for name, count in self.verdicts.most_common())]
        lines += [
            f"{kind} at row {row}: next result after {s:.1f} s" for kind, row, s in self.resumed
        ]
        lines += [", ".join(f"{name} {count}" for name, count in sorted(self.counters.items()))]
        return "\n".join([*lines, *self.faults[:20], f"{len(self.faults)} faults"])


def write_rows(path: Path, count: int, rng: random.Random) -> None:
    """Rows whose texts are all different, so that no check answers two."""
    texts = {name: (SAMPLES / f"{name}.lean").read_text() for name in _MIX}
    names = rng.choices([*_MIX], [*_MIX.values()], k=count)
    with path.open("w") as stream:
        for number, name in enumerate(names):
            # A theorem's name stands in messages and in what is audited.
            code = texts[name].replace("theorem ", f"theorem of_row_{number}_")
            stream.write(json.dumps({"id": f"{name}-{number}", "code": code}) + "\n")


class Storm:
    """One disturbed campaign."""

    def __init__(self, desk: Desk, server: Server, outcome: Outcome) -> None:
        self._desk, self._server, self._outcome = desk, server, outcome
        self._rng = random.Random(f"kills {outcome.plan.seed}")
        self._workers = [self._start_worker() for _ in range(2)]
        self._campaign_workers = [desk.start_worker() for _ in range(2)]
        self._deadline_s = time.monotonic() + outcome.plan.seconds

    def run(self, data: Path, out: Path) -> None:
        """From the first row to the last."""
        plan, desk = self._outcome.plan, self._desk
        self._part = Path(f"{out}.part")
        submit = ("submit", str(data), "--out", str(out), "--window", str(plan.window))
        self._id = desk.run(*submit).strip()
        kinds = [*plan.kinds]
        self._rng.shuffle(kinds)
        at = sorted(self._rng.uniform(0.02, _LATEST) * plan.rows for _ in range(plan.kills))
        for number, row in enumerate(map(int, at)):
            self._wait(lambda row=row: self._rows() >= row)
            time.sleep(self._rng.uniform(0.0, min(1.0, _MOMENT_S * plan.rows)))
            self._kill(kinds[number % len(kinds)])
        # After the last row it may be requeued for some seconds.
        self._wait(lambda: desk.look(self._id).state in ("finished", "failed", "cancelled"))
        status = desk.look(self._id)
        assert status.state == "finished", status
        found = look(self._server.settings).counters
        names = ("submitted", "settled", "coalesced", "reaped", "fenced", "released")
        self._outcome.counters = {name: found.get(name, 0) for name in names}

    def _kill(self, kind: str) -> None:
        row, size_bytes = self._rows(), self._size_bytes()
        if kind == "server":
            self._server.stop()
            start_again(self._server)
        elif kind == "worker":
            self._workers.remove(worker := self._rng.choice(self._workers))
            self._end(worker)
            self._workers.append(self._start_worker())
        else:
            self._wait(lambda: self._busy() or not self._part.exists())
            worker = self._busy()
            assert worker, "the campaign ended before it could be killed"
            if kind == "coordinator":
                os.kill(children(worker.pid)[0], signal.SIGKILL)
            else:
                self._campaign_workers.remove(worker)
                self._end(worker)
                self._campaign_workers.append(self._desk.start_worker())
            # Only what is written from now on shows that the campaign is resumed.
            size_bytes = self._size_bytes()
        killed_s = time.monotonic()
        self._wait(lambda: self._size_bytes() > size_bytes or not self._part.exists())
        took_s = time.monotonic() - killed_s
        self._outcome.resumed.append((kind, row, took_s))
        if took_s > RESUMED_S:
            self._outcome.faults.append(f"{kind}: nothing came for {took_s:.1f} s")

    def _busy(self) -> Process | None:
        """The worker that has a coordinator."""
        return next((each for each in self._campaign_workers if children(each.pid)), None)

    def _end(self, process: Process) -> None:
        process.kill()
        process.wait(20)

    def _start_worker(self) -> Process:
        worker = self._desk.terminal.start(
            "worker", "--slots", "1", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        wait_for_line(worker.stderr, "serves")
        return worker

    def _rows(self) -> int:
        """Records that are there."""
        with contextlib.suppress(FileNotFoundError):
            return self._part.read_bytes().count(b'"verdict":')
        return self._outcome.plan.rows if self._part.with_suffix("").exists() else 0

    def _size_bytes(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._part.stat().st_size
        return 0

    def _wait(self, condition: Any) -> None:
        left_s = self._deadline_s - time.monotonic()
        end_s = time.monotonic() + max(1.0, left_s)
        while not condition():
            assert time.monotonic() < end_s, "the time is over"
            time.sleep(0.05)


def soak(plan: Plan, cache: Path) -> Outcome:
    """Both runs, and what is different between them."""
    outcome = Outcome(plan)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(own_server("--appendonly", "yes"))
        terminal = stack.enter_context(new_terminal(cache))
        data, quiet, stormy = (terminal.folder / name for name in ("data.jsonl", "quiet", "stormy"))
        write_rows(data, plan.rows, random.Random(f"rows {plan.seed}"))
        started_s = time.monotonic()
        _undisturbed(terminal, data, quiet, plan)
        outcome.quiet_s = time.monotonic() - started_s
        desk = stack.enter_context(desk_at(terminal, server.settings))
        storm = Storm(desk, server, outcome)
        started_s = time.monotonic()
        storm.run(data, stormy)
        outcome.stormy_s = time.monotonic() - started_s
        _compare(outcome, quiet, stormy)
    return outcome


def _undisturbed(terminal: Terminal, data: Path, out: Path, plan: Plan) -> None:
    run = ("campaign", "run", str(data), "--out", str(out), "--window", str(plan.window))
    process = terminal.start(*run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.wait(plan.seconds)
    # Not all are accepted.
    assert process.returncode in (1, 3), ended(process)


def _compare(outcome: Outcome, quiet: Path, stormy: Path) -> None:
    plan, faults = outcome.plan, outcome.faults
    found = [[*read_results(str(path))] for path in (quiet, stormy)]
    outcome.verdicts.update(str(record["verdict"]) for record in found[1])
    for name, records in zip(("undisturbed", "disturbed"), found, strict=True):
        if [record["line"] for record in records] != [*range(1, plan.rows + 1)]:
            faults.append(f"{name}: not one record for each row, but {len(records)}")
    for old, new in zip(*found, strict=False):
        if any(old.get(name) != new.get(name) for name in _SAME):
            both = [{name: record.get(name) for name in _SAME} for record in (old, new)]
            faults.append(f"line {old['line']}: {both[0]} became {both[1]}")
    asked, ran = (outcome.counters[name] for name in ("submitted", "settled"))
    if asked != plan.rows or ran != plan.rows:
        faults.append(f"{asked} requests and {ran} replies for {plan.rows} rows")


def main() -> int:
    """Prints what came of it; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--seconds", type=float, default=1800.0, help="at most, for each run")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed {given.seed}", flush=True)
    folder = tempfile.TemporaryDirectory(prefix="leanq-soak-", dir="/tmp")
    with folder as cache, command_server():
        plan = Plan(given.rows, given.kills, given.seed, given.seconds)
        outcome = soak(plan, Path(cache))
    print(outcome)
    return int(bool(outcome.faults))


if __name__ == "__main__":
    sys.exit(main())
