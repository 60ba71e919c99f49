"""The environments that a command is given: folders by name, and Lean's options in each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

from leanq.commands import options
from leanq.errors import UsageError
from leanq.lean.environment import Environment, open_environment
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT
from leanq.queue.settings import check_name


def openers(
    environments: Sequence[str] = (),
    lean: str | None = None,
    env_options: Sequence[str] = (),
    env_options_of_project: bool = False,
) -> dict[str, Callable[[], Environment]]:
    """Returns by name what opens each environment that a command was given; without any, that of
    ``default``. It raises ToolchainError if it cannot.

    Raises:
        UsageError: an environment is not ``NAME=PATH``, named twice, or not there; an option is
            not ``NAME:OPTION=VALUE``, or for an environment that is not named.
    """
    named = _named(environments) or {DEFAULT_ENVIRONMENT: project_here()}
    theirs: dict[str, list[str]] = {name: [] for name in named}
    for text in env_options:
        name, _, option = text.partition(":")
        if not re.fullmatch(r"[^=\s]+=.*", option, re.DOTALL):
            raise UsageError(
                f"--env-option {text!r} is not NAME:OPTION=VALUE, such as "
                f"{next(iter(theirs))}:autoImplicit=false"
            )
        if name not in theirs:
            raise UsageError(
                f"--env-option {text!r} is for an environment {name!r} that --env does not name; "
                f"named are {', '.join(theirs)}"
            )
        theirs[name].append(f"-D{option}")
    return {
        name: partial(
            open_environment,
            *(name, path),
            lean=lean,
            options=theirs[name],
            options_of_project=env_options_of_project,
        )
        for name, path in named.items()
    }


environments = options.combined(
    click.option(
        "--env",
        "environments",
        multiple=True,
        metavar="NAME=PATH",
        help="A Lake project or a folder of .olean files, offered under this name; may be "
        "given several times [default: 'default', the Lake project here or Lean's own library].",
    ),
    options.lean_program,
    click.option(
        "--env-option",
        "env_options",
        multiple=True,
        metavar="NAME:OPTION=VALUE",
        help="An option of Lean's for all texts of an environment, such as "
        "mathlib:autoImplicit=false; may be given several times. It is part of the fingerprint, "
        "and a text's own set_option wins.",
    ),
    click.option(
        "--env-options-of-project",
        is_flag=True,
        help="Take the leanOptions of each environment's lakefile.toml, too; --env-option wins.",
    ),
)
"""Options whose values are the arguments of :func:`openers`."""


def _named(environments: Sequence[str]) -> dict[str, Path | None]:
    named: dict[str, Path | None] = {}
    for text in environments:
        name, equals, path = text.partition("=")
        if not (equals and path):
            raise UsageError(
                f"--env {text!r} is not NAME=PATH, such as mathlib=/srv/mathlib: the folder of a "
                "Lake project, or of .olean files"
            )
        if check_name("environment", name) in named:
            raise UsageError(f"--env names {name!r} twice")
        folder = named[name] = Path(path).expanduser()
        if not folder.exists():
            raise UsageError(
                f"--env {name}: there is no {folder}; name the folder of a Lake project or of "
                ".olean files"
            )
    return named


def project_here() -> Path | None:
    """Returns the Lake project around the current folder, if there is one."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "lakefile.toml").exists() or (folder / "lakefile.lean").exists():
            return folder
    return None
