"""Environments whose modules stand in other folders than those that were opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from leanq.lean import environment as environment_module
from leanq.lean.environment import Environment
from leanq.lean.run.files import compiled_modules


def with_folders(environment: Environment, folders: Iterable[Path]) -> Environment:
    """Returns the environment with this search path, and with the files that are there now."""
    path = tuple(folders)
    found = {file.path: file for folder in path for file in compiled_modules(folder)}
    return as_opened(replace(environment, search_path=path, found=found))


def as_opened(made: Environment) -> Environment:
    """The environment as one that was opened so, whose files have not changed since."""
    scan = environment_module._scan(made.toolchain, made.search_path, made.project)  # noqa: SLF001 - its files
    return replace(made, stamp=scan.stamp())
