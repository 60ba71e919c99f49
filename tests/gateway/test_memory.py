"""How much memory a gateway keeps of bodies that it has refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engines.attack import Target, bombs, gateway_process, memory_mb
from support.servers import own_server

_AT_ONCE = 3
_MORE_MB = 60


@pytest.mark.slow
async def test_large_bodies_leave_no_holes_behind(tmp_path: Path) -> None:
    def attacked() -> tuple[float, float]:
        with (
            own_server() as server,
            gateway_process(server.settings, tmp_path, 1024) as (port, pid, _),
        ):
            target = Target(port, "attacker")
            rest_mb = memory_mb(pid, "VmRSS")

            async def throw() -> None:
                for kind, data in bombs(target):
                    await asyncio.gather(*(target.send(kind, data) for _ in range(_AT_ONCE)))

            asyncio.run(throw())
            return rest_mb, memory_mb(pid, "VmRSS")

    rest_mb, after_mb = await asyncio.to_thread(attacked)
    assert after_mb < rest_mb + _MORE_MB
