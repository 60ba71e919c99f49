"""The interface of Kimina Lean Server, by the requests that its clients send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.fleets import working
from support.gateway.gateways import Gateway, Scripted, key_file, new_gateway
from support.gateway.kimina_reading import reading
from support.queue.queues import Queue
from support.waiting import eventually

from leanq import AsyncLeanQClient
from leanq.errors import InvalidRequestError
from leanq.gateway.access import Access
from leanq.gateway.app import make_app
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import MAX_BODY_MB, KeyFile
from leanq.queue.requests import Reply, Tactic
from leanq.queue.settings import Settings

JSON = {"Content-Type": "application/json"}
VERDICTS = ("accepted", "incomplete", "rejected", "timeout", "crashed", "unverified", "unjudged")


@pytest.fixture
async def alone() -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a gateway that has no queue."""
    lean = GatewayClient("redis://127.0.0.1:1")
    app = make_app(lean, Access(None, "default"), ("named", "*.inner"))
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


async def test_each_text_has_its_own_end_in_the_order_of_the_request(gateway: Gateway) -> None:
    words = [VERDICTS[number % len(VERDICTS)] for number in range(100)]
    codes = [f"-- {word} {number}" for number, word in enumerate(words)]
    results = await gateway.check(*codes, "nul \0 is no Lean", "", "  \n")
    verdicts = [result["leanq"]["verdict"] for result in results if "leanq" in result]
    assert verdicts == [*words, "accepted", "accepted"]
    assert "NUL" in results[100]["error"]
    assert len({result["leanq"]["request_id"] for result in results if "leanq" in result}) == 102


async def test_the_older_interface_answers_likewise_and_has_both_fields(gateway: Gateway) -> None:
    codes: list[dict[str, Any]] = [
        {"custom_id": 1, "proof": "-- incomplete", "code": "-- rejected"},
        {"custom_id": "1", "proof": None, "code": "-- timeout"},
        {"custom_id": 1},
        {"custom_id": 1, "proof": ""},
    ]
    for route in ("/verify", "/one_pass_verify_batch"):
        answer = await gateway.http.post(
            route, json={"codes": codes, "timeout": 7, "disable_cache": True}
        )
        results = answer.json()["results"]
        assert [result["custom_id"] for result in results] == [1, "1", 1, 1]
        assert [reading(result) for result in results] == [
            *("sorry", "timeout_error", "server_error", "valid")
        ]
        assert all({"error", "response"} <= result.keys() for result in results)
        assert results[3]["response"].keys() == {"env", "time"}
    empty = await gateway.http.post("/verify", json={"codes": []})
    assert empty.json() == {"results": []}


async def test_the_header_and_the_rest_have_the_whole_timeout_each(
    gateway: Gateway, scripted: Scripted
) -> None:
    await gateway.check("import A\n-- x", "-- y", timeout=20)
    await gateway.check("-- z", timeout=0)
    budgets = {request.code[-1]: request.timeout_s for request in scripted.seen}
    assert budgets == {"x": 40, "y": 20, "z": 0.01}


async def test_the_work_of_a_client_that_went_away_is_withdrawn(
    gateway: Gateway, scripted: Scripted, swept: None
) -> None:
    held = [{"id": str(number), "code": f"-- held {number}"} for number in range(30)]
    asked = asyncio.create_task(gateway.http.post("/api/check", json={"snippets": held}))
    await eventually(lambda: len(scripted.running) == 16)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    await eventually(lambda: len(scripted.stopped) == 16)
    # Others are served, and none of the 14 that waited is begun.
    [result] = await gateway.check("-- rejected")
    assert reading(result) == "lean_error"
    assert len(scripted.seen) == 17


async def test_an_environment_is_chosen_by_its_name(gateway: Gateway, settings: Settings) -> None:
    async with working(settings, Scripted("other")):
        [result] = await gateway.check("-- accepted", environment="other")
        assert reading(result) == "valid"
        [unknown] = await gateway.check("-- accepted", environment="nowhere")
    assert "no worker has ever offered the environment 'nowhere'" in unknown["error"]
    [malformed] = await gateway.check("-- accepted", environment="no name")
    assert "not a valid name" in malformed["error"]


