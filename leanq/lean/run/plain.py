"""What Lean says by itself of a text, to compare leanq with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from leanq.lean.environment import Environment
from leanq.lean.outcome import Printed, classify_printed, moved_up
from leanq.lean.sandbox.sandbox import Limits, Sandbox
from leanq.queue.requests import Message, Reply, Verdict


@dataclass(frozen=True, slots=True)
class Said:
    """What plain Lean said of a text.

    Attributes:
        verdict: by Lean's messages alone; ``accepted`` also means that Lean ended with 0.
        cpu_s: CPU seconds of the process.
    """

    verdict: Verdict
    messages: Sequence[Message]
    cpu_s: float


class PlainLean:
    """Starts Lean anew for each text, in one of the sandboxes, with an environment's options."""

    def __init__(self, environment: Environment, sandboxes: Sequence[Sandbox]) -> None:
        self._environment = environment
        self._free = asyncio.Queue[Sandbox]()
        for sandbox in sandboxes:
            self._free.put_nowait(sandbox)

    async def read(self, text: str, limits: Limits) -> Said | None:
        """Returns what Lean says; None if it meets a limit, or dies. Raises SandboxError."""
        header = self._environment.header_for(text)
        sandbox = await self._free.get()
        try:
            done = await sandbox.run(
                self._environment.command(),
                env=self._environment.sandbox_env(sandbox.scratch),
                limits=limits,
                stdin=(header + text).encode(),
            )
        finally:
            self._free.put_nowait(sandbox)
        if done.exit.stopped or done.exit.code not in (0, 1):
            return None
        read = classify_printed(Printed(done.stdout))
        messages = [moved_up(each, header.count("\n")) for each in read.messages]
        verdict = read.verdict or "rejected"
        if verdict == "accepted" and done.exit.code:
            verdict = "rejected"
        return Said(verdict, messages, done.exit.cpu_s)


@contextlib.asynccontextmanager
async def plain_lean(environment: Environment, slots: int) -> AsyncIterator[PlainLean]:
    """Opens as many sandboxes as there are slots; raises SandboxError."""
    async with contextlib.AsyncExitStack() as stack:
        sandboxes = []
        for _ in range(slots):
            sandboxes.append(await Sandbox.open(readable=environment.readable()))
            stack.push_async_callback(sandboxes[-1].close)
        yield PlainLean(environment, sandboxes)


def difference(expected: Sequence[Message], reply: Reply) -> str:
    """Returns the first difference between Lean's messages and those of a reply; "" for none."""
    said = [each for each in reply.messages if not each.is_ours]
    pairs = zip_longest(expected, said)
    first = next((f"Lean {one}, leanq {other}" for one, other in pairs if one != other), "")
    is_moved = bool(first) and sorted(expected, key=str) == sorted(said, key=str)
    return f"in another order: {first}" if is_moved else first
