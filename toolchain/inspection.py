"""`dtool inspect`: what a checkpoint or an artifact is, and what it will cost, before or after any work.

No torch: a config and the headers of the weights are read, so that the answer takes no second.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolchain.artifact import MANIFEST, Artifact, open_artifact
from toolchain.errors import DtoolError
from toolchain.graph_io import graph_io
from toolchain.model.accounting import WEIGHT_FORMATS, make_setting, stored_bytes
from toolchain.model.caches import CacheFormat, caches_of
from toolchain.model.config import DecoderConfig
from toolchain.model.roofline import account, gpus_named
from toolchain.report import Bars, Load, Page, Part, Roof, Roofline, Table, si_text
from toolchain.tensor_file import TensorEntry, read_header

UNITS = {"billion": 10**9, "million": 10**6, "thousand": 10**3}
CODES_PER_BYTE = 2
"""int4 codes lie two to a byte."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the account is asked for; None: the default of `make_setting`, and an artifact's own formats."""

    gpus: tuple[str, ...] = ()
    context: int | None = None
    batch: int = 1
    weights: str | None = None
    cache: str | None = None

    def answer(
        self,
        config: DecoderConfig,
        weights: str | None = None,
        caches: Sequence[CacheFormat] = (),
        stored: Mapping[str, TensorEntry] | None = None,
    ) -> dict[str, Any]:
        """The account of a model, whose own formats and stored tensors stand in for a format not asked for."""
        lengths = {name: entry.length for name, entry in (stored or {}).items()}
        setting = make_setting(
            config,
            self.context,
            self.batch,
            self.weights or weights,
            self.cache,
            layer_caches=caches,
            stored=stored_bytes(lengths) if lengths and not self.weights else None,
        )
        return account(config, setting, gpus_named(self.gpus))


def inspect_path(path: Path, question: Question | None = None) -> tuple[dict[str, Any], Page]:
    """The description of a checkpoint folder or an artifact, as JSON types and as a page."""
    question = question or Question()
    gpus_named(question.gpus)  # a wrong name is told before anything is read
    if (path / MANIFEST).is_file():
        return _inspect_artifact(open_artifact(path, check_hashes=False), question)
    return _inspect_checkpoint(path, question)


def _inspect_checkpoint(path: Path, question: Question) -> tuple[dict[str, Any], Page]:
    config, stored, notes = _open_model(path, question.context)
    costs, sizes = question.answer(config), _sizes(stored)
    document = {
        "kind": "checkpoint",
        "config": config.model_dump(mode="json"),
        "parameters": costs["parameters"]["total"],
        "bytes_by_format": sizes,
        "kv_bytes_per_token": costs["kv_cache_bytes_per_token"],
        "accounting": costs,
        "notes": list(notes),
    }
    facts = (*cost_facts(costs), *(("note", note) for note in notes))
    parts = (*cost_parts(costs), *((_size_table(sizes),) if sizes else ()), _config_table(config))
    return document, Page(str(path), facts=facts, parts=parts)


def _open_model(path: Path, context: int | None) -> tuple[DecoderConfig, dict[str, TensorEntry], tuple[str, ...]]:
    """As `_open_any`; a context beyond the model's is refused in the words of this command."""
    try:
        return _open_any(path, context)
    except DtoolError as error:
        if context is None or not error.problem.startswith("context_len"):
            raise
        raise DtoolError(
            f"--context {context} is more than the model has positions",
            expected=error.expected,
            found=str(context),
            fix="give a smaller --context",
        ) from error


