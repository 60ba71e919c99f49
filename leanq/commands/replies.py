"""Shows replies to people: the lines of one, colours, and the summary of many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import click

from leanq.commands.common import EXIT_OK, exit_code
from leanq.errors import LeanQError, QueueError
from leanq.fleet.shown import plural, printable, some_of, table
from leanq.queue.requests import Profile, Reply, Verdict

_COLOURS = {
    "accepted": "green",
    "unverified": "yellow",
    "incomplete": "yellow",
    "rejected": "red",
    "exhausted": "red",
}
# leanq's own outcomes say nothing about the proof.
_COLOUR_OF_OTHERS = "magenta"
# Verdicts from the best to the worst, then texts that could not be sent.
_IN_SUMMARY = (*get_args(Verdict), "profiled", "error")
# Of a profile: the most rows, and characters of a name.
_MOST_ROWS, _WIDTH = 30, 48
_MOST_AXIOMS = 10
# The first replies with such a reason are shown with all of Lean's messages.
_EXPLAINED = 3
# If most of a batch has one of these reasons, it lies in the environment.
_OF_ENVIRONMENT = {
    "unknown_import": "texts import what the environment {!r} does not have; is it the right "
    "--env?",
    "judge_unavailable": "texts of the environment {!r} could not be judged, since no judge works "
    "on their worker; see its log, or run 'leanq doctor' there",
    "library_unreadable": "texts import a library of the environment {!r} that its Lean cannot "
    "read; build it again with that Lean, and look with: leanq doctor",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one file: a reply, or why there is none."""

    file: str
    reply: Reply | None = None
    error: LeanQError | None = None

    @property
    def exit_code(self) -> int:
        """As :func:`leanq.commands.common.exit_code`; a profile is what was asked for."""
        if self.reply and self.reply.profile:
            return EXIT_OK
        return exit_code(self.error or (self.reply.verdict if self.reply else None))


def coloured(verdict: str | None) -> str:
    """Returns the verdict in its colour; ``click.echo`` strips that off a terminal."""
    colour = _COLOURS.get(verdict or "", _COLOUR_OF_OTHERS)
    return click.style(verdict or "no verdict", fg=colour, bold=True)


def lines_of(file: str, reply: Reply, *, brief: bool = False) -> Iterator[str]:
    """Yields the lines of a reply to a check or a verification; ``brief`` leaves its messages
    out."""
    # A file's name could otherwise print lines of its own. Python's characters for bytes of a name
    # that is not Unicode stay.
    file = "".join(
        c if c.isprintable() or "\udc80" <= c <= "\udcff" else repr(c)[1:-1] for c in file
    )
    if reply.profile:
        yield from _profile_lines(file, reply, reply.profile)
        return
    notes: list[str] = [reply.reason] if reply.reason else []
    notes.append(f"{reply.wall_s:.2f} s")
    if reply.axioms is not None:
        notes.append(f"axioms: {printable(some_of(reply.axioms, _MOST_AXIOMS)) or 'none'}")
    yield f"{file}: {coloured(reply.verdict)} ({'; '.join(notes)})"
    for failure in reply.failed:
        yield from hanging(f"  {printable(failure.name)}: {failure.rule}: ", failure.text)
    for m in () if brief else reply.messages:
        # The judge's own message is for readers that ignore `failed`.
        if any(m.text.endswith(f"{f.name}: {f.rule}: {f.text}") for f in reply.failed):
            continue
        yield from hanging(f"  {file}:{m.line}:{m.column}: {m.severity}: ", m.text)
    for tactic in () if brief else reply.tactics:
        yield f"  {file}:{tactic.line}:{tactic.column}: tactic"
        for goal in tactic.goals:
            yield from (f"    {line}" for line in shown_lines(goal))
    for s in reply.sorries:
        yield f"  {file}:{s.line}:{s.column}: sorry"
        yield from (f"    {line}" for line in shown_lines(s.goal or ""))
        # On a line of its own it fits into 80 columns.
        yield f"    state {s.state or 'unknown'}"


