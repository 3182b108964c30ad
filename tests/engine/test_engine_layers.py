# ruff: noqa: E501 - lines of the log, as written
"""The layer log's parser and what is concluded from it, on lines TensorRT-RTX 1.7.1 wrote."""

import onnx
import pytest

from toolchain.engine.layers import parse_layers
from toolchain.engine.report import GraphFacts, Product, read_graph, summarize, verify_engine
from toolchain.errors import DtoolError

LINEAR = "Format: (Linear) Row major linear format"
QKV = (
    "Name: l0.v.mm+l0.k.mm+l0.q.mm_myl0_2, LayerType: gemm, Inputs: [ { Name: l0.v.q_o0.1_myl0, Dimensions: [-1,576], "
    f"Strides: [576,1], StrideOrder: [1,0], Datatype: Int8, {LINEAR} }}], Constants: [ {{ Name: __mye20323_dconst_myl0, "
    f"Dimensions: [576,960], Strides: [960,1], StrideOrder: [1,0], Datatype: Int8, {LINEAR} }}, {{ Name: "
    f"__mye17370l0.v.mm_alpha_myl0, Dimensions: [1], Strides: [1], StrideOrder: [0], Datatype: Float, {LINEAR} }}], "
    "Outputs: [ { Name: __mye20328_myl0, Dimensions: [-1,960], Strides: [960,1], StrideOrder: [1,0], Datatype: Half, "
    f"{LINEAR} }}], TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: [ONNX Layer: l0.v.mm]\x1f[ONNX Layer: "
    "l0.v.xdq]\x1f[ONNX Layer: l0.k.mm]\x1f[ONNX Layer: l0.q.mm]"
)
ATTENTION = (
    "Name: _gemm_mha_v2_myl1_5, LayerType: kgen, Inputs: [ { Name: a, Dimensions: [-1,2,64,16], Strides: [32,16,-1,1], "
    "StrideOrder: [2,1,3,0], Datatype: Half, Format: (Arbitrary) Format with stride order = [2,1,3,0] }], Constants: [], "
    f"Outputs: [ {{ Name: b, Dimensions: [-1,-1,16], Strides: [16,-1,1], StrideOrder: [1,2,0], Datatype: Half, {LINEAR} "
    "}], TacticName: _gemm_mha_v2_0xbf53231bdf81f06bd63d476d1f4cca84, StreamId: 0, Metadata: [ONNX Layer: "
    "node_of_fa_attended | layers.0.getitem (FusedAttention)]"
)
WEIGHT_ONLY = (
    "Name: __myl_CastMulCastFc_myl0_2, LayerType: runtime_fusion, Inputs: [ { Name: x, Dimensions: [-1,576], Strides: "
    f"[576,1], StrideOrder: [1,0], Datatype: Half, {LINEAR} }}], Constants: [ {{ Name: s, Dimensions: [1,192], Strides: "
    f"[192,1], StrideOrder: [1,0], Datatype: Half, {LINEAR} }}, {{ Name: w, Dimensions: [576,192], Strides: [192,1], "
    f"StrideOrder: [1,0], Datatype: Int8, {LINEAR} }}], Outputs: [ {{ Name: y, Dimensions: [-1,192], Strides: [192,1], "
    f"StrideOrder: [1,0], Datatype: Half, {LINEAR} }}], TacticName: , StreamId: 0, Metadata: [ONNX Layer: l0.o.dq10]\x1f"
    "[ONNX Layer: Transpose_12]\x1f[ONNX Layer: l0.o.mm]"
)
SHAPE = (
    "Name: [ShapeHostToDeviceCopy 0], LayerType: ShapeHostToDevice, Inputs: [], Outputs: [ { Name: fa_tokens_1_125, "
    "Location: Device, Dimensions: [1], Datatype: Int64, Format: Format not available due to dynamic shapes }], "
    "ParameterType: ShapeH2D, shapeValues0: [-6], TacticValue: 0x0000000000000000, StreamId: 0, Metadata: "
)
BARE_DQ = (
    "Name: __myl_CastMulCast_myl0_3, LayerType: kgen, Inputs: [], Constants: [ { Name: w, Dimensions: [576,97], Strides: "
    f"[97,1], StrideOrder: [1,0], Datatype: Int8, {LINEAR} }}], Outputs: [ {{ Name: dequantized, Dimensions: [576,97], "
    f"Strides: [97,1], StrideOrder: [1,0], Datatype: Half, {LINEAR} }}], TacticName: t, StreamId: 0, Metadata: "
    "[ONNX Layer: head.dq]\x1f[ONNX Layer: head.t]"
)
HEAD = (
    "Name: head.mm_myl0_4, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [-1,576], Strides: [576,1], StrideOrder: "
    f"[1,0], Datatype: Half, {LINEAR} }}, {{ Name: dequantized, Dimensions: [576,97], Strides: [97,1], StrideOrder: [1,0], "
    f"Datatype: Half, {LINEAR} }}], Constants: [], Outputs: [ {{ Name: z, Dimensions: [-1,97], Strides: [97,1], "
    f"StrideOrder: [1,0], Datatype: Half, {LINEAR} }}], TacticName: c, StreamId: 0, Metadata: [ONNX Layer: head.mm]"
)
LOG = f"Layers:\n{SHAPE}\n{QKV}\n{ATTENTION}\n{WEIGHT_ONLY}\n{BARE_DQ}\n{HEAD}\n\nBindings:\ninput_ids"
FACTS = GraphFacts(
    op_types={"head.dq": "DequantizeLinear", "head.t": "Transpose", "l0.o.dq10": "DequantizeLinear"},
    products=(
        *(Product(f"l0.{x}.mm", "Int8", "Int8") for x in "qkv"),
        Product("l0.o.mm", "Half", "Int8"),
        Product("head.mm", "Half", "Int8"),
    ),
    attention=("layers.0.getitem",),
)