def _open_any(path: Path, context: int | None) -> tuple[DecoderConfig, dict[str, TensorEntry], tuple[str, ...]]:
    """A folder's config, stored tensors and notes; a folder with a config alone will do."""
    from toolchain.model.checkpoint import NoWeights, open_checkpoint
    from toolchain.model.foreign.coded import part_entries

    try:
        checkpoint = open_checkpoint(path)
    except NoWeights as error:
        config, notes = _read_config(path, context)
        return config, {}, (f"{error.problem}: the account is of the config alone", *notes)
    if context is not None and context > checkpoint.config.context_len:
        checkpoint = open_checkpoint(path, context)  # rotations that depend on the length serve more where asked
    parameters = checkpoint.parameters.items()
    pieces = [(name, entry) for name, p in parameters for part in p.parts for entry in part_entries(part)]
    stored = {f"{name}.{i}": entry for i, (name, entry) in enumerate(pieces)}
    return checkpoint.config, stored, checkpoint.notes


def _read_config(path: Path, context: int | None) -> tuple[DecoderConfig, tuple[str, ...]]:
    """The config of a folder whose weights are not read, and notes."""
    from toolchain.model.checkpoint import read_quantized_config
    from toolchain.model.hf import config_from_hf

    notes: list[str] = []
    document, _ = read_quantized_config(path, notes)
    if not document.get("dtype") and not document.get("torch_dtype"):
        document["dtype"] = "float32"  # else it is told by the weights
    config = config_from_hf(document, {})
    if context is not None and context > config.context_len:
        config = config_from_hf(document, {}, context_len=context)
    return config, tuple(notes)