def _profile_lines(file: str, reply: Reply, profile: Profile) -> Iterator[str]:
    rows = profile.declarations
    total_ms = sum(row.ms for row in rows)
    head = f"{file}: {total_ms:,.1f} ms of Lean's time by declaration"
    if profile.import_ms is not None:
        head += f", {profile.import_ms:,.1f} ms for imports"
    yield head if reply.reason == "not_audited" else f"{head}; Lean: {reply.reason}"
    for m in reply.messages:
        if m.severity == "error":
            yield from hanging(f"  {file}:{m.line}:{m.column}: {m.severity}: ", m.text)
    if profile.unfinished:
        yield f"  stopped; the first of which Lean told nothing: {printable(profile.unfinished)}"
    shown = [
        {
            "MS": f"{row.ms:,.1f}",
            "SHARE": f"{row.ms / (total_ms or 1):.0%}",
            "LINE": str(row.line),
            "DECLARATION": printable(row.name)[:_WIDTH],
            "MOST OF IT": "".join(f"{ms:,.1f} {printable(part)}" for part, ms in row.parts[:1]),
        }
        for row in rows[:_MOST_ROWS]
    ]
    yield from table(shown, left=("DECLARATION", "MOST OF IT"))
    if rest := rows[_MOST_ROWS:]:
        rest_ms = sum(row.ms for row in rest)
        yield f"{rest_ms:,.1f} ms in {plural(len(rest), 'other')} (--json)"


def shown_lines(text: str) -> list[str]:
    """Returns the lines of Lean's text without control characters. It quotes a candidate, whose
    author could otherwise steer the terminal and write over verdicts."""
    return [printable(line.expandtabs()) for line in text.splitlines()]


def hanging(head: str, text: str) -> Iterator[str]:
    """Yields Lean's text behind a head, its further lines indented."""
    first, *more = shown_lines(text) or [""]
    yield f"{head}{first}"
    yield from (f"    {line}".rstrip() for line in more)


class Summary:
    """Counts ends, for the last line of a command."""

    def __init__(self) -> None:
        # The highest.
        self.exit_code = EXIT_OK
        self.count = 0
        self._verdicts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        # By the error's text: the first file, and how many files it is for.
        self._failures: dict[str, tuple[str, int]] = {}

    def explained(self, ended: Ended) -> bool:
        """Returns whether several others have said the same of the environment before."""
        reason = (ended.reply and ended.reply.reason) or ""
        return reason in _OF_ENVIRONMENT and self._reasons[reason] > _EXPLAINED

    def add(self, ended: Ended) -> None:
        """Counts one more end."""
        self.exit_code = max(self.exit_code, ended.exit_code)
        self.count += 1
        reply = ended.reply
        end = "profiled" if reply and reply.profile else reply and reply.verdict
        self._verdicts[end or "error"] += 1
        if isinstance(ended.error, QueueError):
            first, count = self._failures.get(str(ended.error), (ended.file, 0))
            self._failures[str(ended.error)] = first, count + 1
        if ended.reply and ended.reply.reason:
            self._reasons[ended.reply.reason] += 1

    def failures(self) -> Iterator[str]:
        """Yields each trouble with the queue, and the files that got no answer because of it."""
        for text, (first, count) in self._failures.items():
            others = f" and {plural(count - 1, 'other file')}" if count > 1 else ""
            yield f"{printable(first)}{others}: {text}"

    def line(self, seconds: float) -> str:
        """Returns ``2 accepted, 1 rejected in 1.1 s``, in colours."""
        parts = []
        for verdict in _IN_SUMMARY:
            if count := self._verdicts[verdict]:
                name = "not checked" if verdict == "error" else verdict
                colour = _COLOURS.get(verdict, _COLOUR_OF_OTHERS)
                parts.append(click.style(f"{count:,} {name}", fg=colour))
        return f"{', '.join(parts) or 'nothing checked'} in {seconds:.1f} s"

    def warning(self, env: str) -> str | None:
        """Returns a warning if most texts failed for one reason that is not theirs."""
        for reason, text in _OF_ENVIRONMENT.items():
            count = self._reasons[reason]
            if count >= 2 and 2 * count > self.count:
                return f"{count:,} of {self.count:,} {text.format(env)}"
        return None
