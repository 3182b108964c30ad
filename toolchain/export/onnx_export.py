"""From the torch decoder to ONNX graphs: trace one layer, stamp it for all.

A decoder's layers are the same code, so a model of one layer is traced by torch.onnx.export on the
meta device (no weights, no arithmetic) and its layer is copied per layer with the parameters renamed.
Export time hardly grows with depth, and the torch module stays the only description of the model.
Both kinds of logits leave the traced model; each phase keeps what its outputs need.

Source of the scopes: torch.onnx records for every node the module path it came from
(`pkg.torch.onnx.name_scopes`), which tells the layer's nodes from the rest.
"""

import ast
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from onnxscript import evaluator
from torch import nn

from toolchain.errors import DtoolError
from toolchain.formats import FORMATS, format_named
from toolchain.graph_io import GraphIO, Phase, TensorSpec, graph_io, past_name, present_name
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Decoder, attention_spec
from toolchain.ops.function_body import DOMAIN, OP_TYPE, OPSET, function_body, node_attributes

IR_VERSION = 10
ROPE_INITIALIZERS = ("rope.cos", "rope.sin")
LAYER_SCOPE = "decoder.model.layers.0"
PARAMETER_PREFIX = "decoder."
_SCOPES = "pkg.torch.onnx.name_scopes"


class _TracedModel(nn.Module):
    """One layer of the decoder with both kinds of logits as outputs."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids, past_lengths, new_lengths, past_key, past_value, cos, sin):  # noqa: ANN001, ANN202
        decoder = self.decoder
        x_BTE = decoder.model.embed_tokens(input_ids)
        x_BTE, cache = decoder.model.layers[0](x_BTE, (cos, sin), past_lengths, (past_key, past_value))
        last_B11 = (new_lengths - 1).unsqueeze(-1).unsqueeze(-1)
        last_B1E = x_BTE.gather(1, last_B11.expand(-1, 1, x_BTE.shape[-1]))
        return decoder.logits(last_B1E), decoder.logits(x_BTE), *cache


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """The traced one-layer model and where its layer begins and ends."""

    graph: ir.Graph
    layer_nodes: frozenset[ir.Node]
    hidden_in: ir.Value
    hidden_out: ir.Value


def trace_decoder(config: DecoderConfig, compute_dtype: str) -> TracedLayer:
    """Trace a one-layer model of this config on the meta device, in `compute_dtype`."""
    dtype = format_named(compute_dtype).torch_dtype
    with torch.device("meta"):
        decoder = Decoder(config.model_copy(update={"num_hidden_layers": 1})).to(dtype).eval()
        ids, *lengths = (torch.empty(shape, dtype=torch.int64) for shape in ((2, 3), (2,), (2,)))
        # one object per input: torch.export makes one input of two that are the same object
        cache = [torch.empty(2, config.num_key_value_heads, 5, config.head_dim, dtype=dtype) for _ in range(2)]
        tables = [torch.empty(config.max_position_embeddings, config.head_dim // 2) for _ in range(2)]
    batch, tokens, capacity = (torch.export.Dim(name) for name in ("batch", "T", "capacity"))
    by_batch, by_slot = {0: batch}, {0: batch, 2: capacity}
    with torch.no_grad(), _quiet_exporter():
        program = torch.onnx.export(
            _TracedModel(decoder),
            (ids, *lengths, *cache, *tables),
            input_names=["input_ids", "past_lengths", "new_lengths", *_cache_names(past_name), *ROPE_INITIALIZERS],
            output_names=["last_logits", "logits", *_cache_names(present_name)],
            dynamic_shapes=({0: batch, 1: tokens}, by_batch, by_batch, by_slot, by_slot, None, None),
            opset_version=23,  # the newest that is emitted as asked; every op used is the same in 24
            dynamo=True,
            optimize=False,
            verbose=False,
            custom_translation_table={
                torch.ops.dtool.fused_attention.default: _attention_node,
                torch.ops.aten.split.Tensor: _split_node,
            },
        )
    assert program is not None
    return _locate_layer(program.model.graph)


def _cache_names(name) -> tuple[str, str]:  # noqa: ANN001
    return name(0, "key"), name(0, "value")


class _quiet_exporter:  # noqa: N801 - a context manager
    """Silence torch.onnx's notes on optional packages that dtool does not use."""

    def __enter__(self) -> None:
        self.logger = logging.getLogger("torch.onnx")
        self.level = self.logger.level
        self.logger.setLevel(logging.ERROR)
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exception: object) -> None:
        self.caught.__exit__(*exception)  # type: ignore[arg-type]
        self.logger.setLevel(self.level)


