"""`dtool build-engine`: an export or quantize artifact becomes engines for its targets."""

import importlib.metadata
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolchain.artifact import TIMINGS, Artifact, Draft, check_output, create_artifact, open_artifact, stage_key
from toolchain.engine.preflight import preflight, require_backend
from toolchain.engine.profiles import ENGINE_PHASES, build_profile, check_profile, dynamic_inputs, write_static_graph
from toolchain.engine.targets import Target
from toolchain.errors import DtoolError
from toolchain.graph_io import graph_io
from toolchain.model.config import DecoderConfig
from toolchain.recipe import Recipe

STAGE = "engine"
SOURCES = ("export", "quantize")
DECODER, TOKENIZER, REPORT = "decoder.json", "tokenizer", "report.json"
SCRATCH = ".build"
DISTRIBUTIONS = {"tensorrt-rtx": ("tensorrt-rtx",), "onnxruntime": ("onnxruntime", "onnxruntime-gpu")}

Say = Callable[[str], None]


def build_engine(source: Path, recipe: Recipe, out: Path, *, force: bool = False, report: Say = print) -> Artifact:
    """Compile the artifact in `source` for the recipe's backend and targets, into `out`.

    Raises DtoolError before any work when the request cannot be met, and later when the compiler
    fails, dies, or compiles something else than the graphs say; nothing is left behind then.
    """
    check_output(out, force=force, source=source)
    artifact = open_artifact(source, SOURCES)
    check_source(artifact, recipe)
    targets = preflight(artifact, recipe)
    with create_artifact(out, STAGE, force=force) as draft:
        _describe(draft, artifact, recipe, targets)
        _copy_companions(artifact, draft.path)
        start = time.perf_counter()
        if recipe.engine.backend == "onnxruntime":
            from toolchain.engine.onnxruntime import build_onnxruntime

            document, timings = build_onnxruntime(artifact, draft, report), {}
        else:
            document, timings = _build_tensorrt_rtx(artifact, recipe, draft, targets, report)
        draft.write_json(REPORT, _report_head(draft) | document)
        draft.write_json(TIMINGS, timings | {"total_s": round(time.perf_counter() - start, 3)})
    return open_artifact(out, (STAGE,), check_hashes=False)


def check_source(source: Artifact, recipe: Recipe) -> None:
    """Refuse a source that lacks the quantization the recipe asks for."""
    details = source.manifest.details
    asked = {
        "weights.format": (recipe.weights.format, details.get("weight_format", "none")),
        "kv_cache.format": (recipe.kv_cache.format, details.get("kv_format", "none")),
        "activations.format": (recipe.activations.format, (details.get("activation_format") or ("none",))[0]),
    }
    for key, (wanted, found) in asked.items():
        if wanted not in ("none", found):
            raise DtoolError(
                f"{source.path} is not what the recipe describes",
                expected=f"{key} {wanted}",
                found=f"{key} {found}, from stage {source.manifest.stage}",
                fix="run `dtool quantize` with this recipe first, and build from what it writes",
            )


def engine_key(source: Artifact, recipe: Recipe) -> str:
    """The key an engine of `source` would carry, to see whether a finished one can be reused."""
    return stage_key(STAGE, _lineage(source), recipe.sections(STAGE), _packages(recipe.engine.backend))


def _lineage(source: Artifact) -> dict[str, str]:
    return {"source": source.identity}


def _packages(backend: str) -> tuple[str, ...]:
    """The installed distributions that shape an engine. Raises DtoolError when the backend is missing."""
    require_backend(backend)
    return (_compiler(backend), "onnx", "onnx-ir")


def _compiler(backend: str) -> str:
    for name in DISTRIBUTIONS[backend]:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    raise DtoolError(
        f"the version of {backend} is unknown",
        expected=f"an installed package {' or '.join(DISTRIBUTIONS[backend])}",
        found="its module without package metadata",
        fix="install it with pip",
    )


