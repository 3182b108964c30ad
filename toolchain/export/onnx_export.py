"""From the torch decoder to ONNX graphs: trace each kind of layer once, stamp it for all of that kind.

A decoder's layers are the same code, so a model of one layer of each kind is traced by
torch.onnx.export on the meta device (no weights, no arithmetic) and every layer is a copy of its kind
with the parameters renamed. Layers with and without experts are two kinds; windows and rotations
differ in attributes and tables alone. Export time hardly grows with depth, and the torch module stays
the only description of the model. Both kinds of logits leave the traced model; each phase keeps what
its outputs need.

Source of the scopes: torch.onnx records for every node the module path it came from
(`pkg.torch.onnx.name_scopes`), which tells the layers' nodes from the rest.
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
from toolchain.graph_io import (
    EMBEDDED,
    OUTPUT,
    PROJECTED,
    GraphIO,
    Phase,
    TensorSpec,
    graph_io,
    layer_value,
    past_name,
    present_name,
)
from toolchain.model.caches import CacheFormat
from toolchain.model.config import DecoderConfig, Layer
from toolchain.model.decoder import Decoder, attention_spec, experts_spec
from toolchain.model.positions import SINUSOIDAL, rope_table_names
from toolchain.ops.experts_body import EXPERTS, experts_body
from toolchain.ops.function_body import DOMAIN, OP_TYPE, OPSET, attention_functions, node_attributes

IR_VERSION = 10
LAYER_SCOPE = "decoder.model.layers.{}"
PARAMETER_PREFIX = "decoder."
TRACED_ROPE = rope_table_names("rope")
"""What the traced layers read in place of their own rotation."""
_SCOPES = "pkg.torch.onnx.name_scopes"


class _TracedModel(nn.Module):
    """One layer of each kind with both kinds of logits as outputs."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids, past_lengths, new_lengths, cos, sin, caches, position_tables):  # noqa: ANN001, ANN202
        decoder = self.decoder
        decoder.tables |= dict(zip((SINUSOIDAL,), position_tables, strict=False))
        x_BTE = decoder.embedded(input_ids, past_lengths)
        present = []
        for i, layer in enumerate(decoder.model.layers):
            x_BTE, cache = layer(x_BTE, (cos, sin), past_lengths, (caches[2 * i], caches[2 * i + 1]))
            present += cache
        last_B11 = (new_lengths - 1).unsqueeze(-1).unsqueeze(-1)
        last_B1E = x_BTE.gather(1, last_B11.expand(-1, 1, x_BTE.shape[-1]))
        return decoder.logits(last_B1E), decoder.logits(x_BTE), *present


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """Where one kind of layer begins and ends in the traced model, and the caches that leave it."""

    nodes: frozenset[ir.Node]
    hidden_in: ir.Value
    hidden_out: ir.Value
    present: tuple[ir.Value, ir.Value]


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The traced model: its graph, its compute format, and one layer of each kind."""

    graph: ir.Graph
    compute_dtype: str
    layers: dict[Layer, TracedLayer]


def layer_kind(layer: Layer) -> Layer:
    """What a layer shares with the others of its kind: all but attributes and tables."""
    return Layer(experts=layer.experts)


def trace_decoder(config: DecoderConfig, compute_dtype: str) -> TracedModel:
    """Trace a model of one layer of each kind on the meta device, in `compute_dtype`."""
    dtype = format_named(compute_dtype).torch_dtype
    kinds = tuple(dict.fromkeys(layer_kind(config.layer(i)) for i in range(config.num_hidden_layers)))
    small = config.model_copy(update={"num_hidden_layers": len(kinds), "layers": kinds})
    with torch.device("meta"):
        decoder = Decoder(small).to(dtype).eval()
        ids, *lengths = (torch.empty(shape, dtype=torch.int64) for shape in ((2, 3), (2,), (2,)))
        # one object per input: torch.export makes one input of two that are the same object
        cache_shape = (2, config.num_key_value_heads, 5, config.head_dim)
        caches = [torch.empty(cache_shape, dtype=dtype) for _ in range(2 * len(kinds))]
        tables = [torch.empty(config.context_len, config.rotary_dim // 2) for _ in range(2)]
        added = [torch.empty(config.context_len, config.hidden_size)][: config.position_embedding == "sinusoidal"]
    batch, tokens, capacity = (torch.export.Dim(name) for name in ("batch", "T", "capacity"))
    by_batch, by_slot = {0: batch}, {0: batch, 2: capacity}
    past, present = (_cache_names(name, len(kinds)) for name in (past_name, present_name))
    names = ["input_ids", "past_lengths", "new_lengths", *TRACED_ROPE, *past, *[SINUSOIDAL][: len(added)]]
    slots, fixed = [by_slot] * len(caches), [None] * len(added)
    with torch.no_grad(), _quiet_exporter():
        program = torch.onnx.export(
            _TracedModel(decoder),
            (ids, *lengths, *tables, caches, added),
            input_names=names,
            output_names=["last_logits", "logits", *present],
            dynamic_shapes=({0: batch, 1: tokens}, by_batch, by_batch, None, None, slots, fixed),
            opset_version=23,  # the newest that is emitted as asked; every op used is the same in 24
            dynamo=True,
            optimize=False,
            verbose=False,
            custom_translation_table={
                torch.ops.dtool.fused_attention.default: _attention_node,
                torch.ops.dtool.experts.default: _experts_node,
                torch.ops.aten.split.Tensor: _split_node,
            },
        )
    assert program is not None
    graph = program.model.graph
    layers = {kind: _locate_layer(graph, k) for k, kind in enumerate(kinds)}
    layers[kinds[0]].hidden_in.name = EMBEDDED
    return TracedModel(graph, compute_dtype, layers)


def _cache_names(name, layers: int) -> list[str]:  # noqa: ANN001
    return [name(i, part) for i in range(layers) for part in ("key", "value")]


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


def _attention_node(qkv, cos, sin, past, key, value, norms=(), *_, **__):  # noqa: ANN001, ANN002, ANN003, ANN202
    """Emit the op itself; its attributes are set when the layer is stamped."""
    node = ir.Node(DOMAIN, OP_TYPE, [qkv, cos, sin, past, key, value, *norms], num_outputs=3, version=1)
    evaluator.default().nodes.append(node)  # type: ignore[attr-defined]
    return list(node.outputs)


def _experts_node(x, weights, ids, gate_up, down):  # noqa: ANN001, ANN202
    """Emit the op itself."""
    node = ir.Node(DOMAIN, EXPERTS, [x, weights, ids, gate_up, down], num_outputs=1, version=1)
    evaluator.default().nodes.append(node)  # type: ignore[attr-defined]
    return node.outputs[0]


def _split_node(x, size, dim=0):  # noqa: ANN001, ANN202
    """Emit equal parts as outputs of one Split; the exporter's own form is a sequence, which compilers refuse."""
    count = int(x.shape[dim]) // int(size)
    attributes = ir.convenience.convert_attributes({"axis": dim, "num_outputs": count})
    node = ir.Node("", "Split", [x], attributes, num_outputs=count)
    evaluator.default().nodes.append(node)  # type: ignore[attr-defined]
    return list(node.outputs)


