"""Connections that are made to cost the gateway more than their client, or to mislead it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
from collections import Counter

import pytest
from support.gateway.gateways import GATEWAY_TIMEOUT_S, Gateway, Scripted
from support.waiting import eventually
from uvicorn.protocols.http.h11_impl import H11Protocol

from leanq.gateway import server as server_module
from leanq.gateway.limits import Connection, Connections

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
        # What it has sent meanwhile may be answered with a reset.
        with contextlib.suppress(ConnectionResetError):
            assert await slow.read() == b""
        # The first request has its answer.
        assert (await again.read()).count(b"200 OK") == 1
        task.cancel()
    for writer in (never, dripping, second):
        writer.close()


async def test_a_body_may_take_its_time(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEAD_S", 0.2)
    monkeypatch.setattr(server_module, "_BODY_S", 60.0)
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


async def test_an_ended_connection_leaves_no_garbage_that_only_the_collector_finds(
    gateway: Gateway,
) -> None:
    """Under a flood of connections, each collection would stop the loop."""

    def left() -> Counter[str]:
        known = ("_Protocol", "_Connection", "RequestResponseCycle")
        return Counter(name for o in gc.get_objects() if (name := type(o).__name__) in known)

    async def ask(data: bytes) -> None:
        reader, writer = await connect(gateway)
        writer.write(data)
        if data:
            await reader.read(1)
        writer.close()

    gc.collect()
    gc.disable()
    try:
        before = left()
        for data in (b"", HEALTH + b"\r\n", LOGIN + b"\r\n012345678"):
            for _ in range(5):
                await ask(data)
        await eventually(lambda: left() <= before)
    finally:
        gc.enable()


LOGIN = b"POST /page/login HTTP/1.1\r\nOrigin: http://localhost\r\nContent-Length: 9\r\n" + HOST
CHECK = b"POST /v1/check HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n" + HOST


@pytest.mark.parametrize("head", [LOGIN, CHECK, LOGIN.replace(b"login", b"check")])
async def test_a_body_that_does_not_come_is_not_waited_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(server_module, "_HEAD_S", 0.3)
    monkeypatch.setattr(server_module, "_BODY_S", 0.3)
    monkeypatch.setattr(server_module, "_BODY_BYTES_PER_S", 100)
    reader, writer = await connect(gateway)
    writer.write(head + b"\r\n")
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        assert await reader.read() == b""
    writer.close()


async def test_the_body_of_a_batch_and_an_answer_may_take_their_time(
    gateway: Gateway, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HEAD_S", 0.1)
    monkeypatch.setattr(server_module, "_BODY_S", 0.1)
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


CHUNKED = b"POST /v1/check HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(("size", "taken"), [(1, False), (20, False), (64, True)])
async def test_a_body_in_tiny_chunks_is_refused(gateway: Gateway, size: int, taken: bool) -> None:
    code = b'{"code":"-- accepted' + b" " * 64 * 5000 + b'"}'
    chunks = [code[at : at + size] for at in range(0, len(code), size)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    reader, writer = await connect(gateway)
    head = CHUNKED + b"Content-Type: application/json\r\n" + HOST + b"\r\n"
    writer.write(head + body + b"0\r\n\r\n")
    answer = b""
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        # What it has sent meanwhile may be answered with a reset.
        with contextlib.suppress(ConnectionResetError):
            answer = await reader.read()
    assert (b'"verdict":"accepted"' in answer) == taken
    writer.close()


_LINES = b"X: y\r\n" * 5000
_LONG = b"X: " + b"y" * 20_000 + b"\r\n"
_CHUNKS = b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"\r\n0\r\n"


@pytest.mark.parametrize(
    "data",
    [
        HEALTH + _LINES,
        (HEALTH + _LINES).replace(b"\r\n", b"\n"),
        HEALTH + b"X: y\r\n" + _LINES.replace(b"X:", b" "),
        HEALTH + _LONG,
        _CHUNKS + _LINES,
        _CHUNKS + _LONG,
    ],
)
async def test_long_heads_and_trailers_are_refused_before_they_take_long_to_read(
    gateway: Gateway, data: bytes
) -> None:
    """A stranger's head of 64 KiB would stop the loop for 80 ms."""
    reader, writer = await connect(gateway)
    writer.write(data + b"\r\n")
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        said = await reader.read()
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"The headers are too long: a request may have 100 lines and 16384 bytes" in said
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
    gateway: Gateway, caplog: pytest.LogCaptureFixture, path: bytes
) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"\r\n"
    reader, writer = await connect(gateway)
    writer.write(head)
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"this is no chunk\r\n")
        await reader.read()
    writer.close()
    assert not caplog.records


