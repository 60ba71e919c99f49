"""The options that several commands share, as decorators."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class _Duration(click.ParamType[float]):
    """A time such as 90s, 30m, 24h or 1d, as seconds."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if not match:
            self.fail(f"{value!r} is not a duration; expected 30m, 24h or 1d", param, ctx)
        return float(match[1]) * _UNITS_S[match[2]]


DURATION = _Duration()

_F = TypeVar("_F", bound=Callable[..., Any])


def queue(command: _F) -> _F:
    """Which queue, and what for."""
    url = click.option(
        "--url",
        envvar="LEANQ_URL",
        metavar="URL",
        help="The Redis of the queue: redis://, rediss:// or unix:// [default: $LEANQ_URL].",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
    return url(as_json(command))


env = click.option(
    "--env",
    metavar="NAME",
    default="default",
    show_default=True,
    help="The environment to check in.",
)

repl = click.option(
    "--repl",
    metavar="COMMAND",
    help="What starts the REPL: 'lake env path/to/repl'.",
)


def worker(command: _F) -> _F:
    """What a worker is made of."""
    for option in reversed(
        (
            click.option(
                "--slots",
                type=click.IntRange(1, 4096),
                help="Lean processes at a time [default: the CPUs, or the share of them].",
            ),
            click.option(
                "--driver",
                type=click.Choice(["lean", "repl", "echo"]),
                default="lean",
                show_default=True,
                help="What answers requests.",
            ),
            click.option(
                "--env",
                "environments",
                multiple=True,
                metavar="NAME=PATH",
                help="Offer a Lake project or a folder of .olean files under this name.",
            ),
            click.option("--lean", metavar="PATH", help="The lean program."),
            repl,
            click.option(
                "--trust-steps",
                is_flag=True,
                help="Take the REPL's word, which can be wrong, for a step that completes a proof: "
                "no audit, no list of axioms. Not with --replay.",
            ),
            click.option(
                "--metrics-port",
                type=click.IntRange(0, 65535),
                metavar="PORT",
                help="Serve /metrics and /healthz on this port; 0 takes any, and logs it.",
            ),
            click.option(
                "--grace",
                "grace_s",
                type=click.FloatRange(0, 3600),
                default=10.0,
                show_default=True,
                help="Seconds between SIGTERM and the end; unfinished work is given back.",
            ),
            click.option(
                "--nice",
                type=click.IntRange(0, 19),
                default=0,
                show_default=True,
                help="Niceness of the Lean processes.",
            ),
            click.option(
                "--cpu-share",
                type=click.FloatRange(0, 1, min_open=True),
                default=1.0,
                show_default=True,
                help="Keep the worker and its Lean processes to this share of the CPUs.",
            ),
        )
    ):
        command = option(command)
    return command


def lean(command: _F) -> _F:
    """How Lean is asked."""
    for option in reversed(
        (
            click.option(
                "--tenant",
                metavar="NAME",
                default="default",
                show_default=True,
                help="Who shares fairly.",
            ),
            click.option(
                "--priority",
                type=click.IntRange(0, 2),
                default=1,
                show_default=True,
                help="Urgency: 0 is most urgent.",
            ),
            click.option(
                "--timeout",
                "timeout_s",
                type=float,
                default=60.0,
                show_default=True,
                help="Budget in CPU seconds, of Lean with all its descendants.",
            ),
            click.option(
                "--memory",
                "memory_mb",
                type=int,
                default=4096,
                show_default=True,
                help="Budget in MB of resident memory.",
            ),
            click.option(
                "--allow-axiom",
                "allow_axioms",
                multiple=True,
                metavar="NAME",
                help="Allow an axiom beside the environment's own.",
            ),
            click.option(
                "--audit/--no-audit", default=True, help="Audit what Lean accepts [default: yes]."
            ),
            click.option("--replay", is_flag=True, help="Replay what Lean accepts in the kernel."),
        )
    ):
        command = option(command)
    return command


def held(command: _F) -> _F:
    """What is held back."""
    held_env = click.option("--env", metavar="NAME", help="An environment.")
    held_tenant = click.option("--tenant", metavar="NAME", help="A tenant, in all environments.")
    return held_env(held_tenant(command))


_KUBERNETES = ("namespace", "deployment", "hpa")
_LOOP = ("target", "environments", "every_s", "port", "worker")


def scale(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a fleet is sized."""

    def grouped(url: str | None, as_json: bool, **given: Any) -> Any:
        kubernetes = {name: given.pop(name) for name in _KUBERNETES}
        loop = {name: given.pop(name) for name in _LOOP}
        return command(url, as_json, kubernetes=kubernetes, how=given, **loop)

    grouped.__name__, grouped.__doc__ = command.__name__, command.__doc__
    for option in reversed(
        (
            click.option(
                "--target",
                type=click.Choice(["k8s", "local", "print"]),
                required=True,
                help="Whom to order workers from: a cluster, this machine, or nobody.",
            ),
            click.option(
                "--policy",
                type=click.Choice(["deadline", "reference"]),
                default="deadline",
                show_default=True,
                help="What the decision is made by.",
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
                "--floor",
                "least",
                type=click.IntRange(0),
                default=0,
                show_default=True,
                help="The fewest workers.",
            ),
            click.option(
                "--ceiling",
                "most",
                type=click.IntRange(1),
                default=100,
                show_default=True,
                help="The most workers.",
            ),
            click.option(
                "--slots",
                type=click.IntRange(1),
                default=1,
                show_default=True,
                help="Slots of a worker, while there is none to be asked.",
            ),
            click.option(
                "--deadline",
                "deadline_s",
                type=DURATION,
                default="10m",
                show_default=True,
                metavar="TIME",
                help="Within which a backlog is to be cleared.",
            ),
            click.option(
                "--settle",
                "excess_s",
                type=DURATION,
                default="4m",
                show_default=True,
                metavar="TIME",
                help="For how long there have to be too many workers before some go.",
            ),
            click.option(
                "--every",
                "every_s",
                type=DURATION,
                default="15s",
                show_default=True,
                metavar="TIME",
                help="Between two decisions.",
            ),
            click.option(
                "--port",
                type=click.IntRange(0, 65535),
                metavar="PORT",
                help="Serve the fleet's metrics and the scaler's on this port.",
            ),
            click.option(
                "--worker",
                default="",
                metavar="OPTIONS",
                help="With local: the options of 'leanq worker'.",
            ),
            click.option(
                "--namespace",
                default="default",
                show_default=True,
                metavar="NAME",
                help="With k8s: where the Deployments are.",
            ),
            click.option(
                "--deployment",
                default="leanq-worker",
                show_default=True,
                metavar="NAME",
                help="With k8s: whose size to set; {env} in it is the environment's name.",
            ),
            click.option(
                "--hpa",
                metavar="NAME",
                help="With k8s: set this autoscaler's minReplicas instead.",
            ),
        )
    ):
        grouped = option(grouped)
    return grouped
