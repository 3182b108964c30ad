"""`dtool build-engine`: an export or quantize artifact becomes engines for its targets."""

import importlib.metadata
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolchain.artifact import (
    TIMINGS,
    Artifact,
    Draft,
    check_output,
    create_artifact,
    hash_file,
    open_artifact,
    stage_key,
)
from toolchain.engine.preflight import preflight, require_backend
from toolchain.engine.source import check_source
from toolchain.engine.targets import Target
from toolchain.errors import DtoolError
from toolchain.recipe import Recipe
from toolchain.recipe_sections import Engine

STAGE = "engine"
SOURCES = ("export", "quantize")
DECODER, TOKENIZER, REPORT = "decoder.json", "tokenizer", "report.json"
DISTRIBUTIONS = {
    "tensorrt": ("tensorrt", "tensorrt-cu13"),
    "tensorrt-rtx": ("tensorrt-rtx",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
}

Say = Callable[[str], None]


def build_engine(
    source: Path,
    recipe: Recipe,
    out: Path,
    *,
    force: bool = False,
    plugin_libraries: Sequence[Path] = (),
    report: Say = print,
) -> Artifact:
    """Compile the artifact in `source` for the recipe's backend and targets, into `out`.

    `plugin_libraries` are registered before the graphs are read, and travel with the engine.
    Raises DtoolError before any work when the request cannot be met, and later when the compiler
    fails, dies, or compiles something else than the graphs say; nothing is left behind then.
    """
    check_output(out, force=force, source=source)
    artifact = open_artifact(source, SOURCES)
    check_source(artifact, recipe)
    targets = preflight(artifact, recipe, plugin_libraries)
    with create_artifact(out, STAGE, force=force) as draft:
        _describe(draft, artifact, recipe, targets, plugin_libraries)
        _copy_companions(artifact, draft.path)
        start = time.perf_counter()
        if recipe.engine.backend == "onnxruntime":
            from toolchain.engine.onnxruntime import build_onnxruntime

            document, timings = build_onnxruntime(artifact, draft, report), {}
        else:
            from toolchain.engine.tensorrt import build_tensorrt

            document, timings = build_tensorrt(artifact, recipe, draft, targets, plugin_libraries, report)
        draft.write_json(REPORT, _report_head(draft) | document)
        draft.write_json(TIMINGS, timings | {"total_s": round(time.perf_counter() - start, 3)})
    return open_artifact(out, (STAGE,), check_hashes=False)


def engine_key(source: Artifact, recipe: Recipe, plugin_libraries: Sequence[Path] = ()) -> str:
    """The key an engine of `source` would carry, to see whether a finished one can be reused."""
    lineage = _lineage(source, plugin_libraries)
    return stage_key(STAGE, lineage, recipe.sections(STAGE), _packages(recipe.engine, plugin_libraries))


def _lineage(source: Artifact, plugin_libraries: Sequence[Path]) -> dict[str, str]:
    plugins = {f"plugin.{path.name}": hash_file(path) for path in plugin_libraries}
    return {"source": source.identity} | plugins


def _packages(engine: Engine, plugin_libraries: Sequence[Path]) -> tuple[str, ...]:
    """The installed distributions that shape an engine. Raises DtoolError when the backend is missing."""
    require_backend(engine.backend)
    builds_kernels = engine.backend != "onnxruntime" and engine.attention == "plugin" and not plugin_libraries
    return (_compiler(engine.backend), "onnx", "onnx-ir", *(("triton",) if builds_kernels else ()))


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


def _describe(
    draft: Draft, source: Artifact, recipe: Recipe, targets: tuple[Target, ...], plugin_libraries: Sequence[Path]
) -> None:
    """Fill in the manifest's fields: all of them are known before the work."""
    engine, old = recipe.engine, source.manifest
    compiler = _compiler(engine.backend)
    draft.lineage = _lineage(source, plugin_libraries)
    draft.recipe = recipe.sections(STAGE)
    draft.packages = _packages(engine, plugin_libraries)
    draft.key = engine_key(source, recipe, plugin_libraries)
    draft.kv_contract = old.kv_contract | {"capacity": engine.kv_capacity}
    if engine.backend != "onnxruntime":
        draft.kv_contract["finite_slots"] = engine.attention == "native"  # it multiplies unused slots by zero
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
    if engine.backend != "onnxruntime":
        draft.target |= {
            "layout": engine.layout,
            "hardware_compatibility": engine.hardware_compatibility,
            "version_compatible": engine.version_compatible,
            "refittable": engine.refit or engine.strip_weights,
        }
        if (budget := engine.weight_streaming_budget_mb) is not None:
            draft.target["weight_streaming_budget_bytes"] = budget << 20


def _copy_companions(source: Artifact, folder: Path) -> None:
    """Copy what text and shapes need, so that the engine needs no other artifact."""
    for name in source.manifest.files:
        if name == DECODER or name.startswith(f"{TOKENIZER}/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.file(name), folder / name)


def _report_head(draft: Draft) -> dict[str, Any]:
    """What every engine report begins with."""
    compiler = " ".join(next(iter(draft.target["compiler"].items())))
    return {
        "backend": draft.target["backend"],
        "compiler": compiler,
        "targets": draft.target["targets"],
        "layout": draft.target.get("layout", "separate"),
    }
