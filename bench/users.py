"""Measures proofs, checks and steps behind a full library: plain Lean, a reused Lean, and leanq.

    LEANQ_LEAN=TOOLCHAIN/bin/lean python bench/users.py --header 'import Std'

A text has two theorems, one by ``omega`` and one by ``simp``. ``xargs`` starts Lean for each. One
``lean --worker`` reads all of them as changes of a document: it writes no compiled file, and
nothing judges. leanq judges them in a running fleet. All have the same texts in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from lean import Fleet, one_by_one_ms, through_leanq
from places import Place, new_place, print_table, server_info, worker, xargs
from processes import cpu_s

from leanq.client import AsyncLeanQClient
from leanq.lean.run.protocol import Frames, frame
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings

_SLOTS = 2
_URI = "file:///bench.lean"
_THEOREMS = (
    "theorem o{0} (a b : Nat) (h : a + {0} < b) : a + {0} + 1 ≤ b := by {1}",
    "theorem s{0} (xs : List Nat) : (xs ++ []).length + {0} = xs.length + {0} := by simp",
)
_WARM_UP_S = 20.0
_ALONE = 40
_FIGURES = {
    "plain_rate": ("plain Lean, texts a second and core", "{:.1f}", ""),
    "reused_rate": ("one reused `lean --worker`, the same", "{:.1f}", ""),
    "rate": ("leanq, judged, the same", "{:.1f}", ""),
    "plain_cpu_ms": ("plain Lean, CPU a text", "{:.1f} ms", ""),
    "reused_cpu_ms": ("one reused `lean --worker`, the same", "{:.1f} ms", ""),
    "cpu_ms": ("leanq, judged, the same", "{:.1f} ms", ""),
    "to_reused": ("CPU to the reused Lean's", "{:.2f}", "≤ 1.6"),
    "to_plain": ("CPU to plain Lean's", "{:.3f}", "≤ 0.13"),
    "throughput": ("throughput to `xargs`", "{:.2f}", "≥ 7"),
    "check_p50_ms": ("a check at a time, p50", "{:.1f} ms", ""),
    "check_p95_ms": ("the same, p95", "{:.1f} ms", ""),
    "step_p50_ms": ("a step that goes on, p50", "{:.1f} ms", "≤ 8 ms"),
    "step_p95_ms": ("the same, p95", "{:.1f} ms", ""),
    "closing_p50_ms": ("a step that closes its goal, judged, p50", "{:.1f} ms", ""),
    "closing_p95_ms": ("the same, p95", "{:.1f} ms", ""),
    "queue_bytes": ("what a check costs the queue: bytes in and out", "{:.0f} B", ""),
    "queue_cpu_ms": ("the same, CPU", "{:.2f} ms", ""),
    "load": ("load", "{:.1f}", ""),
}


@dataclass
class Reused:
    """A Lean that reads one text after another, as an editor's does."""

    process: subprocess.Popen[bytes]
    version: int = 0

    @classmethod
    def start(cls, place: Place, header: str) -> Reused:
        environment = place.environment
        options = (*environment.options, "-Dserver.reportDelayMs=0")
        command = [*environment.toolchain.command, *options, "--worker", _URI]
        variables = {**environment.process_env(), "LAKE": "/nonexistent"}
        pipe = subprocess.PIPE
        lean = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe)
        reused = cls(lean)
        reused.send("initialize", {"processId": None, "capabilities": {}}, 0)
        reused.read(f"{header}\n")
        return reused

    def send(self, method: str, params: dict[str, object], number: int | None = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(frame(method, params, number))
        self.process.stdin.flush()

    def read(self, text: str) -> None:
        """Has it read a text, and waits until all of it is elaborated."""
        self.version += 1
        document: dict[str, object] = {"uri": _URI, "version": self.version}
        if self.version == 1:
            opened = {**document, "languageId": "lean4", "text": text}
            self.send("textDocument/didOpen", {"textDocument": opened})
        else:
            changes = [{"text": text}]
            self.send(
                "textDocument/didChange", {"textDocument": document, "contentChanges": changes}
            )
        self.send("textDocument/waitForDiagnostics", document, self.version)
        assert self.process.stdout is not None
        frames = Frames(1 << 24)
        for chunk in iter(lambda: os.read(self.process.stdout.fileno(), 1 << 16), b""):
            if any(each.id == self.version for each in frames.take(chunk)):
                return
        raise SystemExit("Lean's worker ended")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


async def steps_ms(settings: Settings, header: str, ends: str) -> list[float]:
    """Returns the milliseconds of each step, one at a time. ``ends``: the end of each tactic."""
    found = []
    async with AsyncLeanQClient(settings) as client:
        reply = await client.check(f"{header}\n{_THEOREMS[0].format(0, 'sorry')}\n")
        state = reply.sorries[0].state
        assert state is not None
        for number in range(-10, _ALONE + 1):  # the first ones start the process
            began = time.perf_counter()
            done = await client.step(state, f"have h{abs(number)} := h{ends}")
            assert done.verdict == ("accepted" if ends else "incomplete"), done
            if number > 0:
                found.append(1000 * (time.perf_counter() - began))
    return found


def measure(
    place: Place, fleet: Fleet, header: str, files: int, rounds: int
) -> dict[str, list[float]]:
    """Returns the figures of each round by name."""
    settings = Settings(url=fleet.url)
    figures: dict[str, list[float]] = defaultdict(list)
    written = 0

    def batch(count: int) -> list[str]:
        nonlocal written
        numbers = range(written, written + count)
        written += count
        for number in numbers:
            theorems = (each.format(number, "omega") for each in _THEOREMS)
            place.write(f"t{number}", *theorems, header=header)
        return [f"t{number}" for number in numbers]

    until_s = time.monotonic() + _WARM_UP_S
    while time.monotonic() < until_s:
        asyncio.run(through_leanq(place, fleet, batch(8)))
    reused = Reused.start(place, header)
    try:
        for _ in range(rounds):
            names = batch(files)
            plain = xargs(place, names, _SLOTS)
            began_s, before_s = time.perf_counter(), cpu_s(reused.process.pid)
            for name in names:
                reused.read((place.files / f"{name}.lean").read_text())
            reused_wall_s = time.perf_counter() - began_s
            reused_s = cpu_s(reused.process.pid) - before_s
            used_s, info = fleet.cpu_s(), server_info(fleet.url)
            ours = asyncio.run(through_leanq(place, fleet, names))
            now_s, after = fleet.cpu_s(), server_info(fleet.url)
            server_s = now_s[1] - used_s[1]
            total_s = now_s[0].total() - used_s[0].total() + server_s + ours.cpu_s
            sent = (f"total_net_{way}_bytes" for way in ("input", "output"))
            seen = {
                "plain_rate": files / plain.wall_s / _SLOTS,
                "reused_rate": files / reused_wall_s,
                "rate": files / ours.wall_s / _SLOTS,
                "plain_cpu_ms": 1000 * plain.cpu_s / files,
                "reused_cpu_ms": 1000 * reused_s / files,
                "cpu_ms": 1000 * total_s / files,
                "to_reused": total_s / reused_s,
                "to_plain": total_s / plain.cpu_s,
                "throughput": plain.wall_s / ours.wall_s,
                "queue_bytes": sum(int(after[each]) - int(info[each]) for each in sent) / files,
                "queue_cpu_ms": 1000 * server_s / files,
                "load": os.getloadavg()[0],
            }
            for kind, times_ms in (
                ("check", asyncio.run(one_by_one_ms(place, fleet, batch(_ALONE), 0.0))),
                ("step", asyncio.run(steps_ms(settings, header, ""))),
                ("closing", asyncio.run(steps_ms(settings, header, "\nomega"))),
            ):
                cuts_ms = statistics.quantiles(times_ms, n=20)
                seen[f"{kind}_p50_ms"] = cuts_ms[9]
                seen[f"{kind}_p95_ms"] = cuts_ms[18]
            for name, value in seen.items():
                figures[name].append(value)
    finally:
        reused.end()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--header", default="import Std", help="what all texts begin with")
    parser.add_argument("--files", type=int, default=60, help="texts in a round")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is run")
    parser.add_argument("--json", action="store_true", help="print the medians as a JSON line")
    given = parser.parse_args()
    if not (lean := os.environ.get("LEANQ_LEAN")):
        sys.exit("set LEANQ_LEAN to the lean program of a toolchain with a full library")
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder, EmbeddedServer() as server:
        place = new_place(Path(folder), Path(lean).absolute().parents[1])
        variables = {**place.variables, "LEANQ_URL": server.url}
        with worker(place, variables, "--slots", str(_SLOTS)) as pid:
            fleet = Fleet(server.url, int(server_info(server.url)["process_id"]), pid, True)
            figures = measure(place, fleet, given.header, given.files, given.rounds)
    if given.json:
        print(json.dumps({name: statistics.median(each) for name, each in figures.items()}))
    else:
        print_table(_FIGURES, figures)


if __name__ == "__main__":
    main()