async def test_a_text_with_an_infotree_is_refused_and_the_error_names_goals(
    gateway: Gateway, scripted: Scripted
) -> None:
    [refused] = await gateway.check("-- tree", infotree="full")
    assert reading(refused) == "server_error"
    codes = [{"custom_id": 1, "proof": "-- tree"}]
    asked = {"codes": codes, "infotree_type": "original"}
    [result] = (await gateway.http.post("/verify", json=asked)).json()["results"]
    for error in (refused["error"], result["error"]):
        assert "(goals)" in error
    assert scripted.seen == []


async def test_the_goals_before_tactics_by_our_own_interface_and_client(
    gateway: Gateway, scripted: Scripted
) -> None:
    tactics = (Tactic(1, 2, ("⊢ p", "⊢ q")), Tactic(2, 2, ("⊢ q",)))
    scripted.replies = {"-- goals": Reply("accepted", tactics=tactics)}
    result = (await gateway.http.post("/v1/check", json={"code": "-- goals", "goals": True})).json()
    assert result["tactics"][1] == {"line": 2, "column": 2, "goals": ["⊢ q"]}
    assert "tactics" not in (await gateway.http.post("/v1/check", json={"code": "-- x"})).json()
    async with AsyncLeanQClient(gateway.url) as lean:
        assert (await lean.check("-- goals", goals=True)).tactics == tactics
        assert (await lean.verify("-- target", "-- goals", goals=True)).tactics == tactics
        with pytest.raises(InvalidRequestError, match="a step does not tell the goals"):
            await lean.step("0" * 64, "exact h", goals=True)
        with pytest.raises(InvalidRequestError, match="goals must be"):
            await lean.check("-- x", goals="all")  # type: ignore[arg-type]
    assert [request.goals for request in scripted.seen] == [True, False, True, True]


def _with(**fields: Any) -> dict[str, Any]:
    return {"snippets": [{"id": "a", "code": "x"}], **fields}


MALFORMED: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("/api/check", _with(snippets=[]), ["snippets"]),
    ("/api/check", _with(snippets=[{"id": "a", "code": "x"}] * 2), ["snippets"]),
    ("/api/check", _with(snippets=[{"id": "a"}]), ["snippets", 0, "code"]),
    ("/api/check", _with(snippets=[{"id": "\ud800", "code": "x"}]), []),
    ("/api/check", _with(snippets=[1] * 3), ["snippets", 0]),
    ("/verify", {"codes": [{}, {}]}, ["codes", 0, "custom_id"]),
    ("/api/check", _with(timeout=-1), ["timeout"]),
    ("/api/check", _with(timeout=1e300), ["timeout"]),
    ("/api/check", _with(infotree="some"), ["infotree"]),
    ("/verify", {}, ["codes"]),
    ("/verify", {"codes": [{"custom_id": 1}], "timeout": 10**6}, ["timeout"]),
]


