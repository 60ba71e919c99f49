"""Turns Lean's output and its end into a verdict and a reason.

Lean's ``--json`` prints one object per message. Code under elaboration can print to the same
stream, so a line may have other text before its object, or be no object at all. No output can make
a verdict better than Lean's exit code allows; and for what would be accepted, better than the audit
allows.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard, get_args

from msgspec import DecodeError, Raw, Struct, ValidationError
from msgspec.json import Decoder
from msgspec.json import decode as decode_json
from msgspec.structs import replace

from leanq.lean.sandbox.sandbox import Exit, Finished, Limits
from leanq.queue.requests import Message, Reason, Reply, Severity, Verdict

Position = tuple[int, int]
"""A line from 1, and a column from 0 in code points."""

Found = tuple[Message, str]
"""A message and its kind, which is empty if Lean names none."""

_SEVERITIES: Mapping[str, Severity] = {severity: severity for severity in get_args(Severity)}

# 'sorry' is in straight quotes until 4.27, in backquotes since; a message's kind tells it as well.
_SORRY = re.compile(r"declaration uses (?:'sorry'|`sorry`)")

# A deterministic budget ran out: the message itself, or the cause that a tactic reports.
_BUDGET = re.compile(
    r"^[ \t]*(?:\(kernel\) )?"
    r"(?:(?P<heartbeats>\(deterministic\) timeout|deterministic timeout)"
    r"|maximum recursion depth|deep recursion)\b",
    re.MULTILINE,
)
# An import leads nowhere, in the words of versions since 4.0.
_UNKNOWN_IMPORT = re.compile(
    r"unknown (?:module prefix|package) '(?P<library>[^'\n]*)'"
    r"|object file '[^\n]*' of module (?P<module>\S+) does not exist"
)
_OUT_OF_MEMORY = re.compile(rb"out of memory", re.IGNORECASE)

_OBJECTS_IN_A_LINE = 8
_MAX_MESSAGES = 10_000

# msgspec alone reads longer lines, and builds nothing of the parts that it skips. Of 60 MB that a
# candidate prints as JSON, Python's reader makes millions of objects, and stops every thread for up
# to 18 s.
_BUILT_CHARACTERS = 1 << 20
# Lean's severity, kind and positions are shorter.
_FIELD_BYTES = 1 << 10


class _Line(Struct, rename={"end_pos": "endPos"}):
    """The part of Lean's message object that is read."""

    data: Raw = Raw(b"null")
    severity: Raw = Raw(b"null")
    kind: Raw = Raw(b'""')
    pos: Raw = Raw(b"null")
    end_pos: Raw = Raw(b"null")


_LINES = Decoder(_Line)


class Printed:
    """The messages of one run: the first 10,000, in order. Takes seconds if a candidate printed
    megabytes. ``failed``: whether there was an error other than an exhausted budget."""

    def __init__(self, said: bytes | Iterable[Found]) -> None:
        self.sorry = self.failed = self.exhausted = False
        messages: list[Message] = []
        left_out = 0
        found = filter(None, map(_parse, _lines(said))) if isinstance(said, bytes) else said
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


def classify(printed: Printed, done: Finished, limits: Limits, *, compiled: bool) -> Reply:
    """Returns the verdict on a run; nothing is accepted unless Lean has written its result."""
    end = done.exit
    if end.stopped is None and end.code is not None:
        reply = classify_printed(printed)
        if reply.verdict in ("rejected", "exhausted") or (end.code == 0 and compiled):
            return reply
    return classify_end(printed.messages, end, limits, done.stderr)


def classify_printed(printed: Printed, *, open_goals: bool = False) -> Reply:
    """Returns the verdict of Lean's messages, which may not tell of open goals."""
    verdict: Verdict = "accepted"
    if printed.failed:
        verdict = "rejected"
    elif printed.exhausted:
        verdict = "exhausted"
    elif printed.sorry or open_goals:
        verdict = "incomplete"
    return Reply(verdict, printed.messages, reason=reason_of(verdict, printed.messages))


