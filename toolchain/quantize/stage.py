"""`dtool quantize`: an export becomes the same graphs over integer weights and cache."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolchain.artifact import Artifact, Draft, check_output, create_artifact, hash_file, open_artifact, stage_key
from toolchain.errors import DtoolError
from toolchain.graph_io import GRAPH_FILES, PHASES
from toolchain.model.caches import CacheFormat, describe_caches
from toolchain.model.config import DecoderConfig
from toolchain.quantize.cache import plan_caches
from toolchain.quantize.plan import QuantizePlan, plan_quantization
from toolchain.quantize.stored import StoredScales, needs_calibration, open_stored
from toolchain.recipe import Recipe, find_data
from toolchain.tensor_file import TensorEntry, build_header, read_header, tensor_bytes, write_stream

STAGE = "quantize"
PACKAGES = ("torch", "onnx", "onnx-ir")
WEIGHTS, QUANTIZATION = "weights.safetensors", "quantization.json"
Caches = tuple[CacheFormat, ...]


def quantize_artifact(
    source: Path, recipe: Recipe, out: Path, *, force: bool = False, report: Callable[[str], None] = print
) -> Artifact:
    """Write the quantized artifact of an export to `out`.

    Raises DtoolError before any work for a recipe that quantizes nothing, a pattern that matches
    nothing, missing calibration text, or an output that exists.
    """
    check_output(out, force=force, source=source)
    exported = open_artifact(source, ("export",))
    config = DecoderConfig.model_validate(exported.json("decoder.json"))
    if not recipe.quantizes:
        raise DtoolError("the recipe quantizes nothing", expected="weights.format or kv_cache.format other than none")
    plan = plan_quantization(config, recipe)
    if recipe.rotation.is_on:
        from toolchain.quantize.rotation import check_rotation

        check_rotation(config, recipe.rotation)
    if recipe.smoothing.keys:
        from toolchain.quantize.keys import check_keys

        check_keys(config)
    caches = plan_caches(config, recipe, str(exported.manifest.details["compute_dtype"]))
    for note in plan.notes:
        report(f"note: {note}")
    stored = open_stored(exported, recipe, plan)
    for note in () if stored is None else stored.notes:
        report(f"note: {note}")
    blocks = _calibration_blocks(exported, recipe) if needs_calibration(recipe, plan, config, stored) else None
    with create_artifact(out, STAGE, force=force) as draft:
        progress = None if blocks is None else _open_progress(out, quantize_key(exported, recipe), report)
        entries = _write_weights(exported, recipe, plan, caches, stored, blocks, draft, progress, report)
        _write_graphs(exported, config, recipe, plan, caches, entries, draft)
        _describe(exported, recipe, plan, caches, draft)
    if progress is not None:
        progress.remove()
    return open_artifact(out, (STAGE,), check_hashes=False)


def quantize_key(exported: Artifact, recipe: Recipe) -> str:
    """The key a quantized artifact of `exported` would carry."""
    return stage_key(STAGE, _lineage(exported, recipe), recipe.sections(STAGE), PACKAGES)


def _lineage(exported: Artifact, recipe: Recipe) -> dict[str, str]:
    lineage = {"source": exported.identity}
    if _calibrates(exported, recipe):
        lineage["calibration"] = hash_file(find_data(recipe.calibration.data))
    return lineage


def _calibrates(exported: Artifact, recipe: Recipe) -> bool:
    config = DecoderConfig.model_validate(exported.json("decoder.json"))
    plan = plan_quantization(config, recipe)
    return needs_calibration(recipe, plan, config, open_stored(exported, recipe, plan))


def _calibration_blocks(exported: Artifact, recipe: Recipe) -> Any:
    from toolchain.text import load_tokenizer, read_texts, token_blocks

    c = recipe.calibration
    tokenizer = load_tokenizer(exported.path)
    return token_blocks(read_texts(find_data(c.data)), tokenizer, blocks=c.samples, seq_len=c.seq_len, seed=c.seed)


def _open_progress(out: Path, key: str, report: Callable[[str], None]) -> Any:
    from toolchain.quantize.progress import Progress

    progress = Progress(out, key)
    if progress.first:
        report(f"going on at layer {progress.first + 1}: those before were finished")
    return progress


def _write_weights(
    exported: Artifact,
    recipe: Recipe,
    plan: QuantizePlan,
    caches: Caches,
    stored: StoredScales | None,
    blocks: Any,
    draft: Draft,
    progress: Any,
    report: Callable[[str], None],
) -> dict[str, TensorEntry]:
    """Stream the weights through the quantizer into the new file, at most one layer in memory at a time."""
    from toolchain.quantize.excess import survey_excess
    from toolchain.quantize.findings import coverage, warnings, worst_rows
    from toolchain.quantize.stream import QuantizedStream

    source = read_header(exported.file(WEIGHTS))
    config = DecoderConfig.model_validate(exported.json("decoder.json"))
    excess = survey_excess(source, config, recipe, plan, blocks, report)
    stream = QuantizedStream(source, config, recipe, plan, caches, blocks, report, excess, progress, stored)
    header, _ = build_header(stream.layout())
    path = draft.path / WEIGHTS
    chunks = (tensor_bytes(tensor) for tensor in stream.tensors())
    draft.known_sha256[WEIGHTS] = write_stream(path, header, chunks)
    found = warnings(stream.rows, plan.rounded, str(exported.manifest.details["compute_dtype"]))
    document = {"matrices": stream.rows, "not_quantized": list(plan.skipped), "warnings": found}
    document |= {"calibration": coverage(blocks, config.vocab_size), "identity_error": stream.identity_error}
    draft.write_json(QUANTIZATION, document)
    for line in found:
        report(f"warning: {line}")
    report(f"{len(plan.weights)} of {len(source)} tensors quantized, {path.stat().st_size / 1e6:.1f} MB")
    for row in worst_rows(stream.rows):
        report(row)
    return read_header(path)


def _write_graphs(
    exported: Artifact,
    config: DecoderConfig,
    recipe: Recipe,
    plan: QuantizePlan,
    caches: Caches,
    entries: Mapping[str, TensorEntry],
    draft: Draft,
) -> None:
    from toolchain.quantize.qdq import quantize_graph

    for phase in PHASES:
        graph = quantize_graph(
            exported.file(GRAPH_FILES[phase]),
            config,
            plan,
            caches,
            entries,
            phase,
            recipe,
            compute_dtype=str(exported.manifest.details["compute_dtype"]),
        )
        (draft.path / GRAPH_FILES[phase]).write_bytes(graph)
    for name in exported.manifest.files:
        if name == "decoder.json" or name.startswith(("rope", "tokenizer/")):
            (draft.path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(exported.file(name), draft.path / name)


def _describe(exported: Artifact, recipe: Recipe, plan: QuantizePlan, caches: Caches, draft: Draft) -> None:
    draft.lineage = _lineage(exported, recipe)
    draft.recipe = exported.manifest.recipe | recipe.sections(STAGE)
    draft.packages = PACKAGES
    draft.key = stage_key(STAGE, draft.lineage, recipe.sections(STAGE), PACKAGES)
    draft.kv_contract = exported.manifest.kv_contract | describe_caches(caches)
    draft.details = exported.manifest.details | {
        "kv_format": recipe.kv_cache.format,
        "weight_format": "+".join(sorted({weights.format for weights in plan.weights.values()})) or "none",
        "quantized": {name: weights.format for name, weights in plan.weights.items()},
        "rounded_inputs": {name: [a.format, a.granularity] for name, a in plan.rounded.items()},
        "not_quantized": list(plan.skipped),
    }
