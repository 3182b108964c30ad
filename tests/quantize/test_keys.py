"""Smoothed keys change nothing before rounding, in any family, and let one scale serve all channels."""

import numpy as np
import pytest
import torch

from tests.conftest import make_recipe, random_ids, save_tiny
from tests.model.families import CONTEXT_LEN, save_variant
from tests.quantize.test_smoothing import logits_of
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.model.config import DecoderConfig, Layer
from toolchain.model.decoder import Block
from toolchain.model.load import load_artifact_decoder, load_decoder
from toolchain.model.positions import position_tables, rope_table_names
from toolchain.quantize.cache_scales import CacheSeen
from toolchain.quantize.keys import check_keys, fold_keys, key_scale, partners, smooth_keys
from toolchain.quantize.layer import run_layer
from toolchain.quantize.stage import quantize_artifact
from toolchain.runners.open import fake_quant_runner, open_runner
from toolchain.search.budget import Budget, Question
from toolchain.search.stage import search_formats

FAMILIES = [
    "llama_biases", "llama_groups_of_three", "llama_mqa", "qwen2", "qwen3", "qwen3_biases", "gemma", "gemma2",
    "gemma3_text", "olmo2", "cohere", "cohere_qk_norm", "stablelm", "stablelm_parallel", "phi", "phi3", "gptj",
    "gpt2", "smollm3", "glm4", "mixtral", "llama_yarn",
]  # fmt: skip
SIZES = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "norm_eps": 1e-6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96}


def layer_of(**changes):
    """A random layer with its config, a text [2, 70, E] and the tables of its rotation."""
    config = DecoderConfig(**SIZES, **changes)
    generator = torch.Generator().manual_seed(0)
    block = Block(config, 0).eval()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(False)
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    tables = position_tables(config)
    rope = tuple(tables[name] for name in rope_table_names(config.layer(0).rope))
    return config, block, torch.randn(2, 70, 32, generator=generator), rope


