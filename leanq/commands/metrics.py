"""``leanq metrics``: the fleet's metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict

import click

from leanq.commands import options
from leanq.commands.common import queue_settings, until_signal
from leanq.errors import UnavailableError
from leanq.fleet.logging import log_to_stderr
from leanq.fleet.prometheus import Page, Sample, exposition, fleet_samples
from leanq.fleet.stats import Times, fleet_stats
from leanq.queue.settings import without_password

log = logging.getLogger("leanq.metrics")

# Prometheus gives a scrape ten seconds; report a silent server before.
_LOOK_S = 7.0


@click.command()
@options.queue
@click.option(
    "--port",
    type=options.PORT,
    default=9464,
    help="The port to listen on.",
)
@options.metrics_host
@click.option("--once", is_flag=True, help="Print the metrics and end.")
def metrics(url: str | None, as_json: bool, port: int, metrics_host: str, once: bool) -> None:
    """Serve the fleet's metrics to Prometheus, at /metrics."""
    settings = queue_settings(url)
    if once:
        seen = list(fleet_samples(asyncio.run(fleet_stats(settings))))
        for name, labels, value in seen if as_json else ():
            shown = asdict(value) if isinstance(value, Times) else value
            click.echo(json.dumps({"metric": name, "labels": labels, "value": shown}))
        if not as_json:
            click.echo(exposition(seen), nl=False)
        return
    log_to_stderr(as_json)

    def read() -> Iterator[Sample]:
        try:
            yield from fleet_samples(asyncio.run(asyncio.wait_for(fleet_stats(settings), _LOOK_S)))
        except (UnavailableError, TimeoutError) as error:
            late = f"no answer from {without_password(settings.url)} within {_LOOK_S:g} s"
            log.warning("%s", error if isinstance(error, UnavailableError) else late)
            yield "leanq_up", (), 0

    with Page(port, read, host=metrics_host) as page:
        log.info("metrics at http://localhost:%d/metrics (Ctrl-C ends it)", page.port)
        asyncio.run(until_signal(asyncio.sleep(math.inf)))
