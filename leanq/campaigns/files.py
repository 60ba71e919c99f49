"""Writes files that exist whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from leanq.errors import UsageError


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yields a stream for a new file that replaces ``path`` once it is complete and durable.

    Only one process may write to ``path`` at a time. Raises UsageError; the old file is then
    unchanged.
    """
    # Beside the file that a link leads to: a rename is atomic only within one disk.
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    # A fixed name: the next writer replaces what a killed one left.
    part = os.path.join(folder, f".{name}.part")
    try:
        if os.path.exists(target) and not stat.S_ISREG(os.stat(target).st_mode):
            raise UsageError(f"{path} is no regular file; name another file")
        try:
            with open(part, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        # Otherwise a loss of power can undo the rename.
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
