"""The soak of the repl driver: a stand-in that crashes, bloats and talks nonsense, behind a queue.

Every request's right verdict is known. In the end each has been answered, rightly, and no process
is left. ``make soak-repl`` runs 20,000 requests in some two minutes, the tests a twentieth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.lean.sandboxes import marked
from support.lean.sites import SELDOM, Site

from leanq.client import AsyncLeanQClient
from leanq.lean.environment import open_environment
from leanq.local import EmbeddedServer, running
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings
from leanq.worker import Worker

_SLOTS = 4
_AT_ONCE = 40
# Of each request: a crash, 40 MB more, noise around the answer; and all writes cut at random.
_STORM = ("--crash", "0.004", "--bloat-mb", "0.02:40", "--noise", "0.1", "--split")
_RULES = replace(SELDOM, memory_bytes=400 << 20, requests=700)
_HEADERS = ("", "import A\n", "import A\nimport B\n")


@dataclass
class Tally:
    """What became of the requests."""

    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    processes: set[int] = field(default_factory=set)

    def note(self, reply: Reply, verdict: str, what: str) -> None:
        """Takes a reply that should have had this verdict."""
        self.verdicts[str(reply.verdict)] += 1
        if reply.verdict != verdict or reply.error:
            self.wrong.append(f"{what}: {reply}")


async def converse(lean: AsyncLeanQClient, rng: random.Random, tally: Tally) -> None:
    """Ten requests, most of them steps."""
    header, word = rng.choice(_HEADERS), rng.getrandbits(60)
    code = f"{header}#error not {word}\n"
    reply = await lean.check(code, audit=False)
    tally.note(reply, "rejected", code)
    if [message.text for message in reply.messages if message.severity == "error"] != [
        f"not {word}"
    ]:
        tally.wrong.append(f"{code}: {reply.messages}")
    code = f"{header}define a{word}\nuse a{word}\n"
    tally.note(await lean.check(code, audit=False), "unjudged", code)
    code = f"{header}-- {word}\ntheorem t := by sorry\n"
    reply = await lean.check(code, audit=False)
    tally.note(reply, "incomplete", code)
    state, goals = reply.sorries[0].state, ("⊢ goal 0",)
    for count in range(2, 6):
        assert state is not None
        tally.note(await lean.step(state, f"fail {word}", audit=False), "rejected", "fail")
        reply = await lean.step(state, f"split {count}", audit=False)
        goals = (*(f"{goals[0]}.{n}" for n in range(count)), *goals[1:])
        tally.note(reply, "incomplete", "split")
        if reply.goals != goals:
            tally.wrong.append(f"{goals}: {reply}")
        state = reply.state


async def storm(settings: Settings, site: Site, requests: int, seed: int, tally: Tally) -> None:
    """So many requests through a queue and a worker, in conversations of eleven."""
    driver = await site.standin(*_STORM, "--seed", str(seed), slots=_SLOTS, rules=_RULES)
    worker = Worker(settings, [driver], slots=_SLOTS)
    left = iter(range(requests // 11 + 1))

    async def client(lean: AsyncLeanQClient, number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for _ in left:
            await converse(lean, rng, tally)
            tally.processes.update(marked(f"--mark\0{site.marker}"))

    async with running(worker), AsyncLeanQClient(settings) as lean, asyncio.TaskGroup() as group:
        for number in range(_AT_ONCE):
            group.create_task(client(lean, number))


async def main() -> int:
    """A storm from the command line; 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    tally, started = Tally(), time.monotonic()
    core = open_environment("default", None, environ={})
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
        settings = replace(Settings.load("unix:///-", {}), url=server.url)
        async with contextlib.AsyncExitStack() as stack:
            site = Site(core, Path(folder), stack)
            await storm(settings, site, arguments.requests, arguments.seed, tally)
        left = marked(site.marker)
    took_s = time.monotonic() - started
    total = tally.verdicts.total()
    print(f"{total} requests in {took_s:.0f} s, {dict(tally.verdicts)}")
    print(f"{len(tally.processes)} processes seen, {len(left)} left, {len(tally.wrong)} wrong")
    for wrong in tally.wrong[:10]:
        print(wrong)
    return int(bool(tally.wrong or left) or total < arguments.requests)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
