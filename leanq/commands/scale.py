"""``leanq scale``: sizes a fleet, and shows why."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import click

from leanq.commands.fleet import queue_settings, until_signal
from leanq.errors import UsageError
from leanq.fleet.logging import log_to_stderr
from leanq.fleet.prometheus import Page
from leanq.fleet.scaler.loop import Scaler
from leanq.fleet.scaler.targets import LocalTarget, PrintTarget, Target
from leanq.queue.settings import Settings, check_name
from leanq.scale import Decision, ScaleSettings, Stats

log = logging.getLogger("leanq.scaler")


def scale(
    url: str | None,
    as_json: bool,
    *,
    target: str,
    environments: Sequence[str],
    every_s: float,
    port: int | None,
    worker: str,
    kubernetes: dict[str, Any],
    how: dict[str, Any],
) -> None:
    """Decides until interrupted."""
    settings = queue_settings(url)
    log_to_stderr(as_json)
    sizes = {check_name("environment", name): ScaleSettings(**how) for name in environments}

    def tell(name: str, decision: Decision, stats: Stats) -> None:
        if as_json:
            line = {"environment": name, "order": stats.order, "target": decision.target}
            line |= {"reason": decision.reason, "text": decision.text, "terms": decision.terms}
            click.echo(json.dumps(line))
        elif target == "print" or decision.target != stats.order:
            click.echo(f"{name}: {decision.target} workers, {decision.reason}: {decision.text}")

    # A decision that orders nothing is nobody else's concern.
    who = "" if target == "print" else f"{socket.gethostname()}-{secrets.token_hex(4)}"
    made = Scaler(
        settings,
        _target(target, settings, who, worker, kubernetes),
        sizes,
        every_s=every_s,
        tell=tell,
        who=who,
    )
    page = contextlib.nullcontext() if port is None else Page(port, made.samples)
    with page:
        if isinstance(page, Page):
            log.info("metrics at http://localhost:%d/metrics", page.port)
        asyncio.run(until_signal(made.run()))


def _target(
    name: str, settings: Settings, who: str, worker: str, kubernetes: dict[str, Any]
) -> Target:
    if name == "local":
        place = {"LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix}
        return LocalTarget(worker, os.environ | place)
    if name == "print":
        return PrintTarget()
    try:
        from leanq.fleet.scaler.kubernetes import KubernetesTarget
    except ImportError as error:
        raise UsageError(f"--target k8s needs: pip install 'leanq[k8s]' ({error})") from None
    return KubernetesTarget(identity=who, **kubernetes)
