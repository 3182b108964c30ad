import pytest

from toolchain.errors import DtoolError
from toolchain.recipe import RECIPES_DIR, find_data, load_recipe, parse_recipe

RECIPES = sorted(p.stem for p in RECIPES_DIR.glob("*.toml"))
GOOD = {"schema_version": 1, "about": "x"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_in_the_folder_is_valid_and_names_no_model(name):
    recipe = load_recipe(name)
    assert recipe.about
    assert "smol" not in (RECIPES_DIR / f"{name}.toml").read_text().lower()


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"wieghts": {}}, ["wieghts", "weights"]),
        ({"weights": {"formt": "int8"}}, ["weights.formt", "format"]),
        ({"weights": {"format": "int3"}}, ["weights.format", "int3"]),
        ({"engine": {"batch": {"min": 4, "opt": 1, "max": 8}}}, ["engine.batch", "min <= opt <= max"]),
        ({"kv_cache": {"format": "int8", "granularity": "tokens"}}, ["kv_cache.granularity", "'token'"]),
        ({"kv_cache": {"format": "int4"}}, ["kv_cache.format", "int4"]),
        ({"kv_cache": {"skip": "model.layers.0.self_attn"}}, ["kv_cache.skip"]),
        ({"kv_cache": {"format": "int8", "scale": "max"}}, ["kv_cache.scale", "'percentile'"]),
        ({"kv_cache": {"scale": "percentile", "percentile": 0.0}}, ["kv_cache.percentile"]),
        ({"kv_cache": {"scale": "percentile", "percentile": 100.1}}, ["kv_cache.percentile"]),
        ({"kv_cache": {"scale": "percentile", "percentile": float("nan")}}, ["kv_cache.percentile"]),
        ({"kv_cache": {"scale": "mse", "percentile": 99.0}}, ["percentile does not go with scale mse"]),
        (
            {"kv_cache": {"format": "int8", "granularity": "token", "scale": "mse"}},
            ["scale mse is for static scales", 'granularity = "head"'],
        ),
        ({"smoothing": {"keys": True}}, ["smoothing.keys is for a quantized cache", "kv_cache.format"]),
        ({"smoothing": {"keys": "yes"}}, ["smoothing.keys"]),
        (
            {"weights": {"format": "int8", "algorithm": "stored"}, "kv_cache": {"format": "int8"}}
            | {"smoothing": {"keys": True}},
            ["smoothing.keys does not go with weights.algorithm stored"],
        ),
        ({"activations": {"format": "int8"}}, ["activations.format int8 needs weights.format int8"]),
        ({"schema_version": 2}, ["schema_version"]),
        ({"compute_dtype": "int8"}, ["compute_dtype"]),
        ({"parity": {"eager": {"kl_mean": float("nan")}}}, ["parity.eager.kl_mean"]),
        ({"parity": {"eager": {"kl_mean": -1.0}}}, ["parity.eager.kl_mean"]),
    ],
)
def test_mistakes_are_named_with_near_matches(change, texts):
    with pytest.raises(DtoolError) as failure:
        parse_recipe(GOOD | change, "mine.toml")
    for text in ["mine.toml", *texts]:
        assert text in str(failure.value)


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        ({"kv_cache": {"format": "int8"}}, True),
        ({"kv_cache": {"format": "int8", "granularity": "token"}}, False),
        ({"kv_cache": {"format": "fp8_e4m3", "granularity": "token"}, "weights": {"format": "int8"}}, False),
        ({"kv_cache": {"format": "int8", "granularity": "token"}, "smoothing": {"algorithm": "awq"}}, True),
        ({"kv_cache": {"format": "int8", "granularity": "token"}, "smoothing": {"keys": True}}, True),
        ({"kv_cache": {"granularity": "token"}}, False),
    ],
)
def test_scales_of_tokens_need_no_calibration(sections, needed):
    assert parse_recipe(GOOD | sections, "mine.toml").needs_calibration == needed


def test_set_overrides_values_and_creates_sections():
    recipe = load_recipe("fp32", ["weights.format=int8", "bench.prompt_lens=[8, 16]", "calibration.data=my text.jsonl"])
    assert recipe.weights.format == "int8"
    assert recipe.bench.prompt_lens == (8, 16)
    assert recipe.calibration.data == "my text.jsonl"


@pytest.mark.parametrize("override", ["weights.format", "compute_dtype.x=1", "weights.skpi=[]"])
def test_bad_overrides_are_refused(override):
    with pytest.raises(DtoolError):
        load_recipe("fp32", [override])


@pytest.mark.parametrize(
    "override",
    [
        "context_len=true", 'context_len="5"', "context_len=5.5", "engine.batch.max=true", "bench.prompt_lens=[true]",
        "calibration.samples=true", "engine.refit=1", 'engine.refit="yes"', 'parity.fake_quant.kl_mean="0.1"',
        "parity.fake_quant.kl_mean=true", "schema_version=true",
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_its_key(override):
    with pytest.raises(DtoolError, match=override.partition("=")[0].replace(".", r"\.")):
        load_recipe("fp32", [override])


def test_unknown_recipe_and_bad_toml_are_refused(tmp_path):
    with pytest.raises(DtoolError, match="int8"):
        load_recipe("int88")
    (tmp_path / "r.toml").write_text("a = ")
    with pytest.raises(DtoolError, match="not valid TOML"):
        load_recipe(str(tmp_path / "r.toml"))
    with pytest.raises(DtoolError, match="fetch calibration"):
        find_data("no/such/text.jsonl")


def test_a_change_of_gates_leaves_stage_sections_alone():
    one, two = load_recipe("int8"), load_recipe("int8", ["parity.eager.kl_mean=9.0"])
    assert all(one.sections(stage) == two.sections(stage) for stage in ("export", "quantize", "engine"))
