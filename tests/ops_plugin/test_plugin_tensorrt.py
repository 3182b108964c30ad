"""The plugin in real TensorRTs on the CPU: TensorRT-RTX compiles graphs with it, the lean 11.4 runtime loads it."""

import pytest
from onnx import TensorProto

from tests.ops_plugin.conftest import (
    FP8,
    FP8_TOKEN,
    FULL,
    INT8,
    PLAIN,
    SPECS,
    TOKEN,
    attributes,
    child_environment,
    run_child,
)

BFLOAT16 = TensorProto.BFLOAT16
FIELDS = [
    "abi", "num_heads", "num_kv_heads", "head_dim", "scale", "rotary_dim", "interleaved", "softcap", "window",
    "qk_norm_eps", "cache_format", "token_scales",
]  # fmt: skip

COMPILED = {
    "fp16": {"spec": PLAIN},
    "fp16_sm80": {"spec": PLAIN, "sm": 80},
    "bf16": {"spec": PLAIN, "dtype": BFLOAT16},
    "int8": {"spec": INT8},
    "int8_sm80": {"spec": INT8, "sm": 80},
    "fp8": {"spec": FP8},
    "decode": {"spec": INT8, "tokens": 1},
    "prompt": {"spec": PLAIN, "tokens": 16},
    "everything": {"spec": FULL},
    "token": {"spec": TOKEN},
    "token_decode": {"spec": TOKEN, "tokens": 1, "dtype": BFLOAT16},
    "fp8_token": {"spec": FP8_TOKEN},
}
REFUSED = {
    "abi": ({"spec": PLAIN, "abi": 2}, "attribute abi: expected 3, found 2; export the model again"),
    "no_abi": ({"spec": PLAIN, "abi": None}, "attribute abi: expected on every node of abi 3, found none"),
    "no_heads": ({"spec": PLAIN, "num_heads": None}, "attribute num_heads: expected on every node"),
    "no_interleaved": ({"spec": PLAIN, "interleaved": None}, "attribute interleaved: expected on every node"),
    "groups": ({"spec": PLAIN, "num_kv_heads": 3}, "num_heads: expected a multiple of num_kv_heads = 3, found 4"),
    "odd_rotary": (
        {"spec": PLAIN, "rotary_dim": 7},
        "rotary_dim: expected an even number from 2 to head_dim = 16, found 7",
    ),
    "long_rotary": ({"spec": PLAIN, "rotary_dim": 18}, "rotary_dim: expected an even number from 2 to head_dim = 16"),
    "scale": ({"spec": PLAIN, "scale": 0.0}, "attribute scale: expected a positive number, found 0"),
    "softcap": ({"spec": PLAIN, "softcap": -1.0}, "attribute softcap: expected 0 (off) or a positive number, found -1"),
    "window": ({"spec": PLAIN, "window": -1}, "attribute window: expected 0 (off) or a positive number, found -1"),
    "flag": ({"spec": PLAIN, "interleaved": 2}, "attribute interleaved: expected 0 or 1, found 2"),
    "cache": ({"spec": PLAIN, "cache_format": "int4"}, "cache_format: expected none, int8 or fp8_e4m3, found 'int4'"),
    "token_flag": ({"spec": INT8, "token_scales": 2}, "attribute token_scales: expected 0 or 1, found 2"),
    "token_values": ({"spec": PLAIN, "token_scales": 1}, "token_scales: expected 0 with cache_format none, found 1"),
    "token_shapes": (
        {"spec": FP8_TOKEN, "shapes": {"value_scale": ["B", 2, 32]}},
        "shape of value_scale: expected [B, kv_heads = 2, C = 64], found [?, 2, 32]",
    ),
    "token_static": (
        {"spec": INT8, "token_scales": 1},
        "shape of key_scale: expected [B, kv_heads = 2, C = 64], found [2]",
    ),
    "few_inputs": (
        {"spec": PLAIN, "drop": ("past_value",)},
        "number of inputs: expected 6 (qkv, cos, sin, past_lengths, past_key, past_value), found 5",
    ),
    "no_scales": ({"spec": INT8, "drop": ("key_scale", "value_scale")}, "number of inputs: expected 8"),
    "width": (
        {"spec": PLAIN, "shapes": {"qkv": ["B", "T", 100]}},
        "shape of qkv: expected [B, T, (4 + 2 * 2) * 16 = 128], found [?, ?, 100]",
    ),
    "cache_heads": (
        {"spec": PLAIN, "shapes": {"past_key": ["B", 4, 64, 16]}},
        "shape of past_key: expected [B, kv_heads = 2, C, head_dim = 16], found [?, 4, 64, 16]",
    ),
    "cache_dim": (
        {"spec": PLAIN, "shapes": {"past_value": ["B", 2, 64, 8]}},
        "shape of past_value: expected [B, kv_heads",
    ),
    "capacities": (
        {"spec": PLAIN, "shapes": {"past_value": ["B", 2, 32, 16]}},
        "shape of past_value: expected [B, kv_heads = 2, C = 64, head_dim = 16], found [?, 2, 32, 16]",
    ),
    "scales": ({"spec": INT8, "shapes": {"key_scale": [1]}}, "shape of key_scale: expected [kv_heads = 2], found [1]"),
    "table": (
        {"spec": PLAIN, "shapes": {"sin": [128, 16]}},
        "shape of sin: expected [P = 128, rotary_dim / 2 = 8], found [128, 16]",
    ),
    "positions": (
        {"spec": PLAIN, "shapes": {"cos": [32, 8], "sin": [32, 8]}},
        "positions of cos and sin: expected at least the cache's capacity of 64, found 32",
    ),
    "too_long": (
        {"spec": PLAIN, "tokens": 65},
        "new tokens of qkv: expected at most the cache's capacity of 64, found 65",
    ),
    "mixed": (
        {"spec": PLAIN, "types": {"past_key": BFLOAT16}},
        "type of past_key (qkv is HALF, cache_format none): expected HALF, found BF16",
    ),
    "codes": (
        {"spec": FP8, "types": {"past_key": TensorProto.INT8}},
        "type of past_key (qkv is HALF, cache_format fp8_e4m3): expected FP8, found INT8",
    ),
    "float32": ({"spec": PLAIN, "dtype": TensorProto.FLOAT}, "type of qkv: expected HALF or BF16, found FLOAT"),
    "lengths": (
        {"spec": PLAIN, "types": {"past_lengths": TensorProto.INT32}},
        "type of past_lengths (qkv is HALF, cache_format none): expected INT64, found INT32",
    ),
    "norms": ({"spec": FULL, "types": {"k_norm": TensorProto.FLOAT}}, "type of k_norm (qkv is HALF"),
}


