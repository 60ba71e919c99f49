"""``leanq worker``, ``leanq up`` and ``leanq reap``: what runs for long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import asdict
from typing import Any

import click

from leanq.commands.common import make_worker
from leanq.errors import UnavailableError, UsageError
from leanq.fleet.backfill import backfill
from leanq.fleet.logging import log_to_stderr
from leanq.fleet.prometheus import (
    Page,
    Sample,
    counted_samples,
    exposition,
    fleet_samples,
    openmetrics,
)
from leanq.fleet.stats import Times, fleet_stats
from leanq.local import EmbeddedServer, UpFile, embedded_settings
from leanq.queue.queue import every_shard
from leanq.queue.reaper import reap_all
from leanq.queue.settings import Settings
from leanq.worker import Worker

log = logging.getLogger("leanq.worker")

_SECOND_SIGNAL_GRACE_S = 0.0


def queue_url(url: str | None) -> str:
    """Where a command's queue is: ``--url``, LEANQ_URL, or the ``leanq up`` of this machine.

    Raises:
        UsageError: none of them names one.
    """
    url = url or UpFile(os.environ).read()
    if url is None:
        raise UsageError(
            "no queue: name a Redis with --url or LEANQ_URL, or start one here with 'leanq up'"
        )
    return url


def queue_settings(url: str | None) -> Settings:
    """The queue that a command means, which is one; raises UsageError as :func:`queue_url`."""
    return Settings.load(queue_url(url), os.environ)


def work(url: str | None, as_json: bool, metrics_port: int | None, **options: Any) -> None:
    """Runs a worker until it is told to stop."""
    settings = queue_settings(url)
    log_to_stderr(as_json)
    worker = make_worker(settings, **options)
    with _page(worker, metrics_port):
        asyncio.run(_until_stopped(worker))


def metrics_since(url: str | None, as_json: bool, since_s: float) -> None:
    """Prints what was noted of the fleet's metrics in the last so many seconds."""
    seen = asyncio.run(backfill(queue_settings(url), since_s))
    if not as_json:
        click.echo(openmetrics(seen), nl=False)
        return
    for name, labels, value, at_s in seen:
        click.echo(json.dumps({"metric": name, "labels": labels, "value": value, "at_s": at_s}))


def metrics(url: str | None, as_json: bool, port: int, once: bool) -> None:
    """Shows the fleet's metrics to whoever asks on a port, until interrupted; or once."""
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
            yield from fleet_samples(asyncio.run(fleet_stats(settings)))
        except UnavailableError as error:
            log.warning("%s", error)
            yield "leanq_up", (), 0

    with Page(port, read) as page:
        log.info("metrics at http://localhost:%d/metrics (Ctrl-C ends it)", page.port)
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()


def up(metrics_port: int | None, **options: Any) -> None:
    """Runs a server and a worker until interrupted."""
    log_to_stderr(False)
    place = UpFile(os.environ)
    with EmbeddedServer() as server:
        settings = embedded_settings(server, os.environ)
        worker = make_worker(settings, **options)
        place.write(settings)
        try:
            click.echo(f"leanq is up; LEANQ_URL={server.url} (Ctrl-C ends it)", err=True)
            with _page(worker, metrics_port):
                asyncio.run(_until_stopped(worker))
        finally:
            place.remove()


def reap(url: str | None, as_json: bool, watch: bool) -> None:
    """One pass, or one each third of a lease."""
    asyncio.run(_reap(queue_settings(url), as_json, watch))


async def _reap(settings: Settings, as_json: bool, watch: bool) -> None:
    async with every_shard(settings) as queues:
        while True:
            done = await reap_all(queues, through_expiry_grace=not watch)
            if as_json:
                click.echo(json.dumps({"requeued": done.requeued, "poisoned": done.poisoned}))
            elif done.requeued or done.poisoned or not watch:
                click.echo(f"{done.requeued} put back, {done.poisoned} poisoned")
            if not watch:
                return
            await asyncio.sleep(settings.lease_s / 3)


def _page(worker: Worker, port: int | None) -> contextlib.AbstractContextManager[object]:
    """The worker's metrics, if a port was named for them."""
    if port is None:
        return contextlib.nullcontext()

    def read() -> Iterator[Sample]:
        yield "leanq_worker_slots", ("busy",), worker.busy
        yield "leanq_worker_slots", ("idle",), worker.slots - worker.busy
        yield from counted_samples()

    page = Page(port, read, worker.joined.is_set)
    log.info("metrics of this worker on port %d", page.port)
    return page


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work`` until it ends, or SIGTERM or SIGINT cancels it."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _until_stopped(worker: Worker) -> None:
    """SIGTERM and SIGINT drain; a second one does not wait."""
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        worker.stop(None if signals == 1 else _SECOND_SIGNAL_GRACE_S)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await worker.run()
