"""Measures a replay memory by its number of entries: samples, reading and writing.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import redis

from leanq import Settings
from leanq.local import EmbeddedServer
from leanq.trainers import ReplayBatch, ReplayBounds, ReplayEntry, ReplayMemory

WRITTEN_AT_ONCE = 2048
SAMPLED = 256
KINDS = {
    "latest": ReplayBounds(),
    "latest, weighted": ReplayBounds(weighted=True),
    "reservoir, weighted": ReplayBounds(reservoir=True, weighted=True),
}


def attempts(count: int, size_bytes: int, rng: random.Random) -> list[ReplayEntry]:
    """Returns entries of that size with uneven weights."""
    return [
        ReplayEntry(
            "rejected",
            rng.randbytes(size_bytes // 2).hex(),
            "lean_error",
            rewards={"proof": 0.0},
            tags={"problem": f"p{rng.randrange(1000)}"},
            weight=rng.paretovariate(1.0),
        )
        for _ in range(count)
    ]


class Bench:
    """Memories of one kind on one server, one for each size."""

    def __init__(
        self, settings: Settings, kind: str, bounds: ReplayBounds, size_bytes: int
    ) -> None:
        self._settings, self._kind, self._bounds = settings, kind, bounds
        self._server = redis.Redis.from_url(settings.url)
        self._rng = random.Random(22)
        self._entries = attempts(WRITTEN_AT_ONCE, size_bytes, self._rng)

    def _used_bytes(self) -> int:
        return int(self._server.info("memory")["used_memory"])

    def _server_us(self) -> float:
        used = self._server.info("cpu")
        return float(used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"]) * 1e6

    async def fill(self, memory: ReplayMemory, entries: int) -> tuple[float, float]:
        """Returns the server's CPU time (µs) and memory (bytes) for each entry written."""
        used_us, used_bytes = self._server_us(), self._used_bytes()
        for start in range(0, entries, WRITTEN_AT_ONCE):
            await memory.write(self._entries[: entries - start])
        return (
            (self._server_us() - used_us) / entries,
            (self._used_bytes() - used_bytes) / entries,
        )

    async def call(self, work: Awaitable[ReplayBatch]) -> tuple[float, float]:
        """Returns the ms of a call, and the server's µs for each of its entries."""
        used_us, began = self._server_us(), time.perf_counter()
        assert len(await work) == SAMPLED
        return (
            (time.perf_counter() - began) * 1e3,
            (self._server_us() - used_us) / SAMPLED,
        )

    async def run(self, sizes: Sequence[int], rounds: int) -> None:
        """Prints a row for each size. The sizes take turns, so their ratios hold."""
        memories = [
            ReplayMemory(f"m{size}", self._settings, bounds=replace(self._bounds, entries=size))
            for size in sizes
        ]
        filled = [await self.fill(*each) for each in zip(memories, sizes, strict=True)]
        times: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for _ in range(rounds):
            for size, memory in zip(sizes, memories, strict=True):
                times[size, "uniform"].append(await self.call(memory.sample(SAMPLED)))
                if self._bounds.weighted:
                    drawn = memory.sample(SAMPLED, weighted=True)
                    times[size, "weighted"].append(await self.call(drawn))
                at = (await memory.stats()).first + self._rng.randrange(size - SAMPLED)
                times[size, "list"].append(await self.call(memory.read(at, limit=SAMPLED)))
        for size, (written_us, each_bytes) in zip(sizes, filled, strict=True):
            cells = []
            for what in ("uniform", "weighted", "list"):
                found = times.get((size, what))
                cells += [f"{statistics.median(ms for ms, _ in found):.1f} ms"] if found else ["–"]
                cells += [f"{statistics.median(us for _, us in found):.1f} µs"] if found else ["–"]
            cells += [f"{written_us:.1f} µs", f"{each_bytes:.0f} B"]
            print(f"| {self._kind} | {size:,} | {' | '.join(cells)} |", flush=True)
        for memory in memories:
            await memory.close()
        self._server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="1000,100000,1000000", help="entries of each memory")
    parser.add_argument("--bytes", type=int, default=200, help="the text of an entry")
    parser.add_argument("--rounds", type=int, default=50, help="calls of each kind for each size")
    parser.add_argument("--only", choices=KINDS, help="memories of this kind alone")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    print(f"texts of {options.bytes} bytes, {SAMPLED} at once\n")
    print(
        "| memory | entries | uniform | server, each | weighted | server, each | in order | "
        "server, each | writing, server, each | memory, each |\n|" + " --- |" * 10
    )
    for kind in [options.only] if options.only else KINDS:
        bounds = replace(KINDS[kind], max_mb=1 << 14)
        with EmbeddedServer() as server:
            settings = server.settings()
            bench = Bench(settings, kind, bounds, options.bytes)
            asyncio.run(bench.run(sizes, options.rounds))
        print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
