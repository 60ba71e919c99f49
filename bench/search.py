"""Measures steps per second of a proof search, with and without a queue, beside the raw driver's.

The search runs first. Then a driver of its own gets the same steps, as many at once as it has
slots, with nothing around it. With ``--closing``, it instead closes holes beside others, one step
after another. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from statistics import median

from leanq import AsyncLeanQClient, Pool
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import open_environment
from leanq.local import EmbeddedServer, running
from leanq.queue.requests import Request
from leanq.states import MemoryStates
from leanq.trainers import ProofSearch, SearchNode
from leanq.trainers.search import Prover
from leanq.worker import Worker

STATEMENT = f"theorem t (p q : Prop) : {'p → ' * 12}q := by\n  sorry"


async def policy(nodes: Sequence[SearchNode]) -> list[list[str]]:
    """Returns tactics that work and lead to unseen states."""
    return [[f"intro h{node.depth}_{n}" for n in range(8)] for node in nodes]


# Its holes, and the hypothesis that closes each.
BESIDE = """theorem t (p q : Prop) (hp : p) (hq : q) : p ∧ q ∧ p := by
  have h1 : q := by sorry
  have h2 : p := by
    sorry
  exact ⟨h2, h1, sorry⟩
theorem u (p : Prop) (h : p) : p := sorry"""
CLOSED_BY = ("hq", "hp", "hp", "h")


def driver(slots: int) -> LeanDriver:
    return LeanDriver(lambda: open_environment("default", None), slots=slots)


async def searched(lean: Prover, steps: int) -> tuple[float, list[SearchNode]]:
    """Returns steps per second, and the states that were found."""
    search = ProofSearch(STATEMENT, policy, timeout_s=60)
    # The first step starts the processes that later steps find.
    await search.run(lean, max_steps=1)
    began, before = time.perf_counter(), search.progress.steps
    found = await search.run(lean, max_steps=before + steps)
    elapsed_s = time.perf_counter() - began
    assert not found.progress.unanswered, found.progress
    return (found.progress.steps - before) / elapsed_s, search.nodes


async def through_a_queue(slots: int, steps: int) -> tuple[float, list[SearchNode]]:
    server = EmbeddedServer()
    settings = server.settings()
    worker = Worker(settings, [driver(slots)], slots=slots)
    with server:
        async with running(worker), AsyncLeanQClient(settings) as lean:
            return await searched(lean, steps)


async def without_a_queue(slots: int, steps: int) -> tuple[float, list[SearchNode]]:
    with Pool(slots=slots) as lean:
        return await searched(lean, steps)


async def raw(slots: int, nodes: Sequence[SearchNode]) -> float:
    """Returns the driver's steps per second on the same states, in the order of their depths."""
    made = driver(slots)
    await made.open(MemoryStates())
    reply = await made.run(Request("check", STATEMENT))
    states = {0: reply.sorries[0].state or ""}
    free = asyncio.Semaphore(slots)

    async def step(number: int) -> None:
        node = nodes[number]
        async with free:
            asked = Request("step", state=states[node.parent or 0], tactic=node.tactic or "")
            reply = await made.run(asked)
        assert reply.verdict == "incomplete", reply
        states[number] = reply.state or ""

    levels: dict[int, list[int]] = {}
    for number, node in enumerate(nodes[1:], 1):
        levels.setdefault(node.depth, []).append(number)
    try:
        await step(1)
        began = time.perf_counter()
        for _, level in sorted(levels.items()):
            await asyncio.gather(*map(step, level))
        return (len(nodes) - 1) / (time.perf_counter() - began)
    finally:
        await made.close()


async def closing(steps: int) -> tuple[float, float]:
    """Returns the median of the seconds, and the mean of the CPU seconds, of a step that closes a
    hole beside three others."""
    made = driver(1)
    await made.open(MemoryStates())
    try:
        states = [each.state for each in (await made.run(Request("check", BESIDE))).sorries]
        elapsed_s, cpu_s = list[float](), 0.0
        # The first ones start processes and compile the source.
        for number in range(-len(states), steps):
            hole = number % len(states)
            tactic = f"have k{number % (steps + 9)} := {CLOSED_BY[hole]}\nassumption"
            began = time.perf_counter()
            reply = await made.run(Request("step", state=states[hole], tactic=tactic))
            assert reply.verdict == "accepted", reply
            if number >= 0:
                elapsed_s.append(time.perf_counter() - began)
                cpu_s += reply.cpu_s
        return median(elapsed_s), cpu_s / steps
    finally:
        await made.close()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--closing", type=int, metavar="STEPS", help="close holes beside others")
    given = parser.parse_args()
    if given.closing:
        p50_s, cpu_s = await closing(given.closing)
        load = os.getloadavg()[0]
        print(f"p50 {p50_s * 1000:.0f} ms, CPU {cpu_s * 1000:.0f} ms, load {load:.1f}")
        return
    print("| round | queue | of raw | Pool | of raw | raw driver | load |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number in range(1, given.rounds + 1):
        queue, nodes = await through_a_queue(given.slots, given.steps)
        pool, _ = await without_a_queue(given.slots, given.steps)
        alone = await raw(given.slots, nodes)
        shown = (each / given.slots for each in (queue, pool, alone))
        first, second, third = shown
        print(
            f"| {number} | {first:.1f} | {first / third:.2f} | {second:.1f} | {second / third:.2f} "
            f"| {third:.1f} | {os.getloadavg()[0]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
