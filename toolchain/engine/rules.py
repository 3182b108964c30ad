"""The matrix of what can be compiled: format, GPU, backend, attention and op, as rules over the graphs.

A compiler finds most of these late, after minutes, and words them in its own terms. The rules are a
table per backend; each raises a DtoolError that says what to change. They look at the recipe and at the
graphs, never at weights, and import no torch.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolchain.artifact import Artifact
from toolchain.engine.library import describe_library
from toolchain.engine.profiles import ATTENTION, node_values
from toolchain.engine.targets import Target, require_format
from toolchain.errors import DtoolError, did_you_mean, name_list
from toolchain.graph_io import GRAPH_FILES
from toolchain.recipe_sections import Engine

ATTENTION_ABI = 3
"""The abi of `ops.attention`, repeated so that a refusal need not wait for torch; a test compares them."""

STANDARD_DOMAINS = ("", "ai.onnx")
FLOAT32_EPS = 1e-6
HEAD_DIMS = {"native": (16, 256, 8), "plugin": (32, 256, 2)}
"""Smallest, largest and divisor of head_dim by kind of attention; native: as TensorRT-RTX 1.7.1 fuses it."""

EMBEDDED_INSTEAD = (
    "export with compute_dtype float32, weights and cache in int8 or none, and use engine.backend onnxruntime"
)
"""What runs any model."""

RTX_REFUSES = {
    "refit": "its refittable builds need a GPU",
    "strip_weights": "its stripped builds need a GPU",
    "version_compatible": "its package holds no lean runtime",
    "hardware_compatibility": "engine.targets names the GPUs instead",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at. `graphs` holds the ONNX models of the engine's phases, without data."""

    source: Artifact
    engine: Engine
    targets: tuple[Target, ...]
    graphs: dict[str, Any]
    plugin_libraries: tuple[Path, ...] = ()

    @property
    def compute_dtype(self) -> str:
        """The float type the graphs compute in."""
        return str(self.source.manifest.details.get("compute_dtype", "float16"))

    @property
    def attention_nodes(self) -> list[Any]:
        """The attention nodes of all graphs."""
        return [node for model in self.graphs.values() for node in model.graph.node if node.op_type == ATTENTION]


def _check_compute_dtype(facts: Facts) -> None:
    """Neither TensorRT's fused attention nor the plugin computes in float32; the former fails late."""
    dtype = facts.compute_dtype
    if dtype == "float32":
        raise DtoolError(
            f"{facts.engine.attention} attention cannot be fused in float32",
            expected="an export in float16 or bfloat16",
            found=f"compute_dtype {dtype} in {facts.source.path}",
            fix="export again with --set compute_dtype=float16",
        )
    fix = "export again with --set compute_dtype=float16, or leave that target out"
    require_format(facts.targets, dtype, f"compute_dtype {dtype} in {facts.source.path}", fix)


def _check_cache(facts: Facts) -> None:
    """TensorScatter updates float caches only, and a quantized one would be expanded: it needs the plugin."""
    dtype = facts.source.manifest.kv_contract["dtype"]  # the quantized one where layers differ
    if dtype in ("float16", "bfloat16", "float32"):
        return
    if facts.engine.attention == "native":
        raise DtoolError(
            f"native attention cannot keep an {dtype} cache",
            expected="a cache in the compute type",
            found=f"a cache of {dtype} in {facts.source.path}",
            fix="--set engine.attention=plugin, or quantize with kv_cache.format none",
        )
    fix = "leave that target out, or quantize with kv_cache.format int8"
    require_format(facts.targets, dtype, f"a cache of {dtype} in {facts.source.path}", fix)


def _check_attention(facts: Facts) -> None:
    """What the chosen attention computes, for every kind of attention node."""
    for node in facts.attention_nodes:
        values = node_values(node)
        head_dim, softcap = values.get("head_dim", 0), values.get("softcap", 0.0)
        check_attention(facts.engine, head_dim, softcap, _layer_of(node))


def check_attention(engine: Engine, head_dim: int, softcap: float, where: str) -> None:
    """Raise DtoolError when the engine's attention does not compute heads of this size, or this soft cap (0: none).

    The config of a model tells both as well as its graphs do: `where` says which one did.
    """
    if engine.backend == "onnxruntime":
        return
    low, high, step = HEAD_DIMS[engine.attention]
    if not _has_kernel(engine.attention, head_dim):
        raise DtoolError(
            f"{engine.attention} attention has no kernel for head_dim {head_dim}",
            expected=f"a head_dim from {low} to {high} that {step} divides",
            found=f"head_dim {head_dim} in {where}",
            fix=_other_attention(head_dim, softcap) + EMBEDDED_INSTEAD,
        )
    if softcap and engine.attention == "native":
        raise DtoolError(
            "native attention cannot cap its scores",
            expected="attention without a soft cap",
            found=f"softcap {softcap:g} in {where}",
            fix=_other_attention(head_dim, softcap) + EMBEDDED_INSTEAD,
        )