def classify_end(messages: tuple[Message, ...], end: Exit, limits: Limits, stderr: bytes) -> Reply:
    """Returns the verdict on a process that was stopped, or ended out of order. The last message
    says which limit it met and what it used, or what it died of."""
    verdict, reason, text = _end(end, limits, stderr)
    said = stderr.decode(errors="replace").strip()
    last = Message("error", 1, 0, f"leanq: {text}\n{said[-2000:]}" if said else f"leanq: {text}")
    return Reply(verdict, (*messages, last), reason=reason)


def noted(reply: Reply, text: str, severity: Severity = "warning", **changed: Any) -> Reply:
    """Returns a reply with a message of leanq's behind the others, and these fields changed."""
    note = Message(severity, 1, 0, f"leanq: {text}")
    return replace(reply, messages=(*reply.messages, note), **changed)


def reason_of(verdict: Verdict | None, messages: Iterable[Message]) -> Reason | None:
    """Returns why a verdict that Lean's messages gave is not accepted."""
    errors = (message for message in messages if message.severity == "error")
    if verdict == "rejected":
        unknown = any(_UNKNOWN_IMPORT.match(error.text) for error in errors)
        return "unknown_import" if unknown else "lean_error"
    if verdict == "exhausted":
        budgets = filter(None, (_BUDGET.search(error.text) for error in errors))
        first = next(budgets, None)
        return "recursion_depth" if first and not first["heartbeats"] else "heartbeats"
    return "sorry" if verdict == "incomplete" else None


def unknown_imports(messages: Iterable[Message]) -> Iterator[str]:
    """Yields the modules, or libraries, that errors say are missing. A text can print such, too."""
    for message in messages:
        if message.severity == "error" and (found := _UNKNOWN_IMPORT.match(message.text)):
            yield found["library"] or found["module"] or ""


def moved_up(message: Message, lines: int) -> Message:
    """Returns a message about a text behind so many extra lines as one about the text."""
    # A message about those lines, or about the whole, goes to the text's beginning.
    if message.line <= lines:
        return replace(message, line=1, column=0, end_line=None, end_column=None)
    end_line = None if message.end_line is None else message.end_line - lines
    return replace(message, line=message.line - lines, end_line=end_line)


def is_budget(message: Message) -> bool:
    return _BUDGET.search(message.text) is not None


def is_of_checker(message: Message) -> bool:
    """Returns whether Lean says it once it checks a declaration, which it does on a thread."""
    return message.text.startswith("(kernel)") or _is_sorry(message, "")


def _end(end: Exit, limits: Limits, stderr: bytes) -> tuple[Verdict, Reason, str]:
    used_mb, allowed_mb = end.peak_bytes >> 20, limits.memory_bytes >> 20
    if end.stopped == "cpu" or (end.stopped is None and end.signal == signal.SIGXCPU):
        used = f"Lean was stopped after {end.cpu_s:.3g} s of CPU time"
        return "timeout", "cpu_time", f"{used}; the request allows {limits.cpu_s:g} s"
    if end.stopped == "wall":
        used = f"Lean was stopped after {end.wall_s:.3g} s, of which {end.cpu_s:.3g} s of CPU time"
        return "timeout", "wall_time", f"{used}; the request allows {limits.wall_s:g} s in all"
    if end.stopped == "memory":
        used = f"Lean was stopped when it held {used_mb} MB of memory"
        return "memory", "memory", f"{used}; the request allows {allowed_mb} MB"
    if end.stopped == "processes":
        return "memory", "memory", "Lean was stopped because it had too many processes and threads"
    if end.stopped == "scratch":
        used = f"Lean was stopped when its files took {end.scratch_bytes >> 20} MB of disk space"
        allowed = f"the request allows {limits.scratch_bytes / 2**20:g} MB"
        return "memory", "scratch", f"{used}; {allowed}"
    if end.stopped == "output":
        allowed = f"at most {limits.output_bytes >> 20} MB are read"
        return "crashed", "process_died", f"Lean was stopped because it printed too much; {allowed}"
    if end.signal is not None:
        return "crashed", "process_died", f"Lean died of {signal_name(end.signal)}"
    if end.code != 0 and _OUT_OF_MEMORY.search(stderr):
        used = f"Lean found no more memory when it held {used_mb} MB"
        return "memory", "memory", f"{used}; the request allows {allowed_mb} MB"
    ended = f"Lean ended with exit code {end.code} before it had checked the file"
    return "crashed", "process_died", ended


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _is_sorry(message: Message, kind: str) -> bool:
    if message.severity != "warning":
        return False
    return kind == "hasSorry" or _SORRY.fullmatch(message.text.strip()) is not None