def _locate_layer(graph: ir.Graph, index: int) -> TracedLayer:
    layer, fixed = _nodes_in(graph, LAYER_SCOPE.format(index)), _constants(graph)
    entering = {v for n in layer for v in n.inputs if v is not None and v.producer() is not None}
    outside = {v for v in entering if v.producer() not in layer and v.producer() not in fixed}
    entering = {v for v in outside if v.dtype != ir.DataType.INT64}  # sizes of the batch may come along
    leaving = _leaving(graph, layer)
    if len(entering) != 1 or len(leaving) != 1:
        raise DtoolError(
            "the traced layer is not a chain",
            expected="one value entering and one leaving the layer",
            found=f"{sorted(str(v.name) for v in entering)} and {sorted(str(v.name) for v in leaving)}",
            fix="this is a fault of dtool with this model: please report it",
        )
    key, value = graph.outputs[2 + 2 * index : 4 + 2 * index]
    found = TracedLayer(layer, entering.pop(), leaving.pop(), (key, value))
    projected = _leaving(graph, _nodes_in(graph, f"{LAYER_SCOPE.format(index)}.self_attn.o_proj"))
    for name, output in {PROJECTED: projected.pop(), OUTPUT: found.hidden_out}.items():
        output.name = name
    return found


def _nodes_in(graph: ir.Graph, scope: str) -> frozenset[ir.Node]:
    """The nodes that a module of the traced model computes, its parts' included."""

    def inside(node: ir.Node) -> bool:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        return any(name == scope or name.startswith(scope + ".") for name in scopes)

    fixed = _constants(graph)
    return frozenset(node for node in graph if node not in fixed and inside(node))


def _constants(graph: ir.Graph) -> dict[ir.Node, None]:
    """Nodes that depend on nothing, in order: the tracer lets modules share them, so they belong to none."""
    found: dict[ir.Node, None] = {}
    for node in graph:
        if all(v is None or v.producer() in found for v in node.inputs):
            found[node] = None
    return found


def _leaving(graph: ir.Graph, nodes: frozenset[ir.Node]) -> set[ir.Value]:
    return {v for n in graph if n not in nodes for v in n.inputs if v is not None and v.producer() in nodes}


