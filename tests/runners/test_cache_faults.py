"""Faults people met with caches, masks and shapes, each as its small trial; through the exported graphs.

dtool pads on the right and takes positions from each row's cache length, so a row that is masked as a whole
cannot be said; the trials of left padding become those of ragged rows.
"""

import numpy as np
import pytest

from tests.conftest import make_recipe, random_ids
from tests.model.families import save_variant
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.runners.generate import Generation, Sampler
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import eager_runner


@pytest.fixture
def runner(exported):
    return OnnxRunner(open_artifact(exported))


def last_logits(runner, rows, chunks, capacity=64):
    """Logits [B, vocab] of the last token, fed in chunks of these widths."""
    state, begin = runner.new_state(len(rows), capacity), 0
    for width in chunks:
        phase = "decode" if width == 1 else "prefill"
        out = runner.step(state, rows[:, begin : begin + width], np.full(len(rows), width), phase)
        begin += width
    return out[:, 0]


def test_a_short_row_beside_a_long_one_equals_its_own_run_and_stays_finite(runner):
    """D-01, D-03: prompts of 5 and 3 in one batch, then 4 steps; each row as if alone, in the cache too."""
    ids = random_ids(1, 2, 9)
    together = runner.new_state(2, 16)
    prompt = np.where(np.arange(5) < np.array([[5], [3]]), ids[:, :5], 0)
    ours = [runner.step(together, prompt, np.array([5, 3]), "prefill")]
    ours += [runner.step(together, ids[:, i : i + 1], np.array([1, 1]), "decode") for i in range(5, 9)]
    for row, length in ((0, 5), (1, 3)):
        alone = runner.new_state(1, 16)
        theirs = [runner.step(alone, ids[row : row + 1, :length], np.array([length]), "prefill")]
        theirs += [runner.step(alone, ids[row : row + 1, i : i + 1], np.array([1]), "decode") for i in range(5, 9)]
        for a, b in zip(ours, theirs, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a[row], b[0], atol=1e-4)


def test_prompts_in_one_piece_in_two_and_token_by_token_end_alike(runner):
    """E-01: with fewer queries than keys, the mask is aligned to the lower right."""
    ids = random_ids(2, 1, 8)
    whole = last_logits(runner, ids, [8])
    for chunks in ([5, 3], [1] * 8, [1, 6, 1]):
        np.testing.assert_allclose(last_logits(runner, ids, chunks), whole, atol=1e-4)


def test_windowed_decode_equals_windowed_prefill(tmp_path):
    """D-04: window 4 and 10 tokens, as 3 + 7 steps and at once, beyond the window in the cache."""
    from tests.model import families

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.VARIANTS, "narrow", ("mistral", {"sliding_window": 4}))
        model = save_variant(tmp_path / "model", "narrow")
    artifact = export_checkpoint(tmp_path / "model", make_recipe(), tmp_path / "onnx", report=lambda _: None)
    ids = random_ids(3, 2, 10, vocab=model.config.vocab_size)
    at_once = last_logits(OnnxRunner(artifact), ids, [10])
    np.testing.assert_allclose(last_logits(OnnxRunner(artifact), ids, [3] + [1] * 7), at_once, atol=1e-4)
    # a token outside every window of two layers (2 * 3 back) does not matter, the one inside does
    for position, same in ((2, True), (7, False)):
        changed = ids.copy()
        changed[:, position] = (changed[:, position] + 1) % model.config.vocab_size
        assert np.allclose(last_logits(OnnxRunner(artifact), changed, [10]), at_once, atol=1e-6) == same


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 7, 13])
def test_first_step_on_an_empty_cache_equals_torch(tiny, runner, batch, tokens):
    """E-03, E-04: a past of length zero, any batch and any length."""
    ids = random_ids(4, batch, tokens)
    theirs = last_logits(eager_runner(tiny[0]), ids, [tokens])
    np.testing.assert_allclose(last_logits(runner, ids, [tokens]), theirs, atol=1e-4)


def test_generation_never_passes_the_cache(runner):
    """E-05: capacity 16; 17 tokens do not enter; 14 leave room for 2, whatever was asked."""
    with pytest.raises(DtoolError, match="17 > 16"):
        list(Generation(runner, list(range(3, 20)), Sampler(), 4, 16))
    generation = Generation(runner, list(range(3, 17)), Sampler(), 8, 16)
    assert len(list(generation)) == 2
    assert generation.finish == "cache full"


def test_a_session_forgets_the_prompt_before(runner, exported):
    """E-07: prompt A, then the shorter B with the same session; B as with a fresh one, bit for bit."""
    a, b = random_ids(5, 1, 20), random_ids(6, 1, 7)
    last_logits(runner, a, [12] + [1] * 8)
    again = last_logits(runner, b, [3] + [1] * 4)
    assert np.array_equal(again, last_logits(OnnxRunner(open_artifact(exported)), b, [3] + [1] * 4))
