"""Environments whose modules stand in other folders than those that were opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from leanq.lean.environment import Environment
from leanq.lean.files import compiled_modules


def with_folders(environment: Environment, folders: Iterable[Path]) -> Environment:
    """Returns the environment with this search path, and with the files that are there now."""
    path = tuple(folders)
    found = {file.path: file for folder in path for file in compiled_modules(folder)}
    return replace(environment, search_path=path, found=found)
