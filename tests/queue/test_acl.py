"""The roles in ``deploy/users.acl``, on a server that enforces them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner
from msgspec import structs
from support.campaigns.campaigns import desk_at, stop_worker
from support.fleet.scalers import Loop
from support.fleets import Recorder, echo_body, hurry, serving, submission, working
from support.gateway.gateways import Scripted, key_file, new_gateway
from support.gateway.pages import bury, log_in
from support.queue.queues import Queue
from support.queue.roles import USERS, as_role, server_with_roles
from support.queue.shards import Shard, with_test_clock
from support.terminals import Terminal
from support.waiting import eventually

import leanq.queue.shard
from leanq.cli import cli
from leanq.client import AsyncLeanQClient
from leanq.errors import NotPermittedError, NoWorkerError, UnavailableError, UsageError
from leanq.fleet.stats import fleet_stats_of
from leanq.gateway.keys import KeyFile
from leanq.lean.goals.recipes import Hole, Recipe, Source
from leanq.producer.route import RouteOptions
from leanq.producer.shard_router import ShardRouter
from leanq.queue import keys
from leanq.queue.keys import new_request_id
from leanq.queue.operator_queue import look
from leanq.queue.requests import Reply
from leanq.queue.results import Became, Settlement, merged
from leanq.queue.scripts import SCRIPTS, library_of, script_text
from leanq.queue.settings import Settings
from leanq.queue.shard import announce_shape, check_shape
from leanq.queue.wire import pack_reply
from leanq.queue.worker_queue import reap
from leanq.states import Packed, RedisStates
from leanq.trainers.replay import ReplayMemory
from leanq.trainers.replay_entry import ReplayBounds, ReplayEntry


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    """The socket of a server with these users, on which a worker has been."""
    with server_with_roles() as server:
        yield server.folder / "server.sock"


@pytest.fixture
def observed(socket: Path) -> None:
    """Has the script of ``status`` loaded; without it a client's first error is that it lacks."""
    done = CliRunner().invoke(cli, ["status", "--url", as_role(socket, "observer").url])
    assert done.exit_code == 0, done.output


async def test_each_role_can_do_its_part(socket: Path) -> None:
    client, worker = as_role(socket, "client"), as_role(socket, "worker")
    driver = Recorder()
    async with AsyncLeanQClient(client) as lean, working(worker, driver, slots=4):
        assert await lean.echo(b"x" * 200_000) == b"x" * 200_000
        tasks = [asyncio.create_task(lean.echo(b"held", deadline_s=100)) for _ in range(3)]
        await eventually(lambda: len(driver.running) == 3)
        status = await look(as_role(socket, "observer"))
        assert sum(row.held for row in status.workers) == 3
        tasks[0].cancel()
        await eventually(lambda: driver.stopped == [b"held"])
        driver.let_go()
        assert await asyncio.gather(*tasks[1:]) == [b"held"] * 2


async def test_workers_load_what_clients_call(socket: Path) -> None:
    """A client who could write a library would write what workers run with their own rights."""
    library = library_of(script_text("submit"))
    early, late = Queue(as_role(socket, "client")), Queue(as_role(socket, "client"))
    worker = Queue(as_role(socket, "worker"))
    with (
        redis.Redis.from_url(as_role(socket, "admin").url) as admin,
        redis.Redis.from_url(as_role(socket, "client").url) as client,
    ):
        admin.function_flush()
        admin.script_flush()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.function_load(library.text)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.script_load(script_text("submit"))
        with pytest.raises(UnavailableError, match="has not this release's scripts yet, which its"):
            await early.submit("c", [submission("0-early", echo_body(b""))])
        await worker.register("w", b"", {"echo": b""})
        assert library.function in str(admin.function_list())
        await early.submit("c", [submission("0-early", echo_body(b""))])
        # What is lost comes back with the worker's next call.
        admin.function_flush()
        await worker.renew("w")
        admin.config_resetstat()
        await early.submit("c", [submission("0-again", echo_body(b""))])
        await late.submit("c", [submission("0-late", echo_body(b""))])
        called = admin.info("commandstats")
        assert (called.get("cmdstat_evalsha"), called["cmdstat_fcall"]["calls"]) == (None, 2)
    assert await late.cancel(["0-early", "0-again", "0-late"]) == [True, True, True]
    await worker.claim("w", ["echo"], 1, busy=0, token="n")
    await worker.release("w", [], leave=True)
    for queue in (early, late, worker):
        await queue.close()


