"""Engines by TensorRT or TensorRT-RTX: graphs made static, plugins found or built, plans compiled and checked.

`layout` separate makes one engine per phase: each is tuned for its own shapes, and each holds the
weights. Shared makes one engine with a profile per phase from the prefill graph: the weights once, and
decode runs kernels chosen for many shapes.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolchain.artifact import Artifact, Draft
from toolchain.engine.compiler import BuildOptions, BuildRequest, BuildResult, compile_graph, estimate_rss_bytes
from toolchain.engine.layers import parse_layers
from toolchain.engine.library import describe_library
from toolchain.engine.profiles import (
    ENGINE_PHASES,
    Profile,
    attention_specs,
    build_profile,
    check_profile,
    dynamic_inputs,
    external_files,
    write_static_graph,
)
from toolchain.engine.report import engine_entry, read_graph, verify_engine
from toolchain.engine.targets import Target
from toolchain.graph_io import Phase, graph_io, load_graph
from toolchain.model.caches import caches_of
from toolchain.model.config import DecoderConfig
from toolchain.ops.plugin.toolkit import cache_folder
from toolchain.recipe import Recipe
from toolchain.recipe_sections import Engine, Range

SCRATCH, PLUGINS = ".build", "plugin"
PLUGIN_LIBRARY = "libdtool_attention.so"
SHARED = "decoder"
DISK_PER_WEIGHT_BYTE = 1.6  # kernels, and an embedding is held for its rows and for the head: 1.6 with SmolLM2 in int8
PROGRESS_EVERY_S = 2.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine to compile: its name, the graph it is made of, and the phases its profiles serve."""

    name: str
    graph: Phase
    phases: tuple[Phase, ...]


def engine_plans(engine: Engine) -> tuple[EnginePlan, ...]:
    """The engines of a layout."""
    if engine.layout == "shared":
        return (EnginePlan(SHARED, "prefill", ENGINE_PHASES),)
    return tuple(EnginePlan(phase, phase, (phase,)) for phase in ENGINE_PHASES)


