import re

import pytest

from toolchain.errors import DtoolError
from toolchain.recipe import RECIPES_DIR, find_data, load_recipe, parse_recipe
from toolchain.recipe_faults import OVERRIDES_SET

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
        (
            {"kv_cache": {"scale": "mse", "percentile": 99.0}},
            ["kv_cache.percentile", "99.0 with kv_cache.scale mse", "set kv_cache.scale to percentile"],
        ),
        (
            {"kv_cache": {"format": "int8", "granularity": "token", "scale": "mse"}},
            ["kv_cache.scale", "amax with kv_cache.granularity token", "mse", "kv_cache.granularity to head"],
        ),
        ({"smoothing": {"keys": True}}, ["smoothing.keys", "a quantized cache", "kv_cache.format none"]),
        ({"smoothing": {"keys": "yes"}}, ["smoothing.keys"]),
        (
            {"weights": {"format": "int8", "algorithm": "stored"}, "kv_cache": {"format": "int8"}}
            | {"smoothing": {"keys": True}},
            ["weights.algorithm", "other than stored with smoothing.keys"],
        ),
        (
            {"activations": {"format": "int8"}},
            ["activations.format", "with weights.format none", "set weights.format to int8 too"],
        ),
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


STATIC = {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"}}
LONG = "x" * 500
FAULTS = {
    "a string for a list": ({"weights": {"skip": "lm_head"}}, "weights.skip", 'set weights.skip to ["lm_head"]'),
    "a number in a list": ({"weights": {"skip": [1]}}, "weights.skip.0", "such a value"),
    "a string for a number": ({"calibration": {"samples": "5"}}, "calibration.samples", "such a value"),
    "a fraction": ({"calibration": {"samples": 1.5}}, "calibration.samples", "such a value"),
    "a number for true": ({"smoothing": {"keys": 1}}, "smoothing.keys", "such a value"),
    "a number for text": ({"about": 3}, "about", "such a value"),
    "a value for a section": ({"weights": "int8"}, "weights", "write [weights]"),
    "a section for a value": ({"weights": {"format": {"a": LONG}}}, "weights.format", "such a value"),
    "a section for a list": ({"overrides": {"match": [LONG]}}, "overrides", "[[overrides]], in double brackets"),
    "an empty text for a list": ({"weights": {"skip": ""}}, "weights.skip", "set weights.skip to []"),
    "two names for a list": ({"weights": {"skip": "a, b"}}, "weights.skip", 'set weights.skip to ["a", "b"]'),
    "a list without quotes": ({"weights": {"skip": "[a]"}}, "weights.skip", 'set weights.skip to ["a"]'),
    "a place without a list": ({"weights": {"skip": {"0": "a"}}}, "weights.skip", 'set weights.skip to ["a"]'),
    "a number for a list": ({"bench": {"prompt_lens": 16}}, "bench.prompt_lens", "set bench.prompt_lens to [16]"),
    "numbers for a list": ({"bench": {"prompt_lens": "8,16"}}, "bench.prompt_lens", "bench.prompt_lens to [8, 16]"),
    "no number for a list": ({"bench": {"prompt_lens": ""}}, "bench.prompt_lens", "to such a list"),
    "another word": ({"weights": {"format": LONG}}, "weights.format", "such a value"),
    "out of range": ({"kv_cache": {"percentile": 200.0}}, "kv_cache.percentile", "such a value"),
    "not finite": ({"parity": {"eager": {"kl_mean": float("inf")}}}, "parity.eager.kl_mean", "such a value"),
    "an unknown key": ({"calibration": {"smaples": 5}}, "calibration.smaples", "did you mean samples?"),
    "an unknown section": ({"kv_cahce": {"a": LONG}}, "kv_cahce", "did you mean kv_cache?"),
    "an unknown key of an override": (
        {"overrides": [{"match": ["*"], "weights": {"formt": LONG}}]},
        "overrides.0.weights.formt",
        "did you mean format?",
    ),
    "a missing key": ({"overrides": [{"weights": {"clip": "amax"}}]}, "overrides.0.match", "add overrides.0.match"),
    "another word in an override": (
        {"overrides": [{"match": ["*"], "weights": {"clip": "amx"}}]},
        "overrides.0.weights.clip",
        "such a value",
    ),
    "a misfit in an override": (
        {"overrides": [{"match": ["*"], "weights": {"format": "int4", "granularity": "tensor"}}]},
        "overrides.0.weights.granularity",
        "set overrides.0.weights.granularity to group",
    ),
    "two sides": (STATIC | {"weights": {"format": "fp8_e4m3"}}, "activations.format", "weights.format to int8 too"),
    "two sides of an override": (
        STATIC | {"overrides": [{"match": [LONG], "weights": {"format": "fp8_e4m3"}}]},
        "overrides.0.activations.format",
        "overrides.0.activations.format to none",
    ),
    "an alpha": ({"smoothing": {"alpha": "serach"}}, "smoothing.alpha", "0.5"),
    "alpha without algorithm": ({"smoothing": {"alpha": "search"}}, "smoothing.alpha", "set smoothing.algorithm to"),
    "groups": ({"weights": {"format": "int8", "granularity": "group"}}, "weights.granularity", "channel or tensor"),
    "stored and clipped": ({"weights": {"algorithm": "stored", "clip": "search"}}, "weights.clip", "clip to amax"),
    "stored and rotated": (
        {"weights": {"format": "int8", "algorithm": "stored"}, "rotation": {"stream": True}},
        "weights.algorithm",
        "leave out a rotation",
    ),
    "excess": ({"activations": {"excess_channels": 8}}, "activations.excess_channels", "excess_channels to 0"),
    "a range": ({"engine": {"batch": {"min": 3}}}, "engine.batch", "in this order"),
    "a budget": ({"engine": {"weight_streaming_budget_mb": 5}}, "engine.weight_streaming_budget_mb", "or leave"),
}


@pytest.mark.parametrize(("change", "key", "fix"), FAULTS.values(), ids=FAULTS)
def test_every_fault_is_short_and_says_key_expected_found_and_fix(change, key, fix):
    with pytest.raises(DtoolError) as failure:
        parse_recipe(GOOD | change, "mine.toml")
    error = failure.value
    assert error.problem == f"mine.toml is not a valid recipe: {key}"
    assert error.expected
    assert error.found
    assert fix in error.fix
    said = str(error).replace(OVERRIDES_SET, "")
    assert len(said) < 400
    assert not [word for word in ("pydantic", "alidation error", "Value error", "tuple", "Input", "{") if word in said]


def test_several_faults_are_told_at_once_each_by_its_key():
    sections = {"weights": {"format": "int9"}, "calibration": {"samples": 0}}
    with pytest.raises(DtoolError) as failure:
        parse_recipe({"schema_version": 1} | sections, "mine.toml")
    assert failure.value.problem.endswith(": about, weights.format, calibration.samples")
    assert failure.value.found.split("\n")[1] == "weights.format: 'int9'"


def test_overrides_that_do_not_go_together_are_refused_where_they_meet():
    fp8 = {"match": ["*.mlp.*"], "weights": {"format": "fp8_e4m3"}, "activations": {"format": "none"}}
    for second, key in (
        ({"match": ["*"], "activations": {"format": "int8"}}, "overrides.1.activations.format"),
        ({"match": ["*.down_proj"], "activations": {"excess_channels": 2}}, "overrides.1.activations.excess_channels"),
    ):
        recipe = parse_recipe(GOOD | STATIC | {"overrides": [fp8, second]}, "mine.toml")
        assert recipe.of_matrix("model.layers.0.self_attn.o_proj")[0].format == "int8"
        with pytest.raises(DtoolError) as failure:
            recipe.of_matrix("model.layers.0.mlp.down_proj")
        assert key in failure.value.problem
        assert "model.layers.0.mlp.down_proj" in failure.value.problem
        assert re.search(rf"or {re.escape(key)} to (none|0)$", failure.value.fix)
        assert "overrides.0." in failure.value.found


FP8 = {"match": ["*"], "activations": {"format": "fp8_e4m3"}}
GROUPS = {"match": ["*"], "weights": {"format": "int4", "granularity": "channel"}}
CLIPPED = {"format": "int8", "clip": "search"}
STORED = {"match": ["*"], "weights": {"algorithm": "stored"}}


@pytest.mark.parametrize(
    ("change", "override", "key", "found", "fix"),
    [
        ({}, FP8, "activations.format", "overrides.0.activations.format fp8_e4m3 with weights.format int8",
         "set overrides.0.weights.format to fp8_e4m3 too, or overrides.0.activations.format to none"),
        ({}, GROUPS, "weights.granularity", "overrides.0.weights.granularity channel",
         "set overrides.0.weights.granularity to group, or overrides.0.weights.format to another"),
        ({"weights": CLIPPED}, STORED, "weights.clip", "weights.clip search",
         "set overrides.0.weights.clip to amax, or overrides.0.weights.algorithm to rtn or gptq"),
        ({}, STORED, "weights.algorithm", "stored",
         "set overrides.0.weights.algorithm to rtn or gptq, or leave out overrides.0.weights"),
    ],
)  # fmt: skip
def test_a_fault_of_an_override_names_keys_where_they_were_said_and_where_they_can_be_set(
    change, override, key, found, fix
):
    with pytest.raises(DtoolError) as failure:
        parse_recipe(GOOD | {"weights": {"format": "int8"}, "overrides": [override]} | change, "mine.toml")
    error = failure.value
    assert error.problem.endswith(f"recipe: overrides.0.{key}")
    assert (error.found, error.fix) == (found, fix)


def test_what_a_user_wrote_is_no_key_however_it_looks():
    with pytest.raises(DtoolError) as failure:
        parse_recipe(GOOD | {"smoothing": {"alpha": "a .format b"}}, "mine.toml")
    assert failure.value.found == "'a .format b'"


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_of_a_recipe_in_the_folder_is_idle(name):
    assert load_recipe(name).idle(["export", "quantize", "engine"]) == []


CACHE = "kv_cache.granularity does nothing with kv_cache.format none"
TEXT = "calibration.data, calibration.samples, calibration.seq_len do nothing where nothing is measured on text"


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("int8", ["kv_cache.format=none"], [CACHE, TEXT]),
        ("int8", ["kv_cache.format=none", "weights.format=none"],
         ["weights.granularity, weights.algorithm do nothing with weights.format none", CACHE, TEXT]),
        ("int8", ["kv_cache.percentile=99.9"], ["kv_cache.percentile does nothing with kv_cache.scale amax"]),
        ("fp32", ["kv_cache.scale=mse", 'kv_cache.skip=["*"]'],
         ["kv_cache.scale, kv_cache.skip do nothing with kv_cache.format none"]),
        ("fp32", ["kv_cache.skip=[]", "activations.center=false", "weights.skip=[]", "calibration.chat=false"], []),
        ("int8", ["weights.refinements=3", "weights.group_size=64"],
         ["weights.group_size does nothing with weights.format int8",
          "weights.refinements does nothing with weights.algorithm rtn"]),
        ("int4-rtx", ["weights.refinements=3", "weights.algorithm=gptq", "weights.group_size=64"], []),
        ("int8", ["smoothing.alpha=0.3"], ["smoothing.alpha does nothing with smoothing.algorithm none"]),
        ("int8", ["smoothing.alpha=0.3", "smoothing.algorithm=awq"], []),
        ("int8-rtx", ["activations.format=none"],
         ["activations.granularity does nothing with activations.format none"]),
        ("int8", ["weights.format=none", "weights.algorithm=stored"],
         ["weights.granularity does nothing with weights.format none"]),
        ("fp32", ["rotation.stream=true"], ["rotation.stream does nothing where nothing is quantized"]),
        ("int8", ["weights.format=none", "weights.granularity=channel", "smoothing.algorithm=awq"],
         ["weights.granularity, weights.algorithm do nothing with weights.format none"]),
        ("fp32", ["smoothing.algorithm=awq"], ["smoothing.algorithm does nothing where nothing is quantized"]),
        ("int8-rtx", ["engine.backend=onnxruntime"],
         ["engine.targets, engine.attention, engine.layout do nothing with engine.backend onnxruntime"]),
        ("fp16-rtx", ["engine.timing_cache=true"],
         ["engine.timing_cache does nothing with engine.backend tensorrt-rtx"]),
    ],
)  # fmt: skip
def test_what_was_set_and_does_nothing_is_told(name, changes, told):
    assert load_recipe(name, changes).idle(["quantize", "engine"]) == told


