"""Dead letters: what is kept of requests that took down too many workers, and ``leanq dead``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis
from msgspec import structs
from support.fleets import echo_body, serving, until
from support.queue.queues import Queue
from support.queue.shards import LARGE, Shard, settlement, submission
from support.terminals import Terminal

import leanq.queue.shard
from leanq.client import LeanQClient
from leanq.queue.keys import Keys, retry_request_id
from leanq.queue.operator_queue import send_again
from leanq.queue.requests import Message, Reply, Request
from leanq.queue.results import VERSION, DeadLetter, Job, Reaped, Settlement
from leanq.queue.scripts import LARGE_BYTES
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply, pack_request


async def test_dead_letter_tells_what_and_who(shard: Shard) -> None:
    await shard.submit("r", priority=2, body=b"the code")
    for worker in ("w1", "w2", "w3"):
        assert (await shard.claim(worker)).jobs[0].body == b"the code"
        await shard.lapse()
        found = await shard.queue.reap()
    assert found == Reaped(0, 1, more=True)
    assert await shard.end("r") == ("poisoned", 3, 0)
    letter = await shard.queue.dead_letter("r")
    asked = submission("r", priority=2, body=b"the code")
    assert letter == DeadLetter(asked, "c", 3, "w3", shard.now_ms / 1000)
    assert await shard.queue.dead_request_ids(9) == ["r"]
    assert (await shard.queue.status()).dead == 1
    assert not shard.dump().req


def keep_two(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """Makes this bound of the scripts two."""
    text = leanq.queue.shard.script_text
    two = f"{bound.partition(' = ')[0]} = 2"
    monkeypatch.setattr(
        leanq.queue.shard, "script_text", lambda name: text(name).replace(bound, two)
    )


async def test_only_the_newest_dead_letters_are_kept(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_two(monkeypatch, "DEAD_LETTERS = 10000")
    for request_id in ("r1", "r2", "r3"):
        await shard.quarantined(request_id)
        job = await shard.job()
        await shard.queue.release("w", [(request_id, job.token)], how="retry")
        shard.advance(1)
    found = shard.dump()
    assert found.dead == found.deadreq == {"r2", "r3"}
    assert await shard.queue.dead_request_ids(9) == ["r3", "r2"]
    assert await shard.queue.dead_request_ids(1) == ["r3"]
    assert await shard.queue.dead_letter("r1") is None
    assert [await shard.queue.drop_dead("r2") for _ in range(2)] == [True, False]
    assert await shard.queue.dead_letter("r2") is None


def disagreed(job: Job, text: str = "no such reduction") -> Settlement:
    """The end of a text that another Lean took, and the judge's kernel did not."""
    messages = (Message("warning", 1, 0, text),)
    reply = Reply(
        "unjudged",
        messages,
        reason="kernels_disagree",
        kernel="4.35.0",
        attempts=job.attempts,
    )
    packed = pack_reply(job.token, reply)
    return structs.replace(settlement(job, "unjudged", reason="kernels_disagree"), reply=packed)


@pytest.mark.parametrize("want", [0, 1])
@pytest.mark.parametrize("large", [False, True])
async def test_texts_on_which_kernels_disagree_are_kept(
    shard: Shard, want: int, large: bool
) -> None:
    body = b"the code"
    await shard.submit("r", "other", body=body)
    job = await shard.job()
    end = disagreed(job, "x" * LARGE_BYTES if large else "why")
    found = await shard.claim("w", want, settle=[end])
    assert (found.accepted, [each.request_id for each in found.jobs]) == ((True,), ["other"][:want])
    assert await shard.end("r") == ("unjudged", 1, 0)
    letter = await shard.queue.dead_letter("r")
    asked = submission("r", body=body)
    assert letter == DeadLetter(
        asked, "c", 1, "w", shard.now_ms / 1000, b"" if large else end.reply
    )
    assert await shard.queue.dead_request_ids(9, disagreed=True) == ["r"]
    assert await shard.queue.dead_request_ids(9) == []
    assert (await shard.queue.status()).dead == 0
    again = await send_again(shard.queue, letter)
    assert shard.dump().disagreed == shard.dump().deadreq == set()
    assert await shard.queue.cancel([again, "other"]) == [True, True]


