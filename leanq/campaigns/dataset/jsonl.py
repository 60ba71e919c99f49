"""Data sets of one JSON object per line."""

from __future__ import annotations

import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, BinaryIO

from leanq.campaigns.dataset.row import Dataset, Fields, Numbered, UnfitError
from leanq.errors import UsageError
from leanq.queue.settings import MAX_REQUEST_BYTES

MAX_LINE_BYTES = 4 * MAX_REQUEST_BYTES
"""The longest line that is read. A line may hold several texts, or many escaped characters."""

_CHUNK_BYTES = 1 << 20
_END_BYTES = 1 << 16


class JsonlDataset(Dataset):
    """A JSONL file: UTF-8, with or without a byte order mark. A JSON array raises UsageError."""

    def __init__(self, path: str, fields: Fields) -> None:
        self.path = path
        self.fields = fields
        try:
            with open(path, "rb") as stream:
                head = stream.read(_END_BYTES)
                size_bytes = os.fstat(stream.fileno()).st_size
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        self._begin = len(BOM_UTF8) if head.startswith(BOM_UTF8) else 0
        # A .json file is often a single array; in a .jsonl file such a line is a bad row.
        if path.lower().endswith(".json") and head[self._begin :].lstrip().startswith(b"["):
            raise UsageError(f"{path} is a JSON array; expected one JSON object per line")
        self.fingerprint = f"jsonl:{size_bytes}:{ends_hash(path)}"

    def total(self) -> int:
        """Returns the number of lines that are not blank; reads the whole file."""
        return sum(1 for _ in self._lines())

    def _records(self, line: int) -> Iterator[Numbered]:
        for number, text in self._lines():
            if number >= line:
                yield number, _parse(text) if isinstance(text, bytes) else text

    def _lines(self) -> Iterator[tuple[int, bytes | UnfitError]]:
        """Yields the number and the text of each line that is not blank."""
        try:
            with open(self.path, "rb", buffering=_CHUNK_BYTES) as stream:
                stream.seek(self._begin)
                read = partial(stream.readline, MAX_LINE_BYTES + 1)
                for line, text in enumerate(iter(read, b""), 1):
                    if len(text) > MAX_LINE_BYTES and not text.endswith(b"\n"):
                        size_bytes = len(text) + _skip_line(stream)
                        why = f"the line has {size_bytes} bytes; at most {MAX_LINE_BYTES} are read"
                        yield line, UnfitError(why)
                    elif not text.isspace():
                        yield line, text
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}") from None


def ends_hash(path: str) -> str:
    """Returns a hash of a file's first and last bytes: 16 hexadecimal digits. Raises UsageError."""
    try:
        with open(path, "rb", buffering=0) as stream:
            head = stream.read(_END_BYTES)
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END_BYTES))
            return blake2b(head + stream.read(_END_BYTES), digest_size=8).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _skip_line(stream: BinaryIO) -> int:
    skipped = 0
    while piece := stream.readline(_CHUNK_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _parse(text: bytes) -> dict[str, Any] | UnfitError:
    try:
        record = json.loads(text.decode())
    except UnicodeDecodeError as error:
        found = text[error.start]
        return UnfitError(f"no UTF-8 text: byte {error.start + 1} is 0x{found:02x}")
    except json.JSONDecodeError as error:
        # At the line's end, name the column behind its last character, not behind the line break.
        column = min(error.pos, len(error.doc.rstrip())) + 1
        return UnfitError(f"no JSON: {error.msg} at column {column}")
    except RecursionError:
        return UnfitError("JSON that is nested too deeply")
    except ValueError:  # int() refuses so many digits
        return UnfitError("JSON with a number of too many digits")
    return record if isinstance(record, dict) else UnfitError("no JSON object")
