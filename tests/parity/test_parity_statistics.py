"""Bounds hold as often as they say, and a gate is decided on no less than its resolution needs."""

import math

import numpy as np
import pytest

from toolchain.parity.statistics import (
    combine,
    decide,
    exactly,
    look_confidence,
    positive_mean,
    quantile,
    ratio_error,
    rows_to_decide,
    share,
)  # fmt: skip

CONFIDENCE, TRIALS = 0.95, 400


def skewed_rows(random, rows):
    """Sums and counts by row of a positive value whose mean differs from row to row, as KL does."""
    counts = random.integers(60, 250, rows).astype(float)
    means = random.lognormal(mean=-5, sigma=0.5, size=rows)
    return means * counts, counts


def allowed_misses(confidence, trials):
    """Misses of a bound that holds with `confidence`: four standard deviations above what it allows."""
    expected = (1 - confidence) * trials
    return expected + 4 * math.sqrt(expected)


@pytest.mark.parametrize("rows", [8, 16])
def test_the_bounds_of_a_skewed_mean_hold_as_often_as_they_say(rows):
    random = np.random.default_rng(rows)
    true_mean = math.exp(-5 + 0.5**2 / 2)
    found = [positive_mean(*skewed_rows(random, rows), CONFIDENCE) for _ in range(TRIALS)]
    assert sum(estimate.low > true_mean for estimate in found) <= allowed_misses(CONFIDENCE, TRIALS)
    assert sum(estimate.high < true_mean for estimate in found) <= allowed_misses(CONFIDENCE, TRIALS)
    assert np.median([estimate.high / estimate.low for estimate in found]) < 3


def test_positions_of_one_row_do_not_count_as_samples():
    """Rows that differ widely: taken as independent positions, the error would be ten times smaller."""
    counts = np.full(8, 200.0)
    agreeing = np.array([200, 200, 200, 200, 100, 100, 100, 100.0])
    estimate = share(agreeing, counts, 1600, CONFIDENCE)
    assert estimate.low < 0.6
    assert estimate.high > 0.9


def test_seven_of_eight_positions_decide_nothing_about_nine_tenths():
    hits, ones = np.array([1, 1, 1, 1, 1, 1, 1, 0.0]), np.ones(8)
    assert decide(share(hits, ones, 8, CONFIDENCE), 0.9, larger_is_better=True) == "undecided"
    assert decide(share(ones, ones, 8, CONFIDENCE), 0.9, larger_is_better=True) == "undecided"


def test_a_share_without_a_miss_needs_as_many_positions_as_the_rule_of_three_says():
    for positions, verdict in ((25, "undecided"), (35, "passed")):  # ln 0.05 / ln 0.9 = 28.4
        counts = np.full(5, positions / 5)
        assert decide(share(counts, counts, positions, CONFIDENCE), 0.9, larger_is_better=True) == verdict


def test_a_position_seen_by_several_phases_is_one():
    counts = np.full(5, 5.0)
    once = share(counts, counts, 25, CONFIDENCE)
    twice = share(2 * counts, 2 * counts, 25, CONFIDENCE)
    assert once == twice


def test_a_quantile_has_no_upper_bound_on_too_few_positions():
    random = np.random.default_rng(0)
    for positions, bounded in ((200, False), (400, True)):  # ln 0.05 / ln 0.99 = 298
        values, rows = random.random(positions), np.arange(positions) % 10
        estimate = quantile(values, rows, positions, 0.99, CONFIDENCE)
        assert math.isfinite(estimate.high) == bounded
        assert estimate.low <= estimate.value


def test_the_bounds_of_a_median_hold_over_rows_that_differ():
    random, outside = np.random.default_rng(1), 0
    for _ in range(TRIALS):
        shifts = random.normal(size=(8, 1))
        values = np.exp(shifts + 0.3 * random.normal(size=(8, 40)))
        estimate = quantile(values.ravel(), np.repeat(np.arange(8), 40), 320, 0.5, CONFIDENCE)
        outside += not estimate.low <= 1.0 <= estimate.high
    assert outside <= allowed_misses(1 - 2 * (1 - CONFIDENCE), TRIALS)


def test_one_row_decides_nothing_but_what_is_exact():
    one = np.array([0.5]), np.array([10.0])
    assert decide(positive_mean(*one, CONFIDENCE), 0.1, larger_is_better=False) == "undecided"
    assert decide(exactly(0.05), 0.1, larger_is_better=False) == "passed"
    assert decide(positive_mean(np.zeros(1), np.ones(1), CONFIDENCE), 0.0, larger_is_better=False) == "passed"


def test_no_number_has_failed():
    nothing = positive_mean(np.array([math.nan, 1.0]), np.ones(2), CONFIDENCE)
    assert decide(nothing, 1.0, larger_is_better=False) == "failed"
    assert decide(exactly(math.nan), 0.5, larger_is_better=True) == "failed"


def test_the_rows_that_would_decide_do():
    random = np.random.default_rng(3)
    gate = 1.15 * math.exp(-5 + 0.5**2 / 2)
    first = positive_mean(*skewed_rows(random, 8), CONFIDENCE)
    assert decide(first, gate, larger_is_better=False) == "undecided"
    enough = [positive_mean(*skewed_rows(random, 400), CONFIDENCE) for _ in range(50)]
    assert sum(decide(estimate, gate, larger_is_better=False) == "passed" for estimate in enough) > 40
    needed = rows_to_decide(enough[0], gate, 400, larger_is_better=False)
    assert 20 < needed < 2000


def test_the_error_of_a_ratio_is_that_of_independent_rows():
    """Against the spread of the estimate over many draws."""
    random = np.random.default_rng(5)
    draws = [skewed_rows(random, 40) for _ in range(TRIALS)]
    spread = np.std([sums.sum() / counts.sum() for sums, counts in draws])
    errors = [ratio_error(sums, counts) for sums, counts in draws]
    assert np.median(errors) == pytest.approx(spread, rel=0.2)


def test_looks_share_the_error():
    assert look_confidence(0.95, 1) == pytest.approx(0.95)
    assert look_confidence(0.95, 4) == pytest.approx(0.9875)


def test_a_proof_fails_by_one_gate_and_passes_by_all():
    assert combine(["passed", "undecided", "failed"]) == "failed"
    assert combine(["passed", "undecided"]) == "undecided"
    assert combine(["passed", "passed"]) == "passed"
    assert combine([]) == "passed"