async def test_a_client_is_told_that_no_worker_has_loaded_what_it_calls(
    socket: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when all workers are of another release: the client's requests are not even queued."""
    hurry(monkeypatch, no_worker_s=0.05)
    with redis.Redis.from_url(as_role(socket, "admin").url) as admin:
        admin.function_flush()
        admin.script_flush()
    async with AsyncLeanQClient(as_role(socket, "client")) as lean:
        waits = asyncio.create_task(lean.echo(b"x"))
        told = "no worker is alive for the environment 'echo'"
        await eventually(lambda: told in caplog.text)
        assert "1 request of this client waits" in caplog.text
        async with working(as_role(socket, "worker"), Recorder(), slots=1):
            assert await waits == b"x"
    async with AsyncLeanQClient(as_role(socket, "client"), no_worker="raise") as impatient:
        with redis.Redis.from_url(as_role(socket, "admin").url) as admin:
            admin.function_flush()
            admin.script_flush()
        with pytest.raises(NoWorkerError, match=told):
            await impatient.echo(b"y")


async def test_where_there_are_no_libraries_workers_load_scripts(socket: Path) -> None:
    client, worker = Queue(as_role(socket, "client")), Queue(as_role(socket, "worker"))
    with redis.Redis.from_url(as_role(socket, "admin").url) as admin:
        for role in ("client", "worker"):
            admin.execute_command("ACL", "SETUSER", f"leanq-{role}", "-fcall", "-function|load")
        try:
            for _ in range(2):
                admin.function_flush()
                admin.script_flush()
                await worker.register("w", b"", {"echo": b""})
                await client.submit("c", [submission("0-scripted", echo_body(b""))])
                assert await client.cancel(["0-scripted"]) == [True]
                admin.delete(client.keys.request("0-scripted"))
                assert admin.function_list() == []
        finally:
            rights = ("+fcall",), ("+fcall", "+function|load")
            for role, rules in zip(("client", "worker"), rights, strict=True):
                admin.execute_command("ACL", "SETUSER", f"leanq-{role}", *rules)
    await worker.claim("w", ["echo"], 1, busy=0, token="n")
    await worker.release("w", [], leave=True)
    for queue in (client, worker):
        await queue.close()


async def test_a_scaler_without_workers_loads_what_clients_call(socket: Path) -> None:
    """No worker comes where no client can submit."""
    client = Queue(as_role(socket, "client"))
    with redis.Redis.from_url(as_role(socket, "admin").url) as admin:
        admin.function_flush()
        admin.script_flush()
        await Loop(as_role(socket, "scaler"), min_workers=0).tick()
        await client.submit("c", [submission("0-first", echo_body(b""))])
        assert await client.cancel(["0-first"]) == [True]
        admin.delete(client.keys.request("0-first"))
    await client.close()


async def test_a_gateway_does_what_clients_do_and_shows_the_fleet(socket: Path) -> None:
    settings, driver = as_role(socket, "gateway"), Scripted()
    async with (
        working(as_role(socket, "worker"), driver, slots=4),
        new_gateway(settings) as gateway,
    ):
        http = gateway.http
        answer = await http.post("/v1/check", json={"code": "-- incomplete", "request_id": "mine"})
        assert answer.json()["verdict"] == "incomplete", answer.text
        assert (await http.get("/v1/requests/mine")).json()["verdict"] == "incomplete"
        await http.post("/v1/check?wait=0", json={"code": "-- held", "request_id": "held"})
        await eventually(lambda: len(driver.running) == 1)
        assert (await http.delete("/v1/requests/held")).json()["verdict"] == "cancelled"
        status = (await http.get("/v1/status")).json()
        assert "default" in {each["name"] for each in status["environments"]}
        assert (await http.get("/ready")).json() == {"status": "ready"}


async def test_a_gateways_page_shows_and_changes_what_it_may(socket: Path, tmp_path: Path) -> None:
    operator = Queue(as_role(socket, "operator"))
    keys = key_file(tmp_path, {"secret": "chief", "rights": ["submit", "status", "operate"]})
    async with (
        working(as_role(socket, "worker"), Scripted(), slots=4),
        new_gateway(as_role(socket, "gateway"), keys=KeyFile(keys)) as gateway,
    ):
        headers = await log_in(gateway.http, gateway.url, "chief")

        async def change(what: str, **fields: str) -> None:
            answer = await gateway.http.post(f"/page/{what}", data=fields, headers=headers)
            assert answer.status_code == 303, answer.text

        for what, how in (("dead/retry", "retried"), ("dead/drop", "dropped")):
            letter = new_request_id(1)
            await bury(as_role(socket, "operator"), letter, tenant="a", code=f"-- {how}")
            page = await gateway.http.get("/", headers=headers)
            assert letter in page.text
            assert "the queue did not tell" not in page.text
            assert how in (await gateway.http.get(f"/page/requests/{letter}", headers=headers)).text
            await change(what, request_id=letter)
            assert await operator.dead_request_ids(9) == []
        for kind, name in (("tenant", "a"), ("environment", "default")):
            for paused, held in (("yes", {f"{kind[0]}:{name}"}), ("no", set[str]())):
                await change("pause", kind=kind, name=name, paused=paused)
                assert {*(await operator.status()).paused} == held
        await change("weight", tenant="a", weight="2")
        assert (await operator.status()).weights == {"a": 2.0}
        await change("weight", tenant="a", weight="")
    await operator.close()


@pytest.mark.slow
async def test_a_gateway_whose_user_lacks_a_right_says_which_user(
    socket: Path, observed: None
) -> None:
    """It is no outage, and the server's address is not the caller's business."""
    async with new_gateway(as_role(socket, "client")) as gateway:
        answer = await gateway.http.get("/v1/status")
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (500, "urn:leanq:not-permitted")
    assert "the user 'leanq-client' lacks a right" in problem["detail"]
    assert "Retry-After" not in answer.headers
    assert str(socket) not in answer.text
    async with new_gateway(as_role(socket, "observer")) as gateway:
        answer = await gateway.http.post("/v1/check", json={"code": "x"})
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:leanq:not-permitted")


async def test_workers_announce_the_shape_of_the_queue_and_all_others_read_it(socket: Path) -> None:
    """It is compared with living workers, too."""
    worker = as_role(socket, "worker")
    async with working(worker, Recorder()):
        for role in ("client", "observer", "scaler", "operator", "worker"):
            queue = Queue(as_role(socket, role))
            await check_shape(queue)
            await queue.close()
            queue = Queue(replace(as_role(socket, role), shards=2))
            with pytest.raises(UsageError, match="this queue has 1 shard, LEANQ_SHARDS is 2"):
                await check_shape(queue)
            await queue.close()
    for role in ("client", "observer", "scaler", "operator"):
        queue = Queue(replace(as_role(socket, role), shards=2))
        with pytest.raises(NotPermittedError):
            await announce_shape(queue)
        await queue.close()


async def test_a_full_line_stays_within_the_roles(socket: Path) -> None:
    worker = Queue(as_role(socket, "worker"))
    await worker.register("w", b"", {"echo": b""})
    for role in ("client", "operator"):
        queue = Queue(replace(as_role(socket, role), max_waiting=1))
        batch = [submission(f"0-{role}{number}", echo_body(b"")) for number in range(2)]
        assert await queue.submit("c", batch) == [Became.QUEUED, Became.FULL]
        assert await queue.cancel([batch[0].request_id]) == [True]
        await worker.claim("w", ["echo"], 1, busy=0, token="n")
        await queue.close()
    await worker.release("w", [], leave=True)
    await worker.close()


async def test_clients_see_that_no_worker_is_alive(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, no_worker_s=0.05)
    async with working(as_role(socket, "worker"), Recorder()):
        queue = Queue(as_role(socket, "client"))
        assert await queue.served() == {"echo"}
        await queue.close()
    async with AsyncLeanQClient(as_role(socket, "client"), no_worker="raise") as lean:
        with pytest.raises(NoWorkerError, match="no worker is alive for the environment 'echo'"):
            await asyncio.wait_for(lean.echo(b"x"), 30)


async def test_clients_who_may_not_see_it_say_so(
    socket: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hurry(monkeypatch, no_worker_s=0.05)
    async with AsyncLeanQClient(as_role(socket, "older"), no_worker="raise") as lean:
        waiting = asyncio.create_task(lean.echo(b"x"))
        await eventually(lambda: "whether a worker is alive for echo is unknown" in caplog.text)
        assert not waiting.done()
        async with working(as_role(socket, "worker"), Recorder()):
            assert await asyncio.wait_for(waiting, 30) == b"x"


async def test_operators_pause_and_clients_do_not(socket: Path) -> None:
    client, worker = Queue(as_role(socket, "client")), Queue(as_role(socket, "worker"))
    operator = Queue(as_role(socket, "operator"))
    await worker.register("w", b"", {"echo": b""})
    await client.submit("c", [submission("0-p1", echo_body(b""))])
    tenant = submission("0-p1", b"").tenant
    for kind, name in (("environment", "echo"), ("tenant", tenant)):
        assert await operator.set_paused(kind, name, paused=True)
        await client.submit("c", [submission(f"0-{kind}", echo_body(b""))])
        assert not (await worker.claim("w", ["echo"], 9, busy=0, token="n:")).jobs
        assert await operator.set_paused(kind, name, paused=False)
        with pytest.raises(NotPermittedError):
            await client.set_paused(kind, name, paused=True)
    assert await client.cancel(["0-p1", "0-environment", "0-tenant"]) == [True] * 3
    await worker.claim("w", ["echo"], 9, busy=0, token="o:")
    await worker.release("w", [], leave=True)
    for queue in (client, operator, worker):
        await queue.close()


def test_who_may_not_load_a_script_of_operators_lacks_that_right() -> None:
    """No operator has called it before."""

    async def call(settings: Settings) -> None:
        client = Queue(settings)
        right = r"the user 'leanq-client' lacks a right: .*'script\|load'"
        with pytest.raises(NotPermittedError, match=right):
            await client.set_paused("environment", "echo", paused=True)
        await client.close()

    with server_with_roles() as server:
        asyncio.run(call(as_role(server.folder / "server.sock", "client")))


async def test_workers_settle_many_with_and_without_the_right_to_msetex(socket: Path) -> None:
    client, worker = Queue(as_role(socket, "client")), Queue(as_role(socket, "worker"))
    await worker.register("w", b"", {"echo": b""})
    with redis.Redis.from_url(as_role(socket, "admin").url) as server:
        # An older server has no such command.
        known = b"msetex" in server.command_list()
        for rule in ("+msetex", "-msetex") if known else ("",):
            server.execute_command("ACL", "SETUSER", "leanq-worker", "on", *rule.split())
            request_ids = [f"0-{n}{rule}" for n in range(3)]
            batch = [submission(request_id, echo_body(b"")) for request_id in request_ids]
            await client.submit("c", batch)
            jobs = (await worker.claim("w", ["echo"], 3, busy=0, token="n:")).jobs
            replies = [pack_reply(job.token, Reply(payload=b"x")) for job in jobs]
            done = [
                Settlement(job.request_id, job.token, "echo", reply)
                for job, reply in zip(jobs, replies, strict=True)
            ]
            claimed = await worker.claim("w", [], 0, busy=0, token="m:", settlements=done)
            assert claimed.accepted == (True,) * 3
            assert await client.lookup("c", request_ids) == replies
            assert all(server.pttl(client.keys.request(each)) > 0 for each in request_ids)
    await worker.release("w", [], leave=True)
    for queue in (client, worker):
        await queue.close()


async def test_states_and_snapshots(socket: Path) -> None:
    """A client reads recipes, which are what their ids say; workers alone write snapshots."""
    client, worker = Queue(as_role(socket, "client")), Queue(as_role(socket, "worker"))
    states = RedisStates([worker])
    recipe = Recipe(Source("f", "x := sorry", (Hole(5, "term"),)), 0)
    await states.keep(dict(recipe.records()))
    await worker.register("w", b"", {"core": b""}, {"core": "f"})
    found = await ShardRouter([client], RouteOptions(unavailable_timeout_s=5.0)).find(recipe.id)
    assert found.environment == "core"
    assert await states.keep_snapshot("key", Packed(b"manifest", (b"chunk",)))
    assert await states.find_snapshot("key") == Packed(b"manifest", (b"chunk",))
    with pytest.raises(NotPermittedError):
        await RedisStates([client]).keep_snapshot("other", Packed(b"manifest", (b"chunk",)))
    await states.drop_snapshot("key")
    await states.collect()
    await worker.release("w", [], leave=True)
    for queue in (client, worker):
        await queue.close()


@pytest.mark.parametrize("role", ["client", "learner"])
@pytest.mark.parametrize("reservoir", [False, True])
async def test_clients_and_learners_keep_replay_memories(
    socket: Path, role: str, reservoir: bool
) -> None:
    bounds = ReplayBounds(entries=3, reservoir=reservoir, weighted=True)
    async with ReplayMemory("m", as_role(socket, role), bounds=bounds) as memory:
        for weight in (1.0, 2.0, 3.0, 4.0, 5.0):
            await memory.write([ReplayEntry("accepted", "x", weight=weight)])
        assert len(await memory.read()) == 3
        assert len(await memory.read((await memory.stats()).last, wait_s=0.01)) == 0
        assert len(await memory.sample(2)) == len(await memory.sample(2, weighted=True)) == 2
        assert await memory.publish({"policy": "p"}, expected=0)
        watching = memory.watch()
        assert await anext(watching) == await memory.published()
        await watching.aclose()
        queue = Queue(as_role(socket, role))
        assert await queue.run("replay_refuse", name="m", refused=1, evict=1) == 2
        await queue.close()
        for other in ("observer", "scaler", "gateway", "operator"):
            queue = Queue(as_role(socket, other))
            assert (await queue.status()).memories["m"].dropped == 2
            await queue.close()
        await memory.drop()
    with redis.Redis.from_url(as_role(socket, "admin").url) as admin:
        assert [*admin.scan_iter("*:replay:m:[^w]*")] == []


async def test_a_learner_does_nothing_but_that(socket: Path) -> None:
    queue = Queue(as_role(socket, "learner"))
    with pytest.raises(NotPermittedError):
        await queue.submit("c", [submission("0-learner", echo_body(b""))])
    with pytest.raises(NotPermittedError):
        await queue.register("w", b"", {"echo": b""})
    await queue.close()
    async with ReplayMemory("m", as_role(socket, "client")) as memory:
        await memory.drop()
    with pytest.raises(NotPermittedError):
        async with ReplayMemory("m", as_role(socket, "observer")):
            pass


async def test_identical_requests_are_shared_and_remembered(socket: Path) -> None:
    client = Queue(replace(as_role(socket, "client"), remember_s=60.0))
    worker = Queue(replace(client.settings, url=as_role(socket, "worker").url))
    bodies = {f"0-{name}": echo_body(b"") for name in ("leader", "follower", "lost", "last")}
    batch = [
        structs.replace(submission(request_id, body), digest="same")
        for request_id, body in bodies.items()
    ]
    await worker.register("w", b"", {"echo": b""}, {"echo": "print"})
    await client.submit("c", batch[:1])
    (job,) = (await worker.claim("w", ["echo"], 1, busy=0, token="n:")).jobs
    await client.submit("c", batch[1:])
    with redis.Redis.from_url(as_role(socket, "worker").url) as connection:
        connection.zrem(f"{worker.keys.tag}:joined:0-leader", "0-lost")
    assert await client.lookup("c", ["0-follower", "0-lost"]) == [True, True]
    assert await client.cancel(["0-leader", "0-lost", "0-last"]) == [True] * 3
    reply = pack_reply(job.token, Reply("accepted"))
    done = Settlement(job.request_id, job.token, "accepted", reply, "print")
    await worker.claim("w", ["echo"], 1, busy=0, token="m:", settlements=[done])
    assert await client.lookup("c", ["0-follower"]) == [reply]
    assert await client.submit("c", [structs.replace(batch[0], request_id="0-later")]) == [reply]
    # The last follower of what was withdrawn.
    others = [
        structs.replace(item, request_id=f"{item.request_id}2", digest="other")
        for item in batch[:2]
    ]
    await client.submit("c", others[:1])
    assert (await worker.claim("w", ["echo"], 1, busy=0, token="o:")).jobs
    await client.submit("c", others[1:])
    assert await client.cancel([item.request_id for item in others]) == [True, True]
    await worker.release("w", [], leave=True)
    for queue in (client, worker):
        await queue.close()


async def test_large_bodies_and_replies_stay_within_the_roles(socket: Path) -> None:
    """Also where identical requests share a reply, and where one of them is withdrawn."""
    client = Queue(replace(as_role(socket, "client"), remember_s=60.0))
    worker = Queue(replace(client.settings, url=as_role(socket, "worker").url))
    body = echo_body(b"x" * 200_000)
    batch = [
        structs.replace(submission(f"0-large{number}", body), digest="large") for number in range(3)
    ]
    await worker.register("w", b"", {"echo": b""}, {"echo": "print"})
    await client.submit("c", batch[:1])
    (job,) = (await worker.claim("w", ["echo"], 1, busy=0, token="n:")).jobs
    assert job.body == body
    await client.submit("c", batch[1:])
    assert await client.cancel(["0-large1"]) == [True]
    reply = pack_reply(job.token, Reply("accepted", payload=b"y" * 200_000))
    done = Settlement(job.request_id, job.token, "accepted", reply, "print")
    assert (await worker.claim("w", [], 0, busy=0, token="m:", settlements=[done])).accepted == (
        True,
    )
    assert await client.replies(["0-large0", "0-large2"]) == [reply, reply]
    with redis.Redis.from_url(as_role(socket, "admin").url) as admin:
        assert [*admin.scan_iter("*:body:*"), *admin.scan_iter("*:upload:*")] == []
    await worker.release("w", [], leave=True)
    for queue in (client, worker):
        await queue.close()


async def test_reaping_dead_letters_and_their_retry(socket: Path) -> None:
    worker = replace(as_role(socket, "worker"), lease_s=0.5, max_attempts=1)
    client, operator = Queue(as_role(socket, "client")), Queue(as_role(socket, "operator"))
    dying, other = Queue(worker), Queue(worker)
    body = echo_body(b"x" * 200_000)
    await client.submit("c", [submission("0-killer", body)])
    await dying.register("dying", b"", {"echo": b""})
    assert (await dying.claim("dying", ["echo"], 1, busy=0, token="n:")).jobs
    poisoned = 0
    while not poisoned:
        await other.renew("other")
        poisoned = (await reap(other)).poisoned
    assert await operator.dead_request_ids(10) == ["0-killer"]
    letter = await operator.dead_letter("0-killer")
    assert letter
    assert letter.submission.body == body
    retried = structs.replace(letter.submission, request_id="0-killer.r1")
    await operator.submit("c", [retried])
    assert await operator.drop_dead("0-killer")
    assert await client.cancel(["0-killer.r1"]) == [True]
    await other.claim("other", ["echo"], 1, busy=0, token="m:")
    await other.release("other", [], leave=True)
    for queue in (client, operator, dying, other):
        await queue.close()


async def test_a_scaler_tells_what_it_decided(socket: Path) -> None:
    scaler, observer = Queue(as_role(socket, "scaler")), Queue(as_role(socket, "observer"))
    assert (await fleet_stats_of([scaler])).status == merged([await observer.status()])
    await scaler.publish_decisions({"echo": b"{}"})
    assert (await observer.status()).decisions == {"echo": b"{}"}
    with pytest.raises(NotPermittedError):
        await observer.publish_decisions({"echo": b"{}"})
    for queue in (scaler, observer):
        await queue.close()


async def test_a_scaler_that_may_not_tell_orders_all_the_same(
    socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(as_role(socket, "observer"), min_workers=3)
    await loop.tick()
    assert loop.target.orders == [3]
    assert "not shown to others" in caplog.text


@pytest.mark.slow
def test_campaigns_run_as_two_of_them(socket: Path, terminal: Terminal) -> None:
    """Coordinators are clients of the queue, and have a server of RQ's, or the same, as another."""
    rq_url = as_role(socket, "campaigns").url
    with (
        serving(as_role(socket, "worker"), Recorder()),
        desk_at(terminal, as_role(socket, "client"), rq_url) as desk,
    ):
        ids = [desk.send("first"), desk.send("second", options=("--in", "1s"))]
        ids.append(desk.send("third", options=("--after", ids[0])))
        held = desk.send("fourth")
        desk.run("pause", held)
        boss = desk.start_worker()
        for id_ in ids:
            desk.reaches(id_, "finished")
        desk.run("resume", held)
        desk.reaches(held, "finished")
        desk.run("retry", held)
        desk.reaches(held, "finished")
        assert len([*desk.campaigns.list()]) == 4
        assert "Warning" not in stop_worker(boss)


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("client", "HGETALL {leanq:0}:deadreq:x"),
        ("client", "GET {leanq:0}:body:x"),
        ("client", "ZRANGE {leanq:0}:workers 0 -1"),
        ("client", "HSET {leanq:0}:environments default x"),
        ("client", "ZADD {leanq:0}:workers 1 x"),
        ("client", "ZADD {leanq:0}:warm:default:x 1 x"),
        ("client", "GET another"),
        ("client", "SET {leanq:0}:snap:x y"),
        ("client", "GET {leanq:0}:chunk:x"),
        ("client", "KEYS *"),
        ("client", "FLUSHALL"),
        ("client", "CONFIG GET *"),
        ("gateway", "HSET {leanq:0}:environments x 1"),
        ("gateway", "HSET {leanq:0}:scaler a 2"),
        ("gateway", "ZREM {leanq:0}:workers x"),
        ("gateway", "ZADD {leanq:0}:workers 1 x"),
        ("gateway", "SET {leanq:0}:snap:x y"),
        ("gateway", "GET another"),
        ("gateway", "KEYS *"),
        ("gateway", "FLUSHALL"),
        ("worker", "SET another x"),
        ("worker", "XREAD STREAMS {leanq:0}:inbox:c 0"),
        ("worker", "CONFIG SET maxmemory 1"),
        ("worker", "FLUSHALL"),
        ("worker", "HSET {leanq:0}:weights a 2"),
        ("worker", "HSET {leanq:0}:paused e:x 1"),
        ("worker", "HSET {leanq:0}:scaler echo x"),
        ("observer", "SET {leanq:0}:reply:x y"),
        ("observer", "DEL {leanq:0}:dead"),
        ("observer", "GET another"),
        ("observer", "HSET {leanq:0}:scaler echo x"),
        ("client", "HSET {leanq:0}:scaler echo x"),
        ("scaler", "HSET {leanq:0}:environments echo x"),
        ("scaler", "PEXPIRE {leanq:0}:stats 1"),
        ("scaler", "DEL {leanq:0}:scaler"),
        ("scaler", "FLUSHALL"),
        ("campaigns", "GET {leanq:0}:environments"),
        ("campaigns", "GET another"),
        ("campaigns", "KEYS *"),
        ("campaigns", "FLUSHDB"),
        ("campaigns", "CONFIG GET *"),
        ("operator", "FLUSHALL"),
        ("operator", "ZADD {leanq:0}:workers 1 x"),
    ],
)
def test_and_nothing_else(socket: Path, role: str, words: str) -> None:
    with redis.Redis.from_url(as_role(socket, role).url) as connection:
        with pytest.raises(redis.exceptions.NoPermissionError):
            connection.execute_command(*words.split())
        body = "return redis.call(unpack(ARGV))"
        # Each server has its own words for this.
        refused = r"(?i)permission|not allowed|user executing the script can't"
        with pytest.raises(redis.exceptions.ResponseError, match=refused):
            connection.eval(body, 1, "{leanq:0}", *words.split())


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("operator", "status"),
        ("operator", "status --since 1h"),
        ("operator", "metrics --once"),
        ("operator", "pause --tenant a"),
        ("operator", "resume --tenant a"),
        ("operator", "tenant weight a 2"),
        ("operator", "tenant weight a --remove"),
        ("operator", "tenant list"),
        ("operator", "env list"),
        ("operator", "dead list"),
        ("observer", "status"),
        ("observer", "status --since 1h"),
        ("observer", "tenant list"),
        ("observer", "env list"),
        ("scaler", "status"),
        ("gateway", "status"),
        ("gateway", "status --since 1h"),
        ("gateway", "dead list"),
        ("gateway", "tenant list"),
    ],
)
def test_each_role_has_its_commands(socket: Path, role: str, words: str) -> None:
    done = CliRunner().invoke(cli, [*words.split(), "--url", as_role(socket, role).url])
    assert done.exit_code == 0, done.output


