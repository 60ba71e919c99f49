"""Recognises common problem sets by the names of their fields.

A problem set has statements, and a campaign verifies each completion against its row's statement.
Without completions it checks the statements themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanq.campaigns.dataset.row import Fields

# The likeliest first.
_COMPLETIONS = (
    *("completions", "completion", "full_proof", "full_proofs", "proofs", "proof"),
    *("lean_code", "lean4_code", "code", "responses", "response", "solution"),
)
_IDS = ("id", "name", "problem_name", "problem_id", "custom_id", "uuid")
_HEADERS = ("header", "lean4_src_header", "src_header", "lean_header", "preamble")
_TAGS = ("tags", "tag", "split", "source")


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of problem set: the names that its field with the statement can have.

    ``marks``: fields of which at least one stands beside it, if any are given.
    """

    name: str
    statements: tuple[str, ...]
    marks: tuple[str, ...] = ()

    def fields(self, rows: Sequence[Mapping[str, Any]]) -> Fields | None:
        """Returns the fields of these first rows, if they have this shape."""
        known = {name for row in rows for name, value in row.items() if not _is_empty(value)}
        statement = _first(self.statements, known)
        if statement is None or (self.marks and not known & set(self.marks)):
            return None
        row_id = _first(_IDS, known)
        if row_id is None:
            return None
        completion = _first(_COMPLETIONS, known - {statement})
        return Fields(
            id=row_id,
            code=completion or statement,
            target=statement if completion else None,
            header=_first(_HEADERS, known),
            tags=_first(_TAGS, known),
            parts=True,
        )


# From the most particular shape to the one with the fewest marks.
SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("proofnet", ("lean4_formalization", "formal_statement"), ("nl_statement",)),
        Shape("putnambench", ("lean4_statement",)),
        Shape("lean-workbook", ("formal_statement",), ("natural_language_statement",)),
        Shape("minif2f", ("formal_statement",), ("informal_prefix", "goal", "informal_stmt")),
        Shape(
            "kimina",
            ("formal_statement", "lean4_statement", "statement"),
            ("uuid", "custom_id", "problem_id", *_COMPLETIONS),
        ),
    )
}


def recognise(rows: Iterable[Mapping[str, Any]]) -> tuple[str, Fields] | None:
    """Returns the name and the fields of the shape that the first rows have; ``None`` for a plain
    data set.

    Rows with ``id`` and ``code``, and without a statement, are plain.
    """
    first = list(rows)
    for shape in SHAPES.values():
        if fields := shape.fields(first):
            return shape.name, fields
    return None


def _first(names: Iterable[str], known: set[str]) -> str | None:
    return next((name for name in names if name in known), None)


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or value == []
