"""The figures of a campaign's results."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.campaigns.records import Record, bad, done, said

from leanq.campaigns.report.estimates import mean_of_shares, pass_at_k, quantile
from leanq.campaigns.report.figures import Quantiles, Report, passes, summarise
from leanq.campaigns.report.outcomes import ENDS, normalised, outcomes
from leanq.errors import UsageError


def of(records: Iterable[Record]) -> Report:
    return summarise(outcomes(records, "results.jsonl"))


# Estimates


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), *[st.integers(0, n)] * 2)))
def test_pass_at_k_is_the_share_of_draws_with_a_success(drawn: tuple[int, int, int]) -> None:
    n, c, k = drawn[0], drawn[1], max(1, drawn[2])
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@given(st.integers(1, 3000), st.data())
def test_pass_at_k_keeps_its_digits(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-9)


def test_a_problem_counts_for_no_more_samples_than_it_has() -> None:
    found = passes({(1, 1): 1, (2, 0): 1, (5, 1): 2})
    assert [(each.k, each.problems) for each in found] == [(1, 4), (2, 3), (4, 2)]
    assert [each.share.estimate for each in found] == pytest.approx([1.4 / 4, 0.8 / 3, 0.8])


shares = st.dictionaries(st.floats(0, 1), st.integers(1, 10**6), min_size=1, max_size=20)


@given(shares)
def test_the_interval_of_shares_holds_the_estimate_and_stays_in_bounds(
    counts: dict[float, int],
) -> None:
    found = mean_of_shares(counts)
    assert found is not None
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    total = sum(each * n for each, n in counts.items())
    assert found.estimate == pytest.approx(total / sum(counts.values()))
    # No more problems of the same kind make it wider.
    more = mean_of_shares({each: 4 * n for each, n in counts.items()})
    assert more is not None
    assert more.high - more.low <= found.high - found.low + 1e-9


def test_the_interval_of_successes_is_wilsons() -> None:
    found = mean_of_shares({1.0: 7, 0.0: 13})
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.1812, 0.5671), abs=1e-4)
    certain = mean_of_shares({1.0: 10})
    assert certain is not None
    assert (certain.low, certain.high) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert mean_of_shares({}) is None


def test_values_that_are_spread_less_have_a_narrower_interval() -> None:
    near, far = mean_of_shares({0.4: 50, 0.6: 50}), mean_of_shares({0.0: 50, 1.0: 50})
    assert near is not None
    assert far is not None
    assert near.high - near.low < 0.3 * (far.high - far.low)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_smallest_that_enough_do_not_exceed(
    seconds: list[float], share: float
) -> None:
    found = quantile(sorted(seconds), share)
    assert found in seconds
    assert sum(each <= found for each in seconds) >= share * len(seconds) - 1e-9
    assert sum(each < found for each in seconds) < share * len(seconds)


# Figures


def test_what_is_a_sample_and_what_a_success() -> None:
    found = of(
        [
            done("a1", "accepted", problem="p"),
            done("a2", "timeout", problem="p"),
            bad("a3", 3, "the code is empty", problem="p"),
            done("a4", "incomplete", problem="p"),
            done("a5", "accepted"),
            bad(None, 6, "is no JSON"),
            done("a7", None),
        ]
    )
    assert (found.records, found.rows, found.problems, found.samples) == (7, 7, 3, 6)
    assert found.solved == 2
    assert [(each.k, each.problems) for each in found.passes] == [(1, 3), (2, 1), (4, 1)]
    assert [each.share.estimate for each in found.passes] == pytest.approx([1.25 / 3, 0.5, 1])
    assert list(found.ends) == ["accepted", "incomplete", "timeout", "error", "none"]


def test_samples_of_a_row_are_of_one_problem() -> None:
    found = of(
        [
            *(done("a1", "rejected", sample=sample, line=1) for sample in range(3)),
            done("a1", "accepted", sample=3, line=1),
            # Another row with the same id, as a bad one can have it, is another problem.
            bad("a1", 2, "duplicate id"),
            *(done(None, "accepted", sample=sample, line=3) for sample in range(2)),
        ]
    )
    assert (found.records, found.rows, found.problems, found.samples) == (7, 3, 3, 7)
    assert found.passes[0].share.estimate == pytest.approx((0.25 + 0 + 1) / 3)


def test_cancelled_samples_are_none_and_only_pass_at_1_is_left() -> None:
    found = of(
        [
            done("a1", "rejected", sample=0, line=1),
            done("a1", "accepted", sample=1, line=1),
            *(done("a1", "cancelled", sample=sample, line=1) for sample in (2, 3)),
        ]
    )
    assert (found.samples, found.cancelled, found.solved, found.problems) == (2, 2, 1, 1)
    assert [(each.k, each.share.estimate) for each in found.passes] == [(1, 0.5)]


def test_what_was_not_sent_has_no_times() -> None:
    unsent = {"request_id": "", "attempts": 0, "queued_s": 0.0, "cpu_s": 0.0, "wall_s": 0.0}
    found = of([done("a1", "accepted"), *(done("a1", "cancelled", **unsent) for _ in range(9))])
    assert found.times["cpu_s"] == Quantiles(1.0, 1.0, 1.0, 1.0)
    assert [*found.cpu_median_s] == ["accepted"]
    assert [each.end for each in found.slowest] == ["accepted"]


@given(st.lists(st.tuples(st.sampled_from(ENDS), st.integers(0, 4)), max_size=60))
def test_counts_agree_with_a_plain_count(drawn: list[tuple[str, int]]) -> None:
    records = []
    for line, (end, problem) in enumerate(drawn, 1):
        if end == "error":
            records.append(bad(f"a{line}", line, "no code", problem=problem))
        else:
            verdict = None if end == "none" else end
            records.append(done(f"a{line}", verdict, problem=problem, cpu_s=line / 7))
    found = of(records)
    assert found.ends == Counter(end for end, _ in drawn)
    assert found.solved == len({problem for end, problem in drawn if end == "accepted"})
    samples = Counter(problem for end, problem in drawn if end not in ("cancelled", "none"))
    assert found.samples == samples.total()
    first = found.passes[0].problems if found.passes else 0
    assert first == len(samples)
    sent = [line / 7 for line, (end, _) in enumerate(drawn, 1) if end != "error"]
    assert found.cpu_hours == pytest.approx(sum(sent) / 3600)
    assert [each.cpu_s for each in found.slowest] == sorted(sent, reverse=True)[:10]
    if sent:
        assert found.times["cpu_s"].max == max(sent)
        assert found.times["queued_s"].p50 == 2 * quantile(sent, 0.5)


def test_equal_texts_with_different_verdicts_are_flaky() -> None:
    text = "00000000000000ff"
    found = of(
        [
            done("a1", "accepted", code_hash=text),
            done("a2", "accepted", code_hash=text),
            done("a3", "timeout", code_hash=text, attempts=2),
            done("a4", "cancelled", code_hash=text),
            done("a5", "rejected", code_hash="0" * 15 + "1", attempts=3),
            done("a6", "cancelled", code_hash="0" * 15 + "1"),
            done("a7", "rejected", code_hash="0" * 15 + "1", attempts=2),
            bad("a8", 8, "no code"),
        ]
    )
    (flaky,) = found.flaky
    assert found.flaky_total == 1
    assert (flaky.code_hash, flaky.ends, flaky.lines) == (text, ("accepted", "timeout"), (1, 3))
    assert (found.retried, found.infrastructure) == (3, 1)


def test_whole_numbers_may_come_back_from_a_table_with_a_point() -> None:
    record = done("a1", "accepted", line=3.0, sample=1.0, attempts=2.0)
    found = of([record, bad("a2", 2, "no code")])
    [slowest] = found.slowest
    shown = (slowest.name, slowest.line, slowest.attempts)
    assert tuple(map(repr, shown)) == tuple(map(repr, ("a1 [1]", 3, 2)))
    assert (found.rows, found.retried) == (2, 1)


def test_complaints_are_grouped_without_their_names() -> None:
    found = of(
        [
            done("a1", "rejected", messages=said("Unknown identifier `foo`\nmore")),
            done("a2", "rejected", messages=said("Unknown identifier `h'.1`")),
            done("a3", "accepted", messages=said("not counted")),
            done("a4", "rejected"),
            bad("a5", 5, "line 5 has 300 characters"),
            bad("a6", 6, "line 6 has 4000 characters"),
        ]
    )
    assert [*found.complaints.items()] == [
        ("Unknown identifier …", 2),
        ("no error of Lean's: rejected by the judge", 1),
    ]
    assert [*found.errors.items()] == [("line # has # characters", 2)]


def test_reasons_are_counted() -> None:
    found = of(
        [
            done("a1", "rejected", reason="unknown_import"),
            done("a2", "rejected", reason="lean_error"),
            done("a3", "accepted", reason=None),
            done("a4", "timeout", reason="cpu_time"),
            done("a5", "rejected", reason="unknown_import"),
            done("a6", "rejected"),
            bad("a7", 7, "no JSON"),
        ]
    )
    assert list(found.reasons.items()) == [
        ("unknown_import", 2),
        ("lean_error", 1),
        ("cpu_time", 1),
    ]
    with pytest.raises(UsageError, match=r"got `int` - at `\$.reason`"):
        of([done("a1", "rejected", reason=7)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Tactic `rewrite` failed: no `x + y`", "Tactic `rewrite` failed: no …"),
        ("unknown identifier 'h''.", "unknown identifier …."),
        ("doesn't and can't", "doesn't and can't"),
        ("\n  \nlinarith failed", "linarith failed"),
        ("?m.123 at h2 of 4.5", "?m.# at h2 of #"),
        ("h12 at U+D800", "h12 at U+D800"),
        ("a\x1b[2Jb", "a [#Jb"),
        ("", ""),
    ],
)
def test_normalised(text: str, expected: str) -> None:
    assert normalised(text) == expected
