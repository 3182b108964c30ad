"""The shapes an engine is compiled for: a fixed cache, and a range for every dynamic input.

TensorRT takes ranges per input and complains late and obscurely about one that has none, so the
profile is derived from the graph contract's symbolic dimensions and checked against what is there.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError, name_list
from toolchain.graph_io import GRAPH_FILES, GraphIO, Phase
from toolchain.recipe import Engine

ENGINE_PHASES: tuple[Phase, ...] = ("prefill", "decode")
ATTENTION = "FusedAttention"

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
"""Input name to its smallest, most usual and largest shape."""


def build_profile(contract: GraphIO, engine: Engine) -> Profile:
    """The ranges of every input of a phase that has a dynamic dimension once the capacity is fixed."""
    ranges = {"batch": engine.batch, "T": engine.prompt_len}
    profile: Profile = {}
    for spec in contract.inputs:
        dims = [engine.kv_capacity if dim == "capacity" else dim for dim in spec.shape]
        unknown = [dim for dim in dims if isinstance(dim, str) and dim not in ranges]
        if unknown:
            raise DtoolError(f"input {spec.name} has a dimension {unknown[0]!r} that no range of the recipe fills")
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


def write_static_graph(source: Artifact, phase: Phase, capacity: int, folder: Path) -> Path:
    """A copy of one graph that TensorRT-RTX takes, with links to its data files beside it; its path.

    The cache gets its capacity (TensorScatter demands a static one). In decode the attention body
    is written without its poison guard, which there costs a copy of the whole cache; the runtime
    hands decode caches that are finite in every slot instead.
    """
    import onnx

    from toolchain.ops.function_body import function_body

    model = onnx.load(str(source.file(GRAPH_FILES[phase])), load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == ATTENTION]
    if nodes:
        body = function_body(attention_spec(nodes[0]), poison_guard=phase != "decode")
        kept = [f for f in model.functions if (f.domain, f.name) != (body.domain, body.name)]
        del model.functions[:]
        model.functions.extend([*kept, body])
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "capacity":
                dim.dim_value = capacity
    for location in external_files(model):
        if not (folder / location).exists():
            (folder / location).symlink_to(source.file(location).resolve())
    path = folder / GRAPH_FILES[phase]
    onnx.save(model, str(path))
    return path


def attention_spec(node: Any) -> Any:
    """The AttentionSpec in a node's attributes."""
    import onnx

    from toolchain.ops.attention import AttentionSpec

    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return AttentionSpec(
        num_heads=values["num_heads"],
        num_kv_heads=values["num_kv_heads"],
        head_dim=values["head_dim"],
        scale=values["scale"],
        rotary_dim=values["rotary_dim"],
        cache_format=values["cache_format"].decode(),
    )


def external_files(model: Any) -> list[str]:
    """The data files that a graph's initializers point into, each once."""
    entries = (e for tensor in model.graph.initializer for e in tensor.external_data)
    return sorted({e.value for e in entries if e.key == "location"})
