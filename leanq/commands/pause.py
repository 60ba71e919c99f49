"""``leanq pause`` and ``leanq resume``: holds an environment or a tenant back, or lets it go on."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import click

from leanq.commands.fleet import queue_settings
from leanq.errors import UsageError
from leanq.queue.queue import every_shard
from leanq.queue.settings import Settings, check_name


def hold_back(
    url: str | None, as_json: bool, env: str | None, tenant: str | None, *, hold: bool
) -> None:
    """Does so, and says whether it was otherwise before."""
    if (env is None) == (tenant is None):
        raise UsageError("name either an environment with --env or a tenant with --tenant")
    kind: Literal["environment", "tenant"] = "environment" if env is not None else "tenant"
    what = "environment" if env is not None else "tenant"
    name = check_name(what, env or tenant or "")
    changed = asyncio.run(_hold_back(queue_settings(url), kind, name, hold))
    if as_json:
        click.echo(json.dumps({what: name, "paused": hold, "changed": changed}))
        return
    state = "paused: what waits is kept, what runs goes on" if hold else "goes on"
    click.echo(f"{what} {name} {state}{'' if changed else ', as before'}")


async def _hold_back(
    settings: Settings, kind: Literal["environment", "tenant"], name: str, hold: bool
) -> bool:
    async with every_shard(settings) as queues:
        return any([await queue.pause(kind, name, hold=hold) for queue in queues])