def build_graph(
    traced: TracedModel, config: DecoderConfig, phase: Phase, initializers: Mapping[str, ir.TensorProtocol]
) -> tuple[ir.Model, GraphIO]:
    """The ONNX model of one phase; `initializers` holds every parameter and position table by name."""
    contract = graph_io(config, phase, (CacheFormat(traced.compute_dtype),) * config.num_hidden_layers)
    graph = _Stamper(traced, config, phase, initializers, contract).build()
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="dtool", functions=[])
    bodies = attention_functions(attention_spec(config, i) for i in range(config.num_hidden_layers))
    if any(layer.experts for layer in traced.layers):
        bodies.append(experts_body(experts_spec(config), decode=phase == "decode"))
    for body in map(ir.serde.deserialize_function, bodies):
        model.functions[body.identifier()] = body
    return model, contract


class _Stamper:
    """Copies the traced nodes a phase needs into a new graph, each layer's from its kind."""

    def __init__(self, traced, config, phase, initializers, contract) -> None:  # noqa: ANN001
        self.traced, self.config, self.phase = traced, config, phase
        self.available, self.used = initializers, {}
        self.contract = contract
        self.inputs = {spec.name: _value(spec) for spec in contract.inputs}
        self.kinds = {kind: k for k, kind in enumerate(traced.layers)}
        self.nodes: list[ir.Node] = []

    def build(self) -> ir.Graph:
        graph, layers = self.traced.graph, self.traced.layers
        wanted = "last_logits" if self.phase == "prefill" else "logits"
        logits = next(v for v in graph.outputs if v.name == wanted)
        needed = _ancestors(logits)
        order = [node for node in graph if node in needed]
        inside = frozenset[ir.Node]().union(*(layer.nodes for layer in layers.values()))
        fixed = {node: None for node in _constants(graph) if node in needed}
        first = next(i for i, node in enumerate(order) if node in inside)
        before, after = (
            [n for n in part if n not in inside and n not in fixed] for part in (order[:first], order[first:])
        )
        steps = {kind: [node for node in order if node in layer.nodes] for kind, layer in layers.items()}
        entry, exit_ = next(iter(layers.values())).hidden_in, list(layers.values())[-1].hidden_out

        outer: dict[ir.Value, ir.Value] = {}
        self._copy([*fixed, *before], outer, "", 0)
        stream = outer[entry]
        for i in range(self.config.num_hidden_layers):
            kind = layer_kind(self.config.layer(i))
            inner = outer | {layers[kind].hidden_in: stream}
            self._copy(steps[kind], inner, layer_value(i, ""), i)
            stream = inner[layers[kind].hidden_out]
            for part, output in zip(("key", "value"), layers[kind].present, strict=True):
                inner[output].name = present_name(i, part)
                self.used[present_name(i, part)] = inner[output]
        outer[exit_] = stream
        self._copy(after, outer, "", 0)
        outer[logits].name = "logits"
        self.used["logits"] = outer[logits]
        return self._graph()

    def _copy(self, nodes: list[ir.Node], values: dict[ir.Value, ir.Value], prefix: str, layer: int) -> None:
        attention = node_attributes(attention_spec(self.config, layer))
        for node in nodes:
            inputs = [None if v is None else values.get(v) or self._outer_value(v, layer) for v in node.inputs]
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                attention if node.op_type == OP_TYPE else list(node.attributes.values()),
                num_outputs=len(node.outputs),
                name=f"{prefix}{node.outputs[0].name}",
            )
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.name = f"{prefix}{old.name}"
                values[old] = new
            self.nodes.append(copy)

    def _outer_value(self, value: ir.Value, layer: int) -> ir.Value:
        """A graph input or initializer of the traced model, as layer `layer` of the stamped graph knows it."""
        own, kind = self.config.layer(layer), self.kinds.get(layer_kind(self.config.layer(layer)))
        name = str(value.name).removeprefix(PARAMETER_PREFIX).replace(f"layers.{kind}.", f"layers.{layer}.", 1)
        if name in TRACED_ROPE:
            name = rope_table_names(own.rope)[TRACED_ROPE.index(name)]
        if name.startswith(f"past_key_values.{kind}."):
            name = past_name(layer, name.rsplit(".", 1)[1])
        if name in self.inputs:
            return self.inputs[name]
        if name == "lm_head.weight" and name not in self.available:
            name = "model.embed_tokens.weight"  # tied: one stored matrix
        if name not in self.used:
            tensor = self.available.get(name, value.const_value)
            if tensor is None:
                raise DtoolError(
                    f"the graph needs {name!r}, which no weight fills",
                    expected="a tensor of that name in the checkpoint",
                    found="none",
                    fix="this is a fault of dtool with this model: please report it",
                )
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