def _attention_node(qkv, cos, sin, past, key, value, *_, **__):  # noqa: ANN001, ANN002, ANN003, ANN202
    """Emit the op itself; its attributes are set when the layer is stamped."""
    tape = evaluator.default()
    node = ir.Node(DOMAIN, OP_TYPE, [qkv, cos, sin, past, key, value], num_outputs=3, version=1)
    tape.nodes.append(node)  # type: ignore[attr-defined]
    return list(node.outputs)


def _split_node(x, size, dim=0):  # noqa: ANN001, ANN202
    """Emit equal parts as outputs of one Split; the exporter's own form is a sequence, which compilers refuse."""
    count = int(x.shape[dim]) // int(size)
    attributes = ir.convenience.convert_attributes({"axis": dim, "num_outputs": count})
    node = ir.Node("", "Split", [x], attributes, num_outputs=count)
    evaluator.default().nodes.append(node)  # type: ignore[attr-defined]
    return list(node.outputs)


def _locate_layer(graph: ir.Graph) -> TracedLayer:
    def in_layer(node: ir.Node) -> bool:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        return any(scope == LAYER_SCOPE or scope.startswith(LAYER_SCOPE + ".") for scope in scopes)

    layer = frozenset(node for node in graph if in_layer(node))
    entering = {v for n in layer for v in n.inputs if v is not None and v.producer() is not None}
    entering = {v for v in entering if v.producer() not in layer}
    leaving = {v for n in graph if n not in layer for v in n.inputs if v is not None and v.producer() in layer}
    if len(entering) != 1 or len(leaving) != 1:
        raise DtoolError(
            "the traced layer is not a chain",
            expected="one value entering and one leaving the layer",
            found=f"{sorted(str(v.name) for v in entering)} and {sorted(str(v.name) for v in leaving)}",
            fix="this is a fault of dtool with this model: please report it",
        )
    return TracedLayer(graph, layer, entering.pop(), leaving.pop())


def build_graph(
    traced: TracedLayer, config: DecoderConfig, phase: Phase, initializers: Mapping[str, ir.TensorProtocol]
) -> tuple[ir.Model, GraphIO]:
    """The ONNX model of one phase; `initializers` holds every parameter and the RoPE tables by name."""
    compute = next(
        f.name
        for f in FORMATS.values()
        if f.onnx_code == int(traced.graph.inputs[3].dtype)  # type: ignore[arg-type]
    )
    contract = graph_io(config, phase, compute)
    graph = _Stamper(traced, config, phase, initializers, contract).build()
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="dtool", functions=[])
    body = ir.serde.deserialize_function(function_body(attention_spec(config)))
    model.functions[body.identifier()] = body
    return model, contract


