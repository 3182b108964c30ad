"""`dtool quantize`: an export becomes the same graphs over integer weights and cache."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolchain.artifact import (
    PROGRESS,
    Artifact,
    Draft,
    check_output,
    create_artifact,
    enclosing_artifact,
    hash_file,
    hidden_beside,
    open_artifact,
    require_room,
    stage_key,
    verify_files,
)
from toolchain.errors import DtoolError
from toolchain.graph_io import GRAPH_FILES, PHASES
from toolchain.model.caches import describe_caches
from toolchain.model.config import DecoderConfig
from toolchain.quantize.job import WEIGHTS, Job, plan_job, plan_recipe
from toolchain.recipe import Recipe, find_data
from toolchain.report import significant
from toolchain.tensor_file import TensorEntry, build_header, read_header, tensor_bytes, write_stream

STAGE = "quantize"
PACKAGES = ("torch", "onnx", "onnx-ir")
QUANTIZATION = "quantization.json"
ERROR_DIGITS = 1
"""Of a difference that rounding alone makes: only its magnitude means something."""


def quantize_artifact(
    source: Path,
    recipe: Recipe,
    out: Path,
    *,
    force: bool = False,
    statistics: Path | None = None,
    report: Callable[[str], None] = print,
) -> Artifact:
    """Write the quantized artifact of an export to `out`.

    `statistics`: a folder that keeps what calibration saw, for other recipes; the output does not depend on it.
    Raises DtoolError before weights are read for an output that exists, a recipe that quantizes nothing or does not
    fit the model, and text that cannot be calibrated on; later for weights that are damaged or not finite.
    """
    check_output(out, force=force, source=source)
    if statistics is not None:
        check_statistics(statistics, out)
    exported = open_artifact(source, ("export",), later=WEIGHTS)
    if not recipe.quantizes:
        raise DtoolError(
            "the recipe quantizes nothing",
            expected="weights.format or kv_cache.format other than none",
            found="both none, in overrides too",
            fix="--set weights.format=int8, or leave the quantize stage out",
        )
    job = replace(plan_job(exported, recipe), report=report)
    for note in job.notes:
        report(f"note: {note}")
    if job.calibrates:
        job = replace(job, blocks=_calibration_blocks(exported, recipe))
    if statistics is not None:
        job = _with_statistics(job, exported, statistics)
    _require_room(job, out)
    verify_files(exported, check_hashes=True)
    with create_artifact(out, STAGE, force=force) as draft:
        _describe(exported, job, draft)
        if job.calibrates:
            job = replace(job, progress=_open_progress(out, draft.key, report))
        entries = _write_weights(job, draft)
        _write_graphs(exported, job, entries, draft)
    if job.progress is not None:
        job.progress.remove()
    return open_artifact(out, (STAGE,), check_hashes=False)


def _require_room(job: Job, out: Path) -> None:
    """Refuse an output that its disk has no room for, with the finished layers that are kept beside it meanwhile."""
    from toolchain.quantize.stream import QuantizedStream

    header, ranges = build_header(QuantizedStream(job).layout())
    weights = len(header) + sum(length for _, length in ranges.values())
    beside = 0
    if job.calibrates:
        kept = sum(p.stat().st_size for p in hidden_beside(out, PROGRESS).rglob("*") if p.is_file())
        layers = sum(length for name, (_, length) in ranges.items() if name.startswith("model.layers."))
        beside = max(layers - kept, 0)
    require_room(out, weights, beside)


def quantized_matrices(exported: Artifact, recipe: Recipe) -> tuple[str, ...]:
    """The matrices of an export that a recipe quantizes. Raises DtoolError as `plan_recipe`."""
    config = exported.read("decoder.json", DecoderConfig)
    return tuple(plan_recipe(config, recipe, str(exported.manifest.details["compute_dtype"]))[0].weights)


def quantize_key(exported: Artifact, recipe: Recipe) -> str:
    """The key a quantized artifact of `exported` would carry."""
    return _key(_lineage(exported, plan_job(exported, recipe)), recipe)


def _key(lineage: Mapping[str, str], recipe: Recipe) -> str:
    return stage_key(STAGE, lineage, recipe.sections(STAGE), PACKAGES)


def _lineage(exported: Artifact, job: Job) -> dict[str, str]:
    lineage = {"source": exported.identity}
    if job.calibrates:
        lineage["calibration"] = hash_file(find_data(job.recipe.calibration.data))
    return lineage


def _calibration_blocks(exported: Artifact, recipe: Recipe) -> Any:
    from toolchain.quantize.calibration import calibration_blocks

    return calibration_blocks(exported.path, recipe, exported.read("decoder.json", DecoderConfig))


def check_statistics(folder: Path, out: Path) -> None:
    """Refuse a place for statistics in an artifact or in the output, or that cannot be written, before any work."""
    inside = out if out.resolve() in (folder.resolve(), *folder.resolve().parents) else enclosing_artifact(folder)
    if inside is not None or (folder.exists() and not folder.is_dir()):
        raise DtoolError(
            f"no statistics can be kept in {folder}",
            expected="a folder outside artifacts, which hold what their manifest lists",
            found="a file" if inside is None else f"the artifact {inside}",
            fix="choose a folder beside it",
        )
    _require_writable(folder)


def _require_writable(folder: Path) -> None:
    """Try it, and leave nothing behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            list(folder.iterdir())
    except OSError as error:
        raise DtoolError(
            f"no statistics can be kept in {folder}",
            expected="a folder that can be read and written",
            found=error.strerror or str(error),
            fix="choose another folder, or leave --statistics out",
        ) from error
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _with_statistics(job: Job, exported: Artifact, folder: Path) -> Job:
    """The job with the statistics that fit it; as it was, with a note, where there can be none."""
    from toolchain.quantize.excess import asked_excess
    from toolchain.quantize.statistics import Statistics, statistics_key

    recipe = job.recipe
    if job.blocks is None or recipe.calibration.inputs == "quantized":
        why = "the recipe measures nothing" if job.blocks is None else "calibration.inputs quantized sees its own model"
        job.report(f"note: statistics are neither taken nor kept: {why}")
        return job
    weights, config = exported.manifest.files[WEIGHTS].sha256, exported.json("decoder.json")
    bases = {"rotation": recipe.rotation.model_dump(), "excess": asked_excess(job), "batch": recipe.calibration.batch}
    return replace(job, statistics=Statistics(folder, statistics_key(weights, config, job.blocks, bases), job.report))


