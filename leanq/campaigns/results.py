"""A campaign's results: one record per row of its data, or per sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..errors import UsageError


def read_results(path: str) -> Iterator[dict[str, Any]]:
    """The records in ``path``, in its order. Raises UsageError with the line that is no record."""
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if not isinstance(record, dict):
                    raise UsageError(f"{path}:{number}: is no JSON object")
                yield record
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
