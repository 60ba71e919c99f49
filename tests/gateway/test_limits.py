"""How many connections a gateway holds, and how many of them one key may work on."""

from __future__ import annotations

import asyncio
import contextlib
import resource

import httpx2
import pytest
from fastapi import HTTPException
from support.gateway.gateways import new_gateway
from support.waiting import eventually

from leanq.gateway.limits import Connections, most_connections
from leanq.queue.settings import Settings


@pytest.mark.parametrize("name", ["a", ""])
def test_the_requests_of_one_key_or_of_strangers_take_a_third_of_all_connections(name: str) -> None:
    all_of_them = Connections(6)
    with contextlib.ExitStack() as under_way:
        for _ in range(2):
            under_way.enter_context(all_of_them.carrying(name))
        with pytest.raises(HTTPException) as refused, all_of_them.carrying(name):
            pass
        assert refused.value.status_code == 429
        assert refused.value.headers
        with all_of_them.carrying("b"):
            pass
    with all_of_them.carrying(name):
        pass


@pytest.mark.parametrize("soft", [300, 20_000])
def test_the_limit_on_files_leaves_room_for_others_and_bounds_memory(soft: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, before[1]), before[1]))
        most = min(before[1], 8192)
        assert most_connections() == most - 256
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_beyond_the_limit_of_connections_a_request_is_answered_with_503(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.gateway.app.most_connections", lambda: 10)
    async with new_gateway(settings) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        async with httpx2.AsyncClient(base_url=gateway.url) as http:
            assert (await http.get("/health")).status_code == 200
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
            assert (await http.get("/health")).status_code == 503
            for _, writer in opened:
                writer.close()
            await eventually(lambda: len(gateway.server.connections.held) < 10)
            assert (await http.get("/health")).status_code == 200