async def test_no_large_text_on_which_kernels_disagree_fills_the_memory(shard: Shard) -> None:
    await shard.submit("r", body=LARGE)
    await shard.claim("w", 0, settle=[disagreed(await shard.job())])
    assert await shard.end("r") == ("unjudged", 1, 0)
    assert shard.dump().disagreed == shard.dump().deadreq == set()
    assert not shard.dump().body


async def test_only_the_newest_texts_on_which_kernels_disagree_are_kept(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_two(monkeypatch, "DISAGREED = 1000")
    for request_id in ("r1", "r2", "r3"):
        await shard.submit(request_id)
        await shard.claim("w", 0, settle=[disagreed(await shard.job())])
        shard.advance(1)
    assert shard.dump().disagreed == {"r2", "r3"}


async def test_a_text_on_which_kernels_disagree_is_shown_with_the_reason(
    settings: Settings, terminal: Terminal
) -> None:
    terminal.use(settings)
    queue = Queue(settings)
    await queue.register("w", b"", {"old": b""})
    check = pack_request(Request(op="check", code="theorem odd : True := trivial"))
    await queue.submit("c", [submission("0-disagreed", environment="old", body=check)])
    assert terminal.run("dead", "list", "--disagreed").out == "no such requests\n"
    (job,) = (await queue.claim("w", ["old"], 1, busy=0, token="n:")).jobs
    await queue.claim("w", ["old"], 0, busy=0, token="m:", settlements=[disagreed(job)])
    await queue.release("w", [], leave=True)
    await queue.close()
    (row,) = terminal.run("dead", "list", "--disagreed", "--json").lines
    assert (row["kernel"], row["message"]) == ("4.35.0", "no such reduction")
    assert "no such reduction" in terminal.run("dead", "list", "--disagreed").out
    assert terminal.run("dead", "list").out == "no dead letters\n"
    shown = terminal.run("dead", "show", "0-disagreed").out
    assert "message     no such reduction\n" in shown
    assert shown.endswith("\n\ntheorem odd : True := trivial\n")
    assert terminal.run("dead", "drop", "0-disagreed").out == "0-disagreed dropped\n"
    assert terminal.run("dead", "list", "--disagreed").out == "no such requests\n"


def test_a_retried_letter_has_a_request_id_of_its_own() -> None:
    request_ids = ["0-x"]
    for _ in range(3):
        request_ids.append(retry_request_id(request_ids[-1]))
    assert request_ids == ["0-x", "0-x.r1", "0-x.r2", "0-x.r3"]
    assert retry_request_id("0-a.rb") == "0-a.rb.r1"


# The command line


@pytest.fixture
async def buried(settings: Settings, terminal: Terminal) -> Terminal:
    """A user whose queue has two dead letters: a check for an unknown environment, an echo."""
    terminal.use(settings)
    queue = Queue(replace(settings, max_attempts=1))
    check = pack_request(Request(op="check", code="theorem killer : True := trivial"))
    await queue.submit(
        "c", [submission("0-check", environment="gone", body=check), submission("0-bad", body=b"?")]
    )
    await queue.register("w", b"", {"echo": b""})
    await queue.submit("c", [submission("0-echo", environment="echo", body=echo_body(b"again"))])
    claimed = await queue.claim("w", ["gone", "a", "echo"], 9, busy=0, token="n:")
    for job in claimed.jobs:
        await queue.release("w", [(job.request_id, job.token)], how="retry")
    await queue.release("w", [], leave=True)
    await queue.close()
    return terminal


@pytest.mark.slow
def test_list_and_show(buried: Terminal) -> None:
    rows = {row["request_id"]: row for row in buried.run("dead", "list", "--json").lines}
    assert set(rows) == {"0-check", "0-bad", "0-echo"}
    row = rows["0-check"]
    assert (row["environment"], row["tenant"], row["attempts"]) == ("gone", "t", 1)
    assert row["worker"] == "w"
    assert len(buried.run("dead", "list").out.splitlines()) == 4
    assert len(buried.run("dead", "list", "--limit", "2").out.splitlines()) == 3
    told = "dead        3 requests that took down too many workers (leanq dead list)\n"
    assert told in buried.run("status").out
    shown = buried.run("dead", "show", "0-check").out
    assert shown.endswith("\n\ntheorem killer : True := trivial\n")
    assert "timeout_s   60.0\n" in shown
    (record,) = buried.run("dead", "show", "--json", "0-bad").lines
    assert record["code"].startswith("cannot be read: ")


@pytest.mark.slow
def test_retry_is_a_new_request_and_drop_is_for_good(buried: Terminal, settings: Settings) -> None:
    assert buried.run("dead", "retry", "0-echo").out == "0-echo -> 0-echo.r1\n"
    worker = buried.start("worker", "--driver", "echo")
    with LeanQClient(settings) as client:
        (future,) = client.attach(["0-echo.r1"])
        assert future.result(timeout=60).payload == b"again"
        (old,) = client.attach(["0-echo"])
        assert old.result(timeout=60).verdict == "poisoned"
    done = buried.run("dead", "retry", "0-check")
    assert (done.code, done.err) == (
        2,
        "leanq: no worker offers the environment 'gone' of 0-check\n",
    )
    worker.terminate()
    until(lambda: worker.poll() is not None)
    (record,) = buried.run("dead", "drop", "--json", "0-check").lines
    assert record == {"request_id": "0-check", "dropped": True}
    left = [row["request_id"] for row in buried.run("dead", "list", "--json").lines]
    assert left == ["0-bad"]


def test_each_retry_is_said_before_the_next_one_fails(buried: Terminal, settings: Settings) -> None:
    """The new request's id would be lost otherwise, with the request sent and the letter gone."""
    done = buried.run("dead", "retry", "0-echo", "0-check")
    assert (done.code, done.out) == (2, "0-echo -> 0-echo.r1\n")
    assert "no worker offers the environment 'gone'" in done.err
    with serving(settings), LeanQClient(settings) as client:
        (future,) = client.attach(["0-echo.r1"])
        assert future.result(timeout=60).payload == b"again"


def test_a_letter_of_another_release_is_named(buried: Terminal, settings: Settings) -> None:
    letter = Keys(settings.prefix).of("deadreq", "0-echo")
    with redis.Redis.from_url(settings.url) as server:
        server.hset(letter, "record", bytes([VERSION + 1]))
    done = buried.run("dead", "list", "--json")
    assert {row["request_id"] for row in done.lines} == {"0-check", "0-bad", "0-echo"}
    assert f"its record has version {VERSION + 1}, this release reads {VERSION}" in done.err
    assert buried.run("dead", "retry", "0-echo").err.startswith("leanq: another release")
    with redis.Redis.from_url(settings.url) as server:
        assert server.exists(letter)


def test_nothing_is_dropped_where_one_of_several_is_no_dead_letter(buried: Terminal) -> None:
    done = buried.run("dead", "drop", "0-echo", "0-unknown")
    assert (done.code, done.out) == (2, "")
    done = buried.run("dead", "list", "--limit", "2")
    assert len(done.out.splitlines()) == 3
    assert done.err == "only the newest 2 are shown; --limit shows more\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["show", "retry", "drop"])
def test_what_is_no_dead_letter(buried: Terminal, command: str) -> None:
    done = buried.run("dead", command, "0-unknown")
    text = "leanq: there is no dead letter 0-unknown; 'leanq dead list' shows them\n"
    assert (done.code, done.err) == (2, text)
    assert buried.run("dead", command, "nonsense").code == 2
