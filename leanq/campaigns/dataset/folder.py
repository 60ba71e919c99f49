"""Data sets that are a folder of ``.lean`` files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import islice

from leanq.campaigns.dataset.row import (
    MAX_CODE_BYTES,
    Dataset,
    Fields,
    Numbered,
    UnfitError,
    check_size,
)
from leanq.errors import UsageError

_SUFFIX = ".lean"


class FolderDataset(Dataset):
    """The files in a folder and below it, sorted by their relative paths, which are their ids.

    Names that begin with a dot are skipped: projects keep their packages under one. Links to
    folders are not followed, as they may form cycles. In an id, a byte that is not UTF-8 stands as
    ``\\xNN``.

    Raises:
        UsageError: a folder cannot be read, there are no such files, or fields were named, which
            files do not have.
    """

    def __init__(self, path: str, fields: Fields) -> None:
        if fields != Fields():
            raise UsageError(
                f"{path} is a folder, whose files have no fields; leave the --*-field options out"
            )
        self.path, self.fields = path, fields
        digest, self._total = blake2b(digest_size=8), 0
        for name in self._names():
            digest.update(b"%s\0%d\0" % (os.fsencode(name), _size_bytes(f"{path}/{name}")))
            self._total += 1
        if not self._total:
            raise UsageError(f"there are no {_SUFFIX} files in {path}")
        self.fingerprint = f"folder:{self._total}:{digest.hexdigest()}"

    def total(self) -> int:
        return self._total

    def _records(self, line: int) -> Iterator[Numbered]:
        for number, name in enumerate(islice(self._names(), line - 1, None), line):
            shown = os.fsencode(name).decode(errors="backslashreplace")
            found: Mapping[str, str] | UnfitError
            try:
                found = {"id": shown, "code": _read(f"{self.path}/{name}")}
            except UnfitError as error:
                found, error.id = error, shown
            yield number, found

    def _names(self, below: str = "") -> Iterator[str]:
        """Yields the relative paths, sorted as whole texts, with one folder in memory at a time."""
        try:
            with os.scandir(f"{self.path}/{below}") as entries:
                # The slash takes part in the order, as it does in the files' paths.
                names = sorted(
                    f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
                    for entry in entries
                    if not entry.name.startswith(".")
                )
        except OSError as error:
            raise UsageError(f"{self.path}/{below}: {error.strerror}") from None
        for name in names:
            if name.endswith("/"):
                yield from self._names(below + name)
            elif name.endswith(_SUFFIX):
                yield below + name


def _size_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it becomes a bad row
        return -1


def _read(path: str) -> str:
    """Returns the text of a file; raises UnfitError."""
    try:
        # Opening a pipe would block. Without an opener, a folder's descriptor would leak.
        with open(path, "rb", opener=lambda at, how: os.open(at, how | os.O_NONBLOCK)) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnfitError("no regular file")
            check_size(status.st_size)
            data = stream.read(MAX_CODE_BYTES + 1)
    except OSError as error:
        raise UnfitError(error.strerror or type(error).__name__) from None
    check_size(len(data))  # the file may be growing
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        found = data[error.start]
        raise UnfitError(f"no UTF-8 text: byte {error.start + 1} is 0x{found:02x}") from None
