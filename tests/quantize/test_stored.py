"""The way of a quantized checkpoint: exported as its numbers, quantized again to its very codes."""

import json

import numpy as np
import pytest
import torch

from tests.conftest import make_recipe, random_ids
from tests.model.checkpoint_files import edit_tensors
from tests.model.foreign_writers import CASES, Case, arguments, compressed, write_case
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint, export_key
from toolchain.model.quantized import dequantize_weight
from toolchain.numerics import unpack_int4
from toolchain.quantize.stage import quantize_artifact, quantize_key
from toolchain.recipe import Recipe
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import fake_quant_runner
from toolchain.tensor_file import read_header, read_tensor

PARTS = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
SYMMETRIC = [name for name, case in CASES.items() if case.symmetric and case.order == "blocks"]
SKIP = ["lm_head", "model.embed_tokens"]


def quiet(_):
    pass


@pytest.fixture
def export(monkeypatch, export_with_graphs):
    """As `export_with_graphs`, for tests that look at tensors alone: no graph is traced or written."""
    monkeypatch.setattr("toolchain.export.stage.write_graphs", lambda *_: None)
    monkeypatch.setattr("toolchain.quantize.stage._write_graphs", lambda *_: None)
    return export_with_graphs


@pytest.fixture
def export_with_graphs(tiny, tmp_path):
    def export(case, dtype="float32", change=None):
        """Artifacts of the codes and of the plain numbers, what was written, and the notes."""
        case = CASES[case] if isinstance(case, str) else case
        lines: list[str] = []
        matrices = write_case(tiny[0], tmp_path / "coded", tmp_path / "floats", case)
        if change is not None:
            edit_tensors(tmp_path / "coded", change)
        recipe = make_recipe(compute_dtype=dtype)
        ours = export_checkpoint(tmp_path / "coded", recipe, tmp_path / "ours", report=lines.append)
        plain = export_checkpoint(tmp_path / "floats", recipe, tmp_path / "plain", report=quiet)
        return ours, plain, matrices, "\n".join(lines)

    return export


def stored(fmt="int4", dtype="float32", **sections):
    weights = {"format": fmt, "algorithm": "stored", "skip": SKIP} | ({"group_size": 32} if fmt == "int4" else {})
    return make_recipe(compute_dtype=dtype, **({"weights": weights} | sections))


def tensors_of(artifact, file="weights.safetensors"):
    return {name: read_tensor(entry) for name, entry in read_header(artifact.path / file).items()}


def rows_of(module, matrices):
    """What was written for one of our modules, its parts one below the other: codes and scales."""
    layer, _, _ = module.partition(".self_attn" if ".self_attn" in module else ".mlp")
    path = module.removeprefix(f"{layer}.")
    names = PARTS.get(path, (path.split(".")[1],))
    parts = [matrices[f"{layer}.{path.split('.')[0]}.{name}"] for name in names]
    return torch.cat([p.signed() for p in parts]), torch.cat([p.scale.float() for p in parts])


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


# ---- refusals ----


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
        ({"weights": {"format": "int8", "algorithm": "stored", "clip": "search"}}, "clip search"),
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
    from toolchain.pipeline import check_inputs

    write_case(tiny[0], tmp_path / "coded", tmp_path / "floats", CASES["gptq"])
    engine = {"backend": "onnxruntime", "kv_capacity": 64, "prompt_len": {"min": 1, "opt": 8, "max": 64}}
    base = stored("int8").model_dump(mode="json") | {"engine": engine}
    recipe = Recipe.model_validate(json.loads(json.dumps(base | {"parity": {"data": str(texts["evaluation"])}})))
    with pytest.raises(DtoolError, match="do not agree"):
        check_inputs(tmp_path / "coded", recipe, tmp_path / "out")
    with pytest.raises(DtoolError, match="a checkpoint of floats"):
        check_inputs(tiny[0], recipe, tmp_path / "out")


def test_reopened_artifacts_are_whole(export, tmp_path):
    ours, _, _, _ = export("modelopt")
    assert open_artifact(ours.path, ("export",), check_hashes=True).manifest.files["stored_scales.safetensors"]