def _describe(draft: Draft, source: Artifact, recipe: Recipe, targets: tuple[Target, ...]) -> None:
    """Fill in the manifest's fields: all of them are known before the work."""
    engine, old = recipe.engine, source.manifest
    compiler = _compiler(engine.backend)
    draft.lineage = _lineage(source)
    draft.recipe = recipe.sections(STAGE)
    draft.packages = _packages(engine.backend)
    draft.key = engine_key(source, recipe)
    draft.kv_contract = old.kv_contract | {"capacity": engine.kv_capacity}
    draft.details = dict(old.details)
    draft.target = {
        "backend": engine.backend,
        "compiler": {compiler: importlib.metadata.version(compiler)},
        "targets": [t.name for t in targets],
        "compute_capabilities": [t.compute_capability for t in targets],
        "attention": engine.attention,
        "kv_capacity": engine.kv_capacity,
        "max_batch": engine.batch.max,
        "max_prompt": engine.prompt_len.max,
    }


def _copy_companions(source: Artifact, folder: Path) -> None:
    """Copy what text and shapes need, so that the engine needs no other artifact."""
    for name in source.manifest.files:
        if name == DECODER or name.startswith(f"{TOKENIZER}/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.file(name), folder / name)


def _report_head(draft: Draft) -> dict[str, Any]:
    """What every engine report begins with."""
    compiler = " ".join(next(iter(draft.target["compiler"].items())))
    return {"backend": draft.target["backend"], "compiler": compiler, "targets": draft.target["targets"]}


def _build_tensorrt_rtx(
    source: Artifact, recipe: Recipe, draft: Draft, targets: tuple[Target, ...], report: Say
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile, check and place both engines; the report document and the timings."""
    from toolchain.engine.tensorrt_rtx import estimate_rss_bytes

    weights = sum(e.bytes for name, e in source.manifest.files.items() if name.endswith(".safetensors"))
    report(
        f"compiling needs about {estimate_rss_bytes(weights) / 1e9:.1f} GB of memory, "
        f"and {2 * weights / 1e9:.1f} GB of disk"
    )
    scratch = draft.path / SCRATCH
    scratch.mkdir()
    document: dict[str, Any] = {"engines": {}, "profiles": {}}
    timings: dict[str, Any] = {}
    for phase in ENGINE_PHASES:
        entry, profile, timings[phase] = _build_phase(source, recipe, phase, draft.path, targets)
        document["engines"][phase] = entry
        document["profiles"][phase] = {
            name: ["x".join(map(str, shape)) for shape in shapes] for name, shapes in profile.items()
        }
        attention = entry["summary"]["attention"]
        report(
            f"{phase}: {entry['bytes'] / 1e6:.1f} MB, {len(entry['layers'])} kernels, "
            f"{attention['fused']} of {attention['layers']} attentions fused, {timings[phase]['build_s']:.1f} s"
        )
        if unfused := entry["summary"]["unfused_qdq"]:
            report(f"note: {phase} has {unfused} kernels that only quantize or dequantize (the report lists them)")
    shutil.rmtree(scratch)
    return document, timings


def _build_phase(
    source: Artifact, recipe: Recipe, phase: Any, folder: Path, targets: tuple[Target, ...]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """One engine: its report entry, its profile and its timings. The plan is checked before it is placed."""
    import onnx

    from toolchain.engine.layers import parse_layers
    from toolchain.engine.report import engine_entry, read_graph, verify_engine
    from toolchain.engine.tensorrt_rtx import BuildRequest, compile_graph

    scratch = folder / SCRATCH
    path = write_static_graph(source, phase, recipe.engine.kv_capacity, scratch)
    model = onnx.load(str(path), load_external_data=False)
    config = DecoderConfig.model_validate(source.json(DECODER))
    profile = build_profile(graph_io(config, phase, source.manifest.kv_contract["dtype"]), recipe.engine)
    check_profile(dynamic_inputs(model.graph), profile)
    result = compile_graph(BuildRequest(path, tuple(t.sm for t in targets), profile, scratch))
    facts = read_graph(model, source.manifest.details["compute_dtype"])
    kernels = parse_layers(result.layers)
    verify_engine(phase, kernels, facts)
    plan = result.plan.rename(folder / f"{phase}.engine")
    timings = {"parse_s": result.parse_s, "build_s": result.build_s, "peak_rss_bytes": result.peak_rss_bytes}
    return engine_entry(kernels, facts, plan.stat().st_size), profile, timings
