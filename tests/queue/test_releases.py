"""Two releases on one queue, as while it is upgraded: scripts, messages and records of both."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from support.fleets import Recorder, submission, working
from support.queue.queues import Queue
from support.queue.shards import Shard, open_shard, settlement, with_test_clock
from support.queue.shards import submission as submit_of

import leanq.queue.shard
from leanq.client import AsyncLeanQClient
from leanq.errors import WireError
from leanq.local import EmbeddedServer
from leanq.queue.operator_queue import look
from leanq.queue.records import read_in_flight, read_record, version_of
from leanq.queue.results import (
    VERSION,
    Job,
    OthersRow,
    Returning,
    Submission,
    Unreadable,
    merged,
)
from leanq.queue.settings import Settings
from leanq.queue.wire import unpack_reply

COUNT = 200
WEEK_MS = 7 * 86_400_000


async def test_scripts_and_messages_of_two_releases_side_by_side(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = leanq.queue.shard.script_text
    old, new = Recorder(), Recorder()
    async with working(settings, old, slots=4), AsyncLeanQClient(settings) as lean:
        # Those who use it so far keep the scripts that they have.
        assert await lean.echo(b"before") == b"before"
        monkeypatch.setattr(
            leanq.queue.shard, "script_text", lambda name: f"{ours(name)}\n-- newer\n"
        )
        async with working(settings, new, slots=4), AsyncLeanQClient(settings) as newer:
            payloads = [b"%d" % number for number in range(COUNT)]
            # A later release may know more fields.
            fields = {"v": 1, "op": "echo", "delay_s": 0.001, "hint": {"from": "the future"}}
            queue = Queue(settings)
            batch: list[Submission] = []
            for payload in payloads:
                body = bytes(msgpack.packb({**fields, "payload": payload}))
                batch.append(submission(f"0-{payload.decode()}", body))
            await queue.submit("c", batch)
            replies = await asyncio.gather(*(newer.attach(item.request_id) for item in batch))
            assert [reply.payload for reply in replies] == payloads
            assert await asyncio.gather(*map(lean.echo, payloads)) == payloads
            assert await asyncio.gather(*map(newer.echo, payloads)) == payloads
            await queue.close()
    assert min(len(old.started), len(new.started)) > COUNT / 10
    counters = (await look(settings)).counters
    assert counters["settled"] == counters["submitted"] == 3 * COUNT + 1


# A later release, whose records have another version. It reads those before, and writes its own.

_release = ContextVar("_release", default=VERSION)


def _text_of(name: str) -> str:
    text = with_test_clock(name)
    if _release.get() == VERSION:
        return text
    reads = "string.byte(text) ~= record.VERSION then return nil"
    assert reads not in text or text.count(reads) == 1
    text = text.replace(reads, f"string.byte(text) ~= {VERSION} and {reads}")
    return text.replace(f"VERSION = {VERSION},", f"VERSION = {_release.get()},")


class Later(Queue):
    """The queue as a later release calls it."""

    async def run(
        self, name: str, uploads: Mapping[str, bytes] | None = None, /, **arguments: Any
    ) -> Any:
        token = _release.set(VERSION + 1)
        try:
            return await super().run(name, uploads, **arguments)
        finally:
            _release.reset(token)


@pytest.fixture
async def later(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Later]:
    monkeypatch.setattr(leanq.queue.shard, "script_text", _text_of)
    queue = Later(shard.settings)
    yield queue
    await queue.close()


def _left(shard: Shard, version: int = VERSION + 1, environment: str = "a") -> list[bytes]:
    return shard.server.lrange(f"{shard.tag}:wait:{environment}:left:{version}", 0, -1)


def _ms_left(shard: Shard, request_id: str) -> int:
    return shard.server.pttl(shard.queue.keys.request(request_id))


async def test_what_a_worker_cannot_read_waits_for_one_that_can(shard: Shard, later: Later) -> None:
    await later.submit("c", [submit_of(f"r{n}") for n in range(3)])
    await shard.submit("own")
    assert [job.request_id for job in (await shard.claim("w")).jobs] == ["own"]
    assert not (await shard.claim("w", 1)).jobs
    assert len(_left(shard)) == 3
    # What the later release never comes back for goes in the end.
    assert all(0 < _ms_left(shard, f"r{n}") <= WEEK_MS for n in range(3))
    claimed = await later.claim("v", ["a"], 9, busy=0, token="t:")
    assert [job.request_id for job in claimed.jobs] == ["r0", "r1", "r2"]
    assert _ms_left(shard, "r0") == -1
    assert not _left(shard)


async def test_an_exchange_leaves_what_it_cannot_read(shard: Shard, later: Later) -> None:
    await shard.submit("r1")
    job = await shard.job()
    await later.submit("c", [submit_of("r2")])
    claimed = await shard.claim("w", 1, settle=[settlement(job)])
    assert (claimed.accepted, claimed.jobs) == ((True,), ())
    assert _left(shard) == [b"r2 wait:a:1:t"]
    # An exchange of the later release leaves it to a claim to take that back.
    await later.submit("c", [submit_of("r3")])
    first = await later.claim("v", ["a"], 1, busy=0, token="t:")
    await later.submit("c", [submit_of("r4")])
    await shard.claim("w", 1)
    ended = [settlement(each) for each in first.jobs]
    again = await later.claim("v", ["a"], 1, busy=0, token="u:", settlements=ended)
    assert {job.request_id for job in (*first.jobs, *again.jobs)} == {"r2", "r3"}


async def test_a_damaged_record_is_left_by_all(shard: Shard, later: Later) -> None:
    for n, damaged in enumerate((bytes([VERSION]) + b"short", b"", b"\x00")):
        await shard.submit(f"r{n}")
        shard.server.set(shard.queue.keys.request(f"r{n}"), damaged)
    (row,) = (await shard.queue.status()).priorities
    assert (row.waiting, row.oldest_s) == (3, 0.0)
    assert not (await shard.claim()).jobs
    assert not (await later.claim("v", ["a"], 9, busy=0, token="t:")).jobs
    assert not shard.server.exists(f"{shard.tag}:wait:a:1:t")
    assert len(_left(shard, 0)) == 3


async def test_a_client_learns_that_it_cannot_read_its_request(shard: Shard, later: Later) -> None:
    await later.submit("c", [submit_of("r1")])
    unreadable = Unreadable(VERSION + 1)
    assert await shard.submit("r1") == [unreadable]
    assert await shard.queue.lookup("c", ["r1", "r2"]) == [unreadable, False]
    assert await shard.queue.cancel(["r1"]) == [False]
    assert await shard.queue.replies(["r1"]) == [None]
    with pytest.raises(WireError, match=f"version {VERSION + 1}, this release reads {VERSION}"):
        read_record("r1", shard.server.get(shard.queue.keys.request("r1")) or b"")
    assert await later.cancel(["r1"]) == [True]
    (end,) = await shard.queue.lookup("c", ["r1"])
    assert unpack_reply("r1", end).verdict == "cancelled"  # type: ignore[arg-type]


async def test_what_an_older_worker_held_counts_its_attempt(shard: Shard, later: Later) -> None:
    """The later client attaches to a request, and so writes its record anew."""
    await shard.submit("r1", client="first")
    await shard.job()
    assert await later.lookup("c", ["r1"]) == [True]
    await shard.lapse()
    assert (await shard.queue.reap()).requeued == 1
    assert _left(shard) == [b"r1 retry"]
    claimed = await later.claim("v", ["a"], 9, busy=0, token="t:")
    assert [(job.request_id, job.attempts) for job in claimed.jobs] == [("r1", 2)]


async def test_a_joined_request_that_a_worker_cannot_read_runs_by_itself(
    shard: Shard, later: Later
) -> None:
    await shard.submit("r1", digest="d")
    job = await shard.job()
    await later.submit("c", [submit_of("r2", digest="d")])
    assert not _left(shard)
    assert await shard.settle(job) == (True,)
    claimed = await later.claim("v", ["a"], 9, busy=0, token="t:")
    assert [job.request_id for job in claimed.jobs] == ["r2"]


async def test_what_was_withdrawn_meanwhile_is_forgotten(shard: Shard, later: Later) -> None:
    await later.submit("c", [submit_of("r1"), submit_of("r2")])
    assert not (await shard.claim("w")).jobs
    assert await later.cancel(["r1"]) == [True]
    claimed = await later.claim("v", ["a"], 9, busy=0, token="t:")
    assert [job.request_id for job in claimed.jobs] == ["r2"]
    assert not shard.server.exists(f"{shard.tag}:withdrawn")


@pytest.mark.parametrize("quarantined", [False, True])
async def test_it_comes_back_to_its_place(shard: Shard, later: Later, quarantined: bool) -> None:
    await shard.quarantined("r1") if quarantined else await shard.submit("r1", tenant="held")
    assert await later.lookup("other", ["r1"]) == [True]
    assert not (await shard.claim()).jobs
    assert len(_left(shard)) == 1
    await shard.queue.set_paused("tenant", "held", paused=True)
    claimed = await later.claim("v", ["a"], 9, busy=0, token="t:")
    assert [job.isolated for job in claimed.jobs] == [True] * quarantined
    await shard.queue.set_paused("tenant", "held", paused=False)
    again = await later.claim("v", ["a"], 9, busy=len(claimed.jobs), token="u:")
    assert len(again.jobs) == 1 - quarantined


_STEPS = st.tuples(
    st.sampled_from(("submit", "claim", "settle", "release", "reap", "cancel", "lookup")),
    st.booleans(),
    st.integers(0, 3),
)


@given(steps=st.lists(_STEPS, max_size=40))
@profile(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_two_releases_lose_nothing(
    server: EmbeddedServer, steps: list[tuple[str, bool, int]]
) -> None:
    """Whatever two releases do on one queue: no claim gives what its release cannot read, and once
    both have worked to the end each request has ended once."""
    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(_play(server, steps, patch))


async def _play(
    server: EmbeddedServer, steps: list[tuple[str, bool, int]], patch: pytest.MonkeyPatch
) -> None:
    settings = replace(Settings.load(server.url, {}), prefix="releases", max_attempts=1000)
    async with open_shard(settings, patch) as shard:
        patch.setattr(leanq.queue.shard, "script_text", _text_of)
        queues = {"older": shard.queue, "later": Later(settings)}
        held: dict[str, dict[str, Job]] = {"older": {}, "later": {}}
        sent = list[str]()

        async def claim(who: str, want: int, settle: Sequence[Job] = ()) -> None:
            token = f"{len(sent)}{secrets.token_urlsafe(6)}:"
            settlements = [settlement(job) for job in settle]
            found = await queues[who].claim(
                who, ["a"], want, busy=len(held[who]), token=token, settlements=settlements
            )
            held[who] |= {job.request_id: job for job in found.jobs}

        async def end(who: str) -> None:
            jobs = [*held[who].values()]
            held[who].clear()
            await claim(who, 0, jobs)

        for what, is_later, number in steps:
            who = "later" if is_later else "older"
            queue, some = queues[who], sent[-1 - number :][:2]
            match what:
                case "submit":
                    digest = "d" if number == 3 else ""
                    batch = [submit_of(f"r{len(sent) + n}", digest=digest) for n in range(number)]
                    sent += [item.request_id for item in batch]
                    await queue.submit(who, batch)
                case "claim":
                    await claim(who, number)
                case "settle":
                    jobs = [*held[who].values()][:1]
                    held[who] = {i: job for i, job in held[who].items() if job not in jobs}
                    await claim(who, number, jobs)
                case "release":
                    how: Returning = ("requeue", "retry", "defer", "retry")[number]
                    await queue.release(who, [(i, j.token) for i, j in held[who].items()], how=how)
                    held[who].clear()
                case "reap":
                    await shard.lapse()
                    await queue.reap()
                    held = {"older": {}, "later": {}}
                case "cancel":
                    await queue.cancel(some)
                case "lookup":
                    await queue.lookup(f"{who}{number}", some)
        for _ in range(3 * len(sent) + 3):
            for who in queues:
                await claim(who, 9)
                await end(who)
        await shard.lapse()
        await queues["later"].reap()
        for _ in range(3 * len(sent) + 3):
            await claim("later", 9)
            await end("later")
        assert None not in (await queues["later"].replies(["none", *sent]))[1:]
        status = await shard.queue.status()
        ended = sum(n for name, n in status.counters.items() if name.startswith("verdict:"))
        assert ended == status.counters.get("submitted", 0) == len(sent)
        assert not status.priorities
        assert not _left(shard)
        await queues["later"].close()


# Records as the bytes that releases wrote.

_TIMES = b'Bz"n\x1fl@\x00'
_NO_DEADLINE = bytes(8)
_MINUTE = b"@\xedL\x00\x00\x00\x00\x00"
_NUMBERS = _TIMES + _NO_DEADLINE + _MINUTE
_BODY = b"\x81\xa1v\x01"
_LOST = b"w 1795948683746 1795948683796 retry;"
RECORDS = {
    1: (
        b"\x01\x00\x01" + _NUMBERS + b"m\0c\0\0\0t\0\0" + _BODY,
        b"\x01\x01\x01" + _NUMBERS + b"n\0c\0\0\0t\0e\0" + _BODY,
        b"\x02\x00\x00" + _NUMBERS + b"m\0c\0one\0two\0t\0d\x0020000",
    ),
    2: (
        b"\x01\x00\x01" + _NUMBERS + b"m\0c\0\0\0\0t\0\0" + _BODY,
        b"\x01\x01\x01" + _NUMBERS + b"n\0c\0\0\0" + _LOST + b"\0t\0e\0" + _BODY,
        b"\x02\x00\x00" + _NUMBERS + b"m\0c\0one\0two\0\0t\0d\x0020000",
    ),
    3: (
        b"\x03\x01\x00\x01" + _NUMBERS + b"m\0c\0\0\0\0t\0\0" + _BODY,
        b"\x03\x01\x01\x01" + _NUMBERS + b"n\0c\0\0\0" + _LOST + b"\0t\0e\0" + _BODY,
        b"\x03\x02\x00\x00" + _NUMBERS + b"m\0c\0one\0two\0\0t\0d\x0020000",
    ),
}


def test_each_record_says_its_version() -> None:
    assert {version: {*map(version_of, each)} for version, each in RECORDS.items()} == {
        1: {1},
        2: {2},
        3: {3},
    }
    assert max(RECORDS) == VERSION


async def test_records_of_this_version_are_read_as_they_were_written(shard: Shard) -> None:
    """Those of the version before too, from the next version on."""
    for name, record in zip("abc", RECORDS[VERSION], strict=True):
        shard.server.set(shard.queue.keys.request(name), record)
    bodies = [b"x" * 20_000 if record[1] == 2 else _BODY for record in RECORDS[VERSION]]
    shard.server.set(f"{shard.tag}:body:c", bodies[2])
    for environment, priority, name in (("m", 1, "a"), ("n", 1, "b"), ("m", 0, "c")):
        shard.server.rpush(f"{shard.tag}:wait:{environment}:{priority}:t", name)
        shard.server.rpush(f"{shard.tag}:ring:{environment}:{priority}", "t")
    jobs = (await shard.claim(environments=("m", "n"))).jobs
    found = {job.request_id: job for job in jobs}
    assert [found[name].body for name in "abc"] == bodies
    assert [found[name].attempts for name in "abc"] == [1, 2, 1]
    assert [found[name].digest for name in "abc"] == ["", "e", "d"]
    assert found["b"].lost == _LOST.decode()
    sent, client = read_record("c", RECORDS[VERSION][2])
    assert (sent.affinity, sent.tenant, sent.longest_run_ms) == (("one", "two"), "t", 60_000)
    assert client == "c"


@pytest.mark.parametrize("version", [1, 2, 4])
async def test_records_of_other_versions_are_left_to_others(shard: Shard, version: int) -> None:
    for n, record in enumerate(RECORDS.get(version) or later_records(version)):
        environment = record[record.index(_MINUTE) + 8 :].partition(b"\0")[0].decode()
        for exchanges in (False, True):
            own, name = f"own{n}{exchanges}", f"r{n}{exchanges}"
            key = shard.queue.keys.request(name)
            await shard.submit(own, environment=environment)
            job = await shard.job(environments=[environment])
            await shard.submit(name, environment=environment, priority=0)
            shard.server.set(key, record)
            with pytest.raises(WireError, match="another release"):
                read_record(name, record)
            with pytest.raises(WireError, match="another release"):
                read_in_flight(name, record)
            settle = [settlement(job)] if exchanges else []
            asked = await shard.claim(environments=[environment], want=1, settle=settle)
            assert not asked.jobs
            assert shard.server.get(key) == record
            left = f"{name} wait:{environment}:0:t".encode()
            assert _left(shard, record[0], environment)[-1] == left
            await shard.claim(want=0, settle=[] if exchanges else [settlement(job)])


def later_records(version: int) -> list[bytes]:
    return [bytes([version]) + record[1:] for record in RECORDS[VERSION]]


async def test_a_client_learns_that_workers_leave_what_it_sends(shard: Shard) -> None:
    assert await shard.queue.unread("a") == ""
    shard.server.rpush(f"{shard.tag}:wait:a:left:{VERSION}", "r1 wait:a:1:t")
    told = f"workers of another release left 1 requests with records of version {VERSION}"
    assert (await shard.queue.unread("a")).startswith(told)
    shard.server.delete(f"{shard.tag}:wait:a:left:{VERSION}")


async def test_a_look_tells_what_is_left_and_what_is_lost(shard: Shard, later: Later) -> None:
    await shard.submit("own", "lost", tenant="u")
    await later.submit("c", [submit_of("r1"), submit_of("r2", tenant="v")])
    (job, *_) = (await shard.claim("w")).jobs
    row = OthersRow(VERSION + 1, "a", 2)
    status = await shard.queue.status()
    assert (status.others, await shard.queue.others()) == ((row,), (row,))
    assert "start a worker of that release" in row.text
    assert status.unaccounted == 0
    # As if a server had lost it.
    shard.server.zrem(f"{shard.tag}:processing:w", job.request_id)
    assert (await shard.queue.status()).unaccounted == 1
    assert merged([status, status]).others == (row._replace(waiting=4),)
