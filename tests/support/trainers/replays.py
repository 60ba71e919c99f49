"""Replay memories of a test's own, and a learner to be killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import redis

from leanq.queue.settings import Settings
from leanq.trainers.replay import ReplayMemory
from leanq.trainers.replay_entry import ReplayBatch, ReplayBounds, ReplayEntry
from support.queue.counted import check_counts


@contextlib.asynccontextmanager
async def open_memory(
    settings: Settings, bounds: ReplayBounds | None = None
) -> AsyncIterator[ReplayMemory]:
    """A memory that leaves nothing behind."""
    async with ReplayMemory("m", settings, bounds=bounds) as memory:
        try:
            yield memory
            with redis.Redis.from_url(settings.url) as server:
                check_counts(server, settings.prefix)
        finally:
            await memory.drop()


def attempts(names: Iterable[object], weight: float = 1.0) -> list[ReplayEntry]:
    """An entry for each name."""
    return [ReplayEntry("accepted", str(name), weight=weight) for name in names]


def names(batch: ReplayBatch) -> list[str]:
    return [entry.text for entry in batch]


# Reads in batches, and notes each with the offset behind it in one line of a file: what a learner
# does that keeps its offset in its own checkpoint.
LEARNER = """
import asyncio, json, os, sys
from leanq.trainers import ReplayMemory

async def main(url, prefix, path):
    os.environ["LEANQ_PREFIX"] = prefix
    lines = open(path).read().splitlines(keepends=True) if os.path.exists(path) else []
    whole = [line for line in lines if line.endswith("\\n")]
    with open(path, "w") as file:
        file.writelines(whole)
    offset = json.loads(whole[-1])["offset"] if whole else 0
    async with ReplayMemory("m", url) as memory:
        with open(path, "a", buffering=1) as file:
            while True:
                batch = await memory.read(offset, limit=20, wait_s=60)
                offset = batch.offset
                texts = [entry.text for entry in batch]
                file.write(json.dumps(
                    {"offset": offset, "texts": texts, "missed": batch.missed}) + "\\n")

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def learner(settings: Settings, path: Path) -> Iterator[None]:
    """A process that learns from the memory, and is killed in the end, whatever it does then."""
    process = subprocess.Popen(
        (sys.executable, "-c", LEARNER, settings.url, settings.prefix, str(path))
    )
    try:
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(20)
