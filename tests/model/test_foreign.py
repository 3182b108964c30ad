"""Quantized checkpoints in every layout: the numbers they stand for, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import save_tiny
from tests.model.checkpoint_files import edit_config, edit_tensors, logits, notes, refusal
from tests.model.foreign_writers import CASES, SINGLE, write_case
from toolchain.errors import DtoolError
from toolchain.inspection import inspect_path
from toolchain.model.checkpoint import open_checkpoint
from toolchain.model.foreign.coded import CodedTensor
from toolchain.model.foreign.grid import read_codes, read_grid

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


@pytest.fixture
def write(tiny, tmp_path):
    def write(name, plain=tiny[0], **changes):
        case = CASES[name]
        matrices = write_case(plain, tmp_path / "coded", tmp_path / "floats", case)
        if changes:
            edit_config(tmp_path / "coded", quantization_config=case.config | changes)
        return tmp_path / "coded", tmp_path / "floats", matrices

    return write


@pytest.mark.parametrize("name", CASES)
def test_codes_and_logits_are_those_that_were_written(name, write):
    coded, floats, matrices = write(name)
    parts = [p for parameter in open_checkpoint(coded).parameters.values() for p in parameter.parts]
    found = {part.name: part for part in parts if isinstance(part, CodedTensor)}
    assert found.keys() == matrices.keys()
    for module, part in found.items():
        assert torch.equal(read_codes(part), matrices[module].signed()), module
        assert torch.equal(part.read(), matrices[module].values()), module
    assert float((logits(coded) - logits(floats)).abs().max()) <= 1e-5


@pytest.mark.parametrize(("name", "offset", "scattered"), [
    ("gptq", False, False), ("gptq_v2", False, False), ("gptq_static_groups", False, False), ("awq", True, False),
    ("gptq_order", False, True), ("gptq_offset", True, False), ("packed_order", False, True),
    ("modelopt", False, False),
])  # fmt: skip
def test_a_grid_says_whether_zero_points_and_groups_are_out_of_place(name, offset, scattered, write):
    coded, _, _ = write(name)
    part = open_checkpoint(coded).parameters["model.layers.0.mlp.down_proj.weight"].parts[0]
    grid = read_grid(part)
    assert (grid.zero is not None, grid.group is not None) == (offset, scattered)


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt_neox", "packed_int8"), ("phi3_short", "gptq"), ("mixtral", "int_dynamic"), ("qwen2", "awq")],
)
def test_fused_grouped_and_expert_matrices_of_codes_are_read_alike(family, name, tmp_path, write):
    from tests.model.families import save_variant

    save_variant(tmp_path / "plain", family)
    coded, floats, matrices = write(name, plain=tmp_path / "plain")
    assert matrices
    assert float((logits(coded) - logits(floats)).abs().max()) <= 1e-5


def test_a_last_group_may_be_shorter(tmp_path, write):
    save_tiny(tmp_path / "plain", hidden_size=80, head_dim=20)
    coded, floats, _ = write("gptq", plain=tmp_path / "plain")
    assert float((logits(coded) - logits(floats)).abs().max()) <= 1e-5


def test_opening_a_quantized_checkpoint_does_not_import_torch(write):
    import subprocess
    import sys

    coded, _, _ = write("packed_int4")
    code = "import sys; from pathlib import Path; from toolchain.model.checkpoint import open_checkpoint\n"
    code += f"open_checkpoint(Path({str(coded)!r})); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_biases_of_zeros_are_left_out_and_told_and_others_refused(write):
    coded, floats, _ = write("gptq")
    edit_tensors(coded, lambda t: t | {f"{Q}.bias": torch.zeros(64)})
    assert "1 biases that the model does not have are zero" in notes(coded)
    assert float((logits(coded) - logits(floats)).abs().max()) <= 1e-5
    edit_tensors(coded, lambda t: t | {f"{Q}.bias": torch.ones(64)})
    assert f"1 unknown: {Q}.bias" in refusal(coded)


@pytest.mark.parametrize("name", ["gptq", "float_static", "modelopt"])
def test_inspect_counts_parameters_not_words(name, tiny, write):
    coded, _, _ = write(name)
    theirs, _ = inspect_path(tiny[0])
    ours, _ = inspect_path(coded)
    assert ours["parameters"] == theirs["parameters"]
    assert {"gptq": "int32"}.get(name, "fp8_e4m3") in ours["bytes_by_format"]
    assert any("stored as codes" in note for note in ours["notes"])
    (coded / SINGLE).unlink()
    alone, _ = inspect_path(coded)
    assert alone["parameters"] == theirs["parameters"]


def test_older_names_of_cache_scales_are_read(write):
    coded, _, _ = write("modelopt")
    edit_tensors(coded, lambda t: {n.replace("proj.k_scale", "proj.output_scale"): v for n, v in t.items()})
    assert len(open_checkpoint(coded).foreign.cache) == 4


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ("gptq", {"quant_method": "fp8"}, "quant_method 'fp8' is not supported"),
        ("gptq", {"bits": 3}, "bits 3"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq", {"dynamic": {"-:.*down.*": {}}}, "dynamic"),
        ("gptq", {"group_size": 64}, "not of the layout"),
        ("gptq", {"group_size": None}, "group_size"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"version": "marlin"}, "version 'marlin'"),
        ("awq", {"bits": 8}, "bits 8"),
        ("packed_int4", {"format": "marlin-24"}, "marlin-24 with int 4"),
        ("packed_int4", {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ("packed_int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("packed_int4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("packed_int4", {"config_groups": {"group_0": {"targets": ["Linear"], "weights": None}}}, "config_groups"),
        ("int_dynamic", {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "kv_cache_scheme 'int 4'"),
        ("modelopt_new", {"quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        ("modelopt_new", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}}, "quantized_layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, changes, text, write):
    coded, _, _ = write(name, **changes)
    message = refusal(coded)
    assert text in message
    assert "to do:" in message


def test_weights_by_block_and_several_kinds_are_refused(write):
    coded, _, _ = write("float_dynamic")
    config = json.loads((coded / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    blocks = group | {"weights": group["weights"] | {"strategy": "block"}}
    edit_config(coded, quantization_config=config | {"config_groups": {"group_0": blocks}})
    assert "strategy 'block'" in refusal(coded)
    both = {"group_0": group, "group_1": group | {"input_activations": None}}
    edit_config(coded, quantization_config=config | {"config_groups": both})
    assert "several kinds" in refusal(coded)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("gptq", lambda t: {n: v for n, v in t.items() if n != f"{Q}.scales"}, f"{Q} is not complete"),
        ("gptq_order", lambda t: {n: v for n, v in t.items() if n != f"{Q}.g_idx"}, f"{Q} is not complete"),
        ("gptq", lambda t: t | {f"{Q}.scales": t[f"{Q}.scales"][:1].clone()}, f"{Q}.scales float16 [1, 64]"),
        ("gptq", lambda t: t | {f"{Q}.qweight": t[f"{Q}.qweight"].long()}, f"{Q}.qweight int64"),
        ("gptq", lambda t: t | {f"{Q}.lora": torch.ones(2)}, f"1 unknown: {Q}.lora"),
        (
            "packed_int4",
            lambda t: t | {f"{Q}.weight_shape": torch.tensor([64, 96])},
            f"{Q}.weight_packed int32 [64, 8]",
        ),
        ("int_static", lambda t: t | {f"{Q}.pre_quant_scale": torch.ones(64)}, "pre_quant_scale is not supported"),
        ("int_dynamic", lambda t: t | {f"{Q}.input_scale": torch.ones(1)}, f"1 unknown: {Q}.input_scale"),
        ("int_dynamic", lambda t: t | {"model.layers.0.self_attn.k_scale": torch.ones(1)}, "1 unknown"),
        ("int_static", lambda t: t | {f"{Q}.input_zero_point": torch.ones(1)}, "1 unknown"),
        ("int_static", lambda t: t | {"model.layers.7.self_attn.k_scale": torch.ones(1)}, "belong to no layer"),
        (
            "int_static",
            lambda t: {n: v for n, v in t.items() if n != "model.layers.1.self_attn.v_scale"},
            "model.layers.1.self_attn.v_scale",
        ),
    ],
)
def test_tensors_the_layout_does_not_explain_are_refused(name, change, text, write):
    coded, _, _ = write(name)
    edit_tensors(coded, change)
    message = refusal(coded)
    assert text in message
    assert "to do:" in message


def test_a_config_that_names_a_method_without_codes_is_refused(tiny, write):
    coded, floats, _ = write("gptq")
    save_file(load_file(floats / SINGLE), coded / SINGLE)
    assert "the config says gptq, but no matrix is stored so" in refusal(coded)


def test_two_descriptions_that_differ_are_refused(write):
    coded, _, _ = write("modelopt")
    edit_config(coded, quantization_config=CASES["gptq"].config)
    assert "two quantizations" in refusal(coded)


def test_matrices_stored_as_inputs_by_outputs_are_refused(tmp_path, write):
    from tests.model.families import save_variant

    save_variant(tmp_path / "plain", "gpt2")
    coded, _, _ = write("int_dynamic", plain=tmp_path / "plain")
    assert "[in, out]" in refusal(coded)


@pytest.mark.parametrize(("name", "other"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_zero_points_stored_the_other_way_are_found_where_codes_are_symmetric(name, other, write):
    coded, _, _ = write(name, checkpoint_format=other)
    with pytest.raises(DtoolError, match=f"set checkpoint_format {name} in its config.json"):
        logits(coded)


def test_a_zero_point_that_readers_take_apart_is_refused(write):
    coded, _, _ = write("gptq_offset")
    edit_tensors(coded, lambda t: t | {f"{Q}.qzeros": torch.full_like(t[f"{Q}.qzeros"], -1)})
    with pytest.raises(DtoolError, match="stored as 15"):
        logits(coded)


def test_a_group_index_that_leaves_groups_out_is_refused(write):
    coded, _, _ = write("gptq")
    edit_tensors(coded, lambda t: t | {f"{Q}.g_idx": torch.zeros_like(t[f"{Q}.g_idx"])})
    with pytest.raises(DtoolError, match="does not name each of its groups"):
        logits(coded)


def test_zeros_stored_for_symmetric_codes_change_nothing(write):
    coded, floats, _ = write("int_dynamic")
    edit_tensors(
        coded,
        lambda t: (
            t
            | {
                f"{n}_zero_point": torch.zeros(v.shape[0], 1, dtype=torch.int8)
                for n, v in t.items()
                if v.dtype == torch.int8
            }
        ),
    )
    assert float((logits(coded) - logits(floats)).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].config.get("config_groups")])
def test_arguments_are_told_as_unknown_only_where_they_are(name, write):
    coded, _, _ = write(name)
    assert "does not know" not in notes(coded)
    config = json.loads((coded / "config.json").read_text())["quantization_config"]
    for group in config["config_groups"].values():
        group["weights"]["new_argument"] = 3
    edit_config(coded, quantization_config=config)
    assert "does not know: new_argument" in notes(coded)


def test_codes_that_are_not_symmetric_need_zero_points(write):
    coded, _, _ = write("packed_int4")
    config = json.loads((coded / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    edit_config(coded, quantization_config=config)
    part = open_checkpoint(coded).parameters["model.layers.0.mlp.down_proj.weight"].parts[0]
    with pytest.raises(DtoolError, match="has no zero points"):
        read_grid(part)
