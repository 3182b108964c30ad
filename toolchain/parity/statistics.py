"""Estimates over rows of text with their uncertainty, and what a gate may conclude from them.

Rows of text are the independent samples. Positions of one row are not: they share a text, and a
text that is hard for a model is hard at most of its positions. So every metric is a ratio of two
sums over rows, and its variance is that of rows (y_i: KL summed over row i, x_i: its positions):

    r = sum_i y_i / sum_i x_i,    s(r)^2 = n / (n - 1) * sum_i (y_i - r x_i)^2 / (sum_i x_i)^2

(Cochran, Sampling Techniques, 3rd edition, theorem 2.5). A bound lies t(n - 1) standard errors
away, t of Student's distribution. Three kinds of metric need more than that:

    mean of a positive, skewed value (KL)    The bounds are of ln r, whose standard error is s(r) / r. A few
                                             hard rows make KL skewed to the right, and so are the bounds.
    share of positions (top-1 agreement)     Never narrower than Clopper and Pearson's exact interval over
                                             the positions (Biometrika 26, 1934). So 8 of 8 is no proof of
                                             0.9: a share is not decided on too few positions.
    quantile (the 99th percentile of KL)     The share of positions below a value is bounded as above, and
                                             the bounds are read off the sorted values (Woodruff, JASA 47,
                                             1952). Too few positions have no bound: it is infinite.

A gate is passed when the bound on its far side is within it, failed when the bound on the near
side is beyond it, and undecided between the two. Undecided takes more rows. Each look at the data is
a chance to be wrong, so the looks of one proof share the error that the recipe allows (Bonferroni).

Legend: R rows, N positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

Array = np.ndarray[Any, Any]
PLACE_SLACK = 1e-9
"""Shares are quotients of whole numbers: rounding must not make the next place of one."""
Verdict = Literal["passed", "failed", "undecided"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its one-sided bounds, each held with the confidence it was asked for."""

    value: float
    low: float
    high: float


def exactly(value: float) -> Estimate:
    """A value without sampling error: a count, or the largest of what was seen."""
    return Estimate(value, value, value)


def ratio_error(sums_R: Array, counts_R: Array) -> float:
    """Standard error of sum(sums) / sum(counts) over rows; infinite for a single row."""
    rows = len(sums_R)
    if rows < 2:
        return math.inf
    ratio = sums_R.sum() / counts_R.sum()
    residuals_R = sums_R - ratio * counts_R
    return math.sqrt(rows / (rows - 1) * float(residuals_R @ residuals_R)) / float(counts_R.sum())


def student_factor(rows: int, confidence: float) -> float:
    """How many standard errors away a one-sided bound lies; infinite for a single row."""
    return float(stats.t.ppf(confidence, rows - 1)) if rows > 1 else math.inf


def positive_mean(sums_R: Array, counts_R: Array, confidence: float) -> Estimate:
    """The mean of a value that is never negative, from its sums and counts by row."""
    value = float(sums_R.sum() / counts_R.sum())
    if not math.isfinite(value):
        return Estimate(math.nan, math.nan, math.nan)
    if value == 0.0:
        return exactly(0.0)  # no row shows any of it
    error = ratio_error(sums_R, counts_R)
    if math.isinf(error):
        return Estimate(value, 0.0, math.inf)
    spread = student_factor(len(sums_R), confidence) * error / value
    factor = math.exp(min(spread, 700.0))  # the largest exponent that float64 has
    return Estimate(value, value / factor, value * factor)


def share(hits_R: Array, counts_R: Array, positions: int, confidence: float) -> Estimate:
    """The share of observations that hit, from hits and counts by row.

    `positions` is how many distinct ones there are: one that several phases saw is one.
    """
    value = float(hits_R.sum() / counts_R.sum())
    reach = student_factor(len(hits_R), confidence) * ratio_error(hits_R, counts_R)
    low, high = exact_share_bounds(value * positions, positions, confidence)
    return Estimate(value, max(0.0, min(low, value - reach)), min(1.0, max(high, value + reach)))


