"""Generation over any runner, and the checks every step passes first."""

import numpy as np
import pytest

from tests.conftest import random_ids
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.runners.generate import Generation, Sampler, stream_text
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import eager_runner, open_runner


@pytest.fixture(params=["eager", "onnx"])
def runner(request, tiny, exported):
    return eager_runner(tiny[0]) if request.param == "eager" else OnnxRunner(open_artifact(exported))


def generate(runner, prompt, new, capacity, **options):
    generation = Generation(runner, prompt, Sampler(**options), new, capacity)
    return list(generation), generation.finish


def test_greedy_tokens_are_those_of_full_forward_passes(runner, tiny):
    import torch

    prompt = random_ids(1, 20).tolist()
    ours, finish = generate(runner, prompt, 30, 60)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(30):
            ids.append(int(tiny[1](torch.tensor([ids])).logits[0, -1].argmax()))
    assert ours == ids[20:]
    assert finish == "length"


def test_generation_stops_cleanly_when_the_cache_is_full(runner):
    tokens, finish = generate(runner, random_ids(2, 14).tolist(), 8, 16)
    assert (len(tokens), finish) == (2, "cache full")


def test_prompt_beyond_the_capacity_is_refused_before_computing(runner):
    with pytest.raises(DtoolError, match="17 > 16"):
        generate(runner, random_ids(2, 17).tolist(), 1, 16)


def test_full_cache_keeps_its_slots(exported):
    runner = OnnxRunner(open_artifact(exported))
    state = runner.new_state(1, 4)
    runner.step(state, random_ids(0, 1, 4), np.array([4]), "prefill")
    before = [cache.numpy().copy() for cache in state.caches]
    with pytest.raises(DtoolError, match="5 > 4"):
        runner.step(state, random_ids(0, 1, 1), np.array([1]), "decode")
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, state.caches, strict=True))


def test_same_seed_gives_the_same_text_and_another_differs(runner):
    prompt = random_ids(3, 5).tolist()
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.95}
    one, two, other = (generate(runner, prompt, 20, 40, seed=s, **options)[0] for s in (1, 1, 2))
    assert one == two != other


def test_sampler_keeps_what_it_is_told_to():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    chosen = {Sampler(temperature=1.0, top_p=0.6, seed=s).choose(logits) for s in range(60)}
    assert chosen == {0, 1}
    assert {Sampler(temperature=1.0, top_k=1, seed=s).choose(logits) for s in range(20)} == {0}
    assert Sampler(allowed=[0, 1]).choose(np.array([0.0, 1.0, 9.0])) == 1


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}])
def test_sampling_options_that_mean_nothing_are_refused(options):
    with pytest.raises(DtoolError, match="sampling options"):
        Sampler(**options)


def test_streamed_pieces_never_cut_a_character():
    data = "héé 模型".encode()

    def decode(ids):
        return bytes(ids).decode("utf-8", errors="replace")

    pieces = list(stream_text(iter(data), decode))
    assert "".join(pieces) == "héé 模型"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@pytest.mark.parametrize(
    ("ids", "lengths", "phase", "text"),
    [
        (np.zeros((1, 2), np.int32), [2], "prefill", "int32"),
        (np.zeros((2, 2), np.int64), [2, 2], "prefill", "input_ids"),
        (np.zeros((1, 2), np.int64), [2], "decode", "one token per row"),
        (np.zeros((1, 2), np.int64), [3], "prefill", "1..2"),
        (np.zeros((1, 2), np.int64), [0], "prefill", "1..2"),
        (np.full((1, 2), 97, np.int64), [2], "prefill", "0..96"),
        (np.full((1, 2), -1, np.int64), [2], "prefill", "vocabulary"),
    ],
)
def test_steps_that_break_the_contract_are_refused(runner, ids, lengths, phase, text):
    with pytest.raises(DtoolError, match=text):
        runner.step(runner.new_state(1, 8), ids, np.array(lengths), phase)


def test_capacity_beyond_the_models_positions_is_refused(runner):
    with pytest.raises(DtoolError, match="129 not in"):
        runner.new_state(1, 129)


def test_folder_that_is_nothing_is_refused(tmp_path):
    with pytest.raises(DtoolError, match="not a checkpoint"):
        open_runner(tmp_path / "nothing")
