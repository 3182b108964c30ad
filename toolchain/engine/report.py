"""What was compiled, held against what the graph asked for.

TensorRT may keep a weight in another format, or leave attention unfused, and still succeed. The
engine report lists every kernel, counts the fused attentions and the matrix products by the types
of their operands, and `verify_engine` fails a build whose kernels do not do what the graph says.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolchain.engine.layers import Kernel, KernelTensor
from toolchain.engine.profiles import ATTENTION, ENGINE_PHASES
from toolchain.errors import DtoolError, name_list
from toolchain.report import Bars, Page, Table

TRT_NAMES = {
    "FLOAT": "Float",
    "FLOAT16": "Half",
    "BFLOAT16": "BFloat16",
    "INT8": "Int8",
    "INT4": "Int4",
    "FLOAT8E4M3FN": "FP8",
}
_CODES = frozenset({"Int8", "Int4", "FP8"})
KINDS = {
    "PluginV3": "attention plugin (PluginV3)",
    "kgen": "generated (kgen)",
    "runtime_fusion": "product with more (runtime_fusion)",
    "gemm": "product (gemm)",
}
"""What the compiler's kinds of kernels are, for people."""
_QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
_CARRIERS = _QDQ | {"Transpose", "Cast", "Reshape", "Identity"}
_PROFILE_TAG = re.compile(r"\s*\[profile \d+\]$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of the graph: TensorRT's names of the types of its activations and weights.

    `elements`: the size of its stored matrix. `maker`: the node that its activations come from.
    """

    node: str
    activations: str
    weights: str
    elements: int = 0
    maker: str = ""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a graph asks of its engine: op type by node name, its products, its attention nodes, its caches.

    `plugin`: the attention nodes have no body, so a plugin must run them. `cache`: type and shape of one
    quantized cache; None for a cache of values.
    """

    op_types: Mapping[str, str]
    products: tuple[Product, ...]
    attention: tuple[str, ...]
    plugin: bool = False
    cache: tuple[str, tuple[int, ...]] | None = None


def read_graph(model: Any, compute_dtype: str) -> GraphFacts:
    """The products and attention nodes of an ONNX model. A weight's type is that of its stored codes."""
    stored = {t.name: t for t in model.graph.initializer}
    producers = {output: node for node in model.graph.node for output in node.output}
    compute = TRT_NAMES[compute_dtype.upper()]
    products = []
    for node in model.graph.node:
        if node.op_type not in ("MatMul", "Gemm"):
            continue
        sides = [_origin(name, producers, stored) for name in node.input[:2]]
        matrices = [(code, elements) for code, elements in sides if elements]
        if matrices:  # a product of two activations is attention's, and counted there
            code, elements = matrices[0]
            activations = next((code for code, elements in sides if not elements), None)
            weight = TRT_NAMES.get(code or "", str(code))
            plain = weight if weight in ("Float", "Half", "BFloat16") else compute
            types = TRT_NAMES.get(activations or "", plain), weight
            products.append(Product(node.name, *types, elements, _maker(node, producers)))
    return GraphFacts(
        op_types={node.name: node.op_type for node in model.graph.node},
        products=tuple(products),
        attention=tuple(node.name for node in model.graph.node if node.op_type in (ATTENTION, "Attention")),
        plugin=ATTENTION not in {function.name for function in model.functions},
        cache=_quantized_cache(model),
    )


def _quantized_cache(model: Any) -> tuple[str, tuple[int, ...]] | None:
    """Type and shape (dynamic dims -1) of a cache input that holds codes."""
    from onnx import TensorProto

    for value in model.graph.input:
        tensor = value.type.tensor_type
        dtype = TRT_NAMES.get(TensorProto.DataType.Name(tensor.elem_type), "")
        if value.name.startswith("past_key_values.") and dtype in _CODES:
            return dtype, tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return None


def _maker(product: Any, producers: Mapping[str, Any]) -> str:
    """The name of the node that a product's activations come from; empty where they enter the graph."""
    node = producers.get(product.input[0])
    return "" if node is None else node.name


def _origin(name: str, producers: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str | None, int]:
    """Follow a product's input back to (stored type, elements of the weight); None and 0 for a plain activation."""
    from onnx import TensorProto

    while name not in stored:
        node = producers.get(name)
        if node is None or node.op_type not in _CARRIERS:
            return None, 0
        if node.op_type == "QuantizeLinear":
            zero = stored.get(node.input[2]) if len(node.input) > 2 else None
            wanted = next((a.i for a in node.attribute if a.name == "output_dtype"), 0)
            return TensorProto.DataType.Name(zero.data_type if zero is not None else wanted or TensorProto.UINT8), 0
        name = node.input[0]
    return TensorProto.DataType.Name(stored[name].data_type), math.prod(stored[name].dims)


def summarize(kernels: Sequence[Kernel], facts: GraphFacts) -> dict[str, Any]:
    """Counts of an engine's kernels: by type, fused attention per layer, products by operand types."""
    fused = attention_kernels(kernels, facts)
    products = _product_runs(kernels, facts)
    wanted = {p.node for p in facts.products}
    rows = Counter((run.types, len(wanted & set(run.kernel.onnx_nodes))) for run in products)
    product_kernels = [run.kernel for run in products]
    return {
        "kernels": dict(sorted(Counter(k.type for k in kernels).items())),
        "attention": {
            "layers": len(facts.attention),
            "fused": len(fused),
            "kernels": [_attention_row(k) for k in fused],
        },
        "products": {
            "in_graph": len(facts.products),
            "kernels": len(product_kernels),
            "kernels_per_layer": _per_layer(product_kernels),
            "precisions": _precision_rows(rows),
            "without_kernel": sorted(wanted - {node for k in product_kernels for node in k.onnx_nodes}),
        },
        "fusions": _fusions(kernels, facts),
        "unfused_qdq": sum(_is_bare_qdq(k, facts.op_types) for k in kernels),
    }


def _fusions(kernels: Sequence[Kernel], facts: GraphFacts) -> dict[str, int]:
    """Where the residual adds, norms and roundings went: into which kind of kernel each node was fused."""
    attention = {id(k) for k in attention_kernels(kernels, facts)}
    counts: Counter[str] = Counter()
    for kernel in kernels:
        ops = Counter(facts.op_types.get(node) for node in set(kernel.onnx_nodes))
        norm, rounds = ops["RMSNormalization"] > 0, ops["QuantizeLinear"] > 0
        host = "a product" if kernel.is_product else "attention" if id(kernel) in attention else ""
        counts[f"residual add in {host or ('a norm' if norm else 'a kernel without a norm')}"] += ops["Add"]
        counts[f"norm in {host or ('a quantizing kernel' if rounds else 'a kernel of its own or with an add')}"] += ops[
            "RMSNormalization"
        ]
        place = host or ("a norm" if norm else "a kernel without a norm")
        counts[f"quantization in {place}"] += ops["QuantizeLinear"]
    return {name: counts[name] for name in sorted(counts) if counts[name]}


@dataclass(frozen=True, slots=True)
class _ProductRun:
    """A product kernel with the types of its activations, weights and outputs."""

    kernel: Kernel
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    matrices: frozenset[str]
    """Types of all stored matrices that it reads."""

    @property
    def types(self) -> tuple[str, str, str]:
        return "+".join(self.activations), "+".join(self.weights), "+".join(self.outputs)


def _product_runs(kernels: Sequence[Kernel], facts: GraphFacts) -> list[_ProductRun]:
    """Every kernel that makes products with stored matrices, with the types of its operands.

    Codes among the constants are the weight, else a matrix is (scales are vectors). A weight may also come
    out of a kernel that reads constants alone (a dequantization that was not fused): its stored type counts.
    """
    prepared = {t.name: k for k in kernels if k.constants and not k.inputs for t in k.outputs}
    asked = {product.node: product for product in facts.products}
    runs = []
    for kernel in kernels:
        made = [asked[node] for node in dict.fromkeys(kernel.onnx_nodes) if node in asked]
        sources = [prepared[t.name] for t in kernel.inputs if t.name in prepared]
        constants = [t for k in (kernel, *sources) for t in k.constants]
        rows = kernel.is_row_product and _holds_matrices(constants, made)
        if not kernel.is_product and not rows:
            continue
        codes = [t.dtype for t in constants if t.dtype in _CODES]
        weights = codes or [t.dtype for t in constants if t.is_matrix] or [t.dtype for t in constants]
        inputs = [t.dtype for t in kernel.inputs if t.name not in prepared]
        if rows:
            inputs = _made_inside(kernel, made) or inputs
        outputs = [t.dtype for t in kernel.outputs]
        activations, stored, written = (tuple(sorted(set(types))) for types in (inputs, weights, outputs))
        matrices = frozenset(t.dtype for t in constants if t.is_matrix)
        runs.append(_ProductRun(kernel, activations, stored, written, matrices))
    return runs


def _made_inside(kernel: Kernel, products: Sequence[Product]) -> list[str]:
    """Types of the activations that a kernel makes itself before its product, by a node that it names.

    That may be the cast after a norm, whose inputs are float32, or the rows of an embedding, whose inputs are ids.
    Codes must come in as codes.
    """
    floats = [product for product in products if product.activations not in _CODES]
    return [product.activations for product in floats if product.maker in kernel.onnx_nodes]


def _holds_matrices(constants: Sequence[KernelTensor], products: Sequence[Product]) -> bool:
    """Whether a kernel reads as much of matrices as these products have, in the types they are stored in.

    Products of one input may have become one matrix, so the sizes are added up.
    """
    needed: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for product in products:
        needed[product.weights] += product.elements
    for tensor in constants:
        held[tensor.dtype] += math.prod(tensor.shape) if tensor.is_matrix else 0
    return bool(products) and needed <= held


def _precision_rows(rows: Counter[tuple[tuple[str, str, str], int]]) -> list[dict[str, Any]]:
    merged: dict[tuple[str, str, str], list[int]] = {}
    for (types, products), count in rows.items():
        entry = merged.setdefault(types, [0, 0])
        entry[0] += count
        entry[1] += count * products
    return [
        {"activations": a, "weights": w, "outputs": o, "kernels": kernels, "products": products}
        for (a, w, o), (kernels, products) in sorted(merged.items())
    ]


def _layer_of(kernel: Kernel) -> int | None:
    found = next(filter(None, (_LAYER.search(node) for node in kernel.onnx_nodes)), None)
    return int(found[1]) if found else None


def _attention_row(kernel: Kernel) -> dict[str, Any]:
    return {
        "layer": _layer_of(kernel),
        "tactic": kernel.type if kernel.is_plugin else kernel.tactic,
        "type": kernel.inputs[0].dtype if kernel.inputs else "",
    }


def _per_layer(kernels: Iterable[Kernel]) -> dict[str, int]:
    """How many decoder layers have how many product kernels, as {"4": 30}; `outside` counts the rest."""
    layers = Counter(_layer_of(k) for k in kernels)
    outside = layers.pop(None, 0)
    counts = Counter(layers.values())
    return {str(n): counts[n] for n in sorted(counts)} | ({"outside": outside} if outside else {})


def _is_bare_qdq(kernel: Kernel, op_types: Mapping[str, str]) -> bool:
    """Whether a kernel does nothing but quantize or dequantize: work that should be part of another."""
    ops = {op_types.get(node, "?") for node in kernel.onnx_nodes}
    return not kernel.is_product and bool(ops & _QDQ) and ops <= _CARRIERS


def verify_engine(phase: str, kernels: Sequence[Kernel], facts: GraphFacts) -> None:
    """Raise DtoolError when a kernel does not do what the graph says.

    Attention runs in the plugin (or TensorRT's own kernel) in every layer; every product in the types
    asked; a quantized cache is nowhere expanded.
    """
    _verify_attention(phase, kernels, facts)
    _verify_cache(phase, kernels, facts)
    by_node = {node: run for run in _product_runs(kernels, facts) for node in run.kernel.onnx_nodes}
    wrong = [text for product in facts.products if (text := _mismatch(product, by_node.get(product.node)))]
    if wrong:
        raise DtoolError(
            f"the kernels of {phase} are not those its graph asks for",
            expected="for every product a kernel in the stored type of its weight and the type of its activations",
            found=f"{len(wrong)} of {len(facts.products)} differ: {name_list(wrong, 3)}",
            fix="dtool's graph, its reading of the kernels or the compiler is wrong: please report it, with the "
            "model's config.json and the recipe",
        )


def _verify_attention(phase: str, kernels: Sequence[Kernel], facts: GraphFacts) -> None:
    fused = attention_kernels(kernels, facts)
    if len(fused) == len(facts.attention):
        return
    named = " ".join(node for k in fused for node in k.onnx_nodes)
    missing = [name for name in facts.attention if name not in named]
    raise DtoolError(
        f"attention is not fused in every layer of {phase}",
        expected=f"{'the plugin' if facts.plugin else 'a dedicated kernel'} for each of {len(facts.attention)} nodes",
        found=f"{len(fused)}; without one: {name_list(missing) or 'unnamed'}",
        fix="use compute_dtype float16 or bfloat16 and a head_dim from 16 to 256; where this backend has no kernel for "
        "the number of heads either, --set engine.attention=plugin",
    )


def attention_kernels(kernels: Sequence[Kernel], facts: GraphFacts) -> list[Kernel]:
    """The kernels that run the graph's attention: plugins by the name of their node, others by their tactic."""
    if not facts.plugin:
        return [k for k in kernels if k.is_fused_attention and not k.is_plugin]
    names = set(facts.attention)
    return [k for k in kernels if k.is_plugin and (names & {*k.onnx_nodes, _PROFILE_TAG.sub("", k.name)})]


def _verify_cache(phase: str, kernels: Sequence[Kernel], facts: GraphFacts) -> None:
    """No kernel but attention may write something of the cache's shape in a wider type."""
    if facts.cache is None:
        return
    dtype, shape = facts.cache
    attends = {id(k) for k in attention_kernels(kernels, facts)}  # a layer that keeps values writes them itself
    others = (k for k in kernels if id(k) not in attends)
    copies = [k.name for k in others for t in k.outputs if t.shape[1:] == shape[1:] and t.dtype != dtype]
    if copies:
        raise DtoolError(
            f"{phase} expands the quantized cache",
            expected=f"a cache that is {dtype} wherever it is",
            found=f"{len(copies)} kernels that write it in another type: {name_list(copies, 2)}",
            fix="use engine.attention plugin",
        )


def _mismatch(product: Product, run: _ProductRun | None) -> str:
    """How the kernel of a product differs from what was asked; empty when it does not.

    A kernel may make several products of one input: a float one is there when a matrix of its type is.
    """
    asked = f"{product.activations} x {product.weights}"
    if run is None:
        return f"{product.node} ({asked}) has no kernel that is known as a product"
    shares = product.weights in run.matrices - _CODES
    if product.activations in run.activations and (run.weights == (product.weights,) or shares):
        return ""
    activations, weights, _ = run.types
    return f"{product.node} ({asked}) runs as {activations} x {weights}"


def engine_entry(kernels: Sequence[Kernel], facts: GraphFacts, size_bytes: int) -> dict[str, Any]:
    """The report on one engine: its bytes, its summary and every kernel."""
    return {
        "bytes": size_bytes,
        "summary": summarize(kernels, facts),
        "layers": [_kernel_row(kernel) for kernel in kernels],
    }


def _kernel_row(kernel: Kernel) -> dict[str, Any]:
    row = asdict(kernel)
    for part in ("inputs", "constants", "outputs"):
        row[part] = [str(tensor) for tensor in getattr(kernel, part)]
    return row | {"onnx_nodes": list(kernel.onnx_nodes)}


def page(report: Mapping[str, Any], timings: Mapping[str, Any] | None = None) -> Page:
    """The engine report as a page: sizes, build times, attention, products, fusions and kernels of every engine."""
    found: Mapping[str, Any] = report.get("engines", {})
    engines = {phase: found[phase] for phase in ENGINE_PHASES if phase in found}  # JSON sorted them by name
    facts = [
        ("backend", str(report["backend"])),
        ("compiler", str(report["compiler"])),
        ("targets", ", ".join(report["targets"]) or "this machine's CPU"),
        *_sizes(report, engines),
        *((f"{name} built in", f"{t['build_s']:.1f} s") for name, t in (timings or {}).items() if isinstance(t, dict)),
    ]
    if not engines:  # the embedded backend has no kernels of its own to list
        shown = set(report) - {"backend", "compiler", "targets", "layout"}
        facts += [(key, str(report[key])) for key in sorted(shown) if not isinstance(report[key], dict | list)]
        tables = [
            Table(key, ("kind", "count"), tuple(report[key].items()))
            for key in sorted(shown)
            if isinstance(report[key], dict)
        ]
        return Page("Engine report", facts=tuple(facts), parts=tuple(tables))
    summaries = {phase: entry["summary"] for phase, entry in engines.items()}
    tables = (_attention_table(summaries), _products_table(summaries), _fusions_table(summaries))
    parts = (*tables, *map(_kernel_bars, summaries.items()))
    return Page("Engine report", facts=tuple(facts), parts=parts)


def _sizes(report: Mapping[str, Any], engines: Mapping[str, Any]) -> list[tuple[str, str]]:
    sizes = [(f"{phase} engine", f"{entry['bytes']:,} bytes") for phase, entry in engines.items()]
    if report.get("layout") == "shared" and sizes:
        return [("engine, a profile per phase", sizes[0][1])]
    return sizes


def _attention_table(summaries: Mapping[str, Any]) -> Table:
    rows = []
    for phase, summary in summaries.items():
        attention = summary["attention"]
        kinds = Counter(re.sub(r"_0x.*", "", row["tactic"]) for row in attention["kernels"])
        tactics = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        rows.append((phase, attention["layers"], attention["fused"], tactics))
    return Table("Attention", ("engine", "layers", "fused", "kernels"), tuple(rows))


def _products_table(summaries: Mapping[str, Any]) -> Table:
    columns = ("activations", "weights", "outputs", "kernels", "products")
    rows = tuple(
        (phase, *(row[column] for column in columns))
        for phase, summary in summaries.items()
        for row in summary["products"]["precisions"]
    )
    note = "products: how many of the graph's products run in those kernels"
    return Table("Matrix products", ("engine", *columns), rows, note)


def _fusions_table(summaries: Mapping[str, Any]) -> Table:
    names = sorted({name for summary in summaries.values() for name in summary["fusions"]})
    rows = tuple((name, *(summary["fusions"].get(name, 0) for summary in summaries.values())) for name in names)
    return Table("Where nodes were fused", ("node", *summaries), rows)


def _kernel_bars(item: tuple[str, Any]) -> Bars:
    phase, summary = item
    counts: Mapping[str, int] = summary["kernels"]
    bars = tuple((KINDS.get(kind, kind), count) for kind, count in counts.items())
    note = f"kernels that only quantize or dequantize: {summary['unfused_qdq']}"
    return Bars(f"Kernels of {phase}", "kernels", bars, note)