async def test_no_connection_is_upgraded(gateway: Gateway) -> None:
    reader, writer = await connect(gateway)
    asks = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    writer.write(HEALTH + asks + key + b"\r\n")
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        assert b'"ok"' in await reader.readuntil(b'"ok"}')
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("each_sends", [1, 50])
async def test_many_requests_of_one_caller_keep_no_other_waiting(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, each_sends: int
) -> None:
    answered: list[str] = []
    protocol = vars(server_module)["_Protocol"]
    end = protocol.on_response_complete

    def noted(connection: H11Protocol) -> None:
        assert connection.client
        answered.append("known" if connection.client[1] == port else "stranger")
        end(connection)

    body = b'{"code":"-- accepted"}'
    known, writer = await connect(gateway)
    port = writer.get_extra_info("sockname")[1]
    writer.write(CHECK.replace(b": 9", b": %d" % len(body)) + b"\r\n" + body)
    opened = [await connect(gateway) for _ in range(100)]
    pipelined = min(10, each_sends)
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        await known.readuntil(b'"accepted"')
        # The gateway has put away the first request once it answers the second.
        writer.write(HEALTH + b"\r\n")
        await known.readuntil(b'"ok"')
        # A client's own order of reading says nothing.
        monkeypatch.setattr(protocol, "on_response_complete", noted)
        for _, each in opened:
            each.write((HEALTH + b"\r\n") * each_sends)
        writer.write((HEALTH + b"\r\n") * pipelined)
        for _ in range(pipelined):
            await known.readuntil(b'"ok"')
        for reader, _ in opened:
            for _ in range(each_sends):
                await reader.readuntil(b'"ok"')
    assert answered.count("stranger") == 100 * each_sends
    # Without turns, each of the hundred strangers is answered as often as this one.
    *_, last = (n for n, who in enumerate(answered) if who == "known")
    assert last < 50 * pipelined
    for _, each in (*opened, (known, writer)):
        each.close()


async def test_half_a_head_takes_no_turn(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or slow heads would make a whole request of the same peer wait, and give way."""
    deferred = 0
    defers = Connections.defers

    def counted(connections: Connections, connection: Connection) -> None:
        nonlocal deferred
        deferred += 1
        defers(connections, connection)

    monkeypatch.setattr(Connections, "defers", counted)
    opened = [await connect(gateway) for _ in range(100)]
    probe, writer = await connect(gateway)
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        for piece in (HEALTH[:20], HEALTH[20:], b"X-Slow: 1\r\n"):
            for _, each in opened:
                each.write(piece)
            writer.write(HEALTH + b"\r\n")
            await probe.readuntil(b'"ok"')
        assert deferred == 0
        # A line feed alone ends a head, too.
        for end, (_, each) in zip(itertools.cycle((b"\r\n", b"\n")), opened, strict=False):
            each.write(end)
        for reader, each in opened:
            await reader.readuntil(b'"ok"')
            each.close()
    assert deferred > 0
    writer.close()


async def test_what_waits_for_its_turn_is_read_whole_and_in_order(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"code":"-- rejected"}'
    data = CHECK.replace(b": 9", b": %d" % len(body)) + b"\r\n" + body
    opened = [await connect(gateway) for _ in range(60)]
    for piece in (data[:50], data[50:-9], data[-9:] + HEALTH + b"\r\n"):
        for _, writer in opened:
            writer.write(piece)
        await asyncio.sleep(0)
    for _, writer in opened[40:]:
        # It leaves while it waits.
        writer.transport.abort()
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        for reader, writer in opened[:40]:
            said = await reader.readuntil(b'"ok"')
            assert said.count(b"200 OK") == 2
            assert b'"verdict":"rejected"' in said
            writer.close()
    # The worker may say that it was too late for a client that left.
    assert not [each for each in caplog.records if each.name != "leanq.worker"]


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
