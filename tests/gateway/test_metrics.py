"""What a gateway tells of itself, to Prometheus and to load balancers."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.fleets import working
from support.gateway.gateways import Gateway, Scripted, key_file, new_gateway
from support.metrics import parsed
from support.servers import own_server
from support.waiting import eventually

from leanq.fleet.prometheus import exposition
from leanq.gateway.keys import KeyFile
from leanq.queue.settings import Settings


@pytest.fixture
async def scripted(settings: Settings) -> AsyncIterator[Scripted]:
    driver = Scripted()
    async with working(settings, driver, slots=16):
        yield driver


def values(gateway: Gateway) -> dict[tuple[str, ...], float]:
    """The gateway's samples by name and labels' values."""
    found = parsed(exposition(gateway.metrics.samples()))
    return {(*re.findall(r'^\w+|(?<=")[^",]+(?=")', name),): found[name] for name in found}


async def test_answers_are_counted_by_route_and_status(
    settings: Settings, scripted: Scripted
) -> None:
    async with new_gateway(settings) as gateway:
        http = gateway.http
        for _ in range(2):
            await http.post("/v1/check", json={"code": "x"})
        await http.post("/v1/check", json={})
        await gateway.check("x")
        await http.get("/v1/requests/a")
        await http.get("/v1/requests/b")
        for path in ("/nowhere", "/v1/nowhere", "/health"):
            await http.get(path)
        seen = values(gateway)
        total = "leanq_http_requests_total"
        assert seen[total, "/v1/check", "200"] == 2
        assert seen[total, "/v1/check", "422"] == 1
        assert seen[total, "/api/check", "200"] == 1
        # Not by path, of which callers can make up any number.
        assert seen[total, "/v1/requests/{request_id}", "404"] == 2
        assert seen[total, "none", "404"] == 2
        assert seen[total, "/health", "200"] == 1
        assert seen["leanq_http_request_seconds_count", "/v1/check"] == 3
        assert seen["leanq_http_outstanding",] == 0


@pytest.mark.slow
async def test_connections_and_a_loop_that_is_held_up_are_seen(
    settings: Settings, scripted: Scripted
) -> None:
    async with new_gateway(settings) as gateway:
        await gateway.http.get("/health")
        seen = values(gateway)
        assert seen["leanq_http_connections",] == 1
        assert seen["leanq_http_connections_limit",] > 100
        late_s = seen["leanq_http_late_seconds_total",]
        deadline_s = time.monotonic() + 60
        while values(gateway)["leanq_http_late_seconds_total",] < late_s + 0.5:
            assert time.monotonic() < deadline_s
            time.sleep(0.7)  # noqa: ASYNC251 - as a turn of the loop that is too long
            await asyncio.sleep(0)


async def test_open_streams_and_outstanding_requests_are_seen(
    settings: Settings, scripted: Scripted
) -> None:
    async with new_gateway(settings) as gateway:
        line = b'{"op": "check", "code": "-- held"}\n'
        batch = asyncio.create_task(gateway.http.post("/v1/batch", content=line))
        await eventually(lambda: len(scripted.running) == 1)
        seen = values(gateway)
        assert (seen["leanq_http_streams",], seen["leanq_http_outstanding",]) == (1, 1)
        scripted.gate.set()
        await batch
        await eventually(lambda: values(gateway)["leanq_http_streams",] == 0)
        assert values(gateway)["leanq_http_outstanding",] == 0


async def test_refusals_are_counted_by_their_reason(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    limits = {"outstanding": 1, "rights": ["submit"], "environments": ["default"]}
    file = key_file(tmp_path, {"secret": "alice", **limits})
    async with new_gateway(settings, keys=KeyFile(file)) as gateway:
        http, key = gateway.http, {"Authorization": "Bearer alice"}
        before = values(gateway)
        held = {"code": "-- held"}
        await http.post("/v1/check?wait=0", json=held, headers=key)
        await http.post("/v1/check", json=held, headers=key)
        await http.post("/v1/check", json={**held, "environment": "other"}, headers=key)
        await http.get("/v1/status", headers=key)
        await http.get("/v1/status")
        await http.get("/v1/status", headers={"Authorization": "Bearer bob"})
        await http.get("/v1/status", headers={**key, "Origin": "http://elsewhere"})
        seen = values(gateway)
        name = "leanq_http_refusals_total"
        for reason in ("outstanding", "environment", "right", "no key", "unknown key", "origin"):
            assert seen[name, reason] - before.get((name, reason), 0) == 1, reason
        scripted.gate.set()


@pytest.mark.slow
async def test_a_gateway_is_ready_while_its_queue_answers_and_it_goes_on() -> None:
    with own_server() as server:
        async with new_gateway(server.settings) as gateway:
            http = gateway.http
            assert (await http.get("/ready")).status_code == 200
            server.send(signal.SIGSTOP)
            try:
                assert await _comes_to(gateway, 503)
                assert (await http.get("/health")).status_code == 200
            finally:
                server.send(signal.SIGCONT)
            assert await _comes_to(gateway, 200)
            gateway.readiness.ending = True
            answer = await http.get("/ready")
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")


async def _comes_to(gateway: Gateway, status: int) -> bool:
    for _ in range(300):
        if (await gateway.http.get("/ready")).status_code == status:
            return True
        await asyncio.sleep(0.1)
    return False
