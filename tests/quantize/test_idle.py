"""Settings that no matrix of the model uses are told, and no others."""

import pytest

from tests.conftest import make_recipe
from toolchain.artifact import open_artifact
from toolchain.model.config import DecoderConfig, Layer
from toolchain.quantize.idle import all_notes, idle_notes
from toolchain.quantize.job import plan_recipe
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe import RECIPES_DIR, load_recipe

INT8 = {"format": "int8"}
SKIPPED = "where weights.skip (by default lm_head and model.embed_tokens) leaves matrices in float"
SKIP = "where weights.skip leaves matrices in float"
UNSEEN = "for the head, the embedding and experts, whose inputs are not seen"
TEXT = "where nothing is measured on text"
LAYERS = ["model.layers.*"]
MLP = {"match": ["*.mlp.*"]}
CACHE = {"kv_cache": {"format": "int8", "granularity": "token"}}


def config_of(exported, **changes):
    return DecoderConfig.model_validate(open_artifact(exported).json("decoder.json")).model_copy(update=changes)


def notes_of(config, *, calibrates=True, **sections):
    recipe = make_recipe(**sections)
    plan, _ = plan_recipe(config, recipe, "float32")
    return list(idle_notes(config, recipe, plan, calibrates=calibrates))


STATIC = {"format": "int8", "granularity": "tensor", "excess_channels": 2}
CASES = {
    "an override covered by a later one": (
        {
            "weights": INT8,
            "overrides": [MLP | {"weights": {"format": "int4", "clip": "search"}}, MLP | {"weights": INT8}],
        },
        ["overrides.0.weights.format does nothing beside overrides.1"],
    ),
    "covered in part": (
        {
            "weights": INT8,
            "overrides": [MLP | {"weights": {"clip": "search"}}, {"match": ["*down*"], "weights": {"clip": "amax"}}],
        },
        [],
    ),
    "a section covered by overrides": (
        {
            "weights": {"format": "int8", "clip": "search"},
            "overrides": [{"match": ["*"], "weights": {"format": "int8", "clip": "amax"}}],
        },
        [f"weights.format, weights.clip do nothing {SKIPPED}, and beside overrides.0"],
    ),
    "an override of what is skipped": (
        {"weights": INT8, "overrides": [{"match": ["lm_head"], "weights": {"format": "int4", "group_size": 32}}]},
        [f"overrides.0.weights.format, overrides.0.weights.group_size do nothing {SKIPPED}"],
    ),
    "a pattern of what is skipped": (
        {"weights": INT8, "overrides": [{"match": ["lm_head", "*.mlp.*"], "weights": {"format": "int4"}}]},
        [f"overrides.0.match 'lm_head' does nothing {SKIPPED}"],
    ),
    "all skipped": (
        CACHE
        | {
            "weights": INT8 | {"granularity": "tensor", "skip": ["*"]},
            "activations": {"format": "int8", "center": True},
            "smoothing": {"algorithm": "smoothquant", "alpha": 0.4},
            "calibration": {"inputs": "quantized"},
            "rotation": {"stream": True, "values": True, "feed_forward": True},
        },
        [
            f"weights.format, weights.granularity do nothing {SKIP}",
            f"activations.format, activations.center do nothing {SKIP}",
            "rotation.stream does nothing for rounding: no matrix of a layer is quantized",
            "rotation.feed_forward does nothing for rounding: no mlp.down_proj is quantized",
            "calibration.inputs does nothing where no matrix of a layer is quantized",
        ],
    ),
    "all inputs skipped": (
        {"weights": INT8, "activations": STATIC | {"skip": ["*"]}},
        [
            (
                "activations.format, activations.granularity, activations.excess_channels do nothing "
                f"{SKIPPED}, and where activations.skip leaves inputs in float"
            )
        ],
    ),
    "an excess where there is none": (
        {
            "weights": INT8,
            "activations": STATIC | {"excess_channels": 0},
            "overrides": [{"match": ["*qkv*"], "activations": {"excess_channels": 2}}],
        },
        ["overrides.0.activations.excess_channels does nothing elsewhere than at mlp.down_proj"],
    ),
    "an excess without static scales": (
        {
            "weights": INT8,
            "activations": STATIC,
            "overrides": [{"match": ["*down*"], "activations": {"granularity": "token"}}],
        },
        [
            (
                f"activations.excess_channels does nothing {SKIPPED}, and elsewhere than at mlp.down_proj, "
                "and with inputs of format int8, granularity token"
            )
        ],
    ),
    "GPTQ of head and embedding": (
        {
            "weights": INT8 | {"algorithm": "gptq", "clip": "search", "refinements": 3, "skip": LAYERS},
            "kv_cache": INT8,
            "smoothing": {"algorithm": "awq"},
        },
        [f"weights.algorithm, weights.refinements do nothing {UNSEEN}, and {SKIP}"],
    ),
    "smoothing of head and embedding": (
        {"weights": INT8 | {"skip": LAYERS}, "smoothing": {"algorithm": "awq", "alpha": 0.3}},
        ["smoothing.algorithm, smoothing.alpha do nothing for rounding: no matrix of a layer is quantized"],
    ),
    "a search with one scale": (
        {"weights": INT8 | {"granularity": "tensor", "clip": "search", "skip": []}},
        ["weights.clip does nothing with weights.granularity tensor"],
    ),
    "a granularity that int4 has not": (
        {
            "weights": INT8 | {"granularity": "tensor"},
            "overrides": [{"match": ["*"], "weights": {"format": "int4"}}],
        },
        [
            f"weights.format does nothing {SKIPPED}, and beside overrides.0",
            f"weights.granularity does nothing {SKIPPED}, and with weights.format int4",
        ],
    ),
    "int4 whose granularity nobody said": (
        CACHE | {"weights": {"format": "int4", "skip": ["*"]}},
        [f"weights.format does nothing {SKIP}"],
    ),
    "a pattern with a format none that holds": (
        {
            "weights": INT8 | {"skip": []},
            "activations": INT8 | {"skip": []},
            "overrides": [
                {
                    "match": ["model.layers.0.*", "lm_head"],
                    "weights": {"algorithm": "gptq"},
                    "activations": {"format": "none"},
                }
            ],
        },
        [],
    ),
    "inputs of the head, which nobody skipped": (
        {
            "weights": INT8 | {"skip": []},
            "overrides": [{"match": ["lm_head"], "activations": {"format": "int8"}}],
        },
        [
            (
                "overrides.0.activations.format does nothing "
                "where activations.skip (by default lm_head) leaves inputs in float"
            )
        ],
    ),
    "many reasons": (
        {
            "weights": INT8 | {"algorithm": "gptq", "skip": ["lm_head"]},
            "overrides": [
                {"match": [f"*.{name}"], "weights": {"algorithm": "rtn"}}
                for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
            ],
        },
        [
            (
                f"weights.algorithm does nothing {UNSEEN}, and {SKIP}, "
                "and beside overrides.0, overrides.1, overrides.2, overrides.3"
            )
        ],
    ),
    "values that nothing quantized takes": (
        {"weights": INT8 | {"skip": ["*self_attn*"]}, "rotation": {"values": True, "stream": True}},
        ["rotation.values does nothing for rounding: neither qkv_proj nor o_proj nor a cache is quantized"],
    ),
    "values of a cache": (
        CACHE | {"weights": INT8 | {"skip": ["*self_attn*"]}, "rotation": {"values": True}},
        [],
    ),
    "values of one product": (
        {"weights": INT8 | {"skip": ["*o_proj"]}, "rotation": {"values": True}},
        [],
    ),
    "told by the sections alone": ({"weights": INT8 | {"group_size": 64, "refinements": 3}}, []),
    "what asks for nothing": (
        {
            "weights": INT8 | {"skip": []},
            "activations": {"format": "none", "excess_channels": 0, "center": False},
            "overrides": [{"match": ["*down*"], "weights": {"format": "none"}}],
        },
        [],
    ),
}


