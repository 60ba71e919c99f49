"""A command tells what runs cost by the day. Workers count it, and Redis keeps it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from support.fleets import serving, working
from support.gateway.gateways import Gateway, Scripted
from support.queue.queues import Queue
from support.queue.shards import Shard
from support.terminals import Terminal, ended, samples, wait_for_line
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import UsageError, WireError
from leanq.fleet.costs import Cost, Costs, costs, costs_of
from leanq.lean.driver import EchoDriver
from leanq.lean.environment import Environment
from leanq.producer.request_builder import RequestBuilder
from leanq.queue.operator_queue import every_queue
from leanq.queue.requests import Reply, Request
from leanq.queue.results import Use, read_account
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_request, unpack_request

DAY_MS = 86_400_000
CPU = Use("a", "x", "run", "cpu_ms")
ACCEPTED = Use("a", "x", "run", "accepted")
ATTEMPTS = Use("a", "x", "run", "attempts")


class Timed(Scripted):
    """Says that each text took a second and a half."""

    async def run(self, request: Request) -> Reply:
        reply = await super().run(request)
        return Reply(verdict=reply.verdict, reason=reply.reason, cpu_s=1.5)


# The accounts in Redis


async def test_an_account_belongs_to_its_day(shard: Shard) -> None:
    await shard.queue.renew("w", used={CPU: 700, ACCEPTED: 1})
    await shard.queue.renew("w", used={CPU: 300})
    begun_ms, day = shard.now_ms, shard.now_ms // DAY_MS
    shard.advance(DAY_MS)
    await shard.queue.renew("w", used={ACCEPTED: 2})
    assert await shard.queue.accounts(day) == {
        day: (begun_ms, {CPU: 1000, ACCEPTED: 1}),
        day + 1: (begun_ms + DAY_MS, {ACCEPTED: 2}),
    }
    # The oldest is always there, to say from when on the others are complete.
    assert await shard.queue.accounts(day + 1) == {
        day: (begun_ms, {}),
        day + 1: (begun_ms + DAY_MS, {ACCEPTED: 2}),
    }


async def test_a_hundred_days_are_kept(shard: Shard) -> None:
    first = shard.now_ms // DAY_MS
    for _ in range(103):
        await shard.queue.renew("w", used={ACCEPTED: 1})
        shard.advance(DAY_MS)
    assert sorted(await shard.queue.accounts(0)) == list(range(first + 3, first + 103))
    kept = [
        key.decode()
        for key in shard.server.scan_iter(shard.queue.keys.of("account", "*"), count=1000)
    ]
    assert len(kept) == 100
    found = costs_of([await shard.queue.accounts(0)], 0)
    assert found.since == datetime.fromtimestamp((first + 3) * 86_400 + 1_000_000 - 950_400, UTC)


async def test_names_beyond_the_room_of_a_day_share_a_row(shard: Shard) -> None:
    many = {Use("a", f"t{n}", "", "attempts"): 1 for n in range(5100)}
    await shard.queue.renew("w", used=many)
    await shard.queue.renew("w", used={CPU: 5, Use("a", "t1", "", "attempts"): 1})
    ((_, uses),) = (await shard.queue.accounts(0)).values()
    assert (uses[Use("a", "t1", "", "attempts")], uses[Use("a", "", "", "cpu_ms")]) == (2, 5)
    assert sum(uses.values()) == 5106


async def test_campaigns_of_one_tenant_hide_no_other(shard: Shard) -> None:
    many = {Use("a", "x", f"c{n}", "attempts"): 1 for n in range(5100)}
    await shard.queue.renew("w", used=many)
    other = {use._replace(tenant="y"): 7 for use in (CPU, ATTEMPTS, ACCEPTED)}
    await shard.queue.renew("w", used={**other, Use("a", "x", "c1", "attempts"): 1})
    ((_, uses),) = (await shard.queue.accounts(0)).values()
    assert {use: n for use, n in uses.items() if use.tenant == "y"} == {
        use._replace(campaign=""): 7 for use in other
    }
    assert uses[Use("a", "x", "c1", "attempts")] == 2
    assert sum(n for use, n in uses.items() if use.tenant == "x") == 5101


@pytest.mark.parametrize("place", ["accounts", "account:11", "account:11 a:x:run:cpu_ms"])
async def test_what_others_write_there_stops_no_heartbeat(shard: Shard, place: str) -> None:
    await shard.queue.renew("w", used={CPU: 1})
    shard.harm(place)
    assert (await shard.queue.renew("w", used={CPU: 1, ACCEPTED: 1})).held == 0


def test_entries_that_cannot_be_read_are_left_out() -> None:
    entries = {
        b"since": b"17",
        b"a:x:run:cpu_ms": b"4",
        **dict.fromkeys((b"", b"a:x:run", b"a:x:run:", b":::cpu_ms", b"a:x:y:z:cpu_ms"), b"1"),
        b"a:\xff::attempts": b"-3",
        b"b:x::attempts": b"9" * 19,
        b"b:x::cpu_ms": b"1e3",
        b"c:::timeout": b"2",
    }
    assert read_account(entries.items()) == (17, {CPU: 4, Use("c", "", "", "timeout"): 2})


# Rows


def test_shards_add_up_and_the_youngest_says_since_when() -> None:
    one = {
        10: (10 * DAY_MS, {}),
        12: (12 * DAY_MS, {CPU: 1500, Use("a", "x", "run", "attempts"): 2}),
    }
    two = {12: (12 * DAY_MS + 60_000, {CPU: 500, ACCEPTED: 1, Use("b", "y", "", "cpu_ms"): 9000})}
    day = date(1970, 1, 13)
    assert costs_of([one, two, {}], 11) == Costs(
        datetime(1970, 1, 13, 0, 1, tzinfo=UTC),
        [Cost(day, "y", "b", "", 9.0), Cost(day, "x", "a", "run", 2.0, 2, {"accepted": 1})],
    )
    assert costs_of([one], 11).since == datetime(1970, 1, 12, tzinfo=UTC)
    assert costs_of([{}], 11) == Costs(None, [])


def test_an_impossible_beginning_is_the_end_of_its_day() -> None:
    assert costs_of([{10: (10**17, {CPU: 1})}], 3).since == datetime(1970, 1, 12, tzinfo=UTC)


# What a worker counts


async def test_a_worker_tells_what_its_runs_cost(settings: Settings) -> None:
    sharded, driver = replace(settings, shards=2), Timed()
    async with (
        AsyncLeanQClient(sharded, tenant="x") as lean,
        working(sharded, driver, EchoDriver(), slots=4),
    ):
        await lean.echo(b"costs nothing")
        for number in range(6):
            await lean.check(f"-- rejected {number}")
        await lean.check("-- accepted", campaign="run")
        # The second joins the first, and a third is withdrawn.
        held = [lean.check("-- held", tenant="y") for _ in range(2)]
        tasks = [*map(asyncio.create_task, held), asyncio.create_task(lean.check("-- held 2"))]
        await eventually(lambda: len(driver.running) == 2)
        await eventually(lambda: joined(sharded))
        tasks.pop().cancel()
        await eventually(lambda: driver.stopped == ["-- held 2"])
        driver.gate.set()
        await asyncio.gather(*tasks)
    found = await costs(sharded, 3600)
    rows = {(row.tenant, row.campaign): replace(row, day=date.min) for row in found.rows}
    assert rows == {
        ("x", ""): Cost(date.min, "x", "default", "", 9.0, 7, {"rejected": 6}),
        ("x", "run"): Cost(date.min, "x", "default", "run", 1.5, 1, {"accepted": 1}),
        ("y", ""): Cost(date.min, "y", "default", "", 1.5, 1, {"accepted": 1}),
    }
    assert found.since
    assert abs(found.since.timestamp() - time.time()) < 600


async def joined(settings: Settings) -> bool:
    """Whether a request of the queue has joined a run."""
    async with every_queue(settings) as queues:
        found = [
            await each.shard.ask(("KEYS", f"{each.shard.keys.tag}:joined:*")) for each in queues
        ]
    return any(keys for (keys,) in found)


async def test_a_result_that_comes_too_late_has_cost_its_time(
    settings: Settings, queue: Queue
) -> None:
    late, other = Timed(), Timed()
    other.gate.set()
    async with AsyncLeanQClient(settings) as lean, working(settings, late, slots=1) as worker:
        task = asyncio.create_task(lean.check("-- held"))
        await eventually(lambda: late.running == ["-- held"])
        (request_id,) = [each.request_id for each in await queue.running([worker.id], 5)]
        lease = await queue.call(lambda c: c.hget(f"{queue.keys.tag}:phase", request_id))
        token = lease[1:].split(b"\0")[0].decode()
        assert await queue.release(worker.id, [(request_id, token)], how="retry") == 1
        async with working(settings, other, slots=1):
            assert (await task).attempts == 2
            late.gate.set()
            await eventually(lambda: not worker.slot_pool.slots.taken)
    ((row),) = (await costs(settings, 60)).rows
    assert (row.cpu_s, row.attempts, row.ended) == (3.0, 2, {"accepted": 1})


# A campaign's name


async def test_a_campaign_keeps_no_request_from_sharing_a_run(settings: Settings) -> None:
    builder = RequestBuilder(settings, "default")
    one, two = (builder.check("-- text", {"campaign": name}) for name in ("a", "b"))
    assert (one.submission.digest, one.request.campaign) == (two.submission.digest, "a")
    with pytest.raises(UsageError, match="campaign 'a:b' is not a valid name; expected 1 to 64"):
        builder.check("-- text", {"campaign": "a:b"})
    with pytest.raises(WireError, match="campaign 'a:b' is not a valid name"):
        unpack_request(pack_request(one.request).replace(b"\xa1a", b"\xa3a:b"))


async def test_a_campaign_through_a_gateway(gateway: Gateway, scripted: Scripted) -> None:
    async with AsyncLeanQClient(gateway.url) as lean:
        await lean.check("-- accepted", campaign="run-7")
    body = {"code": "-- rejected", "campaign": "a b"}
    assert (await gateway.http.post("/v1/check", json=body)).status_code == 422
    assert [request.campaign for request in scripted.seen] == ["run-7"]


# The command


def run(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    with serving(settings, Timed()), LeanQClient(settings) as lean:
        for number in range(4):
            lean.check(f"-- accepted {number}", tenant="x", campaign="big").result()
        lean.check("-- timeout").result()


def test_the_table(terminal: Terminal, settings: Settings) -> None:
    run(terminal, settings)
    done = terminal.run("report", "cost", "--price", "120/cpu-h")
    titles, big, small, total, since = done.out.splitlines()
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    assert titles.split() == [
        *("DAY", "TENANT", "ENVIRONMENT", "CAMPAIGN"),
        *("CPU", "s", "ATTEMPTS", "ENDED", "ACCEPTED", "COST"),
    ]
    assert big.split() == [day, "x", "default", "big", "6.0", "4", "4", "4", "0.2000"]
    assert small.split() == [day, "default", "default", "–", "1.5", "1", "1", "0", "0.0500"]
    assert total == (
        "in all 7.5 CPU s in 5 attempts, which cost 0.2500, 0.0625 for each accepted; "
        "ended: 4 accepted, 1 timeout"
    )
    assert since.startswith("complete from 2")
    rows = terminal.run("report", "cost", "--json").lines
    assert rows[0] | {"day": ""} == {
        "day": "",
        "tenant": "x",
        "environment": "default",
        "campaign": "big",
        "cpu_s": 6.0,
        "attempts": 4,
        "verdicts": {"accepted": 4},
        "cost": None,
    }


def test_the_table_as_parquet(terminal: Terminal, settings: Settings, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run(terminal, settings)
    out = str(tmp_path / "cost.parquet")
    done = terminal.run("report", "cost", "--price", "3600/cpu-h", "--out", out)
    assert done.out.startswith(f"{out}: 2 rows; complete from ")
    big, small = parquet.read_table(out).to_pylist()
    assert (big["day"], big["campaign"], big["accepted"]) == (datetime.now(UTC).date(), "big", 4)
    assert (big["cost"], small["timeout"], small["accepted"], small["cost"]) == (6.0, 1, 0, 1.5)


def test_a_day_with_many_tenants_has_one_line_for_the_rest(
    terminal: Terminal, settings: Settings
) -> None:
    terminal.use(settings)
    with serving(settings, Timed()), LeanQClient(settings) as lean:
        sent = [lean.check(f"-- accepted {n}", tenant=f"t{n}") for n in range(30)]
        for each in sent:
            each.result()
    lines = terminal.run("report", "cost").out.splitlines()
    assert len(lines) == 1 + 20 + 1 + 2
    assert lines[21].split()[1:] == ["and", "10", "more", "15.0", "10", "10", "10"]
    assert len(terminal.run("report", "cost", "--json").lines) == 30


def test_nothing_was_asked(terminal: Terminal, settings: Settings, tmp_path: Path) -> None:
    terminal.use(settings)
    said = "in all 0.0 CPU s in 0 attempts; ended: nothing\nno worker has told what runs cost\n"
    assert terminal.run("report", "cost").out == said
    done = terminal.run("report", "cost", "--json", "--since", f"{'9' * 400}d")
    assert (done.code, done.out) == (0, "")
    assert done.err == "leanq: no worker has told what runs cost\n"
    out = str(tmp_path / "none.parquet")
    assert terminal.run("report", "cost", "--out", out, "--price", "0/cpu-h").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("text", ["0.01", "-1/cpu-h", "nan/cpu-h", "inf/cpu-h", "1e3/cpu-h", "1/h"])
def test_a_price_that_is_none(terminal: Terminal, text: str) -> None:
    done = terminal.run("report", "cost", f"--price={text}", "--url", "unix:///-")
    assert done.code == 2
    assert f"{text!r} is not a price; expected a number that is not negative" in done.err
    assert "what it is for: 0.01/cpu-h" in " ".join(done.err.split())


@pytest.mark.slow
def test_a_campaign_of_real_lean(
    terminal: Terminal, settings: Settings, core: Environment, tmp_path: Path
) -> None:
    terminal.use(settings)
    worker = terminal.start("worker", "--slots", "1")
    wait_for_line(worker.stderr, "serves")
    texts = (Path(each).read_text() for each in samples("and_swap", "wrong"))
    rows = (json.dumps({"id": n, "code": text}) for n, text in enumerate(texts))
    data = terminal.file("data.jsonl", "\n".join(rows))
    out = str(tmp_path / "my results.jsonl")
    assert terminal.run("campaign", "run", data, "--out", out).code == 1
    worker.terminate()
    assert ended(worker).code == 0
    (row,) = terminal.run("report", "cost", "--json").lines
    assert (row["campaign"], row["attempts"]) == ("my_results.jsonl", 2)
    assert row["verdicts"] == {"accepted": 1, "rejected": 1}
    assert 0.0 < row["cpu_s"] < 60.0
