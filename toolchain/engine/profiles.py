"""The shapes an engine is compiled for: a fixed cache, and a range for every dynamic input.

TensorRT takes ranges per input and complains late and obscurely about one that has none, so the
profile is derived from the graph contract's symbolic dimensions and checked against what is there.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError, name_list
from toolchain.graph_io import GRAPH_FILES, GraphIO, Phase, load_graph
from toolchain.recipe_sections import Engine, Range

ENGINE_PHASES: tuple[Phase, ...] = ("prefill", "decode")
ATTENTION = "FusedAttention"

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
"""Input name to its smallest, most usual and largest shape."""


def build_profile(contract: GraphIO, engine: Engine, tokens: Range) -> Profile:
    """The ranges of every input that has a dynamic dimension once the capacity is fixed; `tokens` is T's."""
    ranges = {"batch": engine.batch, "T": tokens}
    profile: Profile = {}
    for spec in contract.inputs:
        dims = [engine.kv_capacity if dim == "capacity" else dim for dim in spec.shape]
        unknown = [dim for dim in dims if isinstance(dim, str) and dim not in ranges]
        if unknown:
            raise DtoolError(
                f"input {spec.name} has a dimension {unknown[0]!r} that no range of the recipe fills",
                expected="batch, T or capacity",
                found=f"{unknown[0]}",
                fix="export the model again with this version of dtool",
            )
        if any(isinstance(dim, str) for dim in dims):
            smallest, usual, largest = (
                tuple(getattr(ranges[dim], end) if isinstance(dim, str) else dim for dim in dims)
                for end in ("min", "opt", "max")
            )
            profile[spec.name] = (smallest, usual, largest)
    return profile


def check_profile(dynamic_inputs: Iterable[str], profile: Mapping[str, Any]) -> None:
    """Raise DtoolError naming the dynamic inputs of a graph that the profile leaves out."""
    missing = [name for name in dynamic_inputs if name not in profile]
    if missing:
        raise DtoolError(
            f"the optimization profile has no range for {name_list(missing)}",
            expected="a range for every dynamic input of the graph",
            found=f"ranges for {name_list(profile)}",
            fix="export the model again with this version of dtool: its graphs and its contract disagree",
        )


def dynamic_inputs(graph: Any) -> list[str]:
    """Names of the inputs of an ONNX graph with a dimension that is no number."""
    return [
        value.name
        for value in graph.input
        if any(not dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    ]


def write_static_graph(source: Artifact, phase: Phase, engine: Engine, folder: Path, name: str) -> Path:
    """A copy of one graph that TensorRT takes, with links to its data files beside it; its path.

    The cache gets its capacity (TensorScatter demands a static one). With the plugin the attention
    nodes lose their function body, so that a missing plugin is an error and never another attention.
    Without it the body is written without its poison guard, which costs copies of the whole cache; the
    runtime hands caches that are finite in every slot instead.
    """
    import onnx

    from toolchain.ops.function_body import attention_functions

    model = load_graph(source.file(GRAPH_FILES[phase]))
    specs = dict.fromkeys(attention_spec(node) for node in model.graph.node if node.op_type == ATTENTION)
    if specs:
        kept = [f for f in model.functions if f.name != ATTENTION]
        del model.functions[:]
        bodies = [] if engine.attention == "plugin" else attention_functions(specs, poison_guard=False)
        model.functions.extend([*kept, *bodies])
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "capacity":
                dim.dim_value = engine.kv_capacity
    for location in external_files(model):
        if not (folder / location).exists():
            (folder / location).symlink_to(source.file(location).resolve())
    path = folder / f"{name}.onnx"
    onnx.save(model, str(path))
    return path


def attention_specs(source: Artifact) -> list[Any]:
    """The AttentionSpec of every kind of attention node in an artifact's graphs, each once."""
    model = load_graph(source.file(GRAPH_FILES["decode"]))
    return list(dict.fromkeys(attention_spec(node) for node in model.graph.node if node.op_type == ATTENTION))


def attention_spec(node: Any) -> Any:
    """The AttentionSpec in a node's attributes."""
    from toolchain.ops.attention import AttentionSpec

    values = node_values(node)
    fields: dict[str, Any] = {name: values[name] for name in AttentionSpec.__slots__}
    fields |= {name: bool(fields[name]) for name in ("interleaved", "token_scales")}
    return AttentionSpec(**fields)


def node_values(node: Any) -> dict[str, Any]:
    """The attributes of a node by name, texts decoded. Does not import torch."""
    import onnx

    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def external_files(model: Any) -> list[str]:
    """The data files that a graph's initializers point into, each once."""
    entries = (e for tensor in model.graph.initializer for e in tensor.external_data)
    return sorted({e.value for e in entries if e.key == "location"})
