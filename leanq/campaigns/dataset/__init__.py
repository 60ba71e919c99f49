"""Data sets of Lean texts, read row by row from any row on.

A data set is a JSONL file, a folder of ``.lean`` files, or a Parquet file. What is wrong with one
row is told in its place (:class:`BadRow`), so that the rest can be checked. Whether two rows have
the same id is for the reader to find out: here no row is remembered.
"""

from __future__ import annotations

import os
import stat

from leanq.campaigns.dataset.folder import Folder
from leanq.campaigns.dataset.jsonl import Jsonl
from leanq.campaigns.dataset.parquet import Parquet
from leanq.campaigns.dataset.row import MAX_CODE_BYTES, BadRow, Data, Fields, Row
from leanq.errors import UsageError

__all__ = ["MAX_CODE_BYTES", "BadRow", "Data", "Fields", "Row", "open_data"]

_JSONL = (".jsonl", ".ndjson", ".json")


def open_data(path: str, fields: Fields) -> Data:
    """The data set at ``path``: a folder, or a file whose name's end tells what it is.

    Raises:
        UsageError: there is none, it cannot be read or is of another kind, it is a Parquet file
            without a column that ``fields`` names or pyarrow is missing, or a folder without
            ``.lean`` files.
    """
    if path == "-":
        raise UsageError("a data set cannot be read from standard input, as it may be read again")
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise UsageError(f"{path!r}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        return Folder(path, fields)
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is neither a file nor a folder, so it cannot be read again")
    if path.lower().endswith(".parquet"):
        return Parquet(path, fields)
    if path.lower().endswith(_JSONL):
        return Jsonl(path, fields)
    raise UsageError(
        f"{path} is no data set: a folder of .lean files, or a file with a name that ends in "
        f"{', '.join(_JSONL)} or .parquet"
    )
