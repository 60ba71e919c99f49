"""Data sets of Lean texts, read row by row from any row on.

A data set is a JSONL file, a folder of ``.lean`` files, or a Parquet file. A row that cannot be
checked is read as a :class:`BadRow`, so that the others can be. Two rows with the same id are for
the caller to find: readers remember no row. Resuming is reading from the place that the journal
(:mod:`leanq.campaigns.journal`) holds as its cursor.
"""

from __future__ import annotations

import os
import stat

from leanq.campaigns.dataset.folder import FolderDataset
from leanq.campaigns.dataset.jsonl import JsonlDataset
from leanq.campaigns.dataset.parquet import ParquetDataset
from leanq.campaigns.dataset.row import MAX_CODE_BYTES, BadRow, Dataset, Fields, Row
from leanq.errors import UsageError

__all__ = ["MAX_CODE_BYTES", "BadRow", "Dataset", "Fields", "Row", "open_dataset"]

_JSONL = (".jsonl", ".ndjson", ".json")


def open_dataset(path: str, fields: Fields) -> Dataset:
    """The data set at ``path``: a folder, or a file whose suffix names its kind.

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
        return FolderDataset(path, fields)
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is neither a file nor a folder, and could be read only once")
    if path.lower().endswith(".parquet"):
        return ParquetDataset(path, fields)
    if path.lower().endswith(_JSONL):
        return JsonlDataset(path, fields)
    raise UsageError(
        f"{path} is no data set; expected a folder of .lean files, or a file whose name ends in "
        f"{', '.join(_JSONL)} or .parquet"
    )
