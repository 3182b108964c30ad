# ruff: noqa: E501 - lines of the log, as written
"""The layer log's parser and what is concluded from it, on lines TensorRT-RTX 1.7.1 wrote."""

import dataclasses
import json

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


PLUGIN = (
    "Name: layers.0.getitem [profile 1], LayerType: PluginV3, Inputs: [ { Name: qkv, Dimensions: [-1,1,256], Datatype: Half, "
    f"{LINEAR} }}], Outputs: [ {{ Name: out, Dimensions: [-1,1,128], Datatype: Half, {LINEAR} }}, {{ Name: present, "
    f"Dimensions: [-1,2,64,32], Datatype: Int8, {LINEAR} }}], TacticName: , Metadata: [ONNX Layer: layers.0.getitem]"
)


ROW = (
    "Name: __myl_AddSqrtDivMulMulMoveCastReshMulSum_myl1_1, LayerType: kgen, Inputs: [ { Name: x, Dimensions: [1,1,64], "
    f"Strides: [64,64,1], StrideOrder: [2,1,0], Datatype: Float, {LINEAR} }}], Constants: [ {{ Name: w, Dimensions: "
    f"[1,64,128], Strides: [8192,128,1], StrideOrder: [2,1,0], Datatype: Half, {LINEAR} }}], Outputs: [ {{ Name: y, "
    f"Dimensions: [1,1,128], Strides: [128,128,1], StrideOrder: [2,1,0], Datatype: Half, {LINEAR} }}], TacticName: t, "
    "StreamId: 0, Metadata: [ONNX Layer: l0.norm]\x1f[ONNX Layer: l0.cast]\x1f[ONNX Layer: l0.q.mm]"
)
ROW_FACTS = GraphFacts({}, (Product("l0.q.mm", "Half", "Half", 64 * 128, "l0.cast"),), ())


def kernels_of(text):
    (kernels,) = parse_layers(text)
    return kernels


def test_profiles_are_told_apart_by_the_tags_of_their_regions():
    first = LOG.split("Bindings", maxsplit=1)[0]
    second = QKV.replace("_myl0_2", " [profile 1]_myl7_2")
    untagged = SHAPE.replace("[ShapeHostToDeviceCopy 0]", "__mye7_myl7_0")
    prefill, decode = parse_layers(f"{first}\n{untagged}\n{second}\n{PLUGIN}\n", 2)
    assert (len(prefill), len(decode)) == (6, 3)
    assert decode[0].name == "__mye7_myl7_0"


def test_the_inspector_tells_the_same_as_the_log():
    layers = [
        {
            "Name": "l0.q.mm",
            "LayerType": "gemm",
            "Inputs": [{"Name": "x", "Dimensions": [-1, 8], "Format/Datatype": "Row major Int8 format"}],
            "Constants": [{"Name": "w", "Dimensions": [8, 8], "Format/Datatype": "Int8"}],
            "Outputs": [{"Name": "y", "Dimensions": [-1, 8], "Format/Datatype": "FP16"}],
            "TacticName": "t",
            "Metadata": "[ONNX Layer: l0.q.mm]",
        },
        "a layer of an engine without detail",
    ]
    (kernels,) = parse_layers(json.dumps([{"Layers": layers}]))
    assert [str(t) for t in (*kernels[0].inputs, *kernels[0].constants, *kernels[0].outputs)] == [
        "Int8[-1,8]",
        "Int8[8,8]",
        "Half[-1,8]",
    ]
    assert kernels[0].onnx_nodes == ("l0.q.mm",)
    assert kernels[1].name == "a layer of an engine without detail"


def test_attention_nodes_without_a_body_must_run_in_the_plugin():
    facts = dataclasses.replace(FACTS, plugin=True)
    with pytest.raises(DtoolError, match=r"the plugin for each of 1 nodes"):
        verify_engine("decode", kernels_of(LOG), facts)
    verify_engine("decode", kernels_of(LOG.replace(ATTENTION, PLUGIN.replace(" [profile 1]", ""))), facts)


