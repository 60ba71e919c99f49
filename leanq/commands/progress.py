"""Shows a campaign's progress, on a terminal or in plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import timedelta
from typing import Any, Self

import click

from leanq.campaigns.coordinator import Command, Progress
from leanq.fleet.shown import counted

# The time between two plain lines.
_LINE_S = 10.0
_BAD_ROWS_SHOWN = 100


class Shown(contextlib.ExitStack):
    """Shows a campaign's progress on standard error.

    Attributes:
        last: the last progress that was reported.
    """

    def __init__(self, data: str, out: str, quiet: bool) -> None:
        super().__init__()
        self.last = Progress(None, 0, {})
        self._data = data
        self._out = out
        self._quiet = quiet
        self._bad = 0
        self._bar: Any = None
        self._printed_s = time.monotonic()
        # Of the first progress, for the rate: the time, and the rows.
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if sys.stderr.isatty() and not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), TextColumn("{task.description}"))
            self._bar = self.enter_context(
                # Lines are not wrapped, since people copy them.
                Bar(*columns, transient=True, console=Console(stderr=True, soft_wrap=True))
            )
            self._task = self._bar.add_task("", total=None)
        return self

    def resumes(self, text: str) -> None:
        _print(f"resumes {self._out}: {text}")

    async def update(self, progress: Progress) -> Command:
        self.last = progress
        now_s = time.monotonic()
        self._first = self._first or (now_s, progress.rows)
        if self._bar:
            text = self._text(progress, now_s)
            self._bar.update(
                self._task, total=progress.total, completed=progress.rows, description=text
            )
        elif not self._quiet and now_s - self._printed_s >= _LINE_S:
            self._printed_s = now_s
            _print(self._text(progress, now_s))
        return "run"

    def bad_row(self, line: int, error: str) -> None:
        self._bad += 1
        if self._bad <= _BAD_ROWS_SHOWN:
            _print(f"{self._data}:{line}: {error}")
        elif self._bad == _BAD_ROWS_SHOWN + 1:
            _print("further bad rows are only in the results")

    def warn(self, text: str) -> None:
        _print(f"WARNING: {text}")

    @property
    def rows(self) -> str:
        """How many rows are done, of how many."""
        of = "" if self.last.total is None else f" of {self.last.total:,}"
        return f"{self.last.rows:,}{of} rows"

    def _text(self, progress: Progress, now_s: float) -> str:
        first_s, first = self._first or (now_s, 0)
        rate = (progress.rows - first) / (now_s - first_s) if now_s > first_s else 0.0
        parts = [self.rows, f"{rate:,.1f}/s"]
        if progress.total is not None and rate:
            left_s = round((progress.total - progress.rows) / rate)
            parts.append(f"{timedelta(seconds=left_s)} left")
        return "; ".join([*parts, counted(progress.counts) or "nothing"])


def _print(text: str) -> None:
    # click's own choice of the stream would write across the progress bar.
    click.echo(f"leanq: {text}", file=sys.stderr)
