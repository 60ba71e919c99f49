"""Aliases move without a restart, and what was submitted ends where it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from support.fleets import Wire, echo_body, hurry, submission, working
from support.gateway.gateways import Scripted, key_file, new_gateway
from support.producer.routes import first_shard
from support.queue.queues import Queue
from support.terminals import Terminal
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.errors import (
    ConflictError,
    LeanQError,
    NoWorkerError,
    RequestError,
    UnknownEnvironmentError,
    UsageError,
)
from leanq.gateway.keys import KeyFile
from leanq.lean.recipes import Hole, Recipe, Source, read_recipe
from leanq.producer.request_builder import RequestBuilder
from leanq.producer.route import RouteOptions
from leanq.producer.shard_client import ShardClient
from leanq.queue.operator_queue import OperatorQueue, every_queue, set_alias
from leanq.queue.requests import Reply, Request, Sorry
from leanq.queue.results import Aliased, Became
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_info
from leanq.states import States

OLD, NEW = "m-08", "m-09"


class Library(Scripted):
    """An environment whose replies tell it. It makes a state of each text that is incomplete, and
    steps on its own states alone."""

    def __init__(self, environment: str) -> None:
        super().__init__(environment)
        self.fingerprint = environment.encode().hex().ljust(64, "0")

    @property
    def about(self) -> dict[str, object]:
        return {"driver": "lean", "lean": "4.35.0", "fingerprint": self.fingerprint}

    async def open(self, states: States) -> None:
        self._states = states

    async def run(self, request: Request) -> Reply:
        if request.op == "step":
            records = await self._states.recall(request.state)
            recipe = read_recipe(request.state, records or ())
            if recipe.source.fingerprint != self.fingerprint:
                return Reply(error="the state is of another environment")
        reply = structs.replace(await super().run(request), fingerprint=self.fingerprint)
        if reply.verdict != "incomplete":
            return reply
        hole = Hole(request.code.index("sorry"), "term")
        recipe = Recipe(Source(self.fingerprint, request.code, (hole,)), 0)
        await self._states.keep(dict(recipe.records()))
        return structs.replace(reply, sorries=(Sorry(1, 0, state=recipe.id),))


@pytest.fixture
async def libraries(settings: Settings) -> AsyncIterator[tuple[Library, Library]]:
    """What two workers run; ``m`` stands for the first."""
    old, new = Library(OLD), Library(NEW)
    async with working(settings, old), working(settings, new):
        await move(settings, "m", OLD)
        yield old, new


async def move(settings: Settings, name: str, target: str) -> str:
    async with every_queue(settings) as queues:
        return await set_alias(queues, "environment", name, target)


async def give(settings: Settings, tenant: str, target: str) -> None:
    async with every_queue(settings) as queues:
        assert await set_alias(queues, "tenant", tenant, target) == target


async def test_requests_end_where_they_were_submitted(
    settings: Settings, libraries: tuple[Library, Library]
) -> None:
    old, new = libraries
    async with AsyncLeanQClient(settings) as lean:
        held = [asyncio.create_task(lean.check(f"-- held {n}", env="m")) for n in range(20)]
        # Eight run, and the others wait.
        await eventually(lambda: len(old.running) == 8)
        assert await move(settings, "m", NEW) == NEW
        assert (await lean.check("-- new", env="m")).fingerprint == new.fingerprint
        old.gate.set()
        replies = await asyncio.gather(*held)
        assert {reply.fingerprint for reply in replies} == {old.fingerprint}
        assert (await lean.check("-- by name", env=OLD)).fingerprint == old.fingerprint


async def test_identical_requests_share_a_run_of_one_environment(
    settings: Settings, libraries: tuple[Library, Library]
) -> None:
    old, new = libraries
    async with AsyncLeanQClient(settings) as lean:
        tasks = [asyncio.create_task(lean.check("-- held x", env="m"))]
        await eventually(lambda: len(old.running) == 1)
        tasks.append(asyncio.create_task(lean.check("-- held x", env=OLD)))
        await move(settings, "m", NEW)
        tasks.append(asyncio.create_task(lean.check("-- held x", env="m")))
        await eventually(lambda: len(new.running) == 1)
        tasks.append(asyncio.create_task(lean.check("-- held x", env=NEW)))
        old.gate.set()
        new.gate.set()
        ends = [reply.fingerprint for reply in await asyncio.gather(*tasks)]
        assert ends == [old.fingerprint] * 2 + [new.fingerprint] * 2
    assert len(old.seen) + len(new.seen) == 2


async def test_remembered_verdicts_are_of_the_environment(
    settings: Settings, libraries: tuple[Library, Library]
) -> None:
    old, new = libraries
    remembering = replace(settings, remember_s=60.0)
    async with (
        working(remembering, Library("r-08")),
        working(remembering, Library("r-09")),
        AsyncLeanQClient(remembering) as lean,
    ):
        for target in ("r-08", "r-09", "r-08"):
            await move(settings, "r", target)
            replies = [await lean.check("-- x", env="r") for _ in range(2)]
            prints = {reply.fingerprint for reply in replies}
            assert prints == {Library(target).fingerprint}
    assert old.seen == new.seen == []


@pytest.mark.parametrize("name", ["m", None])
async def test_a_state_stays_in_its_environment(
    settings: Settings, libraries: tuple[Library, Library], name: str | None
) -> None:
    old, _ = libraries
    named = {} if name is None else {"env": name}
    async with AsyncLeanQClient(settings) as lean, AsyncLeanQClient(settings) as other:
        hole = (await lean.check("-- incomplete sorry", env="m")).sorries[0].state
        await move(settings, "m", NEW)
        for client in (lean, other) if name is None else (lean,):
            reply = await client.step(str(hole), "skip", **named)
            assert reply.fingerprint == old.fingerprint
        # This client knows nothing of the state, so it means the alias as it is now.
        with pytest.raises(RequestError, match="of another environment"):
            await other.step(str(hole), "skip", env="m")


async def test_a_request_id_is_the_same_request_after_a_move(
    settings: Settings, libraries: tuple[Library, Library]
) -> None:
    old, _ = libraries
    async with AsyncLeanQClient(settings) as lean, AsyncLeanQClient(settings) as again:
        first = asyncio.create_task(lean.check("-- held x", env="m", request_id="0-x"))
        await eventually(lambda: len(old.running) == 1)
        await move(settings, "m", NEW)
        second = asyncio.create_task(again.check("-- held x", env="m", request_id="0-x"))
        await eventually(
            lambda: any(each.known for each in first_shard(again).outstanding.values())
        )
        (attached,) = first_shard(again).outstanding.values()
        assert attached.submission
        assert attached.submission.environment == OLD
        async with AsyncLeanQClient(settings) as other:
            with pytest.raises(ConflictError):
                await other.check("-- held x", env=NEW, request_id="0-x")
        old.gate.set()
        assert (await second).fingerprint == old.fingerprint
        # Its end goes to who asked last.
        first.cancel()
        for env in ("m", OLD):
            third = await again.check("-- held x", env=env, request_id="0-x")
            assert third.fingerprint == old.fingerprint
        for code, env in ("-- held y", "m"), ("-- held x", NEW):
            with pytest.raises(ConflictError):
                await again.check(code, env=env, request_id="0-x")


class Waits:
    """A waiter that keeps what it hears."""

    def __init__(self) -> None:
        self.ends: list[Reply | LeanQError] = []

    def acknowledged(self) -> None: ...

    def ended(self, end: Reply | LeanQError) -> None:
        self.ends.append(end)


async def test_a_reply_may_come_before_the_answer_that_names_the_environment(
    settings: Settings, libraries: tuple[Library, Library]
) -> None:
    wire, waiter = Wire(settings), Waits()
    client = ShardClient(wire, RouteOptions(unavailable_timeout_s=60.0))
    await client.open()
    let_go = wire.hold_up("submit", after=True)
    prepared = RequestBuilder(settings, "default").check("-- x", {"env": "m"})
    client.send(prepared.submission, waiter)
    await eventually(lambda: bool(waiter.ends))
    assert wire.waiting == ["submit"]
    (end,) = waiter.ends
    assert isinstance(end, Reply)
    assert end.fingerprint == libraries[0].fingerprint
    let_go()
    await client.close(withdraw=False)


async def test_a_tenant_has_a_default_of_its_own(
    settings: Settings, libraries: tuple[Library, Library]
) -> None:
    old, new = libraries
    await give(settings, "a", "m")
    await give(settings, "b", NEW)
    async with AsyncLeanQClient(settings) as lean:

        async def ends(*tenants: str) -> list[str | None]:
            checks = (lean.check("-- x", tenant=tenant) for tenant in tenants)
            return [reply.fingerprint for reply in await asyncio.gather(*checks)]

        assert await ends("a", "b", "a") == [old.fingerprint, new.fingerprint, old.fingerprint]
        with pytest.raises(UnknownEnvironmentError, match="known: m-08, m-09, m → m-08"):
            await lean.check("-- x", tenant="c")
        await move(settings, "default", NEW)
        assert await ends("c") == [new.fingerprint]
        await move(settings, "m", NEW)
        assert await ends("a") == [new.fingerprint]
        await give(settings, "a", "")
        await move(settings, "default", "")
        with pytest.raises(UnknownEnvironmentError):
            await ends("a")


async def test_no_worker_is_said_of_the_environment(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, no_worker_s=0.05)
    async with working(settings, Library(NEW)):
        async with working(settings, Library(OLD)):
            await move(settings, "m", OLD)
        async with AsyncLeanQClient(settings, no_worker="raise") as lean:
            with pytest.raises(
                NoWorkerError, match="no worker is alive for the environment 'm-08'"
            ):
                await lean.check("-- x", env="m")


async def test_an_alias_that_cannot_be(
    settings: Settings, libraries: tuple[Library, Library]
) -> None:
    for name, target, error in (
        ("n", "m", "'m' is an alias itself"),
        (OLD, NEW, "an alias stands for 'm-08'"),
        (NEW, OLD, "'m-09' is an environment that workers offer"),
        ("n", "m-10", r"no worker has ever offered the environment 'm-10'; known: m-08, m-09, m →"),
    ):
        with pytest.raises((UsageError, UnknownEnvironmentError), match=error):
            await move(settings, name, target)
    queue = Queue(settings)
    assert await queue.aliases() == {"e:m": OLD}
    with pytest.raises(UsageError, match=r"'m' has the name of an alias.*--drop m"):
        await queue.register("w", b"", {"m": b""})
    assert "w" not in [row.worker for row in (await queue.status()).workers]
    # A scaler's environment may be without workers, and another's requests may wait.
    await queue.publish_decisions({"sized": b"{}"})
    await queue.submit(
        "c", [structs.replace(submission("0-s", echo_body(b"")), environment="sized")]
    )
    with pytest.raises(UsageError, match="a scaler sizes"):
        await move(settings, "sized", OLD)
    await queue.call(lambda c: c.delete(queue.keys.of("scaler")))
    with pytest.raises(UsageError, match="requests wait in the environment 'sized'"):
        await move(settings, "sized", OLD)
    assert await queue.cancel(["0-s"]) == [True]
    await queue.claim("w", ["sized"], 1, busy=0, token="n")
    await queue.release("w", [], leave=True)
    assert await move(settings, "sized", OLD) == OLD
    await queue.close()


async def test_states_of_an_environment_that_became_an_alias_are_found_by_its_new_name(
    settings: Settings,
) -> None:
    async with working(settings, named := Library("m")), AsyncLeanQClient(settings) as lean:
        hole = (await lean.check("-- incomplete sorry", env="m")).sorries[0].state
    again, new = Library(OLD), Library(NEW)
    again.fingerprint = named.fingerprint
    async with working(settings, again), working(settings, new):
        await move(settings, "m", OLD)
        await move(settings, "m", NEW)
        async with AsyncLeanQClient(settings) as lean:
            assert (await lean.step(str(hole), "skip")).fingerprint == named.fingerprint
    assert len(again.seen) == 1


async def test_all_shards_agree_whatever_operators_do_at_once(settings: Settings) -> None:
    many = replace(settings, shards=3)
    drivers = [Library(f"m-{n}") for n in range(4)]
    async with working(many, *drivers):
        for _ in range(10):
            ends = await asyncio.gather(*(move(many, "m", each.environment) for each in drivers))
            async with every_queue(many) as queues:
                found = [(await queue.shard.aliases())["e:m"] for queue in queues]
            assert len(set(found)) == 1
            assert found[0] in ends
        async with AsyncLeanQClient(many) as lean:
            replies = await asyncio.gather(*(lean.check(f"-- {n}", env="m") for n in range(30)))
        (driver,) = (each for each in drivers if each.environment == found[0])
        assert {reply.fingerprint for reply in replies} == {driver.fingerprint}


async def test_requests_of_one_batch_have_each_their_environment(settings: Settings) -> None:
    """Also copies of one id, large bodies, and those that a full line refuses."""
    queue = Queue(replace(settings, max_waiting=2))
    operator = OperatorQueue(queue)
    await queue.register("w", pack_info({"environments": ["echo"]}), {"echo": b"", "other": b""})
    await set_alias([operator], "environment", "e", "echo")
    await set_alias([operator], "tenant", "t", "other")
    large = echo_body(b"x" * 200_000)
    rows = [("e", "a", large), ("default", "t", large), ("echo", "a", b""), ("e", "a", b"")]
    batch = [
        structs.replace(
            submission(f"0-{n}", body or echo_body(b"")), environment=env, tenant=tenant
        )
        for n, (env, tenant, body) in enumerate(rows)
    ]
    batch.append(batch[0])
    answers = await queue.submit("c", batch)
    taken = [Aliased("echo", b""), Aliased("other", b""), Became.QUEUED]
    assert answers == [*taken, Became.FULL, Aliased("echo", b"")]
    jobs = (await queue.claim("w", ["echo", "other"], 9, busy=0, token="n:")).jobs
    assert {(job.request_id, job.environment) for job in jobs} == {
        ("0-0", "echo"),
        ("0-1", "other"),
        ("0-2", "echo"),
    }
    assert [job.body == large for job in jobs if job.request_id != "0-2"] == [True, True]
    assert {row.environment for row in (await queue.status()).priorities} == set()
    assert "waiting:e" not in (await queue.status()).counters
    await queue.cancel([item.request_id for item in batch[:3]])
    await queue.release("w", [], leave=True)
    await queue.close()


async def test_a_gateway_leads_where_the_alias_does(
    settings: Settings, libraries: tuple[Library, Library], tmp_path: Path
) -> None:
    old, new = libraries
    keys = key_file(
        tmp_path,
        {"secret": "all"},
        {"secret": "some", "environments": ["m"], "rights": ["submit", "status"]},
    )
    async with new_gateway(settings, keys=KeyFile(keys)) as gateway:

        async def post(what: str, key: str, **body: object) -> dict[str, object]:
            headers = {"Authorization": f"Bearer {key}"}
            answer = await gateway.http.post(f"/v1/{what}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        states = {}
        for key in ("all", "some"):
            reply = await post("check", key, code=f"-- incomplete {key} sorry", environment="m")
            assert reply["fingerprint"] == old.fingerprint
            states[key] = reply["sorries"][0]["state"]  # type: ignore[index]
            step = {"state": states[key], "tactic": "skip", "environment": "m"}
            assert (await post("step", key, **step))["fingerprint"] == old.fingerprint
        headers = {"Authorization": "Bearer some"}
        seen = (await gateway.http.get("/v1/status", headers=headers)).json()["environments"]
        assert [each["name"] for each in seen] == [OLD]
        named = {"code": "-- held", "environment": "m", "request_id": "mine"}
        held = asyncio.create_task(post("check", "all", **named))
        await eventually(lambda: len(old.running) == 1)
        await move(settings, "m", NEW)
        assert (await post("check", "some", code="-- x"))["fingerprint"] == new.fingerprint
        again = asyncio.create_task(post("check", "all", **named))
        await eventually(lambda: len(old.running) == 1)
        old.gate.set()
        for task in (held, again):
            assert (await task)["fingerprint"] == old.fingerprint
        assert (await post("check", "all", **named))["fingerprint"] == old.fingerprint
        # An alias named for a state stands for the state's environment.
        step = {"state": states["all"], "tactic": "skip", "environment": "m"}
        assert (await post("step", "all", **step))["fingerprint"] == old.fingerprint


async def test_another_gateways_request_comes_again_after_a_move(
    settings: Settings, libraries: tuple[Library, Library]
) -> None:
    """One caller fetches it by its name alone, and another sends it again."""
    old, _ = libraries
    async with new_gateway(settings) as one, new_gateway(settings) as other:
        named = {"code": "-- held", "environment": "m", "request_id": "mine"}
        first = asyncio.create_task(one.http.post("/v1/check", json=named))
        await eventually(lambda: len(old.running) == 1)
        fetched = asyncio.create_task(other.http.get("/v1/requests/mine", params={"wait": 20}))
        await eventually(lambda: other.lean.all_outstanding() == 1)
        await move(settings, "m", NEW)
        again = asyncio.create_task(other.http.post("/v1/check", json=named))
        differs = asyncio.create_task(
            other.http.post("/v1/check", json={**named, "environment": NEW})
        )
        (pending,) = other.lean._pending.values()  # noqa: SLF001 - nothing else tells who waits
        await eventually(lambda: len(pending._callbacks) == 3)  # noqa: SLF001 - the same
        old.gate.set()
        for task in (first, fetched, again):
            assert (await task).json()["fingerprint"] == old.fingerprint
        assert (await differs).status_code == 409


@pytest.mark.slow
def test_operators_move_and_see_aliases_by_commands(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    assert terminal.run("env", "list").out == "no worker has offered an environment yet\n"

    async def offer(*names: str) -> None:
        queue = Queue(settings)
        about = {
            "driver": "lean",
            "lean": "4.35.0",
            "project": "mathlib4",
            "libraries": ["Aesop", "Batteries", "Init", "Lean", "Mathlib", "Qq"],
            "kernel": "4.35.0",
        }
        info = {"environments": names, "fingerprints": dict.fromkeys(names, "f" * 64)}
        described = {name: pack_info(about) for name in names}
        await queue.register("host-1", pack_info(info), described, {})
        await queue.close()

    async def leave() -> None:
        queue = Queue(settings)
        await queue.release("host-1", [], leave=True)
        await queue.close()

    asyncio.run(offer(OLD, NEW))
    out = terminal.run("env", "alias", "m", OLD).out
    assert out == "m stands for m-08 from the next request on\n"
    moved = terminal.run("env", "alias", "m", NEW, "--json").lines
    assert moved == [{"alias": "m", "environment": NEW, "served": True}]
    out = terminal.run("tenant", "env", "a", "m").out
    assert out == "'default' of the tenant a is m from the next request on\n"
    rows = terminal.run("env", "list").out.splitlines()
    assert [row.split() for row in rows[:-1]] == [
        ["ENVIRONMENT", "LEAN", "LIBRARY", "FINGERPRINT", "WORKERS", "KERNEL", "ALIASES"],
        [
            OLD,
            "4.35.0",
            *["mathlib4:", "Aesop,", "Batteries,", "Mathlib,", "…"],
            "f" * 12,
            "1",
            "4.35.0",
            "–",
        ],
        [
            NEW,
            "4.35.0",
            *["mathlib4:", "Aesop,", "Batteries,", "Mathlib,", "…"],
            "f" * 12,
            "1",
            "4.35.0",
            "m",
        ],
    ]
    assert rows[-1] == "'default' of the tenant a is m"
    old, new = terminal.run("env", "list", "--json").lines
    assert (old["aliases"], old["tenants"], new["aliases"], new["tenants"]) == (
        [],
        [],
        ["m"],
        ["a"],
    )
    assert (new["workers"], new["fingerprints"]) == (["host-1"], ["f" * 64])
    for words, said in (
        (("alias", "m"), "give either a TARGET or --drop"),
        (("alias", "m", OLD, "--drop"), "give either a TARGET or --drop"),
        (("alias", "m", "m"), "'m' cannot stand for itself"),
        (("alias", "é", OLD), "'é' is not a valid name"),
        (("alias", "x" * 65, OLD), "is not a valid name"),
        (("alias", "--drop", "n"), "'n' is no alias; known: m-08, m-09, m → m-09"),
    ):
        done = terminal.run("env", *words)
        assert done.code == 2, done
        assert said in done.err, done
    done = terminal.run("pause", "--env", "m")
    assert "no worker has ever offered the environment 'm'; known: m-08, m-09, m → m-09" in done.err
    assert terminal.run("env", "alias", "--drop", "m").out == "m is no alias any more\n"
    assert terminal.run("tenant", "env", "a", "--remove").code == 0
    asyncio.run(leave())
