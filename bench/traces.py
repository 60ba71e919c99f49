"""Measures the cost of keeping a verdict as a trace, and a step's state and goal in it.

See README.md.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from leanq.campaigns.traces import export_traces
from leanq.producer.recording import RecordingRoute, read_journal
from leanq.producer.request_builder import Check, PreparedRequest, RequestBuilder
from leanq.producer.route import Waiter
from leanq.queue.requests import Message, Reply
from leanq.queue.settings import Settings

_RECORDS, _ROUNDS = 5_000, 7
_HYPOTHESES = "p q r : Prop\nx y z : Nat\nh : And p q\nk : Or q r\nhx : Eq x (HAdd.hAdd y z)\n"
_GOAL = f"{_HYPOTHESES}⊢ And q (Or r (Eq (HAdd.hAdd x z) (HAdd.hAdd y (HMul.hMul 2 z))))"


class _Ends:
    """A route that ends each request at once, with the next reply."""

    def __init__(self) -> None:
        self.reply = Reply("accepted")

    async def open(self) -> None:
        pass

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        waiter.ended(self.reply)

    def attach(self, request_id: str, waiter: Waiter) -> None:
        pass

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        return False

    async def close(self, *, withdraw: bool) -> None:
        pass


class _Nobody:
    def acknowledged(self) -> None:
        pass

    def ended(self, end: object) -> None:
        pass


def _state(number: int) -> str:
    """Returns a state as random as real ones, which are hashes."""
    return blake2b(str(number).encode(), digest_size=32).hexdigest()


def _step(number: int, *, with_goals: bool) -> Reply:
    if not with_goals:
        return Reply("rejected", (Message("error", 1, 0, "no", 1, 7),), reason="lean_error")
    goals = (_GOAL.replace("x", f"x{number}"),)
    return Reply(
        "incomplete", state=_state(number), goals=goals, reason="goals_remain", fingerprint="f" * 64
    )


async def _measure(name: str, *, with_goals: bool) -> None:
    builder = RequestBuilder(Settings("unix:///-"), "default")
    options: Check = {"env": "default"}
    steps = [
        (builder.step(_state(n), f"exact h{n}", options), _step(n + 1, with_goals=with_goals))
        for n in range(_RECORDS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        plain, kept = [], []
        for _ in range(_ROUNDS):
            inner = _Ends()
            recording = RecordingRoute(inner, Path(folder))
            for route, times in ((inner, plain), (recording, kept)):
                started = time.process_time()
                for prepared, reply in steps:
                    inner.reply = reply
                    route.send(prepared, _Nobody())
                times.append((time.process_time() - started) / _RECORDS * 1e6)
            await recording.close(withdraw=False)
        (path, *others) = sorted(Path(folder).iterdir())
        for other in others:
            os.remove(other)
        line_bytes = path.stat().st_size / _RECORDS
        started = time.process_time()
        assert sum(1 for _ in read_journal(path, Counter())) == _RECORDS
        read_us = (time.process_time() - started) / _RECORDS * 1e6
        started = time.process_time()
        export_traces([str(path)], f"{folder}/traces")
        export_us = (time.process_time() - started) / _RECORDS * 1e6
        (shard,) = Path(folder, "traces").glob("*.parquet")
        columns: Counter[str] = Counter()
        about = pq.read_metadata(shard)
        for group in range(about.num_row_groups):
            for place in range(about.num_columns):
                column = about.row_group(group).column(place)
                columns[column.path_in_schema.split(".")[0]] += column.total_compressed_size
        of_states = sum(columns[each] for each in ("parent", "state")) / _RECORDS
        of_goals = sum(columns[each] for each in ("goals_before", "goals_after")) / _RECORDS
        print(
            f"| {name} | {min(kept) - min(plain):.1f} µs | {line_bytes:.0f} B | {read_us:.1f} µs "
            f"| {export_us:.0f} µs | {shard.stat().st_size / _RECORDS:.0f} B | {of_states:.0f} B "
            f"| {of_goals:.0f} B |"
        )


async def main() -> None:
    print("| step | recorded in | line | read in | exported in | Parquet | states | goals |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    await _measure("that failed", with_goals=False)
    await _measure(f"with a goal of {len(_GOAL.encode())} bytes", with_goals=True)


if __name__ == "__main__":
    asyncio.run(main())
