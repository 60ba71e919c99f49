"""Aligned columns and counts for all commands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_GAP = "  "


def columns(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str] = ()
) -> list[str]:
    """Returns a table as lines, titles first. The first column and those in ``left`` are flush
    left."""
    cells = [titles, *rows]
    widths = [max(len(row[number]) for row in cells) for number in range(len(titles))]
    flush_left = [number == 0 or title in left for number, title in enumerate(titles)]
    return [
        _GAP.join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, flush_left, strict=True)
        ).rstrip()
        for row in cells
    ]


def counted(counts: Mapping[str, int]) -> str:
    """Returns ``3 accepted, 1 rejected``, the most frequent first; empty for no counts."""
    found = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {name}" for name, count in found if count)


def plural(count: int, one: str, many: str = "") -> str:
    """Returns ``1 request``, ``2 requests``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def printable(text: str) -> str:
    """Returns the text without control characters: names come from any writer of Redis, and could
    steer a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)
