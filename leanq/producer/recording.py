"""Keeps a client's requests and their replies as training data, in a journal of its own.

A journal is a file of lines. Each has the CRC-32 of the rest as eight hexadecimal digits, a blank,
and a ``Recorded`` as JSON without line breaks. Only one client writes it, a line at a time. So
however its process ends, at most the last line is torn. Readers skip damaged lines, which their
sums give away. ``leanq export-traces`` makes tables of any number of journals.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from leanq.errors import InvalidRequestError, LeanQError, UsageError
from leanq.fleet.shown import plural
from leanq.producer.request_builder import PreparedRequest
from leanq.producer.route import CallingBack, Route, Waiter
from leanq.queue import wire
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import MAX_REQUEST_BYTES

log = logging.getLogger("leanq.client")

SUFFIX = ".journal"
DEFAULT_FOLDER = "leanq-record"

_RECORDED = frozenset({"check", "verify", "step"})
_WARN_AGAIN_S = 60.0
# JSON can make six bytes of one. A longer line is read in parts, which are no records.
_LONGEST_LINE_BYTES = 6 * (wire.MAX_REPLY_BYTES + MAX_REQUEST_BYTES)
_SUM_CHARS = 8


class Recorded(msgspec.Struct, frozen=True):
    """A request that has ended, and its reply.

    Attributes:
        ended_ms: when the reply came, in milliseconds since 1970.
        environment: the environment asked for; "" where a gateway found it for a state.
        labels: the caller's labels, as JSON.
    """

    ended_ms: int
    environment: str
    labels: str
    request: Request
    reply: Reply


_records = msgspec.json.Decoder(Recorded)


class RecordingRoute:
    """A route that records each check, verification and step that ends with a reply.

    It does not record attached requests: only the client that sent one knows its text.
    """

    def __init__(self, route: Route, folder: Path) -> None:
        self.route = route
        self._journal = Journal(folder)
        # The waiters that record, by those of callers.
        self._recording: dict[Waiter, Waiter] = {}

    async def open(self) -> None:
        await self.route.open()

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        ended = partial(self._ended, prepared, waiter)
        recording = self._recording[waiter] = CallingBack(ended, waiter.acknowledged)
        self.route.send(prepared, recording)

    def attach(self, request_id: str, waiter: Waiter) -> None:
        self.route.attach(request_id, waiter)

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        return self.route.cancel(request_id, self._recording.pop(waiter, waiter))

    async def close(self, *, withdraw: bool) -> None:
        await self.route.close(withdraw=withdraw)
        self._journal.close()

    def _ended(
        self, prepared: PreparedRequest[Any], waiter: Waiter, end: Reply | LeanQError
    ) -> None:
        """Records the end of a request, and passes it on even if recording fails."""
        self._recording.pop(waiter, None)
        try:
            if isinstance(end, Reply) and end.verdict is not None:
                self._record(prepared, end)
        finally:
            waiter.ended(end)

    def _record(self, prepared: PreparedRequest[Any], reply: Reply) -> None:
        request = prepared.request
        if request.op in _RECORDED:
            ended_ms = time.time_ns() // 1_000_000
            labels, environment = prepared.labels, prepared.submission.environment
            self._journal.write(Recorded(ended_ms, environment, labels, request, reply))


class Journal:
    """A journal that is being written; its file is made for the first record.

    If a record cannot be written, the log says so and the record is lost: no verdict waits for a
    full disk.
    """

    def __init__(self, folder: Path) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        self.path = folder / name
        self._file: int | None = None
        self._end_bytes = 0
        self._lost = 0
        self._say_at_s = 0.0

    def write(self, record: Recorded) -> None:
        """Appends a record. It reaches the operating system now, and the disk later."""
        line = pack(record)
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o644)
            self._append(self._file, line)
        except OSError as error:
            self._lost += 1
            if time.monotonic() >= self._say_at_s:
                self._say_at_s = time.monotonic() + _WARN_AGAIN_S
                lost = plural(self._lost, "request was", "requests were")
                log.error("%s: %s; %s not recorded", self.path, error.strerror, lost)

    def _append(self, file: int, line: bytes) -> None:
        done = 0
        try:
            while done < len(line):
                done += os.write(file, line[done:])
        except OSError:
            # Cut the torn line off, or the next one would continue it and both be unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._end_bytes)
            raise
        self._end_bytes += len(line)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def pack(record: Recorded) -> bytes:
    try:
        text = msgspec.json.encode(record)
    except UnicodeEncodeError:
        # Half of a surrogate pair, which a gateway's JSON can have, has no UTF-8.
        plain = msgspec.to_builtins(record)
        text = json.dumps(plain, ensure_ascii=False).encode(errors="replace")
    return b"%08x %b\n" % (crc32(text), text)


def read_journal(path: str | Path, skipped: Counter[str]) -> Iterator[Recorded]:
    """Yields the records of a journal, which may still be written to; raises UsageError.

    ``skipped`` counts lines that are no records: torn, damaged, or of a later release.
    """
    try:
        with open(path, "rb") as stream:
            while line := stream.readline(_LONGEST_LINE_BYTES):
                record = _record(line)
                if record is None:
                    skipped["unreadable"] += 1
                else:
                    yield record
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _record(line: bytes) -> Recorded | None:
    text = line[_SUM_CHARS + 1 : -1]
    if line != b"%08x %b\n" % (crc32(text), text):
        return None
    try:
        return _records.decode(text)
    except (msgspec.DecodeError, InvalidRequestError, UnicodeDecodeError, RecursionError):
        return None


def folder_of(record: bool | str | os.PathLike[str]) -> Path | None:
    """Returns the folder for the journals, created if needed; None if nothing is recorded.

    Args:
        record: a folder; True for ``leanq-record`` here.

    Raises:
        UsageError: it is none of these, or the folder cannot be written.
    """
    if record is False:
        return None
    if (record is not True and not isinstance(record, str | os.PathLike)) or record == "":
        raise UsageError(f"record must be True or a folder, got {record!r:.80}")
    folder = Path(DEFAULT_FOLDER if record is True else record).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{folder}: what is recorded cannot go there: {why}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: what is recorded cannot go there: it may not be written")
    return folder
