"""Renders a report as one HTML page that works offline: tables, and a figure of pass@k."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from leanq.campaigns.report.figures import Pass, Report
from leanq.campaigns.report.sections import Section, is_numeric

_WIDTH, _HEIGHT, _MARGIN = 640, 280, 44
_COLOUR = "#2468a8"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #2b2f33; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { padding: .15rem .7rem; text-align: left; border-bottom: 1px solid #e3e6e9; }
th { white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
svg text { font: 12px system-ui, sans-serif; fill: #2b2f33; }
svg g.point:hover circle { r: 7; }
"""


def page(title: str, intro: str, found: Report, parts: Iterable[Section]) -> str:
    """Returns the page with its style; nothing in a record can add markup."""
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(intro)}</p>"]
    if found.passes:
        body.append(_plot(found.passes))
    for part in parts:
        body += _section(part)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(part: Section) -> Iterator[str]:
    yield f"<h2>{escape(part.title[0].upper() + part.title[1:])}</h2>"
    yield from (f"<p>{escape(note)}</p>" for note in part.notes)
    if not part.rows:
        return
    right = ["n" if numeric else "" for numeric in is_numeric(part)]
    yield f"<table><thead><tr>{_row(part.header, right, 'th')}</tr></thead><tbody>"
    yield from (f"<tr>{_row(row, right, 'td')}</tr>" for row in part.rows)
    yield "</tbody></table>"


def _row(cells: Sequence[str], kinds: Sequence[str], tag: str) -> str:
    pairs = zip(cells, kinds, strict=True)
    return "".join(f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for cell, kind in pairs)


def _plot(passes: Sequence[Pass]) -> str:
    """Draws pass@k over k with its intervals."""
    last = max(each.k for each in passes)

    def across(k: int) -> float:
        return _MARGIN + (_WIDTH - 2 * _MARGIN) * (math.log2(k) / max(1.0, math.log2(last)))

    def up(share: float) -> float:
        return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * share

    drawn = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        'aria-label="pass@k, with 95% intervals">'
    ]
    for percent in (0, 25, 50, 75, 100):
        y = up(percent / 100)
        drawn.append(
            f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#e3e6e9"/><text x="4" y="{y + 4:.1f}">{percent} %</text>'
        )
    line = " ".join(f"{across(p.k):.1f},{up(p.share.estimate):.1f}" for p in passes)
    drawn.append(f'<polyline points="{line}" fill="none" stroke="{_COLOUR}"/>')
    for each in passes:
        x, share = across(each.k), each.share
        told = (
            f"pass@{each.k}: {100 * share.estimate:.1f} % "
            f"({100 * share.low:.1f} – {100 * share.high:.1f} %), {each.problems:,} problems"
        )
        drawn.append(
            f'<g class="point" tabindex="0"><title>{told}</title>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up(share.low):.1f}" '
            f'y2="{up(share.high):.1f}" stroke="{_COLOUR}" stroke-width="2"/>'
            f'<circle cx="{x:.1f}" cy="{up(share.estimate):.1f}" r="5" fill="{_COLOUR}"/></g>'
        )
    drawn += (
        f'<text x="{across(each.k) - 3:.1f}" y="{_HEIGHT - 18}">{each.k}</text>' for each in passes
    )
    return "".join(drawn) + "</svg>"
