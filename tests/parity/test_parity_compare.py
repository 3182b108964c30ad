from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolchain.parity.compare import (
    MODEL_PHASES,
    SHORTEST,
    capacity_for,
    chunk_bounds,
    logits_at,
    plan_batches,
    rows_between,
    run_phases,
)  # fmt: skip
from toolchain.parity.metrics import NO_TARGET


@pytest.fixture(scope="module")
def batch():
    ids = np.random.default_rng(3).integers(0, 97, (3, 30), np.int64)
    (planned,) = plan_batches(ids, 3)
    return planned


def test_rows_of_a_batch_are_ragged(batch):
    assert batch.lengths.tolist() == [30, 20, 10]
    assert (batch.ids[1, 20:] == 0).all()


def test_every_block_is_in_some_batch():
    ids = np.arange(5 * 12).reshape(5, 12)
    assert [len(b.ids) for b in plan_batches(ids, 2)] == [2, 2, 1]


def test_every_phase_gives_the_logits_of_one_prefill(eager, batch):
    phases = {p.phase: p for p in run_phases(eager, batch, 6)}
    assert tuple(phases) == MODEL_PHASES
    whole = phases["prefill"]
    assert len(whole.rows) == batch.lengths.sum()
    for name in MODEL_PHASES[1:]:
        part = phases[name]
        expected = logits_at(whole, part.rows, part.positions)
        assert np.abs(part.logits - expected).max() < 1e-4, name


def test_decode_is_six_steps_of_every_row_up_to_its_end(eager, batch):
    decode = next(p for p in run_phases(eager, batch, 6) if p.phase == "decode")
    for row, length in enumerate(batch.lengths):
        assert sorted(decode.positions[decode.rows == row]) == list(range(length - 6, length))


def test_decode_steps_are_cut_to_the_shortest_row(eager, batch):
    decode = next(p for p in run_phases(eager, batch, 99) if p.phase == "decode")
    assert len(decode.rows) == 3 * 9


def test_targets_are_the_tokens_that_follow(batch):
    targets = batch.targets(np.array([0, 0, 1, 1]), np.array([0, 29, 18, 19]))
    assert targets.tolist() == [batch.ids[0, 1], NO_TARGET, batch.ids[1, 19], NO_TARGET]


@given(st.lists(st.integers(SHORTEST, 300), min_size=1, max_size=5))
def test_chunks_cover_each_row_once(lengths):
    lengths = np.array(lengths)
    bounds = chunk_bounds(lengths)
    assert all((b > a).all() for a, b in pairwise(bounds))
    assert (bounds[-1] == lengths).all()
    assert lengths.max() <= capacity_for(bounds) <= lengths.max() + 1
    ids = np.arange(len(lengths) * 300).reshape(len(lengths), 300)
    pieces = [rows_between(ids, a, b) for a, b in pairwise(bounds)]
    for row, length in enumerate(lengths):
        joined = [p[row, : b[row] - a[row]] for p, a, b in zip(pieces, bounds[:-1], bounds[1:], strict=True)]
        assert (np.concatenate(joined) == ids[row, :length]).all()
