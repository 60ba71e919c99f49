"""``leanq pause`` and ``leanq resume``: hold an environment's or a tenant's requests back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import click

from leanq.commands import options
from leanq.commands.common import on_queues
from leanq.errors import UsageError
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.settings import check_name

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
    what: Literal["environment", "tenant"] = "environment" if env is not None else "tenant"
    name = check_name(what, env or tenant or "")

    async def hold_back(queues: Sequence[OperatorQueue]) -> tuple[bool, list[str]]:
        if what == "environment":
            await _check_environment(queues, name)
        changed = any([await queue.set_paused(what, name, paused=paused) for queue in queues])
        return changed, sorted(await queues[0].shard.paused())

    changed, held = on_queues(url, hold_back)
    if as_json:
        click.echo(json.dumps({what: name, "paused": paused, "changed": changed}))
        return
    state = "is paused: its requests wait, what runs goes on" if paused else "goes on"
    click.echo(f"{what} {name} {state}{'' if changed else ', as before'}")
    if not changed and not paused and held:
        # The name may have been mistyped.
        kinds = {"e": "environment", "t": "tenant"}
        others = (f"{kinds.get(each[:1], each[:1])} {each[2:]}" for each in held)
        click.echo(f"still paused: {', '.join(others)}")


async def _check_environment(queues: Sequence[OperatorQueue], name: str) -> None:
    """Raises UnknownEnvironmentError for an environment that is neither offered nor paused."""
    known = {known for queue in queues for known in await queue.shard.environments()}
    if name not in known and f"e:{name}" not in await queues[0].shard.paused():
        raise await queues[0].shard.unknown(name)
