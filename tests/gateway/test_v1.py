"""leanq's own interface: requests that are waited for, fetched later, withdrawn, and of tenants."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.gateway.gateways import STATE, Gateway, Scripted, key_file, new_gateway
from support.waiting import eventually

from leanq.gateway.keys import KeyFile
from leanq.queue.settings import Settings

PENDING = {"status": "pending"}


def problem(answer: httpx2.Response) -> tuple[int, str]:
    """The status and kind of a problem, which has all that RFC 9457 asks for."""
    assert answer.headers["Content-Type"] == "application/problem+json", answer.text
    found = answer.json()
    assert found["status"] == answer.status_code
    assert found["title"]
    assert found["detail"]
    return answer.status_code, found["type"].removeprefix("urn:leanq:")


async def test_the_end_is_waited_for_unless_the_caller_says_for_how_long(
    gateway: Gateway, scripted: Scripted, settings: Settings
) -> None:
    http = gateway.http
    answer = await http.post("/v1/check", json={"code": "-- incomplete"})
    assert answer.status_code == 200
    result = answer.json()
    assert (result["verdict"], result["sorries"][0]["state"]) == ("incomplete", STATE)

    held: dict[str, Any] = {"code": "-- held", "request_id": "mine"}
    answer = await http.post("/v1/check?wait=0", json=held)
    assert (answer.status_code, answer.json()) == (202, {"request_id": "mine", **PENDING})
    assert answer.headers["Location"] == "/v1/requests/mine"
    await eventually(lambda: len(scripted.running) == 1)
    # The same name is the same request, and no other one's.
    again = await http.post("/v1/check?wait=0.01", json=held)
    assert again.status_code == 202
    other_text = await http.post("/v1/check?wait=0.01", json={**held, "code": "-- rejected"})
    assert problem(other_text) == (409, "conflict")
    fetching = asyncio.create_task(http.get("/v1/requests/mine?wait=60"))
    async with new_gateway(settings) as other:
        assert (await other.http.get("/v1/requests/mine")).status_code == 202
        scripted.gate.set()
        ends = [await fetching, await other.http.get("/v1/requests/mine")]
    ends.append(await http.post("/v1/check", json=held))
    assert [(end.status_code, end.json()["verdict"]) for end in ends] == [(200, "accepted")] * 3
    assert [end.json()["request_id"] for end in ends] == ["mine"] * 3
    assert len(scripted.seen) == 2


async def test_a_request_is_withdrawn_by_its_name(gateway: Gateway, scripted: Scripted) -> None:
    http = gateway.http
    sent = await http.post("/v1/check?wait=0", json={"code": "-- held"})
    where = sent.headers["Location"]
    waiting = asyncio.create_task(http.get(f"{where}?wait=60"))
    await eventually(lambda: len(scripted.running) == 1)
    answers = [await http.delete(where), await waiting, await http.get(where)]
    assert [answer.json()["verdict"] for answer in answers] == ["cancelled"] * 3
    await eventually(lambda: len(scripted.stopped) == 1)

    await http.post("/v1/check", json={"code": "-- rejected", "request_id": "ended"})
    assert (await http.delete("/v1/requests/ended")).json()["verdict"] == "rejected"
    for unknown in (http.get, http.delete):
        assert problem(await unknown("/v1/requests/unknown")) == (404, "lost")
        assert problem(await unknown("/v1/requests/no%20name")) == (422, "invalid-request")


async def test_a_request_without_a_name_ends_with_its_connection(
    gateway: Gateway, scripted: Scripted
) -> None:
    async def leave(code: str, **fields: str) -> None:
        body = {"code": code, **fields}
        asked = asyncio.create_task(gateway.http.post("/v1/check", json=body))
        await eventually(lambda: code in scripted.running)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

    await leave("-- held named", request_id="named")
    await leave("-- held nameless")
    await eventually(lambda: scripted.stopped == ["-- held nameless"])
    assert scripted.running == ["-- held named"]
    scripted.gate.set()
    answer = await gateway.http.get("/v1/requests/named?wait=60")
    assert answer.json()["verdict"] == "accepted"


@contextlib.asynccontextmanager
async def tenants(
    settings: Settings, folder: Path, **limits: Any
) -> AsyncIterator[tuple[Gateway, dict[str, dict[str, str]]]]:
    """A gateway with two keys, whose limits are the first one's, and what each sends as its key."""
    file = key_file(folder, {"secret": "alice", **limits}, {"secret": "bob"})
    async with new_gateway(settings, keys=KeyFile(file)) as gateway:
        yield gateway, {who: {"Authorization": f"Bearer {who}"} for who in ("alice", "bob")}


