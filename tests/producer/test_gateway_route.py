"""Clients that speak to a gateway: the same futures and errors as over Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from support.gateway.gateways import STATE, Gateway, Scripted, key_file, new_gateway
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import (
    ConflictError,
    InvalidRequestError,
    LostError,
    RequestError,
    UnavailableError,
    UnknownEnvironmentError,
    UnknownStateError,
    UsageError,
)
from leanq.gateway.keys import KeyFile
from leanq.gateway.v1_bodies import Result, result_of
from leanq.producer.gateway_route import reply_of
from leanq.queue.requests import (
    DeclarationTime,
    Failure,
    Message,
    Profile,
    Reply,
    Sorry,
    Tactic,
    Theorem,
)
from leanq.queue.settings import Settings


@pytest.mark.slow
async def test_replies_and_errors_are_those_of_a_client_of_the_redis(
    gateway: Gateway, settings: Settings
) -> None:
    async with AsyncLeanQClient(gateway.url) as far, AsyncLeanQClient(settings) as near:
        for code in ("-- accepted", "-- incomplete", "-- rejected", "-- timeout", "-- unverified"):
            assert await far.check(code) == await near.check(code)
        verify = await far.verify("-- target", "-- rejected", holes=["h"], allow_axioms=["a"])
        assert verify.verdict == "rejected"
        step = await far.step(STATE, "x", env="default", timeout_s=5, deadline_s=60, priority=2)
        assert step.verdict == "accepted"
        reply = await far.check("-- accepted", request_id="0-mine")
        assert (await far.attach("0-mine")) == reply
        with pytest.raises(LostError):
            await far.attach("0-nothing")
        with pytest.raises(UnknownEnvironmentError):
            await far.check("-- x", env="nowhere")
        with pytest.raises(UnknownStateError):
            await far.step(STATE, "x")
        with pytest.raises(InvalidRequestError):
            await far.echo(b"x")
        codes = [f"-- accepted {number}" for number in range(200)]
        ends = [result.verdict async for result in far.amap(codes)]
        assert ends == ["accepted"] * 200


async def test_a_request_id_with_other_content_is_a_conflict_by_every_way(
    gateway: Gateway, settings: Settings, scripted: Scripted
) -> None:
    named = {"request_id": "0-taken"}
    async with AsyncLeanQClient(gateway.url) as far, AsyncLeanQClient(settings) as near:
        for lean, name in ((far, "0-far"), (near, "0-near")):
            first = await lean.check("-- accepted", request_id=name)
            assert first.verdict == "accepted"
            with pytest.raises(ConflictError, match=name):
                await lean.check("-- accepted, and another", request_id=name)
            with pytest.raises(ConflictError):
                await lean.check("-- accepted", request_id=name, timeout_s=5)
            # Priority and trace do not change what is asked.
            again = await lean.check("-- accepted", request_id=name, priority=0)
            assert again == first
        # And while the first one runs.
        asked = asyncio.create_task(near.check("-- held", **named))
        await eventually(lambda: scripted.running == ["-- held"])
        async with AsyncLeanQClient(settings) as other:
            with pytest.raises(ConflictError):
                await other.check("-- accepted", **named)
        scripted.gate.set()
        assert (await asked).request_id == "0-taken"
    assert [each.code for each in scripted.seen].count("-- accepted, and another") == 0


async def test_a_gateway_answers_a_conflict_with_409(gateway: Gateway, scripted: Scripted) -> None:
    first = {"code": "-- held", "request_id": "mine"}
    other = {"code": "-- accepted", "request_id": "mine"}
    http = gateway.http
    assert (await http.post("/v1/check?wait=0", json=first)).status_code == 202
    waits = asyncio.create_task(http.get("/v1/requests/mine?wait=60"))
    await eventually(lambda: scripted.running == ["-- held"])
    for path in ("/v1/check", "/v1/check?wait=0"):
        refused = await http.post(path, json=other)
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:leanq:conflict")
        assert "'mine'" in refused.json()["detail"]
    lines = "\n".join(json.dumps({"op": "check", **each}) for each in (first, other))
    batch = asyncio.create_task(http.post("/v1/batch", content=lines))
    scripted.gate.set()
    told = [json.loads(line) for line in (await batch).text.splitlines()]
    assert {each["index"]: "problem" in each for each in told} == {0: False, 1: True}
    assert (await waits).json()["verdict"] == "accepted"
    # Its end is all that is known of it now.
    assert (await http.post("/v1/check", json=other)).status_code == 409
    assert (await http.post("/v1/check", json=first)).status_code == 200
    # Nor does the end tell what it was where a caller waits for it by its name alone.
    assert [each.code for each in scripted.seen] == ["-- held"]


async def test_a_gateway_takes_no_tenant_by_the_callers_word(gateway: Gateway) -> None:
    async with AsyncLeanQClient(gateway.url) as far:
        with pytest.raises(InvalidRequestError, match="knows the tenant by its key"):
            await far.check("-- accepted", tenant="alice")
        assert (await far.check("-- accepted", tenant="default")).verdict == "accepted"
    with pytest.raises(InvalidRequestError, match="knows the tenant by its key"):
        AsyncLeanQClient(gateway.url, tenant="alice")


async def test_the_time_of_the_judge_comes_through_a_gateway(
    gateway: Gateway, scripted: Scripted
) -> None:
    scripted.replies["-- judged"] = Reply("accepted", audit_s=0.25)
    async with AsyncLeanQClient(gateway.url) as far:
        assert (await far.check("-- judged")).audit_s == 0.25


def test_each_field_that_a_gateway_shows_comes_back() -> None:
    reply = Reply(
        "rejected",
        (Message("error", 1, 2, "m", 3, 4),),
        (Sorry(1, 2, 3, 4, "g", "s"),),
        ("propext",),
        "print",
        "state",
        ("goal",),
        reason="statement_differs",
        kernel="4.35.0",
        theorems=(Theorem("t", "True"),),
        more_theorems=3,
        failed=(Failure("t", "type_differs", "why"),),
        request_id="r",
        worker="w",
        attempts=2,
        queued_s=0.1,
        cpu_s=0.2,
        wall_s=0.3,
        audit_s=0.4,
        tactics=(Tactic(1, 2, ("g",)),),
        profile=Profile((DeclarationTime("t", 1, 2.5, (("simp", 2.0),)),), 7.0, "u"),
    )
    shown = json.loads(msgspec.json.encode(result_of(reply, "r")))
    assert {*shown} == {*Result.__struct_fields__}
    back = reply_of(shown)
    hidden = {"payload", "error", "warm", "content", "way", "spent", "submitted_ms"}
    for name in {*Reply.__struct_fields__} - hidden:
        assert getattr(reply, name) not in (None, (), "", 0), f"{name} is not tried"
        assert getattr(back, name) == getattr(reply, name), name
    # A gateway of before this field.
    assert reply_of({name: shown[name] for name in shown if name != "kernel"}).kernel is None


async def test_states_that_a_gateway_has_sealed_for_a_tenant(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    file = KeyFile(key_file(tmp_path, {"secret": "s"}))
    async with (
        new_gateway(settings, keys=file) as gateway,
        AsyncLeanQClient(gateway.url, key="s") as far,
        AsyncLeanQClient(settings) as near,
    ):
        [sorry] = (await far.check("-- incomplete")).sorries
        assert sorry.state
        assert sorry.state.startswith(f"{STATE}-")
        assert (await far.step(sorry.state, "x", env="default")).verdict == "accepted"
        # So says the driver, which knows of no exports.
        with pytest.raises(RequestError, match="ended with the verdict accepted"):
            await far.export(sorry.state, env="default")
        with pytest.raises(UnknownStateError):
            await far.step(STATE, "x", env="default")
        with pytest.raises(InvalidRequestError, match="not a state of a Redis"):
            await near.step(sorry.state, "x", env="default")


async def test_futures_of_threads_are_withdrawn_like_all_others(
    gateway: Gateway, scripted: Scripted
) -> None:
    client = await asyncio.to_thread(LeanQClient, gateway.url)
    try:
        held, other = client.check("-- held"), client.check("-- held too")
        await eventually(lambda: len(scripted.running) == 2 and held.running())
        held.cancel()
        await eventually(lambda: scripted.stopped == ["-- held"])
        scripted.gate.set()
        assert (await asyncio.wrap_future(other)).verdict == "accepted"
    finally:
        await asyncio.to_thread(client.close)


@pytest.mark.slow
async def test_a_gateway_that_ends_costs_no_request(settings: Settings, scripted: Scripted) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with new_gateway(settings, grace_s=0.1) as first:
            lean = await stack.enter_async_context(AsyncLeanQClient(first.url))
            asked = asyncio.create_task(lean.check("-- held"))
            await eventually(lambda: len(scripted.running) == 1)
        assert not asked.done()
        async with new_gateway(settings, port=int(first.url.rpartition(":")[2])):
            scripted.gate.set()
            assert (await asked).verdict == "accepted"
    assert len(scripted.seen) == 1


@pytest.mark.parametrize("way", ["a batch", "one by one"])
async def test_a_gateway_that_is_down_is_asked_seldom(
    settings: Settings, scripted: Scripted, way: str
) -> None:
    asked: list[str] = []

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append("connected")
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        async with new_gateway(settings, grace_s=0.1) as first:
            lean = await stack.enter_async_context(
                AsyncLeanQClient(first.url, unavailable_timeout_s=1.0)
            )
        port = int(first.url.rpartition(":")[2])
        async with await asyncio.start_server(hang_up, "127.0.0.1", port):
            with pytest.raises(UnavailableError):
                await (lean.check("x") if way == "a batch" else lean.export(STATE))
    # The waits between them double, from 25 ms on average.
    assert 0 < len(asked) < 16


async def test_a_key_is_needed_and_urls_that_would_show_it_are_refused(
    settings: Settings, scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KeyFile(key_file(tmp_path, {"secret": "s"}))
    async with new_gateway(settings, keys=file) as gateway:
        for key in (None, "wrong"):
            with pytest.raises(UsageError, match="API key"):
                await AsyncLeanQClient(gateway.url, key=key).__aenter__()
        monkeypatch.setenv("LEANQ_KEY", "s")
        async with AsyncLeanQClient(gateway.url) as lean:
            assert (await lean.check("-- rejected")).verdict == "rejected"
    for url in ("http://lean.example", "https://key@lean.example", "https://x/?a", "https://["):
        with pytest.raises(UsageError) as caught:
            AsyncLeanQClient(url)
        assert "key@" not in str(caught.value)
    AsyncLeanQClient("http://lean.example", insecure_http=True)
    with pytest.raises(UsageError, match="a key is for a gateway"):
        AsyncLeanQClient("redis://127.0.0.1:1", key="s")
    with pytest.raises(UnavailableError, match=r"no gateway answers at http://127\.0\.0\.1:1: "):
        await AsyncLeanQClient("http://127.0.0.1:1").__aenter__()
