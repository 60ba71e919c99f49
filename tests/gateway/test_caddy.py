"""A gateway behind the Caddyfile that is shipped: what the proxy keeps away from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
from support.cluster import free_ports
from support.gateway.gateways import GATEWAY_TIMEOUT_S, Gateway, Scripted
from support.gateway.proxies import caddy
from support.waiting import eventually

HEAD_S = 1
HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
async def port(gateway: Gateway) -> AsyncIterator[int]:
    """The proxy's port."""
    [port] = free_ports(1)
    async with caddy(gateway.url.removeprefix("http://"), port, HEAD_S):
        yield port


async def test_silent_connections_and_slow_heads_do_not_reach_the_gateway(
    gateway: Gateway, port: int
) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    for _, writer in opened[50:]:
        writer.write(HEAD)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert len(gateway.server.connections.held) < 10
        async with asyncio.timeout(GATEWAY_TIMEOUT_S):
            # Heads that do not come to their end are not waited for.
            for reader, writer in opened[50:]:
                await reader.read()
                writer.close()
    for _, writer in opened[:50]:
        writer.close()


async def test_a_long_head_is_refused_by_the_proxy(gateway: Gateway, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"X: y\r\n" * 10_000 + b"\r\n")
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        assert b" 431 " in await reader.read(64)
    writer.close()
    assert not gateway.server.connections.held


async def test_results_of_a_batch_come_one_by_one(
    gateway: Gateway, scripted: Scripted, port: int
) -> None:
    lines = "".join(
        f"{json.dumps({'op': 'check', 'code': f'-- {word}'})}\n" for word in ("held", "rejected")
    )
    async with (
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=GATEWAY_TIMEOUT_S) as http,
        http.stream("POST", "/v1/batch", content=lines) as answer,
    ):
        results = answer.aiter_lines()
        assert '"rejected"' in await anext(results)
        await eventually(lambda: scripted.running == ["-- held"])
        scripted.gate.set()
        assert '"accepted"' in await anext(results)


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_batch_ends_with_its_client(
    gateway: Gateway, scripted: Scripted, port: int, is_whole: bool
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    line = b'{"op": "check", "code": "-- held"}\n'
    head = b"POST /v1/batch HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    end = b"0\r\n\r\n" if is_whole else b""
    writer.write(head + b"%x\r\n%b\r\n" % (len(line), line) + end)
    await eventually(lambda: scripted.running == ["-- held"])
    writer.close()
    await eventually(lambda: scripted.stopped == ["-- held"])
