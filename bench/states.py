"""What a step costs on a state behind a long source: with a process that stands behind its prefix,
with its snapshot on disk, with the snapshot in Redis, and replayed. And what makes snapshots small.
See README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import zstandard

from leanq.lean.environment import Environment, open_environment
from leanq.lean.lean_driver import LeanDriver
from leanq.lean.recipes import snapshot_key, text_hash
from leanq.lean.snapshots.cache import SnapshotCache
from leanq.lean.snapshots.cost_model import Costs
from leanq.local import EmbeddedServer, embedded_settings
from leanq.queue.queue import every_shard
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import Settings
from leanq.states import RedisStates

_Times = defaultdict[tuple[str, str], list[float]]
_OPEN, _CLOSE = "constructor", "exact And.intro hp (And.intro hq hp)"


class _Always(Costs):
    def worth_saving(self, key: str, replay_s: float) -> bool:
        return True


def source(definitions: int) -> str:
    """A theorem behind so many definitions."""
    lines = (f"def d{n} (p q : Prop) : Prop := And p (And q p)\n" for n in range(definitions))
    theorem = "theorem t (p q : Prop) (hp : p) (hq : q) : And p (And q p) :=\n  sorry\n"
    return f"prelude\nimport Core\n{''.join(lines)}{theorem}"


async def _step(driver: LeanDriver, state: str, tactic: str, verdict: str) -> Reply:
    reply = await driver.run(Request("step", state=state, tactic=tactic, timeout_s=600.0))
    assert reply.verdict == verdict, reply
    return reply


class Bench:
    """Steps on one state, with a machine's cache in ``folder``."""

    def __init__(
        self, settings: Settings, environment: Environment, folder: Path, definitions: int
    ) -> None:
        self._settings = settings
        self._cache = SnapshotCache(folder, 8 << 30)
        self._standing = LeanDriver(lambda: environment, slots=1)
        self._quick = LeanDriver(
            lambda: environment, slots=1, cache=self._cache, costs=_Always(), forks=None
        )
        self._plain = LeanDriver(lambda: environment, slots=1, forks=None)
        self._drivers = (self._standing, self._quick, self._plain)
        self._definitions = definitions

    async def steps(self, rounds: int) -> tuple[bytes, list[bytes]]:
        """Prints the times of steps; the snapshot's bytes, and those of small ones."""
        async with every_shard(self._settings) as queues:
            states = RedisStates(queues)
            try:
                for driver in self._drivers:
                    await driver.open(states)
                started = time.perf_counter()
                state, key = await self._begin(source(self._definitions))
                tally = self._cache.tally
                while tally.shipped == 0:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.1)
                print(f"from the first check to the shipped snapshot: {_since(started):.1f} s")
                packed = tally.packed_bytes / tally.ship_bytes
                await self._stand(state)
                print(f"snapshot: {tally.ship_bytes / 1e6:.0f} MB, of which {packed:.1%} shipped")
                times: _Times = defaultdict(list)
                for number in range(rounds):
                    await self._round(times, state, key, backwards=number % 2 == 1)
                assert tally.damaged == 0
                show(times)
                small = [await self._begin(source(number)) for number in range(0, 60, 5)]
                return self._read(key), [self._read(each) for _, each in small]
            finally:
                for driver in self._drivers:
                    await driver.close()

    async def _begin(self, code: str) -> tuple[str, str]:
        """The state of a source, and the key of its snapshot, which is on the disk."""
        reply = await self._quick.run(Request("check", code=code, timeout_s=600.0))
        state = reply.sorries[0].state
        assert state is not None
        key = snapshot_key(reply.fingerprint or "", text_hash(code))
        while not self._cache.holds(key):
            # One is made at a time, and another may have been on its way.
            await asyncio.sleep(1.0)
            await _step(self._quick, state, _OPEN, "incomplete")
        return state, key

    async def _stand(self, state: str) -> None:
        """Steps until a process stands behind the prefix."""
        started = time.perf_counter()
        while (await _step(self._standing, state, _OPEN, "incomplete")).way != "warm":
            pass
        print(f"from the first step to a process behind the prefix: {_since(started):.1f} s")

    async def _round(self, times: _Times, state: str, key: str, *, backwards: bool) -> None:
        ways = [
            ("standing", self._standing),
            ("warm", self._quick),
            ("cold", self._quick),
            ("replayed", self._plain),
        ]
        for name, driver in reversed(ways) if backwards else ways:
            for tactic, verdict in ((_OPEN, "incomplete"), (_CLOSE, "accepted")):
                if name == "warm":
                    # Whatever was measured before, the snapshot lies on the disk now.
                    await _step(self._quick, state, _OPEN, "incomplete")
                if name == "cold":
                    self._cache.drop(key)
                reply = await _step(driver, state, tactic, verdict)
                if tactic == _OPEN:
                    times[name, "goals left"].append(reply.wall_s)
                else:
                    times[name, "closing, in all"].append(reply.wall_s)
                    times[name, "closing, before its check"].append(reply.wall_s - reply.audit_s)

    def _read(self, key: str) -> bytes:
        found = self._cache.find(key)
        assert found
        return found[0].read_bytes()


