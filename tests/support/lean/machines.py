"""Machines with a cache of snapshots each, and a server between them that tests can tamper with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from leanq.lean.goals.snapshots import SnapshotCache, Snapshots
from leanq.states import MemoryStates, Packed

MB = 1 << 20


class Shelf(MemoryStates):
    """A server that keeps snapshots, and gives back whatever the test puts there."""

    most_snapshot_bytes = 64 * MB

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Packed] = {}
        self.asked: list[str] = []

    async def keep_snapshot(self, key: str, snapshot: Packed) -> bool:
        self.held[key] = snapshot
        return True

    async def find_snapshot(self, key: str) -> Packed | None:
        self.asked.append(key)
        return self.held.get(key)

    async def drop_snapshot(self, key: str) -> None:
        self.held.pop(key, None)


@dataclass
class Machine:
    """A machine with a worker's cache and one folder of compiled modules."""

    folder: Path
    budget_bytes: int = 64 * MB

    def __post_init__(self) -> None:
        self.root = self.folder / "modules"
        self.scratch = self.folder / "scratch"
        for place in (self.root, self.scratch):
            place.mkdir(parents=True, exist_ok=True)
        self.cache = SnapshotCache(self.folder / "cache", self.budget_bytes)
        self.snapshots = Snapshots(self.cache, [self.root])

    def write(self, content: bytes, deps: object = None) -> Path:
        """As Lean would."""
        file = self.scratch / "made"
        file.write_bytes(content)
        deps = [{"olean": f"{self.root}/Core.olean"}] if deps is None else deps
        self.scratch.joinpath("made.deps").write_text(json.dumps(deps))
        return file

    async def keep(self, key: str, content: bytes, shelf: Shelf, deps: object = None) -> None:
        await self.snapshots.keep(key, self.write(content, deps), shelf)

    async def content(self, key: str, shelf: Shelf) -> bytes | None:
        found = await self.snapshots.fetch(key, shelf)
        return found.path.read_bytes() if found else None

    def files(self) -> list[Path]:
        """The snapshots of the machine's workers, and what comes in."""
        return sorted((self.folder / "cache" / "workers").glob("*/*"))


def content(size: int = 100_000, seed: int = 0) -> bytes:
    block = hashlib.shake_256(b"%d" % seed).digest(1000)
    return (block * (size // 1000 + 1))[:size]
