"""What the stored scales of a checkpoint do not go with is refused, with both sides and what to do."""

import json

import numpy as np
import pytest

from tests.conftest import make_recipe
from tests.model.foreign_writers import CASES, Case, arguments, compressed, write_case
from tests.quantize.stored_checkpoints import quiet, stored
from toolchain.errors import DtoolError
from toolchain.pipeline import check_inputs
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe import Recipe
from toolchain.tensor_file import read_header


@pytest.mark.parametrize(
    ("name", "recipe", "expected", "found", "fix"),
    [
        ("gptq", stored("int8"), "int8", "int4", "weights.format=int4"),
        ("int_dynamic", stored("int4"), "int4", "int8", "weights.format=int8"),
        (
            "gptq",
            make_recipe(weights={"format": "int4", "algorithm": "stored", "group_size": 64}),
            "groups of 64",
            "groups of 32",
            "weights.group_size=32",
        ),
        (
            "int_dynamic",
            make_recipe(weights={"format": "int8", "algorithm": "stored", "granularity": "tensor"}),
            "a scale for each tensor",
            "a scale for each channel",
            "weights.granularity=channel",
        ),
        (
            "int_dynamic",
            make_recipe(weights={"format": "int8", "algorithm": "stored", "skip": ["lm_head"]}),
            "stored scales of model.embed_tokens",
            "none",
            'weights.skip=["lm_head", "model.embed_tokens"]',
        ),
    ],
)
def test_a_recipe_that_asks_for_other_codes_is_refused_with_both(name, recipe, expected, found, fix, export, tmp_path):
    ours, _, _, _ = export(name)
    with pytest.raises(DtoolError) as failure:
        quantize_artifact(ours.path, recipe, tmp_path / "q", report=quiet)
    assert expected in failure.value.expected
    assert found in failure.value.found
    assert fix in failure.value.fix
    assert "weights.algorithm=rtn" in failure.value.fix
    assert not (tmp_path / "q").exists()


def test_int8_in_groups_is_refused_as_targets_take_channels(export, tmp_path):
    case = Case(
        "packed",
        compressed("pack-quantized", arguments(strategy="group", group_size=32)),
        bits=8,
        group=32,
    )
    ours, _, _, _ = export(case)
    with pytest.raises(DtoolError) as failure:
        quantize_artifact(ours.path, stored("int8"), tmp_path / "q", report=quiet)
    assert ("a scale for each channel" in failure.value.expected, "groups of 32" in failure.value.found) == (True, True)
    plain = make_recipe(weights={"format": "int8"})
    assert quantize_artifact(ours.path, plain, tmp_path / "r", report=quiet).manifest.stage == "quantize"


def test_an_export_of_floats_has_no_stored_scales(exported, tmp_path):
    with pytest.raises(DtoolError, match="a checkpoint of floats"):
        quantize_artifact(exported, stored("int8"), tmp_path / "q", report=quiet)


def test_smoothing_and_searched_clipping_do_not_go_with_stored_scales():
    for sections, text in (
        ({"smoothing": {"algorithm": "awq"}}, "smoothing.algorithm awq"),
        ({"weights": {"format": "int8", "algorithm": "stored", "clip": "search"}}, r"weights\.clip\n"),
    ):
        document = {"weights": {"format": "int8", "algorithm": "stored"}} | sections
        with pytest.raises(DtoolError, match=text):
            make_recipe(**document)


def test_a_scale_the_compute_type_cannot_hold_is_refused(export, tmp_path):
    name = "model.layers.0.mlp.down_proj"

    def change(tensors):
        scale = tensors[f"{name}.weight_scale"].float()
        scale[5] = 1.1e-6
        return tensors | {f"{name}.weight_scale": scale}

    ours, _, _, _ = export("int_dynamic", "float16", change=change)
    with pytest.raises(DtoolError, match="does not fit float16") as failure:
        quantize_artifact(ours.path, stored("int8", "float16"), tmp_path / "q", report=quiet)
    assert "bfloat16" in failure.value.fix


def test_weights_that_are_not_of_their_scales_are_refused(export, tmp_path):
    from tests.conftest import seal

    ours, _, _, _ = export("int_dynamic")
    entry = read_header(ours.path / "weights.safetensors")["model.layers.1.mlp.down_proj.weight"]
    with entry.path.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(np.float32(0.123456).tobytes())
    seal(ours.path)
    with pytest.raises(DtoolError, match="not those of the stored scales"):
        quantize_artifact(ours.path, stored("int8"), tmp_path / "q", report=quiet)


def test_run_refuses_other_codes_before_any_work(tiny, texts, tmp_path):
    write_case(tiny[0], tmp_path / "coded", tmp_path / "floats", CASES["gptq"])
    engine = {"backend": "onnxruntime", "kv_capacity": 64, "prompt_len": {"min": 1, "opt": 8, "max": 64}}
    base = stored("int8").model_dump(mode="json") | {"engine": engine}
    recipe = Recipe.model_validate(json.loads(json.dumps(base | {"parity": {"data": str(texts["evaluation"])}})))
    with pytest.raises(DtoolError, match="do not agree"):
        check_inputs(tmp_path / "coded", recipe, tmp_path / "out")
    with pytest.raises(DtoolError, match="a checkpoint of floats"):
        check_inputs(tiny[0], recipe, tmp_path / "out")


@pytest.mark.parametrize("taken", [{"excess_channels": 2}, {"center": True}])
def test_nothing_is_taken_off_inputs_whose_scale_is_stored(taken, export, tiny, texts, tmp_path):
    ours, _, _, _ = export("int_static")
    static = {"format": "int8", "granularity": "tensor"} | taken
    recipe = stored("int8", activations=static, parity={"data": str(texts["evaluation"])})
    for refuse in (
        lambda: quantize_artifact(ours.path, recipe, tmp_path / "q", report=quiet),
        lambda: check_inputs(tmp_path / "coded", recipe, tmp_path / "out"),
    ):
        with pytest.raises(DtoolError, match=f"activations.{next(iter(taken))} cannot be with stored scales"):
            refuse()


def test_an_override_that_takes_a_mean_off_inputs_whose_scale_is_stored_is_named(export, tmp_path):
    ours, _, _, _ = export("int_static")
    override = {"match": ["*.mlp.*"], "activations": {"format": "int8", "granularity": "tensor", "center": True}}
    with pytest.raises(DtoolError, match=r"overrides\.0\.activations\.center cannot be with stored scales") as failure:
        quantize_artifact(ours.path, stored("int8", overrides=[override]), tmp_path / "q", report=quiet)
    assert "--set overrides.0.activations.granularity=token" in failure.value.fix
