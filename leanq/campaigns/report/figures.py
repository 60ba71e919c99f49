"""Computes the figures of a campaign's results.

In pass@k, a record is a sample and ``accepted`` is success. All else is failure, leanq's own
outcomes and bad rows included: to leave them out would reward a model for texts without a verdict.
The report shows their number beside the figure. ``cancelled`` records are no samples: a sibling was
accepted first. With them, the samples depend on the accepted ones, so pass@1 is too high. The
report omits pass@k for k > 1, which would leave out the easy problems. The count of solved problems
stays exact.

Memory: about 300 MB for a million records: three floats each, a number for each different text, two
for each problem of several samples. Messages are not kept.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from leanq.campaigns.report.estimates import Interval, mean_of_shares, pass_at_k, quantile
from leanq.campaigns.report.outcomes import ENDS, INFRASTRUCTURE, NO_SAMPLES, Outcome

SLOWEST = 10
COMMONEST = 10
KEPT = 1000
"""The most texts, problems or tags that a list keeps."""

_DIFFERENT_COMPLAINTS = 10_000
_LINES_OF_A_TEXT = 5


@dataclass(frozen=True, slots=True)
class Pass:
    """pass@``k`` over the ``problems`` that have at least ``k`` samples."""

    k: int
    problems: int
    share: Interval


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles in seconds; each is a time that was measured."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Named:
    """One record in a list."""

    name: str
    line: int
    end: str
    attempts: int
    cpu_s: float | None
    wall_s: float | None


@dataclass(frozen=True, slots=True)
class FlakyText:
    """A text with several verdicts: its verdicts, and the first of its lines in the data."""

    code_hash: str
    ends: tuple[str, ...]
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlakyTexts:
    """Some of ``total`` flaky texts."""

    total: int
    texts: tuple[FlakyText, ...]


@dataclass(frozen=True, slots=True)
class Common:
    """A complaint, and how often it came."""

    text: str
    count: int


@dataclass(frozen=True, slots=True)
class Tagged:
    """The problems of one tag that have samples."""

    tag: str
    problems: int
    samples: int
    solved: int
    pass_1: Interval | None


@dataclass(frozen=True, slots=True)
class Tried:
    """A problem with several samples."""

    name: str
    samples: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one file.

    Attributes:
        records, rows, problems, samples: how many; ``samples`` without those cancelled.
        solved: problems with an accepted sample.
        ends: how often each verdict came, ``error`` and ``none`` among them; in a fixed order.
        passes: pass@k for k = 1, 2, 4, …; only k = 1 where samples were cancelled.
        times: quantiles of ``queued_s``, ``cpu_s`` and ``wall_s`` over all replies.
        cpu_hours: CPU time in Lean over all replies.
        cpu_median_s: the median of the CPU times by verdict.
        slowest: the records with the most CPU time, the slowest first.
        flaky_texts: equal texts with different verdicts (``cancelled`` aside).
        retried: how many records took more than one lease.
        infrastructure: how many records have a verdict of leanq's own.
        errors, complaints: the commonest errors of bad rows, and the commonest first errors of
            Lean.
        reasons: how often each reason came; the commonest first.
        environments: how many records each environment's fingerprint answered.
        kernels: how many records each version of Lean's kernel judged.
        tags: the figures of each tag, the commonest first.
        tried: problems with several samples, in the order of the data, at most ``KEPT``.
    """

    records: int
    rows: int
    problems: int
    samples: int
    solved: int
    ends: Mapping[str, int]
    passes: tuple[Pass, ...]
    times: Mapping[str, Quantiles]
    cpu_hours: float
    cpu_median_s: Mapping[str, float]
    slowest: tuple[Named, ...]
    flaky_texts: FlakyTexts
    retried: int
    infrastructure: int
    errors: tuple[Common, ...]
    complaints: tuple[Common, ...]
    reasons: Mapping[str, int]
    environments: Mapping[str, int]
    kernels: Mapping[str, int]
    tags: tuple[Tagged, ...]
    tried: tuple[Tried, ...]

    @property
    def cancelled(self) -> int:
        return self.ends.get("cancelled", 0)


