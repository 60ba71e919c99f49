"""Reads from each record what a report needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

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


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds in the queue, of CPU in Lean, and on the worker."""

    queued_s: float
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The part of a record that a report reads.

    Attributes:
        id, line, sample, problem: the record's; ``None`` where absent.
        end: one of ``ENDS``.
        reason: why the verdict is not ``accepted``; ``None`` where the record has none.
        code_hash: the hash of the text; ``None`` if the record has none.
        fingerprint: that of the environment in which Lean answered.
        kernel: the version of the kernel that judged; ``None`` if none did.
        attempts: how many leases it took; 0 if nothing was sent.
        times: ``None`` without a reply.
        complaint: one line without names and numbers: Lean's first error, or why the row could not
            be checked; empty if there is neither.
        tags: the row's.
    """

    id: str | int | None
    line: int
    sample: int | None
    problem: str | int | None
    end: str
    reason: str | None
    code_hash: int | None
    fingerprint: str | None
    attempts: int
    times: Times | None
    complaint: str
    tags: tuple[str, ...] = ()
    kernel: str | None = None

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
        try:
            yield _outcome(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            missing = isinstance(error, KeyError)
            why = f"it has no {error.args[0]!r}" if missing else f"{error}"
            text = f"{source}: record {number} is no result of a campaign: {why}"
            raise UsageError(text) from None


def _outcome(record: dict[str, Any]) -> Outcome:
    error = record.get("error")
    end = record["verdict"] or ("error" if error else "none")
    if end not in ENDS:
        raise ValueError(f"{end!r:.80} is no verdict")
    for name in ("id", "problem"):
        if not isinstance(record.get(name), str | int | None):
            raise ValueError(f"its {name} is {record[name]!r:.80}")
    code_hash, sample = record.get("code_hash"), record.get("sample")
    # A text that was never sent has no request id, and its times are no measurements.
    measured = record.get("cpu_s") is not None and record.get("request_id") != ""
    return Outcome(
        id=record.get("id"),
        line=int(record["line"]),
        sample=None if sample is None else int(sample),
        problem=record.get("problem"),
        end=end,
        reason=_text(record, "reason"),
        code_hash=int(code_hash, 16) if code_hash else None,
        fingerprint=record.get("fingerprint"),
        attempts=int(record.get("attempts") or 0),
        times=Times(*_seconds(record)) if measured else None,
        complaint=normalised(error) if error else _complaint(end, record),
        tags=_tags(record),
        kernel=_text(record, "kernel"),
    )


def _text(record: dict[str, Any], name: str) -> str | None:
    found = record.get(name)
    if not isinstance(found, str | None):
        raise ValueError(f"its {name} is {found!r:.80}")
    return found


def _tags(record: dict[str, Any]) -> tuple[str, ...]:
    tags = record.get("tags") or ()
    if not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"its tags are {tags!r:.80}")
    return tuple(tags)


def _seconds(record: dict[str, Any]) -> Iterator[float]:
    for name in ("queued_s", "cpu_s", "wall_s"):
        seconds = float(record[name])
        # Refuses NaN as well, which Python's JSON can hold.
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{name} is {seconds}")
        yield seconds


def _complaint(end: str, record: dict[str, Any]) -> str:
    if end not in ("rejected", "exhausted"):
        return ""
    for message in record.get("messages") or ():
        if message["severity"] == "error":
            return normalised(message["text"])
    # Lean has no error if the judge rejects.
    return "no error of Lean's: rejected by the judge" if end == "rejected" else ""


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
