"""Measures Lean's language server in a worker without forks, beside plain Lean on the same texts.

Both run in turn, in rounds of as many texts. CPU time is that of all that runs: this process with
the driver, the sandboxes, Lean and the judge. No queue takes part. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from places import Place, lean, new_place, print_table
from processes import cpu_s, used

from leanq.lean.driver import LeanDriver
from leanq.lean.run.documents import DocumentRules
from leanq.queue.requests import Request
from leanq.states import MemoryStates

_HEADERS = ("import Std", "import Lean")
_WRONG = (
    "theorem o{0} (a b : Nat) (h : a + {0} < b) : a + {0} + 2 ≤ b := by omega\n"
    "theorem s{0} (xs : List Nat) : (xs ++ []).length + {0} = xs.length := by simp\n"
)
_RIGHT = (
    "theorem o{0} (a b : Nat) (h : a + {0} < b) : a + {0} + 1 ≤ b := by omega\n"
    "theorem s{0} (xs : List Nat) : (xs ++ []).length + {0} = xs.length + {0} := by simp\n"
)
# A proof of twenty lines.
_PROOF = (
    "theorem p{0} (a b c : Nat) (f : Nat → Nat) (h : a < b) (k : b < c) (e : f a = {0}) :\n"
    "    a + 2 ≤ c ∧ f a + 0 = {0} ∧ (a ≤ c ∨ c ≤ a) := by\n"
    "  have one : a + 1 ≤ b := by\n    exact h\n"
    "  have two : b + 1 ≤ c := by\n    exact k\n"
    "  have three : a + 2 ≤ b + 1 := by\n    exact Nat.succ_le_succ one\n"
    "  constructor\n"
    "  · apply Nat.le_trans\n    · exact three\n    · exact two\n"
    "  · constructor\n    · rw [Nat.add_zero]\n      exact e\n"
    "    · left\n      apply Nat.le_of_lt\n      apply Nat.lt_trans\n"
    "      · exact h\n      · exact k\n"
)
_FIGURES = {
    "rejected": ("rejected, `import Std`: CPU time / plain Lean's", "{:.3f}", "≤ 0.10"),
    "rejected_ms": ("the same, a text", "{:.1f} ms", ""),
    "accepted": ("accepted and judged, `import Std`: CPU time / plain Lean's", "{:.3f}", "≤ 1.25"),
    "accepted_ms": ("the same, a text", "{:.1f} ms", ""),
    "plain_ms": ("plain Lean, a text", "{:.1f} ms", ""),
    "goals": ("goals before each tactic of 20 lines: CPU time / the check's", "{:.3f}", "≤ 2"),
    "goals_ms": ("the same, a text with its goals", "{:.1f} ms", ""),
    "memory_mb": ("private memory of Lean, behind both headers", "{:.0f} MB", ""),
}

Figures = defaultdict[str, list[float]]


class Bench:
    """Drivers without forks, whose texts are of no other bench."""

    def __init__(self, place: Place, driver: LeanDriver, texts: int, figures: Figures) -> None:
        self._place, self._driver, self._texts = place, driver, texts
        self._number = 0
        self.figures = figures

    async def round(self) -> None:
        wrong_s, wrong_plain_s = await self._pair(_WRONG, "rejected")
        right_s, right_plain_s = await self._pair(_RIGHT, "accepted")
        checked_s = await self._run(self._made(_PROOF), "accepted")
        goals_s = await self._run(self._made(_PROOF), "accepted", goals=True)
        note = self.figures
        note["rejected"].append(wrong_s / wrong_plain_s)
        note["accepted"].append(right_s / right_plain_s)
        note["goals"].append(goals_s / checked_s)
        for name, spent_s in (
            ("rejected", wrong_s),
            ("accepted", right_s),
            ("plain", right_plain_s),
            ("goals", goals_s),
        ):
            note[f"{name}_ms"].append(1000 * spent_s / self._texts)

    async def warm_up(self) -> None:
        """Has a process stand behind each header."""
        for header in _HEADERS:
            for _ in range(2):
                await self._run([self._text(_WRONG, header)], "rejected")
        await self._run([self._text(_RIGHT, _HEADERS[0])], "accepted")
        memory_mb = sum(mb for _, mb in used("--worker"))
        self.figures["memory_mb"].append(memory_mb)

    async def _pair(self, text: str, verdict: str) -> tuple[float, float]:
        """Returns the CPU seconds of texts through the driver, and by plain Lean."""
        texts = self._made(text)
        if len(self.figures["plain_ms"]) % 2:
            plain_s = self._plainly(texts)
            return await self._run(texts, verdict), plain_s
        return await self._run(texts, verdict), self._plainly(texts)

    async def _run(self, texts: Sequence[str], verdict: str, *, goals: bool = False) -> float:
        began_s = cpu_s(os.getpid())
        for code in texts:
            reply = await self._driver.run(Request("check", code=code, goals=goals))
            if reply.verdict != verdict or goals != bool(reply.tactics):
                sys.exit(f"a check came to {reply.verdict}: {reply.error} {reply.messages}")
        return cpu_s(os.getpid()) - began_s

    def _plainly(self, texts: Sequence[str]) -> float:
        command, variables = lean(self._place)
        olean = f"{self._place.variables['TMPDIR']}/plain.olean"
        began_s = cpu_s(os.getpid())
        for code in texts:
            each = [*command, olean, "--stdin"]
            subprocess.run(
                each, env=variables, input=code.encode(), capture_output=True, check=False
            )
        return cpu_s(os.getpid()) - began_s

    def _made(self, text: str) -> list[str]:
        return [self._text(text, _HEADERS[0]) for _ in range(self._texts)]

    def _text(self, text: str, header: str) -> str:
        self._number += 1
        return f"{header}\n{text.format(self._number)}"


async def measure(place: Place, texts: int, rounds: int, figures: Figures) -> None:
    rules = DocumentRules(compare_every=0)
    driver = LeanDriver(lambda: place.environment, slots=1, forks=None, documents=rules)
    await driver.open(MemoryStates())
    try:
        bench = Bench(place, driver, texts, figures)
        await bench.warm_up()
        for _ in range(rounds):
            await bench.round()
    finally:
        await driver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", type=Path, required=True, help="a toolchain with Std and Lean")
    parser.add_argument("--texts", type=int, default=30, help="texts each way, in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder:
        place = new_place(Path(folder), options.library)
        figures: Figures = defaultdict(list)
        try:
            asyncio.run(measure(place, options.texts, options.rounds, figures))
        finally:  # also show the figures of an aborted run
            print(f"{options.texts} texts a round, load {os.getloadavg()[0]:.1f}\n")
            print_table(_FIGURES, figures)


if __name__ == "__main__":
    main()
