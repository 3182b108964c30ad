"""Finding the products of a graph: which activations meet which stored matrix, and how.

Four forms leave the exporter and the quantizer, all with the matrix stored [out, in]:

    float        MatMul(x, Transpose(W))
    weight_only  MatMul(x, Transpose(DequantizeLinear(codes, scale)))
    static       MatMul(DQ(Q(x, s), s), Transpose(DequantizeLinear(codes, scale)))
    per_token    Mul(MatMul(DQ(Q(x / s)), Transpose(DequantizeLinear(codes, scale))), s)
"""

from dataclasses import dataclass

import onnx_ir as ir

from toolchain.errors import DtoolError
from toolchain.model.quantized import CHANNEL_WEIGHT, FEED_FORWARD_ROTATION, INPUT_SCALE, ROTATION

PLAIN = (ROTATION, FEED_FORWARD_ROTATION, CHANNEL_WEIGHT)


@dataclass(frozen=True, slots=True)
class Linear:
    """One product: float input, stored matrix (and scales) by name, the node and value to replace."""

    kind: str
    x: ir.Value
    weight: str
    scale: str | None
    first: ir.Node
    output: ir.Value
    input_scale: str | None = None


def find_linears(graph: ir.Graph) -> list[Linear]:
    """Every product with a stored matrix, in graph order. Raises DtoolError on an unknown form.

    The bases of a rotated model and the columns of an excess are read as they lie, and stay as they are.
    """
    products = [node for node in graph if node.op_type == "MatMul" and node.domain == ""]
    return [_linear(node) for node in products if not _is_plain(node)]


def _is_plain(node: ir.Node) -> bool:
    weight = node.inputs[1]
    return weight is not None and weight.is_initializer() and str(weight.name).endswith(PLAIN)


def _linear(node: ir.Node) -> Linear:
    x, weight = node.inputs
    transpose = _producer(weight)
    if x is None or transpose is None or transpose.op_type != "Transpose":
        raise _unknown(node)
    stored = transpose.inputs[0]
    dequantize = _producer(stored)
    if dequantize is None:
        assert stored is not None
        return Linear("float", x, str(stored.name), None, node, node.outputs[0])
    if dequantize.op_type != "DequantizeLinear":
        raise _unknown(node)
    codes, scale = dequantize.inputs[:2]
    assert codes is not None
    assert scale is not None
    rounded = _producer(x)
    if rounded is None or rounded.op_type != "DequantizeLinear":
        return Linear("weight_only", x, str(codes.name), str(scale.name), node, node.outputs[0])
    fixed = rounded.inputs[1]
    if fixed is not None and str(fixed.name).endswith(INPUT_SCALE):
        quantize = _chain(rounded, "QuantizeLinear")
        if quantize is None or quantize.inputs[0] is None:
            raise _unknown(node)
        names = str(codes.name), str(scale.name)
        return Linear("static", quantize.inputs[0], *names, node, node.outputs[0], str(fixed.name))
    ratio = _chain(rounded, "QuantizeLinear", "Div")
    scaled = next(iter(node.outputs[0].uses())).node
    if ratio is None or scaled.op_type != "Mul" or ratio.inputs[0] is None:
        raise _unknown(node)
    return Linear("per_token", ratio.inputs[0], str(codes.name), str(scale.name), node, scaled.outputs[0])


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _chain(node: ir.Node, *op_types: str) -> ir.Node | None:
    """Follow first inputs through nodes of these types; the last of them."""
    current: ir.Node | None = node
    for op_type in op_types:
        current = _producer(current.inputs[0]) if current is not None else None
        if current is None or current.op_type != op_type:
            return None
    return current


def _unknown(node: ir.Node) -> DtoolError:
    return DtoolError(
        f"the product {node.name!r} has a form the embedded backend does not know",
        expected="a matrix stored as dtool writes it, in float32",
        found=f"inputs {[v.name for v in node.inputs if v is not None]}",
        fix="give an artifact dtool exported with compute_dtype float32",
    )
