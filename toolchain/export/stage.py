"""`dtool export`: a checkpoint folder becomes three ONNX graphs over one weights file."""

from collections.abc import Callable, Mapping
from pathlib import Path

from toolchain.artifact import (
    Artifact,
    check_output,
    create_artifact,
    hash_file,
    open_artifact,
    require_room,
    stage_key,
)
from toolchain.export.weights import checkpoint_identity, weights_file_bytes, write_weights
from toolchain.graph_io import CACHE_LAYOUT, GRAPH_FILES, PHASES, external_initializer, graph_io
from toolchain.model.caches import CacheFormat, caches_of, describe_caches
from toolchain.model.checkpoint import Checkpoint, open_checkpoint
from toolchain.model.config import DecoderConfig
from toolchain.model.foreign.scheme import QUANT_FILE, STORED_DETAILS, STORED_SCALES
from toolchain.recipe import Recipe
from toolchain.tensor_file import TensorEntry
from toolchain.tokenizer import has_tokenizer, load_tokenizer, write_tokenizer

STAGE = "export"
PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "tokenizers", "transformers")
WEIGHTS, ROPE, DECODER, TOKENIZER = "weights.safetensors", "rope.safetensors", "decoder.json", "tokenizer"


def export_checkpoint(
    source: Path, recipe: Recipe, out: Path, *, force: bool = False, report: Callable[[str], None] = print
) -> Artifact:
    """Write prefill.onnx, decode.onnx and evaluation.onnx over weights.safetensors to `out`.

    Raises DtoolError before any work when the checkpoint is not one, or when `out` exists.
    """
    check_output(out, force=force, source=source)
    checkpoint = open_checkpoint(source, recipe.context_len)
    tokenizer = load_tokenizer(source) if has_tokenizer(source) else None
    for note in (*checkpoint.notes, *(tokenizer.notes if tokenizer else ())):
        report(f"note: {note}")
    require_room(out, weights_file_bytes(checkpoint, recipe.compute_dtype))
    with create_artifact(out, STAGE, force=force) as draft:
        written = write_weights(checkpoint, recipe.compute_dtype, draft.path / WEIGHTS)
        report(f"{len(written.entries)} tensors written as {recipe.compute_dtype}")
        write_graphs(draft.path, checkpoint.config, recipe.compute_dtype, written.entries)
        stored = write_stored_scales(checkpoint, draft.path, report)
        draft.write_json(DECODER, checkpoint.config.model_dump(mode="json"))
        if tokenizer is not None:
            write_tokenizer(tokenizer, draft.path / TOKENIZER)
        draft.known_sha256[WEIGHTS] = written.sha256
        draft.lineage = lineage(checkpoint, written.source_sha256)
        draft.recipe = recipe.sections(STAGE)
        draft.packages = PACKAGES
        draft.key = stage_key(STAGE, draft.lineage, draft.recipe, PACKAGES)
        draft.kv_contract = kv_contract(checkpoint.config, CacheFormat(recipe.compute_dtype))
        draft.details = {
            "source_dtype": checkpoint.config.dtype,
            "compute_dtype": recipe.compute_dtype,
            "stored_names": stored_names(checkpoint),
        } | stored
    return open_artifact(out, (STAGE,), check_hashes=False)


def export_key(source: Path, recipe: Recipe) -> str:
    """The key an export of `source` would carry, to see whether a finished one can be reused."""
    checkpoint = open_checkpoint(source, recipe.context_len)
    return stage_key(STAGE, lineage(checkpoint, checkpoint_identity(checkpoint)), recipe.sections(STAGE), PACKAGES)


def lineage(checkpoint: Checkpoint, weights_sha256: str) -> dict[str, str]:
    """Digests of everything the export reads: the tensors, the config and the tokenizer's files."""
    files = [checkpoint.path / "config.json", *checkpoint.tokenizer_files]
    if checkpoint.foreign is not None and (checkpoint.path / QUANT_FILE).is_file():
        files.append(checkpoint.path / QUANT_FILE)
    hashes = {f"checkpoint.{p.relative_to(checkpoint.path).as_posix()}": hash_file(p) for p in files}
    return {"checkpoint.tensors": weights_sha256} | hashes


def write_stored_scales(checkpoint: Checkpoint, folder: Path, report: Callable[[str], None]) -> dict[str, object]:
    """Keep the scales of a checkpoint that was quantized; what the manifest says of them, nothing where it was not."""
    if checkpoint.foreign is None:
        return {}
    from toolchain.model.foreign.stored import read_stored_scales
    from toolchain.tensor_file import write_tensors

    stored = read_stored_scales(checkpoint.parameters, checkpoint.foreign, checkpoint.config)
    for note in stored.notes:
        report(f"note: {note}")
    if stored.tensors:
        write_tensors(folder / STORED_SCALES, stored.tensors)
    return {STORED_DETAILS: stored.details}


def stored_names(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """What the checkpoint calls each parameter, for layer 0 alone of the layers that are alike."""
    config = checkpoint.config
    kinds = [config.layer(i).experts for i in range(config.num_hidden_layers)]
    shown = {str(kinds.index(kind)) for kind in set(kinds)}
    return {
        name: list(parameter.names)
        for name, parameter in checkpoint.parameters.items()
        if not name.startswith("model.layers.") or name.split(".")[2] in shown
    }


def kv_contract(config: DecoderConfig, cache: CacheFormat) -> dict[str, object]:
    """How another host must lay out a cache to exchange it with these graphs."""
    return {
        "layout": CACHE_LAYOUT,
        **describe_caches([cache]),
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "padding": "right",
        "key_is_rotated": True,
    }


def write_graphs(folder: Path, config: DecoderConfig, compute_dtype: str, entries: dict[str, TensorEntry]) -> None:
    """Trace the decoder once and write the graph of every phase, all pointing into the data files."""
    import onnx_ir as ir

    from toolchain.export.onnx_export import build_graph, trace_decoder
    from toolchain.model.positions import position_tables
    from toolchain.tensor_file import write_tensors

    entries = entries | write_tensors(folder / ROPE, position_tables(config))
    initializers = {name: external_initializer(name, e).const_value for name, e in entries.items()}
    traced = trace_decoder(config, compute_dtype)
    for phase in PHASES:
        model, contract = build_graph(traced, config, phase, initializers)
        found = tuple(v.name for v in (*model.graph.inputs, *model.graph.outputs))
        assert found == tuple(s.name for s in (*contract.inputs, *contract.outputs)), found
        data = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
        (folder / GRAPH_FILES[phase]).write_bytes(data)


def contract_tables(config: DecoderConfig, contract: Mapping[str, object]) -> str:
    """The GraphIO tables of the phases a user calls, as text; `contract` is the manifest's `kv_contract`."""
    caches = caches_of(contract, config.num_hidden_layers)
    return "\n\n".join(f"{p}\n{graph_io(config, p, caches).table()}" for p in ("prefill", "decode"))