def build_tensorrt(
    source: Artifact, recipe: Recipe, draft: Draft, targets: Sequence[Target], libraries: Sequence[Path], report: Say
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile, check and place the engines and their plugins; the report document and the timings.

    Fills in what the manifest says of them. Raises DtoolError when the compiler fails or compiles
    something else than the graphs ask for.
    """
    weights = sum(e.bytes for name, e in source.manifest.files.items() if name.endswith(".safetensors"))
    plans = engine_plans(recipe.engine)
    report(
        f"compiling needs about {estimate_rss_bytes(weights) / 1e9:.1f} GB of memory, "
        f"and {DISK_PER_WEIGHT_BYTE * len(plans) * weights / 1e9:.2f} GB of disk, "
        f"where {shutil.disk_usage(draft.path).free / 1e9:.2f} GB are free"
    )
    scratch = draft.path / SCRATCH
    scratch.mkdir()
    plugins = _place_plugins(source, recipe.engine, draft.path, targets, libraries, report)
    document: dict[str, Any] = {"engines": {}, "profiles": {}}
    timings: dict[str, Any] = {}
    for plan in plans:
        entries, profiles, timings[plan.name] = _build_one(source, recipe, plan, draft.path, targets, plugins, report)
        document["engines"] |= entries
        document["profiles"] |= profiles
        for phase, entry in entries.items():
            _tell(phase, entry, timings[plan.name], report)
    draft.target["engines"] = {
        phase: {"file": f"{plan.name}.engine", "profile": i} for plan in plans for i, phase in enumerate(plan.phases)
    }
    if recipe.engine.strip_weights:
        draft.target["weights_from"] = {f"{plan.name}.engine": f"{plan.name}.onnx" for plan in plans}
    draft.target["plugin_libraries"] = [f"{PLUGINS}/{path.name}" for path in plugins]
    shutil.rmtree(scratch)
    return document, timings


def _tell(name: str, entry: dict[str, Any], timings: dict[str, Any], report: Say) -> None:
    attention = entry["summary"]["attention"]
    report(
        f"{name}: {entry['bytes'] / 1e6:.1f} MB, {len(entry['layers'])} kernels, "
        f"{attention['fused']} of {attention['layers']} attentions fused, {timings['build_s']:.1f} s"
    )
    if unfused := entry["summary"]["unfused_qdq"]:
        report(f"note: {name} has {unfused} kernels that only quantize or dequantize (the report lists them)")


def _place_plugins(
    source: Artifact, engine: Engine, folder: Path, targets: Sequence[Target], libraries: Sequence[Path], report: Say
) -> list[Path]:
    """The plugin libraries inside the artifact, in load order: the given ones, and ours unless one of them is it."""
    placed = []
    for library in libraries:
        (folder / PLUGINS).mkdir(exist_ok=True)
        placed.append(folder / PLUGINS / library.name)
        shutil.copyfile(library, placed[-1])
    if engine.attention == "plugin" and not any(describe_library(path) for path in placed):
        from toolchain.ops.plugin.build import build_plugin

        placed.append(folder / PLUGINS / PLUGIN_LIBRARY)
        dtype = str(source.manifest.details["compute_dtype"])
        build_plugin(attention_specs(source), dtype, [t.sm for t in targets], placed[-1], report=report)
    return placed


def _build_one(
    source: Artifact,
    recipe: Recipe,
    plan: EnginePlan,
    folder: Path,
    targets: Sequence[Target],
    plugins: Sequence[Path],
    report: Say,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """One engine: a report entry per phase, its profiles and its timings. It is checked before it is placed."""
    engine, scratch = recipe.engine, folder / SCRATCH
    path = write_static_graph(source, plan.graph, engine, scratch, plan.name)
    model = load_graph(path)
    config = source.read("decoder.json", DecoderConfig)
    profiles = _profiles(source, config, engine, plan)
    for profile in profiles.values():
        check_profile(dynamic_inputs(model.graph), profile)
    request = BuildRequest(
        backend=engine.backend,
        onnx=path,
        sms=tuple(t.sm for t in targets),
        profiles=tuple(profiles.values()),
        folder=scratch,
        plugin_libraries=tuple(plugins),
        options=BuildOptions(**engine.model_dump(include=set(BuildOptions.__slots__))),
        timing_cache=_timing_cache(source, engine, targets),
    )
    result = compile_graph(request, _throttled(report))
    facts = read_graph(model, source.manifest.details["compute_dtype"])
    entries = {}
    for phase, kernels in zip(plan.phases, parse_layers(result.layers, len(plan.phases)), strict=True):
        verify_engine(phase, kernels, facts)
        entries[phase] = engine_entry(kernels, facts, result.plan.stat().st_size)
    result.plan.rename(folder / f"{plan.name}.engine")
    if engine.strip_weights:  # the graph and its data travel with the plan, which holds neither
        for name in (path.name, *external_files(model)):
            if not (folder / name).exists():
                shutil.copyfile(scratch / name, folder / name)
    shapes = {
        phase: {name: ["x".join(map(str, shape)) for shape in shapes] for name, shapes in profile.items()}
        for phase, profile in profiles.items()
    }
    return entries, shapes, _timings(result)


def _timings(result: BuildResult) -> dict[str, Any]:
    fields = ("parse_s", "build_s", "peak_rss_bytes", "timing_cache")
    return {name: getattr(result, name) for name in fields}


def _profiles(source: Artifact, config: DecoderConfig, engine: Engine, plan: EnginePlan) -> dict[str, Profile]:
    caches = caches_of(source.manifest.kv_contract, config.num_hidden_layers)
    contract = graph_io(config, plan.graph, caches)
    tokens = {"prefill": engine.prompt_len, "decode": Range(min=1, opt=1, max=1)}
    return {phase: build_profile(contract, engine, tokens[phase]) for phase in plan.phases}


def _throttled(report: Say) -> Say:
    """Pass on a line of progress every few seconds at most: a small build says nothing."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY_S:
            last = time.monotonic()
            report(line)

    return say


def _timing_cache(source: Artifact, engine: Engine, targets: Sequence[Target]) -> Path | None:
    """The file of measured kernel times for this compiler and GPU; TensorRT-RTX measures nothing at build time."""
    if engine.backend != "tensorrt" or not engine.timing_cache:
        return None
    from importlib.metadata import version

    key = f"{engine.backend}-{version('tensorrt')}-{'-'.join(t.name for t in targets)}"
    return cache_folder() / "timing" / f"{key}-{source.identity[:16]}.cache"
