"""Renders a report as sections, the same for a terminal and for pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from leanq.campaigns.report.estimates import Interval
from leanq.campaigns.report.figures import Report
from leanq.campaigns.report.outcomes import one_line
from leanq.fleet.shown import columns, plural

_NUMBER = re.compile(r"[-+]?\d[\d,.]*(?: [%sh])?|–|")
_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Section:
    """A title, sentences, and a table of ``rows`` under ``header``, if it has any."""

    title: str
    notes: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def sections(report: Report, most: int) -> Iterator[Section]:
    """Yields the report's sections, with at most ``most`` rows in each list, and half as many in
    that of flaky texts."""
    if not report.records:
        yield Section("no records", ("The file is empty: there is nothing to report.",))
        return
    yield _verdicts(report)
    yield _passes(report)
    yield from _groups(report, most)
    yield _times(report)
    if report.slowest:
        yield _slowest(report)
    yield from _flaky(report, most // 2)
    if report.reasons:
        yield _counted("reasons", "reason", report.reasons)
    what = "text, its names and numbers left out"
    if report.complaints:
        yield _counted("first errors of Lean", what, report.complaints)
    if report.errors:
        yield _counted("errors", what, report.errors)


def text(parts: Iterable[Section]) -> str:
    """Returns plain lines: titles, and their notes and tables indented below."""
    blocks = []
    for part in parts:
        lines = [*part.notes]
        if part.rows:
            numeric = zip(part.header, is_numeric(part), strict=True)
            left = [title for title, is_number in numeric if not is_number]
            lines += columns(part.header, part.rows, left=left)
        blocks.append("\n".join([part.title, *(f"  {line}" for line in lines)]))
    return "\n\n".join(blocks)


def is_numeric(part: Section) -> list[bool]:
    return [all(map(_NUMBER.fullmatch, column)) for column in zip(*part.rows, strict=True)]


def _verdicts(report: Report) -> Section:
    notes = [
        f"{plural(report.records, 'record')} of {plural(report.rows, 'row')}; "
        f"{plural(report.problems, 'problem')}, {plural(report.samples, 'sample')}"
    ]
    if report.environments:
        shown = (f"{name[:16]} ({n:,})" for name, n in report.environments.items())
        notes.append(f"environments: {', '.join(shown)}")
    if report.kernels:
        shown = (f"Lean {version} ({n:,})" for version, n in report.kernels.items())
        notes.append(f"judged by the kernel of: {', '.join(shown)}")
    rows = [
        (
            end,
            f"{count:,}",
            _percent(count / report.records),
            _seconds(report.cpu_median_s.get(end)),
        )
        for end, count in report.ends.items()
    ]
    return Section("verdicts", notes, ("verdict", "records", "share", "CPU p50"), rows)


def _passes(report: Report) -> Section:
    notes = [f"solved: {report.solved:,} of {plural(report.problems, 'problem')}"]
    unknown, errors = report.infrastructure, report.ends.get("error", 0)
    if unknown or errors:
        notes.append(
            f"counted as failures, though Lean gave no verdict: {plural(unknown, 'outcome')} of "
            f"leanq's, {plural(errors, 'error')}"
        )
    if report.cancelled:
        notes += (
            f"{plural(report.cancelled, 'cancelled sample')} left out: which samples there are "
            "depends on what was accepted,",
            "so pass@1 is too high, and pass@k for k > 1 is unknown",
        )
    header = ("k", "pass@k", "95% interval", "problems")
    rows = [(f"{each.k}", *_share(each.share), f"{each.problems:,}") for each in report.passes]
    return Section("solved and pass@k", notes, header, rows)


def _groups(report: Report, most: int) -> Iterator[Section]:
    if report.tags:
        rows = [
            (_name(each.tag), f"{each.problems:,}", f"{each.solved:,}", *_share(each.pass_1))
            for each in report.tags[:most]
        ]
        header = ("tag", "problems", "solved", "pass@1", "95% interval")
        yield Section("by tag", _left_out(len(report.tags), len(rows)), header, rows)
    if report.tried:
        tried = sorted(report.tried, key=lambda each: each.accepted / each.samples)[:most]
        counts = [(_name(each.name), f"{each.samples:,}", f"{each.accepted:,}") for each in tried]
        notes = ("the hardest first", *_left_out(len(report.tried), len(tried)))
        yield Section("by problem", notes, ("problem", "samples", "accepted"), counts)


def _times(report: Report) -> Section:
    names = {"wall_s": "on the worker", "cpu_s": "CPU in Lean", "queued_s": "in the queue"}
    rows = [
        (names[name], *map(_seconds, (each.p50, each.p90, each.p99, each.max)))
        for name, each in report.times.items()
    ]
    notes = [f"{report.cpu_hours:,.2f} hours of CPU in Lean"]
    return Section("times", notes, ("", "p50", "p90", "p99", "max"), rows)


def _slowest(report: Report) -> Section:
    rows = [
        (_name(r.name), r.end, _seconds(r.cpu_s), _seconds(r.wall_s), f"{r.attempts}", f"{r.line}")
        for r in report.slowest
    ]
    header = ("record", "verdict", "CPU", "wall", "leases", "line")
    return Section("slowest, by CPU time", (), header, rows)


def _flaky(report: Report, most: int) -> Iterator[Section]:
    note = (
        f"{plural(report.flaky_total, 'text')} with different verdicts, "
        f"{plural(report.retried, 'record')} with more than one lease, "
        f"{plural(report.infrastructure, 'outcome')} of leanq's"
    )
    yield Section("flaky", [note])
    if report.flaky:
        rows = [
            (each.code_hash, ", ".join(each.ends), ", ".join(map(str, each.lines)))
            for each in report.flaky[:most]
        ]
        left_out = _left_out(report.flaky_total, len(rows))
        header = ("text", "verdicts", "first lines of the data")
        yield Section("equal texts, different verdicts", left_out, header, rows)


def _counted(title: str, what: str, counts: Mapping[str, int]) -> Section:
    rows = [(f"{count:,}", text) for text, count in counts.items()]
    return Section(title, (), ("records", what), rows)


def _left_out(total: int, shown: int) -> tuple[str, ...]:
    return (f"the first {shown:,} of {total:,}",) if shown < total else ()


def _name(name: str) -> str:
    return one_line(name, _LONGEST_NAME)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(found: Interval | None) -> tuple[str, str]:
    if found is None:
        return "–", "–"
    return _percent(found.estimate), f"{100 * found.low:.1f} – {100 * found.high:.1f} %"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:,.2f} s"
