"""Lean with and without a fork server, and the bytes that both leave behind."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from leanq.lean.environment import Environment
from leanq.lean.run.fork_server import ForkRules, ForkServer
from leanq.lean.run.headers import forkable_header
from leanq.lean.run.process import Lean, Slot
from leanq.lean.run.proof import RunBytes, compiled_by
from leanq.lean.sandbox.sandbox import Limits
from support.waiting import eventually

LIMITS = Limits(cpu_s=60.0, wall_s=100.0, memory_bytes=4 << 30)
RULES = ForkRules(preload_after=1, share_after=1, compare_every=0)
COMPILE = ("-o", "LeanqSubmission.olean")
# A few texts take longer, such as those whose stack overflows: they are not compared.
SHORT = replace(LIMITS, cpu_s=5.0)


@contextlib.asynccontextmanager
async def opened(
    environment: Environment, *, forked: bool, rules: ForkRules = RULES
) -> AsyncIterator[Lean]:
    forks = ForkServer(environment, rules) if forked else None
    lean = Lean(environment, slots=1, forks=forks)
    try:
        await lean.open()
        yield lean
    finally:
        await lean.close()


async def forked_once(lean: Lean, text: str) -> None:
    """Runs a text until it is a fork that does it."""

    async def is_forked() -> bool:
        async with lean.slot() as slot:
            assert (await lean.run(slot, text, LIMITS)).done.exit.code == 0
            return was_forked(slot)

    await eventually(is_forked, deadline_s=300.0)


def was_forked(slot: Slot) -> bool:
    return slot.sandbox in slot.forked.values()


async def everything(lean: Lean, slot: Slot, text: str) -> RunBytes:
    run = await lean.run(slot, text, SHORT, tenant="everybody")
    return RunBytes.of(run.done, compiled_by(COMPILE, slot.left))


async def compared(environment: Environment, texts: Sequence[str]) -> int:
    """Returns how many of the texts came out of forks, each as from a Lean that starts anew. Texts
    with the same header share their forks."""
    headers: dict[str, list[str]] = {}
    for text in texts:
        whole = environment.header_for(text) + text
        if (header := forkable_header(environment, whole)) is not None:
            headers.setdefault(header, []).append(whole)
    count = 0
    async with opened(environment, forked=True) as lean, opened(environment, forked=False) as plain:
        for header, wholes in headers.items():
            async with plain.slot() as other:
                if (await everything(plain, other, header)).code != 0:
                    continue  # nothing can be behind it
            await forked_once(lean, header)
            for whole in wholes:
                async with lean.slot() as slot, plain.slot() as other:
                    forked = await everything(lean, slot, whole)
                    expected = await everything(plain, other, whole)
                    if forked.stopped or expected.stopped:
                        continue
                    # What ends Lean before it reads a text kills a fork; a new Lean then runs it.
                    has_begun = expected.code == 0 or expected.stdout
                    assert was_forked(slot) or not has_begun, whole
                    assert forked.difference(expected) == "", whole
                    count += 1
    return count
