"""``leanq campaign report``: prints the figures of a file of results, and writes them as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from leanq.campaigns.report.comparison import Comparator
from leanq.campaigns.report.figures import summarise
from leanq.campaigns.report.outcomes import Outcome, one_line, outcomes
from leanq.campaigns.report.page import page
from leanq.campaigns.report.sections import sections, text
from leanq.campaigns.results import read_results
from leanq.errors import UsageError

# The most rows of a list. A terminal shows few; the page has the rest.
_PRINTED, _WRITTEN = 30, 2000


def report(results: str, against: str | None, output: str | None, as_json: bool) -> int:
    """Reports on the file ``results``, compared with the older file ``against``; returns 0.

    Writes an HTML page to ``output``, or beside ``results`` unless given.

    Raises:
        UsageError: a file cannot be read, is no file of results, or cannot be written.
    """
    path = _page_path(results, against, output)
    comparison = before = None
    if against is None:
        found = summarise(_read(results))
    else:
        comparator = Comparator()
        before = summarise(comparator.old(_read(against)))
        found = summarise(comparator.new(_read(results)))
        comparison = comparator.result()
    title = one_line(f"Report on {Path(results).name}")
    intro = one_line(results if against is None else f"{results} against {against}", 1000)
    shown = before if comparison and comparison.matched else None
    parts = sections(found, comparison, before, _WRITTEN)
    try:
        path.write_text(page(title, intro, found, shown, parts), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or path}: {error.strerror}") from None
    if as_json:
        changes = None
        if before and comparison:
            changes = {"results": against, "before": asdict(before), **asdict(comparison)}
        record = {"results": results, **asdict(found), "against": changes, "written": str(path)}
        click.echo(json.dumps(record))
    else:
        click.echo(f"{intro}\n\n{text(sections(found, comparison, before, _PRINTED))}\n")
        click.echo(f"written: {path}")
    return 0


def _page_path(results: str, against: str | None, output: str | None) -> Path:
    for path in (Path(results), Path(output or results)):
        if not path.name:
            raise UsageError(f"{path} is a folder")
    page_path = Path(output) if output else Path(results).with_suffix(".report.html")
    if page_path.resolve() in {Path(each).resolve() for each in (results, against) if each}:
        raise UsageError(f"the report would overwrite {page_path}; name another file for it")
    return page_path


def _read(path: str) -> Iterator[Outcome]:
    return outcomes(read_results(path), path)
