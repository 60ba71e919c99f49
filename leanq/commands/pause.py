"""``leanq pause`` and ``leanq resume``: hold an environment's or a tenant's requests back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Literal

import click

from leanq.commands import options
from leanq.commands.common import queue_settings
from leanq.errors import UsageError
from leanq.queue.operator_queue import OperatorQueue, every_queue
from leanq.queue.settings import Settings, check_name

_which = options.combined(
    click.option("--env", metavar="NAME", help="An environment."),
    click.option("--tenant", metavar="NAME", help="A tenant, in all environments."),
)


@click.command()
@options.queue
@_which
def pause(url: str | None, as_json: bool, env: str | None, tenant: str | None) -> None:
    """Hold an environment's or a tenant's requests back.

    None of them starts until 'leanq resume'; running requests go on to their end.
    """
    _change(url, as_json, env, tenant, paused=True)


@click.command()
@options.queue
@_which
def resume(url: str | None, as_json: bool, env: str | None, tenant: str | None) -> None:
    """Resume a paused environment or tenant."""
    _change(url, as_json, env, tenant, paused=False)


def _change(
    url: str | None, as_json: bool, env: str | None, tenant: str | None, *, paused: bool
) -> None:
    if (env is None) == (tenant is None):
        raise UsageError("name either an environment with --env or a tenant with --tenant")
    kind: Literal["environment", "tenant"] = "environment" if env is not None else "tenant"
    what = "environment" if env is not None else "tenant"
    name = check_name(what, env or tenant or "")
    changed, others = asyncio.run(_hold_back(queue_settings(url), kind, name, paused))
    if as_json:
        click.echo(json.dumps({what: name, "paused": paused, "changed": changed}))
        return
    state = "is paused: its requests wait, what runs goes on" if paused else "goes on"
    click.echo(f"{what} {name} {state}{'' if changed else ', as before'}")
    if not changed and not paused and others:
        # The name may have been mistyped.
        click.echo(f"still paused: {', '.join(others)}")


async def _hold_back(
    settings: Settings, kind: Literal["environment", "tenant"], name: str, paused: bool
) -> tuple[bool, list[str]]:
    """Returns whether that changed anything, and what is paused now."""
    async with every_queue(settings) as queues:
        if kind == "environment":
            await _check_environment(queues, name)
        changed = any([await queue.set_paused(kind, name, paused=paused) for queue in queues])
        held = sorted(await queues[0].shard.paused())
    kinds = {"e": "environment", "t": "tenant"}
    return changed, [f"{kinds.get(each[:1], each[:1])} {each[2:]}" for each in held]


async def _check_environment(queues: Sequence[OperatorQueue], name: str) -> None:
    """Raises UnknownEnvironmentError for an environment that is neither offered nor paused."""
    known = {known for queue in queues for known in await queue.shard.environments()}
    if name in known:
        return
    if f"e:{name}" in await queues[0].shard.paused():
        return
    raise await queues[0].shard.unknown(name)
