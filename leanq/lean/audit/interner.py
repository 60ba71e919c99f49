"""Numbers for expressions and levels of compiled files."""

from __future__ import annotations

from itertools import islice
from typing import Any

Value = tuple[Any, ...]
"""The kind of an expression or level, the numbers of those in it, and what it holds beside."""


class Interner:
    """Numbers for expressions and levels: equal ones have the same number, in whatever file."""

    def __init__(self) -> None:
        self.numbers: dict[Value, int] = {}
        self._keys: list[Value] = []

    def number(self, key: Value) -> int:
        """Returns the number of this key."""
        return self.numbers.setdefault(key, len(self.numbers))

    def key(self, number: int) -> Value:
        """Returns the key that has this number."""
        if number >= len(self._keys):
            self._keys += islice(self.numbers, len(self._keys), None)
        return self._keys[number]