def chunked(decoder, ids):
    """Logits of a text in two parts, the second behind a cache: positions 0..49, 50..69."""
    caches, past = decoder.new_caches(*ids.shape), torch.zeros(len(ids), dtype=torch.int64)
    with torch.inference_mode():
        return torch.cat([decoder(ids[:, :50], past, caches), decoder(ids[:, 50:], past + 50, caches)], dim=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_is_an_identity_for_every_family(name, tmp_path):
    save_variant(tmp_path / "model", name)
    decoder = load_decoder(tmp_path / "model", context_len=CONTEXT_LEN.get(name))
    config = decoder.config
    check_keys(config)
    ids = torch.from_numpy(random_ids(1, 2, 70, vocab=config.vocab_size))
    before = chunked(decoder, ids)
    for i, block in enumerate(decoder.model.layers):
        shape = (config.num_key_value_heads, config.head_dim)
        sizes = torch.empty(shape).uniform_(-2.0, 2.0, generator=torch.Generator().manual_seed(i)).exp()
        scale = key_scale(sizes, partners(config, i), shared=config.qk_norm == "head")
        assert float(scale.max() / scale.min()) > 3
        fold_keys(block, scale, config)
    after = chunked(decoder, ids)
    assert float((after - before).abs().max()) <= 1e-4 * float(before.abs().max())


@pytest.mark.parametrize(("interleaved", "rotary"), [(False, 16), (True, 16), (False, 8), (True, 8)])
def test_a_pair_that_is_divided_by_two_factors_is_seen(interleaved, rotary):
    """The partner is the one that the attention op mixes: any other pairing changes the scores."""
    config, block, x, rope = layer_of(rope_interleaved=interleaved, rotary_dim=rotary)
    before = run_layer(block, rope, x)[0]
    wrong = layer_of(rope_interleaved=not interleaved, rotary_dim=rotary)[0]
    sizes = torch.empty(2, 16).uniform_(0.1, 10.0, generator=torch.Generator().manual_seed(0))
    fold_keys(block, key_scale(sizes, partners(wrong, 0), shared=False), config)
    assert float((run_layer(block, rope, x)[0] - before).norm() / before.norm()) > 1e-3


def test_partners_of_every_layout():
    def of(**changes):
        config = DecoderConfig(**(SIZES | {"head_dim": 8}), **changes)
        return partners(config, 0).tolist()

    assert of() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert of(rotary_dim=4) == [2, 3, 0, 1, 4, 5, 6, 7]
    assert of(rope_interleaved=True) == [1, 0, 3, 2, 5, 4, 7, 6]
    assert of(rope_interleaved=True, rotary_dim=4) == [1, 0, 3, 2, 4, 5, 6, 7]
    assert of(layers=(Layer(rope="no_rope"),), rotary_dim=2) == list(range(8))


def test_factors_are_the_pairs_largest_with_a_mean_of_one_and_dead_channels_are_left_alone():
    amax = torch.tensor([[8.0, 0.0, 2.0, 0.0], [1.0, 3.0, 4.0, 2.0]])
    scale = key_scale(amax, torch.tensor([2, 3, 0, 1]), shared=False)
    assert torch.equal(scale[0], torch.tensor([1.0, 1.0, 1.0, 1.0]))  # one live pair: its own mean
    torch.testing.assert_close(scale[1], torch.tensor([4.0, 3.0, 4.0, 3.0]) / 12**0.5)
    shared = key_scale(amax, torch.arange(4), shared=True)
    assert torch.equal(shared[0], shared[1])
    torch.testing.assert_close(shared[0, 0] / shared[0, 3], torch.tensor(4.0))
    assert bool((key_scale(torch.zeros(1, 4), torch.arange(4), shared=False) == 1).all())


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True},
        {"qkv_bias": True, "rotary_dim": 6},
        {"qkv_bias": True, "rotary_dim": 6, "attention_softcap": 3.0},
        {"qkv_bias": True, "layers": (Layer(rope="no_rope"),), "rotary_dim": 2},
        {"qkv_bias": True, "qk_norm": "head", "norm_unit_offset": True, "rotary_dim": 6},
        {"qk_norm": "width", "layers": (Layer(window=9),)},
        {"qk_norm": "head_layer", "rope_interleaved": True},
    ],
)
def test_a_smoothed_layer_is_the_layer_and_what_was_seen_is_what_it_shows(changes):
    config, block, x, rope = layer_of(**changes)
    if config.qkv_bias:
        block.self_attn.qkv_proj.bias[4 * 16 : 6 * 16] *= 20
    before, (keys, _) = run_layer(block, rope, x)
    seen = CacheSeen.nothing(2, 16, histogram=True)
    seen.add(keys)
    smooth_keys(block, 0, seen, config)
    after, (smooth, _) = run_layer(block, rope, x)
    assert float((after - before).norm() / before.norm()) < 1e-5
    assert not torch.allclose(smooth, keys, rtol=0.1)
    torch.testing.assert_close(seen.amax_KD, smooth.abs().amax((0, 2)), rtol=1e-3, atol=1e-5)
    spread = lambda k: float(k.abs().amax((0, 2)).amax(-1).div(k.abs().amax((0, 2)).median(-1).values).max())  # noqa: E731
    assert spread(smooth) < max(2.0, spread(keys))


def test_a_constant_is_taken_off_where_no_rotation_and_no_cap_sees_it():
    """The middle of the unrotated channels becomes zero; with a cap, or without a bias, it stays."""
    middles = {}
    for name, changes in {
        "plain": {"qkv_bias": True},
        "capped": {"qkv_bias": True, "attention_softcap": 3.0},
        "unbiased": {},
    }.items():
        config, block, x, rope = layer_of(rotary_dim=6, **changes)
        block.self_attn.qkv_proj.weight[4 * 16 : 6 * 16] += 0.2
        seen = CacheSeen.nothing(2, 16, histogram=False)
        seen.add(run_layer(block, rope, x + 3)[1][0])
        smooth_keys(block, 0, seen, config)
        keys = run_layer(block, rope, x + 3)[1][0].transpose(1, 2).flatten(0, 1)
        middle = (keys.amax(0) + keys.amin(0)).abs() / keys.abs().amax(0)
        middles[name] = float(middle[:, 6:].max())
        assert float(middle[:, :6].max()) > 1e-2
    assert middles["plain"] < 1e-4
    assert min(middles["capped"], middles["unbiased"]) > 0.1


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"qkv_clip": 2.0}, "clipped"),
        ({"qk_norm": "head", "norm_weight": False}, "without a weight"),
        ({"qk_norm": "width", "norm_weight": False}, "without a weight"),
    ],
)
def test_what_stands_between_is_refused_by_name(changes, what):
    with pytest.raises(DtoolError, match=what) as caught:
        check_keys(DecoderConfig(**SIZES, **changes))
    assert "smoothing.keys=false" in str(caught.value)


