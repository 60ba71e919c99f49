"""Batches: requests that are read while the results of others are sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.gateway.gateways import Gateway, Scripted, key_file, new_gateway
from support.waiting import eventually

from leanq.gateway.keys import KeyFile
from leanq.queue.requests import Message, Reply
from leanq.queue.settings import Settings

TIMEOUT_S = 60.0


def line(code: str, **fields: Any) -> bytes:
    return json.dumps({"op": "check", "code": code, **fields}).encode() + b"\n"


class Sender:
    """A client that sends the lines of a batch one by one, and reads what comes meanwhile."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def result(self) -> dict[str, Any]:
        """The next line of the answer, whose head and chunks are passed over."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                read = await self._reader.readline()
                assert read, "the answer has ended"
                if read.startswith(b'{"index"'):
                    found: dict[str, Any] = json.loads(read)
                    return found

    async def rest(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            return await self._reader.read()


@contextlib.asynccontextmanager
async def sending(gateway: Gateway, key: str = "") -> AsyncIterator[Sender]:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    # So that the kernel holds little of what is not read.
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.write(
        b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Authorization: %s\r\n"
        b"Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n" % key.encode()
    )
    try:
        yield Sender(reader, writer)
    finally:
        writer.close()


async def test_results_come_as_they_end_and_before_the_last_request_is_sent(
    gateway: Gateway, scripted: Scripted
) -> None:
    async with sending(gateway) as sender:
        await sender.send(line("-- held", id="slow") + line("-- incomplete", id=7))
        first = await sender.result()
        assert (first["index"], first["id"], first["result"]["verdict"]) == (1, 7, "incomplete")
        half, rest = line("-- rejected")[:10], line("-- rejected")[10:]
        await sender.send(half)
        await sender.send(rest + b"\n nonsense\n" + line("", id="x") + b'{"op":"other"}\n')
        others = sorted([await sender.result() for _ in range(4)], key=lambda each: each["index"])
        assert others[0]["result"]["verdict"] == "rejected"
        problems = [each["problem"]["type"].removeprefix("urn:leanq:") for each in others[1:]]
        assert problems == ["malformed", "invalid-request", "malformed"]
        scripted.gate.set()
        # Without a newline at its end.
        await sender.send(line("-- accepted", id="last").rstrip())
        await sender.send(b"")
        ends = {each["id"] for each in [await sender.result(), await sender.result()]}
        assert ends == {"slow", "last"}
        assert (await sender.rest()).strip() == b"0"


async def test_the_requests_of_a_client_that_went_away_are_withdrawn(
    gateway: Gateway, scripted: Scripted
) -> None:
    async with sending(gateway) as sender:
        await sender.send(b"".join(line(f"-- held {number}") for number in range(5)))
        await eventually(lambda: len(scripted.running) == 5)
    await eventually(lambda: len(scripted.stopped) == 5)
    async with sending(gateway) as sender:
        await sender.send(line("-- held a") + line("-- held b", request_id="kept"))
        await sender.send(b"")
        await eventually(lambda: len(scripted.running) == 2)
    await eventually(lambda: len(scripted.stopped) == 6)
    scripted.gate.set()
    answer = await gateway.http.get("/v1/requests/kept?wait=60")
    assert answer.json()["verdict"] == "accepted"


@pytest.mark.slow
async def test_any_number_of_requests_pass_through_and_events_are_framed(
    gateway: Gateway,
) -> None:
    body = b"".join(line(f"-- accepted {number}") for number in range(600))
    answer = await gateway.http.post("/v1/batch", content=body)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    results = [json.loads(each) for each in answer.text.splitlines()]
    assert sorted(result["index"] for result in results) == list(range(600))
    assert {result["result"]["verdict"] for result in results} == {"accepted"}

    events = {"Accept": "text/event-stream"}
    answer = await gateway.http.post("/v1/batch", content=line("-- x"), headers=events)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    result, end = answer.text.rstrip("\n").split("\n\n")
    kind, data = result.split("\n")
    assert (kind, end) == ("event: result", "event: end\ndata: {}")
    assert json.loads(data.removeprefix("data: "))["index"] == 0


async def test_lines_may_be_cut_anywhere(gateway: Gateway) -> None:
    async with sending(gateway) as sender:
        for byte in line("-- accepted") + b"\n\n" + line("-- rejected"):
            await sender.send(bytes((byte,)))
        # A piece with the ends of three lines, and a line of many pieces.
        held = line("-- incomplete")
        await sender.send(held[:5])
        await sender.send(held[5:] + held + line(f"-- timeout {'x' * 3_000_000}")[:1000])
        rest = line(f"-- timeout {'x' * 3_000_000}")[1000:]
        for start in range(0, len(rest), 10_000):
            await sender.send(rest[start : start + 10_000])
        found = [await sender.result() for _ in range(5)]
        verdicts = [r["result"]["verdict"] for r in sorted(found, key=lambda each: each["index"])]
        assert verdicts == ["accepted", "rejected", "incomplete", "incomplete", "timeout"]


async def test_a_line_without_an_end_is_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.gateway.batches._MAX_LINE_BYTES", 1000)
    async with sending(gateway) as sender:
        await sender.send(line("-- accepted") + b"x" * 1001)
        results = [await sender.result(), await sender.result()]
        problems = [each["problem"]["type"] for each in results if "problem" in each]
        assert problems == ["urn:leanq:too-large"]
        assert (await sender.rest()).strip() == b"0"


@pytest.mark.parametrize(
    ("after", "status"),
    [
        ({"secret": "bob"}, 401),
        ({"secret": "alice", "tenant": "another"}, 401),
        ({"secret": "alice", "rights": ["status"]}, 403),
    ],
)
async def test_a_key_that_is_taken_back_sends_nothing_more_on_a_batch_that_is_open(
    settings: Settings, scripted: Scripted, tmp_path: Path, after: dict[str, Any], status: int
) -> None:
    now_s = 0.0
    keys = KeyFile(key_file(tmp_path, {"secret": "alice"}), clock=lambda: now_s)
    async with (
        new_gateway(settings, keys=keys) as gateway,
        sending(gateway, key="alice") as sender,
    ):
        await sender.send(line("-- held") + line("-- rejected"))
        assert (await sender.result())["result"]["verdict"] == "rejected"
        key_file(tmp_path, after)
        now_s = 2.0
        await sender.send(line("-- timeout") + line("-- timeout"))
        refused = await sender.result()
        assert (refused["index"], refused["problem"]["status"]) == (2, status)
        # What was let in before has its end.
        scripted.gate.set()
        last = await sender.result()
        assert (last["index"], last["result"]["verdict"]) == (0, "accepted")
        assert (await sender.rest()).strip() == b"0"
    assert [request.code for request in scripted.seen] == ["-- held", "-- rejected"]


@pytest.mark.slow
async def test_a_batch_that_the_gateway_cuts_short_says_so(
    settings: Settings, scripted: Scripted
) -> None:
    async with new_gateway(settings, grace_s=0.1) as gateway, sending(gateway) as sender:
        await sender.send(line("-- held") + line("-- held b", request_id="kept"))
        await eventually(lambda: len(scripted.running) == 2)
        gateway.server.stop()
        last = await sender.result()
        assert (last["index"], last["problem"]["status"]) == (None, 503)
        assert (await sender.rest()).strip() == b"0"
    await eventually(lambda: scripted.stopped == ["-- held"])
    scripted.gate.set()
    async with new_gateway(settings) as gateway:
        answer = await gateway.http.get("/v1/requests/kept?wait=60")
        assert answer.json()["verdict"] == "accepted"


@pytest.mark.slow
async def test_results_that_nobody_reads_count_as_outstanding(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    # More bytes than the buffers of a connection hold.
    number, text = 400, 64_000 * "x"
    long = Reply(verdict="rejected", messages=(Message("information", 1, 0, text),))
    scripted.replies = {f"-- long {n}": long for n in range(number)}
    keys = KeyFile(key_file(tmp_path, {"secret": "alice", "outstanding": number}))
    headers = {"Authorization": "Bearer alice"}
    snippets = [{"id": str(n), "code": "-- x"} for n in range(number - 100)]
    async with new_gateway(settings, keys=keys) as gateway:

        async def asked(status: int) -> bool:
            body = {"snippets": snippets}
            answer = await gateway.http.post("/api/check", json=body, headers=headers)
            return answer.status_code == status

        async with sending(gateway, key="alice") as sender:
            await sender.send(b"".join(line(f"-- long {n}") for n in range(number)))
            await eventually(lambda: len(scripted.seen) == number)
            await eventually(lambda: gateway.lean.all_outstanding() == 0)
            assert await asked(429)
            for _ in range(number):
                await sender.result()
            await eventually(lambda: asked(200))
        # Who goes away leaves nothing behind.
        async with sending(gateway, key="alice") as sender:
            await sender.send(b"".join(line(f"-- long {n}") for n in range(number)))
            await eventually(lambda: len(scripted.seen) >= 2 * number)
        await eventually(lambda: asked(200))
