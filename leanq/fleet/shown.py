"""Tables, counts and durations as people see them, in the terminal and on pages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_GAP = "  "


def columns(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str] | None = None
) -> list[str]:
    """Returns a table as lines, titles first. The columns in ``left`` are flush left; by default
    the first one."""
    cells = [titles, *rows]
    widths = [max(len(row[number]) for row in cells) for number in range(len(titles))]
    flush_left = [title in (titles[:1] if left is None else left) for title in titles]
    return [
        _GAP.join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, flush_left, strict=True)
        ).rstrip()
        for row in cells
    ]


def table(rows: Sequence[Mapping[str, str]], *, left: Collection[str] | None = None) -> list[str]:
    """Returns rows of cells by title as ``columns`` does; no line without rows."""
    return columns([*rows[0]], [[*row.values()] for row in rows], left=left) if rows else []


def counted(counts: Mapping[str, int]) -> str:
    """Returns ``3 accepted, 1 rejected``, the most frequent first; empty for no counts."""
    found = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {name}" for name, count in found if count)


def plural(count: int, one: str, many: str = "") -> str:
    """Returns ``1 request``, ``2 requests``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def some_of(names: Sequence[str], most: int = 3) -> str:
    """Returns ``a, b, c and 167 more``."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str) -> str:
    """Returns the text without control characters: names come from any writer of Redis, and could
    steer a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def duration(seconds: float) -> str:
    """Returns a duration in a fitting unit, in at most six characters: ``4.2 s``, ``12 min``."""
    # The clocks of two machines may differ.
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, length, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < until:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