async def test_a_malformed_request_is_422_and_says_where(alone: httpx2.AsyncClient) -> None:
    for route, body, where in MALFORMED:
        answer = await alone.post(route, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 422
        assert [detail["loc"] for detail in answer.json()["detail"]] == [["body", *where]]


async def test_bytes_that_are_no_request_are_refused(alone: httpx2.AsyncClient) -> None:
    for body in (b"", b"{", b"[" * 100_000, b'"\xff"', b"1e999", b'{"snippets":' + b"9" * 5000):
        answer = await alone.post("/api/check", content=body, headers=JSON)
        assert answer.status_code in (400, 422), (body[:20], answer.status_code)
    too_many = {**JSON, "Content-Length": str((MAX_BODY_MB << 20) + 1)}
    assert (await alone.post("/api/check", headers=too_many)).status_code == 413


async def test_health_needs_no_key_and_everything_else_does(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    file = key_file(tmp_path, {"secret": "s1", "tenant": "alice", "environments": ["default"]})
    async with new_gateway(settings, keys=KeyFile(file)) as gateway:
        for path in ("/health", "/health/", "/"):
            answer = await gateway.http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        body = {"snippets": [{"id": "a", "code": "-- accepted"}]}

        async def ask(**headers: str) -> tuple[int, Any]:
            answer = await gateway.http.post("/api/check/", json=body, headers=headers)
            return answer.status_code, answer.json().get("detail")

        assert await ask() == (401, "Missing API key")
        for missing in ("Bearer None", "Bearer", "None"):
            assert await ask(Authorization=missing) == (401, "Missing API key")
        for invalid in ("s2", "Bearer s2", "Bearer s1x", "Basic s1", "Bearer s1 s1"):
            assert await ask(Authorization=invalid) == (401, "Invalid API key")
        for valid in ("s1", "Bearer s1", "bearer  s1"):
            assert await ask(Authorization=valid) == (200, None)
        body["environment"] = "other"  # type: ignore[assignment]
        code, detail = await ask(Authorization="s1")
        assert code == 403
        assert "may not use the environment 'other'" in detail


async def test_a_request_is_of_its_keys_tenant_and_first_environment(
    settings: Settings, queue: Queue, tmp_path: Path
) -> None:
    file = key_file(tmp_path, {"secret": "s", "tenant": "alice", "environments": ["e2", "e1"]})
    first, second = Scripted("e1"), Scripted("e2")
    async with (
        working(settings, first, second, slots=1),
        new_gateway(settings, keys=KeyFile(file)) as gateway,
    ):
        gateway.http.headers["Authorization"] = "Bearer s"
        asked = asyncio.create_task(gateway.check("-- held", "-- x", "-- y"))
        await eventually(lambda: len(second.running) == 1)
        waiting = f"{queue.keys.tag}:wait:e2:1:alice"
        assert await queue.call(lambda connection: connection.llen(waiting)) == 2
        second.gate.set()
        await asked
    assert (len(first.seen), len(second.seen)) == (0, 3)


async def test_other_hosts_and_other_sites_are_refused(alone: httpx2.AsyncClient) -> None:
    async def ask(**headers: str) -> int:
        return (await alone.get("/health", headers=headers)).status_code

    assert await ask(Host="evil.example") == 400
    assert await ask(Origin="http://evil.example") == 403
    assert await ask(Origin="http://[") == 403
    assert await ask(Origin="null") == 403
    for host in ("localhost", "localhost:1", "127.0.0.1:8000", "[::1]:8000", "a.inner", "Named"):
        assert await ask(Host=host) == 200
        assert await ask(Host=host, Origin=f"https://{host}") == 200
        # Other names are reached over TLS, which a proxy ends.
        of_this_machine = host not in ("a.inner", "Named")
        without_tls = await ask(Host=host, Origin=f"http://{host}")
        assert without_tls == (200 if of_this_machine else 403)
        assert await ask(Host=host, Origin=f"ftp://{host}") == 403
    answer = await alone.options("/api/check", headers={"Origin": "http://localhost"})
    assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_the_description_of_the_interface_has_no_page_that_loads_programs(
    alone: httpx2.AsyncClient,
) -> None:
    answer = await alone.get("/api/openapi.json")
    assert {"/api/check", "/verify", "/health"} <= answer.json()["paths"].keys()
    for page in ("/docs", "/redoc"):
        assert (await alone.get(page)).status_code == 404


@pytest.mark.slow
async def test_a_large_batch_lets_other_requests_have_their_turn(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = longest = 0
    submit = GatewayClient.submit

    def counted(*how: Any) -> Any:
        nonlocal sent
        sent += 1
        return submit(*how)

    monkeypatch.setattr(GatewayClient, "submit", counted)
    asked = asyncio.create_task(gateway.check(*(f"-- x {number}" for number in range(2000))))
    while not asked.done():
        before = sent
        await asyncio.sleep(0)
        longest = max(longest, sent - before)
    assert len(await asked) == sent == 2000
    assert longest <= 100


async def test_batches_that_are_sent_in_turns_keep_to_the_limit_together(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    file = key_file(tmp_path, {"secret": "s", "outstanding": 250})
    async with new_gateway(settings, keys=KeyFile(file)) as gateway:
        gateway.http.headers["Authorization"] = "Bearer s"
        texts = [{"id": str(number), "code": "-- held"} for number in range(150)]
        asked = [
            asyncio.create_task(gateway.http.post("/api/check", json={"snippets": texts}))
            for _ in range(3)
        ]
        await eventually(lambda: sum(each.done() for each in asked) == 2)
        assert gateway.lean.all_outstanding() == 150
        scripted.gate.set()
        assert sorted([(await each).status_code for each in asked]) == [200, 429, 429]