def _has_kernel(attention: str, head_dim: int) -> bool:
    low, high, step = HEAD_DIMS[attention]
    return low <= head_dim <= high and head_dim % step == 0


def _other_attention(head_dim: int, softcap: float) -> str:
    """The attention that computes what the recipe's cannot, as the beginning of a way out; empty where none does."""
    if _has_kernel("plugin", head_dim):
        return "--set engine.attention=plugin, or "
    if _has_kernel("native", head_dim) and not softcap:
        return "--set engine.attention=native with kv_cache.format none, or "
    return ""


def _layer_of(node: Any) -> str:
    """The layer of a node of attention, which an exporter names as it likes."""
    found = re.search(r"layers\.(\d+)\b", node.name)
    return f"layer {found[1]}" if found else f"the node {node.name}"


def _check_plugin(facts: Facts) -> None:
    """The library of ours that was given serves every attention node."""
    ours = own_library(facts.engine, facts.plugin_libraries)
    if ours is not None:
        _check_library(*ours, facts)


def check_tools(engine: Engine, targets: Sequence[Target], plugin_libraries: Sequence[Path]) -> None:
    """Raise DtoolError when the attention plugin cannot be had here.

    Either a library of ours is given, or there are kernels for every target and the tools to build them.
    """
    if own_library(engine, plugin_libraries) is not None or not _needs_plugin(engine):
        return
    from toolchain.engine.plugin import require_kernels

    require_kernels(targets)
    from toolchain.ops.plugin.toolkit import find_toolkit

    if importlib.util.find_spec("triton") is None:
        raise DtoolError(
            "the attention kernels cannot be compiled",
            expected="the Python module triton",
            found="no such module",
            fix='pip install "dtool[plugin]", or give a library built elsewhere: --plugin-library FILE',
        )
    find_toolkit()


def own_library(engine: Engine, plugin_libraries: Sequence[Path]) -> tuple[Path, dict[str, Any]] | None:
    """The given library that dtool built, with its description of itself; None where there is none.

    Raises DtoolError for one too many, and for files that are no libraries of plugins.
    """
    described = [(library, describe_library(library)) for library in plugin_libraries]
    ours = [(library, description) for library, description in described if description is not None]
    if len(ours) > 1 or (ours and not _needs_plugin(engine)):
        raise DtoolError(
            f"{ours[0][0]} is one attention plugin too many",
            expected="one with engine.attention plugin, none with native",
            found=f"engine.attention {engine.attention} and {name_list([str(path) for path, _ in ours])}",
            fix="leave --plugin-library out" + ("" if len(ours) > 1 else ", or --set engine.attention=plugin"),
        )
    return ours[0] if ours else None


def _needs_plugin(engine: Engine) -> bool:
    return engine.backend != "onnxruntime" and engine.attention == "plugin"


def _check_library(library: Path, description: dict[str, Any], facts: Facts) -> None:
    """Whether a library of ours has the op's abi, and kernels for every attention node on every target."""
    rebuild = "build it again with this version of dtool, for this model and these targets: dtool build-plugin"
    if description["abi"] != ATTENTION_ABI:
        raise DtoolError(
            f"{library} is of another abi",
            expected=f"abi {ATTENTION_ABI}",
            found=f"abi {description['abi']}",
            fix=rebuild,
        )
    specs = description["specs"]
    held = {(s["spec"], s["compute_dtype"], s["sm"]) for s in description["sets"]}
    for node in facts.attention_nodes:
        values = node_values(node)
        kinds = [i for i, spec in enumerate(specs) if all(_same(values.get(k), v) for k, v in spec.items())]
        lacking = [t.name for t in facts.targets if not any((i, facts.compute_dtype, t.sm) in held for i in kinds)]
        if lacking:
            raise DtoolError(
                f"{library} has no kernels for this model on {', '.join(lacking)}",
                expected=f"head_dim {values.get('head_dim')}, {values.get('num_heads')} heads over "
                f"{values.get('num_kv_heads')}, cache {_cache(values)}, {facts.compute_dtype}",
                found="; ".join(
                    f"head_dim {specs[i]['head_dim']}, cache {_cache(specs[i])}, {dtype}, sm{sm}"
                    for i, dtype, sm in sorted(held)
                ),
                fix=rebuild,
            )


def _cache(values: Mapping[str, Any]) -> str:
    return f"{values.get('cache_format')}{' with a scale per token' if values.get('token_scales') else ''}"


def _same(stored: Any, described: Any) -> bool:
    """Whether two values of an attribute agree; the graph's floats were rounded to float32."""
    if isinstance(described, float):
        return stored is not None and abs(stored - described) <= FLOAT32_EPS * abs(described)
    return stored == described


