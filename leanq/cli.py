"""The command line: how each command is called, and what becomes of its errors.

Exit codes: 0 all accepted (or done); 1 Lean says no; 2 wrong usage; 3 an infrastructure
verdict, or no Redis. No error of leanq's own ever shows a traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any, Unpack

import click

from leanq import __version__
from leanq.commands import options
from leanq.commands.campaign_group import campaign
from leanq.errors import LeanQError, UsageError

if TYPE_CHECKING:
    from leanq.producer.request_builder import Check

# What the shell says of a program that SIGPIPE has ended.
_READER_GONE = 141


def main() -> None:
    """The program ``leanq``."""
    # The caller may have closed them.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
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
            code = 3
            # It may be this stream that takes nothing.
            with contextlib.suppress(OSError):
                click.echo(f"leanq: {error}", err=True)
    sys.exit(code)


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


cli.add_command(campaign)


@cli.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@options.queue
@options.env
@options.lean
def submit(files: tuple[str, ...], url: str | None, as_json: bool, **how: Unpack[Check]) -> int:
    """Check Lean files and print each one's verdict as it comes.

    A FILE of - is standard input. Without a queue (--url, LEANQ_URL or leanq up) a server and
    a worker are started for the length of the call.

    Exit code: 0 if all are accepted, 1 if Lean says no, 2 for bad input, 3 where leanq could
    not give Lean's verdict.
    """
    from leanq.commands.submit import submit as run

    return run(files, url, how, as_json)


@cli.command()
@click.argument("state")
@click.argument("tactic")
@options.queue
@click.option("--env", metavar="NAME", help="The state's environment [default: looked up].")
@options.lean
def step(state: str, tactic: str, url: str | None, as_json: bool, **how: Any) -> int:
    """Try a tactic on a state and print what is left to prove.

    STATE is an id that a check or a step has printed. A TACTIC of - is standard input.

    Exit code: as of submit; 1 also where goals are left.
    """
    from leanq.commands.state import step as run

    return run(state, tactic, url, as_json, _in(how.pop("env"), how))


@cli.group()
def state() -> None:
    """Look at states, and carry them from queue to queue."""


@state.command("show")
@click.argument("state")
@options.queue
@click.option("--env", metavar="NAME", help="The state's environment [default: looked up].")
def show_state(state: str, url: str | None, as_json: bool, env: str | None) -> None:
    """Show the recipe of a state: its source up to the hole, and the tactics so far."""
    from leanq.commands.state import show

    show(state, url, as_json, _in(env, {}))


@state.command("export")
@click.argument("state")
@options.queue
@click.option("--env", metavar="NAME", help="The state's environment [default: looked up].")
@click.option(
    "--output", metavar="FILE", default="-", show_default=True, help="Where to; - is the output."
)
def export_state(state: str, url: str | None, as_json: bool, env: str | None, output: str) -> None:
    """Write bytes that mean the same state wherever there is the same environment.

    With --json an object with these bytes in base 64.
    """
    from leanq.commands.state import export

    export(state, url, as_json, _in(env, {}), output)


@state.command("import")
@click.argument("file")
@options.queue
@click.option(
    "--env", metavar="NAME", default="default", show_default=True, help="The environment."
)
def import_state(file: str, url: str | None, as_json: bool, env: str) -> None:
    """Take in a state that was exported, and print its id. A FILE of - is standard input."""
    from leanq.commands.state import import_

    import_(file, url, as_json, _in(env, {}))


@cli.command()
@options.queue
@options.worker
def worker(url: str | None, as_json: bool, **how: Any) -> None:
    """Work on the queue until SIGTERM, then drain."""
    from leanq.commands.fleet import work

    work(url, as_json, **how)


@cli.command()
@options.worker
def up(**how: Any) -> None:
    """Run a server and a worker that later commands find."""
    from leanq.commands.fleet import up as run

    run(**how)


@cli.command()
@options.queue
@click.option("--watch", is_flag=True, help="Go on until interrupted.")
def reap(url: str | None, as_json: bool, watch: bool) -> None:
    """Give back the work of workers that vanished."""
    from leanq.commands.fleet import reap as run

    run(url, as_json, watch)


@cli.command()
@options.queue
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9464,
    show_default=True,
    help="Where to listen.",
)
@click.option("--once", is_flag=True, help="Print them instead.")
@click.option(
    "--since",
    "since_s",
    type=options.DURATION,
    metavar="TIME",
    help="Print those of the last 12h or 1d that were noted by the minute, but of the last 3h.",
)
def metrics(url: str | None, as_json: bool, port: int, once: bool, since_s: float | None) -> None:
    """Show the fleet's metrics to Prometheus, at /metrics.

    What --since prints is for 'promtool tsdb create-blocks-from openmetrics', where Prometheus was
    away. The last three hours it still writes itself.
    """
    from leanq.commands import fleet

    if since_s is None:
        fleet.metrics(url, as_json, port, once)
    else:
        fleet.metrics_since(url, as_json, since_s)


@cli.command()
@options.queue
@options.held
def pause(url: str | None, as_json: bool, env: str | None, tenant: str | None) -> None:
    """Hold an environment or a tenant back: nothing of it starts."""
    from leanq.commands.pause import hold_back

    hold_back(url, as_json, env, tenant, hold=True)


@cli.command()
@options.queue
@options.held
def resume(url: str | None, as_json: bool, env: str | None, tenant: str | None) -> None:
    """Let an environment or a tenant go on that was paused."""
    from leanq.commands.pause import hold_back

    hold_back(url, as_json, env, tenant, hold=False)


@cli.command()
@options.queue
@options.scale
def scale(url: str | None, as_json: bool, **options: Any) -> None:
    """Size a fleet by what waits and what comes."""
    from leanq.commands.scale import scale as run

    run(url, as_json, **options)


@cli.group()
def dead() -> None:
    """Look after requests that took down too many workers."""


@dead.command("list")
@options.queue
@click.option(
    "--most",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="How many to show, the newest first.",
)
def list_dead(url: str | None, as_json: bool, most: int) -> None:
    """Show the dead letters, the newest first."""
    from leanq.commands.dead import show_all

    show_all(url, as_json, most)


@dead.command("show")
@click.argument("request_id")
@options.queue
def show_dead(request_id: str, url: str | None, as_json: bool) -> None:
    """Show one dead letter with its Lean code."""
    from leanq.commands.dead import show

    show(request_id, url, as_json)


@dead.command("retry")
@click.argument("request_ids", nargs=-1, required=True, metavar="REQUEST_ID...")
@options.queue
def retry_dead(request_ids: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Send dead letters once more, each as a new request.

    Prints each new request's id, which 'attach' of Python's clients waits for. The old id keeps
    its reply.
    """
    from leanq.commands.dead import retry

    retry(request_ids, url, as_json)


