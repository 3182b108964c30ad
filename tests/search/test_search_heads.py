"""What a KV head's cache costs alone: the costly one is the worst, and nothing else is touched."""

import pytest
import torch

from tests.search.conftest import COSTLY
from tests.search.test_search_stage import search
from toolchain.artifact import open_artifact
from toolchain.model.load import load_artifact_decoder
from toolchain.numerics import dequantize, quantize, scale_from_amax
from toolchain.ops import attention as op
from toolchain.search.heads import attended, head_losses, spliced
from toolchain.search.sensitivity import FloatModel

HEADS, TOKENS = 2, 24


def float_model(export, granularity="token"):
    """The float model over seeded ids; with static scales, some that clip a little."""
    ids_BT = torch.randint(0, 256, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    model = FloatModel(load_artifact_decoder(open_artifact(export)), ids_BT, torch.float32, "int8")
    if granularity == "head":
        for layer in range(2):
            scale_K = scale_from_amax(torch.tensor([3.0, 5.0]), "int8")
            model.cache_scales[layer] = (scale_K, scale_K * 2)
    model.run()
    return model


@pytest.mark.parametrize("granularity", ["head", "token"])
def test_the_head_with_an_outlier_costs_most_and_heads_sum_to_their_layer(outlier_export, base, tmp_path, granularity):
    recipe = base(kv_cache={"format": "int8", "granularity": granularity})
    result = search(outlier_export, recipe, tmp_path / "mix.toml", "kl", 10.0, formats=("int8",), heads=True)
    costs = {(layer, head): kl for layer, losses in result.heads.items() for head, kl in enumerate(losses)}
    assert len(costs) == 2 * HEADS
    worst = costs.pop((COSTLY["layer"], COSTLY["head"]))
    assert worst > 10 * max(costs.values()) > 0
    for layer, losses in result.heads.items():
        assert sum(losses) == pytest.approx(result.problem.loss[f"layer {layer} cache"]["int8"], rel=0.5)


def test_only_open_layers_are_measured(text_export, base, tmp_path):
    recipe = base(kv_cache={"format": "int8", "skip": ["*.0.*"]})
    result = search(text_export, recipe, tmp_path / "mix.toml", "kl", 1.0, formats=("int8",), heads=True)
    assert list(result.heads) == [1]
    result = search(text_export, recipe, tmp_path / "again.toml", "kl", 1.0, formats=("int8",))
    assert result.heads is None


@pytest.mark.parametrize("granularity", ["head", "token"])
@torch.inference_mode()
def test_other_heads_are_untouched_bit_for_bit(text_export, granularity):
    model = float_model(text_export, granularity)
    plain_BTN = attended(model, 1)
    with model.quantized_cache(1):
        rounded_BTN = attended(model, 1)
    width = plain_BTN.shape[-1] // HEADS
    for head in range(HEADS):
        with spliced(model, 1, head, rounded_BTN):
            mixed = attended(model, 1).split(width, -1)
        for other in range(HEADS):
            same = (rounded_BTN if other == head else plain_BTN).split(width, -1)[other]
            assert torch.equal(mixed[other], same)
        assert not torch.equal(mixed[head], plain_BTN.split(width, -1)[head])
    assert torch.equal(attended(model, 1), plain_BTN)
    assert model.loss_from(0).kl == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("granularity", ["head", "token"])
def test_a_head_costs_what_it_costs_with_its_cache_alone_rounded_where_it_is_stored(
    text_export, granularity, monkeypatch
):
    """Against the op itself, told to round what it stores of one head and to store the rest as it is."""
    model = float_model(text_export, granularity)
    found = head_losses(model, [0, 1], lambda _: None)
    store, exact = op._store, FloatModel.layer
    rounding = {"layer": -1, "head": -1, "parts": 0}

    def store_one(cache_BKCD, x_BTKD, scale, *where):
        if rounding["parts"]:
            head, part = rounding["head"], 2 - rounding["parts"]  # K, then V
            rounding["parts"] -= 1
            x_BTD = x_BTKD[:, :, head]
            scales = model.cache_scales.get(rounding["layer"])
            amax = x_BTD.abs().amax(-1, keepdim=True)
            s = scales[part][head] if scales else scale_from_amax(amax, "int8")
            x_BTKD = x_BTKD.clone()
            x_BTKD[:, :, head] = dequantize(quantize(x_BTD, s, "int8"), s)
        return store(cache_BKCD, x_BTKD, scale, *where)

    def layer(self, index, x_BTE):
        rounding["parts"] = 2 if index == rounding["layer"] else 0
        return exact(self, index, x_BTE)

    monkeypatch.setattr(op, "_store", store_one)
    monkeypatch.setattr(FloatModel, "layer", layer)
    for at in range(2):
        for head in range(HEADS):
            rounding |= {"layer": at, "head": head}
            assert found[at][head] == pytest.approx(model.loss_from(at).kl, rel=1e-4)
            assert found[at][head] > 1e-6