@pytest.mark.usefixtures("random_calibration")
def test_the_stages_refuse_a_clipped_model_before_any_work(tmp_path):
    save_variant(tmp_path / "m", "olmo")
    export_checkpoint(tmp_path / "m", make_recipe(), tmp_path / "x", report=lambda _: None)
    recipe = make_recipe(kv_cache={"format": "int8"}, smoothing={"keys": True})
    with pytest.raises(DtoolError, match="clipped"):
        quantize_artifact(tmp_path / "x", recipe, tmp_path / "q", report=lambda _: None)
    assert not (tmp_path / "q").exists()
    with pytest.raises(DtoolError, match="clipped"):
        search_formats(tmp_path / "x", recipe, Question(Budget("kl", 1.0), ("int8",)), tmp_path / "mix.toml")


# ---- keys that lie far from zero ----


@pytest.fixture(scope="module")
def offset_model(tmp_path_factory):
    """Like Qwen2: a few channels of K have biases of some tens, everything else is of order one."""
    folder = tmp_path_factory.mktemp("offset")
    model = save_tiny(folder / "m", attention_bias=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(2, 16)
            bias[:, [3, 6, 15]] = 10 * torch.randn(2, 3, generator=generator).sign() * torch.tensor([1.0, 2.0, 3.0])
            layer.self_attn.q_proj.weight.view(4, 16, -1)[:, [3, 6, 7, 11, 14, 15]] /= 20
            layer.self_attn.q_proj.bias.view(4, 16)[:, [3, 6, 7, 11, 14, 15]] /= 20
    model.save_pretrained(folder / "m")
    export_checkpoint(folder / "m", make_recipe(), folder / "x", report=lambda _: None)
    return folder / "x"


@pytest.mark.usefixtures("random_calibration")
def test_large_offsets_cost_a_static_scale_much_and_smoothed_keys_or_tokens_little(offset_model, tmp_path):
    ids = torch.from_numpy(random_ids(11, 4, 48))

    def logits(path):
        decoder = load_artifact_decoder(open_artifact(path))
        with torch.inference_mode():
            return decoder(ids, torch.zeros(4, dtype=torch.int64), decoder.new_caches(4, 48))

    exact, errors = logits(offset_model), {}
    cases = {
        "head": ({}, {}),
        "keys": ({}, {"keys": True}),
        "mse": ({"scale": "mse"}, {}),
        "token": ({"granularity": "token"}, {}),
        "token_keys": ({"granularity": "token"}, {"keys": True}),
    }
    for name, (cache, smoothing) in cases.items():
        recipe = make_recipe(kv_cache={"format": "int8"} | cache, smoothing=smoothing)
        artifact = quantize_artifact(offset_model, recipe, tmp_path / name, report=lambda _: None)
        errors[name] = float((logits(artifact.path) - exact).norm() / exact.norm())
        assert artifact.json("quantization.json")["identity_error"] < 1e-5
    # a constant offset is in every token, so scales of tokens lose to it as much as one of the head does
    for plain, smooth in (("head", "keys"), ("mse", "keys"), ("token", "token_keys")):
        assert errors[smooth] < errors[plain] / 3, errors


@pytest.mark.usefixtures("random_calibration")
def test_graphs_with_smoothed_keys_compute_what_torch_does(offset_model, tmp_path):
    recipe = make_recipe(kv_cache={"format": "int8", "scale": "mse"}, smoothing={"keys": True})
    artifact = quantize_artifact(offset_model, recipe, tmp_path / "q", report=lambda _: None)
    ids, lengths = random_ids(5, 2, 64), [64, 41]
    ours = logits_of(open_runner(artifact.path), ids, lengths)
    theirs = logits_of(fake_quant_runner(artifact.path), ids, lengths)
    assert float(np.median(abs(ours - theirs))) < 1e-4
    plain = logits_of(open_runner(offset_model), ids, lengths)
    assert float(abs(ours - plain).mean()) > 1e-4  # something was rounded
