"""Connections that are made to cost the gateway more than their client, or to mislead it."""

from __future__ import annotations

import asyncio

import pytest
from support.gateways import GATEWAY_TIMEOUT_S, Gateway

from leanq.gateway import server as server_module

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST


async def connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def test_a_head_that_does_not_come_to_its_end_is_not_waited_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HEAD_S", 0.3)
    silent, never = await connect(gateway)
    slow, dripping = await connect(gateway)
    again, second = await connect(gateway)
    second.write(HEALTH + b"\r\n" + HEALTH)
    dripping.write(HEALTH)

    async def drip() -> None:
        while not dripping.is_closing():
            dripping.write(b"X-A: b\r\n")
            await asyncio.sleep(0.05)

    async with asyncio.timeout(GATEWAY_TIMEOUT_S), asyncio.TaskGroup() as group:
        task = group.create_task(drip())
        assert await silent.read() == b""
        assert await slow.read() == b""
        # The first request has its answer.
        assert (await again.read()).count(b"200 OK") == 1
        task.cancel()
    for writer in (never, dripping, second):
        writer.close()


async def test_a_body_may_take_its_time(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEAD_S", 0.2)
    reader, writer = await connect(gateway)
    writer.write(
        b"POST /v1/check HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        + HOST
        + b"Content-Length: 22\r\n\r\n"
    )
    for byte in b'{"code":"-- accepted"}':
        writer.write(bytes((byte,)))
        await asyncio.sleep(0.02)
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        assert b'"verdict":"accepted"' in await reader.read()
    writer.close()


async def test_a_request_that_says_its_length_twice_is_refused_and_nothing_behind_it_is_read(
    gateway: Gateway,
) -> None:
    reader, writer = await connect(gateway)
    writer.write(
        b"POST /v1/check HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n"
        + HOST
        + b"\r\n0\r\n\r\n"
        + HEALTH
        + b"\r\n"
    )
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        said = await reader.read()
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"400 Bad Request" in said
    writer.close()
