"""Connections that are made to cost the gateway more than their client, or to mislead it."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.gateway.gateways import GATEWAY_TIMEOUT_S, Gateway, Scripted
from support.waiting import eventually

from leanq.gateway import connections

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST


async def connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def test_a_body_may_take_its_time(gateway: Gateway) -> None:
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


LOGIN = b"POST /page/login HTTP/1.1\r\nOrigin: http://localhost\r\nContent-Length: 9\r\n" + HOST
CHECK = b"POST /v1/check HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n" + HOST


@pytest.mark.parametrize("head", [LOGIN, CHECK, LOGIN.replace(b"login", b"check")])
async def test_a_body_that_does_not_come_is_not_waited_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(connections, "_BODY_S", 0.3)
    monkeypatch.setattr(connections, "_BODY_BYTES_PER_S", 100)
    reader, writer = await connect(gateway)
    writer.write(head + b"\r\n")
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_the_body_of_a_batch_and_an_answer_may_take_their_time(
    gateway: Gateway, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_BODY_S", 0.1)
    reader, writer = await connect(gateway)
    head = b"POST /v1/batch HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
    writer.write(head + HOST + b"\r\n")
    held = b'{"op": "check", "code": "-- held"}\n'
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        await asyncio.sleep(0.5)
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(held), held))
        await eventually(lambda: scripted.running == ["-- held"])
        await asyncio.sleep(0.5)
        scripted.gate.set()
        assert b'"verdict":"accepted"' in await reader.read()
    writer.close()


async def test_a_head_with_many_usual_headers_is_read(gateway: Gateway) -> None:
    headers = {f"X-Header-{number}": "v" * 150 for number in range(80)}
    assert (await gateway.http.get("/health", headers=headers)).status_code == 200


async def test_a_client_that_leaves_amid_its_body_is_a_line_for_debugging_alone(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "leanq.gateway")
    for head in (LOGIN, CHECK, LOGIN.replace(b"login", b"check")):
        _, writer = await connect(gateway)
        writer.write(head + b"\r\n")
        await writer.drain()
        writer.close()
    await eventually(lambda: len([m for m in caplog.messages if m.endswith("has gone")]) == 3)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("path", [b"/v1/batch", b"/nowhere"])
async def test_a_malformed_end_of_a_body_behind_an_answer_ends_the_connection(
    gateway: Gateway, path: bytes
) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"\r\n"
    reader, writer = await connect(gateway)
    writer.write(head)
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"this is no chunk\r\n")
        await reader.read()
    writer.close()
    # The server logs it as a fault of its own.
    assert (await gateway.http.get("/health")).status_code == 200


async def test_no_connection_is_upgraded(gateway: Gateway) -> None:
    reader, writer = await connect(gateway)
    asks = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    writer.write(HEALTH + asks + key + b"\r\n")
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        assert b'"ok"' in await reader.readuntil(b'"ok"}')
    writer.close()


@pytest.mark.usefixtures("swept")
async def test_a_client_that_closes_its_sending_half_has_left(
    gateway: Gateway, scripted: Scripted
) -> None:
    body = b'{"code":"-- held"}'
    reader, writer = await connect(gateway)
    writer.write(CHECK.replace(b": 9", b": %d" % len(body)) + b"\r\n" + body)
    await eventually(lambda: len(scripted.running) == 1)
    writer.write_eof()
    # No answer comes, and Lean stops as it does for any client that leaves.
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        assert await reader.read() == b""
    await eventually(lambda: scripted.stopped == ["-- held"])
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
