"""The ``traceparent`` of HTTP requests, which the gateway passes on to the worker."""

from __future__ import annotations

import pytest
from support.gateway.gateways import Gateway, Scripted

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


async def test_the_header_reaches_the_worker(gateway: Gateway, scripted: Scripted) -> None:
    given = {"traceparent": TRACE}
    await gateway.http.post("/v1/check", json={"code": "-- v1"}, headers=given)
    await gateway.http.post(
        "/v1/batch", content=b'{"op": "check", "code": "-- batch"}\n', headers=given
    )
    kimina = {"snippets": [{"id": "a", "code": "-- kimina"}]}
    await gateway.http.post("/api/check", json=kimina, headers=given)
    # The body's own names what is nearer.
    body = {"code": "-- body", "traceparent": OTHER}
    await gateway.http.post("/v1/check", json=body, headers=given)
    await gateway.http.post("/v1/check", json={"code": "-- none"})
    seen = {request.code: request.traceparent for request in scripted.seen}
    assert seen == {
        "-- v1": TRACE,
        "-- batch": TRACE,
        "-- kimina": TRACE,
        "-- body": OTHER,
        "-- none": "",
    }


@pytest.mark.parametrize(
    "header",
    [
        *("", "x", TRACE.upper(), TRACE + "-x", "\xff" * 55, "ff" + TRACE[2:]),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
    ],
)
async def test_a_header_that_is_none_is_ignored(
    gateway: Gateway, scripted: Scripted, header: str
) -> None:
    headers = {"traceparent": header.encode("latin-1")}
    answer = await gateway.http.post("/v1/check", json={"code": "-- x"}, headers=headers)
    assert answer.json()["verdict"] == "accepted"
    assert [request.traceparent for request in scripted.seen] == [""]
