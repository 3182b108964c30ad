"""The embedded backend: the artifact's graphs rewritten for ONNX Runtime's CPU kernels.

Attention becomes com.microsoft.GroupQueryAttention over the same in-place cache, and integer weights
meet integer activations in MatMulIntegerToFloat, whose sums are exact, so a token's result does not
depend on what else is in the batch or the call:

    per token     y = s * (q . C^T) * scale          s = max|x| / 127, q = round(x / s)
    static        the same with s from calibration
    weight-only   y = s * (q1 . C^T + q2 . C^T / 254) * scale,   q2 = round(254 * (x / s - q1))

The second spends two int8 digits (about 15 bits) on each activation, stacked as two rows of one
product, so the weights are read once. Activations are stored as uint8 with zero point 128, the form
that has fast kernels. Without VNNI those kernels add pairs of u8 * s8 products in 16 bits and
saturate; `probe_integer_products` finds out, and the weights are then stored as uint8 as well.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from toolchain.artifact import Artifact, Draft, require_room
from toolchain.engine.linears import Linear, find_linears
from toolchain.errors import DtoolError
from toolchain.graph_io import GRAPH_FILES, PHASES, Phase, external_initializer, load_graph
from toolchain.model.config import DecoderConfig
from toolchain.model.positions import rope_table_names
from toolchain.numerics import INT8_QMAX
from toolchain.ops.function_body import DOMAIN, OP_TYPE, SCALE_INPUTS
from toolchain.processor import probe_integer_products
from toolchain.tensor_file import TensorEntry, build_header, read_header, read_tensor, tensor_bytes, write_stream

WEIGHTS, ROPE = "weights.safetensors", "rope.safetensors"
MICROSOFT = "com.microsoft"
GROUP_QUERY = "GroupQueryAttention"
ATTENTION = (GROUP_QUERY, OP_TYPE)
SECOND_DIGIT = 254.0
ROTARY_STEP = 16
"""GroupQueryAttention itself rotates a multiple of this many dims."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the engine's weights file: made by `make` when its turn to be written comes."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], object]


@dataclass(slots=True)
class RewrittenGraphs:
    """What the rewriting of all phases shares: the source's tensors and the ones to write."""

    config: DecoderConfig
    source: dict[str, TensorEntry]
    unsigned_weights: bool
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)


def build_onnxruntime(source: Artifact, draft: Draft, report: Callable[[str], None]) -> dict[str, object]:
    """Write the three graphs and their weights into the draft; the engine report's data."""
    compute = source.manifest.details["compute_dtype"]
    if compute != "float32":
        raise DtoolError(
            f"the embedded backend computes in float32, not {compute}",
            expected="an artifact exported with compute_dtype float32",
            found=str(compute),
            fix="export again with --set compute_dtype=float32",
        )
    config = source.read("decoder.json", DecoderConfig)
    shared = RewrittenGraphs(config, read_header(source.file(WEIGHTS)), not probe_integer_products())
    models = {phase: _rewrite(source.file(GRAPH_FILES[phase]), phase, shared) for phase in PHASES}
    _write_tensors(shared, draft)
    report(f"{sum(shared.products.values())} products in the form of the runtime")
    (draft.path / ROPE).write_bytes(source.file(ROPE).read_bytes())
    entries = read_header(draft.path / WEIGHTS)
    for phase in PHASES:
        model = models[phase]
        for name, value in model.graph.initializers.items():
            if name in entries:
                value.const_value = external_initializer(name, entries[name]).const_value
        data = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
        (draft.path / GRAPH_FILES[phase]).write_bytes(data)
    needs_exact = not shared.unsigned_weights and any(t.dtype == "int8" for t in shared.stored.values())
    draft.target["needs_exact_u8s8"] = needs_exact
    return {
        "products": shared.products,
        "integer_weights": "uint8" if shared.unsigned_weights else "int8",
        "needs_exact_u8s8": needs_exact,
        "attention": dict(Counter(f"{n.domain}.{n.op_type}" for n in models["decode"].graph if n.op_type in ATTENTION)),
        "layers": config.num_hidden_layers,
    }


def _rewrite(path: Path, phase: Phase, shared: RewrittenGraphs) -> ir.Model:
    model = ir.serde.deserialize_model(load_graph(path))
    rewriter = _Rewriter(model.graph, phase, shared)
    rewriter.embedding()
    for linear in find_linears(model.graph):
        rewriter.product(linear)
    rewriter.attention()
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)
    for name in model.graph.initializers:
        if name in shared.source:
            entry = shared.source[name]
            shared.stored.setdefault(
                name, StoredTensor(entry.dtype, entry.shape, functools.partial(read_tensor, entry))
            )
    model.graph.opset_imports[MICROSOFT] = 1
    if all(node.domain != DOMAIN for node in model.graph):
        model.graph.opset_imports.pop(DOMAIN, None)
    return model