def summarise(outcomes: Iterable[Outcome]) -> Report:
    """Returns the figures of ``outcomes``, in one pass."""
    ends: Counter[str] = Counter()
    environments: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    sampled_lines: set[int] = set()
    problems, tags, times, texts = _Problems(), _Tags(), _Times(), _Texts()
    reasons: Counter[str] = Counter()
    errors, complaints = _Complaints(), _Complaints()
    # The number decides between equal times, so outcomes are never compared.
    slowest: list[tuple[float, int, Outcome]] = []
    retried = 0
    for number, outcome in enumerate(outcomes):
        ends[outcome.end] += 1
        problems.add(outcome)
        texts.add(outcome)
        if outcome.sample is not None:
            sampled_lines.add(outcome.line)
        tags.add(outcome)
        if outcome.fingerprint:
            environments[outcome.fingerprint] += 1
        if outcome.kernel:
            kernels[outcome.kernel] += 1
        if outcome.times:
            times.add(outcome)
            heapq.heappush(slowest, (outcome.times.cpu_s, -number, outcome))
            if len(slowest) > SLOWEST:
                heapq.heappop(slowest)
        retried += outcome.attempts > 1
        if outcome.complaint:
            (errors if outcome.end == "error" else complaints).add(outcome.complaint)
        if outcome.reason:
            reasons[outcome.reason] += 1
    by_samples = problems.by_samples()
    records, cancelled = ends.total(), ends["cancelled"]
    return Report(
        records=records,
        rows=len(sampled_lines) + problems.rows_without_samples,
        problems=by_samples.total(),
        samples=records - sum(ends[end] for end in NO_SAMPLES),
        solved=sum(count for (_, accepted), count in by_samples.items() if accepted),
        ends={end: ends[end] for end in ENDS if ends[end]},
        passes=passes(by_samples, most=1 if cancelled else None),
        times=times.quantiles(),
        cpu_hours=math.fsum(map(math.fsum, times.cpu_s.values())) / 3600,
        cpu_median_s={end: quantile(sorted(s), 0.5) for end, s in times.cpu_s.items()},
        slowest=tuple(_named(outcome) for _, _, outcome in sorted(slowest, reverse=True)),
        flaky_texts=texts.flaky(),
        retried=retried,
        infrastructure=sum(ends[end] for end in INFRASTRUCTURE),
        errors=errors.commonest(),
        complaints=complaints.commonest(),
        reasons=dict(reasons.most_common()),
        environments=dict(environments.most_common(COMMONEST)),
        kernels=dict(kernels.most_common(COMMONEST)),
        tags=tags.tagged(),
        tried=problems.tried(),
    )


def passes(by_samples: Mapping[tuple[int, int], int], most: int | None = None) -> tuple[Pass, ...]:
    """Returns pass@k for k = 1, 2, 4, … up to ``most``, or up to the largest number of samples.
    ``by_samples`` maps (samples, accepted) to the number of problems."""
    last = max((samples for samples, _ in by_samples), default=0)
    found = []
    k = 1
    while k <= min(last, most or last):
        shares: Counter[float] = Counter()
        for (samples, accepted), problems in by_samples.items():
            if samples >= k:
                shares[pass_at_k(samples, accepted, k)] += problems
        if share := mean_of_shares(shares):
            found.append(Pass(k, shares.total(), share))
        k *= 2
    return tuple(found)


class _Problems:
    """Counts the samples and successes of each problem."""

    def __init__(self) -> None:
        self.rows_without_samples = 0
        self._alone: Counter[tuple[int, int]] = Counter()
        self._several: dict[str | int, list[int]] = {}

    def add(self, outcome: Outcome) -> None:
        self.rows_without_samples += outcome.sample is None
        sample, accepted = outcome.end not in NO_SAMPLES, outcome.end == "accepted"
        # Most data has a row for each problem; these take no memory each.
        if (group := outcome.group) is None:
            self._alone[sample, accepted] += outcome.end != "none"
            return
        counts = self._several.setdefault(group, [0, 0])
        counts[0] += sample
        counts[1] += accepted

    def tried(self) -> tuple[Tried, ...]:
        found = (
            Tried(f"line {group}" if isinstance(group, int) else group, samples, accepted)
            for group, (samples, accepted) in self._several.items()
            if samples
        )
        return tuple(islice(found, KEPT))

    def by_samples(self) -> Counter[tuple[int, int]]:
        """Returns (samples, accepted) → how many problems."""
        found = Counter((samples, accepted) for samples, accepted in self._several.values())
        return found + self._alone


