"""The attention op's portable body in ONNX Runtime, against its torch form, for every attribute."""

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from toolchain.formats import format_named
from toolchain.ops.attention import AttentionSpec, attend_in_place
from toolchain.ops.function_body import (
    DOMAIN,
    OP_TYPE,
    OPSET,
    OUTPUTS,
    SCALE_OUTPUTS,
    function_body,
    input_names,
    node_attributes,
    output_names,
    overload,
)
from toolchain.runners.onnx import zero_cache

BATCH, CAPACITY, POSITIONS = 2, 96, 128
BASE = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32, scale=0.17, rotary_dim=32, cache_format="none")
CHANGES = {
    "plain": {},
    "interleaved": {"interleaved": True},
    "partial": {"rotary_dim": 16},
    "partial_interleaved": {"rotary_dim": 16, "interleaved": True},
    "softcap": {"softcap": 2.0},
    "whole_scale": {"scale": 1.0},
    "window": {"window": 5},
    "qk_norm": {"qk_norm_eps": 1e-6},
    "int8": {"cache_format": "int8"},
    "fp8": {"cache_format": "fp8_e4m3"},
    "int8_token": {"cache_format": "int8", "token_scales": True},
    "fp8_token": {"cache_format": "fp8_e4m3", "token_scales": True},
    "all_token": {
        "rotary_dim": 24,
        "softcap": 3.0,
        "window": 7,
        "qk_norm_eps": 1e-5,
        "cache_format": "int8",
        "token_scales": True,
    },
    "all": {
        "interleaved": True,
        "rotary_dim": 24,
        "softcap": 3.0,
        "window": 7,
        "qk_norm_eps": 1e-5,
        "cache_format": "int8",
    },
}


def session_of(spec):
    code = format_named("float32" if spec.cache_format == "none" else spec.cache_format).onnx_code
    types = {"past_lengths": onnx.TensorProto.INT64, "past_key": code, "past_value": code}
    types |= {"present_key": code, "present_value": code}
    names = input_names(spec)
    info = onnx.helper.make_tensor_value_info
    cache = ["B", spec.num_kv_heads, "C", spec.head_dim]
    shapes = {"qkv": ["B", "T", spec.packed_width], "past_lengths": ["B"], "past_key": cache, "past_value": cache}
    shapes |= {name: [POSITIONS, spec.rotary_dim // 2] for name in ("cos", "sin")}
    scale = cache[:3] if spec.token_scales else cache[1:2]
    shapes |= dict.fromkeys(("key_scale", "value_scale"), scale)
    shapes |= {name: [spec.head_dim] for name in ("q_norm", "k_norm")}
    shapes |= {"out": ["B", "T", None]} | dict.fromkeys(OUTPUTS[1:], cache) | dict.fromkeys(SCALE_OUTPUTS, scale)
    inputs, outputs = (
        [info(name, types.get(name, onnx.TensorProto.FLOAT), shapes[name]) for name in side]
        for side in (names, output_names(spec))
    )
    node = onnx.helper.make_node(OP_TYPE, names, output_names(spec), domain=DOMAIN, name="attention")
    node.overload = overload(spec)
    node.attribute.extend(onnx.AttributeProto.FromString(_attribute_bytes(a)) for a in node_attributes(spec))
    graph = onnx.helper.make_graph([node], "g", inputs, outputs)
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, functions=[function_body(spec)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _attribute_bytes(attribute):
    import onnx_ir as ir

    return ir.serde.serialize_attribute(attribute).SerializeToString()


def inputs_of(spec):
    torch.manual_seed(3)
    angles = torch.outer(torch.arange(POSITIONS).float(), 0.3 ** torch.arange(spec.rotary_dim // 2))
    values = {"cos": angles.cos(), "sin": angles.sin()}
    if spec.quantized and not spec.token_scales:
        values |= {"key_scale": torch.tensor([0.02, 0.03]), "value_scale": torch.tensor([0.015, 0.04])}
    if spec.qk_norm:
        values |= {name: torch.rand(spec.head_dim) + 0.5 for name in ("q_norm", "k_norm")}
    return values


@pytest.mark.parametrize("name", CHANGES)
def test_the_body_computes_what_the_torch_form_computes(name):
    spec = dataclasses.replace(BASE, **CHANGES[name])
    session, fixed = session_of(spec), inputs_of(spec)
    shape = (BATCH, spec.num_kv_heads, CAPACITY, spec.head_dim)
    fmt = format_named("float32" if spec.cache_format == "none" else spec.cache_format)
    caches = [torch.zeros(shape, dtype=fmt.torch_dtype) for _ in range(2)]
    theirs_caches = [zero_cache(shape, fmt.name) for _ in range(2)]
    names = ["past_key", "past_value"]
    if spec.token_scales:
        names += ["key_scale", "value_scale"]
        caches += [torch.zeros(shape[:3]) for _ in range(2)]
        theirs_caches += [zero_cache(shape[:3], "float32") for _ in range(2)]
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    past = torch.tensor([0, 0])
    for tokens in (np.array([33, 33]), np.array([1, 1]), np.array([9, 9]), np.array([30, 30]), np.array([1, 1])):
        qkv = torch.randn(BATCH, int(tokens[0]), spec.packed_width)
        feeds = {n: value(t.numpy()) for n, t in fixed.items()}
        feeds |= {"qkv": value(qkv.numpy()), "past_lengths": value(past.numpy())}
        feeds |= dict(zip(names, theirs_caches, strict=True))
        theirs, *theirs_caches = session.run_with_ort_values(None, feeds)
        scales = tuple(caches[2:]) or ((fixed["key_scale"], fixed["value_scale"]) if spec.quantized else None)
        norms = (fixed["q_norm"], fixed["k_norm"]) if spec.qk_norm else None
        ours = attend_in_place(qkv, fixed["cos"], fixed["sin"], past, *caches[:2], spec, scales=scales, norms_D=norms)
        # a code may fall to either side of an edge after float rounding: a few values move by a part of a step
        difference = (torch.from_numpy(theirs.numpy()) - ours).abs()
        assert float(difference.median()) < 1e-5
        assert float(difference.max()) < (1e-4 if not spec.quantized else 3e-2)
        past = past + torch.from_numpy(tokens) - torch.tensor([0, int(tokens[0] > 20)])  # rows grow ragged
    if fmt.name == "int8":
        seen = slice(0, int(past.min()))
        for cache, theirs_cache in zip(caches[:2], theirs_caches[:2], strict=True):
            theirs_codes = torch.from_numpy(theirs_cache.numpy())
            assert int((cache[:, :, seen].int() - theirs_codes[:, :, seen].int()).abs().max()) <= 1
    for cache, theirs_cache in zip(caches[2:], theirs_caches[2:], strict=True):
        theirs_scales = torch.from_numpy(theirs_cache.numpy())
        torch.testing.assert_close(theirs_scales, cache, rtol=1e-6, atol=0)


def test_a_window_of_one_sees_the_token_alone():
    spec = dataclasses.replace(BASE, window=1)
    fixed = inputs_of(spec)
    qkv = torch.randn(1, 8, spec.packed_width)
    caches = [torch.zeros(1, 2, 16, 32) for _ in range(2)]
    out = attend_in_place(qkv, fixed["cos"], fixed["sin"], torch.tensor([0]), *caches, spec)
    values = qkv[..., -2 * 32 :].reshape(1, 8, 2, 1, 32).expand(1, 8, 2, 3, 32).reshape(1, 8, -1)
    torch.testing.assert_close(out, values)
