"""`dtool quantize`: an export becomes the same graphs over integer weights and cache."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolchain.artifact import Artifact, Draft, check_output, create_artifact, hash_file, open_artifact, stage_key
from toolchain.errors import DtoolError
from toolchain.formats import format_named
from toolchain.graph_io import GRAPH_FILES, PHASES
from toolchain.model.config import DecoderConfig
from toolchain.quantize.plan import QuantizePlan, plan_quantization
from toolchain.recipe import Recipe, find_data
from toolchain.tensor_file import TensorEntry, build_header, read_header, read_tensor, tensor_bytes, write_stream

STAGE = "quantize"
PACKAGES = ("torch", "onnx", "onnx-ir")
WEIGHTS = "weights.safetensors"


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
    for note in plan.notes:
        report(f"note: {note}")
    blocks = _calibration_blocks(exported, recipe) if recipe.needs_calibration else None
    with create_artifact(out, STAGE, force=force) as draft:
        scales = _static_scales(exported, recipe, plan, blocks, report) if blocks is not None else {}
        entries = _write_weights(exported, recipe, plan, scales, draft, report)
        _write_graphs(exported, config, recipe, plan, entries, draft)
        _describe(exported, recipe, plan, draft)
    return open_artifact(out, (STAGE,), check_hashes=False)


def quantize_key(exported: Artifact, recipe: Recipe) -> str:
    """The key a quantized artifact of `exported` would carry."""
    return stage_key(STAGE, _lineage(exported, recipe), recipe.sections(STAGE), PACKAGES)


def _lineage(exported: Artifact, recipe: Recipe) -> dict[str, str]:
    lineage = {"source": exported.identity}
    if recipe.needs_calibration:
        lineage["calibration"] = hash_file(find_data(recipe.calibration.data))
    return lineage


def _calibration_blocks(exported: Artifact, recipe: Recipe) -> Any:
    from toolchain.text import load_tokenizer, read_texts, token_blocks

    c = recipe.calibration
    tokenizer = load_tokenizer(exported.path)
    return token_blocks(read_texts(find_data(c.data)), tokenizer, blocks=c.samples, seq_len=c.seq_len, seed=c.seed)


def _static_scales(
    exported: Artifact, recipe: Recipe, plan: QuantizePlan, blocks: Any, report: Callable[[str], None]
) -> dict[str, Any]:
    from toolchain.model.load import load_artifact_decoder
    from toolchain.quantize.calibration import calibrate

    decoder, _ = load_artifact_decoder(exported)
    held_in = format_named(str(exported.manifest.details["compute_dtype"])).torch_dtype
    products = plan.rounded if recipe.has_static_activations else ()
    return calibrate(decoder.float(), blocks, recipe, products, held_in, report)


def _write_weights(
    exported: Artifact,
    recipe: Recipe,
    plan: QuantizePlan,
    static_scales: Mapping[str, Any],
    draft: Draft,
    report: Callable[[str], None],
) -> dict[str, TensorEntry]:
    """Stream the weights through the quantizer into the new file, one tensor in memory at a time."""
    source = read_header(exported.file(WEIGHTS))
    quantized = {f"{name}.weight" for name in plan.weights}
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, entry in source.items():
        if name not in quantized:
            layout[name] = (entry.dtype, entry.shape)
            continue
        rows, width = entry.shape
        group = plan.groups.get(name.removesuffix(".weight"))
        layout[name] = (recipe.weights.format, entry.shape) if group is None else ("uint8", (rows, width // 2))
        layout[f"{name}_scale"] = ("float32", (rows,) if group is None else (rows, width // group))
    layout |= {name: ("float32", tuple(scale.shape)) for name, scale in static_scales.items()}
    header, _ = build_header(layout)
    config = DecoderConfig.model_validate(exported.json("decoder.json"))

    def chunks() -> Iterator[Any]:
        for name, entry in source.items():
            tensors = _quantize(name, entry, recipe, plan, config) if name in quantized else (read_tensor(entry),)
            yield from (tensor_bytes(tensor) for tensor in tensors)
        yield from (tensor_bytes(scale) for scale in static_scales.values())

    path = draft.path / WEIGHTS
    draft.known_sha256[WEIGHTS] = write_stream(path, header, chunks())
    report(f"{len(quantized)} of {len(source)} tensors quantized, {path.stat().st_size / 1e6:.1f} MB")
    return read_header(path)


def _quantize(name: str, entry: TensorEntry, recipe: Recipe, plan: QuantizePlan, config: DecoderConfig) -> Any:
    from toolchain.quantize.rtn import round_to_nearest

    weights = recipe.weights
    group = plan.groups.get(name.removesuffix(".weight"), 0)
    held_in = format_named(entry.dtype).torch_dtype
    options = {"parts": config.part_sizes(name), "group_size": group, "held_in": held_in}
    try:
        return round_to_nearest(read_tensor(entry), weights.format, weights.granularity, **options)
    except ValueError as error:
        raise DtoolError(f"{name} cannot be quantized", found=str(error), fix="check the checkpoint") from error


def _write_graphs(
    exported: Artifact,
    config: DecoderConfig,
    recipe: Recipe,
    plan: QuantizePlan,
    entries: Mapping[str, TensorEntry],
    draft: Draft,
) -> None:
    from toolchain.quantize.qdq import quantize_graph

    for phase in PHASES:
        graph = quantize_graph(
            exported.file(GRAPH_FILES[phase]),
            config,
            plan,
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


def _describe(exported: Artifact, recipe: Recipe, plan: QuantizePlan, draft: Draft) -> None:
    kv_format = recipe.kv_cache.format
    draft.lineage = _lineage(exported, recipe)
    draft.recipe = exported.manifest.recipe | recipe.sections(STAGE)
    draft.packages = PACKAGES
    draft.key = stage_key(STAGE, draft.lineage, recipe.sections(STAGE), PACKAGES)
    draft.kv_contract = dict(exported.manifest.kv_contract)
    if kv_format != "none":
        draft.kv_contract |= {"dtype": kv_format, "scales": "per layer and KV head, in weights.safetensors"}
    draft.details = exported.manifest.details | {
        "kv_format": kv_format,
        "weight_format": recipe.weights.format,
        "quantized": list(plan.weights),
        "rounded_inputs": list(plan.rounded),
        "activation_format": [recipe.activations.format, recipe.activations.granularity] if plan.rounded else None,
        "not_quantized": list(plan.skipped),
    }