def _open_progress(out: Path, key: str, report: Callable[[str], None]) -> Any:
    from toolchain.quantize.progress import Progress

    progress = Progress(out, key)
    if progress.first:
        report(f"going on at layer {progress.first + 1}: those before were finished")
    return progress


def _write_weights(job: Job, draft: Draft) -> dict[str, TensorEntry]:
    """Stream the weights through the quantizer into the new file, at most one layer in memory at a time."""
    from toolchain.quantize.excess import survey_excess
    from toolchain.quantize.findings import coverage, text_warnings, warnings, worst_rows
    from toolchain.quantize.pieces import fixed_pieces
    from toolchain.quantize.stream import QuantizedStream

    path = draft.path / WEIGHTS
    with fixed_pieces():
        stream = QuantizedStream(replace(job, excess=survey_excess(job)))
        header, _ = build_header(stream.layout())
        chunks = (tensor_bytes(tensor) for tensor in stream.tensors())
        draft.known_sha256[WEIGHTS] = write_stream(path, header, chunks)
    text = coverage(job.blocks, job.config.vocab_size)
    found = warnings(stream.rows, job.plan.rounded, job.held_in) + text_warnings(text)
    document = {"matrices": stream.rows, "not_quantized": list(job.plan.skipped), "warnings": found}
    document |= {"centered": list(job.plan.centered), "calibration": text}
    document["identity_error"] = significant(stream.identity_error, ERROR_DIGITS)
    draft.write_json(QUANTIZATION, document)
    for line in found:
        job.report(f"warning: {line}")
    job.report(f"{len(job.plan.weights)} of {len(job.entries)} tensors quantized, {path.stat().st_size / 1e6:.1f} MB")
    for row in worst_rows(stream.rows):
        job.report(row)
    return read_header(path)


def _write_graphs(exported: Artifact, job: Job, entries: Mapping[str, TensorEntry], draft: Draft) -> None:
    from toolchain.quantize.qdq import quantize_graph

    for phase in PHASES:
        graph = quantize_graph(
            exported.file(GRAPH_FILES[phase]),
            job.config,
            job.plan,
            job.caches,
            entries,
            phase,
            job.recipe,
            compute_dtype=job.held_in,
        )
        (draft.path / GRAPH_FILES[phase]).write_bytes(graph)
    for name in exported.manifest.files:
        if name == "decoder.json" or name.startswith(("rope", "tokenizer/")):
            (draft.path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(exported.file(name), draft.path / name)


def _describe(exported: Artifact, job: Job, draft: Draft) -> None:
    """Everything of the manifest but the files."""
    plan, recipe = job.plan, job.recipe
    draft.lineage = _lineage(exported, job)
    draft.recipe = exported.manifest.recipe | recipe.sections(STAGE)
    draft.packages = PACKAGES
    draft.key = _key(draft.lineage, recipe)
    draft.kv_contract = exported.manifest.kv_contract | describe_caches(job.caches)
    draft.details = exported.manifest.details | {
        "kv_format": recipe.kv_cache.format,
        "weight_format": "+".join(sorted({weights.format for weights in plan.weights.values()})) or "none",
        "quantized": {name: weights.format for name, weights in plan.weights.items()},
        "rounded_inputs": {name: [a.format, a.granularity] for name, a in plan.rounded.items()},
        "not_quantized": list(plan.skipped),
    }
