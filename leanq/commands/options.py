"""Options that several commands share, as decorators."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from leanq.queue.requests import MEMORY_MB, SCRATCH_MB, TIMEOUT_S
from leanq.queue.settings import without_password

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_F = TypeVar("_F", bound=Callable[..., Any])

INSECURE_HTTP = "leanq.insecure_http"
"""Whether the running command was given ``--insecure-http``, in its context: only the client needs
it."""


class Duration(click.ParamType[float]):
    """A time such as 90s, 30m, 24h or 1d, in seconds; at least ``least_s``."""

    name = "duration"

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if not match:
            self.fail(f"{value!r} is not a duration; expected 90s, 30m, 24h or 1d", param, ctx)
        duration_s = float(match[1]) * _UNITS_S[match[2]]
        if duration_s < self._least_s:
            self.fail(f"expected {self._least_s:g}s or more, got {value!r}", param, ctx)
        return duration_s


DURATION = Duration()


class FiniteRange(click.FloatRange):
    """A range of numbers, in ``unit``. Unlike click, it takes no nan, and its errors name both the
    unit and the bounds."""

    def __init__(
        self,
        least: float,
        most: float | None = None,
        unit: str = "",
        *,
        min_open: bool = False,
        whole: bool = False,
        metavar: str = "N",
    ) -> None:
        super().__init__(least, most, min_open=min_open)
        self._unit, self._whole = unit, whole
        self._metavar = (unit or metavar).split()[-1].upper()
        self.name = "integer range" if whole else "float range"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self._metavar

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float | None = None
        with contextlib.suppress(click.BadParameter, ValueError):
            given = super().convert(value, param, ctx)
            if not math.isnan(given):
                number = int(str(value)) if self._whole else given
        if number is None:
            bounds = f"of at least {self.min:.10g}"
            if self.max is not None:
                bounds = f"between {self.min:.10g} and {self.max:.10g}"
            if self.min_open:
                bounds = f"above {self.min:.10g} and up to {self.max:.10g}"
            text = f"{'whole ' if self._whole else ''}number {bounds} {self._unit}".rstrip()
            self.fail(f"expected a {text}, got {value!r}", param, ctx)
        return number


WholeRange = partial(FiniteRange, whole=True)
PORT = WholeRange(0, 65535, metavar="PORT")


def combined(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Combines several options into one decorator; help lists them in this order."""

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _warn_of_password(
    context: click.Context, param: click.Parameter, value: str | None
) -> str | None:
    given = context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
    if value and given and value != without_password(value):
        click.echo(
            "leanq: WARNING: --url has a password, which everyone on this machine can read in the "
            "list of processes; put it into LEANQ_PASSWORD, or the whole URL into LEANQ_URL",
            err=True,
        )
    return value


def _url(places: str) -> Callable[[_F], _F]:
    text = f"{places} [default: $LEANQ_URL, else that of 'leanq up']."
    return click.option(
        "--url", envvar="LEANQ_URL", metavar="URL", help=text, callback=_warn_of_password
    )


url = _url("The queue's Redis: redis://, rediss:// or unix://")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")

queue = combined(url, as_json)
"""The options of every command that talks to the queue."""


def _keep(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[INSECURE_HTTP] = value


client = combined(
    _url(
        "The queue's Redis: redis://, rediss:// or unix://; or a gateway, https://, its key in "
        "LEANQ_KEY"
    ),
    click.option(
        "--insecure-http",
        is_flag=True,
        expose_value=False,
        callback=_keep,
        help="Allow http:// to a gateway on another machine, which shows the key and the texts to "
        "the network.",
    ),
    as_json,
)
"""The options of every command that works as a client, and so also through a gateway."""

metrics_host = click.option(
    "--metrics-host",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="The address for metrics, for whoever reaches it; 0.0.0.0 for all addresses.",
)

env = click.option(
    "--env",
    metavar="NAME",
    default="default",
    help="The environment: the Lean version and libraries to check with.",
)

lean_program = click.option(
    "--lean", metavar="PATH", help="The lean program [default: $LEANQ_LEAN, or found]."
)

embedded = click.option(
    "--embedded",
    is_flag=True,
    help="Run a server and a worker for this call, whatever Redis is named.",
)

wait = click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(0, 7 * 86400, "seconds"),
    help="How long to wait for a worker that serves the environment [default: without end on a "
    "terminal, else 600]. It has no effect with a gateway.",
)

env_of_state = click.option(
    "--env",
    metavar="NAME",
    help="The state's environment [default: looked up].",
)

budget = combined(
    click.option(
        "--tenant",
        metavar="NAME",
        default="default",
        help="The tenant who asks; tenants take turns.",
    ),
    click.option(
        "--priority",
        type=WholeRange(0, 2),
        default=1,
        help="Urgency: 0 is the most urgent, 2 the least.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=FiniteRange(*TIMEOUT_S, "CPU seconds"),
        default=60.0,
        help="Limit in CPU seconds, of Lean with all its child processes.",
    ),
    click.option(
        "--memory",
        "memory_mb",
        type=WholeRange(*MEMORY_MB, "MB"),
        default=4096,
        help="Limit in MB of resident memory.",
    ),
    click.option(
        "--scratch",
        "scratch_mb",
        type=WholeRange(*SCRATCH_MB, "MB"),
        default=256,
        help="Limit in MB of the files that Lean's processes may leave in their scratch folder.",
    ),
)
"""The options of a request that say who asks, and how much it may use."""

lean = combined(
    budget,
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
        show_default=False,
        help="Judge a text that Lean takes; otherwise it ends unjudged [default: yes].",
    ),
    click.option(
        "--trust-programs",
        is_flag=True,
        help="Vouch for texts that run programs of their own while Lean reads them. They can then "
        "be accepted, and keep the reason runs_programs.",
    ),
)
"""The options of a request; the fields of :class:`~leanq.producer.request_builder.Check`."""


def in_environment(env: str | None, how: Any) -> Any:
    """Returns ``how`` with the environment, if one was named."""
    return how if env is None else {**how, "env": env}
