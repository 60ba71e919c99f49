"""The fixture that empties a test's queue ends, whatever a failed test has left behind."""

from __future__ import annotations

import asyncio

import pytest
from support import fleets
from support.fleets import echo_body, submission, sweep
from support.queue.queues import Queue

from leanq.queue.settings import Settings


def test_a_sweep_ends_although_a_tenant_is_paused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(hold: bool) -> None:
        queue = Queue(settings)
        try:
            if hold:
                await queue.submit("c", [submission("0-left", echo_body(b""))])
            await queue.set_paused("tenant", "default", paused=hold)
            await queue.cancel([] if hold else ["0-left"])
        finally:
            await queue.close()

    asyncio.run(leave(hold=True))
    monkeypatch.setattr(fleets, "SWEEP_TIMEOUT_S", 0.3)
    with pytest.raises(TimeoutError):
        sweep(settings)
    asyncio.run(leave(hold=False))
    monkeypatch.undo()
    sweep(settings)
