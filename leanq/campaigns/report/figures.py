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
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice

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
    name: str
    line: int
    end: str
    attempts: int
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class FlakyText:
    """A text with several verdicts: its verdicts, and the first of its lines in the data."""

    code_hash: str
    ends: tuple[str, ...]
    lines: tuple[int, ...]


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
    name: str
    samples: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one file. Mappings from something to how often it came have the commonest
    first.

    Attributes:
        samples: how many there are, without those cancelled.
        solved: problems with an accepted sample.
        ends: how often each verdict came, ``error`` and ``none`` among them; in a fixed order.
        passes: pass@k for k = 1, 2, 4, …; only k = 1 where samples were cancelled.
        times: quantiles of ``queued_s``, ``cpu_s`` and ``wall_s`` over all replies.
        cpu_hours: CPU time in Lean over all replies.
        cpu_median_s: the median of the CPU times by verdict.
        slowest: the records with the most CPU time, the slowest first.
        flaky: some of the ``flaky_total`` texts that came with different verdicts (``cancelled``
            aside).
        retried: how many records took more than one lease.
        infrastructure: how many records have a verdict of leanq's own.
        errors, complaints: errors of bad rows, and the first errors of Lean.
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
    flaky_total: int
    flaky: tuple[FlakyText, ...]
    retried: int
    infrastructure: int
    errors: Mapping[str, int]
    complaints: Mapping[str, int]
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
    ends, errors, complaints = Counter[str](), Counter[str](), Counter[str]()
    reasons, environments, kernels = (Counter[str | None]() for _ in range(3))
    sampled_lines: set[int] = set()
    problems, texts = _Problems(), _Texts()
    tags: dict[str, _Problems] = {}
    wall_s, queued_s = array("d"), array("d")
    cpu_s: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    # The number decides between equal times, so records are never compared.
    slowest: list[tuple[float, int, Named]] = []
    retried = 0
    for number, outcome in enumerate(outcomes):
        end, text, attempts = outcome.end, outcome.complaint, outcome.attempts or 0
        ends[end] += 1
        reasons[outcome.reason] += 1
        environments[outcome.fingerprint] += 1
        kernels[outcome.kernel] += 1
        retried += attempts > 1
        problems.add(outcome)
        texts.add(outcome)
        if outcome.sample is not None:
            sampled_lines.add(outcome.line)
        for tag in set(outcome.tags or ()):
            if tag in tags or len(tags) < KEPT:
                tags.setdefault(tag, _Problems()).add(outcome)
        if times := outcome.times:
            in_queue_s, in_lean_s, on_worker_s = times
            queued_s.append(in_queue_s)
            cpu_s[end].append(in_lean_s)
            wall_s.append(on_worker_s)
            named = Named(outcome.name, outcome.line, end, attempts, in_lean_s, on_worker_s)
            heapq.heappush(slowest, (in_lean_s, -number, named))
            if len(slowest) > SLOWEST:
                heapq.heappop(slowest)
        counts = errors if end == "error" else complaints
        # Beyond the bound no new ones are counted; the commonest have come by then.
        if text and (text in counts or len(counts) < _DIFFERENT_COMPLAINTS):
            counts[text] += 1
    by_samples = problems.by_samples()
    records, cancelled = ends.total(), ends["cancelled"]
    all_cpu_s = array("d", chain.from_iterable(cpu_s.values()))
    seconds_of = {"wall_s": wall_s, "cpu_s": all_cpu_s, "queued_s": queued_s}
    return Report(
        records=records,
        rows=len(sampled_lines) + problems.rows_without_samples,
        problems=by_samples.total(),
        samples=records - sum(ends[end] for end in NO_SAMPLES),
        solved=_solved(by_samples),
        ends={end: ends[end] for end in ENDS if ends[end]},
        passes=passes(by_samples, most=1 if cancelled else None),
        times={name: _quantiles(seconds) for name, seconds in seconds_of.items() if seconds},
        cpu_hours=math.fsum(all_cpu_s) / 3600,
        cpu_median_s={end: quantile(sorted(s), 0.5) for end, s in cpu_s.items()},
        slowest=tuple(named for _, _, named in sorted(slowest, reverse=True)),
        flaky_total=len(texts.flaky),
        flaky=texts.shown(),
        retried=retried,
        infrastructure=sum(ends[end] for end in INFRASTRUCTURE),
        errors=_commonest(errors),
        complaints=_commonest(complaints),
        reasons=_commonest(reasons, None),
        environments=_commonest(environments),
        kernels=_commonest(kernels),
        tags=_tagged(tags),
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
        end = outcome.end
        sample, accepted = end not in NO_SAMPLES, end == "accepted"
        # Most data has a row for each problem; these take no memory each.
        if (group := outcome.group) is None:
            self._alone[sample, accepted] += end != "none"
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


class _Texts:
    """Notes how equal texts ended, and where the first of them stand."""

    def __init__(self) -> None:
        # The line and the end as one number: a pair would take twice the memory.
        self._first: dict[int, int] = {}
        self.flaky: dict[int, tuple[set[str], list[int]]] = {}

    def add(self, outcome: Outcome) -> None:
        text, end = outcome.code, outcome.end
        if text is None or end in NO_SAMPLES:
            return
        first = self._first.setdefault(text, outcome.line * len(ENDS) + ENDS.index(end))
        line, first_end = first // len(ENDS), ENDS[first % len(ENDS)]
        if end != first_end:
            self.flaky.setdefault(text, ({first_end}, [line]))
        if text in self.flaky:
            ends, lines = self.flaky[text]
            ends.add(end)
            if len(lines) < _LINES_OF_A_TEXT and outcome.line not in lines:
                lines.append(outcome.line)

    def shown(self) -> tuple[FlakyText, ...]:
        return tuple(
            FlakyText(f"{text:016x}", tuple(sorted(ends, key=ENDS.index)), tuple(lines))
            for text, (ends, lines) in islice(self.flaky.items(), KEPT)
        )


def _solved(by_samples: Mapping[tuple[int, int], int]) -> int:
    return sum(count for (_, accepted), count in by_samples.items() if accepted)


def _tagged(tags: Mapping[str, _Problems]) -> tuple[Tagged, ...]:
    found = []
    for tag, problems in tags.items():
        counts = problems.by_samples()
        pass_1 = next(iter(passes(counts, most=1)), None)
        samples = sum(samples * number for (samples, _), number in counts.items())
        number, share = (pass_1.problems, pass_1.share) if pass_1 else (0, None)
        found.append(Tagged(tag, number, samples, _solved(counts), share))
    return tuple(sorted(found, key=lambda each: (-each.problems, each.tag)))


def _quantiles(seconds: Iterable[float]) -> Quantiles:
    ordered = sorted(seconds)
    return Quantiles(*(quantile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0)))


def _commonest(
    counts: Counter[str] | Counter[str | None], most: int | None = COMMONEST
) -> dict[str, int]:
    found = ((name, number) for name, number in counts.most_common() if name is not None)
    return dict(islice(found, most))
