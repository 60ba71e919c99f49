"""Data sets for tests: how they are made, and what must hold of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from leanq.campaigns.dataset import BadRow, Dataset, Fields, Row, open_dataset

ALL = Fields(id="name", code="proof", problem="task", header="head", prompt="start")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def read(path: str | Path, fields: Fields = Fields()) -> list[Row | BadRow]:  # noqa: B008
    return list(open_dataset(str(path), fields).rows())


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def table(path: Path, group: int = 1 << 20, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def resumes_everywhere(data: Dataset) -> None:
    """Behind each row, the rest is exactly what it was."""
    whole = list(data.rows())
    for place, row in enumerate(whole, 1):
        assert list(data.rows(row.line + 1)) == whole[place:]