OVERRIDE = {"match": ["*.mlp.*"]}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([{"weights": {"algorithm": "gptq"}}], ["weights.group_size"]),
        ([{"weights": {"format": "int4"}}], ["weights.refinements"]),
        ([{"weights": {"format": "int4"}}, {"weights": {"algorithm": "gptq"}}], []),
        ([{"weights": {"format": "none", "clip": "search", "granularity": "channel"}}],
         ["weights.group_size", "weights.refinements", "overrides.0.weights.clip"]),
        ([{"weights": {"clip": "search"}}, {"weights": {"format": "none"}}],
         ["weights.group_size", "weights.refinements"]),
        ([{"activations": {"granularity": "tensor"}}],
         ["weights.group_size", "weights.refinements", "overrides.0.activations.granularity"]),
    ],
)  # fmt: skip
def test_what_an_override_has_a_use_for_is_not_idle(overrides, told):
    weights = {"format": "int8", "group_size": 64, "refinements": 3}
    document = GOOD | {"weights": weights, "overrides": [OVERRIDE | override for override in overrides]}
    found = parse_recipe(document, "mine.toml").idle(["quantize"])
    assert [line.partition(" ")[0] for line in found] == told


def test_what_a_search_may_try_is_not_idle():
    changes = [
        "weights.group_size=32",
        "weights.clip=search",
        "activations.granularity=tensor",
        "calibration.samples=4",
    ]
    recipe = load_recipe("fp32", changes)
    assert recipe.idle(["quantize"], ["int8:int8", "int4"]) == []
    assert [line.partition(" ")[0] for line in recipe.idle(["quantize"], ["int8"])] == [
        "weights.group_size", "activations.granularity"
    ]  # fmt: skip


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


