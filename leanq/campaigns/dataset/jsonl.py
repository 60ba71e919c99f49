"""Data sets of one JSON object per line."""

from __future__ import annotations

import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
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
    """A JSONL file: UTF-8, with or without a byte order mark. Positions are offsets in bytes.

    Raises UsageError for a JSON array.
    """

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
        count, is_row = 0, False
        try:
            with open(self.path, "rb", buffering=0) as stream:
                stream.seek(self._begin)
                while chunk := stream.read(_CHUNK_BYTES):
                    pieces = chunk.split(b"\n")
                    is_row = is_row or _is_row(pieces[0])
                    if len(pieces) > 1:
                        count += is_row + sum(map(_is_row, pieces[1:-1]))
                        is_row = _is_row(pieces[-1])
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}") from None
        return count + is_row

    def _records(self, line: int, start: int) -> Iterator[Numbered]:
        position = max(start, self._begin)
        try:
            with open(self.path, "rb", buffering=_CHUNK_BYTES) as stream:
                stream.seek(position)
                while text := stream.readline(MAX_LINE_BYTES + 1):
                    position += len(text)
                    if len(text) > MAX_LINE_BYTES and not text.endswith(b"\n"):
                        del text
                        beyond_bytes = _skip_line(stream)
                        position += beyond_bytes
                        yield (
                            line,
                            position,
                            UnfitError(
                                f"the line has {MAX_LINE_BYTES + 1 + beyond_bytes} bytes; at most "
                                f"{MAX_LINE_BYTES} are read"
                            ),
                        )
                    elif _is_row(text):
                        yield line, position, _parse(text)
                    line += 1
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


def _is_row(text: bytes) -> bool:
    return bool(text) and not text.isspace()


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