async def test_a_key_sees_and_ends_its_own_tenants_requests_and_states_alone(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    async with tenants(settings, tmp_path) as (gateway, keys):
        http, held = gateway.http, {"code": "-- held", "request_id": "n"}
        alice, bob = ({"headers": keys[who]} for who in keys)
        await http.post("/v1/check?wait=0", json=held, **alice)
        await eventually(lambda: len(scripted.running) == 1)
        internal = "0-" + "x" * 12 + "~n"
        for name in ("n", "n?wait=1", internal):
            expected = (422, "invalid-request") if name == internal else (404, "lost")
            assert problem(await http.get(f"/v1/requests/{name}", **bob)) == expected
        assert problem(await http.delete("/v1/requests/n", **bob)) == (404, "lost")
        # The same name is another request of his.
        own = await http.post("/v1/check", json={**held, "code": "-- rejected"}, **bob)
        assert own.json()["verdict"] == "rejected"
        assert (await http.get("/v1/requests/n", **alice)).status_code == 202
        assert scripted.stopped == []

        made = await http.post("/v1/check", json={"code": "-- incomplete"}, **alice)
        state = made.json()["sorries"][0]["state"]
        assert state.startswith(STATE)
        step = {"state": state, "tactic": "exact h", "environment": "default"}
        # A verdict stands for the tactic's end; what matters is who may ask for one.
        assert (await http.post("/v1/step", json=step, **alice)).status_code == 200
        seen = len(scripted.seen)
        for tried in (state, STATE, f"{STATE}-", f"{STATE}-{'0' * 32}", "é" * 64):
            body = {**step, "state": tried}
            assert problem(await http.post("/v1/step", json=body, **bob)) == (404, "unknown-state")
            answer = await http.get(f"/v1/states/{tried}/export", **bob)
            assert problem(answer) == (404, "unknown-state")
        theirs = {"snippets": [{"id": "a", "code": "-- incomplete"}]}
        other = await http.post("/api/check", json=theirs, **bob)
        assert other.json()["results"][0]["leanq"]["states"] != [state]
        assert len(scripted.seen) == seen + 1
        assert problem(await http.get("/v1/status")) == (401, "about:blank")
        scripted.gate.set()
        await http.get("/v1/requests/n?wait=60", **alice)


async def test_the_limits_of_a_key_are_kept(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    limits = {"outstanding": 2, "body_mb": 1, "rights": ["submit"], "environments": ["default"]}
    async with tenants(settings, tmp_path, **limits) as (gateway, keys):
        http, alice = gateway.http, {"headers": keys["alice"]}
        for name in ("a", "b"):
            body = {"code": "-- held", "request_id": name}
            assert (await http.post("/v1/check?wait=0", json=body, **alice)).status_code == 202
        refused = await http.post("/v1/check", json={"code": "-- accepted"}, **alice)
        assert problem(refused) == (429, "about:blank")
        assert int(refused.headers["Retry-After"]) >= 1
        snippets = [{"id": str(number), "code": "-- accepted"} for number in range(3)]
        kimina = await http.post("/api/check", json={"snippets": snippets}, **alice)
        assert (kimina.status_code, "smaller batches" in kimina.json()["detail"]) == (413, True)
        assert (await http.post("/v1/check", json={"code": "--"}, headers=keys["bob"])).is_success
        scripted.gate.set()
        for name in ("a", "b"):
            await http.get(f"/v1/requests/{name}?wait=60", **alice)
        large = await http.post("/v1/check", json={"code": "x" * (1 << 20)}, **alice)
        assert large.status_code == 413
        other = {"code": "-- accepted", "environment": "other"}
        assert problem(await http.post("/v1/check", json=other, **alice)) == (403, "about:blank")
        assert problem(await http.get("/v1/status", **alice)) == (403, "about:blank")
        status = (await http.get("/v1/status", headers=keys["bob"])).json()
        assert (status["tenant"], status["outstanding"]) == ("bob", 0)
        [environment] = status["environments"]
        assert (environment["name"], environment["workers"]) == ("default", 1)


async def test_texts_that_wait_take_no_more_memory_than_their_key_allows(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    async with tenants(settings, tmp_path, outstanding_mb=1, body_mb=1) as (gateway, keys):
        http, alice = gateway.http, {"headers": keys["alice"]}
        held = {"code": f"-- held {'x' * 700_000}", "request_id": "large"}
        assert (await http.post("/v1/check?wait=0", json=held, **alice)).status_code == 202
        large = {"code": f"-- accepted {'x' * 700_000}"}
        refused = await http.post("/v1/check", json=large, **alice)
        assert problem(refused) == (429, "about:blank")
        assert refused.json()["detail"].startswith("the tenant's texts take the 1 MiB")
        assert (await http.post("/v1/check", json=large, headers=keys["bob"])).is_success
        # A batch waits where a single request is refused.
        lines = "".join(f"{json.dumps({'op': 'check', **large})}\n" for _ in range(3))
        batch = asyncio.create_task(http.post("/v1/batch", content=lines, **alice))
        await eventually(lambda: gateway.lean.outstanding_bytes("alice") > 1 << 20)
        scripted.gate.set()
        assert (await batch).text.count('"accepted"') == 3
        await http.get("/v1/requests/large?wait=60", **alice)
        assert gateway.lean.outstanding_bytes("alice") == 0
        assert (await http.post("/v1/check", json=large, **alice)).is_success


async def test_what_cannot_be_asked_is_a_problem_that_says_why(gateway: Gateway) -> None:
    http = gateway.http
    for body, kind in (
        ({}, "malformed"),
        ({"code": 1}, "malformed"),
        ({"code": "x", "unknown": 1}, "malformed"),
        ({"code": " "}, "invalid-request"),
        ({"code": "x", "priority": 7}, "invalid-request"),
        ({"code": "x", "timeout_s": 1e9}, "invalid-request"),
        ({"code": "x", "request_id": "a b"}, "invalid-request"),
        ({"code": "x", "traceparent": "?"}, "invalid-request"),
    ):
        assert problem(await http.post("/v1/check", json=body)) == (422, kind)
    unknown = {"code": "x", "environment": "nowhere"}
    answer = await http.post("/v1/check", json=unknown)
    assert problem(answer) == (404, "unknown-environment")
    assert problem(await http.get("/v1/nothing")) == (404, "about:blank")
    assert problem(await http.get("/v1/check")) == (405, "about:blank")
    octets = {"Content-Type": "application/octet-stream"}
    assert problem(await http.post("/v1/states", content=b"?", headers=octets)) == (422, "recipe")


@pytest.mark.slow
async def test_a_gateway_that_ends_hands_back_what_it_cannot_finish(
    settings: Settings, scripted: Scripted
) -> None:
    async with new_gateway(settings, grace_s=0.2) as gateway:
        body = {"code": "-- held", "request_id": "kept"}
        named = asyncio.create_task(gateway.http.post("/v1/check", json=body))
        snippets = {"snippets": [{"id": "a", "code": "-- held b"}]}
        nameless = asyncio.create_task(gateway.http.post("/api/check", json=snippets))
        await eventually(lambda: len(scripted.running) == 2)
        gateway.server.stop()
        answers = [await named, await nameless]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all(answer.headers["Retry-After"] for answer in answers)
    await eventually(lambda: scripted.stopped == ["-- held b"])
    scripted.gate.set()
    async with new_gateway(settings) as gateway:
        answer = await gateway.http.get("/v1/requests/kept?wait=60")
        assert answer.json()["verdict"] == "accepted"