async def test_operators_pause_an_environment_by_the_command(socket: Path) -> None:
    """The command looks at all environments first."""
    worker = Queue(as_role(socket, "worker"))
    await worker.register("w", b"", {"echo": b""})
    for words in ("pause", "resume"):
        options = [words, "--env", "echo", "--url", as_role(socket, "operator").url]
        done = await asyncio.to_thread(CliRunner().invoke, cli, options)
        assert done.exit_code == 0, done.output
    await worker.release("w", [], leave=True)
    await worker.close()


@pytest.mark.parametrize("words", ["status", "tenant weight a 2", "dead list"])
def test_what_a_role_may_not_is_said(socket: Path, observed: None, words: str) -> None:
    done = CliRunner().invoke(cli, [*words.split(), "--url", as_role(socket, "client").url])
    assert done.exit_code != 0
    assert "does not let this user do that" in str(done.exception or done.output)
    assert "no answer" not in str(done.exception or done.output)


def rules_of(role: str) -> list[str]:
    (line,) = (line for line in USERS.read_text().splitlines() if f"leanq-{role} " in line)
    return line.split()[2:]


# As the table of keys calls those who write without a worker.
_OTHER_WRITERS = re.compile(r"the operator|the scaler|pause|replay_")


def keys_that_workers_write() -> set[str]:
    """As ``:phase``, or ``:req:`` where something follows."""
    rows = re.findall(
        r"^\| ``(:[a-z]+:?).*?`` \| .* \| (.*?) \| .*? \|$", keys.__doc__ or "", re.MULTILINE
    )
    return {key for key, writer in rows if not _OTHER_WRITERS.match(writer)}


