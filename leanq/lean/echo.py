"""The echo driver answers a payload after a delay: for load tests, benchmarks, simulated fleets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from leanq.queue.requests import Reply, Request
from leanq.states import States


class EchoDriver:
    """Serves the environment ``echo``."""

    environment = "echo"

    @property
    def about(self) -> Mapping[str, object]:
        return {"driver": "echo"}

    async def open(self, _states: States) -> None:
        pass

    async def describe(self) -> str:
        return "an echo, without any Lean"

    async def run(self, request: Request) -> Reply:
        if request.op != "echo":
            return Reply(error=f"the echo driver cannot {request.op}; it runs no Lean")
        started = time.monotonic()
        if request.delay_s > 0:
            await asyncio.sleep(request.delay_s)
        return Reply(payload=request.payload, wall_s=time.monotonic() - started)

    async def prove(self) -> None:
        pass

    async def close(self) -> None:
        pass
