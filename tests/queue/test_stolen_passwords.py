"""What a stolen password of each role can and cannot do, as docs/operations/security.md says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis import exceptions
from support.fleets import echo_body, submission
from support.queue.queues import Queue
from support.queue.roles import USERS, as_role, server_with_roles
from support.waiting import eventually

from leanq.errors import NotPermittedError
from leanq.queue.requests import Reply
from leanq.queue.results import Settlement
from leanq.queue.scripts import library_of, script_text
from leanq.queue.wire import pack_reply

_ENDLESS = "while true do end"
_BUSY_MS = 50


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with server_with_roles("--busy-reply-threshold", str(_BUSY_MS)) as server:
        yield server.folder / "server.sock"


@contextlib.contextmanager
def holding(socket: Path, role: str) -> Iterator[redis.Redis]:
    """A connection of one who has a role's password and no program of leanq's."""
    with redis.Redis.from_url(as_role(socket, role).url, single_connection_client=True) as made:
        yield made


@contextlib.asynccontextmanager
async def queues(socket: Path, *roles: str):  # type: ignore[no-untyped-def]
    made = [Queue(as_role(socket, role)) for role in roles]
    yield made
    for queue in made:
        await queue.close()


def refused(connection: redis.Redis, *words: str | int) -> None:
    with pytest.raises((exceptions.NoPermissionError, exceptions.NoScriptError)):
        connection.execute_command(*words)


async def in_flight(queue: Queue, request_id: str) -> str:
    await queue.submit("victim", [submission(request_id, echo_body(b"secret text"))])
    return queue.keys.request(request_id)


@pytest.mark.parametrize("role", ["client", "gateway", "worker", "operator"])
async def test_it_reads_texts_and_forges_replies(socket: Path, role: str) -> None:
    """The server cannot tell the calls of a script from the same calls made by hand."""
    async with queues(socket, "client") as (victim,):
        request_id = f"0-forged{role}"
        key = await in_flight(victim, request_id)
        forged = pack_reply("n:1", Reply("accepted"))
        with holding(socket, role) as thief:
            assert b"secret text" in thief.get(key)  # type: ignore[operator]
            thief.set(key, forged)
        assert await victim.lookup("victim", [request_id]) == [forged]
        with holding(socket, role) as thief:
            thief.unlink(key)


async def test_a_client_runs_no_script_of_its_own(socket: Path) -> None:
    with holding(socket, "client") as thief:
        refused(thief, "EVAL", _ENDLESS, 0)
        refused(thief, "EVAL_RO", _ENDLESS, 0)
        refused(thief, "SCRIPT", "LOAD", _ENDLESS)
        refused(thief, "EVALSHA", "0" * 40, 0)
        refused(thief, "FUNCTION", "LOAD", "REPLACE", library_of(script_text("submit")).text)
        refused(thief, "FUNCTION", "FLUSH")
        refused(thief, "SCRIPT", "KILL")


async def test_a_role_of_functions_alone_could_not_submit(socket: Path) -> None:
    """A function has the rights of its caller, so a role needs what its functions call; selectors
    change nothing about that."""
    (rules,) = (line for line in USERS.read_text().splitlines() if "leanq-client " in line)
    keys = [rule for rule in rules.split() if "~" in rule]
    base = ["reset", "on", ">narrow", "+hello", "+auth", "+ping", "+client|setname"]
    admin = redis.Redis.from_url(as_role(socket, "admin").url)
    with contextlib.closing(admin):
        for rights in (["+fcall", *keys], [f"({' '.join(['+fcall', *keys])})"]):
            admin.execute_command("ACL", "SETUSER", "leanq-narrow", *base, *rights)
            async with queues(socket, "narrow") as (narrow,):
                with pytest.raises(NotPermittedError):
                    await narrow.submit("c", [submission("0-narrow", echo_body(b""))])
        admin.execute_command("ACL", "DELUSER", "leanq-narrow")


async def test_a_worker_gives_verdicts_and_replaces_libraries(socket: Path) -> None:
    """What gateways and clients call then runs with their rights; operators call no libraries."""
    library = library_of(script_text("cancel"))
    planted = (
        f"#!lua name={library.function}\nredis.register_function('{library.function}', "
        "function(keys) redis.call('HSET', '{leanq:0}:paused', 'e:planted', 1) return 1 end)"
    )
    async with queues(socket, "worker", "client", "gateway", "operator") as (
        worker,
        client,
        gateway,
        operator,
    ):
        await client.submit("c", [submission("0-judged", echo_body(b""))])
        await worker.register("thief", b"", {"echo": b""})
        (job,) = (await worker.claim("thief", ["echo"], 1, busy=0, token="n:")).jobs
        reply = pack_reply(job.token, Reply("accepted"))
        done = Settlement(job.request_id, job.token, "accepted", reply)
        await worker.claim("thief", [], 0, busy=0, token="m:", settlements=[done])
        assert await client.lookup("c", ["0-judged"]) == [reply]
        with holding(socket, "worker") as thief, holding(socket, "admin") as admin:
            refused(thief, "HSET", "{leanq:0}:paused", "e:planted", 1)
            refused(thief, "HSET", "{leanq:0}:weights", "t", 1)
            thief.function_load(planted, replace=True)
            assert await operator.cancel(["0-none"]) == [False]
            assert not admin.exists("{leanq:0}:paused")
            with contextlib.suppress(Exception):
                await gateway.cancel(["0-none"])
            assert admin.exists("{leanq:0}:paused")
            admin.delete("{leanq:0}:paused")
            admin.function_load(library.text, replace=True)
        await worker.release("thief", [], leave=True)


@pytest.mark.parametrize("role", ["gateway", "operator"])
async def test_it_steers_the_queue_and_loads_nothing(socket: Path, role: str) -> None:
    async with queues(socket, role) as (queue,):
        assert await queue.set_paused("tenant", "t", paused=True)
        assert await queue.set_paused("tenant", "t", paused=False)
        await queue.set_weight("t", 2.0)
        await queue.set_weight("t", None)
    with holding(socket, role) as thief:
        refused(thief, "FUNCTION", "LOAD", "REPLACE", library_of(script_text("submit")).text)
        refused(thief, "HSET", "{leanq:0}:environments", "e", "x")
        refused(thief, "SET", "{leanq:0}:snap:x", "y")
        refused(thief, "GET", "another")
        refused(thief, "FLUSHALL")
        refused(thief, "SHUTDOWN")


@pytest.mark.parametrize("role", ["gateway", "worker", "observer", "scaler", "learner"])
async def test_its_endless_script_is_ended_by_an_operator(socket: Path, role: str) -> None:
    with holding(socket, role) as thief, holding(socket, "admin") as admin:
        ends = threading.Thread(target=_endless, args=(thief, "EVAL", _ENDLESS, 0))
        await _frozen_and_freed(socket, ends, admin, "SCRIPT")


async def test_a_workers_endless_function_is_ended_by_an_operator(socket: Path) -> None:
    text = f"#!lua name=endless\nredis.register_function('endless', function() {_ENDLESS} end)"
    with holding(socket, "worker") as thief, holding(socket, "admin") as admin:
        thief.function_load(text)
        ends = threading.Thread(target=_endless, args=(thief, "FCALL", "endless", 0))
        await _frozen_and_freed(socket, ends, admin, "FUNCTION")
        admin.function_delete("endless")


async def _frozen_and_freed(
    socket: Path, ends: threading.Thread, admin: redis.Redis, kind: str
) -> None:
    ends.start()

    def busy() -> bool:
        try:
            admin.ping()
        except exceptions.ResponseError as error:
            return "BUSY" in str(error)
        return False

    try:
        await eventually(busy)
        with holding(socket, "operator") as operator:
            operator.execute_command(f"{kind} KILL")
        ends.join(30)
        assert not ends.is_alive()
    finally:
        if ends.is_alive():
            admin.execute_command(f"{kind} KILL")
    assert admin.ping()


def _endless(thief: redis.Redis, *words: str | int) -> None:
    with pytest.raises(exceptions.ResponseError, match=r"(?i)kill"):
        thief.execute_command(*words)
