"""The modules that somebody may have meant by the name of one that there is not."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

_MOST = 3
# As many are compared letter by letter, which takes some 20 ms.
_MOST_COMPARED = 200


def nearest(module: Sequence[str], modules: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns the nearest of an environment's modules, the best first: those below the name, then
    those that look like it, which stand beside it or end alike. All are parts of names."""
    below, alike = list[tuple[str, ...]](), list[tuple[int, tuple[str, ...]]]()
    for each in map(tuple, modules):
        before, behind = _common(module, each), _common(module[::-1], each[::-1])
        if before == len(module):
            below.append(each)
        # One part of it may be wrong, or it has moved.
        elif behind or len(each) == before + 1:
            alike.append((-before - behind, each))
    below.sort(key=lambda each: (len(each), each))
    compared = {".".join(each): each for _, each in sorted(alike)[:_MOST_COMPARED]}
    found = difflib.get_close_matches(".".join(module), compared, _MOST)
    return [*below[:_MOST], *(compared[name] for name in found)][:_MOST]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns how many parts two names begin with alike."""
    alike = (mine == theirs for mine, theirs in zip(one, other, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, alike))