def asked_for() -> tuple[set[str], dict[str, int]]:
    """The keys that a worker is asked for as it joins, and the commands with their arguments."""
    lists = re.findall(r"local [A-Z]+ = \[\[(.*?)\]\]", script_text("register"), re.DOTALL)
    names, words = (found.split() for found in lists)
    commands, count = dict[str, int](), 0
    for word in words:
        if word.isdigit():
            assert int(word) == count + 1
            count = int(word)
        else:
            commands[word] = count
    return {*names}, commands


def test_a_worker_writes_all_keys_but_those_of_operator_scaler_and_learner() -> None:
    """A key that the scripts have and a rule has not would stop a worker in the middle of one."""
    written = {
        rule[10:].rstrip("*") for rule in rules_of("worker") if rule.startswith("~{leanq:*}:")
    }
    assert written == {*keys_that_workers_write(), ":shape"}


def test_what_a_worker_asks_for_as_it_joins_is_all_that_its_scripts_need() -> None:
    names, commands = asked_for()
    assert {f":{name}" for name in names} == keys_that_workers_write()
    # Those of the scripts that neither clients nor operators alone run; TIME has no key.
    others = {"submit", "lookup", "cancel", "pause", "status"}
    scripts = [name for name in SCRIPTS if name not in others and not name.startswith("replay_")]
    called = {
        command
        for name in scripts
        for command in re.findall(r"call\('([A-Z]+)'", script_text(name))
    }
    # The script asks for this one before it calls it.
    assert {*commands} == called - {"SET", "TIME", "MSETEX"}


