"""What snapshots cost and bring, learned from what was seen; the unit is the second.

A snapshot of what Lean has made of a text is worth saving when ::

    uses × (replay_s − load_s)  >  save_s + ship_s

``uses`` is how often the text is expected to come again: the average over all texts seen, or as
often as this one came already, whichever is more. ``replay_s`` is what elaborating it takes. The
rest is predicted from the snapshot's size, and that, before there is one, from ``replay_s``::

    bytes  = size(replay_s)
    load_s = load + fetch(bytes) × the share of loads for which it was fetched from the server
    save_s = save(bytes)
    ship_s = ship(bytes)

Each is a line, ``factor × (fixed + slope × input)``. What it is multiplied by is learned: the
observations' ratio to the line, averaged with weights that fade. A single ratio counts for at most
4 and at least 1/4, so that one bad moment of a machine decides nothing. Slope and fixed part keep
their ratio, which is Lean's own; how fast a machine, a disk or a network is moves both.

In ``replay_s`` everything is linear, and without any elaboration a snapshot brings nothing and
costs something: so what is worth it for one text is worth it for every text that takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cachetools import LRUCache

_NEW_WEIGHT = 0.2
_MOST_RATIO = 4.0

# A text comes again this often, and this many texts' worth of experience says so.
_PRIOR_USES = 8.0
_PRIOR_TEXTS = 10.0
# Loads for each of which a snapshot was fetched: so much experience says one of eight.
_PRIOR_LOADS = 16.0
_PRIOR_FETCHES = 2.0
# Counts are halved when they have grown to this, so that what changes is learned again.
_MOST_COUNTED = 1000.0
_TEXTS_REMEMBERED = 10_000
# What it takes to go on behind a prefix, and to put a process there, besides elaborating.
_CONTINUED_S = 0.03
_STAND_S = 0.3

_COUNTED = ("replayed", "loaded", "fetched", "saved", "shipped", "worth", "not_worth")


@dataclass(slots=True)
class Line:
    """``factor × (fixed + slope × input)``, whose factor is learned."""

    fixed: float
    slope: float
    factor: float = 1.0

    def at(self, value: float) -> float:
        return self.factor * (self.fixed + self.slope * value)

    def learn(self, value: float, observed: float) -> None:
        # Measured times can be zero, and a logarithm cannot.
        ratio = max(observed, 1e-9) / self.at(value)
        ratio = min(_MOST_RATIO, max(1 / _MOST_RATIO, ratio))
        self.factor *= ratio**_NEW_WEIGHT


class Costs:
    """One worker's experience with snapshots. All methods are quick, and none blocks."""

    def __init__(self) -> None:
        # The priors, from Lean 4.35 on a small machine: a text of 3,000 definitions elaborates in
        # 2.7 s; its snapshot has 150 MB, takes 6 s to save, 1.2 s to compress and send, and 0.1 s
        # to load. The smallest has 3 MB.
        self._size = Line(3e6, 55e6)
        self._save = Line(0.05, 4e-8)
        self._ship = Line(0.01, 8e-9)
        self._fetch = Line(0.01, 3e-9)
        self._load = Line(0.1, 0.0)
        self._texts = _PRIOR_TEXTS
        self._returns = _PRIOR_TEXTS * _PRIOR_USES
        self._loads = _PRIOR_LOADS
        self._fetches = _PRIOR_FETCHES
        self._seen: LRUCache[str, int] = LRUCache(_TEXTS_REMEMBERED)
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._replay_s = 0.0

    def replayed(self, key: str, cpu_s: float) -> None:
        """A text was elaborated, in ``cpu_s``."""
        self._counts["replayed"] += 1
        self._replay_s += cpu_s
        seen = self._seen.get(key, 0)
        self._seen[key] = seen + 1
        if seen:
            self._returns += 1
        else:
            self._texts += 1
        self._fade()

    def loaded(self, s: float) -> None:
        """A snapshot was loaded, in ``s`` with the start of Lean: its text came again."""
        self._counts["loaded"] += 1
        self._load.learn(0, s)
        self._loads += 1
        self._returns += 1
        self._fade()

    def continued(self) -> None:
        """A text was continued behind its prefix: it came again."""
        self._returns += 1
        self._fade()

    def saved(self, size_bytes: int, s: float, replay_s: float) -> None:
        """A snapshot was made, in ``s``, of a text that elaborates in ``replay_s``."""
        self._counts["saved"] += 1
        self._size.learn(replay_s, size_bytes)
        self._save.learn(size_bytes, s)

    def shipped(self, size_bytes: int, s: float) -> None:
        """A snapshot of this size, uncompressed, was compressed and sent, in ``s``."""
        self._counts["shipped"] += 1
        self._ship.learn(size_bytes, s)

    def fetched(self, size_bytes: int, s: float) -> None:
        """A snapshot of this size, uncompressed, was fetched and decompressed, in ``s``."""
        self._counts["fetched"] += 1
        self._fetch.learn(size_bytes, s)
        self._fetches += 1

    def worth_saving(self, key: str, replay_s: float) -> bool:
        """Whether to make a snapshot of a text that elaborates in ``replay_s``."""
        worth = self._profit_s(self.expected_uses(key), replay_s) > 0
        self._counts["worth" if worth else "not_worth"] += 1
        return worth

    def worth_standing(self, key: str, replay_s: float) -> bool:
        """Whether to have a process stand behind the prefix of a text that elaborates in
        ``replay_s``: that elaborates it twice, once to compare what Lean says."""
        return self.expected_uses(key) * (replay_s - _CONTINUED_S) > 2 * replay_s + _STAND_S

    def worth_loading(self, replay_s: float) -> bool:
        """Whether a snapshot, should there be one, is quicker than ``replay_s``."""
        return replay_s > self.load_s(self._size.at(replay_s))

    def expected_uses(self, key: str) -> float:
        """How often the text is expected to come again."""
        return max(self._returns / self._texts, self._seen.get(key, 0) - 1)

    def load_s(self, size_bytes: float) -> float:
        """What loading a snapshot of this size takes on average."""
        fetched = min(1.0, self._fetches / self._loads)
        return self._load.at(0) + fetched * self._fetch.at(size_bytes)

    @property
    def summary(self) -> Mapping[str, float]:
        """What is known by now, and how often each way was taken, for people and metrics.

        The times of saving, shipping and fetching are for 100 MB. ``least_replay_s`` is what a text
        must take to be worth saving, infinite where none is.
        """
        hundred = 1e8
        return {
            "expected_uses": self.expected_uses(""),
            "bytes_per_replay_s": self._size.factor * self._size.slope,
            "load_s": self._load.at(0),
            "save_s": self._save.at(hundred),
            "ship_s": self._ship.at(hundred),
            "fetch_s": self._fetch.at(hundred),
            "least_replay_s": self._least_replay_s(),
            "replayed_s": self._replay_s,
            **self._counts,
        }

    def _profit_s(self, uses: float, replay_s: float) -> float:
        size = self._size.at(replay_s)
        gain_s = uses * (replay_s - self.load_s(size))
        return gain_s - self._save.at(size) - self._ship.at(size)

    def _least_replay_s(self) -> float:
        uses = self.expected_uses("")
        start = self._profit_s(uses, 0.0)
        slope = self._profit_s(uses, 1.0) - start
        return -start / slope if slope > 0 else math.inf

    def _fade(self) -> None:
        if self._texts + self._returns > _MOST_COUNTED:
            # Never none, whatever comes again and again.
            self._texts = max(1.0, self._texts / 2)
            self._returns /= 2
        if self._loads > _MOST_COUNTED:
            self._loads /= 2
            self._fetches /= 2
