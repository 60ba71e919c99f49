"""Drivers that make a snapshot of every source, or put a process behind every prefix; run as a
program, a worker that makes snapshots."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment, open_environment
from leanq.lean.goals.prefixes import PrefixRules
from leanq.lean.goals.snapshots import SnapshotCache
from leanq.lean.run.fork_server import ForkRules
from leanq.queue.settings import Settings
from leanq.worker import Worker


def eager_driver(folder: Path, open_other: Callable[[], Environment] | None = None) -> LeanDriver:
    """A driver on a machine whose files are all in ``folder``, of Core unless another is given."""
    return LeanDriver(
        open_other or (lambda: open_environment("default", None, cache=folder, environ={})),
        slots=1,
        cache=SnapshotCache(folder / "snapshots", 1 << 30),
        prefixes=PrefixRules(save_after=1, save_from_s=0.0),
        forks=None,
    )


def standing_driver(environment: Environment) -> LeanDriver:
    """A driver that has no snapshots."""
    rules = ForkRules(preload_after=1, compare_every=0)
    return LeanDriver(lambda: environment, slots=1, prefixes=PrefixRules(1, 0.0), forks=rules)


async def main() -> None:
    settings = Settings.load(os.environ["LEANQ_URL"], os.environ)
    worker = Worker(settings, [eager_driver(Path(os.environ["LEANQ_CACHE"]))], slots=1)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main())
