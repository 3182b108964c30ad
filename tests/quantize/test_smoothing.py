"""Smoothing changes nothing before rounding, in any family, and makes rounding cheaper where it should."""

import pytest
import torch

from tests.conftest import random_ids
from tests.model.families import CONTEXT_LEN, VARIANTS, save_variant
from toolchain.model.load import load_decoder
from toolchain.quantize.smoothing import fold, shared_by_heads, sites, smoothing_scale

FAMILIES = [
    "llama_biases", "llama_groups_of_three", "gemma2", "gemma3_text", "cohere", "gpt2", "olmo2", "opt_stream",
    "phi3_long", "falcon_grouped", "gpt_neox", "qwen2_moe_mixed", "granite", "glm4", "stablelm", "olmoe", "olmo",
]  # fmt: skip


def logits(decoder, ids):
    with torch.inference_mode():
        return decoder(ids, torch.zeros(len(ids), dtype=torch.int64), decoder.new_caches(*ids.shape))


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_is_an_identity_for_every_family(name, tmp_path):
    save_variant(tmp_path / "model", name)
    decoder = load_decoder(tmp_path / "model", context_len=CONTEXT_LEN.get(name))
    config = decoder.config
    ids = torch.from_numpy(random_ids(1, 2, 40, vocab=config.vocab_size))
    before = logits(decoder, ids)
    folded = 0
    for i, block in enumerate(decoder.model.layers):
        for site in sites(config, i):
            width = block.get_submodule(site.readers[0]).weight.shape[1]
            scale = torch.empty(width).uniform_(0.2, 5.0, generator=torch.Generator().manual_seed(i))
            if site.maker.endswith("qkv_proj"):
                scale = shared_by_heads(scale, config)
            fold(block, site, scale, config)
            folded += 1
    after = logits(decoder, ids)
    assert folded > 0 or name in {"olmo", "opt_stream"}
    assert float((after - before).abs().max()) <= 1e-4 * float(before.abs().max())


def test_a_weight_that_is_stored_as_its_difference_from_one_is_divided_as_the_multiplier():
    """H-08, B-10: s = 3 into w = 0.5 gives (1 + 0.5) / 3 - 1 = -0.5, not 0.1667."""
    from toolchain.model.config import DecoderConfig
    from toolchain.model.decoder import Block

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8, "norm_eps": 1e-6}
    config = DecoderConfig(**sizes, **heads, norm_unit_offset=True)
    block = Block(config, 0)
    with torch.no_grad():
        block.input_layernorm.weight.fill_(0.5)
        block.self_attn.qkv_proj.weight.fill_(1.0)
    fold(block, sites(config, 0)[0], torch.full((8,), 3.0), config)
    assert torch.allclose(block.input_layernorm.weight, torch.full((8,), -0.5))
    assert torch.allclose(block.self_attn.qkv_proj.weight, torch.full((16, 8), 3.0))


def test_scale_follows_the_formula_and_leaves_dead_channels_alone():
    inputs, weights = torch.tensor([8.0, 2.0, 0.0, 1.0]), torch.tensor([0.5, 0.5, 0.5, 0.0])
    scale = smoothing_scale(inputs, weights, 0.5)
    assert scale[2] == scale[3] == 1
    assert float(scale[0] / scale[1]) == pytest.approx((8 / 2) ** 0.5)
    assert bool(torch.isfinite(scale).all())


