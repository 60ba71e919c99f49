"""Measures warm routing: proof trees behind three headers on two machines, routed two ways.

The ways take turns. Needs a toolchain with Std and Lean: ``LEANQ_LEAN``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from leanq.client import AsyncLeanQClient
from leanq.local import EmbeddedServer
from leanq.producer.request_builder import RequestBuilder
from leanq.queue.operator_queue import look
from leanq.queue.results import Submission
from leanq.queue.settings import Settings

_LEANQ = (sys.executable, "-c", "from leanq.cli import main; main()")
_WORKERS = 2
_HEADERS = ("Std", "Lean", "Init.Data.List")
_WARM_UP_TREES = 6
# Eight for each state, as a model would propose them; the first leads on.
_TACTICS = [
    *("refine And.intro hp ?_", "constructor", "constructor\nskip", "refine And.intro ?_ ?_"),
    *("apply And.intro", "exact hq", "exact nonsense", "intro x"),
]


class _Anywhere(RequestBuilder):
    """Builds requests that do not tell which workers are warm for them."""

    def _submission(self, *arguments: Any, **named: Any) -> Submission:
        return structs.replace(super()._submission(*arguments, **named), affinity=())


_WAYS = {"anywhere": _Anywhere, "warm first": RequestBuilder}


@contextlib.contextmanager
def fleet(settings: Settings, folder: Path) -> Iterator[None]:
    """Runs workers of one slot, each with a disk of its own."""
    workers = []
    try:
        for number in range(_WORKERS):
            environ = os.environ | {
                "LEANQ_URL": settings.url,
                "LEANQ_PREFIX": settings.prefix,
                "LEANQ_CACHE": str(folder / f"{number}"),
            }
            command = [*_LEANQ, "worker", "--slots", "1"]
            workers.append(subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL))
        yield
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


async def search(lean: AsyncLeanQClient, number: int, definitions: int, depth: int) -> None:
    """Searches one tree: every tactic on a state, then on the state that the first leads to.

    Its definitions are its own; otherwise one process would serve all trees.
    """
    header, goal = _HEADERS[number % len(_HEADERS)], "And p (" * depth + "And p q" + ")" * depth
    behind = "".join(
        f"def tree{number}_{n} (p q : Prop) : Prop := And p (And q p)\n" for n in range(definitions)
    )
    theorem = f"theorem t{number} (p q : Prop) (hp : p) (hq : q) : {goal} := sorry\n"
    code = f"import {header}\n{behind}{theorem}"
    state = (await lean.check(code)).sorries[0].state
    for _ in range(depth):
        assert state
        replies = await asyncio.gather(*(lean.step(state, tactic) for tactic in _TACTICS))
        assert replies[0].verdict == "incomplete"
        state = replies[0].state


async def measure(settings: Settings, options: argparse.Namespace, name: str) -> float:
    """Returns steps per second; prints how they were served."""
    while len((await look(settings)).workers) < _WORKERS:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.2)
    async with AsyncLeanQClient(settings) as lean:
        lean._builder = _WAYS[name](settings, "bench")  # noqa: SLF001 - what is compared
        trees = asyncio.Semaphore(options.at_once)

        async def one(number: int) -> None:
            async with trees:
                await search(lean, number, options.definitions, options.depth)

        async def all_of(numbers: range) -> float:
            started = time.perf_counter()
            await asyncio.gather(*map(one, numbers))
            return time.perf_counter() - started

        # Each worker proves the fork server first, on a disk of its own.
        await all_of(range(_WARM_UP_TREES))
        before = Counter((await look(settings)).counters)
        seconds = await all_of(range(_WARM_UP_TREES, _WARM_UP_TREES + options.trees))
    counters = Counter((await look(settings)).counters)
    counters.subtract(before)
    ways = {way: counters[f"way:{way}"] for way in ("warm", "cold", "replayed", "failed")}
    shares = ", ".join(f"{way} {count / sum(ways.values()):.0%}" for way, count in ways.items())
    hits, misses = counters["warm_hits"], counters["warm_misses"]
    steps = options.trees * options.depth * len(_TACTICS)
    print(
        f"{name}: {steps / seconds:.1f} steps/s, {shares}; "
        f"routed to a warm worker {hits} of {hits + misses}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return steps / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=4, help="trees that are searched at a time")
    parser.add_argument("--depth", type=int, default=3, help="states of a tree that are expanded")
    parser.add_argument("--definitions", type=int, default=300, help="before each theorem")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=[*_WAYS], help="in turns")
    options = parser.parse_args()
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for name in reversed(options.ways) if number % 2 else options.ways:
            with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
                settings = server.settings()
                with fleet(settings, Path(folder)):
                    rates[name].append(asyncio.run(measure(settings, options, name)))
    first, *others = options.ways
    for name in others:
        ratios = [a / b for a, b in zip(rates[name], rates[first], strict=True)]
        of_all = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"steps/s, {name} to {first}: {statistics.median(ratios):.2f} of {of_all}")


if __name__ == "__main__":
    main()
