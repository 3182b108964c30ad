"""Quantization written into the graphs as standard QuantizeLinear / DequantizeLinear.

    weight-only   W -> DequantizeLinear(codes, scale, axis 0)   where the weight was used
    per token     s = max(|x|) / 127;  x' = DQ(Q(x / s));  y = s * (x' . DQ(codes)^T)   all in float32
    cache         the attention node's scale inputs and cache_format; the graph's cache types

The quantize scale of the token path is the constant 1, which keeps it legal where activations must
have static scales (TensorRT), and the surrounding ordinary operators fuse.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from toolchain.formats import FORMATS
from toolchain.graph_io import Phase, external_initializer, graph_io
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import attention_spec
from toolchain.model.quantized import KV_SCALES, SCALE_SUFFIX
from toolchain.numerics import INT8_QMAX, SMALLEST_SCALE
from toolchain.ops.function_body import DOMAIN, INPUTS, OP_TYPE, function_body, node_attributes
from toolchain.quantize.plan import EMBEDDING, HEAD, QuantizePlan
from toolchain.tensor_file import TensorEntry

_FLOAT = ir.DataType.FLOAT


class GraphQuantizer:
    """Rewrites one graph in place according to a plan and the written tensors."""

    def __init__(
        self,
        model: ir.Model,
        config: DecoderConfig,
        plan: QuantizePlan,
        entries: Mapping[str, TensorEntry],
        compute_dtype: str,
    ) -> None:
        self.model, self.graph = model, model.graph
        self.config, self.plan, self.entries = config, plan, entries
        self.compute = ir.DataType(FORMATS[compute_dtype].onnx_code)
        self.weights = {f"{name}.weight" for name in plan.weights}
        self.rounded: dict[str, tuple[ir.Value, ir.Value]] = {}

    def run(self, phase: Phase, cache_format: str) -> None:
        """Apply weights, activations and cache."""
        for value in list(self.graph.initializers.values()):
            name = str(value.name)
            if name in self.weights:
                self._quantize_weight(value)
            elif name in self.entries:
                value.const_value = external_initializer(name, self.entries[name]).const_value
        if cache_format != "none":
            self._quantize_cache(phase, cache_format)

    def _quantize_weight(self, weight: ir.Value) -> None:
        name = str(weight.name)
        users = [usage.node for usage in weight.uses()]
        codes = self._initializer(name, replaces=weight)
        scale = self._initializer(name + SCALE_SUFFIX)
        dequantized: dict[bool, ir.Value] = {}
        for user in users:
            is_product = user.op_type == "Transpose"
            product = next(iter(user.outputs[0].uses())).node if is_product else user
            module = name.removesuffix(".weight")
            if is_product and module == EMBEDDING:
                module = HEAD  # the tied matrix as the head
            per_token = is_product and module in self.plan.per_token
            if per_token not in dequantized:
                dequantized[per_token] = self._dequantize(codes, scale, user, cast=not per_token)
            user.replace_input_with(0, dequantized[per_token])
            if per_token:
                self._round_activation(product)

    def _initializer(self, name: str, replaces: ir.Value | None = None) -> ir.Value:
        value = external_initializer(name, self.entries[name])
        if replaces is not None:
            del self.graph.initializers[name]
        self.graph.initializers.setdefault(name, value)
        return self.graph.initializers[name]

    def _constant(self, name: str, value: np.ndarray) -> ir.Value:
        if name not in self.graph.initializers:
            tensor = ir.tensor(value, name=name)
            typed = {"type": ir.TensorType(tensor.dtype), "shape": ir.Shape(value.shape)}
            self.graph.initializers[name] = ir.Value(name=name, const_value=tensor, **typed)
        return self.graph.initializers[name]

    def _insert(self, before: ir.Node, op: str, inputs: list[ir.Value], name: str, **attributes: Any) -> ir.Value:
        node = ir.Node("", op, inputs, ir.convenience.convert_attributes(attributes), num_outputs=1, name=name)
        node.outputs[0].name = name
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def _dequantize(self, codes: ir.Value, scale: ir.Value, before: ir.Node, *, cast: bool) -> ir.Value:
        name = f"{codes.name}_dequantized" + ("" if cast else "_float")
        value = self._insert(before, "DequantizeLinear", [codes, scale], name, axis=0)
        if cast and self.compute != _FLOAT:
            value = self._insert(before, "Cast", [value], f"{name}_cast", to=int(self.compute))
        return value

    def _round_activation(self, product: ir.Node) -> None:
        x, output = product.inputs[0], product.outputs[0]
        assert x is not None
        if str(x.name) not in self.rounded:
            self.rounded[str(x.name)] = self._rounded_input(x, product)
        rounded, scale = self.rounded[str(x.name)]
        product.replace_input_with(0, rounded)
        name = str(output.name)
        users, is_output = list(output.uses()), output in self.graph.outputs
        output.name = f"{name}_unscaled"
        scaled = ir.Node("", "Mul", [output, scale], num_outputs=1, name=f"{name}_scaled")
        nodes = [scaled]
        if self.compute != _FLOAT:
            nodes.append(
                ir.Node(
                    "",
                    "Cast",
                    [scaled.outputs[0]],
                    ir.convenience.convert_attributes({"to": int(self.compute)}),
                    num_outputs=1,
                    name=f"{name}_cast",
                )
            )
            scaled.outputs[0].name = f"{name}_float"
        final = nodes[-1].outputs[0]
        final.name = name
        self.graph.insert_after(product, nodes)
        for usage in users:
            usage.node.replace_input_with(usage.idx, final)
        if is_output:
            index = self.graph.outputs.index(output)
            final.type, final.shape = output.type, output.shape
            self.graph.outputs[index] = final

    def _rounded_input(self, x: ir.Value, before: ir.Node) -> tuple[ir.Value, ir.Value]:
        """The rounded float32 input and its scale per token; shared by all products that read `x`."""
        name = str(x.name)
        one = self._constant("quantize.one", np.array(1.0, np.float32))
        zero = self._constant("quantize.zero", np.array(0, np.int8))
        floor = self._constant("quantize.floor", np.array(SMALLEST_SCALE * INT8_QMAX, np.float32))
        qmax = self._constant("quantize.qmax", np.array(INT8_QMAX, np.float32))
        axis = self._constant("quantize.axis", np.array([-1], np.int64))
        value = x if self.compute == _FLOAT else self._insert(before, "Cast", [x], f"{name}_as_float", to=int(_FLOAT))
        size = self._insert(before, "Abs", [value], f"{name}_abs")
        amax = self._insert(before, "ReduceMax", [size, axis], f"{name}_amax", keepdims=1)
        amax = self._insert(before, "Max", [amax, floor], f"{name}_amax_floor")
        scale = self._insert(before, "Div", [amax, qmax], f"{name}_token_scale")
        ratio = self._insert(before, "Div", [value, scale], f"{name}_ratio")
        codes = self._insert(before, "QuantizeLinear", [ratio, one, zero], f"{name}_codes")
        return self._insert(before, "DequantizeLinear", [codes, one, zero], f"{name}_rounded"), scale

    def _quantize_cache(self, phase: Phase, cache_format: str) -> None:
        spec = attention_spec(self.config, cache_format)
        attributes = node_attributes(spec)
        nodes = [node for node in self.graph if node.op_type == OP_TYPE and node.domain == DOMAIN]
        for i, node in enumerate(nodes):
            node.resize_inputs(len(INPUTS) + len(KV_SCALES))
            for position, scale in enumerate(KV_SCALES, len(INPUTS)):
                node.replace_input_with(position, self._initializer(f"model.layers.{i}.self_attn.{scale}"))
            for attribute in attributes:
                node.attributes[attribute.name] = attribute
        body = ir.serde.deserialize_function(function_body(spec))
        self.model.functions[body.identifier()] = body
        contract = graph_io(self.config, phase, cache_format)
        types = {s.name: ir.DataType(FORMATS[s.dtype].onnx_code) for s in (*contract.inputs, *contract.outputs)}
        for value in (*self.graph.inputs, *self.graph.outputs):
            value.type = ir.TensorType(types[str(value.name)])


def quantize_graph(
    path: Path,
    config: DecoderConfig,
    plan: QuantizePlan,
    entries: Mapping[str, TensorEntry],
    phase: Phase,
    *,
    compute_dtype: str,
    cache_format: str,
) -> bytes:
    """The bytes of the quantized graph made from the exported one at `path`."""
    model = ir.serde.deserialize_model(onnx.load(path, load_external_data=False))
    GraphQuantizer(model, config, plan, entries, compute_dtype).run(phase, cache_format)
    return ir.serde.serialize_model(model).SerializeToString(deterministic=True)