class _Rewriter:
    """Replaces nodes of one graph; new matrices go to `shared.stored` under stable names."""

    def __init__(self, graph: ir.Graph, phase: Phase, shared: RewrittenGraphs) -> None:
        self.graph, self.phase, self.shared = graph, phase, shared
        self.position: ir.Node = next(iter(graph))
        self.values = {str(v.name): v for v in graph.inputs}
        self.count = 0
        self.positions: ir.Value | None = None

    # ---- building blocks ----

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Insert a node before the current position; its output, or its outputs."""
        attrs = ir.convenience.convert_attributes(attributes)
        self.count += 1
        name = f"{self.phase}_{op_type}_{self.count}"
        node = ir.Node(domain, op_type, list(inputs), attrs, num_outputs=outputs, name=name)
        for i, value in enumerate(node.outputs):
            value.name = f"{name}_{i}"
        self.graph.insert_before(self.position, node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def constant(self, name: str, value: np.ndarray) -> ir.Value:
        """A small initializer kept inside the graph."""
        name = f"embedded.{name}"
        if name not in self.graph.initializers:
            tensor = ir.tensor(value, name=name)
            typed = {"type": ir.TensorType(tensor.dtype), "shape": ir.Shape(value.shape)}
            self.graph.initializers[name] = ir.Value(name=name, const_value=tensor, **typed)
        return self.graph.initializers[name]

    def stored(self, name: str, tensor: StoredTensor) -> ir.Value:
        """An initializer that will lie in the weights file."""
        self.shared.stored.setdefault(name, tensor)
        if name not in self.graph.initializers:  # its place in the file is known once all are written
            entry = TensorEntry(Path(WEIGHTS), tensor.dtype, tensor.shape, 0, 0)
            self.graph.initializers[name] = external_initializer(name, entry)
        return self.graph.initializers[name]

    # ---- matrices ----

    def matrix(self, name: str) -> ir.Value:
        """The matrix [out, in] transposed to [in, out], as the kernels read it."""
        entry = self.shared.source[name]
        unsigned = entry.dtype == "int8" and self.shared.unsigned_weights

        def make() -> object:
            import torch

            stored = read_tensor(entry)
            if unsigned:
                stored = (stored.to(torch.int16) + 128).to(torch.uint8)
            return stored.mT.contiguous()

        dtype = "uint8" if unsigned else entry.dtype
        return self.stored(f"{name}.transposed", StoredTensor(dtype, entry.shape[::-1], make))

    def scales(self, name: str, divisor: float = 1.0) -> ir.Value:
        """The scales of a matrix, divided by `divisor`."""
        entry = self.shared.source[name]

        def make() -> object:
            return read_tensor(entry) / divisor

        stored = name if divisor == 1.0 else f"{name}/{divisor:g}"
        return self.stored(stored, StoredTensor("float32", entry.shape, make))

    def embedding(self) -> None:
        """Read rows from the matrix the head uses, so that a tied matrix is stored once.

        Integer codes are gathered before they are dequantized, never the whole matrix. Position tables stay.
        """
        for node in [n for n in self.graph if n.op_type == "Gather" and n.domain == ""]:
            table, ids = node.inputs[0], node.inputs[1]
            assert table is not None
            dequantize = table.producer()
            tied = len({usage.node.op_type for usage in table.uses()}) > 1
            self.position = node
            if dequantize is None and tied:
                rows = self._columns(str(table.name), ids)
            elif dequantize is not None and dequantize.op_type == "DequantizeLinear":
                codes, scale = (str(v.name) for v in dequantize.inputs[:2] if v is not None)
                rows = self._integer_rows(codes, scale, ids)
            else:
                continue
            self._replace(node.outputs[0], rows)

    def _columns(self, name: str, ids: ir.Value | None) -> ir.Value:
        return self.op("Transpose", self.op("Gather", self.matrix(name), ids, axis=1), perm=[1, 2, 0])

    def _integer_rows(self, codes: str, scale: str, ids: ir.Value | None) -> ir.Value:
        rows = self.op("Cast", self._columns(codes, ids), to=int(ir.DataType.FLOAT))
        if self.shared.unsigned_weights:
            rows = self.op("Sub", rows, self.constant("offset", np.array(128.0, np.float32)))
        scale_rows = self.op("Gather", self.scales(scale), ids, axis=0)
        axis = self.constant("axis", np.array([-1], np.int64))
        return self.op("Mul", rows, self.op("Unsqueeze", scale_rows, axis))

    # ---- products ----

    def product(self, linear: Linear) -> None:
        """The integer (or float) product of one matrix, in the kernels' own form."""
        self.position = linear.first
        kind = linear.kind
        self.shared.products[kind] = self.shared.products.get(kind, 0) + (self.phase == "decode")
        weight = self.matrix(linear.weight)
        if kind == "float":
            output = self.op("MatMul", linear.x, weight)
        elif kind == "weight_only":
            output = self._two_digit_product(linear.x, weight, self.scales(str(linear.scale), INT8_QMAX))
        elif kind == "static":
            scale = self.scales(str(linear.input_scale))
            codes = self.op("QuantizeLinear", linear.x, scale, self._zero())
            output = self.op("Mul", self._exact_sums(codes, weight, self.scales(str(linear.scale))), scale)
        else:
            output = self._one_digit_product(linear.x, weight, self.scales(str(linear.scale)))
        self._replace(linear.output, output)

    def _replace(self, old: ir.Value, new: ir.Value) -> None:
        """Put `new` in the place of `old`, under its name."""
        name, old.name = old.name, f"{old.name}_replaced"
        new.name = name
        if old in self.graph.outputs:
            new.type, new.shape = old.type, old.shape
            self.graph.outputs[self.graph.outputs.index(old)] = new
        ir.convenience.replace_all_uses_with(old, new)

    def _one_digit_product(self, x: ir.Value, weight: ir.Value, scales: ir.Value) -> ir.Value:
        """One code per activation, q = round(x / s) with s = max|x| / 127: exactly what the artifact says."""
        scale = self.op("Div", self._amax(x), self.constant("qmax", np.array(INT8_QMAX, np.float32)))
        codes = self._codes(self.op("Div", x, scale), 1.0)
        return self.op("Mul", self._exact_sums(codes, weight, scales), scale)

    def _two_digit_product(self, x: ir.Value, weight: ir.Value, scales: ir.Value) -> ir.Value:
        """Two codes per activation, x / max|x| in digits of 1/127 and 1/127/254, as rows of one product.

        `scales` are divided by 127: the codes count in 1/127.
        """
        amax, step = self._amax(x), 1 / INT8_QMAX
        unit = self.op("Div", x, amax)
        first = self._codes(unit, step)
        shown = self.op("DequantizeLinear", first, self._float(step), self._zero())
        second = self._codes(self.op("Sub", unit, shown), step / SECOND_DIGIT)
        sums = self._exact_sums(self.op("Concat", first, second, axis=0), weight, scales)
        high, low = self.op("Split", sums, outputs=2, axis=0, num_outputs=2)
        y = self.op("Add", high, self.op("Mul", low, self._float(1 / SECOND_DIGIT)))
        return self.op("Mul", y, amax)

    def _amax(self, x: ir.Value) -> ir.Value:
        """The largest magnitude of each token.

        A token of zeros divides by it to NaN, whose codes are finite, and is multiplied by it at the
        end: exactly zero, without a node that guards it.
        """
        return self.op("ReduceMax", self.op("Abs", x), self.constant("axis", np.array([-1], np.int64)), keepdims=1)

    def _codes(self, x: ir.Value, step: float) -> ir.Value:
        return self.op("QuantizeLinear", x, self._float(step), self._zero())

    def _exact_sums(self, codes: ir.Value, weight: ir.Value, scales: ir.Value) -> ir.Value:
        zero = self._zero()
        inputs = (codes, weight, self._float(1.0), scales, zero, zero if self.shared.unsigned_weights else None)
        return self.op("MatMulIntegerToFloat", *inputs, domain=MICROSOFT)

    def _float(self, value: float) -> ir.Value:
        return self.constant(f"{value:.9g}", np.array(value, np.float32))

    def _zero(self) -> ir.Value:
        return self.constant("zero", np.array(128, np.uint8))

    # ---- attention ----

    def attention(self) -> None:
        """Every attention node becomes GroupQueryAttention over the same cache, which knows scales per channel.

        One with a scale per token stays as it is, with its body of standard operators.
        """
        nodes = [node for node in self.graph if node.op_type == OP_TYPE]
        nodes = [node for node in nodes if not node.attributes["token_scales"].value]
        if not nodes:
            return
        self.position = nodes[0]
        past = self.values["past_lengths"]
        one = self.constant("one_int64", np.array(1, np.int64))
        new = self.values.get("new_lengths")
        last = past if new is None else self.op("Sub", self.op("Add", past, new), one)
        last32 = self.op("Cast", last, to=int(ir.DataType.INT32))
        if new is None:
            new = self.op("Add", self.op("Mul", past, self.constant("zero_int64", np.array(0, np.int64))), one)
        new32 = self.op("Cast", new, to=int(ir.DataType.INT32))
        first_cache = self.values["past_key_values.0.key"]
        capacity = self.op("Squeeze", self.op("Shape", first_cache, start=2, end=3))
        total32 = self.op("Cast", capacity, to=int(ir.DataType.INT32))
        for node in nodes:
            self.position = node
            self._group_query(node, last32, total32, new32)

    def _group_query(self, node: ir.Node, last: ir.Value, total: ir.Value, new: ir.Value) -> None:
        packed, cos, sin, past, key, value, *rest = node.inputs
        spec = {name: attribute.value for name, attribute in node.attributes.items()}
        quantized = spec["cache_format"] != "none"
        scales, norms = rest[: len(SCALE_INPUTS) * quantized], rest[len(SCALE_INPUTS) * quantized :]
        extra: dict[str, object] = {"softcap": spec["softcap"]} if spec["softcap"] else {}
        if spec["window"]:
            extra["local_window_size"] = spec["window"]
        wide = [self._wide_scale(str(scale.name)) for scale in scales if scale is not None]
        if wide:
            extra |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        assert packed is not None
        assert cos is not None
        turns = cos.name != rope_table_names("no_rope")[0]
        inside = turns and spec["rotary_dim"] % ROTARY_STEP == 0
        outside = (cos, sin, past) if turns and not inside else ()
        if norms or outside:
            packed = self._prepared(packed, norms, outside, spec)
        outputs = self.op(
            GROUP_QUERY,
            packed, None, None, key, value, last, total,
            *((cos, sin) if inside else (None, None)), None, None, None,
            *(wide or (None, None)), None, None, new,
            domain=MICROSOFT,
            outputs=3,
            num_heads=spec["num_heads"],
            kv_num_heads=spec["num_kv_heads"],
            do_rotary=int(inside),
            rotary_interleaved=spec["interleaved"],
            scale=spec["scale"],
            **extra,
        )  # fmt: skip
        for old, replacement in zip(node.outputs, outputs, strict=True):
            self._replace(old, replacement)

    def _prepared(self, packed: ir.Value, norms: list[Any], rope: tuple[Any, ...], spec: dict[str, Any]) -> ir.Value:
        """The packed projection with every query and key head normed and turned: what GroupQueryAttention cannot."""
        heads, kv_heads, dim = spec["num_heads"], spec["num_kv_heads"], spec["head_dim"]
        shape = self.constant("heads", np.array([0, 0, heads + 2 * kv_heads, dim], np.int64))
        sizes = self.constant("packed", np.array([heads, kv_heads, kv_heads], np.int64))
        *ready, values = self.op("Split", self.op("Reshape", packed, shape), sizes, outputs=3, axis=2)
        if norms:
            pairs = zip(ready, norms, strict=True)
            ready = [self.op("RMSNormalization", x, w, axis=-1, epsilon=spec["qk_norm_eps"]) for x, w in pairs]
        if rope:
            ready = [self._turned(x, rope, spec) for x in ready]
        flat = self.constant("flat", np.array([0, 0, -1], np.int64))
        return self.op("Reshape", self.op("Concat", *ready, values, axis=2), flat)

    def _turned(self, x: ir.Value, rope: tuple[Any, ...], spec: dict[str, Any]) -> ir.Value:
        """Heads [batch, T, heads, head_dim] rotated by their positions; `rope`: both tables and the past lengths."""
        cos, sin, past = rope
        if self.positions is None:
            zero, one = (self.constant(f"{n}_int64", np.array(i, np.int64)) for i, n in enumerate(("zero", "one")))
            tokens = self.op("Squeeze", self.op("Shape", x, start=1, end=2))
            column = self.op("Unsqueeze", past, self.constant("axis_1", np.array([1], np.int64)))
            self.positions = self.op("Add", column, self.op("Range", zero, tokens, one))
        rotary = spec["rotary_dim"] if spec["rotary_dim"] < spec["head_dim"] else 0  # 0: the whole head
        major = self.op("Transpose", x, perm=[0, 2, 1, 3])
        attributes = {"interleaved": spec["interleaved"], "rotary_embedding_dim": rotary}
        turned = self.op("RotaryEmbedding", major, cos, sin, self.positions, **attributes)
        return self.op("Transpose", turned, perm=[0, 2, 1, 3])

    def _wide_scale(self, name: str) -> ir.Value:
        entry, dim = self.shared.source[name], self.shared.config.head_dim
        heads = entry.shape[0]

        def make() -> object:
            return read_tensor(entry)[None, :, None, None].expand(1, heads, 1, dim).contiguous()

        return self.stored(f"{name}.wide", StoredTensor("float32", (1, heads, 1, dim), make))


def _write_tensors(shared: RewrittenGraphs, draft: Draft) -> None:
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in shared.stored.items()}
    header, ranges = build_header(layout)
    require_room(draft.out, len(header) + sum(length for _, length in ranges.values()))
    chunks = (tensor_bytes(tensor.make()) for tensor in shared.stored.values())
    draft.known_sha256[WEIGHTS] = write_stream(draft.path / WEIGHTS, header, chunks)
