"""Answers that their readers do not take: they take no more of a gateway than bodies do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.gateway.gateways import GATEWAY_TIMEOUT_S, Gateway, Scripted, key_file, new_gateway
from support.waiting import eventually

from leanq.gateway.keys import KeyFile
from leanq.queue.requests import Message, Reply
from leanq.queue.settings import Settings

# More than the kernel takes for a reader that reads nothing.
BIG_BYTES = 16 << 20
HEADERS = {"Authorization": "Bearer alice"}


@contextlib.asynccontextmanager
async def small_gateway(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> AsyncIterator[Gateway]:
    """A gateway with a key whose requests may take 8 MiB of it, and the reply ``big``."""
    text = "x" * BIG_BYTES
    scripted.replies["-- big"] = Reply(
        "rejected", (Message("error", 1, 0, text),), (), reason="lean_error"
    )
    limits = {"outstanding_mb": 8, "body_mb": 8}
    keys = KeyFile(key_file(tmp_path, {"secret": "alice", **limits}, {"secret": "bob", **limits}))
    async with new_gateway(settings, keys=keys, grace_s=0.2) as opened:
        asked = {"code": "-- big", "request_id": "big"}
        answer = await opened.http.post("/v1/check", json=asked, headers=HEADERS)
        assert len(answer.content) > BIG_BYTES
        yield opened


@pytest.fixture
async def gateway(settings: Settings, scripted: Scripted, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with small_gateway(settings, scripted, tmp_path) as opened:
        yield opened


async def ask(gateway: Gateway, line: str, body: bytes = b"") -> socket.socket:
    """A connection on which a request was sent, and nothing is read."""
    made = socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2])))
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer alice\r\n"
    made.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    made.setblocking(False)
    return made


async def read(sock: socket.socket, pause_s: float = 0.0) -> int:
    """Reads an answer to its end or to where it is cut; returns how many bytes came."""
    loop, came = asyncio.get_running_loop(), 0
    async with asyncio.timeout(GATEWAY_TIMEOUT_S):
        while came < BIG_BYTES and (data := await loop.sock_recv(sock, 1 << 20)):
            came += len(data)
            await asyncio.sleep(pause_s)
    return came


async def status(gateway: Gateway, tenant: str = "alice") -> int:
    headers = {"Authorization": f"Bearer {tenant}"}
    return (await gateway.http.get("/v1/status", headers=headers)).status_code


async def until(gateway: Gateway, expected: int) -> None:
    """Waits until a request of the key has this status."""

    async def has_come() -> bool:
        return await status(gateway) == expected

    await eventually(has_come)


FETCH = ("GET /v1/requests/big", b"")
BATCH = ("POST /v1/batch", json.dumps({"op": "check", "code": "-- big"}).encode())


@pytest.mark.parametrize(("line", "body"), [FETCH, BATCH])
async def test_answers_count_until_they_are_read(gateway: Gateway, line: str, body: bytes) -> None:
    with await ask(gateway, line, body) as unread:
        await until(gateway, 429)
        # Another tenant has a limit of its own.
        assert await status(gateway, "bob") == 200
        await read(unread)
        await until(gateway, 200)


async def test_an_answer_that_is_read_slowly_is_read_to_its_end(gateway: Gateway) -> None:
    with await ask(gateway, *FETCH) as slow:
        assert await read(slow, pause_s=0.02) >= BIG_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("line", "body"), [FETCH, BATCH])
async def test_a_gateway_ends_beside_an_answer_that_nobody_reads(
    settings: Settings,
    scripted: Scripted,
    tmp_path: Path,
    line: str,
    body: bytes,
) -> None:
    async with small_gateway(settings, scripted, tmp_path) as gateway:
        unread = await ask(gateway, line, body)
        await until(gateway, 429)
    unread.close()