def test_a_quantized_cache_may_be_written_in_no_wider_type():
    facts = dataclasses.replace(FACTS, plugin=True, cache=("Int8", (-1, 2, 64, 32)))
    log = LOG.replace(ATTENTION, PLUGIN.replace(" [profile 1]", ""))
    verify_engine("decode", kernels_of(log), facts)
    expanded = BARE_DQ.replace(
        "[576,97], Strides: [97,1], StrideOrder: [1,0], Datatype: Half", "[-1,2,64,32], Datatype: Half"
    )
    with pytest.raises(DtoolError, match="expands the quantized cache"):
        verify_engine("decode", kernels_of(log.replace(HEAD, f"{HEAD}\n{expanded}")), facts)


def test_every_line_becomes_a_kernel_with_its_operands_and_nodes():
    shape, qkv, attention, weight_only, *_ = kernels = kernels_of(LOG)
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
    summary = summarize(kernels_of(LOG), FACTS)
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
    verify_engine("prefill", kernels_of(LOG), FACTS)


def test_attention_that_is_not_fused_fails_and_names_its_node():
    kernels = kernels_of(LOG.replace("_gemm_mha_v2", "__myl_Softmax"))
    with pytest.raises(DtoolError, match=r"not fused[\s\S]*layers\.0\.getitem"):
        verify_engine("prefill", kernels, FACTS)


def test_float32_weights_recorded_as_int8_fail():
    kernels = kernels_of(LOG.replace("[960,1], StrideOrder: [1,0], Datatype: Int8", "[960,1], Datatype: Float"))
    with pytest.raises(DtoolError, match=r"3 of 5 differ: l0\.q\.mm \(Int8 x Int8\) runs as Int8 x Float"):
        verify_engine("decode", kernels, FACTS)


def test_a_product_without_kernel_fails():
    with pytest.raises(DtoolError, match=r"head\.mm .* has no kernel that is known as a product"):
        verify_engine("decode", kernels_of(LOG.replace(HEAD, "")), FACTS)


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
    assert facts.products == (Product("n3", "Half", "Int8", 16), Product("n8", "Int8", "Int8", 16, "n6"))


def test_a_product_of_one_row_is_known_as_multiply_and_sum():
    kernels = kernels_of(ROW)
    verify_engine("decode", kernels, ROW_FACTS)
    (row,) = summarize(kernels, ROW_FACTS)["products"]["precisions"]
    assert (row["activations"], row["weights"], row["products"]) == ("Half", "Half", 1)
    for steps in ("MulSlicSlicSumSumSiluMul_", "MulMulAddSum_"):
        verify_engine("decode", kernels_of(ROW.replace("MulSum_", steps)), ROW_FACTS)


@pytest.mark.parametrize(
    ("found", "there"),
    [
        ("[8192,128,1], StrideOrder: [2,1,0], Datatype: Half", "[8192,128,1], Datatype: Float"),
        ("Dimensions: [1,64,128]", "Dimensions: [1,64,64]"),
        ("[ONNX Layer: l0.cast]", "[ONNX Layer: l0.other]"),
        ("MulSum_", "MulMean_"),
    ],
    ids=["a weight in another type", "half of the weight", "activations that are not cast", "no sum"],
)
def test_a_product_of_one_row_is_held_to_its_types_and_its_weight(found, there):
    assert found in ROW
    with pytest.raises(DtoolError, match=r"1 of 1 differ: l0\.q\.mm \(Half x Half\)"):
        verify_engine("decode", kernels_of(ROW.replace(found, there)), ROW_FACTS)


def test_profiles_without_any_tag_are_told_apart_by_their_regions():
    prefill, decode = parse_layers(f"Layers:\n{QKV}\n{ATTENTION.replace('_myl1_5', '_myl0_5')}\n{ROW}\n", 2)
    assert [kernel.name[:7] for kernel in decode] == ["__myl_A"]
    assert len(prefill) == 2
