"""Several gateways in front of one queue, between which a balancer chooses for each request."""

from __future__ import annotations

import asyncio
import time

from support.gateway.gateways import Gateway, Scripted, new_gateway
from support.waiting import eventually

from leanq.queue.settings import Settings

# A client that is not told looks after 5 s for the first time.
SOON_S = 4.0


async def test_all_that_wait_for_a_request_hear_of_its_end_at_once(
    gateway: Gateway, scripted: Scripted, settings: Settings
) -> None:
    async with new_gateway(settings) as second, new_gateway(settings) as third:
        everywhere = (gateway, second, third)
        held = {"code": "-- held", "request_id": "shared"}
        await gateway.http.post("/v1/check?wait=0", json=held)
        await eventually(lambda: len(scripted.running) == 1)
        waiting = [
            asyncio.create_task(each.http.get("/v1/requests/shared?wait=60")) for each in everywhere
        ]
        # One submits it anew, as a caller does who has heard nothing.
        waiting.append(asyncio.create_task(second.http.post("/v1/check", json=held)))
        await eventually(lambda: all(each.lean.outstanding("default") for each in everywhere))
        # Until the queue has been told of all of them.
        for each in everywhere:
            await each.http.post("/v1/check", json={"code": "-- accepted"})
        scripted.gate.set()
        began_s = time.monotonic()
        ends = await asyncio.gather(*waiting)
        took_s = time.monotonic() - began_s
    assert [end.json()["verdict"] for end in ends] == ["accepted"] * 4
    assert took_s < SOON_S
    assert [request.code for request in scripted.seen].count("-- held") == 1


async def test_all_hear_of_a_withdrawal_at_any_of_them(
    gateway: Gateway, scripted: Scripted, settings: Settings
) -> None:
    async with new_gateway(settings) as other:
        held = {"code": "-- held", "request_id": "n"}
        asked = asyncio.create_task(gateway.http.post("/v1/check", json=held))
        await eventually(lambda: len(scripted.running) == 1)
        began_s = time.monotonic()
        answers = [await other.http.delete("/v1/requests/n"), await asked]
        assert time.monotonic() - began_s < SOON_S
    assert [answer.json()["verdict"] for answer in answers] == ["cancelled"] * 2
    await eventually(lambda: scripted.stopped == ["-- held"])


async def test_a_withdrawal_that_overtakes_its_request_waits_for_it(
    gateway: Gateway, scripted: Scripted, settings: Settings
) -> None:
    async with new_gateway(settings) as other:
        withdrawn = asyncio.create_task(other.http.delete("/v1/requests/late"))
        # The first look finds nothing.
        assert (await other.http.get("/v1/requests/late")).status_code == 404
        held = {"code": "-- held", "request_id": "late"}
        answers = [await gateway.http.post("/v1/check", json=held), await withdrawn]
    assert [answer.json()["verdict"] for answer in answers] == ["cancelled"] * 2
    assert scripted.running == []


async def test_what_was_fetched_by_its_name_alone_is_no_other_text(
    gateway: Gateway, scripted: Scripted, settings: Settings
) -> None:
    """Until its end, only its name is known at the other gateway."""
    async with new_gateway(settings) as other:
        held, differs = ({"code": code, "request_id": "n"} for code in ("-- held", "-- held, too"))
        asked = [asyncio.create_task(gateway.http.post("/v1/check", json=held))]
        await eventually(lambda: len(scripted.running) == 1)
        asked.append(asyncio.create_task(other.http.get("/v1/requests/n?wait=60")))
        await eventually(lambda: other.lean.all_outstanding() == 1)
        asked += [
            asyncio.create_task(other.http.post("/v1/check", json=each)) for each in (held, differs)
        ]
        await other.http.post("/v1/check", json={"code": "-- accepted"})
        scripted.gate.set()
        *ends, refused = await asyncio.gather(*asked)
    assert [end.json()["verdict"] for end in ends] == ["accepted"] * 3
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:leanq:conflict")
    assert [request.code for request in scripted.seen].count("-- held, too") == 0
