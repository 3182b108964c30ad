"""Stored matrices against the checkpoint's: right ones pass in every format, wrong ones are named."""

import shutil

import numpy as np
import pytest
from tiny_parity import make_recipe, write_tokenizer

from tests.conftest import seal
from tests.model.families import save_variant
from toolchain.artifact import open_artifact
from toolchain.export.stage import export_checkpoint
from toolchain.model.load import load_artifact_decoder, load_decoder
from toolchain.parity.weights import match_weights, weight_rows
from toolchain.quantize.stage import quantize_artifact
from toolchain.tensor_file import read_header, read_tensor, tensor_bytes

INT8, INT4 = {"format": "int8", "skip": []}, {"format": "int4", "group_size": 32}
ROTATED = {"rotation": {"stream": True, "values": True, "feed_forward": True}}
CACHE = {"kv_cache": {"format": "int8"}}
RECIPES = {
    "int8": {"weights": INT8},
    "int8_per_tensor": {"weights": {"format": "int8", "granularity": "tensor"}},
    "fp8": {"weights": {"format": "fp8_e4m3"}},
    "int4": {"weights": INT4},
    "int4_gptq_rotated": {"weights": INT4 | {"algorithm": "gptq", "clip": "search"}} | ROTATED,
    "int8_rotated_centered": {"weights": INT8, "activations": {"format": "int8", "center": True}} | ROTATED,
    "int8_smooth": {"weights": INT8, "activations": {"format": "int8"}, "smoothing": {"algorithm": "smoothquant"}},
    "int8_keys": {"weights": INT8, "smoothing": {"keys": True}} | CACHE,
    "int8_all": {"weights": INT8, "smoothing": {"algorithm": "awq", "keys": True}} | CACHE,
}


def quiet(_):
    pass


def match(folder, checkpoint):
    artifact = open_artifact(folder)
    recipe = artifact.manifest.recipe
    return match_weights(
        load_artifact_decoder(artifact, "float32"),
        load_decoder(checkpoint),
        rotates_values=recipe.get("rotation", {}).get("values", False),
        smooths=recipe.get("smoothing", {}).get("algorithm", "none") != "none",
        smooths_keys=recipe.get("smoothing", {}).get("keys", False),
    )


@pytest.fixture(scope="module")
def quantized(exported, text_file, tmp_path_factory):
    """A function from a recipe's name to its artifact, each made once."""
    made = {}

    def get(name):
        if name not in made:
            calibration = {"data": str(text_file), "samples": 4, "seq_len": 30}
            out = tmp_path_factory.mktemp("weights") / name
            quantize_artifact(exported, make_recipe(calibration=calibration, **RECIPES[name]), out, report=quiet)
            made[name] = out
        return made[name]

    return get


@pytest.mark.parametrize("name", RECIPES)
def test_every_part_of_a_right_artifact_is_the_checkpoints(quantized, checkpoint, name):
    matches = match(quantized(name), checkpoint)
    assert [m.fault for m in matches if m.fault] == []
    assert {m.part for m in matches} >= {
        "model.embed_tokens", "lm_head", "model.layers.1.self_attn.v_proj", "model.layers.0.mlp.down_proj"
    }  # fmt: skip
    assert all(row.verdict == "passed" for row in weight_rows(matches))


def spoil(folder, out, change):
    """A copy whose stored tensors are changed: {name: function of a tensor}."""
    shutil.copytree(folder, out)
    entries = read_header(out / "weights.safetensors")
    with (out / "weights.safetensors").open("r+b") as stream:
        for name, function in change.items():
            stream.seek(entries[name].offset)
            stream.write(tensor_bytes(function(read_tensor(entries[name]))))
    return seal(out)


def flip(row):
    def change(codes):
        codes[row] = -codes[row]
        return codes

    return change


def swap(first, second):
    def change(values):
        values[first], values[second] = values[second].clone(), values[first].clone()
        return values

    return change


QKV, DOWN = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.0.mlp.down_proj.weight"
HEADS = swap(slice(64, 80), slice(80, 96))
FAULTS = {
    "scale": ({f"{QKV}_scale": lambda scale: scale * 1.1}, "model.layers.1.self_attn.q_proj", "1.1 times"),
    "sign": ({DOWN: flip(5)}, "model.layers.0.mlp.down_proj", "row 5 has the opposite sign"),
    "KV heads": ({QKV: HEADS, f"{QKV}_scale": HEADS}, "model.layers.1.self_attn.k_proj", "holds the weights of row"),
}


@pytest.mark.parametrize("name", ["int8", "int8_rotated_centered", "int8_smooth", "int8_all"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_matrix_named(quantized, checkpoint, tmp_path, name, fault):
    change, part, words = FAULTS[fault]
    matches = match(spoil(quantized(name), tmp_path / "bad", change), checkpoint)
    faults = [m.fault for m in matches if m.fault]
    layer = part.split(".")[2]
    assert faults
    assert all(f".layers.{layer}." in found for found in faults), faults
    assert {row.verdict for row in weight_rows(matches)} & {"failed"}
    if name == "int8":  # a rotated row is many rows of the checkpoint, a smoothed one is told by its reader
        assert any(found.startswith(part) and words in found for found in faults), faults


def test_an_experts_matrix_in_another_experts_place_is_named(tmp_path, text_file):
    save_variant(tmp_path / "model", "qwen3_moe")
    write_tokenizer(tmp_path / "model")
    recipe = make_recipe(weights={"format": "int8"}, calibration={"data": str(text_file), "samples": 2, "seq_len": 30})
    export_checkpoint(tmp_path / "model", recipe, tmp_path / "onnx", report=quiet)
    quantize_artifact(tmp_path / "onnx", recipe, tmp_path / "int8", report=quiet)
    assert [m.fault for m in match(tmp_path / "int8", tmp_path / "model") if m.fault] == []
    name = "model.layers.1.mlp.experts.down_proj.weight"
    rows = read_header(tmp_path / "int8" / "weights.safetensors")[name].shape[0]
    inner = load_decoder(tmp_path / "model").config.hidden_size
    assert rows % inner == 0
    exchange = swap(slice(0, inner), slice(inner, 2 * inner))
    bad = spoil(tmp_path / "int8", tmp_path / "bad", {name: exchange, f"{name}_scale": exchange})
    faults = [m.fault for m in match(bad, tmp_path / "model") if m.fault]
    assert [found.split(":")[0] for found in faults] == [
        "model.layers.1.mlp.experts.0.down_proj", "model.layers.1.mlp.experts.1.down_proj"
    ]  # fmt: skip


def test_weights_that_are_no_numbers_are_a_fault(quantized, checkpoint, tmp_path):
    bad = spoil(quantized("int8"), tmp_path / "bad", {f"{DOWN}_scale": lambda scale: scale * np.nan})
    matches = match(bad, checkpoint)
    assert any(m.fault for m in matches)
    assert {row.verdict for row in weight_rows(matches)} == {"failed"}
