"""Static scales of a cache: what the histogram remembers, and the clips that are made of it."""

from itertools import pairwise

import pytest
import torch

from tests.conftest import make_recipe, random_ids, seal
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.model.load import load_artifact_decoder
from toolchain.numerics import dequantize, quantize
from toolchain.quantize.cache_scales import BINS, CacheSeen, cache_scale
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe_sections import KVCache
from toolchain.tensor_file import read_header, read_tensor

QMAX = {"int8": 127.0, "fp8_e4m3": 448.0}


def heavy(seed=0, batch=3, heads=2, tokens=400, dim=8):
    """Values with long tails [B, K, T, D]; the second head is ten times smaller, its first channel lies off zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, tokens, dim, generator=generator)
    x = x * torch.randn(x.shape, generator=generator).abs().pow(3)
    x[:, 1] /= 10
    x[:, 1, :, 0] += 1.5
    return x


def seen_of(*batches):
    seen = CacheSeen.nothing(*batches[0].shape[1::2], histogram=True)
    for x in batches:
        seen.add(x)
    return seen


def sizes(x, head=None):
    return (x if head is None else x[:, head]).abs().flatten()


@pytest.mark.parametrize("fmt", QMAX)
@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9])
def test_a_percentile_is_that_of_all_sizes_of_a_head(percentile, fmt):
    x = heavy()
    asked = KVCache(format=fmt, scale="percentile", percentile=percentile)
    for k, scale in enumerate(cache_scale(seen_of(x), asked)):
        true = float(torch.quantile(sizes(x, k), percentile / 100))
        assert float(scale * QMAX[fmt]) == pytest.approx(true, rel=0.02, abs=float(sizes(x, k).max()) / 2000)
    one = cache_scale(seen_of(x), asked.model_copy(update={"granularity": "tensor"}))
    assert one.shape == (2,)
    assert float(one[0]) == float(one[1])
    true = float(torch.quantile(sizes(x), percentile / 100))
    assert float(one[0] * QMAX[fmt]) == pytest.approx(true, rel=0.02, abs=float(x.abs().max()) / 2000)


def test_the_hundredth_percentile_is_the_largest():
    x = heavy()
    asked = KVCache(format="int8", scale="percentile", percentile=100.0), KVCache(format="int8")
    assert torch.equal(*(cache_scale(seen_of(x), kv_cache) for kv_cache in asked))


def squared_error(x, scale, fmt):
    return float((dequantize(quantize(x, scale, fmt), scale) - x).square().double().sum())


@pytest.mark.parametrize("granularity", ["head", "tensor"])
@pytest.mark.parametrize("fmt", QMAX)
def test_mse_finds_the_clip_that_a_search_over_the_values_finds(fmt, granularity):
    x = heavy()
    found = cache_scale(seen_of(x), KVCache(format=fmt, scale="mse", granularity=granularity))
    for k, scale in enumerate(found):
        part = x if granularity == "tensor" else x[:, k]
        tried = part.abs().max() / QMAX[fmt] * torch.linspace(0.1, 1.0, 181)
        errors = [squared_error(part, clip, fmt) for clip in tried]
        assert squared_error(part, scale, fmt) <= 1.02 * min(errors)
        if fmt == "int8":
            assert squared_error(part, scale, fmt) < 0.96 * errors[-1]  # the largest value is not the best clip


def test_counts_depend_neither_on_the_order_nor_on_the_batches():
    x = heavy(batch=4) * torch.tensor([1e-3, 1.0, 40.0, 7.0])[:, None, None, None]  # ranges grow on the way
    x[0] = 0
    whole = seen_of(x)
    counts_KDN = whole.counts_KDN
    assert counts_KDN is not None
    for order in ([0, 1, 2, 3], [2, 3, 1, 0], [3, 0, 2, 1]):
        parts = seen_of(*(x[i : i + 1] for i in order))
        assert parts.counts_KDN is not None
        assert torch.equal(parts.counts_KDN, counts_KDN)
        assert torch.equal(parts.amax_KD, whole.amax_KD)
    assert counts_KDN.shape == (2, 8, BINS)  # whatever the length
    assert int(counts_KDN.sum()) == x.numel()


def test_what_is_shifted_and_divided_is_as_if_the_values_had_been():
    x, generator = heavy(), torch.Generator().manual_seed(1)
    offset, factor = torch.randn(2, 8, generator=generator), torch.rand(2, 8, generator=generator) + 0.2
    changed = seen_of((x - offset[:, None]) / factor[:, None])
    ours = seen_of(x)
    ours.shift(offset)
    ours.divide(factor)
    torch.testing.assert_close(ours.amax_KD, changed.amax_KD)
    for asked in (KVCache(format="int8", scale="percentile"), KVCache(format="int8", scale="mse")):
        one, two = (cache_scale(seen, asked) for seen in (ours, changed))
        torch.testing.assert_close(one, two, rtol=0.02, atol=0)
    assert not torch.allclose(seen_of(x).amax_KD, changed.amax_KD, rtol=0.1)


@pytest.mark.parametrize("how", ["amax", "percentile", "mse"])
def test_zeros_get_a_positive_scale_and_what_is_not_finite_none(how):
    kv_cache = KVCache(format="int8", scale=how)
    x = heavy()
    x[:, 0] = 0
    scale = cache_scale(seen_of(x), kv_cache)
    assert bool((scale > 0).all())
    assert float(scale[0]) < 1e-20
    for bad in (float("nan"), float("inf"), float("-inf")):
        broken = x.clone()
        broken[1, 1, 3, 2] = bad
        with pytest.raises(ValueError, match="inf or NaN"):
            cache_scale(seen_of(x, broken, x), kv_cache)


# ---- artifacts ----


def kept_scales(artifact):
    entries = read_header(artifact.file("weights.safetensors"))
    return {n: read_tensor(e) for n, e in entries.items() if n.endswith(("k_scale", "v_scale"))}


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("fmt", QMAX)
def test_the_artifact_has_the_scales_of_the_method(fmt, exported, tmp_path):
    """By layer, and for K and V apart: those of the float model's own keys and values."""
    decoder = load_artifact_decoder(open_artifact(exported))
    caches = decoder.new_caches(4, 48)
    with torch.inference_mode():
        decoder(torch.from_numpy(random_ids(11, 4, 48)), torch.zeros(4, dtype=torch.int64), caches)
    found = {}
    for how in ({"scale": "amax"}, {"scale": "percentile", "percentile": 95.0}, {"scale": "mse"}):
        recipe = make_recipe(kv_cache={"format": fmt} | how, calibration={"batch": 3})
        artifact = quantize_artifact(exported, recipe, tmp_path / how["scale"], report=lambda _: None)
        found[how["scale"]] = kept_scales(artifact)
        for i, cache in enumerate(caches):
            for part, values in zip(("k_scale", "v_scale"), cache, strict=True):
                scale = found[how["scale"]][f"model.layers.{i}.self_attn.{part}"]
                torch.testing.assert_close(scale, cache_scale(seen_of(values), recipe.kv_cache), rtol=1e-3, atol=0)
        load_artifact_decoder(artifact)
    for name, amax in found["amax"].items():
        assert bool((found["percentile"][name] < 0.95 * amax).all())
        assert bool((found["mse"][name] <= amax).all())


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_stored_scale_that_is_none_is_refused_by_name(bad, exported, tmp_path):
    artifact = quantize_artifact(
        exported, make_recipe(kv_cache={"format": "int8"}), tmp_path / "q", report=lambda _: None
    )
    name = "model.layers.1.self_attn.v_scale"
    entry = read_header(artifact.file("weights.safetensors"))[name]
    with entry.path.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(torch.tensor([1.0, bad]).numpy().tobytes())
    with pytest.raises(DtoolError, match=f"{name} is no scale"):
        load_artifact_decoder(open_artifact(seal(artifact.path)))


def test_every_clip_is_tried_in_order():
    """The first of equals wins, so that nothing is clipped for nothing."""
    from toolchain.quantize.cache_scales import CLIPS

    assert float(CLIPS[0]) == 1.0
    assert all(a > b for a, b in pairwise(CLIPS.tolist()))
    x = torch.ones(1, 1, 8, 4)
    assert float(cache_scale(seen_of(x), KVCache(format="int8", scale="mse"))) == pytest.approx(1 / 127, rel=0.01)
