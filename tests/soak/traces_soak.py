"""The soak of traces: a campaign with real Lean, whose rows are checked again from the file alone.

``make soak-traces`` does it with 2,000 problems and four samples of each, the tests with some. Each
sample is a text of its own, so that nothing is written once for several.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.campaigns.traces import asked_again, fault, read_traces
from support.command_server import command_server
from support.pools import new_pool
from support.terminals import new_terminal

from leanq.local import Pool
from leanq.producer.future_client import LeanQFuture
from leanq.queue.requests import Reply

_HEADER = "theorem t{n} (p{n} q : Prop) (h : And p{n} q) : And q p{n} := by"
_SAMPLES = (
    "exact And.intro h.right h.left",
    "constructor\n  exact h.right\n  exact h.left",
    "exact And.intro h.left h.right",
    "constructor\n  exact h.right\n  sorry",
)
# In a Pool at a time; a million futures would take their memory.
_WINDOW = 64
_LONGEST_S = 3600.0


@dataclass
class Outcome:
    """What became of a campaign's texts; ``faults`` are rows that were not the same again."""

    rows: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    traces_bytes: int = 0
    checked_s: float = 0.0
    exported_s: float = 0.0
    again_s: float = 0.0


def soak(problems: int, samples: int, cache: Path) -> Outcome:
    """Checks so many samples of so many problems, exports them, and checks the rows again."""
    outcome = Outcome()
    with new_terminal(cache) as terminal:
        rows = (
            {"id": n, "formal_statement": _HEADER.format(n=n), "proof": _texts(samples)}
            for n in range(problems)
        )
        terminal.file("data.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
        started = time.monotonic()
        run = ("campaign", "run", "data.jsonl", "--out", "out.jsonl")
        # It says how far it is for longer than a pipe holds what nobody reads.
        quiet = subprocess.DEVNULL
        code = terminal.start(*run, stdout=quiet, stderr=quiet).wait(_LONGEST_S)
        outcome.checked_s = time.monotonic() - started
        assert code in (0, 1), code
        started = time.monotonic()
        done = terminal.run("export-traces", "out.jsonl", "--out", "traces")
        outcome.exported_s = time.monotonic() - started
        assert done.code == 0, done
        for name in ("data.jsonl", "out.jsonl", "out.jsonl.campaign"):
            os.remove(terminal.folder / name)
        folder = terminal.folder / "traces"
        found = read_traces(folder)
        outcome.traces_bytes = sum(path.stat().st_size for path in folder.iterdir())
    outcome.rows = len(found)
    outcome.verdicts.update(row["verdict"] for row in found)
    started = time.monotonic()
    with new_pool(cache) as lean:
        _check_again(lean, found, outcome)
    outcome.again_s = time.monotonic() - started
    return outcome


def _texts(samples: int) -> list[str]:
    # A comment of its own, where there are more samples than proofs.
    return [f"{_SAMPLES[n % len(_SAMPLES)]} -- {n}" for n in range(samples)]


def _check_again(lean: Pool, rows: list[dict[str, Any]], outcome: Outcome) -> None:
    asked: deque[tuple[dict[str, Any], LeanQFuture[Reply]]] = deque()
    for row in [*rows, *[None] * _WINDOW]:
        if row is not None:
            asked.append((row, asked_again(lean, row)))
        if asked and (row is None or len(asked) >= _WINDOW):
            first, future = asked.popleft()
            if wrong := fault(first, future.result()):
                outcome.faults.append(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=4)
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache, command_server():
        outcome = soak(how.problems, how.samples, Path(cache))
    print(
        f"{outcome.rows:,} rows, {outcome.traces_bytes / max(1, outcome.rows):.0f} bytes each; "
        f"checked in {outcome.checked_s:.0f} s, exported in {outcome.exported_s:.1f} s, checked "
        f"again in {outcome.again_s:.0f} s; {dict(outcome.verdicts)}"
    )
    for each in outcome.faults[:20]:
        print(each)
    whole = outcome.rows == how.problems * how.samples
    print("no fault" if whole and not outcome.faults else f"{len(outcome.faults)} faults")
    sys.exit(0 if whole and not outcome.faults else 1)


if __name__ == "__main__":
    main()
