"""leanq: one worker with 256 slots of the echo driver, one `AsyncLeanQClient`, everything else as
it comes: leases, fencing, fair turns, idempotent submit, replies with a time-to-live, counters."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import load

from leanq.client import AsyncLeanQClient

_LEANQ = "from leanq.cli import main; main()"
_SLOTS = 256  # with 1,000, as many as the load has outstanding, batches are smaller


def worker(url: str) -> None:
    os.environ["LEANQ_URL"] = url
    arguments = ["worker", "--driver", "echo", "--slots", str(_SLOTS)]
    # Not from the working directory, which may be another checkout.
    os.execv(sys.executable, [sys.executable, "-P", "-c", _LEANQ, *arguments])


@asynccontextmanager
async def client(url: str) -> AsyncIterator[load.Echo]:
    async with AsyncLeanQClient(url) as queue:

        async def echo_all(payloads: Sequence[bytes]) -> list[bytes]:
            return [await queue.echo(payload) for payload in payloads]

        yield echo_all


if __name__ == "__main__":
    load.main(worker, load.Concurrent(client))