@dead.command("drop")
@click.argument("request_ids", nargs=-1, required=True, metavar="REQUEST_ID...")
@options.queue
def drop_dead(request_ids: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Remove dead letters for good."""
    from leanq.commands.dead import drop

    drop(request_ids, url, as_json)


@cli.command()
@options.queue
@click.option(
    "--since",
    "since_s",
    type=options.DURATION,
    metavar="TIME",
    help="What happened in the last 30m, 24h or 1d, by periods.",
)
@click.option("--watch", is_flag=True, help="Look each second until interrupted.")
def status(url: str | None, as_json: bool, since_s: float | None, watch: bool) -> None:
    """Show what waits, runs and died, and which workers there are."""
    if watch:
        if since_s is not None:
            raise UsageError("--watch shows what happens and --since what happened; give one")
        from leanq.commands.watch import watch as run

        run(url, as_json)
        return
    from leanq.commands import status as look

    if since_s is None:
        look.status(url, as_json)
    else:
        look.since(url, as_json, since_s)


@cli.command()
@options.queue
@click.option("--lean", metavar="PATH", help="The lean program to look at.")
@options.repl
def doctor(url: str | None, as_json: bool, lean: str | None, repl: str | None) -> int:
    """Show what is installed, what works, and how to mend the rest."""
    from leanq.commands.doctor import doctor as run

    return run(url, as_json, lean, repl)


def _in(env: str | None, how: Any) -> Any:
    """``how`` in an environment, if one is named."""
    return how if env is None else {**how, "env": env}