@pytest.mark.parametrize(("sections", "told"), CASES.values(), ids=CASES)
def test_what_no_matrix_uses_is_told(exported, sections, told):
    assert notes_of(config_of(exported), **sections) == told


@pytest.mark.parametrize("name", sorted(p.stem for p in RECIPES_DIR.glob("*.toml")))
def test_nothing_of_a_recipe_in_the_folder_is_idle(exported, exported_tied, name):
    recipe = load_recipe(name)
    for config in (config_of(exported), config_of(exported_tied)):
        plan, _ = plan_recipe(config, recipe, "float16")
        assert idle_notes(config, recipe, plan, calibrates=recipe.needs_calibration) == ()


def test_an_override_of_the_tied_head_is_told(exported_tied):
    overrides = [{"match": ["lm_head"], "weights": {"clip": "search"}, "activations": {"format": "none"}}]
    sections = {"weights": INT8 | {"skip": []}, "activations": INT8 | {"skip": []}, "overrides": overrides}
    expected = "overrides.0.weights.clip does nothing for lm_head, which is the tied model.embed_tokens"
    assert notes_of(config_of(exported_tied), **sections) == [expected]


def test_a_tied_head_is_no_reason_beside_those_of_its_matrix(exported_tied):
    overrides = [{"match": ["*"], "weights": {"algorithm": "rtn"}}]
    notes = notes_of(config_of(exported_tied), weights=INT8 | {"algorithm": "gptq", "skip": []}, overrides=overrides)
    assert notes == ["weights.algorithm does nothing beside overrides.0"]


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "layers": (Layer(experts=True),) * 2}
GPTQ = INT8 | {"algorithm": "gptq"}
EXPERTS = {"match": ["*.experts.*"]}
NEAREST = "whose inputs are not seen: rounded to the nearest"
FLOAT = "experts, whose inputs stay in float"


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"weights": GPTQ}, [f"no GPTQ for experts, {NEAREST}"]),
        ({"weights": GPTQ | {"skip": []}}, [f"no GPTQ for the head, the embedding, experts, {NEAREST}"]),
        ({"weights": GPTQ | {"skip": ["*.experts.*", "lm_head"]}}, [f"no GPTQ for the embedding, {NEAREST}"]),
        ({"weights": INT8, "overrides": [EXPERTS | {"weights": {"algorithm": "gptq"}}]},
         [f"overrides.0.weights.algorithm does nothing {UNSEEN}"]),
        ({"weights": INT8, "activations": INT8}, ["the inputs of experts stay in float; their weights are quantized"]),
        ({"weights": INT8, "overrides": [EXPERTS | {"activations": INT8}]},
         [f"overrides.0.activations.format does nothing for {FLOAT}"]),
        ({"weights": INT8, "activations": {"center": True}}, ["the inputs of experts are not centered"]),
    ],
)  # fmt: skip
def test_what_is_not_done_for_experts_and_the_ends_is_told_once(exported, sections, told):
    config = config_of(exported, **MOE)
    recipe = make_recipe(**sections)
    plan, _ = plan_recipe(config, recipe, "float32")
    assert list(all_notes(config, recipe, plan, calibrates=True)) == told