def test_every_line_becomes_a_kernel_with_its_operands_and_nodes():
    shape, qkv, attention, weight_only, *_ = kernels = parse_layers(LOG)
    assert len(kernels) == 6
    assert (shape.type, shape.inputs, [str(t) for t in shape.outputs]) == ("ShapeHostToDevice", (), ["Int64[1]"])
    assert [str(t) for t in qkv.inputs] == ["Int8[-1,576]"]
    assert [str(t) for t in qkv.constants] == ["Int8[576,960]", "Float[1]"]
    assert qkv.onnx_nodes == ("l0.v.mm", "l0.v.xdq", "l0.k.mm", "l0.q.mm")
    assert attention.is_fused_attention
    assert attention.tactic.startswith("_gemm_mha_v2_0x")
    assert weight_only.is_product


def test_a_line_of_another_form_is_refused():
    with pytest.raises(DtoolError, match="another form"):
        parse_layers("Layers:\nName: x, Kind: gemm")


def test_the_summary_counts_attention_products_and_lone_dequantization():
    summary = summarize(parse_layers(LOG), FACTS)
    assert summary["attention"]["fused"] == summary["attention"]["layers"] == 1
    assert summary["attention"]["kernels"][0]["layer"] == 0
    assert summary["products"]["in_graph"] == 5
    assert summary["products"]["kernels"] == 3
    assert summary["products"]["without_kernel"] == []
    assert {(r["activations"], r["weights"], r["products"]) for r in summary["products"]["precisions"]} == {
        ("Int8", "Int8", 3),
        ("Half", "Int8", 2),
    }
    assert summary["unfused_qdq"] == 1


def test_an_engine_that_does_what_the_graph_says_passes():
    verify_engine("prefill", parse_layers(LOG), FACTS)


def test_attention_that_is_not_fused_fails_and_names_its_node():
    kernels = parse_layers(LOG.replace("_gemm_mha_v2", "__myl_Softmax"))
    with pytest.raises(DtoolError, match=r"not fused[\s\S]*layers\.0\.getitem"):
        verify_engine("prefill", kernels, FACTS)


def test_float32_weights_recorded_as_int8_fail():
    kernels = parse_layers(LOG.replace("[960,1], StrideOrder: [1,0], Datatype: Int8", "[960,1], Datatype: Float"))
    with pytest.raises(DtoolError, match=r"3 of 5 differ: l0\.q\.mm \(Int8 x Int8\) runs as Int8 x Float"):
        verify_engine("decode", kernels, FACTS)


def test_a_product_without_kernel_fails():
    with pytest.raises(DtoolError, match=r"head\.mm .* has no product kernel"):
        verify_engine("decode", parse_layers(LOG.replace(HEAD, "")), FACTS)


def test_the_graph_tells_stored_and_activation_types():
    helper, types = onnx.helper, onnx.TensorProto
    graph = onnx.parser.parse_graph("""
        g (float16[n, 4] x) => (float16[n, 4] y, float[n, 4] z, float16[n, n] w) {
            dq = DequantizeLinear <axis=0> (codes, scales)
            half = Cast <to=10> (dq)
            t = Transpose <perm=[1, 0]> (half)
            y = MatMul (x, t)
            xf = Cast <to=1> (x)
            q = QuantizeLinear (xf, one, zero)
            xr = DequantizeLinear (q, one, zero)
            u = Transpose <perm=[1, 0]> (dq)
            z = MatMul (xr, u)
            w = MatMul (x, y)
        }""")
    for name, dtype, dims in (
        ("codes", types.INT8, [4, 4]),
        ("scales", types.FLOAT, [4]),
        ("one", types.FLOAT, []),
        ("zero", types.INT8, []),
    ):
        graph.initializer.append(
            helper.make_tensor(name, dtype, dims, [1] * max(1, dims[0] ** len(dims) if dims else 1))
        )
    for i, node in enumerate(graph.node):
        node.name = f"n{i}"
    facts = read_graph(helper.make_model(graph), "float16")
    assert facts.products == (Product("n3", "Half", "Int8"), Product("n8", "Int8", "Int8"))
