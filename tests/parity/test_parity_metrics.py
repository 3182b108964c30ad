import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolchain.parity.metrics import NO_TARGET, LogitComparison, fact, gate_rows
from toolchain.recipe_sections import Gates

SETTINGS = settings(max_examples=30, deadline=None)


def metrics_of(reference, candidate, targets=None, tolerance=0.0) -> dict[str, float]:
    reference, candidate = (np.atleast_2d(np.asarray(x, np.float32)) for x in (reference, candidate))
    targets = np.full(len(reference), NO_TARGET) if targets is None else np.asarray(targets)
    comparison = LogitComparison()
    rows = np.arange(len(reference))
    comparison.add(reference, candidate, targets, rows, np.zeros_like(rows))
    return {name: metric.value for name, metric in comparison.metrics(lambda _: tolerance, 0.95).items()}


def rows_of(metrics: dict[str, float], **gates: float):
    rows = gate_rows("eager", "prefill", {k: fact(v, "x") for k, v in metrics.items()}, Gates(**gates))
    return {row.metric: row for row in rows}


def test_kl_is_the_textbook_sum():
    found = metrics_of([0.0, 0.0], [math.log(3.0), 0.0])
    assert found["kl_mean"] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-6)


def test_kl_p99_tells_a_bad_position_from_the_mean():
    reference = np.zeros((100, 2))
    candidate = np.zeros((100, 2))
    candidate[:2, 0] = 10.0
    found = metrics_of(reference, candidate)
    assert found["kl_p99"] > 20 * found["kl_mean"]


def test_equal_logits_give_zero_everywhere():
    logits = np.random.default_rng(0).normal(size=(7, 11))
    found = metrics_of(logits, logits, targets=[1, 2, 3, 4, 5, 6, NO_TARGET])
    assert found["kl_mean"] == found["kl_p99"] == found["max_abs_logit"] == found["perplexity_rise"] == 0.0
    assert found["top1_agreement"] == 1.0
    assert found["sqnr_db"] == math.inf
    assert rows_of(found)["sqnr_db"].value is None


def test_sqnr_is_twenty_db_at_a_tenth_of_the_norm():
    assert metrics_of([3.0, 4.0], [3.5, 4.0])["sqnr_db"] == pytest.approx(20.0)


def test_perplexity_counts_known_targets_only():
    found = metrics_of([[0.0, 0.0], [0.0, 0.0], [9.0, 0.0]], [[math.log(3.0), 0.0]] * 3, targets=[0, 1, NO_TARGET])
    assert found["perplexity_reference"] == pytest.approx(2.0)
    assert found["perplexity_candidate"] == pytest.approx(math.exp(-(math.log(0.75) + math.log(0.25)) / 2), rel=1e-6)
    assert found["perplexity_rise"] == pytest.approx(100 * (found["perplexity_candidate"] / 2 - 1), rel=1e-6)


def test_flip_below_the_tolerance_is_a_tie():
    found = metrics_of([1.0, 1.0 + 1e-6, 0.0], [1.0 + 1e-6, 1.0, 0.0], tolerance=1e-5)
    assert (found["top1_flips"], found["top1_ties"], found["top1_agreement"]) == (1, 1, 1.0)


def test_flip_with_a_margin_counts():
    found = metrics_of([[1.0, 1.5], [3.0, 0.0]], [[1.5, 1.0], [3.0, 0.0]], tolerance=1e-5)
    assert (found["top1_flips"], found["top1_ties"], found["top1_agreement"]) == (1, 0, 0.5)
    assert found["flip_margin_max"] == 0.5
    assert not rows_of(found, top1_agreement=0.9)["top1_agreement"].passed


def test_tolerance_is_given_the_largest_reference_logit():
    comparison, seen = LogitComparison(), []
    first = np.array([0])
    comparison.add(np.float32([[1.0, -7.0]]), np.float32([[1.0, 50.0]]), np.array([NO_TARGET]), first, first)
    comparison.metrics(lambda largest: seen.append(largest) or 0.0, 0.95)
    assert seen == [7.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_non_finite_logit_fails_without_gates(bad):
    rows = rows_of(metrics_of([[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, bad]]))
    assert rows["nonfinite_logits"].value == 1
    assert not rows["nonfinite_logits"].passed
    assert all(row.value is None or math.isfinite(row.value) for row in rows.values())


@pytest.mark.parametrize("metric", ["kl_mean", "kl_p99", "max_abs_logit", "top1_agreement"])
def test_nan_never_passes_a_gate(metric):
    assert not rows_of({metric: math.nan}, **{metric: 0.5})[metric].passed


def test_gates_bound_from_the_right_side():
    assert rows_of({"kl_mean": 0.1}, kl_mean=0.1)["kl_mean"].passed
    assert not rows_of({"kl_mean": 0.11}, kl_mean=0.1)["kl_mean"].passed
    assert rows_of({"top1_agreement": 0.9}, top1_agreement=0.9)["top1_agreement"].passed
    assert not rows_of({"top1_agreement": 0.89}, top1_agreement=0.9)["top1_agreement"].passed
    assert rows_of({"kl_mean": 9.0})["kl_mean"].gate is None


@SETTINGS
@given(st.integers(1, 150), st.integers(2, 9), st.integers(0, 2**31), st.floats(0.1, 30))
def test_metrics_equal_plain_numpy(positions, vocab, seed, size):
    random = np.random.default_rng(seed)
    a, b = (random.normal(scale=size, size=(positions, vocab)).astype(np.float32) for _ in range(2))
    targets = random.integers(0, vocab, positions)
    found = metrics_of(a, b, targets)
    p, q = (np.exp(x.astype(np.longdouble)) for x in (a, b))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    assert found["kl_mean"] == pytest.approx(float((p * np.log(p / q)).sum(-1).mean()), rel=1e-9, abs=1e-12)
    assert found["nll_candidate"] == pytest.approx(float(-np.log(q[np.arange(positions), targets]).mean()), rel=1e-9)
    assert found["max_abs_logit"] == np.abs(a.astype(np.float64) - b).max()
    assert found["top1_agreement"] == pytest.approx((a.argmax(-1) == b.argmax(-1)).mean())


@SETTINGS
@given(st.integers(0, 2**31), st.floats(-50, 50))
def test_kl_ignores_a_shift_of_all_logits(seed, shift):
    a, b = np.random.default_rng(seed).normal(size=(2, 3, 5))
    assert metrics_of(a, b + shift)["kl_mean"] == pytest.approx(metrics_of(a, b)["kl_mean"], rel=1e-3, abs=1e-6)
