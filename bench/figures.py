"""Repeats the figures of README.md; names those that have moved by more than a quarter."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]
_ROW = re.compile(r"\| (.+?) \| ([\d.]+)(?: \S+)? \| `python (.+?)`: `(\w+)` \|")
_MOVED = 1.25


class Figure(NamedTuple):
    """A row of README's table.

    Attributes:
        seen: the number that README gives.
        command: the words behind ``python``; they print a line of JSON.
        key: the figure's name in that line.
    """

    title: str
    seen: float
    command: str
    key: str


def figures(readme: str) -> Iterator[Figure]:
    """Yields the figures of a README."""
    for title, seen, command, key in _ROW.findall(readme):
        yield Figure(title, float(seen), command, key)


@cache
def printed(command: str) -> dict[str, float]:
    """Runs a command and returns the line of JSON that it prints."""
    words = [sys.executable, *shlex.split(command)]
    done = subprocess.run(words, cwd=_ROOT, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Exits with 1 if a figure has moved."""
    moved = False
    has_library = bool(os.environ.get("LEANQ_LEAN"))
    for each in figures((_ROOT / "README.md").read_text()):
        if each.command.startswith("bench/users.py") and not has_library:
            print(f"SKIPPED {each.title}: set LEANQ_LEAN to the lean of a full library")
            continue
        now = printed(each.command)[each.key]
        has_moved = not 1 / _MOVED <= now / each.seen <= _MOVED
        moved = moved or has_moved
        print(f"{'MOVED' if has_moved else 'ok   '} {each.title}: {each.seen:g}, now {now:g}")
    sys.exit(moved)


if __name__ == "__main__":
    main()
