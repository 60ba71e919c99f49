"""The command line: the tree of commands, and the handling of their errors.

Each file of :mod:`leanq.commands` has a command or a few of a kind, and is imported when one is
called. Exit codes are in :mod:`leanq.commands.common`. leanq's own errors never show a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from typing import Any

import click

from leanq import __version__
from leanq.commands.common import (
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPTED,
    EXIT_READER_GONE,
    EXIT_USAGE,
    Stopped,
    exit_code,
)
from leanq.errors import LeanQError

# Commands whose file has another name.
_MODULES = {
    "verify": "submit",
    "profile": "submit",
    "try": "tryout",
    "step": "state",
    "up": "worker",
    "resume": "pause",
    "report": "cost",
}
_FOLDERS = "TMPDIR for what passes, LEANQ_CACHE for what is kept"
_GROUPS = {
    "Check": ("submit", "verify", "step", "state", "extract", "profile", "mcp"),
    "Fleet": ("up", "worker", "serve", "scale", "env", "doctor", "try"),
    "Data": ("campaign", "export-traces"),
    "Operate": (
        "status",
        "trace",
        "report",
        "metrics",
        "pause",
        "resume",
        "tenant",
        "dead",
        "reap",
    ),
}
_COMMANDS = tuple(name for names in _GROUPS.values() for name in names)


def main() -> None:
    """Runs the program ``leanq``."""
    # The caller may have closed them.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Lean's text is UTF-8 in any locale, and file names can be any bytes.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        code = cli.main(prog_name="leanq", standalone_mode=False)
        # The reader of our output may have gone; find out here, not at the exit.
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except Stopped as stopped:
        code = stopped.exit_code
    except LeanQError as error:
        click.echo(f"leanq: {error}", err=True)
        code = exit_code(error)
    except OSError as error:
        # Keeps the interpreter from complaining when it flushes the same output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            code = EXIT_READER_GONE
        else:
            code = EXIT_INFRASTRUCTURE
            # This stream itself may refuse the text.
            with contextlib.suppress(OSError):
                click.echo(f"leanq: {_told(error)}", err=True)
    try:
        sys.stderr.flush()
    except OSError:
        # Otherwise the interpreter's own flush fails, and makes the exit code 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(code)


def _told(error: OSError) -> str:
    """Returns the error of a file, and what to do about it."""
    said = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if error.errno == errno.ENOENT and not error.filename:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the folder in which this command runs was removed; go to another one"
        # It names no file where no folder takes one.
        return f"{said}; free some room there, or name a folder to write in: {_FOLDERS}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{said}; free some room, or name folders on another disk: {_FOLDERS}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{said}; let this user in there, or name other folders: {_FOLDERS}"
    return said


class _Tree(click.Group):
    """The commands, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"leanq.commands.{_MODULES.get(name, name)}")
        commands = (each for each in vars(module).values() if isinstance(each, click.Command))
        return next(command for command in commands if command.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - max(map(len, _COMMANDS)) - 6
        for title, names in _GROUPS.items():
            commands = ((name, self.get_command(ctx, name)) for name in names)
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name, command.get_short_help_str(width))
                        for name, command in commands
                        if command
                    ],
                    col_max=max(map(len, _COMMANDS)),
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            raise click.NoSuchCommand(args[0], possibilities=_COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # click would exit with 1, which here means that Lean said no.
            return EXIT_READER_GONE


@click.group(
    cls=_Tree, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, "-V", "--version", prog_name="leanq")
@click.pass_context
def cli(context: click.Context) -> None:
    """Lean 4 at the scale of reinforcement learning: a Redis-backed queue of Lean checks."""
    # See https://no-color.org; without the variable, only terminals get colour.
    if os.environ.get("NO_COLOR"):
        context.color = False