def _lines(stdout: bytes) -> Iterator[bytes]:
    """Yields the lines that may hold a message."""
    end = 0
    while (found := stdout.find(b'"severity"', end)) >= 0:
        start = stdout.rfind(b"\n", end, found) + 1 or end
        end = stdout.find(b"\n", found) + 1 or len(stdout)
        yield stdout[start:end]


def _parse(line: bytes) -> Found | None:
    text = line.decode(errors="replace")
    # Text printed without a newline stands before Lean's object.
    for start in _starts(text):
        try:
            value = _decode(text[start:])
        except (ValueError, RecursionError):
            continue
        return message_of(value)
    return None


def _decode(text: str) -> Any:
    """Returns the value of a JSON text; of an object, at least a message's fields."""
    try:
        line = _LINES.decode(text)
        return {
            "data": _text(line.data),
            "severity": _field(line.severity),
            "kind": _field(line.kind),
            "pos": _field(line.pos),
            "endPos": _field(line.end_pos),
        }
    except DecodeError:
        # It is stricter: NaN and halves of surrogate pairs are errors.
        if len(text) > _BUILT_CHARACTERS:
            raise
        return json.loads(text)


def _text(value: Raw) -> str | None:
    try:
        return decode_json(value, type=str)
    except ValidationError:
        return None


def _field(value: Raw) -> Any:
    raw = bytes(value)
    return decode_json(raw) if len(raw) <= _FIELD_BYTES else None


def _starts(text: str) -> list[int]:
    """Returns where the object that ends the line may begin: the last few places that look so.
    Lean's object has no more of them than its own and those of its positions."""
    starts: list[int] = []
    start = text.rfind('{"')
    while start >= 0 and len(starts) < _OBJECTS_IN_A_LINE:
        starts.append(start)
        start = text.rfind('{"', 0, start)
    return starts[::-1]


def message_of(value: Any) -> Found | None:
    """Returns the message in Lean's JSON object; None if it is no message."""
    if not isinstance(value, dict):
        return None
    severity = _SEVERITIES.get(str(value.get("severity")))
    text = value.get("data")
    if not isinstance(text, str) or severity is None:
        return None
    line, column = position_of(value.get("pos")) or (1, 0)
    end_line, end_column = position_of(value.get("endPos")) or (None, None)
    # JSON can hold half of a surrogate pair; a reply cannot.
    text = text.encode(errors="replace").decode()
    return Message(severity, line, column, text, end_line, end_column), str(value.get("kind", ""))


def position_of(value: Any) -> Position | None:
    """Returns the position in Lean's JSON object; None if it is no position."""
    if not isinstance(value, dict):
        return None
    line, column = value.get("line"), value.get("column")
    return (line, column) if _is_count(line) and _is_count(column) else None


def _is_count(value: Any) -> TypeGuard[int]:
    # Lean's numbers are smaller, and a reply cannot hold all numbers.
    return type(value) is int and 0 <= value < 1 << 32
