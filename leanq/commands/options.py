"""The options that several commands share, as decorators."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_F = TypeVar("_F", bound=Callable[..., Any])


class _Duration(click.ParamType[float]):
    """A time such as 90s, 30m, 24h or 1d, as seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if not match:
            self.fail(f"{value!r} is not a duration; expected 30m, 24h or 1d", param, ctx)
        return float(match[1]) * _UNITS_S[match[2]]


DURATION = _Duration()


class FiniteRange(click.FloatRange):
    """A range of numbers; click's own takes nan for one that lies in any."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def combined(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options as one decorator; help lists them in this order."""

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


url = click.option(
    "--url",
    envvar="LEANQ_URL",
    metavar="URL",
    help="The queue's Redis: redis://, rediss:// or unix:// [default: $LEANQ_URL, else that of "
    "'leanq up'].",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")

queue = combined(url, as_json)
"""What every command that talks to the queue takes."""

env = click.option(
    "--env",
    metavar="NAME",
    default="default",
    show_default=True,
    help="The environment: the Lean version and libraries to check with.",
)

repl = click.option(
    "--repl",
    metavar="COMMAND",
    help="What starts Lean's REPL, such as 'lake env path/to/repl'.",
)

embedded = click.option(
    "--embedded",
    is_flag=True,
    help="Run a server and a worker for this call, whatever Redis is named.",
)

env_of_state = click.option(
    "--env",
    metavar="NAME",
    help="The state's environment [default: looked up].",
)

lean = combined(
    click.option(
        "--tenant",
        metavar="NAME",
        default="default",
        show_default=True,
        help="On whose behalf; tenants are served round-robin.",
    ),
    click.option(
        "--priority",
        type=click.IntRange(0, 2),
        default=1,
        show_default=True,
        help="Urgency: 0 is the most urgent, 2 the least.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=float,
        metavar="SECONDS",
        default=60.0,
        show_default=True,
        help="Limit in CPU seconds, of Lean with all its child processes: 0.01 to 86400.",
    ),
    click.option(
        "--memory",
        "memory_mb",
        type=int,
        metavar="MB",
        default=4096,
        show_default=True,
        help="Limit in MB of resident memory: 16 to 16777216.",
    ),
    click.option(
        "--scratch",
        "scratch_mb",
        type=int,
        metavar="MB",
        default=256,
        show_default=True,
        help="Limit in MB of the files that Lean's processes may leave in their scratch folder: "
        "1 to 16777216.",
    ),
    click.option(
        "--allow-axiom",
        "allow_axioms",
        multiple=True,
        metavar="NAME",
        help="Allow an axiom besides the environment's own; may be given several times.",
    ),
    click.option(
        "--audit/--no-audit",
        default=True,
        help="Judge what Lean accepts; without, it is unjudged [default: yes].",
    ),
    click.option(
        "--trust-programs",
        is_flag=True,
        help="Vouch for a text that runs programs of its own while Lean reads it: it can then be "
        "accepted, and its reason stays runs_programs.",
    ),
)
"""How Lean is asked; the fields of :class:`~leanq.producer.request_builder.Check`."""


def in_environment(env: str | None, how: Any) -> Any:
    """``how`` with the environment, if one was named."""
    return how if env is None else {**how, "env": env}
