"""A single request by ``submit_one`` beside the same by ``submit``, in the same queue."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.shards import LEASE_MS, Shard, open_shard, settlement, submission

from leanq.errors import UnavailableError
from leanq.queue.results import Queued
from leanq.queue.settings import Settings

SEEDS, STEPS = 12, 40


@pytest.fixture
async def pair(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Shard, Shard]]:
    """Two queues, of which the second has no ``submit_one``."""
    small = replace(settings, lease_s=LEASE_MS / 1000, max_attempts=3, max_waiting=4)
    async with contextlib.AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(
                open_shard(replace(small, prefix=f"{small.prefix}-{name}"), monkeypatch)
            )
            for name in ("one", "other")
        ]

        async def refuse(*_: object) -> bool:
            return False

        monkeypatch.setattr(other.queue, "_submit_one", refuse)
        for shard in (one, other):
            await shard.queue.register("w", b"", {"a": b""})
        yield one, other


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_it_does_what_submit_does(pair: tuple[Shard, Shard], seed: int) -> None:
    rng, sent = random.Random(seed), list[str]()
    jobs: list[list[object]] = [[], []]
    for number in range(STEPS):
        what = rng.choice("sssssscccpwxra")
        new = rng.random() < 0.8 or not sent
        item = submission(
            f"r{number}" if new else rng.choice(sent),
            environment=rng.choice("aaab"),
            tenant=rng.choice("tu"),
            priority=rng.choice((0, 1, 1, 2)),
            deadline_ms=rng.choice((0, 0, 5_000)),
            digest=rng.choice(("", "", "p", "q")),
            affinity=rng.choice(((), (), ("x",), ("x", "y"))),
        )
        client, ms, paused = rng.choice("cd"), rng.choice((1, 3_000, 70_000)), rng.random() < 0.3
        known = rng.choice(sent) if sent else "none"
        answers = []
        for shard, held in zip(pair, jobs, strict=True):
            match what:
                case "s":
                    answers.append(await shard.queue.submit(client, [item]))
                case "c":
                    done = [settlement(job) for job in held[:1]]  # type: ignore[arg-type]
                    del held[:1]
                    claimed = await shard.queue.claim(
                        "w", ["a", "b"], 2, busy=0, token=f"t{number}", settlements=done
                    )
                    held += claimed.jobs
                    answers.append((claimed.accepted, [job.request_id for job in claimed.jobs]))
                case "p":
                    answers.append(await shard.queue.set_paused("tenant", "t", paused=paused))
                case "w":
                    answers.append(await shard.queue.cancel([known]))
                case "x":
                    shard.advance(ms)
                case "r":
                    await shard.queue.register("w", b"", {"a": b"", "b": b""})
                case "a":
                    answers.append(await shard.queue.lookup(client, [known]))
        if what == "s":
            sent.append(item.request_id)
        assert not answers or answers[0] == answers[1], what
        one, other = (shard.dump() for shard in pair)
        assert one == other
        wakeups = [
            [shard.server.lrange(shard.queue.keys.wakeup(name), 0, -1) for name in "ab"]
            for shard in pair
        ]
        assert wakeups[0] == wakeups[1]


async def test_it_takes_most_single_requests(
    pair: tuple[Shard, Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, called = pair[0].queue, list[str]()
    run = queue.run

    async def spy(name: str, *args: object, **arguments: object) -> object:
        called.append(name)
        return await run(name, *args, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(queue, "run", spy)
    # The first of a minute notes the totals.
    await queue.submit("c", [submission("first")])
    called.clear()
    for name, fields in {"plain": {}, "checked": {"digest": "d", "affinity": ("x", "y")}}.items():
        assert await queue.submit("c", [submission(name, **fields)]) == [Queued()]
    assert called == ["submit_one", "submit_one"]


@pytest.mark.parametrize("harmed", ["stats waiting:a", "stats minute", "ring:a:1", "wakeup:a"])
async def test_hostile_values_lose_no_request(pair: tuple[Shard, Shard], harmed: str) -> None:
    shard = pair[0]
    await shard.submit("first", "second")
    shard.harm(harmed)
    with contextlib.suppress(UnavailableError):
        await shard.queue.submit("c", [submission("new", tenant="u")])
    shard.server.delete(f"{shard.tag}:{harmed.partition(' ')[0]}")
    # A client that was not told asks, and submits again what is not known.
    if await shard.queue.lookup("c", ["new"]) == [False]:
        await shard.queue.submit("c", [submission("new", tenant="u")])
    if harmed.startswith("ring"):
        shard.server.rpush(f"{shard.tag}:ring:a:1", "t", "u")
    claimed = {job.request_id for job in (await shard.claim(want=9)).jobs}
    assert claimed == {"first", "second", "new"}