def _since(started: float) -> float:
    return time.perf_counter() - started


def show(times: _Times) -> None:
    """Prints the medians, and the ratios to the replayed step of the same round."""
    print("\n| step | way | median | to the replayed one | lowest – highest |")
    print("| --- | --- | --- | --- | --- |")
    for (way, step), found in sorted(times.items(), key=lambda item: item[0][::-1]):
        ratios = [one / other for one, other in zip(found, times["replayed", step], strict=True)]
        print(
            f"| {step} | {way} | {statistics.median(found):.2f} s | "
            f"{statistics.median(ratios):.3f} | {min(ratios):.3f} – {max(ratios):.3f} |"
        )


def sizes(raw: bytes, small: list[bytes]) -> None:
    """Prints what makes a snapshot how small, and in which time.

    ``small`` are snapshots of small sources; a dictionary is trained on all but the last of them.
    """
    blocks = [each[at : at + 4096] for each in small[:-1] for at in range(0, len(each), 4096)]
    trained = zstandard.train_dictionary(112_640, blocks)
    print("\n| way | of raw | to compress | to restore |\n| --- | --- | --- | --- |")
    for level in (1, 3, 6, 9):
        _size(f"level {level}", raw, level)
    for level in (3, 9):
        _size(f"level {level}, transposed", raw, level, turn=transposed, back=restored)
    _size("level 3, difference of neighbours", raw, 3, turn=difference)
    _size("level 3, difference, transposed", raw, 3, turn=lambda data: transposed(difference(data)))
    _size("level 3, trained dictionary", raw, 3, dictionary=trained)
    _size("a small one, level 9", small[-1], 9)
    _size("a small one, level 9, trained dictionary", small[-1], 9, dictionary=trained)


def transposed(data: bytes) -> bytes:
    """The first bytes of all 64-bit words, then the second bytes, and so on."""
    return b"".join(data[place::8] for place in range(8))


def restored(data: bytes) -> bytes:
    """The inverse of :func:`transposed`."""
    words = bytearray(len(data))
    start = 0
    for place in range(8):
        count = len(range(place, len(data), 8))
        words[place::8] = data[start : start + count]
        start += count
    return bytes(words)


def difference(data: bytes) -> bytes:
    """Each 64-bit word less the one before it; as one long number, in which a borrow crosses."""
    number = int.from_bytes(data, "little")
    return (number - (number << 64)).to_bytes(len(data) + 9, "little", signed=True)[: len(data)]


def _size(
    name: str,
    raw: bytes,
    level: int,
    *,
    turn: Callable[[bytes], bytes] = bytes,
    back: Callable[[bytes], bytes] | None = None,
    dictionary: zstandard.ZstdCompressionDict | None = None,
) -> None:
    started = time.perf_counter()
    packed = zstandard.ZstdCompressor(level=level, dict_data=dictionary).compress(turn(raw))
    packed_s = _since(started)
    started = time.perf_counter()
    text = zstandard.ZstdDecompressor(dict_data=dictionary).decompress(packed)
    restored_s = f"{_since(started):.2f} s"
    if back:
        text = back(text)
        restored_s = f"{_since(started):.2f} s"
    elif turn is not bytes:
        restored_s = "–"
    assert text == raw or restored_s == "–"
    print(f"| {name} | {len(packed) / len(raw):.1%} | {packed_s:.2f} s | {restored_s} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--definitions", type=int, default=3000, help="before the theorem")
    parser.add_argument("--rounds", type=int, default=5, help="how often every step is taken")
    options = parser.parse_args()
    environment = open_environment("default", None)
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
        settings = embedded_settings(server, os.environ)
        bench = Bench(settings, environment, Path(folder), options.definitions)
        raw, others = asyncio.run(bench.steps(options.rounds))
        sizes(raw, others)


if __name__ == "__main__":
    main()
