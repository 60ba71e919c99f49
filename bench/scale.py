"""Measures how far one server goes: growth, memory, idle fleets, scale on paper; see README.md.

With ``--nodes``: growth and costs on a node of a cluster, and a fleet at eight shards of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable

from growth import growth
from paper import Costs, Row, carried, costs, needed, simulate
from runner import leave_on_sigterm
from servers import version
from sizes import future_bytes, idle, queued_bytes

_BATCHES = (64, 250)
_FLEET, _IDLE_FLEET = 10_000, 1000
_SIMULATED_S = 20.0
_CPUS = 500_000
_SHARDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="nodes of a cluster; 1: no cluster")
    nodes = parser.parse_args().nodes
    leave_on_sigterm()
    print(version(), end="\n\n", flush=True)
    figures = _growth(nodes)
    if nodes == 1:
        figures |= _sizes()
        figures |= _paper(
            figures["idle_us_per_worker"], figures["worker_bytes"], figures["queued_bytes"]
        )
    else:
        cost, told = _costs(nodes)
        figures |= told | _simulation(cost, nodes, _SHARDS)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def _growth(nodes: int) -> dict[str, float]:
    """Returns the ratios, each with the quantity that grows."""
    rows, figures = [], {}
    for batch in _BATCHES:
        for row in asyncio.run(growth(batch, nodes)):
            target = "≤ 1.20" if row.targeted else ""
            span = f"{row.least:.2f} – {row.most:.2f}"
            rows.append((row.what, target, f"{row.before_us:.1f} µs", f"{row.ratio:.2f}", span))
            figures[f"{row.name}_batch_{batch}"] = row.ratio
    _print(("server CPU per request", "target", "before", "ratio", "lowest – highest"), rows)
    return figures


def _sizes() -> dict[str, float]:
    queued, future = asyncio.run(queued_bytes()), future_bytes()
    waits = asyncio.run(idle(_IDLE_FLEET))
    idle_us = (waits.share - waits.alone) / _IDLE_FLEET * 1e6
    rows = [
        ("memory in Redis per queued request of 1 KB", "≤ 1,638 B", f"{queued:,.0f} B"),
        ("client's memory per future, beside 100 bytes", "≤ 3,072 B", f"{future:,.0f} B"),
        (f"server with {_IDLE_FLEET:,} idle workers, of a core", "≤ 1 %", f"{waits.share:.2%}"),
        ("the same without workers", "", f"{waits.alone:.2%}"),
        ("memory in the server per connected worker", "", f"{waits.worker_bytes:,.0f} B"),
    ]
    _print(("figure", "target", "seen"), rows)
    return {
        "queued_bytes": queued,
        "future_bytes": future,
        "idle_share": waits.share,
        "idle_us_per_worker": idle_us,
        "worker_bytes": waits.worker_bytes,
    }


def _costs(nodes: int) -> tuple[Costs, dict[str, float]]:
    cost = asyncio.run(costs(nodes))
    rows = [
        (f"echo, {each} settled and claimed with a call", f"{cost_us:.0f} µs")
        for each, cost_us in cost.request_us.items()
    ]
    rows.append(("check of 1 KB, 1 with a call", f"{cost.check_us:.0f} µs"))
    rows.append(("renewal", f"{cost.renewal_us:.0f} µs"))
    _print(("server CPU", "seen"), rows)
    figures = {"renewal_us": cost.renewal_us, "check_us": cost.check_us}
    figures |= {f"request_us_{each}": cost_us for each, cost_us in cost.request_us.items()}
    return cost, figures


def _paper(idle_us: float, worker_bytes: float, request_bytes: float) -> dict[str, float]:
    cost, figures = _costs(1)
    print(f"An idle worker takes {idle_us:.0f} µs in a second.", end="\n\n")
    for what, cost_us in (("echo", cost.request_us[1]), ("check", cost.check_us)):
        table = carried(cost_us, idle_us, worker_bytes, request_bytes)
        for row in table:
            figures[f"workers_{what}_{row.mean_s:g}_{row.shards}"] = row.workers
        _print_rows(what, table)
    print(f"What {_CPUS:,} CPUs need, with a slot for each:", end="\n\n")
    for row in (table := needed(_CPUS, cost.check_us, idle_us, worker_bytes, request_bytes)):
        figures[f"shards_{row.mean_s:g}_{row.slots}"] = row.shards
    _print_rows("check", table)
    return figures | _simulation(cost, 1, 1)


def _simulation(cost: Costs, nodes: int, shards: int) -> dict[str, float]:
    seen = asyncio.run(simulate(cost, _FLEET, _SIMULATED_S, nodes=nodes, shards=shards))
    error = seen.predicted / seen.measured - 1
    rows = [
        ("workers in simulation", f"{seen.workers:,}"),
        ("shards, servers", f"{seen.shards}, {nodes}"),
        ("requests/s", f"{seen.requests_per_s:,.0f}"),
        ("mean time of a request that this stands for", f"{seen.mean_s:.0f} s"),
        ("renewals/s", f"{seen.renewals_per_s:,.0f}"),
        ("all servers, of a core, on paper", f"{seen.predicted:.0%}"),
        ("all servers, of a core, measured", f"{seen.measured:.0%}"),
        ("error of the paper", f"{error:+.0%}"),
    ]
    _print(("simulation", "seen"), rows)
    return {
        "simulated_requests_per_s": seen.requests_per_s,
        "predicted_share": seen.predicted,
        "measured_share": seen.measured,
    }


def _print_rows(what: str, table: Iterable[Row]) -> None:
    head = (
        *(f"mean time of a request ({what})", "shards", "workers", "slots of each", "requests/s"),
        *("connections per server", "memory per server"),
    )
    rows = [
        (
            *(f"{row.mean_s:g} s", f"{row.shards}", f"{row.workers:,}", f"{row.slots}"),
            *(f"{row.requests_per_s:,.0f}", f"{row.connections:,}", f"{row.memory_mb:,.0f} MB"),
        )
        for row in table
    ]
    _print(head, rows)


def _print(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Prints a table in Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        print(f"| {' | '.join(row)} |")
    print(flush=True)


if __name__ == "__main__":
    main()
