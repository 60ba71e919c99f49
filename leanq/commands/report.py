"""``leanq campaign report``: the figures of a file of results, printed and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from leanq.campaigns.report.comparison import Comparator, Comparison
from leanq.campaigns.report.figures import Report, summarise
from leanq.campaigns.report.outcomes import Outcome, one_line, outcomes
from leanq.campaigns.report.page import page as as_page
from leanq.campaigns.report.sections import markdown, sections, text
from leanq.campaigns.results import read_results
from leanq.errors import UsageError

_PRINTED = 30
"""Rows in a list on a terminal: what changed counts most, the rest stands on the page."""
_WRITTEN = 2000


def report(results: str, against: str | None, output: str | None, as_json: bool) -> int:
    """Reports on the file ``results``, beside an older one if ``against`` names it; returns 0.

    Writes Markdown to ``output``, by default beside ``results``, and a page and a plot beside that.
    Raises UsageError for files that cannot be read, are no results, or cannot be written.
    """
    page = _page(results, against, output)
    plot = page.with_suffix(".png")
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
    try:
        # Beside an unrelated file there is nothing to see.
        drawn = not (comparison and not comparison.matched) and _draw(
            plot, found, before, comparison
        )
        parts = list(sections(found, comparison, before, _WRITTEN))
        image = plot.name if drawn else None
        page.write_text(markdown(title, intro, image, parts), encoding="utf-8")
        html = page.with_suffix(".html")
        shown = before if comparison and comparison.matched else None
        html.write_text(as_page(title, intro, found, shown, parts), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or page}: {error.strerror}") from None
    written = [str(each) for each in ((page, html, plot) if drawn else (page, html))]
    if as_json:
        changes = None
        if before and comparison:
            changes = {"results": against, "before": _record(before), **asdict(comparison)}
        record = {"results": results, **_record(found), "against": changes, "written": written}
        click.echo(json.dumps(record))
    else:
        click.echo(f"{intro}\n\n{text(sections(found, comparison, before, _PRINTED))}\n")
        click.echo(f"written: {', '.join(written)}")
    return 0


def _page(results: str, against: str | None, output: str | None) -> Path:
    for path in (Path(results), Path(output or results)):
        if not path.name:
            raise UsageError(f"{path} is a folder")
    page = Path(output) if output else Path(results).with_suffix(".report.md")
    read = {Path(each).resolve() for each in (results, against) if each}
    for path in (page, page.with_suffix(".html"), page.with_suffix(".png")):
        if path.resolve() in read:
            raise UsageError(f"{path} would be written over: it is what the report is about")
    if page.suffix in (".html", ".png"):
        raise UsageError(f"{page} is where the page or the plot goes; name the Markdown file")
    return page


def _read(path: str) -> Iterator[Outcome]:
    return outcomes(read_results(path), path)


def _draw(path: Path, found: Report, before: Report | None, comparison: Comparison | None) -> bool:
    """Draws the plot, where there is something to draw and something to draw with."""
    if not found.records:
        return False
    try:
        from leanq.campaigns.report.plot import draw
    except ImportError:
        click.echo("leanq: no plot: it needs matplotlib (pip install 'leanq[campaigns]')", err=True)
        return False
    draw(path, found, before, comparison)
    return True


def _record(report: Report) -> dict[str, Any]:
    record = asdict(report)
    # Made for the plot alone: their edges stand nowhere in the record.
    del record["cpu_bins"]
    return record
