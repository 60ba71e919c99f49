"""The command line: how each command is called, and what becomes of its errors.

Exit codes: 0 all accepted (or done); 1 Lean says no; 2 wrong usage; 3 an infrastructure
verdict, or no Redis. No error of leanq's own ever shows a traceback.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import click

from . import __version__
from .errors import LeanQError, UsageError

if TYPE_CHECKING:
    from .client import Check

_F = TypeVar("_F", bound=Callable[..., Any])


# What the shell says of a program that SIGPIPE has ended.
_READER_GONE = 141


def main() -> None:
    """The program ``leanq``."""
    # The caller may have closed it.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Lean's text is UTF-8 in any locale, and a file's name can be any bytes.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        code = cli.main(prog_name="leanq", standalone_mode=False)
        # Whoever reads our output may have gone already; better here than at the exit.
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = 2
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except UsageError as error:
        click.echo(f"leanq: {error}", err=True)
        code = 2
    except LeanQError as error:
        click.echo(f"leanq: {error}", err=True)
        code = 3
    except OSError as error:
        # Keeps the interpreter from complaining when it flushes the same output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            code = _READER_GONE
        else:
            click.echo(f"leanq: {error}", err=True)
            code = 3
    sys.exit(code)


def _queue_options(command: _F) -> _F:
    url = click.option(
        "--url",
        envvar="LEANQ_URL",
        metavar="URL",
        help="The Redis of the queue: redis://, rediss:// or unix:// [default: $LEANQ_URL].",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
    return url(as_json(command))


def _worker_options(command: _F) -> _F:
    for option in reversed(
        (
            click.option(
                "--slots",
                type=click.IntRange(1, 4096),
                help="Lean processes at a time [default: the CPUs].",
            ),
            click.option(
                "--driver",
                type=click.Choice(["lean", "echo"]),
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


class _Program(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # click would end with 1, which here is Lean's no.
            return _READER_GONE


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="leanq")
def cli() -> None:
    """Lean 4 at the scale of reinforcement learning: a Redis-backed queue of Lean checks."""


@cli.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@_queue_options
@click.option(
    "--env",
    metavar="NAME",
    default="default",
    show_default=True,
    help="The environment to check in.",
)
@click.option(
    "--tenant", metavar="NAME", default="default", show_default=True, help="Who shares fairly."
)
@click.option(
    "--priority",
    type=click.IntRange(0, 2),
    default=1,
    show_default=True,
    help="Urgency: 0 is most urgent.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=60.0,
    show_default=True,
    help="Budget in CPU seconds, of Lean with all its descendants.",
)
@click.option(
    "--memory",
    "memory_mb",
    type=int,
    default=4096,
    show_default=True,
    help="Budget in MB of resident memory.",
)
@click.option(
    "--allow-axiom",
    "allow_axioms",
    multiple=True,
    metavar="NAME",
    help="Allow an axiom beside the environment's own.",
)
@click.option("--audit/--no-audit", default=True, help="Audit what Lean accepts [default: yes].")
@click.option("--replay", is_flag=True, help="Replay what Lean accepts in the kernel.")
def submit(files: tuple[str, ...], url: str | None, as_json: bool, **options: Unpack[Check]) -> int:
    """Check Lean files and print each one's verdict as it comes.

    A FILE of - is standard input. Without a queue (--url, LEANQ_URL or leanq up) a server and
    a worker are started for the length of the call.

    Exit code: 0 if all are accepted, 1 if Lean says no, 2 for bad input, 3 where leanq could
    not give Lean's verdict.
    """
    from .commands.submit import submit as run

    return run(files, url, options, as_json)


@cli.command()
@_queue_options
@_worker_options
def worker(url: str | None, as_json: bool, **options: Any) -> None:
    """Work on the queue until SIGTERM, then drain."""
    from .commands.fleet import work

    work(url, as_json, **options)


@cli.command()
@_worker_options
def up(**options: Any) -> None:
    """Run a server and a worker that later commands find."""
    from .commands.fleet import up as run

    run(**options)


@cli.command()
@_queue_options
@click.option("--watch", is_flag=True, help="Go on until interrupted.")
def reap(url: str | None, as_json: bool, watch: bool) -> None:
    """Give back the work of workers that vanished."""
    from .commands.fleet import reap as run

    run(url, as_json, watch)


@cli.group()
def dead() -> None:
    """Look after requests that took down too many workers."""


@dead.command("list")
@_queue_options
@click.option(
    "--most",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="How many to show, the newest first.",
)
def list_dead(url: str | None, as_json: bool, most: int) -> None:
    """Show the dead letters, the newest first."""
    from .commands.dead import show_all

    show_all(url, as_json, most)


@dead.command("show")
@click.argument("rid")
@_queue_options
def show_dead(rid: str, url: str | None, as_json: bool) -> None:
    """Show one dead letter with its Lean code."""
    from .commands.dead import show

    show(rid, url, as_json)


@dead.command("retry")
@click.argument("rids", nargs=-1, required=True, metavar="RID...")
@_queue_options
def retry_dead(rids: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Send dead letters once more, each as a new request.

    Prints each new request's id, by which its reply can be collected. The old id keeps its
    reply.
    """
    from .commands.dead import retry

    retry(rids, url, as_json)


@dead.command("drop")
@click.argument("rids", nargs=-1, required=True, metavar="RID...")
@_queue_options
def drop_dead(rids: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Remove dead letters for good."""
    from .commands.dead import drop

    drop(rids, url, as_json)


@cli.command()
@_queue_options
def status(url: str | None, as_json: bool) -> None:
    """Show what waits, runs and died, and which workers there are."""
    from .commands.look import status as run

    run(url, as_json)


@cli.command()
@_queue_options
@click.option("--lean", metavar="PATH", help="The lean program to look at.")
def doctor(url: str | None, as_json: bool, lean: str | None) -> int:
    """Show what is installed, what works, and what to do about the rest."""
    from .commands.look import doctor as run

    return run(url, as_json, lean)
