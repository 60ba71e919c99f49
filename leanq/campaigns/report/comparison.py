"""Compares two files of results.

Records match by id and sample; a row without an id goes by its line. If two records have the same
id and sample, the one with a verdict counts: a duplicate row ends with an error.

Memory: a key and a number for each older record, about 250 MB for a million, and the newer file's
records that ended with an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from leanq.campaigns.report.estimates import Interval, mean_of_differences, sign_test
from leanq.campaigns.report.outcomes import ENDS, NO_SAMPLES, Outcome

KEPT = 2000
"""The most changes that a list keeps."""

_Key = tuple[str | tuple[int], int | None]
_MATCHED = -1


@dataclass(frozen=True, slots=True)
class Change:
    """A record whose verdict changed; ``other_code`` is ``None`` where a hash is missing."""

    name: str
    old: str
    new: str
    other_code: bool | None


@dataclass(frozen=True, slots=True)
class Transition:
    """How many records ended as ``old`` and end as ``new``."""

    old: str
    new: str
    count: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between an older and a newer file.

    Attributes:
        matched: records in both.
        other_code: how many of these have another text, whatever their verdicts.
        lost, gained: records that are no longer accepted, and that are accepted now; at most
            ``KEPT`` of ``lost_total`` and ``gained_total``.
        only_old, only_new: how many records stand in one file alone.
        repeated: records of the newer file whose id and sample came before.
        transitions: how often each pair of verdicts came, unchanged ones included; the commonest
            first.
        pass_1: by how much pass@1 rose, over the ``pairs`` problems with samples in both files.
        rose, fell: how many of these have a larger, or a smaller, share of accepted samples.
        p_value: how likely so uneven a split is by chance, by a paired sign test.
    """

    matched: int
    other_code: int
    lost_total: int
    lost: tuple[Change, ...]
    gained_total: int
    gained: tuple[Change, ...]
    only_old: int
    only_new: int
    repeated: int
    transitions: tuple[Transition, ...]
    pass_1: Interval | None
    pairs: int
    rose: int
    fell: int
    p_value: float


class Comparator:
    """Compares two files: pass the older one's outcomes through ``old``, then the newer one's
    through ``new``."""

    def __init__(self) -> None:
        self._old: dict[_Key, int] = {}
        self._errors: list[Outcome] = []
        self._transitions: Counter[tuple[str, str]] = Counter()
        # By whether they are accepted now.
        self._changes: dict[bool, list[Change]] = {True: [], False: []}
        self._only_new = self._repeated = self._other_code = 0
        self._alone: Counter[float] = Counter()
        self._several: dict[object, list[int]] = {}

    def old(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Passes ``outcomes`` through; read all of them before calling ``new``."""
        for outcome in outcomes:
            key = _key(outcome)
            if outcome.end != "error" or key not in self._old:
                # One number, as a pair would take twice the memory.
                self._old[key] = (outcome.code or 0) * len(ENDS) + ENDS.index(outcome.end)
            yield outcome

    def new(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        for outcome in outcomes:
            if outcome.end == "error":
                self._errors.append(outcome)
            else:
                self._match(outcome)
            yield outcome
        for outcome in self._errors:
            self._match(outcome)

    def _match(self, new: Outcome) -> None:
        key = _key(new)
        found = self._old.get(key)
        if found is None:
            self._only_new += 1
        elif found == _MATCHED:
            self._repeated += 1
        else:
            self._old[key] = _MATCHED
            code_hash, end = divmod(found, len(ENDS))
            other_code = code_hash != new.code if code_hash and new.code else None
            self._other_code += bool(other_code)
            self._count(ENDS[end], new, other_code)

    def _count(self, old: str, new: Outcome, other_code: bool | None) -> None:
        self._transitions[old, new.end] += 1
        rise = (new.end == "accepted") - (old == "accepted")
        kept = self._changes[rise > 0]
        if rise and len(kept) < KEPT:
            kept.append(Change(new.name, old, new.end, other_code))
        if old in NO_SAMPLES or new.end in NO_SAMPLES:
            return
        if (group := new.group) is None:
            self._alone[rise] += 1
        else:
            pairs = self._several.setdefault(group, [0, 0])
            pairs[0] += 1
            pairs[1] += rise

    def result(self) -> Comparison:
        """Returns the comparison; call it once all outcomes have passed."""
        rises = self._alone + Counter(rise / n for n, rise in self._several.values())
        rose = sum(number for rise, number in rises.items() if rise > 0)
        fell = sum(number for rise, number in rises.items() if rise < 0)
        moves = self._transitions.most_common()
        return Comparison(
            matched=self._transitions.total(),
            other_code=self._other_code,
            lost_total=sum(n for (old, new), n in moves if old == "accepted" != new),
            lost=tuple(self._changes[False]),
            gained_total=sum(n for (old, new), n in moves if old != "accepted" == new),
            gained=tuple(self._changes[True]),
            only_old=sum(found != _MATCHED for found in self._old.values()),
            only_new=self._only_new,
            repeated=self._repeated,
            transitions=tuple(Transition(old, new, count) for (old, new), count in moves),
            pass_1=mean_of_differences(rises),
            pairs=rises.total(),
            rose=rose,
            fell=fell,
            p_value=sign_test(rose, fell),
        )


def _key(outcome: Outcome) -> _Key:
    # The tuple tells a line from an id. Parquet has ids as texts.
    return ((outcome.line,) if outcome.id is None else str(outcome.id), outcome.sample)
