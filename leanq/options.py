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
            self.fail(f"{value!r} is no time; write 30m, 24h or 1d", param, ctx)
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
                help="Lean processes at a time [default: the CPUs].",
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