class _Tags:
    """Counts the problems of each tag, for the first ``KEPT`` tags."""

    def __init__(self) -> None:
        self._problems: dict[str, _Problems] = {}

    def add(self, outcome: Outcome) -> None:
        for tag in set(outcome.tags):
            if tag in self._problems or len(self._problems) < KEPT:
                self._problems.setdefault(tag, _Problems()).add(outcome)

    def tagged(self) -> tuple[Tagged, ...]:
        found = []
        for tag, problems in self._problems.items():
            counts = problems.by_samples()
            shares: Counter[float] = Counter()
            for (samples, accepted), number in counts.items():
                if samples:
                    shares[accepted / samples] += number
            solved = sum(number for (_, accepted), number in counts.items() if accepted)
            samples = sum(samples * number for (samples, _), number in counts.items())
            found.append(Tagged(tag, shares.total(), samples, solved, mean_of_shares(shares)))
        return tuple(sorted(found, key=lambda each: (-each.problems, each.tag)))


class _Times:
    def __init__(self) -> None:
        self.cpu_s: dict[str, array[float]] = {}
        self._wall_s = array("d")
        self._queued_s = array("d")

    def add(self, outcome: Outcome) -> None:
        if times := outcome.times:
            self.cpu_s.setdefault(outcome.end, array("d")).append(times.cpu_s)
            self._wall_s.append(times.wall_s)
            self._queued_s.append(times.queued_s)

    def quantiles(self) -> Mapping[str, Quantiles]:
        cpu_s = array("d")
        for each in self.cpu_s.values():
            cpu_s.extend(each)
        named = {"wall_s": self._wall_s, "cpu_s": cpu_s, "queued_s": self._queued_s}
        found = {}
        for name, seconds in named.items():
            if ordered := sorted(seconds):
                shares = (0.5, 0.9, 0.99, 1.0)
                found[name] = Quantiles(*(quantile(ordered, share) for share in shares))
        return found


class _Texts:
    """Notes how equal texts ended, and where the first of them stand."""

    def __init__(self) -> None:
        # The line and the end as one number: a pair would take twice the memory.
        self._first: dict[int, int] = {}
        self._flaky: dict[int, tuple[set[str], list[int]]] = {}

    def add(self, outcome: Outcome) -> None:
        text = outcome.code_hash
        if text is None or outcome.end in NO_SAMPLES:
            return
        first = self._first.setdefault(text, outcome.line * len(ENDS) + ENDS.index(outcome.end))
        line, end = first // len(ENDS), ENDS[first % len(ENDS)]
        if end != outcome.end:
            self._flaky.setdefault(text, ({end}, [line]))
        if text in self._flaky:
            ends, lines = self._flaky[text]
            ends.add(outcome.end)
            if len(lines) < _LINES_OF_A_TEXT and outcome.line not in lines:
                lines.append(outcome.line)

    def flaky(self) -> FlakyTexts:
        shown = (
            FlakyText(f"{text:016x}", tuple(sorted(ends, key=ENDS.index)), tuple(lines))
            for text, (ends, lines) in islice(self._flaky.items(), KEPT)
        )
        return FlakyTexts(len(self._flaky), tuple(shown))


class _Complaints:
    """Counts texts. Beyond a bound it counts no new ones; the commonest have come by then."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        if text in self._counts or len(self._counts) < _DIFFERENT_COMPLAINTS:
            self._counts[text] += 1

    def commonest(self) -> tuple[Common, ...]:
        return tuple(Common(text, n) for text, n in self._counts.most_common(COMMONEST))


def _named(outcome: Outcome) -> Named:
    times = outcome.times
    cpu_s, wall_s = (times.cpu_s, times.wall_s) if times else (None, None)
    return Named(outcome.name, outcome.line, outcome.end, outcome.attempts, cpu_s, wall_s)
