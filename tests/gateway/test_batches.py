"""Batches: requests that are read while the results of others are sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fleets import working
from support.gateways import Gateway, Scripted, new_gateway
from support.waiting import eventually

from leanq.queue.settings import Settings

TIMEOUT_S = 60.0


@pytest.fixture
async def scripted(settings: Settings) -> AsyncIterator[Scripted]:
    driver = Scripted()
    async with working(settings, driver, slots=16):
        yield driver


@pytest.fixture
async def gateway(settings: Settings, scripted: Scripted) -> AsyncIterator[Gateway]:
    async with new_gateway(settings) as made:
        yield made


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
async def sending(gateway: Gateway) -> AsyncIterator[Sender]:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
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
