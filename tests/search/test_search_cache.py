"""A layer's cache as a choice: which stay in float, what is written, and what they weigh."""

import pytest

from tests.search.conftest import COSTLY
from tests.search.test_search_stage import quiet, search
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe import load_recipe
from toolchain.tensor_file import read_header

INT8 = {"format": "int8"}
LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]


def caches(mix):
    return {unit: fmt for unit, fmt in mix.items() if unit.endswith("cache")}


@pytest.mark.parametrize(
    "sections",
    [
        {"kv_cache": INT8},
        {"kv_cache": INT8 | {"granularity": "token"}},
        {"kv_cache": INT8 | {"granularity": "tensor", "scale": "mse"}},
        {"kv_cache": INT8, "smoothing": {"keys": True}},
        {"kv_cache": INT8 | {"skip": [LAYERS[0]]}, "activations": {"format": "int8", "granularity": "tensor"}},
        {"kv_cache": INT8, "weights": {"format": "none"}},
        {"kv_cache": INT8 | {"granularity": "token"}, "weights": {"format": "none"}},
        {"kv_cache": INT8, "weights": {"format": "none"}, "smoothing": {"keys": True}},
    ],
    ids=[
        *("head", "token", "tensor", "smoothed keys", "one skipped, static inputs"),
        *("float weights, head", "float weights, token", "float weights, smoothed keys"),
    ],
)
@pytest.mark.parametrize("most", [0.02, 0.004])
def test_every_kind_of_cache_is_a_choice(text_export, base, tmp_path, sections, most):
    result = search(text_export, base(**sections), tmp_path / "mix.toml", "kl", most, formats=("int8", "none"))
    assert result.passed
    best, written = result.best, load_recipe(str(tmp_path / "mix.toml"))
    made = quantize_artifact(text_export, written, tmp_path / "made", report=quiet)
    weights = sum(entry.length for entry in read_header(made.file("weights.safetensors")).values())
    assert weights == best.bytes - best.cache_bytes
    assert best.bytes == result.problem.bytes_of(best.mix)
    assert best.estimated_kl == pytest.approx(best.kl, rel=1.0)


@pytest.mark.parametrize(("granularity", "scales"), [("head", 0), ("token", 4)])
def test_a_cache_counts_for_one_full_sequence_with_the_scales_of_its_tokens(
    text_export, base, tmp_path, granularity, scales
):
    recipe = base(kv_cache=INT8 | {"granularity": granularity})
    result = search(text_export, recipe, tmp_path / "mix.toml", "kl", 10.0, formats=("int8",))
    heads, dim, tokens = 2, 16, 64
    static = 0 if scales else 2 * heads * 4  # those lie with the weights
    assert result.problem.bytes["layer 1 cache"] == {
        "int8": 2 * heads * (dim + scales) * tokens + static,
        "none": 2 * heads * dim * 4 * tokens,
    }
    assert result.best.cache_bytes == 2 * 2 * heads * (dim + scales) * tokens


def test_a_costly_cache_stays_in_float_in_the_written_recipe_and_in_what_is_made_of_it(outlier_export, base, tmp_path):
    recipe = base(kv_cache=INT8)
    result = search(outlier_export, recipe, tmp_path / "mix.toml", "kl", 0.05, formats=("int8",))
    assert result.passed
    assert caches(result.best.mix) == {"layer 0 cache": "int8", "layer 1 cache": "none"}
    costs = result.problem.loss
    assert costs["layer 1 cache"]["int8"] > 10 * costs["layer 0 cache"]["int8"] > 0
    written = load_recipe(str(tmp_path / "mix.toml"))
    assert written.kv_cache.skip == (LAYERS[COSTLY["layer"]],)
    made = quantize_artifact(outlier_export, written, tmp_path / "made", report=quiet)
    assert made.manifest.kv_contract["dtype"] == "int8"
    assert made.manifest.kv_contract["not_quantized"] == {"dtype": "float32", "layers": [COSTLY["layer"]]}
    assert result.best.cache_bytes == (1 + 4) * 2 * 2 * 16 * 64


@pytest.mark.parametrize("smoothing", [{}, {"keys": True}])
def test_caches_that_all_stay_in_float_are_no_quantized_cache(text_export, base, tmp_path, smoothing):
    recipe = base(kv_cache=INT8, smoothing=smoothing)
    assert search(text_export, recipe, tmp_path / "mix.toml", "kl", 1e-6, formats=("none",)).passed
    written = load_recipe(str(tmp_path / "mix.toml"))
    assert written.kv_cache.format == "none"
    assert not written.smoothing.keys
    assert written.about == "Formats mixed by dtool search from a recipe, asked for at most 1e-06 nats of KL"


def test_what_the_base_recipe_skips_stays_skipped(text_export, base, tmp_path):
    recipe = base(kv_cache=INT8 | {"skip": ["*.0.*"]})
    result = search(text_export, recipe, tmp_path / "mix.toml", "kl", 0.1, formats=("int8",))
    assert caches(result.best.mix) == {"layer 1 cache": "int8"}
    assert load_recipe(str(tmp_path / "mix.toml")).kv_cache == recipe.kv_cache


def test_caches_can_be_all_there_is_to_choose(text_export, base, tmp_path):
    recipe = base(kv_cache=INT8, weights={"format": "int8", "skip": ["*"]})
    result = search(text_export, recipe, tmp_path / "mix.toml", "kl", 0.1, formats=("none",))
    assert result.best.mix == {"layer 0 cache": "int8", "layer 1 cache": "int8"}
    assert result.best.bytes == result.problem.bytes_of(result.best.mix)


def test_megabytes_are_those_of_weights_and_cache(text_export, base, tmp_path):
    recipe = base(kv_cache=INT8)
    small = search(text_export, recipe, tmp_path / "small.toml", "kl", 10.0, formats=("int8",)).best
    assert set(caches(small.mix).values()) == {"int8"}
    between = (small.bytes + 2 * 2 * 16 * 64 * 3) / 1e6  # room for the cache of one layer in float, no more
    best = search(text_export, recipe, tmp_path / "mix.toml", "mb", between, formats=("int8",)).best
    assert sorted(caches(best.mix).values()) == ["int8", "none"]
    assert small.bytes < best.bytes <= between * 1e6
