"""`dtool inspect`: what a checkpoint or an artifact is, before or after any work."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from toolchain.artifact import MANIFEST, Artifact, open_artifact
from toolchain.formats import FORMATS
from toolchain.graph_io import graph_io
from toolchain.model.config import DecoderConfig
from toolchain.model.hf import Checkpoint, open_checkpoint
from toolchain.report import Page, Table
from toolchain.tensor_file import TensorEntry, read_header


def inspect_path(path: Path) -> tuple[dict[str, Any], Page]:
    """The description of a checkpoint folder or an artifact, as JSON types and as a page."""
    if (path / MANIFEST).is_file():
        return _inspect_artifact(open_artifact(path, check_hashes=False))
    return _inspect_checkpoint(open_checkpoint(path))


def _inspect_checkpoint(checkpoint: Checkpoint) -> tuple[dict[str, Any], Page]:
    config, sizes = checkpoint.config, _sizes(_stored_tensors(checkpoint))
    document = {
        "kind": "checkpoint",
        "config": config.model_dump(mode="json"),
        "parameters": sum(math.prod(e.shape) for e in checkpoint.parameters.values()),
        "bytes_by_format": sizes,
        "kv_bytes_per_token": _kv_bytes(config),
        "notes": list(checkpoint.notes),
    }
    facts = (
        ("parameters", f"{document['parameters']:,}"),
        ("KV cache per token", f"{_kv_bytes(config)['float16']:,} bytes in float16"),
        *((("note", note)) for note in checkpoint.notes),
    )
    return document, Page(str(checkpoint.path), facts=facts, parts=(_size_table(sizes), _config_table(config)))


def _stored_tensors(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    parameters = checkpoint.parameters.items()
    return {f"{name}.{i}": entry for name, p in parameters for i, entry in enumerate(p.parts)}


def _inspect_artifact(artifact: Artifact) -> tuple[dict[str, Any], Page]:
    manifest = artifact.manifest
    config = DecoderConfig.model_validate(artifact.json("decoder.json"))
    weights = artifact.path / "weights.safetensors"
    sizes = _sizes(read_header(weights)) if weights.is_file() else {}
    document = manifest.model_dump() | {
        "kind": "artifact",
        "identity": artifact.identity,
        "bytes_by_format": sizes,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
    }
    facts = (
        ("stage", manifest.stage),
        ("identity", artifact.identity[:16]),
        ("size", f"{document['bytes'] / 1e6:.1f} MB"),
        ("cache", ", ".join(f"{k} {v}" for k, v in manifest.kv_contract.items())),
        *((k, str(v)) for k, v in manifest.target.items()),
    )
    lineage = Table("made from", ("input", "sha256"), tuple(manifest.lineage.items()))
    files = Table(
        "files", ("file", "bytes", "sha256"), tuple((n, e.bytes, e.sha256[:16]) for n, e in manifest.files.items())
    )
    contracts = tuple(_contract_table(config, phase, manifest.kv_contract["dtype"]) for phase in ("prefill", "decode"))
    return document, Page(str(artifact.path), facts=facts, parts=(_size_table(sizes), *contracts, lineage, files))


def _sizes(entries: dict[str, TensorEntry]) -> dict[str, int]:
    """Bytes per storage format."""
    sizes: Counter[str] = Counter()
    for entry in entries.values():
        sizes[entry.dtype] += entry.length
    return dict(sorted(sizes.items()))


def _kv_bytes(config: DecoderConfig) -> dict[str, int]:
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {name: elements * FORMATS[name].bytes for name in ("float32", "float16", "int8")}


def _size_table(sizes: dict[str, int]) -> Table:
    return Table("weights by format", ("format", "MB"), tuple((n, round(b / 1e6, 2)) for n, b in sizes.items()))


def _config_table(config: DecoderConfig) -> Table:
    return Table("decoder", ("field", "value"), tuple((k, str(v)) for k, v in config.model_dump().items()))


def _contract_table(config: DecoderConfig, phase: Any, cache_dtype: str) -> Table:
    """The contract of one phase, the caches of the first layer standing for all."""
    contract = graph_io(config, phase, cache_dtype)
    shown = [*(("in", s) for s in contract.inputs), *(("out", s) for s in contract.outputs)]
    rows = tuple(
        (way, s.name, s.dtype, "[" + ", ".join(map(str, s.shape)) + "]")
        for way, s in shown
        if not s.name.startswith(("past_key_values.", "present.")) or s.name.split(".")[1] == "0"
    )
    note = f"and so on for {config.num_hidden_layers} layers"
    return Table(f"{phase}.onnx", ("", "name", "dtype", "shape"), rows, note=note)
