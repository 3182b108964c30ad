"""What can be refused before any work: each rule looks at the recipe and at the graphs, never at weights.

A compiler finds most of these late, after minutes, and words them in its own terms. The rules are a
table per backend; each raises a DtoolError that says what to change. Nothing here imports torch.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolchain.artifact import Artifact
from toolchain.engine.profiles import ATTENTION, ENGINE_PHASES
from toolchain.engine.targets import Target, targets_named
from toolchain.errors import DtoolError, did_you_mean, name_list
from toolchain.graph_io import GRAPH_FILES
from toolchain.model.config import DecoderConfig
from toolchain.recipe import Engine, Recipe

ATTENTION_ABI = 2
"""The abi of `ops.attention`, repeated so that a refusal need not wait for torch; a test compares them."""

STANDARD_DOMAINS = ("", "ai.onnx")
MODULES = {"tensorrt-rtx": ("tensorrt_rtx", "rtx"), "onnxruntime": ("onnxruntime", "ort")}
"""Per backend: the module it needs, and the extra of dtool that installs it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at. `graphs` holds the ONNX models of the engine's phases, without data."""

    source: Artifact
    config: DecoderConfig
    engine: Engine
    targets: tuple[Target, ...]
    graphs: dict[str, Any]

    @property
    def compute_dtype(self) -> str:
        """The float type the graphs compute in."""
        return str(self.source.manifest.details.get("compute_dtype", "float16"))


def preflight(source: Artifact, recipe: Recipe) -> tuple[Target, ...]:
    """The targets to compile for, once every rule has passed. Raises DtoolError; takes well under a second."""
    engine = recipe.engine
    targets = targets_named(engine.targets, engine.backend) if engine.backend != "onnxruntime" else ()
    require_backend(engine.backend)
    config = DecoderConfig.model_validate(source.json("decoder.json"))
    _check_sizes(engine, config)
    facts = Facts(source, config, engine, targets, _load_graphs(source))
    for rule in RULES[engine.backend]:
        rule(facts)
    return targets


def require_backend(backend: str) -> None:
    """Raise DtoolError when the backend's package is not installed."""
    module, extra = MODULES[backend]
    if importlib.util.find_spec(module) is None:
        raise DtoolError(
            f"the {backend} backend is not installed",
            expected=f"the Python module {module}",
            found="no such module",
            fix=f'pip install "dtool[{extra}]"',
        )


def _check_sizes(engine: Engine, config: DecoderConfig) -> None:
    if engine.kv_capacity > config.max_position_embeddings:
        raise DtoolError(
            "the cache is longer than the model's positions",
            expected=f"engine.kv_capacity of at most {config.max_position_embeddings} (max_position_embeddings)",
            found=str(engine.kv_capacity),
            fix=f"--set engine.kv_capacity={config.max_position_embeddings}",
        )
    if engine.prompt_len.max > engine.kv_capacity:
        raise DtoolError(
            "the longest prompt does not fit the cache",
            expected=f"engine.prompt_len.max of at most {engine.kv_capacity} (engine.kv_capacity)",
            found=str(engine.prompt_len.max),
            fix="lower engine.prompt_len or raise engine.kv_capacity",
        )


def _load_graphs(source: Artifact) -> dict[str, Any]:
    import onnx

    return {phase: onnx.load(str(source.file(GRAPH_FILES[phase])), load_external_data=False) for phase in ENGINE_PHASES}


def _check_compute_dtype(facts: Facts) -> None:
    """TensorRT's fused attention takes half types alone; in float32 the build fails at its end."""
    dtype = facts.compute_dtype
    if dtype == "float32":
        raise DtoolError(
            "native attention cannot be fused in float32",
            expected="an export in float16 or bfloat16",
            found=f"compute_dtype {dtype} in {facts.source.path}",
            fix="export again with --set compute_dtype=float16",
        )
    for target in facts.targets:
        if not target.has_format(dtype):
            raise DtoolError(
                f"{target.name} ({target.gpus}) has no {dtype}",
                expected="float16, or a newer target",
                found=f"compute_dtype {dtype}",
                fix="export again with --set compute_dtype=float16, or leave the target out",
            )


def _check_cache(facts: Facts) -> None:
    """TensorScatter updates float caches only; a quantized one needs the attention plugin."""
    dtype = facts.source.manifest.kv_contract["dtype"]
    if dtype not in ("float16", "bfloat16", "float32"):
        raise DtoolError(
            f"native attention cannot keep an {dtype} cache",
            expected="a cache in the compute type",
            found=f"a cache of {dtype} in {facts.source.path}",
            fix="quantize with kv_cache.format none, or use engine.backend onnxruntime",
        )


def _check_formats(facts: Facts) -> None:
    """Formats of the stored tensors against what every target has."""
    import onnx

    names = onnx.TensorProto.DataType.Name
    for phase, model in facts.graphs.items():
        stored = [(t.name, names(t.data_type)) for t in model.graph.initializer]
        for prefix, fmt in (("FLOAT8", "fp8_e4m3"), ("FLOAT4", "fp4")):
            tensors = [name for name, dtype in stored if dtype.startswith(prefix)]
            lacking = [t for t in facts.targets if not t.has_format(fmt)] if tensors else []
            if lacking:
                raise DtoolError(
                    f"{lacking[0].name} ({lacking[0].gpus}) has no {fmt}",
                    expected="formats that every target has",
                    found=f"{GRAPH_FILES[phase]} stores {name_list(tensors, 2)} in {fmt}"  # type: ignore[index]
                    f"; targets {', '.join(t.name for t in facts.targets)}",
                    fix="leave that target out, or quantize to int8",
                )


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
        fix="export the model again: its function body is gone, and dtool loads no plugin library yet"
        if ours
        else "give the export or quantize artifact, not a graph rewritten for another runtime",
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


RULES: dict[str, tuple[Callable[[Facts], None], ...]] = {
    "tensorrt-rtx": (_check_compute_dtype, _check_cache, _check_formats, _check_ops),
    "onnxruntime": (_check_embedded_dtype,),
}