def test_what_experts_have_no_use_for_is_told(exported):
    config = config_of(exported, **MOE)
    overrides = [
        {"match": ["*.experts.*"], "weights": {"algorithm": "gptq"}, "activations": {"format": "int8", "center": True}}
    ]
    told = [
        f"overrides.0.weights.algorithm does nothing {UNSEEN}",
        "overrides.0.activations.format does nothing for experts, whose inputs stay in float",
        (
            "overrides.0.activations.center does nothing "
            "for the head, the embedding and experts, whose inputs are not centered"
        ),
    ]
    assert notes_of(config, weights=INT8, overrides=overrides) == told


def test_gptq_of_the_head_alone_reads_no_text_and_says_so(text_export, tmp_path):
    recipe = make_recipe(
        weights=INT8 | {"algorithm": "gptq", "clip": "search", "skip": LAYERS},
        calibration={"data": str(tmp_path / "no.jsonl"), "samples": 3},
    )
    lines = []
    artifact = quantize_artifact(text_export, recipe, tmp_path / "q", report=lines.append)
    assert [line for line in lines if line.startswith(f"note: weights.algorithm does nothing {UNSEEN}, and {SKIP}")]
    assert f"note: calibration.data, calibration.samples do nothing {TEXT}" in lines
    assert "calibration" not in artifact.manifest.lineage
    rounded = quantize_artifact(
        text_export,
        make_recipe(weights=INT8 | {"clip": "search", "skip": LAYERS}),
        tmp_path / "r",
        report=lambda _: None,
    )
    weights = [found.manifest.files["weights.safetensors"].sha256 for found in (artifact, rounded)]
    assert weights[0] == weights[1]
