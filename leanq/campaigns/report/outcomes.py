"""Reads from each record what a report needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from leanq.errors import UsageError
from leanq.queue.requests import LEAN_VERDICTS, Verdict

ENDS = (*get_args(Verdict), "error", "none")
"""How a record can end: with a verdict, with an error, or, as an echo does, with neither."""

INFRASTRUCTURE = frozenset(get_args(Verdict)) - LEAN_VERDICTS - {"cancelled"}
"""leanq's own verdicts, which say nothing about the text."""

NO_SAMPLES = frozenset({"cancelled", "none"})
"""Ends of records that are no samples: withdrawn before a verdict, or an echo."""

_QUOTED = re.compile(r"([Tt]actic )?(?:`[^`]+`|'[^\s']+'+|\"[^\"]*\"|«[^»]*»)")
_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?:\.\d+)*")
_LONGEST_COMPLAINT = 160


_Seconds = Annotated[float, Meta(ge=0, le=1e15)]


class _Message(msgspec.Struct, gc=False):
    severity: str
    text: str


class Outcome(msgspec.Struct, gc=False):
    """The part of a record of ``leanq.campaigns.results`` that a report reads."""

    line: int
    verdict: Verdict | None
    id: str | int | None = None
    sample: int | None = None
    problem: str | int | None = None
    tags: tuple[str, ...] | None = None
    error: str | None = None
    reason: str | None = None
    messages: tuple[_Message, ...] | None = None
    kernel: str | None = None
    attempts: int | None = None
    queued_s: _Seconds | None = None
    cpu_s: _Seconds | None = None
    wall_s: _Seconds | None = None
    fingerprint: str | None = None
    request_id: str | None = None
    code_hash: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None = None

    @property
    def end(self) -> str:
        """One of ``ENDS``."""
        return self.verdict or ("error" if self.error else "none")

    @property
    def code(self) -> int | None:
        """The hash of the text as a number, which takes less memory."""
        return int(self.code_hash, 16) if self.code_hash else None

    @property
    def times(self) -> tuple[float, float, float] | None:
        """Seconds in the queue, of CPU in Lean, and on the worker; ``None`` without a reply and if
        it was never sent."""
        queued_s, cpu_s, wall_s = self.queued_s, self.cpu_s, self.wall_s
        if queued_s is None or cpu_s is None or wall_s is None or self.request_id == "":
            return None
        return queued_s, cpu_s, wall_s

    @property
    def complaint(self) -> str:
        """One line without names and numbers: Lean's first error, or why the row could not be
        checked; empty if there is neither."""
        if self.error:
            return normalised(self.error)
        if self.verdict not in ("rejected", "exhausted"):
            return ""
        for message in self.messages or ():
            if message.severity == "error":
                return normalised(message.text)
        # Lean has no error if the judge rejects.
        return "no error of Lean's: rejected by the judge" if self.verdict == "rejected" else ""

    @property
    def name(self) -> str:
        """A name for display: the id, or else the line; and the sample."""
        name = f"line {self.line}" if self.id is None else str(self.id)
        return name if self.sample is None else f"{name} [{self.sample}]"

    @property
    def group(self) -> str | int | None:
        """The problem's name within one file; ``None`` if the record is a problem by itself.

        A number is the line of a row with several samples. Ids do not serve: a bad row may repeat
        another row's id.
        """
        if self.problem is not None:
            return str(self.problem)
        return None if self.sample is None else self.line


def outcomes(records: Iterable[dict[str, Any]], source: str) -> Iterator[Outcome]:
    """Yields each record's outcome; raises UsageError, naming ``source``, for a record that is no
    result."""
    for number, record in enumerate(records, 1):
        # Tables that lack a number in some rows give it back as 1.0 in the others.
        whole = {
            name: int(found)
            for name in ("line", "sample", "attempts")
            if isinstance(found := record.get(name), float) and found.is_integer()
        }
        try:
            yield msgspec.convert({**record, **whole} if whole else record, Outcome)
        # The latter is for names and verdicts with half of a surrogate pair.
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            text = f"{source}: record {number} is no result of a campaign: {error}"
            raise UsageError(text) from None


def normalised(text: str) -> str:
    """Returns the first line of ``text`` with ``…`` for quoted names and ``#`` for numbers, so that
    one complaint about different things is one text. The name of a failed tactic stays."""
    first = next(filter(None, map(str.strip, text.splitlines())), "")[: 8 * _LONGEST_COMPLAINT]
    plain = _NUMBER.sub("#", _QUOTED.sub(lambda found: found[0] if found[1] else "…", first))
    return one_line(plain, _LONGEST_COMPLAINT)


def one_line(text: str, most: int = 200) -> str:
    """Returns ``text`` without control characters, cut to ``most`` characters."""
    shown = "".join(each if each.isprintable() else " " for each in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"
