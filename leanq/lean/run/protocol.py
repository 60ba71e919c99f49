"""The language server protocol, as far as leanq speaks it with ``lean --worker``.

A frame is a header with ``Content-Length`` and a JSON object. Positions count lines from 0, and
UTF-16 units. Code under elaboration can write to the same pipe. So a frame that cannot be read is
an error, after which the process must not be used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from leanq.errors import LanguageServerError
from leanq.lean.outcome import Found, is_of_checker
from leanq.queue.requests import Message, Severity

_LENGTH = re.compile(
    rb"(?:[^\r\n]{1,200}\r\n)*?Content-Length: (\d{1,9})\r\n(?:[^\r\n]{1,200}\r\n)*\r\n"
)
_MOST_HEAD_BYTES = 1 << 10
_SEVERITIES: Sequence[Severity] = ("error", "warning", "information", "information")


class _Position(msgspec.Struct):
    line: int
    character: int


class Range(msgspec.Struct):
    """A range of a document. ``start`` and ``end``: lines from 0, and UTF-16 units."""

    start: _Position
    end: _Position


class Diagnostic(msgspec.Struct, rename="camel"):
    """A message about a range. ``full_range`` is Lean's own; ``range`` ends with its first line."""

    range: Range
    message: str
    severity: int = 1
    full_range: Range | None = None


class Params(msgspec.Struct, rename="camel"):
    """The parameters of notifications that leanq reads. ``is_incremental``: whether diagnostics
    told before stand."""

    version: int | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    is_incremental: bool | None = None


class Incoming(msgspec.Struct):
    """A response, a notification or a request of the server's."""

    id: int | str | None = None
    method: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"null")
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw | None = None


_incoming = msgspec.json.Decoder(Incoming)
_params = msgspec.json.Decoder(Params)


def frame(method: str, params: Mapping[str, object], number: int | None = None) -> bytes:
    """Returns a notification, or with a ``number`` a request, as bytes."""
    message: dict[str, object] = {"jsonrpc": "2.0", "method": method, "params": params}
    if number is not None:
        message["id"] = number
    # Older versions of Lean cannot read a pair of surrogates.
    body = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


class Frames:
    """Splits a server's output into messages. Holds at most ``most_bytes`` of one."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._unread = bytearray()

    def take(self, chunk: bytes) -> Iterator[Incoming]:
        """Takes output, and yields the messages that are complete. Raises LanguageServerError for
        what is no frame."""
        self._unread += chunk
        while self._unread:
            head = _LENGTH.match(self._unread)
            if head is None:
                if len(self._unread) > _MOST_HEAD_BYTES or b"\r\n\r\n" in self._unread:
                    raise LanguageServerError("Lean's language server printed what is no message")
                return
            end = head.end() + int(head[1])
            if end > self._most_bytes:
                raise LanguageServerError("Lean's language server printed too large a message")
            if len(self._unread) < end:
                return
            body = bytes(self._unread[head.end() : end])
            del self._unread[:end]
            try:
                yield _incoming.decode(body)
            except msgspec.MsgspecError as error:
                raise LanguageServerError(
                    f"Lean's language server printed a message that cannot be read: {error}"
                ) from None


@dataclass(slots=True)
class Told:
    """The diagnostics of one version of the document, and how many are errors."""

    version: int
    diagnostics: list[Diagnostic] = field(default_factory=list)
    errors: int = 0

    def take(self, message: Incoming) -> None:
        """Takes a message's diagnostics: beside those before, or in their place, as it says. Raises
        LanguageServerError if they cannot be read."""
        if message.method != "textDocument/publishDiagnostics":
            return
        try:
            params = _params.decode(message.params)
        except msgspec.MsgspecError as error:
            raise LanguageServerError(
                f"Lean's language server printed a diagnostic that cannot be read: {error}"
            ) from None
        if params.version != self.version:
            return
        if not params.is_incremental:
            self.diagnostics, self.errors = [], 0
        self.diagnostics += params.diagnostics
        self.errors += sum(each.severity == 1 for each in params.diagnostics)


class Places:
    """Where a text's UTF-16 positions are in code points. Lean reads ``\\r\\n`` as a line's end."""

    def __init__(self, text: str) -> None:
        self._lines = text.replace("\r\n", "\n").split("\n")

    def of(self, position: _Position) -> tuple[int, int]:
        """Returns a line from 1, and a column from 0 in code points."""
        line = self._lines[position.line] if position.line < len(self._lines) else ""
        if line.isascii():
            return position.line + 1, position.character
        units = line.encode("utf-16-le", "surrogatepass")
        # Lean may name a place behind the line's end.
        behind = max(0, position.character - len(units) // 2)
        before = units[: 2 * position.character].decode("utf-16-le", "replace")
        return position.line + 1, len(before) + behind

    def units(self, line: int, column: int) -> dict[str, int]:
        """Returns the position of a line from 1 and a column from 0 in code points."""
        before = self._lines[line - 1][:column]
        return {
            "line": line - 1,
            "character": len(before.encode("utf-16-le", "surrogatepass")) // 2,
        }


def messages_of(text: str, diagnostics: Sequence[Diagnostic]) -> tuple[Found, ...]:
    """Returns diagnostics as the messages that ``lean --json`` prints about the text."""
    places = Places(text)
    found: list[Found] = []
    for each in diagnostics:
        full = each.full_range or each.range
        line, column = places.of(full.start)
        end: tuple[int | None, int | None] = places.of(full.end)
        # Lean prints no end for what its parser says, and the protocol has no message without one.
        if full.start == full.end:
            end = (None, None)
        severity = _SEVERITIES[each.severity - 1] if 0 < each.severity <= 4 else "error"
        found.append((Message(severity, line, column, each.message, *end), ""))
    return tuple(found)


def is_out_of_order(text: str, messages: Sequence[Message]) -> bool:
    """Returns whether ``lean`` could print the messages in another order. The server tells what
    checking an auxiliary declaration brings behind the tactic that made it, and ``lean`` behind the
    whole proof. So no other message of the same command must follow."""
    lines: list[str] = []
    checked: Message | None = None
    for each in messages:
        if is_of_checker(each):
            checked = each
        elif checked is not None:
            lines = lines or text.split("\n")
            first, last = sorted((checked.line, each.line))
            # Commands begin in the first column.
            if not any(line[:1].strip() for line in lines[first:last]):
                return True
    return False
