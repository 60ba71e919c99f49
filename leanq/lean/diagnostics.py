"""What Lean printed, and what verdict it amounts to.

Lean's ``--json`` prints one object per message. Code that is being elaborated can print to
the same stream, so a line may have other text before its object, or be no object at all;
nothing that is printed can make a verdict better than Lean's exit code and, for what would
be accepted, the audit allow.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, TypeGuard, get_args

from leanq.lean.sandbox.sandbox import Exit
from leanq.queue.requests import Message, Severity, Verdict

Position = tuple[int, int]
"""A line from 1, and a column from 0 in code points."""

Found = tuple[Message, str]
"""A message and its kind, which is empty where Lean names none."""

# The REPL has words of its own for what is less than a warning.
_SEVERITIES: Mapping[str, Severity] = {
    **{severity: severity for severity in get_args(Severity)},
    "info": "information",
    "trace": "information",
}

# 'sorry' in straight quotes until 4.27, in backquotes since; a message's kind tells it as well.
_SORRY = re.compile(r"declaration uses (?:'sorry'|`sorry`)")

# A deterministic budget that ran out: the message itself, or the cause that a tactic reports.
_BUDGET = re.compile(
    r"^[ \t]*(?:\(deterministic\) timeout|maximum recursion depth"
    r"|\(kernel\) deterministic timeout|\(kernel\) deep recursion)\b",
    re.MULTILINE,
)
_OUT_OF_MEMORY = re.compile(rb"out of memory", re.IGNORECASE)

_OBJECTS_IN_A_LINE = 8
_MAX_MESSAGES = 10_000


class Printed:
    """The messages of one run. Takes seconds where a candidate printed megabytes of them.

    Attributes:
        messages: the first 10,000 in the order printed; lines from 1, columns from 0.
        sorry: whether Lean warned that a declaration uses sorry.
        failed: whether there was an error other than a budget that ran out.
        exhausted: whether a deterministic budget ran out.
    """

    def __init__(self, stdout: bytes) -> None:
        self._take(filter(None, map(_parse, _lines(stdout))))

    @classmethod
    def of(cls, found: Iterable[Found]) -> Self:
        """The same for messages that came in another way."""
        printed = cls(b"")
        printed._take(found)
        return printed

    def _take(self, found: Iterable[Found]) -> None:
        self.sorry = self.failed = self.exhausted = False
        messages: list[Message] = []
        left_out = 0
        for message, kind in found:
            self.sorry = self.sorry or _is_sorry(message, kind)
            if message.severity == "error":
                budget = is_budget(message)
                self.exhausted = self.exhausted or budget
                self.failed = self.failed or not budget
            if len(messages) < _MAX_MESSAGES:
                messages.append(message)
            else:
                left_out += 1
        if left_out:
            text = f"leanq: {left_out} further messages are left out"
            messages.append(Message("warning", 1, 0, text))
        self.messages = tuple(messages)


def judge(printed: Printed, end: Exit, stderr: bytes, *, compiled: bool) -> Verdict:
    """The verdict before any audit.

    ``compiled``: whether Lean wrote its result, without which nothing is accepted.
    """
    if end.stopped in ("cpu", "wall") or end.signal == signal.SIGXCPU:
        return "timeout"
    if end.stopped == "memory":
        return "memory"
    if end.stopped is not None or end.code is None:
        return "crashed"
    if printed.failed:
        return "rejected"
    if printed.exhausted:
        return "exhausted"
    if end.code != 0:
        return "memory" if _OUT_OF_MEMORY.search(stderr) else "crashed"
    if not compiled:
        return "crashed"
    return "incomplete" if printed.sorry else "accepted"


def is_budget(message: Message) -> bool:
    """Whether an error says that a deterministic budget ran out."""
    return _BUDGET.search(message.text) is not None


def last_words(end: Exit, stderr: bytes) -> Message:
    """Why Lean's process did not end by itself in good order, as a message of leanq's."""
    if end.stopped == "output":
        text = "leanq: Lean was stopped because it printed too much"
    elif end.stopped == "memory":
        text = "leanq: Lean was stopped because it used more memory than it may"
    elif end.signal is not None:
        text = f"leanq: Lean died of {signal_name(end.signal)}"
    else:
        text = f"leanq: Lean ended with exit code {end.code} before it had checked the file"
    said = stderr.decode(errors="replace").strip()
    return Message("error", 1, 0, f"{text}\n{said[-2000:]}" if said else text)


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _is_sorry(message: Message, kind: str) -> bool:
    if message.severity != "warning":
        return False
    return kind == "hasSorry" or _SORRY.fullmatch(message.text.strip()) is not None


def _lines(stdout: bytes) -> Iterator[bytes]:
    """The lines that may hold a message."""
    end = 0
    while (found := stdout.find(b'"severity"', end)) >= 0:
        start = stdout.rfind(b"\n", end, found) + 1 or end
        end = stdout.find(b"\n", found) + 1 or len(stdout)
        yield stdout[start:end]


def _parse(line: bytes) -> Found | None:
    text = line.decode(errors="replace")
    # Text that code printed without a newline stands before Lean's object.
    for start in _starts(text):
        try:
            value = json.loads(text[start:])
        except (ValueError, RecursionError):
            continue
        return message_of(value)
    return None


def _starts(text: str) -> list[int]:
    """Where the object that ends the line may begin: at the last few places that look so.

    There are no more of them in an object of Lean's than its own and those of its positions.
    """
    starts: list[int] = []
    start = text.rfind('{"')
    while start >= 0 and len(starts) < _OBJECTS_IN_A_LINE:
        starts.append(start)
        start = text.rfind('{"', 0, start)
    return starts[::-1]


def message_of(value: Any) -> Found | None:
    """A message from Lean's JSON object for it, None where it is none."""
    if not isinstance(value, dict):
        return None
    severity = _SEVERITIES.get(str(value.get("severity")))
    text = value.get("data")
    if not isinstance(text, str) or severity is None:
        return None
    line, column = position_of(value.get("pos")) or (1, 0)
    end_line, end_column = position_of(value.get("endPos")) or (None, None)
    # JSON can hold half of a surrogate pair, and what is sent on cannot.
    text = text.encode(errors="replace").decode()
    return Message(severity, line, column, text, end_line, end_column), str(value.get("kind", ""))


def position_of(value: Any) -> Position | None:
    """A position from Lean's JSON object for it, None where it is none."""
    if not isinstance(value, dict):
        return None
    line, column = value.get("line"), value.get("column")
    return (line, column) if _is_count(line) and _is_count(column) else None


def _is_count(value: Any) -> TypeGuard[int]:
    # Nothing of Lean's is larger, and what is sent on cannot hold any number.
    return type(value) is int and 0 <= value < 1 << 32
