"""The way of a quantized checkpoint: exported as its numbers, quantized again to its very codes."""

import numpy as np
import pytest
import torch

from tests.conftest import make_recipe, random_ids
from tests.model.foreign_writers import CASES, write_case
from tests.quantize.stored_checkpoints import quiet, rows_of, stored, tensors_of
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint, export_key
from toolchain.model.quantized import dequantize_weight
from toolchain.numerics import unpack_int4
from toolchain.quantize.job import plan_job
from toolchain.quantize.stage import quantize_artifact, quantize_key
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import fake_quant_runner

SYMMETRIC = [name for name, case in CASES.items() if case.symmetric and case.order == "blocks"]


# ---- export ----


@pytest.mark.parametrize("name", CASES)
def test_an_export_holds_the_numbers_the_codes_stand_for(name, export):
    ours, plain, _, _ = export(name)
    assert (ours.path / "weights.safetensors").read_bytes() == (plain.path / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["gptq", "awq", "packed_int4", "float_static", "modelopt"])
def test_graphs_over_the_numbers_give_the_plain_models_logits(name, export_with_graphs):
    ours, plain, _, _ = export_with_graphs(name)
    ids, lengths = random_ids(4, 2, 12), np.array([12, 9])
    logits = [r.step(r.new_state(2, 16), ids, lengths, "evaluation") for r in (OnnxRunner(ours), OnnxRunner(plain))]
    assert float(abs(logits[0] - logits[1]).max()) <= 1e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_export_rounds_once_to_the_compute_type(dtype, export):
    ours, plain, _, _ = export("gptq", dtype)
    assert (ours.path / "weights.safetensors").read_bytes() == (plain.path / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("name", SYMMETRIC)
def test_an_export_keeps_the_scales_by_our_names(name, export):
    case = CASES[name]
    ours, _, matrices, _ = export(name)
    scales = tensors_of(ours, "stored_scales.safetensors")
    assert {str(s.dtype) for s in scales.values()} == {"torch.float32"}
    for module in (
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
    ):
        theirs = rows_of(module, matrices)[1]
        assert torch.equal(scales[f"{module}.weight_scale"], theirs if case.group else theirs[:, 0])
    details = ours.manifest.details["stored_quantization"]
    assert details["weight_format"] == case.weight_format
    assert (details["group_size"], details["symmetric"], details["scales"]) == (case.group or None, True, "stored")
    assert details["matrices"] == 8
    if case.inputs:
        assert scales["model.layers.0.self_attn.qkv_proj.input_scale"].shape == ()
        assert details["activations"][1] == "tensor"
    if case.cache:
        assert scales["model.layers.1.self_attn.v_scale"].tolist() == pytest.approx([0.04, 0.04])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("awq", "zero points are not in the middle"),
        ("gptq_offset", "zero points are not in the middle"),
        ("packed_offset", "zero points are not in the middle"),
        ("gptq_order", "groups are not blocks of inputs in order"),
        ("packed_order", "groups are not blocks of inputs in order"),
    ],
)
def test_no_scales_are_kept_where_targets_cannot_take_the_grid(name, why, export, tmp_path):
    ours, _, _, lines = export(name)
    assert f"no scales are stored, as {why}" in lines
    assert "stored_scales.safetensors" not in ours.manifest.files
    details = ours.manifest.details["stored_quantization"]
    assert (details["symmetric"], details["scales"]) == (CASES[name].symmetric, "none")
    with pytest.raises(DtoolError, match="there are none") as failure:
        quantize_artifact(ours.path, stored(), tmp_path / "q", report=quiet)
    assert "weights.algorithm=rtn" in failure.value.fix


def test_parts_that_read_one_input_get_the_largest_scale_and_it_is_told(export):
    ours, _, matrices, lines = export("int_static")
    seeds = [list(matrices).index(f"model.layers.0.self_attn.{p}_proj") for p in "qkv"]
    scales = tensors_of(ours, "stored_scales.safetensors")
    found = float(scales["model.layers.0.self_attn.qkv_proj.input_scale"])
    assert found == pytest.approx(0.01 + 0.001 * max(seeds))
    assert "the parts of model.layers.0.self_attn.qkv_proj read one input: its scale is the largest" in lines


def test_a_matrix_of_which_only_parts_are_codes_has_no_scale(export, tmp_path):
    q = "model.layers.0.self_attn.q_proj"

    def change(tensors):
        codes, scale = (tensors.pop(f"{q}.{piece}") for piece in ("weight", "weight_scale"))
        return tensors | {f"{q}.weight": codes.float() * scale.float()}

    ours, plain, _, lines = export("int_dynamic", change=change)
    assert "qkv_proj has no stored scales, as only some of its parts are codes" in lines
    assert (ours.path / "weights.safetensors").read_bytes() == (plain.path / "weights.safetensors").read_bytes()
    with pytest.raises(DtoolError, match="that the checkpoint stores as floats") as failure:
        quantize_artifact(ours.path, stored("int8"), tmp_path / "q", report=quiet)
    assert '"model.layers.0.self_attn.qkv_proj"' in failure.value.fix