def _inspect_artifact(artifact: Artifact, question: Question) -> tuple[dict[str, Any], Page]:
    manifest = artifact.manifest
    config = artifact.read("decoder.json", DecoderConfig)
    weights = artifact.path / "weights.safetensors"
    stored = read_header(weights) if weights.is_file() else {}
    sizes, stored_format = _sizes(stored), _weight_format(stored)
    document: dict[str, Any] = manifest.model_dump() | {
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
    parts: tuple[Part, ...] = (_size_table(sizes),)
    caches = caches_of(manifest.kv_contract, config.num_hidden_layers)
    if question.weights or stored_format:  # engines hold their weights inside: their format must be asked for
        costs = document["accounting"] = question.answer(config, stored_format, caches, stored)
        facts, parts = (*facts, *cost_facts(costs)), (*parts, *cost_parts(costs))
    else:
        facts = (*facts, ("account", "none: the weights lie inside the engine; ask with --weights FORMAT"))
    lineage = Table("made from", ("input", "sha256"), tuple(manifest.lineage.items()))
    files = Table(
        "files", ("file", "bytes", "sha256"), tuple((n, e.bytes, e.sha256[:16]) for n, e in manifest.files.items())
    )
    contracts = tuple(_contract_table(config, phase, caches) for phase in ("prefill", "decode"))
    return document, Page(str(artifact.path), facts=facts, parts=(*parts, *contracts, lineage, files))


def _weight_format(stored: Mapping[str, TensorEntry]) -> str | None:
    """The accounting's name of the format of a layer's matrices, told by the first; None if it has none."""
    name = next((name for name in stored if name.endswith(".qkv_proj.weight")), None)
    if name is None:
        return None
    codes, scale = stored[name], stored.get(f"{name}_scale")
    found = codes.dtype
    if found == "uint8" and scale is not None:
        found = f"int4_g{CODES_PER_BYTE * codes.shape[1] // scale.shape[1]}"
    return found if found in WEIGHT_FORMATS else None


def cost_facts(costs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The account in a few lines."""
    setting, total = costs["setting"], costs["parameters"]["total"]
    active = costs["active_parameters_per_token"]["total"]
    weights, cache, context = setting["weights"], setting["cache"], setting["context_tokens"]
    served = f"{setting['batch']} x {context:,} tokens"
    return (
        ("parameters", f"{total:,}" + (f", of which a token uses {active:,}" if active != total else "")),
        ("weights", f"{si_text(costs['served_weights_bytes'])}B in {weights}"),
        ("KV cache per token", f"{costs['kv_cache_bytes_per_token'][cache]:,} bytes in {cache}"),
        ("KV cache", f"{si_text(costs['kv_cache_bytes'])}B for {served}"),
        ("prefill", f"{served}: {_work_text(costs['prefill'])}"),
        ("decode", f"{setting['batch']} x token {context:,}: {_work_text(costs['decode'])}"),
        ("training memory", f"{si_text(costs['training_memory_bytes'])}B: 16 bytes a parameter, activations apart"),
    )


def _work_text(work: Mapping[str, Any]) -> str:
    flops, moved, intensity = si_text(work["flops"]), si_text(work["bytes"]), si_text(work["intensity_flops_per_byte"])
    return f"{flops}FLOP, {moved}B moved, {intensity}FLOP/byte"


def cost_parts(costs: Mapping[str, Any]) -> tuple[Part, ...]:
    """The account in tables and pictures."""
    setting = costs["setting"]
    return (
        *_component_parts(costs),
        _format_table(costs),
        _gpu_table(costs, f"{setting['batch']} x {setting['context_tokens']:,} tokens on one GPU"),
        _roofline(costs),
        _figure_table(costs),
    )


def _component_parts(costs: Mapping[str, Any]) -> tuple[Part, ...]:
    """Parameters per component: bars, and the exact numbers."""
    counts, total = costs["parameters"]["components"], costs["parameters"]["total"]
    active = costs["active_parameters_per_token"]
    shown = {name: count for name, count in counts.items() if count}
    unit, scale = next(((name, size) for name, size in UNITS.items() if total >= size), ("parameters", 1))
    bars = tuple((name.replace("_", " "), count / scale) for name, count in shown.items())
    rows = tuple(
        (name.replace("_", " "), count, 100 * count / total, active["components"][name])
        for name, count in shown.items()
    )
    tied = "the head is tied: one matrix, counted as the embedding" if not counts["head"] else ""
    columns = ("component", "parameters", "% of all", "used by a token")
    table = Table("parameters", columns, (*rows, ("total", total, 100.0, active["total"])), note=tied)
    return Bars("parameters by component", unit, bars), table


def _format_table(costs: Mapping[str, Any]) -> Table:
    """Bytes per format: weights, and the cache of a token and of the setting."""
    tokens = costs["setting"]["context_tokens"] * costs["setting"]["batch"]
    caches = costs["kv_cache_bytes_per_token"]
    rows = tuple(
        (name, costs["weights_bytes"].get(name), caches.get(name), caches[name] * tokens if name in caches else None)
        for name in dict.fromkeys([*caches, *costs["weights_bytes"]])
    )
    columns = ("format", "weights bytes", "KV bytes per token", "KV bytes of the setting")
    note = "codes and float32 scales for the layers' matrices; embedding, head, router, norms and biases in float16"
    return Table("bytes by format", columns, rows, note=f"int8, fp8 and int4: {note}")


def _gpu_table(costs: Mapping[str, Any], title: str) -> Table:
    """What fits on each GPU, the least times, and what bounds them."""
    columns = ("GPU", "memory GB", "largest batch", "TTFT ms", "bound by", "TPOT ms", "bound by", "tokens/s")
    rows: list[tuple[Any, ...]] = []
    for gpu in costs["gpus"]:
        prefill, decode = gpu["prefill"], gpu["decode"]
        times = (prefill["ttft_ms"], prefill["bound"], decode["tpot_ms"], decode["bound"], decode["tokens_per_s"])
        if not gpu["fits"]:
            times = (None, f"{'batch does' if gpu['weights_fit'] else 'weights do'} not fit", None, "", None)
        rows.append((gpu["name"], gpu["memory_bytes"] / 1e9, gpu["largest_batch"], *times))
    return Table(title, columns, tuple(rows), note="; ".join(costs["notes"]))


def _roofline(costs: Mapping[str, Any]) -> Roofline:
    """Every GPU's roof, and under it prefill and decode at several batch sizes, where they fit."""
    setting, gpus = costs["setting"], costs["gpus"]
    roofs = tuple(Roof(gpu["name"], gpu["peak_flops_per_s"], gpu["bandwidth_bytes_per_s"]) for gpu in gpus)

    batch = setting["batch"]
    measured = [("prefill", batch, costs["prefill"], [gpu | gpu["prefill"] for gpu in gpus])]
    for i, work in enumerate(costs["decode_by_batch"]):
        entries = [gpu["decode_by_batch"][i] for gpu in gpus]
        if work["batch"] == batch or any(entry["fits"] for entry in entries):
            measured.append(("decode", work["batch"], work, entries))
    loads = tuple(
        Load(
            f"{phase} x {size}",
            phase,
            work["intensity_flops_per_byte"],
            tuple(entry["attained_flops_per_s"] if entry["fits"] else None for entry in entries),
        )
        for phase, size, work, entries in measured
    )
    title = f"roofline: {setting['context_tokens']:,} tokens, weights {setting['weights']}, cache {setting['cache']}"
    note = (
        "left of the bend of its roof a step is bound by memory, right of it by compute; "
        "no point: the weights or the batch do not fit there; below a roof: part of the FLOPs run in float16"
    )
    return Roofline(title, roofs, loads, note=note)


def _figure_table(costs: Mapping[str, Any]) -> Table:
    """The vendors' figures, and the documents they are from."""
    columns = ("GPU", "sm", "float16", "int8", "fp8", "GB", "GB/s", "source")
    rows: list[tuple[Any, ...]] = []
    for gpu in costs["gpus"]:
        rates = [gpu.get(f"{name}_flops_per_s") for name in ("float16", "int8", "fp8_e4m3")]
        documents = dict.fromkeys(text.split(":")[0] for name, text in gpu["sources"].items() if name != "sm")
        limits = (gpu["memory_bytes"] / 1e9, gpu["bandwidth_bytes_per_s"] / 1e9, "; ".join(documents))
        rows.append((gpu["name"], gpu["sm"], *(None if r is None else r / 1e12 for r in rates), *limits))
    note = "dense TFLOP/s or TOP/s of the tensor cores; the figure of each is in --json"
    return Table("GPUs", columns, tuple(rows), note=note)


def _sizes(entries: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Bytes per storage format."""
    sizes: Counter[str] = Counter()
    for entry in entries.values():
        sizes[entry.dtype] += entry.length
    return dict(sorted(sizes.items()))


def _size_table(sizes: dict[str, int]) -> Table:
    return Table("stored weights", ("format", "MB"), tuple((n, round(b / 1e6, 2)) for n, b in sizes.items()))


def _config_table(config: DecoderConfig) -> Table:
    """What the config says beyond the defaults, layers that are alike as one."""
    fields = config.model_dump(exclude_defaults=True)
    kinds = Counter(config.layers)
    if kinds:
        fields["layers"] = "; ".join(f"{n} with {layer.model_dump()}" for layer, n in kinds.items())
    rows = tuple((name, str(value)) for name, value in fields.items())
    return Table("decoder", ("field", "value"), rows, note="fields at their defaults are left out")


def _contract_table(config: DecoderConfig, phase: Any, caches: Sequence[CacheFormat]) -> Table:
    """The contract of one phase, the first layer with each kind of cache standing for all of them."""
    contract = graph_io(config, phase, caches)
    layers = {str(caches.index(cache)) for cache in caches}
    shown = [*(("in", s) for s in contract.inputs), *(("out", s) for s in contract.outputs)]
    rows = tuple(
        (way, s.name, s.dtype, "[" + ", ".join(map(str, s.shape)) + "]")
        for way, s in shown
        if not s.name.startswith(("past_key_values.", "present.")) or s.name.split(".")[1] in layers
    )
    note = f"and so on for {config.num_hidden_layers} layers"
    return Table(f"{phase}.onnx", ("", "name", "dtype", "shape"), rows, note=note)
