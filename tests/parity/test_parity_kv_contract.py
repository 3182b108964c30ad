"""Each promise of the cache is broken on purpose by a stub around the torch runner."""

import math

import numpy as np
import pytest
import torch
from tiny_parity import make_recipe

from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.numerics import logit_tolerance
from toolchain.parity.bisect import ROUNDING_TOLERANCE
from toolchain.parity.kv_contract import check_kv_contract, poison, read_caches
from toolchain.quantize.stage import quantize_artifact
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import fake_quant_runner
from toolchain.runners.runner import Limits

PROMISES = (
    "poison_never_shows", "slots_never_rewritten", "stale_cache_ignored", "neighbour_isolated", "batch_permutes",
    "overflow_refused",
)  # fmt: skip


class Stub:
    """The eager runner; subclasses break one promise."""

    def __init__(self, inner):
        self.inner, self.config, self.name = inner, inner.config, "stub"

    def new_state(self, batch, capacity):
        return self.inner.new_state(batch, capacity)

    def step(self, state, input_ids, new_lengths, phase):
        return self.inner.step(state, input_ids, new_lengths, phase)


class ReadsUnwrittenSlots(Stub):
    def step(self, state, *call):
        beyond = state.caches[0][1][0, 0, -1, 0].item()
        return super().step(state, *call) + np.float32(0 * beyond)


class RewritesSlotZero(Stub):
    def step(self, state, *call):
        logits = super().step(state, *call)
        state.caches[1][0][0, 0, 0, 0] += 1
        return logits


class KeepsOldSlots(Stub):
    """Sees what an earlier prompt left just behind the new one."""

    def step(self, state, ids, new_lengths, phase):
        first = int(state.lengths[0]) + ids.shape[1]
        left = state.caches[0][1][0, 0, first, 0].item() if first < state.capacity else 0.0
        return super().step(state, ids, new_lengths, phase) + np.float32(0.0 if np.isnan(left) else left)


class MixesRows(Stub):
    def step(self, state, ids, *call):
        return super().step(state, ids, *call) + np.float32(1e-6 * ids.sum())


class FavoursFirstRow(Stub):
    def step(self, *call):
        logits = super().step(*call)
        logits[0] *= np.float32(1.001)
        return logits


class RoundsFirstRow(Stub):
    """What a kernel does that adds up the first row of a tile in another order."""

    def step(self, *call):
        logits = super().step(*call)
        logits[0] = np.nextafter(logits[0], np.float32(np.inf))
        return logits


class DropsOverflow(Stub):
    """What TensorRT does: no word, and the write is gone."""

    def step(self, state, *call):
        try:
            return super().step(state, *call)
        except DtoolError:
            return np.zeros((state.batch, 1, self.config.vocab_size), np.float32)


class RefusesTooLate(Stub):
    def step(self, state, *call):
        try:
            return super().step(state, *call)
        except DtoolError:
            state.caches[0][0][:] = 0
            raise


FLOATS = logit_tolerance("float32", layers=2 * 4 + 2, width=128, largest=1.0)
CODES = ROUNDING_TOLERANCE["float32"] * math.sqrt(2 * 4 + 2)
"""What rounding explains of the tiny model's logits: see `toolchain.parity.bisect`."""


def broken(runner, tolerance=FLOATS) -> list[str]:
    rows = check_kv_contract(runner, tolerance)
    assert all((row.phase, row.gate, row.passed) == ("kv_contract", 0.0, row.value == 0) for row in rows)
    assert tuple(row.metric for row in rows) == PROMISES
    return [row.metric for row in rows if not row.passed]


def test_the_torch_decoder_keeps_every_promise(eager):
    assert broken(eager) == []


def test_the_export_keeps_every_promise(exported):
    assert broken(OnnxRunner(open_artifact(exported), threads=1)) == []


@pytest.mark.parametrize(
    ("stub", "promise"),
    [
        (ReadsUnwrittenSlots, "poison_never_shows"),
        (RewritesSlotZero, "slots_never_rewritten"),
        (KeepsOldSlots, "stale_cache_ignored"),
        (MixesRows, "neighbour_isolated"),
        (FavoursFirstRow, "batch_permutes"),
        (DropsOverflow, "overflow_refused"),
        (RefusesTooLate, "overflow_refused"),
    ],
)
def test_a_broken_promise_is_named(eager, stub, promise):
    assert promise in broken(stub(eager))


def test_a_row_that_is_rounded_otherwise_at_another_place_breaks_none(eager):
    assert broken(RoundsFirstRow(eager)) == []


@pytest.mark.parametrize("stub", [ReadsUnwrittenSlots, MixesRows, FavoursFirstRow, DropsOverflow])
def test_a_fault_breaks_only_its_own_promises(eager, stub):
    assert len(broken(stub(eager))) == 1


def test_an_engine_for_one_row_is_held_to_what_it_can_show(eager):
    runner = Stub(eager)
    runner.limits = Limits(max_batch=1, max_prompt=4)
    found = [row.metric for row in check_kv_contract(runner, FLOATS) if row.passed]
    assert found == [p for p in PROMISES if p not in ("neighbour_isolated", "batch_permutes")]


def test_poison_fills_unused_slots_of_each_row_and_no_other(eager, exported):
    for runner in (eager, OnnxRunner(open_artifact(exported), threads=1)):
        state = runner.new_state(2, 6)
        runner.step(state, np.ones((2, 3), np.int64), np.array([3, 1]), "evaluation")
        before = [c.copy() for c in read_caches(state)]
        poison(state)
        for old, new in zip(before, read_caches(state), strict=True):
            assert (old[0, :, :3] == new[0, :, :3]).all()
            assert (old[1, :, :1] == new[1, :, :1]).all()
            assert np.isnan(new[0, :, 3:].copy().view(np.float32)).all()
            assert np.isnan(new[1, :, 1:].copy().view(np.float32)).all()


def test_int8_poison_is_the_largest_code(eager):
    state = eager.new_state(1, 4)
    state.caches = [(torch.zeros(1, 2, 4, 8, dtype=torch.int8),) * 2]
    poison(state)
    assert all((c == 127).all() for c in read_caches(state))


@pytest.mark.parametrize(
    "changes", [{}, {"granularity": "token"}, {"granularity": "token", "skip": ["*.0.self_attn"]}], ids=str
)
@pytest.mark.parametrize("cache_format", ["int8", "fp8_e4m3"])
def test_caches_of_codes_keep_every_promise_on_both_sides(exported, tmp_path, text_file, cache_format, changes):
    calibration = {"data": str(text_file), "samples": 4, "seq_len": 16}
    recipe = make_recipe(kv_cache={"format": cache_format} | changes, calibration=calibration)
    artifact = quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None)
    assert broken(OnnxRunner(artifact, threads=1), CODES) == []
    assert broken(fake_quant_runner(artifact.path), CODES) == []
    state = fake_quant_runner(artifact.path).new_state(1, 4)
    poison(state)
    codes = [c for c in read_caches(state) if c.shape[-1] == fake_quant_runner(artifact.path).config.head_dim]
    assert len(codes) == 4 - 2 * ("skip" in changes)
    assert all((c == 127).all() for c in codes)  # E4M3's NaN, or the largest int8 code
