"""Quantization written into the graphs as standard QuantizeLinear / DequantizeLinear.

    weight-only   W -> DequantizeLinear(codes, scale)           axis 0; int4: axis 1 in blocks
    per token     s = max(|x|) / qmax;  x' = DQ(Q(x / s));  y = s * (x' . DQ(codes)^T)   all in float32
    static        x' = DQ(Q(x, s), s);  y = x' . DQ(codes)^T
    cache         the attention nodes' scale inputs, attributes and bodies; the graph's inputs and outputs

The quantize scale of the token path is the constant 1, which keeps it legal where activations must
have static scales (TensorRT), and the surrounding ordinary operators fuse. Elsewhere values are
dequantized in the compute type: TensorRT fuses int4 only so, and products then write half values. The
stored scales are values of that type, so nothing is lost.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from toolchain.formats import FORMATS
from toolchain.graph_io import Phase, TensorSpec, external_initializer, graph_io, load_graph, past_name, present_name
from toolchain.model.caches import SCALE_PARTS, CacheFormat
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import attention_spec
from toolchain.model.quantized import INPUT_SCALE, KV_SCALES, SCALE_SUFFIX
from toolchain.numerics import CODE_RANGE, SMALLEST_SCALE
from toolchain.ops.attention import AttentionSpec
from toolchain.ops.function_body import (
    DOMAIN,
    INPUTS,
    OP_TYPE,
    attention_functions,
    input_names,
    node_attributes,
    output_names,
    overload,
)
from toolchain.quantize.cache import ATTENTION_NAME
from toolchain.quantize.graph_bases import write_bases
from toolchain.quantize.plan import EMBEDDING, HEAD, QuantizePlan
from toolchain.recipe import Recipe
from toolchain.recipe_sections import Activations
from toolchain.tensor_file import TensorEntry

_FLOAT = ir.DataType.FLOAT


class GraphQuantizer:
    """Rewrites one graph in place according to a plan and the written tensors."""

    def __init__(
        self,
        model: ir.Model,
        config: DecoderConfig,
        plan: QuantizePlan,
        caches: tuple[CacheFormat, ...],
        entries: Mapping[str, TensorEntry],
        recipe: Recipe,
        compute_dtype: str,
    ) -> None:
        self.model, self.graph = model, model.graph
        self.config, self.plan, self.caches, self.entries, self.recipe = config, plan, caches, entries, recipe
        self.compute = ir.DataType(FORMATS[compute_dtype].onnx_code)
        self.weights = {f"{name}.weight" for name in plan.weights}
        self.codes: dict[tuple[str, str, str], tuple[ir.Value, ir.Value, ir.Value | None]] = {}
        """Of each input rounded in a format: its codes, the scale they are shown with, and the token's scale."""

    def run(self, phase: Phase) -> None:
        """Apply bases, weights, activations and cache."""
        write_bases(self, self.config, self.entries)
        for value in list(self.graph.initializers.values()):
            name = str(value.name)
            if name in self.weights:
                self._quantize_weight(value)
            elif name in self.entries:
                value.const_value = external_initializer(name, self.entries[name]).const_value
        if any(cache.quantized for cache in self.caches):
            self._quantize_caches(phase)

    def _quantize_weight(self, weight: ir.Value) -> None:
        name = str(weight.name)
        users = list(weight.uses())
        codes = self.initializer(name, replaces=weight)
        scale = self.initializer(name + SCALE_SUFFIX)
        dequantized: dict[str, ir.Value] = {}
        for user, place in ((usage.node, usage.idx) for usage in users):
            is_product = user.op_type == "Transpose"
            product = next(iter(user.outputs[0].uses())).node if is_product else user
            module = name.removesuffix(".weight")
            if is_product and module == EMBEDDING:
                module = HEAD  # the tied matrix as the head
            rounded = self.plan.rounded.get(module) if is_product else None
            by_token = rounded is not None and rounded.granularity == "token"
            # one for the rows and one for the product: a value that two parts of an engine share is expanded whole
            use = "_rows" if not is_product else "_float" if by_token else ""
            if use not in dequantized:
                dequantized[use] = self._dequantize(codes, scale, user, use)
            user.replace_input_with(place, dequantized[use])
            if rounded is not None:
                self._round_activation(product, module, rounded)

    def initializer(self, name: str, replaces: ir.Value | None = None) -> ir.Value:
        """A tensor of the weights file as an input of nodes, in the place of `replaces`."""
        entry = self.entries[name]
        if name.removesuffix(".weight") in self.plan.groups:  # two int4 codes to a stored byte
            entry = replace(entry, dtype="int4", shape=(entry.shape[0], 2 * entry.shape[1]))
        value = external_initializer(name, entry)
        if replaces is not None:
            del self.graph.initializers[name]
        self.graph.initializers.setdefault(name, value)
        return self.graph.initializers[name]

    def constant(self, name: str, value: np.ndarray) -> ir.Value:
        """A value written into the graph itself."""
        if name not in self.graph.initializers:
            tensor = ir.tensor(value, name=name)
            typed = {"type": ir.TensorType(tensor.dtype), "shape": ir.Shape(value.shape)}
            self.graph.initializers[name] = ir.Value(name=name, const_value=tensor, **typed)
        return self.graph.initializers[name]

    def insert(self, before: ir.Node, op: str, inputs: list[ir.Value], name: str, **attributes: Any) -> ir.Value:
        """A new node of one output, called as it is, before another."""
        node = ir.Node("", op, inputs, ir.convenience.convert_attributes(attributes), num_outputs=1, name=name)
        node.outputs[0].name = name
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def _dequantize(self, codes: ir.Value, scale: ir.Value, before: ir.Node, use: str) -> ir.Value:
        name = f"{codes.name}_dequantized{use}"
        group = self.plan.groups.get(str(codes.name).removesuffix(".weight"))
        blocks = {"axis": 1, "block_size": group} if group else {"axis": 0}
        held = scale if use == "_float" else self._in_compute_type(scale, name, before)
        return self.insert(before, "DequantizeLinear", [codes, held], name, **blocks)

    def _in_compute_type(self, scale: ir.Value, user: str, before: ir.Node) -> ir.Value:
        if self.compute == _FLOAT:
            return scale
        return self.insert(before, "Cast", [scale], f"{user}_scale", to=int(self.compute))

    def _round_activation(self, product: ir.Node, module: str, how: Activations) -> None:
        x, output = product.inputs[0], product.outputs[0]
        assert x is not None
        key = (str(x.name), how.format, how.granularity)
        if key not in self.codes:
            by_token = how.granularity == "token"
            make = self._token_codes if by_token else functools.partial(self._static_codes, module)
            self.codes[key] = make(x, product, how.format)
        codes, scale, token_scale = self.codes[key]
        # one for each product: a value that two parts of an engine share crosses between them in float
        shown = [codes, scale, self._zero_code(how.format)]
        product.replace_input_with(0, self.insert(product, "DequantizeLinear", shown, f"{output.name}_input"))
        if token_scale is not None:
            self._multiply_back(product, output, token_scale)

    def _multiply_back(self, product: ir.Node, output: ir.Value, token_scale: ir.Value) -> None:
        """Put the token's scale behind a product; the result takes the product's name and users."""
        name = str(output.name)
        users, is_output = list(output.uses()), output in self.graph.outputs
        output.name = f"{name}_unscaled"
        nodes = [ir.Node("", "Mul", [output, token_scale], num_outputs=1, name=f"{name}_scaled")]
        if self.compute != _FLOAT:
            nodes[0].outputs[0].name = f"{name}_float"
            to = ir.convenience.convert_attributes({"to": int(self.compute)})
            nodes.append(ir.Node("", "Cast", list(nodes[0].outputs), to, num_outputs=1, name=f"{name}_cast"))
        final = nodes[-1].outputs[0]
        final.name = name
        self.graph.insert_after(product, nodes)
        for usage in users:
            usage.node.replace_input_with(usage.idx, final)
        if is_output:
            index = self.graph.outputs.index(output)
            final.type, final.shape = output.type, output.shape
            self.graph.outputs[index] = final

    def _token_codes(self, x: ir.Value, before: ir.Node, fmt: str) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The codes of an input, in units of its scale per token; shared by all products that read `x`."""
        name = f"{x.name}_{fmt}"
        largest = CODE_RANGE[fmt][1]
        one, zero = self.constant("quantize.one", np.array(1.0, np.float32)), self._zero_code(fmt)
        floor = self.constant(f"quantize.floor.{fmt}", np.array(SMALLEST_SCALE * largest, np.float32))
        qmax = self.constant(f"quantize.qmax.{fmt}", np.array(largest, np.float32))
        axis = self.constant("quantize.axis", np.array([-1], np.int64))
        value = self._as_float(x, before)
        size = self.insert(before, "Abs", [value], f"{name}_abs")
        amax = self.insert(before, "ReduceMax", [size, axis], f"{name}_amax", keepdims=1)
        amax = self.insert(before, "Max", [amax, floor], f"{name}_amax_floor")
        scale = self.insert(before, "Div", [amax, qmax], f"{name}_token_scale")
        ratio = self.insert(before, "Div", [value, scale], f"{name}_ratio")
        return self.insert(before, "QuantizeLinear", [ratio, one, zero], f"{name}_codes"), one, scale

    def _static_codes(self, module: str, x: ir.Value, before: ir.Node, fmt: str) -> tuple[ir.Value, ir.Value, None]:
        """The codes of an input with the scale that calibration stored for this product."""
        name, scale, zero = f"{x.name}_{fmt}", self.initializer(f"{module}.{INPUT_SCALE}"), self._zero_code(fmt)
        codes = self.insert(before, "QuantizeLinear", [self._as_float(x, before), scale, zero], f"{name}_codes")
        return codes, self._in_compute_type(scale, f"{name}_rounded", before), None

    def _as_float(self, x: ir.Value, before: ir.Node) -> ir.Value:
        return x if self.compute == _FLOAT else self.insert(before, "Cast", [x], f"{x.name}_as_float", to=int(_FLOAT))

    def _zero_code(self, fmt: str) -> ir.Value:
        dtype = ir.DataType(FORMATS[fmt].onnx_code)
        return self.constant(f"quantize.zero.{fmt}", np.zeros((), dtype.numpy()))

    def _quantize_caches(self, phase: Phase) -> None:
        """Give every layer's attention node its kind of cache, and the graph the inputs and outputs of them."""
        specs = [attention_spec(self.config, i, cache) for i, cache in enumerate(self.caches)]
        contract = graph_io(self.config, phase, self.caches)
        inputs = {str(value.name): value for value in self.graph.inputs}
        outputs = {str(value.name): value for value in self.graph.outputs}
        pasts = {spec.name: inputs.get(spec.name) or ir.Value(name=spec.name) for spec in contract.inputs}
        nodes = [node for node in self.graph if node.op_type == OP_TYPE and node.domain == DOMAIN]
        for i, (node, spec) in enumerate(zip(nodes, specs, strict=True)):
            norms = list(node.inputs[len(INPUTS) :])
            scales = self._cache_scales(i, pasts)
            node.resize_inputs(len(input_names(spec)))
            for position, value in enumerate((*scales, *norms), len(INPUTS)):
                node.replace_input_with(position, value)
            node.resize_outputs(len(output_names(spec)))
            names = [present_name(i, part) for part in self.caches[i].parts]
            for name, value in zip(names, node.outputs[1:], strict=True):
                value.name = name
                outputs[name] = value
            node.overload = overload(spec)
            for attribute in node_attributes(spec):
                node.attributes[attribute.name] = attribute
        self.graph.inputs[:] = [_typed(pasts[spec.name], spec) for spec in contract.inputs]
        self.graph.outputs[:] = [_typed(outputs[spec.name], spec) for spec in contract.outputs]
        self._replace_bodies(specs)

    def _cache_scales(self, layer: int, pasts: Mapping[str, ir.Value]) -> list[ir.Value]:
        """The scales a layer's attention reads: weights of the model, or caches of the graph."""
        cache = self.caches[layer]
        if cache.token_scales:
            return [pasts[past_name(layer, part)] for part in SCALE_PARTS]
        named = ATTENTION_NAME.format(layer)
        return [self.initializer(f"{named}.{scale}") for scale in KV_SCALES] if cache.quantized else []

    def _replace_bodies(self, specs: list[AttentionSpec]) -> None:
        for identifier in [key for key in self.model.functions if key[:2] == (DOMAIN, OP_TYPE)]:
            del self.model.functions[identifier]
        for body in map(ir.serde.deserialize_function, attention_functions(specs)):
            self.model.functions[body.identifier()] = body


def _typed(value: ir.Value, spec: TensorSpec) -> ir.Value:
    value.type, value.shape = ir.TensorType(ir.DataType(FORMATS[spec.dtype].onnx_code)), ir.Shape(spec.shape)
    return value


def quantize_graph(
    path: Path,
    config: DecoderConfig,
    plan: QuantizePlan,
    caches: tuple[CacheFormat, ...],
    entries: Mapping[str, TensorEntry],
    phase: Phase,
    recipe: Recipe,
    *,
    compute_dtype: str,
) -> bytes:
    """The bytes of the quantized graph made from the exported one at `path`."""
    model = ir.serde.deserialize_model(load_graph(path))
    GraphQuantizer(model, config, plan, caches, entries, recipe, compute_dtype).run(phase)
    return ir.serde.serialize_model(model).SerializeToString(deterministic=True)