@pytest.mark.parametrize(("written", "value"), [("0", 0.0), ("1", 1.0), ("0.3", 0.3), ("search", "search")])
def test_an_alpha_is_a_float_or_search_and_is_written_without_a_warning(written, value):
    recipe = load_recipe("int8", ["smoothing.algorithm=awq", f"smoothing.alpha={written}"])
    for mode in ("python", "json"):
        alpha = recipe.model_dump(mode=mode)["smoothing"]["alpha"]
        assert (alpha, type(alpha)) == (value, type(value))


def test_a_byte_order_mark_is_no_fault_and_another_encoding_is_told(tmp_path):
    text = 'schema_version = 1\nabout = "é"\n'
    path = tmp_path / "r.toml"
    path.write_text(text, "utf-8-sig")
    assert load_recipe(str(path)).about == "é"
    path.write_text(text, "latin-1")
    with pytest.raises(DtoolError, match="is not text in UTF-8") as failure:
        load_recipe(str(path))
    assert "0xe9" in failure.value.found
    assert "encoding UTF-8" in failure.value.fix


@pytest.mark.parametrize(("section", "override"), [("rtn", "stored"), ("stored", "rtn")])
def test_stored_is_for_all_matrices_or_none(section, override):
    sections = {
        "weights": {"format": "int8", "algorithm": section},
        "overrides": [{"match": ["*"], "weights": {"algorithm": override}}],
    }
    with pytest.raises(DtoolError) as failure:
        parse_recipe(GOOD | sections, "mine.toml")
    assert failure.value.expected == "no overrides.0.weights beside stored, which goes for all matrices or for none"


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


@pytest.mark.parametrize("name", ["int8-rtx", "int8"])
def test_prompts_that_nobody_set_are_as_long_as_the_cache_allows(name):
    lengths = load_recipe(name, ["engine.kv_capacity=256"]).engine.prompt_len
    assert (lengths.min, lengths.opt, lengths.max) == (1, 256, 256)
    assert load_recipe(name, ["engine.kv_capacity=4096"]).engine.prompt_len == load_recipe("int8-rtx").engine.prompt_len
    own = load_recipe(name, ["engine.kv_capacity=256", "engine.prompt_len={min=1, opt=8, max=512}"]).engine.prompt_len
    with pytest.raises(DtoolError, match="engine"):
        parse_recipe({"schema_version": 1, "about": "no section", "engine": 5}, "test")
    assert own.max == 512  # refused where the engine is built, with what to do
