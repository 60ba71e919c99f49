"""``leanq env list``: what each environment is, who serves it, and which kernel judges."""

from __future__ import annotations

import asyncio

from support.queue.queues import Queue
from support.terminals import Terminal

from leanq.queue.settings import Settings
from leanq.queue.wire import pack_info

OLD, NEW = "m-08", "m-09"
ABOUT = {
    "driver": "lean",
    "lean": "4.35.0",
    "project": "mathlib4",
    "libraries": ["Aesop", "Batteries", "Init", "Lean", "Mathlib", "Qq"],
    "kernel": "4.35.0",
}


def test_environments_and_who_serves_them(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    assert terminal.run("env", "list").out == "no worker has offered an environment yet\n"
    prints = {OLD: "f" * 64, NEW: "e" * 64}
    offered = {name: pack_info({**ABOUT, "fingerprint": prints[name]}) for name in prints}

    async def offer(*names: str) -> None:
        queue = Queue(settings)
        info = {"environments": names, "fingerprints": {name: prints[name] for name in names}}
        described = {name: offered[name] for name in names}
        await queue.register("-".join(names), pack_info(info), described, {})
        await queue.close()

    async def leave(worker: str) -> None:
        queue = Queue(settings)
        await queue.release(worker, [], leave=True)
        await queue.close()

    asyncio.run(offer(OLD, NEW))
    asyncio.run(offer(NEW))
    library = ["mathlib4:", "Aesop,", "Batteries,", "Mathlib,", "…"]
    rows = terminal.run("env", "list").out.splitlines()
    assert [row.split() for row in rows] == [
        ["ENVIRONMENT", "LEAN", "LIBRARY", "FINGERPRINT", "WORKERS", "KERNEL"],
        [OLD, "4.35.0", *library, "f" * 12, "1", "4.35.0"],
        [NEW, "4.35.0", *library, "e" * 12, "2", "4.35.0"],
    ]
    asyncio.run(leave(f"{OLD}-{NEW}"))
    old, new = terminal.run("env", "list", "--json").lines
    # It is shown as its last worker described it.
    assert (old["workers"], old["fingerprints"]) == ([], ["f" * 64])
    assert (new["workers"], new["fingerprints"]) == ([NEW], ["e" * 64])
    assert new["libraries"] == ABOUT["libraries"]
    done = terminal.run("pause", "--env", "m")
    assert "no worker has ever offered the environment 'm'; known: m-08, m-09" in done.err
    asyncio.run(leave(NEW))
