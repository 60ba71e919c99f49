"""The soak of the fork server: checks behind a preloaded header, among crashes, kills and attacks.

Texts whose verdicts are known run in forks of one zygote, up to eight in each, with the judge for a
part of them, while forks are killed, requests withdrawn, and limits broken. Beside them hostile
programs run in forks of a zygote of Python. No verdict may be another one than known, but for
``crashed`` where a fork was killed; and afterwards the zygotes hold no more memory than before, and
the machine no more processes. ``make soak-fork`` runs 20,000 checks, the tests a hundredth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.lean.python_zygote import family, forked, own_pid, private_bytes, python_zygote
from support.lean.sandboxes import children
from support.lean.sites import Site, check, new_site
from support.paths import SAMPLES

from leanq.errors import SandboxError
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import open_environment
from leanq.lean.run.fork_server import ForkRules, ForkServer
from leanq.lean.run.zygote_client import Zygote
from leanq.lean.sandbox.sandbox import Limits, Sandbox
from leanq.queue.metrics import COUNTS
from leanq.queue.requests import Request

_SLOTS = 2
_AT_ONCE = 4
_RULES = ForkRules(preload_after=1, compare_every=200)
_HOSTILE_LIMITS = Limits(cpu_s=0.3, wall_s=2.0, memory_bytes=60 << 20, scratch_bytes=10 << 20)
_GROWTH_BYTES = 4 << 20  # pages that a zygote writes to in its own bookkeeping

_HEADER = "prelude\nimport Core\n"
_ENDLESS = _HEADER + (SAMPLES / "stack_overflow.lean").read_text().partition(_HEADER)[2]
_HOSTILE = (
    "import os; os.abort()",
    "import ctypes; ctypes.memset(kept, 120, size); ctypes.string_at(0)",
    "import os; os.kill(-1, 9); os.kill(1, 9); os.kill(os.getpid(), 9)",
    "while True: pass",
    "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "import os\nfor _ in range(30):\n    if not os.fork(): os.setsid(); os.pause()",
    "import ctypes\ncall = ctypes.CDLL(None).syscall\n"
    "for n in range(-99, 99): call(11, (kept & -4096) + n * 4096, 4096)",
    "import ctypes\ncall = ctypes.CDLL(None).syscall\nfor n in range(600): call(n, *[-1] * 6)",
    "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))",
)


@dataclass
class Tally:
    """What became of the checks, and what was found to be wrong."""

    verdicts: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    held_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each zygote the memory before and after, in MiB."""


Case = tuple[str, Request, frozenset[str]]


def _case(rng: random.Random, number: int) -> Case:
    """A request, and the verdicts that it may come to."""
    theorem = f"theorem t{number} (p q : Prop) (h : p) (g : q) : "
    audit = rng.random() < 0.1
    kind = rng.choices(
        ("good", "wrong", "noise", "endless", "large"), weights=(60, 30, 8, 1.5, 0.5)
    )[0]
    match kind:
        case "good":
            text, verdict = f"{_HEADER}{theorem}p := by\n  exact h\n", "accepted"
            verdict = verdict if audit else "unjudged"
        case "wrong":
            text, verdict = f"{_HEADER}{theorem}q := by\n  exact h\n", "rejected"
        case "noise":
            text, verdict = f"{_HEADER}theorem t{number} : := by (\n", "rejected"
        case "endless":
            return (
                kind,
                check(_ENDLESS, audit=False, timeout_s=0.3),
                frozenset({"timeout", "crashed"}),
            )
        case _:
            return (
                kind,
                check(_ENDLESS, audit=False, memory_mb=40),
                frozenset({"memory", "crashed"}),
            )
    return kind, check(text, audit=audit), frozenset({verdict, "crashed"})


async def storm(site: Site, checks: int, seed: int, tally: Tally) -> None:
    """So many checks in one driver, and a tenth as many hostile programs beside them."""
    rng = random.Random(seed)
    ours = set(children(os.getpid()))
    async with python_zygote() as python:
        driver = await site.driver(slots=_SLOTS, forks=_RULES)
        try:
            await _storm(driver, python, checks, rng, tally)
        finally:
            await driver.close()
    if left := set(children(os.getpid())) - ours:
        tally.wrong.append(f"processes: {left}")


