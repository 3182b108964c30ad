"""Formats per matrix: what overrides match, what they inherit, and graphs that compute what they say."""

import pytest

from tests.conftest import make_recipe, random_ids
from tests.quantize.test_smoothing import logits_of
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig
from toolchain.quantize.plan import plan_quantization
from toolchain.quantize.stage import quantize_artifact
from toolchain.runners.open import fake_quant_runner, open_runner

MIXED = {
    "weights": {"format": "int8", "granularity": "channel", "skip": ["lm_head"]},
    "activations": {"format": "int8"},
    "overrides": [
        {"match": ["*.mlp.*"], "weights": {"format": "int4", "group_size": 32}, "activations": {"format": "none"}},
        {"match": ["model.layers.1.mlp.down_proj"], "weights": {"format": "int8"}},
        {"match": ["model.layers.0.self_attn.o_proj"], "activations": {"granularity": "tensor"}},
        {
            "match": ["model.layers.1.self_attn.o_proj"],
            "weights": {"format": "none"},
            "activations": {"format": "none"},
        },
    ],
}


def test_the_last_override_wins_and_the_rest_is_inherited(exported):
    config = DecoderConfig.model_validate(open_artifact(exported).json("decoder.json"))
    plan = plan_quantization(config, make_recipe(**MIXED))
    formats = {name: weights.format for name, weights in plan.weights.items()}
    assert formats["model.layers.0.mlp.down_proj"] == "int4"
    assert formats["model.layers.1.mlp.down_proj"] == "int8"
    assert plan.weights["model.layers.1.mlp.down_proj"].granularity == "channel"
    assert formats["model.layers.0.self_attn.qkv_proj"] == "int8"
    assert "model.layers.1.self_attn.o_proj" not in formats
    assert "model.layers.1.self_attn.o_proj" in plan.skipped
    assert set(plan.groups.values()) == {32}
    assert "model.layers.0.mlp.gate_up_proj" not in plan.rounded
    assert plan.static == ("model.layers.0.self_attn.o_proj",)


@pytest.mark.usefixtures("random_calibration")
def test_mixed_graphs_compute_what_torch_does(exported, tmp_path):
    artifact = quantize_artifact(exported, make_recipe(**MIXED), tmp_path / "q", report=lambda _: None)
    ids, lengths = random_ids(5, 2, 64), [64, 41]
    ours, theirs = (logits_of(o(artifact.path), ids, lengths) for o in (open_runner, fake_quant_runner))
    assert float(abs(ours - theirs).mean()) < 1e-3 * float(abs(theirs).max())
    assert artifact.manifest.details["weight_format"] == "int4+int8"


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ({"match": ["*.mpl.*"], "weights": {"format": "none"}}, None),
        ({"match": ["*"], "weights": {"formt": "none"}}, "formt"),
        ({"match": ["*"], "weights": {"skip": ["x"]}}, "skip in the section alone"),
        ({"match": []}, "no match"),
        ({"match": ["*"], "activations": {"format": "fp8_e4m3"}}, "both sides"),
    ],
)
def test_overrides_that_cannot_be_are_refused(override, found, exported):
    if found is None:
        config = DecoderConfig.model_validate(open_artifact(exported).json("decoder.json"))
        with pytest.raises(DtoolError, match=r"overrides\.0\.match .* matches no matrix"):
            plan_quantization(config, make_recipe(weights={"format": "int8"}, overrides=[override]))
        return
    with pytest.raises(DtoolError, match=found):
        make_recipe(weights={"format": "int8"}, overrides=[override])


@pytest.mark.parametrize("key", ["kv_cache", "weight", "smoothing"])
def test_an_unknown_key_of_an_override_is_named(key):
    with pytest.raises(DtoolError, match=rf"overrides\.0\.{key}\n.*\n.*unknown key") as caught:
        make_recipe(overrides=[{"match": ["*"], "weights": {"format": "int8"}, key: {"format": "none"}}])
    assert "weights" in str(caught.value)


@pytest.mark.parametrize("changed", [{"format": "none"}, {"granularity": "token"}])
def test_an_override_without_a_static_scale_drops_the_excess(changed, exported):
    static = {"format": "int8", "granularity": "tensor", "excess_channels": 2}
    overrides = [{"match": ["model.layers.0.mlp.down_proj"], "activations": changed}]
    recipe = make_recipe(weights={"format": "int8"}, activations=static, overrides=overrides)
    assert recipe.of_matrix("model.layers.0.mlp.down_proj")[1].excess_channels == 0
    assert recipe.of_matrix("model.layers.1.mlp.down_proj")[1].excess_channels == 2
    with pytest.raises(DtoolError, match=r"overrides\.0\.activations\.excess_channels\n"):
        make_recipe(
            weights={"format": "int8"},
            activations=static,
            overrides=[{"match": ["*down_proj"], "activations": changed | {"excess_channels": 2}}],
        )
