"""``leanq scale``: starts and stops workers as the load needs them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from leanq.commands import options
from leanq.commands.common import queue_settings, until_signal
from leanq.errors import UsageError, to_install
from leanq.fleet.logging import log_to_stderr
from leanq.fleet.prometheus import page_at
from leanq.fleet.scaler.local import LocalTarget
from leanq.fleet.scaler.loop import Scaler
from leanq.fleet.scaler.slurm import SlurmTarget
from leanq.fleet.scaler.targets import PrintTarget, Target
from leanq.queue.settings import check_name
from leanq.scale import Decision, ScaleSettings, Stats

_options = options.combined(
    click.option(
        "--target",
        type=click.Choice(["k8s", "slurm", "ray", "local", "print"]),
        required=True,
        help="The place for workers: a Kubernetes, Slurm or Ray cluster, this machine, or none "
        "(decisions are printed).",
    ),
    click.option(
        "--env",
        "environments",
        multiple=True,
        default=["default"],
        metavar="NAME",
        help="An environment to size; may be given several times.",
    ),
    click.option(
        "--min-workers",
        type=options.WholeRange(0),
        default=0,
        help="The fewest workers to run.",
    ),
    click.option(
        "--max-workers",
        type=options.WholeRange(1),
        default=100,
        help="The most workers to run.",
    ),
    click.option(
        "--slots",
        type=options.WholeRange(1),
        default=1,
        help="Slots per worker, until a living worker tells. With --target ray also the CPUs that "
        "each takes.",
    ),
    click.option(
        "--deadline",
        "deadline_s",
        type=options.DURATION,
        default="5m",
        help="The time within which a backlog has to be cleared.",
    ),
    click.option(
        "--scale-down-delay",
        "scale_down_delay_s",
        type=options.DURATION,
        default="4m",
        help="Delay before scaling down.",
    ),
    click.option(
        "--every",
        "every_s",
        type=options.Duration(0.1),
        default="15s",
        help="Interval between decisions.",
    ),
    click.option(
        "--port",
        type=options.PORT,
        help="Serve the fleet's metrics and the scaler's on this port.",
    ),
    options.metrics_host,
    click.option(
        "--worker",
        default="",
        show_default=False,
        metavar="OPTIONS",
        help="With --target local or ray: the options of each 'leanq worker', with --url if "
        "workers have a user of their own. With ray, {env} in them is the environment's name.",
    ),
    click.option(
        "--namespace",
        default="default",
        metavar="NAME",
        help="With --target k8s: the namespace of the Deployments.",
    ),
    click.option(
        "--deployment",
        default="leanq-worker",
        metavar="NAME",
        help="With --target k8s: the Deployment to size; {env} in it is the environment's name.",
    ),
    click.option(
        "--hpa",
        metavar="NAME",
        help="With --target k8s: set the minReplicas of this HorizontalPodAutoscaler instead.",
    ),
    click.option(
        "--script",
        metavar="PATH",
        help="With --target slurm: the batch script of one worker; {env} in it is the "
        "environment's name.",
    ),
    click.option(
        "--job-name",
        default="leanq-{env}",
        metavar="NAME",
        help="With --target slurm: the name of the workers' jobs; your jobs of this name are the "
        "fleet.",
    ),
)


@click.command()
@options.queue
@_options
def scale(
    url: str | None,
    as_json: bool,
    target: str,
    environments: Sequence[str],
    every_s: float,
    port: int | None,
    metrics_host: str,
    worker: str,
    namespace: str,
    deployment: str,
    hpa: str | None,
    script: str | None,
    job_name: str,
    **how: Any,
) -> None:
    """Size a fleet by the backlog and the rate of requests.

    Decides until interrupted.
    """
    settings = queue_settings(url)
    _check_target(target, environments)
    log_to_stderr(as_json)
    sizes = {check_name("environment", name): ScaleSettings(**how) for name in environments}

    def tell(name: str, decision: Decision, stats: Stats) -> None:
        if as_json:
            line = {"environment": name, "order": stats.order, "target": decision.target}
            line |= {"reason": decision.reason, "text": decision.text, "terms": decision.terms}
            click.echo(json.dumps(line))
        elif target == "print" or decision.target != stats.order:
            click.echo(f"{name}: {decision.target} workers, {decision.reason}: {decision.text}")

    # A decision that orders nothing does not concern others.
    who = "" if target == "print" else f"{socket.gethostname()}-{secrets.token_hex(4)}"
    queue = {"LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix}
    place: Target
    try:
        if target == "k8s":
            from leanq.fleet.scaler.kubernetes import KubernetesTarget

            place = KubernetesTarget(namespace, deployment, hpa=hpa, identity=who)
        elif target == "ray":
            from leanq.fleet.scaler.ray import RayTarget

            place = RayTarget(settings, list(sizes), worker=worker, slots=how["slots"])
        elif target == "slurm":
            place = SlurmTarget(script or "", job_name, list(sizes))
        elif target == "local":
            place = LocalTarget(worker, os.environ | queue, list(sizes), as_json=as_json)
        else:
            place = PrintTarget()
    except ImportError as error:
        # A cluster has its own Ray, whose release has to be everywhere the same.
        command = "pip install ray" if target == "ray" else to_install(target)
        raise UsageError(f"--target {target} needs: {command} ({error})") from None
    made = Scaler(settings, place, sizes, every_s=every_s, tell=tell, who=who)
    with page_at(port, "scaler", made.samples, host=metrics_host):
        asyncio.run(until_signal(made.run()))


# The targets that each option belongs to.
_OF_TARGET = {
    "worker": ("local", "ray"),
    "namespace": ("k8s",),
    "deployment": ("k8s",),
    "hpa": ("k8s",),
    "script": ("slurm",),
    "job_name": ("slurm",),
}


def _check_target(target: str, environments: Sequence[str]) -> None:
    """Raises UsageError if options have no effect, or two environments would share one size."""
    context = click.get_current_context()
    for option, only in _OF_TARGET.items():
        given = context.get_parameter_source(option) is ParameterSource.COMMANDLINE
        if given and target not in only:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} is for --target {' or '.join(only)}, got --target {target}")
    params = context.params
    if target == "slurm" and not params["script"]:
        raise UsageError("--target slurm needs --script, such as deploy/slurm/worker.sh")
    if (several := len(set(environments))) == 1 or target == "print":
        return
    if target == "local":
        raise UsageError(
            f"--target local starts workers of one kind, got {several} environments; "
            "run a 'leanq scale' for each"
        )
    if target == "ray":
        if "{env}" not in params["worker"]:
            raise UsageError(
                f"--target ray starts workers of one kind, got {several} environments; put {{env}} "
                "into --worker, as in --worker '--env {env}=/srv/{env}'"
            )
        return
    pattern = params["job_name"] if target == "slurm" else params["hpa"] or params["deployment"]
    if "{env}" not in pattern:
        raise UsageError(
            f"{several} environments would size {pattern!r} in turns; put {{env}} into its name, "
            "as in leanq-worker-{env}, or run a 'leanq scale' for each"
        )
