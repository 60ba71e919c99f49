"""``leanq tenant``: tenants' CPU time, and their shares of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import click

from leanq.commands import options
from leanq.commands.common import on_queues, queue_settings, tell
from leanq.errors import UsageError
from leanq.fleet.shown import duration, printable, table
from leanq.fleet.stats import environments_of
from leanq.queue.operator_queue import LEAST_WEIGHT, MOST_WEIGHT, OperatorQueue, look
from leanq.queue.settings import check_name


@click.group()
def tenant() -> None:
    """Show tenants' CPU time; set their shares."""


@tenant.command()
@click.argument("name")
@click.argument(
    "weight",
    type=options.FiniteRange(LEAST_WEIGHT, MOST_WEIGHT, metavar="WEIGHT"),
    required=False,
)
@click.option("--remove", is_flag=True, help="Take the weight away.")
@options.queue
def weight(url: str | None, as_json: bool, name: str, weight: float | None, remove: bool) -> None:
    """Give the tenant NAME the share WEIGHT of CPU time.

    While any tenant has a weight, tenants of one environment and priority get CPU time by their
    weights; those without one weigh 1. Without weights, tenants take turns, request by request.
    """
    if (weight is None) != remove:
        raise UsageError(
            f"give either a WEIGHT between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, or --remove"
        )
    check_name("tenant", name)

    async def set_weight(queues: Sequence[OperatorQueue]) -> None:
        for queue in queues:
            await queue.set_weight(name, weight)

    on_queues(url, set_weight)
    said = "has no weight of its own"
    if weight is not None:
        said = f"weighs {weight:g} from its next request on"
    tell(as_json, [{"tenant": name, "weight": weight}], [f"tenant {name} {said}"])


@tenant.command("list")
@options.queue
def list_(url: str | None, as_json: bool) -> None:
    """Show the tenants that have a weight or used CPU time, the largest users first."""
    status = asyncio.run(look(queue_settings(url)))
    used_s: Counter[str] = Counter()
    for environment in environments_of(status).values():
        used_s.update(environment.tenants_cpu_s)
    names = sorted({*used_s, *status.weights}, key=lambda name: (-used_s[name], name))
    records = (
        {"tenant": name, "cpu_s": used_s[name], "weight": status.weights.get(name)}
        for name in names
    )
    total_s = used_s.total() or 1.0
    rows = [
        {
            "TENANT": printable(name or "others"),
            "CPU": duration(used_s[name]),
            "OF ALL": f"{100 * used_s[name] / total_s:.1f} %",
            "WEIGHT": f"{status.weights[name]:g}" if name in status.weights else "–",
        }
        for name in names
    ]
    tell(as_json, records, table(rows) or ["no tenant has a weight or used CPU time"])