class _Stamper:
    """Copies the traced nodes a phase needs into a new graph, the layer's once per layer."""

    def __init__(self, traced, config, phase, initializers, contract) -> None:  # noqa: ANN001
        self.traced, self.config, self.phase = traced, config, phase
        self.available, self.used = initializers, {}
        self.contract = contract
        self.inputs = {spec.name: _value(spec) for spec in contract.inputs}
        self.attributes = node_attributes(attention_spec(config))
        self.nodes: list[ir.Node] = []

    def build(self) -> ir.Graph:
        traced = self.traced
        wanted = "last_logits" if self.phase == "prefill" else "logits"
        logits = next(v for v in traced.graph.outputs if v.name == wanted)
        needed = _ancestors(logits)
        order = [node for node in traced.graph if node in needed]
        first = next(i for i, node in enumerate(order) if node in traced.layer_nodes)
        layer = [node for node in order if node in traced.layer_nodes]
        before = [node for node in order[:first] if node not in traced.layer_nodes]
        after = [node for node in order[first:] if node not in traced.layer_nodes]

        outer: dict[ir.Value, ir.Value] = {}
        self._copy(before, outer, "", 0)
        for i in range(self.config.num_hidden_layers):
            inner = dict(outer)
            self._copy(layer, inner, f"layers.{i}.", i)
            outer[traced.hidden_in] = inner[traced.hidden_out]
            for part, output in zip(("key", "value"), traced.graph.outputs[2:], strict=True):
                outer[output] = inner[output]
                outer[output].name = present_name(i, part)
                self.used[present_name(i, part)] = outer[output]
        outer[traced.hidden_out] = outer[traced.hidden_in]
        self._copy(after, outer, "", 0)
        outer[logits].name = "logits"
        self.used["logits"] = outer[logits]
        return self._graph()

    def _copy(self, nodes: list[ir.Node], values: dict[ir.Value, ir.Value], prefix: str, layer: int) -> None:
        for node in nodes:
            inputs = [None if v is None else values.get(v) or self._outer_value(v, layer) for v in node.inputs]
            attributes = self.attributes if node.op_type == OP_TYPE else list(node.attributes.values())
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                attributes,
                num_outputs=len(node.outputs),
                name=f"{prefix}{node.outputs[0].name}",
            )
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.name = f"{prefix}{old.name}"
                values[old] = new
            self.nodes.append(copy)

    def _outer_value(self, value: ir.Value, layer: int) -> ir.Value:
        """A graph input or initializer of the traced model, as the stamped graph knows it."""
        name = str(value.name).removeprefix(PARAMETER_PREFIX).replace("layers.0.", f"layers.{layer}.", 1)
        if name.startswith("past_key_values.0."):
            name = past_name(layer, name.rsplit(".", 1)[1])
        if name in self.inputs:
            return self.inputs[name]
        if name == "lm_head.weight" and name not in self.available:
            name = "model.embed_tokens.weight"  # tied: one stored matrix
        if name not in self.used:
            tensor = self.available.get(name, value.const_value)
            if tensor is None:
                raise DtoolError(f"the graph needs {name!r}, which no weight fills")
            self.used[name] = ir.Value(
                name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape)
            )
        return self.used[name]

    def _graph(self) -> ir.Graph:
        outputs = []
        for spec in self.contract.outputs:
            value = self.used.pop(spec.name)
            value.type, value.shape = ir.TensorType(ir.DataType(FORMATS[spec.dtype].onnx_code)), ir.Shape(spec.shape)
            outputs.append(value)
        return ir.Graph(
            list(self.inputs.values()),
            outputs,
            nodes=self.nodes,
            initializers=list(self.used.values()),
            opset_imports={"": OPSET, DOMAIN: 1},
            name=self.phase,
        )


def _value(spec: TensorSpec) -> ir.Value:
    dtype = ir.DataType(FORMATS[spec.dtype].onnx_code)
    return ir.Value(name=spec.name, type=ir.TensorType(dtype), shape=ir.Shape(spec.shape))


def _ancestors(value: ir.Value) -> set[ir.Node]:
    found: set[ir.Node] = set()
    stack = [value.producer()]
    while stack:
        node = stack.pop()
        if node is None or node in found:
            continue
        found.add(node)
        stack += [v.producer() for v in node.inputs if v is not None]
    return found