def check_options(engine: Engine) -> None:
    """Refuse builder options that TensorRT-RTX has no use for, or cannot honour on a machine without a GPU."""
    if engine.backend != "tensorrt-rtx":
        return
    for option, why in RTX_REFUSES.items():
        value = getattr(engine, option)
        if value not in (False, "none"):
            raise DtoolError(
                f"tensorrt-rtx cannot build with engine.{option}",
                expected=f"engine.{option} left out",
                found=f"{value}; {why}",
                fix="leave it out, or use engine.backend tensorrt on a GPU host",
            )


def _check_formats(facts: Facts) -> None:
    """Formats of the stored tensors against what every target has."""
    import onnx

    names = onnx.TensorProto.DataType.Name
    for phase, model in facts.graphs.items():
        stored = [(t.name, names(t.data_type)) for t in model.graph.initializer]
        for prefix, fmt in (("FLOAT8", "fp8_e4m3"), ("FLOAT4", "fp4")):
            tensors = [name for name, dtype in stored if dtype.startswith(prefix)]
            if tensors:
                where = f"{GRAPH_FILES[phase]} stores {name_list(tensors, 2)} in {fmt}"  # type: ignore[index]
                require_format(facts.targets, fmt, where, "leave that target out, or quantize to int8")


def _check_ops(facts: Facts) -> None:
    """Every node is a standard op of its opset, or brings a body; the attention node has our abi."""
    import onnx

    for phase, model in facts.graphs.items():
        opsets = {o.domain: o.version for o in model.opset_import}
        bodies = {(f.domain, f.name) for f in model.functions}
        for node in model.graph.node:
            if (node.domain, node.op_type) in bodies:
                if node.op_type == ATTENTION:
                    _check_abi(node)
            elif node.domain not in STANDARD_DOMAINS and facts.plugin_libraries:
                continue  # a plugin of theirs may serve it; the parser names it when none does
            elif node.domain not in STANDARD_DOMAINS:
                raise _unknown_op(GRAPH_FILES[phase], node, opsets)  # type: ignore[index]
            elif not onnx.defs.has(node.op_type, opsets.get(node.domain, 1), ""):
                standard = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
                raise DtoolError(
                    f"{GRAPH_FILES[phase]} has a node that is no standard op: {node.op_type}",  # type: ignore[index]
                    expected=f"an op of opset {opsets.get(node.domain, 1)}",
                    found=f"node {node.name}, op {node.op_type}",
                    fix=did_you_mean(node.op_type, standard),
                )


def _unknown_op(file: str, node: Any, opsets: dict[str, int]) -> DtoolError:
    plugin = {a.name: a.s.decode() for a in node.attribute if a.name in ("plugin_version", "plugin_namespace")}
    ours = node.domain == "dtool"
    version = plugin.get("plugin_version") or opsets.get(node.domain, "of no imported opset")
    return DtoolError(
        f"{file} has a node that needs a plugin" if ours else f"{file} has a node of an unknown domain",
        expected="standard ONNX ops, or a node whose function body is in the file",
        found=f"node {node.name}: op {node.op_type}, version {version}, domain {node.domain}, without a body",
        fix="export the model again: its function body is gone; or give the library that serves it: --plugin-library"
        if ours
        else "give the library that serves it, --plugin-library FILE, or a graph that no other runtime's tool rewrote",
    )


def _check_abi(node: Any) -> None:
    found = next((a.i for a in node.attribute if a.name == "abi"), None)
    if found != ATTENTION_ABI:
        raise DtoolError(
            f"{node.name} is a {ATTENTION} of another abi",
            expected=f"abi {ATTENTION_ABI}",
            found=f"abi {found}",
            fix="export the model again with this version of dtool",
        )


def _check_embedded_dtype(facts: Facts) -> None:
    if facts.compute_dtype != "float32":
        raise DtoolError(
            f"the embedded backend computes in float32, not {facts.compute_dtype}",
            expected="an export in float32; weights and cache may be int8",
            found=f"compute_dtype {facts.compute_dtype} in {facts.source.path}",
            fix="export again with --set compute_dtype=float32",
        )


def _check_embedded_formats(facts: Facts) -> None:
    details = facts.source.manifest.details
    found = {
        "weights": details.get("weight_format", "none"),
        "cache": details.get("kv_format", "none"),
    }
    for what, fmt in found.items():
        if fmt not in ("none", "int8"):
            raise DtoolError(
                f"the embedded backend has no products of {fmt} {what}"
                if what == "weights"
                else f"the embedded backend keeps no {fmt} cache",
                expected="int8, or float32",
                found=f"{what} in {fmt} in {facts.source.path}",
                fix="quantize to int8, or use a TensorRT backend; `dtool parity` runs the artifact itself",
            )


TENSORRT_RULES = (
    _check_compute_dtype,
    _check_ops,
    _check_cache,
    _check_formats,
    _check_attention,
    _check_plugin,
)
RULES: dict[str, tuple[Callable[[Facts], None], ...]] = {
    "tensorrt": TENSORRT_RULES,
    "tensorrt-rtx": TENSORRT_RULES,
    "onnxruntime": (_check_embedded_dtype, _check_embedded_formats),
}
