"""Says why a command's requests do not end, and gives up if no worker comes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from leanq.errors import NotPermittedError, NoWorkerError, UnavailableError
from leanq.producer.request_builder import Check
from leanq.queue.client_queue import ClientQueue
from leanq.queue.settings import Settings, without_password
from leanq.queue.shard import Shard

_LOOK_AFTER_S = 3.0
# The time doubles between looks, since living workers send a lot about themselves.
_LOOK_EVERY_S = 30.0
_ANSWERS_WITHIN_S = 5.0


async def explain_silence(
    clusters: Sequence[Settings],
    how: Check,
    ended: Callable[[], int],
    wait_s: float | None = None,
) -> NoReturn:
    """Says once why nothing ends: no queue answers, an operator holds requests back, or no worker
    is alive. Runs until it is cancelled.

    Args:
        clusters: where the requests are; empty behind a gateway, which does not tell.
        ended: returns how many requests have ended.
        wait_s: how long to wait for a worker that serves the environment; ``None`` for no limit.

    Raises:
        NoWorkerError: no worker came in that time.
    """
    said: set[str] = set()
    before, alone_since_s = 0, time.monotonic()
    every_s = _LOOK_AFTER_S if wait_s is None else min(_LOOK_AFTER_S, wait_s)
    async with contextlib.AsyncExitStack() as stack:
        queues = [ClientQueue(Shard(settings)) for settings in clusters]
        for queue in queues:
            stack.push_async_callback(queue.shard.close)
        while queues:
            await asyncio.sleep(every_s)
            every_s = min(2 * every_s, _LOOK_EVERY_S)
            if (now := ended()) == before:
                why, alone = await _why(queues, how)
                for text in why - said:
                    click.echo(f"leanq: {text}", file=sys.stderr)
                said |= why
                if alone and wait_s is not None:
                    left_s = alone_since_s + wait_s - time.monotonic()
                    if left_s <= 0:
                        where = ", ".join(without_password(each.url) for each in clusters)
                        raise NoWorkerError(
                            f"no worker for the environment {how['env']!r} came to {where} within "
                            f"{wait_s:g} s (--wait); start one with 'leanq worker', or check --env"
                        )
                    every_s = min(every_s, left_s)
                if alone:
                    continue
            if now != before:
                every_s = _LOOK_AFTER_S
            before, alone_since_s = now, time.monotonic()
        await asyncio.Event().wait()
    raise AssertionError  # nothing sets the event


async def _why(queues: Sequence[ClientQueue], how: Check) -> tuple[set[str], bool]:
    """Returns what may hold requests up, and whether no worker is alive for them."""
    env, tenant = how["env"], how["tenant"]
    failed: set[str] = set()
    held: set[str] = set()
    served = False
    unread = ""
    for queue in queues:
        name = without_password(queue.shard.settings.url)
        try:
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                offered, paused = await queue.served(), await queue.shard.paused()
                unread = await queue.unread(env) or unread
        except NotPermittedError:
            # This user may not ask.
            return set(), False
        except UnavailableError as error:
            failed.add(f"{error}; the requests wait for it")
            continue
        except TimeoutError:
            failed.add(f"no answer from {name} for {_ANSWERS_WITHIN_S:g} s; the requests wait")
            continue
        served = served or env in offered
        for kind, what, each in (("e", "environment", env), ("t", "tenant", tenant)):
            if f"{kind}:{each}" in paused:
                held.add(f"the {what} {each!r} is paused; the requests wait (leanq resume)")
    if len(failed) == len(queues):
        return failed, False
    if unread:
        unread = f"; {unread}: start workers of this release, or submit with theirs"
    if served or held:
        return held | ({f"the requests wait{unread}"} if unread else set()), False
    text = f"no worker for the environment {env!r} is alive; the requests wait for one"
    return {f"{text} (leanq worker){unread}"}, True
