"""Prints durations the same in the terminal and on the gateway's page."""

from __future__ import annotations


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