def test_what_a_worker_asks_for_has_as_many_arguments_as_the_command(socket: Path) -> None:
    """Servers of 2026 refuse to say whether a user may call what is no call."""
    with redis.Redis.from_url(as_role(socket, "admin").url) as admin:
        for command, count in asked_for()[1].items():
            _, arity, *_ = admin.execute_command("COMMAND", "INFO", command)[
                command.lower()
            ].values()
            sent = 1 + count
            assert sent == arity or 0 > arity >= -sent, command


async def test_a_worker_joins_a_server_that_cannot_be_asked_for_rights(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look for a missing right is a courtesy."""
    refusing = "function() error({err = 'Wrong number of args for redis.acl_check_cmd()'}) end"
    for own in (refusing, "nil"):

        def text(name: str, own: str = own) -> str:
            script = with_test_clock(name).replace("redis.acl_check_cmd", "acl_check_cmd")
            return script.replace("\n", f"\nlocal acl_check_cmd = {own}\n", 1)

        monkeypatch.setattr(leanq.queue.shard, "script_text", text)
        await shard.queue.register("w", b"", {"a": b""})
        await shard.submit("r1", "r2")
        jobs = (await shard.claim("w", 2)).jobs
        assert await shard.settle(*jobs) == (True, True)
        await shard.queue.release("w", [], leave=True)
        shard.server.delete(*(shard.queue.keys.request(each) for each in ("r1", "r2")))


async def test_a_worker_that_lacks_a_right_does_not_join(socket: Path) -> None:
    """Its scripts would end in the middle, with requests in no list."""
    whole = [">lacking" if rule.startswith(">") else rule for rule in rules_of("worker")]
    lacks = [f"+{command.lower()}" for command in asked_for()[1]]
    patterns = (key + "*" if key.endswith(":") else key for key in keys_that_workers_write())
    lacks += [f"~{{leanq:*}}{pattern}" for pattern in patterns]
    assert {*lacks} <= {*whole}
    with redis.Redis.from_url(as_role(socket, "admin").url) as admin:
        for lack in lacks:
            left = [rule for rule in whole if rule != lack]
            admin.execute_command("ACL", "SETUSER", "leanq-lacking", "reset", *left)
            queue = Queue(as_role(socket, "lacking"))
            with pytest.raises(NotPermittedError, match="a worker needs the right to"):
                await queue.register("w", b"", {"echo": b""})
            await queue.close()
        admin.execute_command("ACL", "SETUSER", "leanq-lacking", "reset", *whole)
        queue = Queue(as_role(socket, "lacking"))
        await queue.register("w", b"", {"echo": b""})
        await queue.release("w", [], leave=True)
        await queue.close()
        admin.execute_command("ACL", "DELUSER", "leanq-lacking")


async def test_workers_keep_the_accounts_of_tenants_with_weights(socket: Path) -> None:
    client, worker = Queue(as_role(socket, "client")), Queue(as_role(socket, "worker"))
    operator = Queue(as_role(socket, "operator"))
    await operator.set_weight("a", 2.0)
    await worker.register("w", b"", {"echo": b""})
    await client.submit("c", [structs.replace(submission("0-weighed", echo_body(b"")), tenant="a")])
    (job,) = (await worker.claim("w", ["echo"], 1, busy=0, token="n:")).jobs
    done = Settlement(
        job.request_id, job.token, "accepted", pack_reply(job.token, Reply("accepted"))
    )
    await worker.claim("w", ["echo"], 1, busy=0, token="m:", settlements=[done])
    assert (await client.replies(["0-weighed"])) == [done.reply]
    await operator.set_weight("a", None)
    await worker.release("w", [], leave=True)
    for queue in (client, operator, worker):
        await queue.close()


def test_redis_7_0_knows_the_commands() -> None:
    """It ends at its start where a rule names a command that it does not have, such as CLIENT
    SETINFO of 7.2."""
    rules = USERS.read_text().split()
    assert {rule for rule in rules if "|" in rule} == {
        "+acl|dryrun",
        "+client|setname",
        "+cluster|slots",
        "+function|kill",
        "+function|load",
        "+script|kill",
        "+script|load",
    }


@pytest.mark.slow
@pytest.mark.parametrize("role", ["client", "worker", "observer"])
def test_the_doctor_finds_the_server_as_each_role(
    socket: Path, terminal: Terminal, role: str
) -> None:
    url = as_role(socket, role).url
    done = terminal.run("doctor", "--json", "--url", url)
    (found,) = (line for line in done.lines if line["what"] == "server")
    assert found["works"], found
    assert re.search(r"version \d+\.\d+\.\d+", found["text"])
    assert ("may not ask" in found["text"]) == (role != "observer")