def test_query_heads_of_one_kv_head_share_their_channels():
    from toolchain.model.hf import config_from_hf

    document = {"model_type": "llama", "dtype": "float32", "vocab_size": 9, "hidden_size": 24, "intermediate_size": 8}
    document |= {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = config_from_hf(document, {})
    scale = shared_by_heads(torch.arange(1.0, 25.0), config).reshape(2, 3, 4)
    assert torch.equal(scale[:, 0], scale[:, 1])
    assert torch.equal(scale[0, 0], torch.tensor([9.0, 10.0, 11.0, 12.0]))


def test_every_named_family_exists():
    assert set(FAMILIES) <= set(VARIANTS)


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("algorithm", ["smoothquant", "awq"])
def test_smoothing_before_rounding_keeps_large_channels_from_costing(algorithm, tmp_path):
    """One channel a hundred times larger at the input of every down_proj: static INT8 loses the others without it."""
    from tests.conftest import make_recipe, save_tiny
    from toolchain.export.stage import export_checkpoint
    from toolchain.quantize.stage import quantize_artifact
    from toolchain.runners.open import fake_quant_runner, open_runner

    model = save_tiny(tmp_path / "model")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[3] *= 300
            layer.mlp.down_proj.weight[:, 3] /= 300
    model.save_pretrained(tmp_path / "model")
    export_checkpoint(tmp_path / "model", make_recipe(), tmp_path / "onnx", report=lambda _: None)
    integers = {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"}}
    errors = {}
    ids, lengths = random_ids(5, 2, 40), [40, 40]
    theirs = logits_of(open_runner(tmp_path / "onnx"), ids, lengths)
    for name in ("none", algorithm):
        recipe = make_recipe(**integers, smoothing={"algorithm": name, "alpha": 0.8})
        artifact = quantize_artifact(tmp_path / "onnx", recipe, tmp_path / name, report=lambda _: None)
        errors[name] = float(abs(logits_of(fake_quant_runner(artifact.path), ids, lengths) - theirs).mean())
        assert artifact.json("quantization.json")["identity_error"] < 1e-5
    assert errors[algorithm] < errors["none"] / 3, errors


def logits_of(runner, ids, lengths):
    import numpy as np

    return runner.step(runner.new_state(len(ids), 64), ids, np.array(lengths), "evaluation")


# ---- alpha, searched ----


def reader(weight, x, *, weights="int8", group_size=0, **activations):
    from toolchain.quantize.smoothing import Reader
    from toolchain.recipe_sections import Activations

    rounded = Activations(format="int8", **activations) if activations else None
    return Reader(weight, weights, group_size, rounded, torch.zeros(x.shape[1]), x.abs().amax(0))


@pytest.mark.parametrize("granularity", ["token", "tensor"])
def test_the_found_scale_errs_less_than_none_and_than_any_other_tried(granularity):
    from toolchain.quantize.smoothing import ALPHAS, least_error

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 32, generator=generator), torch.randn(16, 32, generator=generator)
    x[:, 5] *= 60
    product = reader(weight, x, granularity=granularity)
    scales = {alpha: smoothing_scale(x.abs().amax(0), weight.abs().amax(0), alpha) for alpha in ALPHAS}
    alpha, scale = least_error(scales.items(), [product], x)
    errors = {a: product.error(x, s) for a, s in scales.items()}
    assert alpha == min(errors, key=lambda a: errors[a])
    assert product.error(x, scale) < product.error(x, torch.ones(32)) / 4
    assert 0 < alpha < 1


def test_the_error_is_that_of_the_rounded_product():
    """Against the arithmetic of the finished layer, weights in groups and inputs per token."""
    from toolchain.model.quantized import QuantizedLinear
    from toolchain.quantize.rounding import round_matrix
    from toolchain.recipe_sections import Weights

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 64, generator=generator), torch.randn(16, 64, generator=generator)
    scale = torch.rand(64, generator=generator) + 0.5
    found = reader(weight, x, weights="int4", group_size=32, granularity="token").error(x, scale)
    rounded = round_matrix(weight * scale, Weights(format="int4", group_size=32), group_size=32)
    linear = QuantizedLinear(rounded.codes, rounded.scale, None, ("int8", "token"))
    wanted = x @ weight.mT
    shares = (wanted - linear(x / scale)).square().sum(1) / wanted.square().sum(1)
    assert found == pytest.approx(float(shares.mean()), rel=1e-4)


def test_every_token_weighs_alike_whatever_its_activations():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 32, generator=generator), torch.randn(16, 32, generator=generator)
    x[0] = 1000 * torch.eye(32)[3]
    product, scale = reader(weight, x, granularity="token"), torch.rand(32, generator=generator) + 0.5
    massive, others = product.error(x[:1], scale), product.error(x[1:], scale)
    assert product.error(x, scale) == pytest.approx((massive + 63 * others) / 64, rel=1e-4)


def test_a_static_range_is_judged_by_text_that_reaches_further():
    """Otherwise alpha 1, where all channels reach the range, never shows what it clips."""
    x, weight = torch.full((8, 32), 2.0), torch.eye(32)
    error = reader(weight, x, weights=None, granularity="tensor").error(x, torch.ones(32))
    assert error == pytest.approx(0.2**2, rel=1e-3)
    assert reader(weight, x, weights=None, granularity="token").error(x, torch.ones(32)) < 1e-6


def test_where_nothing_is_better_nothing_is_divided():
    from toolchain.quantize.smoothing import least_error

    x, weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.eye(4)
    alpha, scale = least_error([(0.5, torch.full((4,), 3.0))], [reader(weight, x, weights=None)], x)
    assert alpha is None
    assert torch.equal(scale, torch.ones(4))


@pytest.mark.usefixtures("random_calibration")
def test_a_searched_alpha_stands_in_the_report_and_loses_less(tmp_path):
    from tests.conftest import make_recipe, save_tiny
    from toolchain.export.stage import export_checkpoint
    from toolchain.quantize.stage import quantize_artifact
    from toolchain.runners.open import fake_quant_runner, open_runner

    model = save_tiny(tmp_path / "model")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 40
            layer.post_attention_layernorm.weight[7] *= 40
    model.save_pretrained(tmp_path / "model")
    export_checkpoint(tmp_path / "model", make_recipe(), tmp_path / "onnx", report=lambda _: None)
    ids, lengths = random_ids(5, 2, 40), [40, 40]
    plain, errors = logits_of(open_runner(tmp_path / "onnx"), ids, lengths), {}
    static = {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"}}
    for alpha in ("search", 0.0, 1.0):
        recipe = make_recipe(**static, smoothing={"algorithm": "smoothquant", "alpha": alpha})
        artifact = quantize_artifact(tmp_path / "onnx", recipe, tmp_path / str(alpha), report=lambda _: None)
        errors[alpha] = float(abs(logits_of(fake_quant_runner(artifact.path), ids, lengths) - plain).mean())
        rows = {row["matrix"]: row for row in artifact.json("quantization.json")["matrices"]}
        found = rows["model.layers.0.self_attn.qkv_proj"]["smoothing_alpha"]
        assert found == alpha if alpha != "search" else 0 < found < 1
        assert artifact.json("quantization.json")["identity_error"] < 1e-4
    assert errors["search"] < min(errors[0.0], errors[1.0]), errors
