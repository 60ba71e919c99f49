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
from collections.abc import Sequence
from typing import Any, get_args

from ..sandbox import Exit
from ..wire import Message, Severity, Verdict

# 'sorry' in straight quotes until 4.27, in backquotes since; a message's kind tells it as well.
_SORRY = re.compile(r"declaration uses (?:'sorry'|`sorry`)")

# A deterministic budget that ran out: the message itself, or the cause that a tactic reports.
_BUDGET = re.compile(
    r"^\s*(?:\(deterministic\) timeout\b|maximum recursion depth has been reached\b)", re.MULTILINE
)
_OUT_OF_MEMORY = re.compile(rb"out of memory", re.IGNORECASE)


class Printed:
    """The messages of one run.

    Attributes:
        messages: in the order printed; lines from 1, columns from 0.
        sorry: whether Lean warned that a declaration uses sorry.
    """

    def __init__(self, stdout: bytes) -> None:
        found = [m for line in stdout.splitlines() if (m := _parse(line)) is not None]
        self.messages: tuple[Message, ...] = tuple(message for message, _ in found)
        self.sorry = any(_is_sorry(message, kind) for message, kind in found)


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
    errors = [m for m in printed.messages if m.severity == "error"]
    if errors:
        return "exhausted" if all(_BUDGET.search(m.text) for m in errors) else "rejected"
    if end.code != 0:
        return "memory" if _OUT_OF_MEMORY.search(stderr) else "crashed"
    if not compiled:
        return "crashed"
    return "incomplete" if printed.sorry else "accepted"


def last_words(end: Exit, stderr: bytes) -> Message:
    """Why Lean's process is said to have crashed, as a message of leanq's."""
    if end.stopped == "output":
        text = "leanq: Lean was stopped because it printed too much"
    elif end.signal is not None:
        text = f"leanq: Lean died of {signal.Signals(end.signal).name}"
    else:
        text = f"leanq: Lean ended with exit code {end.code} before it had checked the file"
    said = stderr.decode(errors="replace").strip()
    return Message("error", 1, 0, f"{text}\n{said[-2000:]}" if said else text)


def _is_sorry(message: Message, kind: str) -> bool:
    if message.severity != "warning":
        return False
    return kind == "hasSorry" or _SORRY.fullmatch(message.text.strip()) is not None


def _parse(line: bytes) -> tuple[Message, str] | None:
    text = line.decode(errors="replace")
    # Text that code printed without a newline stands before Lean's object.
    for start in _starts(text):
        try:
            value = json.loads(text[start:])
        except ValueError:
            continue
        return _message(value)
    return None


def _starts(text: str) -> Sequence[int]:
    """Where an object may begin: at the front, else at the first few places that look so."""
    if text.startswith('{"'):
        return [0]
    return [match.start() for match in re.finditer(r'\{"', text)][:8]


def _message(value: Any) -> tuple[Message, str] | None:
    if not isinstance(value, dict):
        return None
    severity: Any = value.get("severity")
    text, pos = value.get("data"), value.get("pos")
    if not isinstance(text, str) or severity not in get_args(Severity):
        return None
    line, column = _position(pos) or (1, 0)
    end_line, end_column = _position(value.get("endPos")) or (None, None)
    return Message(severity, line, column, text, end_line, end_column), str(value.get("kind", ""))


def _position(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, dict):
        return None
    line, column = value.get("line"), value.get("column")
    return (line, column) if isinstance(line, int) and isinstance(column, int) else None