async def _storm(
    driver: LeanDriver, python: Zygote, checks: int, rng: random.Random, tally: Tally
) -> None:
    forks = driver.opened.lean.forks
    assert forks is not None
    warming = check(f"{_HEADER}theorem t (p : Prop) (h : p) : p := h\n", audit=False)
    while not forks.pids() and not forks.unavailable:
        await driver.run(warming)
    for _ in range(20):
        await driver.run(warming)
    zygotes = {"lean": lambda: children(forks.pids()[0])[0], "python": lambda: own_pid(python)}
    before = {name: (pid(), private_bytes(pid())) for name, pid in zygotes.items()}
    forked_before = COUNTS["leanq_fork_server_total", "forked"]
    further_before = COUNTS["leanq_fork_server_total", "further"]
    killer = asyncio.create_task(_kill(forks, random.Random(rng.random()), tally))
    hostile = asyncio.create_task(_attack(python, checks // 10, rng, tally))
    try:
        await _check_all(driver, checks, rng, tally)
        await hostile
    finally:
        for task in (killer, hostile):
            task.cancel()
        await asyncio.gather(killer, hostile, return_exceptions=True)
    if forks.unavailable:
        tally.wrong.append(f"the fork server was given up: {forks.unavailable}")
        return
    was_forked = COUNTS["leanq_fork_server_total", "forked"] - forked_before
    if was_forked < 0.9 * checks:
        tally.wrong.append(f"only {was_forked} runs were forks")
    further = COUNTS["leanq_fork_server_total", "further"] - further_before
    if forks.unshared or further < checks / 3:
        tally.wrong.append(f"only {further} texts came behind others: {forks.unshared}")
    for name, pid in zygotes.items():
        tally.wrong += _grown(name, before[name], (pid(), private_bytes(pid())), tally)


def _grown(
    name: str, before: tuple[int, int], after: tuple[int, int], tally: Tally
) -> Iterator[str]:
    tally.held_mb[name] = (before[1] / (1 << 20), after[1] / (1 << 20))
    if after[0] != before[0]:
        yield f"{name}: the zygote is another process"
    if after[1] > before[1] + _GROWTH_BYTES:
        yield f"{name}: the zygote has grown from {before[1]} to {after[1]} bytes"


async def _check_all(driver: LeanDriver, checks: int, rng: random.Random, tally: Tally) -> None:
    numbers = iter(range(checks))

    async def work() -> None:
        for number in numbers:
            kind, request, expected = _case(rng, number)
            task = asyncio.create_task(driver.run(request))
            if rng.random() < 0.02:
                await asyncio.sleep(rng.random() / 20)
                task.cancel()
            try:
                reply = await task
            except asyncio.CancelledError:
                tally.verdicts["withdrawn"] += 1
                continue
            tally.verdicts[f"{kind} {reply.verdict}"] += 1
            if reply.error or reply.verdict not in expected:
                tally.wrong.append(f"{request.code[-200:]}: {reply}")

    async with asyncio.TaskGroup() as workers:
        for _ in range(_AT_ONCE):
            workers.create_task(work())


async def _kill(forks: ForkServer, rng: random.Random, tally: Tally) -> None:
    """Ends a fork of Lean's, or the first process beside it, twice a second."""
    while True:
        await asyncio.sleep(rng.random())
        with contextlib.suppress(OSError, IndexError, ValueError):
            [zygote] = children(forks.pids()[0])
            inner = rng.choice(children(zygote))
            # By another signal, it would be a difference.
            os.kill(rng.choice(children(inner)), signal.SIGKILL)
            tally.kills += 1


async def _attack(python: Zygote, count: int, rng: random.Random, tally: Tally) -> None:
    async with forked(python) as sandbox:
        processes = len(family(python))
        for number in range(count):
            program = _HOSTILE[number % len(_HOSTILE)]
            with contextlib.suppress(SandboxError):
                await _program(sandbox, program)
            if not sandbox.alive:
                tally.wrong.append(f"it took its supervisor down: {program}")
                return
            if number % len(_HOSTILE) == 0:
                said = await _program(sandbox, "import ctypes; print(ctypes.string_at(kept, size))")
                if said != b"b'what the zygote has imported'\n":
                    tally.wrong.append(f"after hostile programs the zygote says {said!r}")
        if len(family(python)) != processes:
            tally.wrong.append(f"processes of the hostile programs: {family(python)}")


async def _program(sandbox: Sandbox, program: str) -> bytes:
    sandbox.clear()
    done = await sandbox.run(
        ["python"],
        env={},
        limits=_HOSTILE_LIMITS,
        stdin=program.encode(),
    )
    return done.stdout


async def _soak(checks: int, seed: int) -> int:
    tally, began_s = Tally(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tempfile.tempdir = folder
            async with new_site(open_environment("default", None), Path(folder)) as site:
                await storm(site, checks, seed, tally)
    except (Exception, ExceptionGroup):
        tally.wrong.append(traceback.format_exc())
    for kind, count in sorted(tally.verdicts.items()):
        print(f"{kind:24} {count}")
    took_s = time.monotonic() - began_s
    print(f"{checks} checks in {took_s:.0f} s, {tally.kills} forks killed, seed {seed}")
    print(f"events: {dict(COUNTS)}")
    for name, (before, after) in tally.held_mb.items():
        print(f"the zygote of {name} held {before:.1f} MB before and {after:.1f} MB after")
    for wrong in tally.wrong[:20]:
        print("WRONG", wrong)
    return 1 if tally.wrong else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    sys.exit(asyncio.run(_soak(given.checks, given.seed)))


if __name__ == "__main__":
    main()