def test_an_exports_key_depends_on_the_codes_and_on_what_they_mean(tiny, tmp_path):
    keys = []
    for i, name in enumerate(("gptq", "gptq_v2", "modelopt")):
        write_case(tiny[0], tmp_path / f"c{i}", tmp_path / f"f{i}", CASES[name])
        keys.append(export_key(tmp_path / f"c{i}", make_recipe()))
    artifact = export_checkpoint(tmp_path / "c2", make_recipe(), tmp_path / "x", report=quiet)
    assert artifact.manifest.key == keys[2]
    assert "checkpoint.hf_quant_config.json" in artifact.manifest.lineage
    path = tmp_path / "c2" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    assert len({*keys, export_key(tmp_path / "c2", make_recipe())}) == 4


# ---- quantize ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", SYMMETRIC)
def test_stored_scales_give_the_codes_back_bit_for_bit(name, dtype, export, tmp_path):
    case = CASES[name]
    ours, _, matrices, _ = export(name, dtype)
    artifact = quantize_artifact(ours.path, stored(case.weight_format, dtype), tmp_path / "q", report=quiet)
    found = tensors_of(artifact)
    held_in = getattr(torch, dtype)
    for module in artifact.manifest.details["quantized"]:
        codes, scale = found[f"{module}.weight"], found[f"{module}.weight_scale"]
        theirs, their_scale = rows_of(module, matrices)
        plain = unpack_int4(codes) if case.weight_format == "int4" else codes
        assert plain.dtype == theirs.dtype
        assert torch.equal(plain.view(torch.uint8), theirs.view(torch.uint8)), module
        assert torch.equal(scale.to(held_in).float(), scale)  # a graph casts it without loss
        exact = torch.equal(their_scale, their_scale.to(held_in).float())
        floats = dequantize_weight(codes, scale)
        per_input = their_scale.repeat_interleave(theirs.shape[1] // their_scale.shape[1], 1)
        if exact:
            assert torch.equal(floats, theirs.float() * per_input), module
        torch.testing.assert_close(floats, theirs.float() * per_input, rtol=torch.finfo(held_in).eps / 2, atol=0)
    assert len(artifact.manifest.details["quantized"]) == 8


@pytest.mark.parametrize("name", ["gptq", "int_dynamic", "float_static"])
def test_graphs_of_stored_codes_compute_what_they_say(name, export_with_graphs, tmp_path):
    case = CASES[name]
    sections = {}
    if name == "float_static":
        sections = {
            "activations": {"format": "fp8_e4m3", "granularity": "tensor"},
            "kv_cache": {"format": "fp8_e4m3"},
        }
    ours, plain, _, _ = export_with_graphs(name)
    artifact = quantize_artifact(ours.path, stored(case.weight_format, **sections), tmp_path / "q", report=quiet)
    ids, lengths = random_ids(9, 2, 12), np.array([12, 9])
    runners = [OnnxRunner(artifact), fake_quant_runner(artifact.path), OnnxRunner(plain)]
    ours_, theirs, floats = (r.step(r.new_state(2, 16), ids, lengths, "prefill") for r in runners)
    assert float(np.median(abs(ours_ - theirs))) <= 1e-4
    if not sections:  # weights alone: nothing is lost against the checkpoint
        assert float(abs(ours_ - floats).max()) <= 1e-5


@pytest.mark.parametrize(("name", "fmt"), [("int_static", "int8"), ("modelopt", "fp8_e4m3")])
def test_static_scales_come_from_the_file_without_calibration(name, fmt, export, tmp_path):
    ours, _, _, _ = export(name)
    sections = {"activations": {"format": fmt, "granularity": "tensor"}, "calibration": {"data": "no such text"}}
    if CASES[name].cache:
        sections["kv_cache"] = {"format": fmt}
    recipe = stored(fmt, **sections)
    artifact = quantize_artifact(ours.path, recipe, tmp_path / "q", report=quiet)  # no text, no tokenizer
    assert artifact.manifest.key == quantize_key(ours, recipe)
    assert "calibration" not in artifact.manifest.lineage
    theirs, found = tensors_of(ours, "stored_scales.safetensors"), tensors_of(artifact)
    fixed = [n for n in found if n.endswith(("input_scale", "k_scale", "v_scale"))]
    assert len(fixed) == 8 + (4 if CASES[name].cache else 0)
    assert all(torch.equal(found[n], theirs[n]) for n in fixed)


@pytest.mark.usefixtures("random_calibration")
def test_scales_of_another_format_or_not_stored_are_measured_and_told(export, tmp_path):
    ours, _, _, _ = export("modelopt")
    lines: list[str] = []
    recipe = stored(
        "fp8_e4m3", kv_cache={"format": "int8"}, activations={"format": "fp8_e4m3", "granularity": "tensor"}
    )
    artifact = quantize_artifact(ours.path, recipe, tmp_path / "q", report=lines.append)
    assert "kv_cache: stored scales are of fp8_e4m3, the recipe asks for int8: measured anew" in "\n".join(lines)
    theirs, found = tensors_of(ours, "stored_scales.safetensors"), tensors_of(artifact)
    layer = "model.layers.0.self_attn"
    assert torch.equal(found[f"{layer}.o_proj.input_scale"], theirs[f"{layer}.o_proj.input_scale"])
    assert not torch.equal(found[f"{layer}.k_scale"], theirs[f"{layer}.k_scale"])


def test_a_cache_alone_takes_its_stored_scales(export, tmp_path):
    ours, _, _, _ = export("int_static")
    recipe = make_recipe(weights={"algorithm": "stored"}, kv_cache={"format": "int8"})
    artifact = quantize_artifact(ours.path, recipe, tmp_path / "q", report=quiet)
    assert tensors_of(artifact)["model.layers.0.self_attn.k_scale"].tolist() == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize(("name", "cache", "told"), [
    ("int_static", {"format": "int8", "scale": "mse"}, "kv_cache.scale mse does nothing"),
    ("int_dynamic", {"format": "int8"}, "kv_cache: the checkpoint has no scales of it: measured"),
    ("int_static", {"format": "int8", "granularity": "token"}, None),
])  # fmt: skip
def test_where_the_scales_of_a_cache_come_from_is_told(name, cache, told, export):
    ours, _, _, _ = export(name)
    lines = plan_job(ours, stored("int8", kv_cache=cache)).notes
    assert [line for line in lines if line.startswith("kv_cache")] == [line for line in lines if told and told in line]
    assert bool(told) == any(line.startswith("kv_cache") for line in lines)


@pytest.mark.parametrize(
    ("name", "activations", "told"),
    [("int_static", "tensor", True), ("int_dynamic", "tensor", False), ("int_dynamic", "token", True)],
)
def test_text_that_is_not_read_beside_the_checkpoint_s_own_scales_is_told(name, activations, told, export):
    ours, _, _, _ = export(name)
    sections = {"activations": {"format": "int8", "granularity": activations}, "calibration": {"samples": 3, "seed": 1}}
    lines = plan_job(ours, stored("int8", **sections)).notes
    line = "calibration.samples, calibration.seed do nothing where nothing is measured on text"
    by_sections = activations == "token"  # which tell it without the model
    assert (line in lines) == (told and not by_sections)
    assert (line in stored("int8", **sections).idle(["quantize"])) == by_sections


def test_stored_groups_may_be_cut_where_a_matrix_needs_smaller_ones(export, tmp_path):
    ours, _, matrices, _ = export("gptq_channel")
    artifact = quantize_artifact(ours.path, stored(), tmp_path / "q", report=quiet)
    found = tensors_of(artifact)
    module = "model.layers.0.mlp.down_proj"
    assert found[f"{module}.weight_scale"].shape == (64, 4)
    assert torch.equal(unpack_int4(found[f"{module}.weight"]), rows_of(module, matrices)[0])


def test_channels_of_zeros_keep_their_codes_whatever_their_scale(export, tmp_path):
    name = "model.layers.0.mlp.down_proj"

    def change(tensors):
        tensors[f"{name}.weight"][3] = 0
        tensors[f"{name}.weight_scale"][3] = 0
        return tensors

    ours, _, _, _ = export("int_dynamic", "float16", change=change)
    artifact = quantize_artifact(ours.path, stored("int8", "float16"), tmp_path / "q", report=quiet)
    found = tensors_of(artifact)
    assert not bool(found[f"{name}.weight"][3].any())
    assert float(found[f"{name}.weight_scale"][3]) > 0


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("int_static", {"format": "int8", "center": True}),
        ("int_static", {"center": True}),
        ("int_dynamic", {"format": "int8", "granularity": "tensor", "center": True, "excess_channels": 2}),
    ],
)
@pytest.mark.usefixtures("random_calibration")
def test_stored_codes_stay_what_they_are_beside_means_and_excess(name, activations, export_with_graphs, tmp_path):
    ours, _, matrices, _ = export_with_graphs(name)
    artifact = quantize_artifact(ours.path, stored("int8", activations=activations), tmp_path / "q", report=quiet)
    found, module = tensors_of(artifact), "model.layers.0.mlp.down_proj"
    assert torch.equal(found[f"{module}.weight"], rows_of(module, matrices)[0])
    assert found[f"{module}.output_offset"].shape == (64,)
    ids, lengths = random_ids(9, 2, 12), np.array([12, 9])
    runners = (OnnxRunner(artifact), fake_quant_runner(artifact.path))
    ours_, theirs = (r.step(r.new_state(2, 16), ids, lengths, "prefill") for r in runners)
    assert float(np.median(abs(ours_ - theirs))) <= 1e-4


def test_reopened_artifacts_are_whole(export, tmp_path):
    ours, _, _, _ = export("modelopt")
    assert open_artifact(ours.path, ("export",), check_hashes=True).manifest.files["stored_scales.safetensors"]
