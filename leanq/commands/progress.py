"""How far a campaign is, on a terminal or in plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

import click

from leanq.campaigns.coordinator import Command, Progress

# Plain lines come so far apart (s); rates are those of the last minute.
_LINE_S = 10.0
_RATE_S = 60.0
_BAD_SHOWN = 100


class Shown(contextlib.ExitStack):
    """Shows a campaign's progress on standard error; ``counts`` is the last seen."""

    def __init__(self, data: str, quiet: bool) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self._data = data
        self._quiet = quiet
        self._bad = 0
        self._bar: Any = None
        self._told_s = time.monotonic()
        # (time in s, rows)
        self._seen: deque[tuple[float, int]] = deque()

    def __enter__(self) -> Self:
        super().__enter__()
        if sys.stderr.isatty() and not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (BarColumn(), TextColumn("{task.description}"))
            self._bar = self.enter_context(
                # Lines are left whole, as people copy them.
                Progress(*columns, transient=True, console=Console(stderr=True, soft_wrap=True))
            )
            self._task = self._bar.add_task("", total=None)
        return self

    async def look(self, progress: Progress) -> Command:
        self.counts = dict(progress.counts)
        now_s = time.monotonic()
        self._seen.append((now_s, progress.rows))
        while self._seen[0][0] < now_s - _RATE_S:
            self._seen.popleft()
        if self._bar:
            text = self._text(progress)
            self._bar.update(
                self._task, total=progress.total, completed=progress.rows, description=text
            )
        elif not self._quiet and now_s - self._told_s >= _LINE_S:
            self._told_s = now_s
            _tell(self._text(progress))
        return "go on"

    def bad(self, line: int, error: str) -> None:
        self._bad += 1
        if self._bad <= _BAD_SHOWN:
            _tell(f"{self._data}:{line}: {error}")
        elif self._bad == _BAD_SHOWN + 1:
            _tell("more bad rows are in the results alone")

    def _text(self, progress: Progress) -> str:
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        rate = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        of = "" if progress.total is None else f" of {progress.total:,}"
        parts = [f"{progress.rows:,}{of} rows", f"{rate:,.1f}/s"]
        if progress.total is not None and rate:
            parts.append(f"{_clock((progress.total - progress.rows) / rate)} left")
        return "; ".join([*parts, summary(progress.counts)])


def _tell(text: str) -> None:
    # Named, as click would write past what keeps lines above a progress bar.
    click.echo(f"leanq: {text}", file=sys.stderr)


def summary(counts: Mapping[str, int]) -> str:
    """Counts by verdict as one line, the most frequent first."""
    told = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {name}" for name, count in told if count) or "nothing"


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"
