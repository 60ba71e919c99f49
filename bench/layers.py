"""Measures each way to avoid repeated elaboration on a real library, each on top of those before.

One driver at a time runs in this process, with two slots and the judge: it is opened, warmed up,
measured and closed. The ways take turns within a round. Needs a toolchain with Std and Lean, named
by ``LEANQ_LEAN`` or ``--lean``. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

from processes import cpu_s, descendants
from queues import Queue

from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment, open_environment
from leanq.lean.goals.prefixes import PrefixRules
from leanq.lean.goals.snapshots import SnapshotCache
from leanq.lean.run.fork_server import ForkRules
from leanq.local import EmbeddedServer
from leanq.queue.requests import Reply, Request
from leanq.states import RedisStates, States

_SLOTS = 2
_TIMEOUT_S = 300.0
_WARM_UP_S = 300.0
_CACHE_BYTES = 8 << 30
# Preload and prove a header with its first text, so that warming up takes no longer.
_FORKS = ForkRules(preload_after=1, compare_every=0)
_NEVER = math.inf
# None of these tactics closes the proof, since that would add a check.
_TACTICS = (
    "constructor",
    "refine ⟨by simp, ?_⟩",
    "apply And.intro",
    "refine ⟨?_, hp, hq⟩",
    "constructor\nsimp",
    "refine And.intro ?_ ⟨hp, ?_⟩",
)

Figures = defaultdict[tuple[str, str, str], list[float]]


@dataclass(frozen=True)
class Way:
    """The layers of one driver."""

    forks: bool = False
    standing: bool = False
    snapshots: bool = False

    def driver(self, environment: Environment, folder: Path) -> LeanDriver:
        return LeanDriver(
            lambda: environment,
            slots=_SLOTS,
            cache=SnapshotCache(folder, _CACHE_BYTES) if self.snapshots else None,
            forks=_FORKS if self.forks else None,
            prefixes=PrefixRules(stand_from_s=0.1 if self.standing else _NEVER, save_after=2),
        )


WAYS = {
    "a new Lean": Way(),
    "forks": Way(forks=True),
    "standing": Way(forks=True, standing=True),
    "snapshots, a new Lean": Way(snapshots=True),
    "standing, snapshots": Way(forks=True, standing=True, snapshots=True),
}


class Spent:
    """Wall and CPU seconds of this process and all below it, known on leaving."""

    def __enter__(self) -> Self:
        self.began_s, self.cpu_before_s = time.perf_counter(), cpu_s(os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self.began_s
        self.cpu_s = cpu_s(os.getpid()) - self.cpu_before_s


class Bench:
    """Measures the ways behind one header."""

    def __init__(
        self,
        environment: Environment,
        header: str,
        states: States,
        figures: Figures,
        options: argparse.Namespace,
    ) -> None:
        self._environment = environment
        self._header = header
        self._states = states
        self._figures = figures
        self._options = options
        # No text repeats, not even in another process.
        self._numbers = count(time.time_ns() % (1 << 40))

    async def round(self, name: str, folder: Path) -> None:
        """Measures one way: checks, searches, and searches on states from another machine."""
        way = WAYS[name]
        async with self._opened(way, folder / "own") as driver:
            await self._warm_up(driver)
            if not way.snapshots:
                await self._checks(name, driver)
            for lines in self._options.lines:
                with Spent() as spent:
                    state = await self._state(driver, lines)
                self._note(name, f"check of {lines} lines, CPU ms", 1e3 * spent.cpu_s)
                await self._search(name, f"{lines} lines", driver, state)
                await _saved(driver)
            self._note(name, "memory, MB", _private_mb())
        for lines in self._options.lines if way.standing or way.snapshots else ():
            async with self._opened(way, folder / "there") as driver:
                state = await self._state(driver, lines)
                await self._step(driver, state, 0)
                await _saved(driver)
            async with self._opened(way, folder / "here") as driver:
                await self._warm_up(driver)
                await self._search(name, f"{lines} lines, from elsewhere", driver, state)

    @contextlib.asynccontextmanager
    async def _opened(self, way: Way, folder: Path) -> AsyncIterator[LeanDriver]:
        driver = way.driver(self._environment, folder)
        await driver.open(self._states)
        try:
            yield driver
        finally:
            await driver.close()

    async def _warm_up(self, driver: LeanDriver) -> None:
        """Runs checks until forks serve them, for the ways with forks."""
        forks, until_s = driver.opened.lean.forks, time.monotonic() + _WARM_UP_S
        await self._check(driver, self._small_text(), "accepted")
        while forks is not None and not forks.pids():
            if forks.unavailable or time.monotonic() > until_s:
                sys.exit(f"Lean is not forked behind {self._header}: {forks.unavailable}")
            await self._check(driver, self._small_text(), "accepted")
        for _ in range(2):
            await self._check(driver, self._small_text(), "accepted")

    async def _checks(self, way: str, driver: LeanDriver) -> None:
        texts = [self._small_text() for _ in range(self._options.checks)]
        turn = asyncio.Semaphore(_SLOTS)

        async def one(code: str) -> None:
            async with turn:
                await self._check(driver, code, "accepted")

        with Spent() as spent:
            await asyncio.gather(*map(one, texts))
        self._note(way, "checks/s", len(texts) / spent.wall_s)
        self._note(way, "CPU of a check, ms", 1e3 * spent.cpu_s / len(texts))
        walls = []
        for text in (self._small_text() for _ in range(self._options.alone)):
            with Spent() as spent:
                await self._check(driver, text, "accepted")
            walls.append(1e3 * spent.wall_s)
        self._note(way, "one check at a time, ms", statistics.median(walls))

    async def _search(self, way: str, name: str, driver: LeanDriver, state: str) -> None:
        """Notes the times of steps on one state: the first, the later ones, and the total."""
        with Spent() as spent:
            replies = [
                await self._step(driver, state, number) for number in range(self._options.steps)
            ]
        later = replies[len(replies) // 2 :]
        self._note(way, f"first step, {name}, ms", 1e3 * replies[0].wall_s)
        self._note(way, f"first step, {name}, CPU ms", 1e3 * replies[0].cpu_s)
        self._note(way, f"later step, {name}, ms", 1e3 * _median_of(later, "wall_s"))
        self._note(way, f"later step, {name}, CPU ms", 1e3 * _median_of(later, "cpu_s"))
        self._note(way, f"{len(replies)} steps, {name}, s", spent.wall_s)
        self._note(way, f"{len(replies)} steps, {name}, CPU s", spent.cpu_s)

    async def _state(self, driver: LeanDriver, lines: int) -> str:
        reply = await self._check(driver, self._long_text(lines), "incomplete")
        state = reply.sorries[0].state
        assert state is not None
        return state

    async def _check(self, driver: LeanDriver, code: str, *verdicts: str) -> Reply:
        return await _run(driver, Request("check", code=code, timeout_s=_TIMEOUT_S), *verdicts)

    async def _step(self, driver: LeanDriver, state: str, number: int) -> Reply:
        tactic = _TACTICS[number % len(_TACTICS)]
        request = Request("step", state=state, tactic=tactic, timeout_s=_TIMEOUT_S)
        return await _run(driver, request, "incomplete", "rejected")

    def _small_text(self) -> str:
        number = next(self._numbers)
        return (
            f"import {self._header}\n"
            f"theorem a{number} (x y : Nat) (h : x < y) : x + 1 < y + 1 := by omega\n"
            f"theorem b{number} (xs : List Nat) : (xs ++ []).length = xs.length := by simp\n"
        )

    def _long_text(self, lines: int) -> str:
        number = next(self._numbers)
        behind = "".join(
            f"def d{number}_{n} (n : Nat) : Nat := n + {n}\n"
            f"theorem e{number}_{n} (n : Nat) : 0 < d{number}_{n} n := by\n"
            f"  simp [d{number}_{n}]\n"
            for n in range(1, lines // 3 + 1)
        )
        return (
            f"import {self._header}\n{behind}"
            f"theorem t{number} (n : Nat) (p q : Prop) (hp : p) (hq : q) :\n"
            "    n + 0 = n ∧ p ∧ q := by\n"
            "  sorry\n"
        )

    def _note(self, way: str, figure: str, value: float) -> None:
        self._figures[self._header, figure, way].append(value)


async def _run(driver: LeanDriver, request: Request, *verdicts: str) -> Reply:
    reply = await driver.run(request)
    if reply.verdict not in verdicts:
        sys.exit(f"{request.op} came to {reply.verdict}: {reply.error} {reply.messages}")
    return reply


async def _saved(driver: LeanDriver) -> None:
    """Waits until no snapshot is being made."""
    if saving := driver.opened.prefixes.saving:
        await asyncio.wait([saving])


def _median_of(replies: Sequence[Reply], field: str) -> float:
    return float(statistics.median(getattr(reply, field) for reply in replies))


def _private_mb() -> float:
    """Returns the private MB of the processes below this one; shared memory counts once."""
    kb = 0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))
    return kb / 1024


def show(figures: Figures, ways: Sequence[str]) -> None:
    """Prints a table for each header: one row for each figure, one column for each way."""
    for header in dict.fromkeys(header for header, _, _ in figures):
        print(f"\n| `import {header}` | {' | '.join(ways)} |\n| --- |{' --- |' * len(ways)}")
        for figure in dict.fromkeys(key[1] for key in figures if key[0] == header):
            cells = (_cell(figures.get((header, figure, way), [])) for way in ways)
            print(f"| {figure} | {' | '.join(cells)} |")


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.3g} ({min(values):.3g} – {max(values):.3g})"


async def measure(options: argparse.Namespace, figures: Figures) -> None:
    environment = open_environment("default", None, lean=options.lean)
    print(f"{os.cpu_count()} CPUs, {environment.toolchain}, {options.rounds} rounds")
    with EmbeddedServer() as server:
        async with Queue.every(server.settings()) as queues:
            states = RedisStates(queues)
            for number in range(options.rounds):
                for header in options.headers:
                    bench = Bench(environment, header, states, figures, options)
                    for name in reversed(options.ways) if number % 2 else options.ways:
                        print(f"load {os.getloadavg()[0]:.1f}: {header}, {name}", flush=True)
                        with tempfile.TemporaryDirectory() as folder:
                            await bench.round(name, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lean", help="the lean program; LEANQ_LEAN where it is not named")
    parser.add_argument("--headers", nargs="+", default=["Std", "Lean"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checks", type=int, default=40)
    parser.add_argument("--alone", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lines", nargs="+", type=int, default=[3, 300], help="before the hole")
    options = parser.parse_args()
    figures: Figures = defaultdict(list)
    try:
        asyncio.run(measure(options, figures))
    finally:  # also show the figures of an aborted run
        show(figures, options.ways)


if __name__ == "__main__":
    main()
