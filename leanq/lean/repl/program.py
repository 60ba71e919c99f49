"""Finds the REPL, and the command that starts it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leanq.errors import ToolchainError, UsageError
from leanq.lean.environment import Environment

_LAKE_ENV = ["lake", "env"]
_EXAMPLE = "such as --repl 'lake env ../repl/.lake/build/bin/repl'"


@dataclass(frozen=True, slots=True)
class ReplProgram:
    """The start of a REPL: the command, and the folders that it has to read."""

    argv: tuple[str, ...]
    readable: tuple[Path, ...]

    def __str__(self) -> str:
        return shlex.join(self.argv)


def find_repl(command: str, environment: Environment, environ: Mapping[str, str]) -> ReplProgram:
    """Finds the program that ``command`` means; looks relative paths up here, then in the
    environment's project. A ``lake env`` in front of it is left out: its settings are known, and a
    sandbox has no lake. Raises UsageError or ToolchainError."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--repl {command!r} cannot be read: {error}") from None
    if words[:2] == _LAKE_ENV:
        words = words[2:]
    if not words:
        raise UsageError(f"--repl {command!r} names no program; give its command, {_EXAMPLE}")
    folders = [Path.cwd(), *([environment.project] if environment.project else [])]
    program = _program(words[0], folders, environ)
    if program is None:
        raise ToolchainError(
            f"there is no program {words[0]!r} to start the REPL with; build the REPL with the "
            f"environment's own Lean and give its command, {_EXAMPLE}"
        )
    arguments = [_path(word, folders) or word for word in words[1:]]
    paths = (program, *(each for each in arguments if isinstance(each, Path)))
    # Libraries may lie beside its files, and both behind links.
    both = [path for each in paths for path in (each, each.resolve())]
    readable = dict.fromkeys(path if path.is_dir() else path.parent for path in both)
    return ReplProgram((str(program), *map(str, arguments)), tuple(readable))


def _program(word: str, folders: list[Path], environ: Mapping[str, str]) -> Path | None:
    if os.sep not in word:
        found = shutil.which(word, path=environ.get("PATH", ""))
        return Path(found).absolute() if found else None
    path = _path(word, folders)
    return path if path and path.is_file() and os.access(path, os.X_OK) else None


def _path(word: str, folders: list[Path]) -> Path | None:
    """Returns the file or folder that a word names, if it does."""
    found = (folder / Path(word).expanduser() for folder in folders)
    return next((path for path in found if path.exists()), None)