def exact_share_bounds(hits: float, positions: float, confidence: float) -> tuple[float, float]:
    """The one-sided bounds of Clopper and Pearson on a share, as if positions were independent."""
    misses = positions - hits
    low = float(stats.beta.ppf(1 - confidence, hits, misses + 1)) if hits > 0 else 0.0
    high = float(stats.beta.ppf(confidence, hits + 1, misses)) if misses > 0 else 1.0
    return low, high


def quantile(values_N: Array, rows_N: Array, positions: int, level: float, confidence: float) -> Estimate:
    """The quantile at `level` of N observations; `rows_N` says which row each is of.

    `positions` is how many distinct ones there are: one that several phases saw is one.
    """
    if not np.isfinite(values_N).all():
        return Estimate(math.nan, math.nan, math.nan)
    sorted_N = np.sort(values_N)
    value = float(np.quantile(sorted_N, level))
    # by chance alone: the share of independent positions that lies below the true quantile
    fewest = float(stats.binom.ppf(1 - confidence, positions, level)) / positions
    most = (float(stats.binom.ppf(confidence, positions, level)) + 1) / positions
    # rows that differ from each other: the share of positions below the value, by row
    labels, index_N = np.unique(rows_N, return_inverse=True)
    counts_R = np.bincount(index_N, minlength=len(labels)).astype(np.float64)
    below_R = np.bincount(index_N, weights=values_N <= value, minlength=len(labels))
    reach = student_factor(len(labels), confidence) * ratio_error(below_R, counts_R)
    return Estimate(
        value,
        _value_at(sorted_N, min(fewest, level - reach)),
        _value_at(sorted_N, max(most, level + reach)),
    )


def _value_at(sorted_N: Array, share_below: float) -> float:
    """The value with a share of all at or below it: 0 for none, infinite for more than there are."""
    if not share_below <= 1:
        return math.inf
    if share_below <= 0:
        return 0.0
    place = math.ceil(share_below * len(sorted_N) - PLACE_SLACK)
    return float(sorted_N[place - 1])


def decide(estimate: Estimate, gate: float, *, larger_is_better: bool) -> Verdict:
    """What the bounds say of a gate. A value that is not a number has failed."""
    if math.isnan(estimate.value):
        return "failed"
    if larger_is_better:
        passed, failed = estimate.low >= gate, estimate.high < gate
    else:
        passed, failed = estimate.high <= gate, estimate.low > gate
    if passed:
        return "passed"
    return "failed" if failed else "undecided"


def rows_to_decide(estimate: Estimate, gate: float, rows: int, *, larger_is_better: bool) -> int | None:
    """About how many rows would decide a gate, if the estimate stays; None when it lies on the gate.

    The distance from the estimate to a bound shrinks with the square root of the rows.
    """
    above = estimate.value > gate
    bound = estimate.low if above else estimate.high
    gap, reach = abs(estimate.value - gate), abs(bound - estimate.value)
    if not larger_is_better and estimate.value > 0 and estimate.low > 0 and gate > 0:
        gap, reach = abs(math.log(estimate.value / gate)), abs(math.log(bound / estimate.value))
    if gap == 0 or not math.isfinite(reach):
        return None
    return math.ceil(rows * (reach / gap) ** 2)


def look_confidence(confidence: float, looks: int) -> float:
    """The confidence of each of several looks, so that all of them together keep `confidence`."""
    return 1 - (1 - confidence) / looks


def nan_as_infinite(value: float) -> float:
    """The value, or infinity for one that is no number: the worst of several is then well defined."""
    return math.inf if math.isnan(value) else value


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of a proof: one failure fails it, and it passes when nothing is undecided."""
    if "failed" in verdicts:
        return "failed"
    return "undecided" if "undecided" in verdicts else "passed"