@pytest.fixture(scope="module")
def compiled(compile_rtx):
    return compile_rtx(COMPILED)


@pytest.fixture(scope="module")
def refused(compile_rtx):
    return compile_rtx({name: job for name, (job, _) in REFUSED.items()})


@pytest.mark.parametrize("name", COMPILED)
def test_rtx_compiles_the_plugin(compiled, name):
    result = compiled[name]
    assert result["errors"] == []
    assert result["plan"] > 0
    layers = [line for line in result["layers"].splitlines() if "LayerType:" in line]
    assert len(layers) == 1
    assert "LayerType: PluginV3" in layers[0]
    assert "mha" not in layers[0]


@pytest.mark.parametrize(
    ("name", "datatype"), [("fp16", "Half"), ("bf16", "BFloat16"), ("int8", "Int8"), ("fp8", "FP8")]
)
def test_the_cache_keeps_its_type_and_qkv_its_own(compiled, name, datatype):
    inputs, outputs = compiled[name]["layers"].split("Outputs: [", 1)
    kinds = {part.split(",")[0]: part.split("Datatype: ")[1].split(",")[0] for part in outputs.split("Name: ")[1:4]}
    assert kinds["present_key"] == kinds["present_value"] == kinds_of(inputs)["past_key"]
    assert datatype.lower() in kinds["present_key"].lower()
    assert kinds["out"] == kinds_of(inputs)["qkv"]


def kinds_of(text):
    parts = [part for part in text.split("Name: ")[2:] if "Datatype: " in part]
    return {part.split(",")[0]: part.split("Datatype: ")[1].split(",")[0] for part in parts}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_reaches_the_build_log(refused, name):
    result, said = refused[name], REFUSED[name][1]
    assert result["plan"] == 0
    ours = [message for message in result["errors"] if message.startswith("dtool::FusedAttention: ")]
    assert any(said in message for message in ours), result["errors"]


def test_rtx_wants_the_preview_feature_for_aliased_outputs(compile_rtx):
    result = compile_rtx({"plain": {"spec": PLAIN, "aliasing": False}})["plain"]
    assert result["plan"] == 0
    assert any("ALIASED_PLUGIN_IO_10_03 not enabled" in message for message in result["errors"])


@pytest.mark.parametrize("module", ["tensorrt_rtx", "tensorrt_lean_bindings"])
def test_registries_load_and_create_it(plugin, tmp_path, module):
    good = [{k: v for k, v in attributes(spec).items() if not k.startswith("plugin_")} for spec in SPECS]
    bad = [good[0] | {"abi": 1}, {k: v for k, v in good[0].items() if k != "head_dim"}]
    request = {"module": module, "library": str(plugin.path), "requests": [*good, *bad]}
    result, stderr = run_child("registry_child.py", request, child_environment(tmp_path), tmp_path)
    assert result["declared"] == FIELDS
    *made, abi, missing = result["answers"]
    assert [answer["plugin"] for answer in made] == [["FusedAttention", "1", "dtool"]] * len(SPECS)
    assert [answer["outputs"] for answer in made] == [3 + 2 * spec.token_scales for spec in SPECS]
    assert abi["plugin"] is missing["plugin"] is None
    said = {"tensorrt_rtx": abi["log"] + missing["log"], "tensorrt_lean_bindings": stderr.splitlines()}[module]
    assert any("attribute abi: expected 3, found 1" in line for line in said)
    assert any("attribute head_dim: expected on every node" in line for line in said)
