"""What a quantized artifact lost and where: `quantization.json` as a page."""

import math
from collections.abc import Iterator
from typing import Any

from toolchain.artifact import Artifact
from toolchain.model.config import DecoderConfig
from toolchain.model.parameters import parameter_shapes
from toolchain.report import Bars, Page, Table
from toolchain.tensor_file import read_header

LAYERS = "model.layers."
FLOAT = "in float"


def quantization_document(artifact: Artifact) -> dict[str, Any]:
    """The report of a quantized artifact as JSON types: `quantization.json` and what its files say.

    `bits_per_parameter`: all tensors of the weights file, scales included, over the model's parameters.
    """
    config = artifact.read("decoder.json", DecoderConfig)
    parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    stored = sum(entry.length for entry in read_header(artifact.file("weights.safetensors")).values())
    sections = ("weights", "activations", "overrides", "rotation", "smoothing", "kv_cache", "calibration")
    return {
        "recipe": {name: artifact.manifest.recipe[name] for name in sections},
        "parameters": parameters,
        "weight_bytes": stored,
        "bits_per_parameter": 8 * stored / parameters,
        **artifact.json("quantization.json"),
    }


def quantization_page(document: dict[str, Any]) -> Page:
    """The report with the matrices that lost most first, and the loss layer by layer."""
    rows = document["matrices"]
    seen = any(row["output_sqnr_db"] is not None for row in rows)
    key, what = ("output_sqnr_db", "outputs") if seen else ("weight_sqnr_db", "weights")
    ranked = sorted(rows, key=lambda row: math.inf if row[key] is None else row[key])
    table = Table(
        "matrices, the worst first",
        ("matrix", "bits", "scales", "weights dB", "outputs dB", "clipped %", "outliers"),
        tuple(_matrix_row(row) for row in ranked),
        note="SQNR: 10 log10 of signal over rounding noise; outputs: of the product on the calibration text. Outliers: "
        "the largest channel of the product's input over the median channel.",
    )
    worst: dict[str, float] = {}
    for row in rows:
        if row["matrix"].startswith(LAYERS) and row[key] is not None:
            layer = row["matrix"].split(".")[2]
            worst[layer] = min(worst.get(layer, math.inf), row[key])
    bars = Bars(f"worst matrix of each layer ({what})", "dB", tuple((f"layer {i}", db) for i, db in worst.items()))
    facts = tuple(_facts(document))
    return Page("what quantization lost", facts=facts, parts=(bars, table) if worst else (table,))


def _facts(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What was asked and found; parts of the recipe that are off have no line."""
    recipe, centered = document["recipe"], document["centered"]
    yield "weights", _weights(recipe["weights"], document["matrices"])
    yield "activations", _activations(recipe["activations"])
    if recipe["overrides"]:
        yield "overrides", "; ".join(f"{', '.join(o['match'])}: {_override(o)}" for o in recipe["overrides"])
    if centered:
        yield "means taken apart", f"of {len(centered)} products"
    rotated, smoothing = [name for name, on in recipe["rotation"].items() if on], _smoothing(recipe["smoothing"])
    if rotated:
        yield "rotation", ", ".join(rotated)
    if smoothing:
        yield "smoothing", smoothing
    yield "KV cache", _kv_cache(recipe["kv_cache"])
    yield "bits per parameter", f"{document['bits_per_parameter']:.2f}, scales included"
    yield "left in float", ", ".join(document["not_quantized"]) or "nothing"
    yield "calibration text", _coverage(document["calibration"])
    yield "warnings", "; ".join(document["warnings"]) or "none"
    if rotated or smoothing or recipe["activations"]["excess_channels"]:
        yield "bases and smoothing changed", f"{document['identity_error']:.1e} of a layer's output before rounding"


def _matrix_row(row: dict[str, Any]) -> tuple[Any, ...]:
    scales = f"{row['scale_min']:.0e}-{row['scale_max']:.0e}"
    losses = row["weight_sqnr_db"], row["output_sqnr_db"], 100 * row["clipped_share"]
    return (row["matrix"], row["bits"], scales, *losses, row["input_outlier_ratio"])


def _coverage(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none was needed"
    share = 100 * found["vocabulary_share"]
    return f"{found['samples']} x {found['seq_len']} tokens, {found['distinct_tokens']} distinct ({share:.1f} %)"


def _weights(section: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The settings in use in a line, with the group sizes that the matrices got."""
    if section["format"] == "none":
        return FLOAT
    settings = {"gptq": ("algorithm", "clip", "refinements"), "rtn": ("algorithm", "clip"), "stored": ("algorithm",)}
    granularity = () if section["granularity"] == "group" else ("granularity",)
    line = _settings(section, "format", *granularity, *settings[section["algorithm"]])
    groups = sorted({row["group_size"] for row in rows if row["group_size"]})
    return f"{line}, groups of {' and '.join(map(str, groups))}" if groups else line


def _activations(section: dict[str, Any]) -> str:
    if section["format"] == "none":
        return FLOAT
    return _settings(section, "format", "granularity", *(("excess_channels",) if section["excess_channels"] else ()))


def _smoothing(section: dict[str, Any]) -> str:
    """Empty where nothing is smoothed."""
    line = "" if section["algorithm"] == "none" else _settings(section, "algorithm", "alpha")
    return ", ".join(filter(None, (line, "keys" if section["keys"] else "")))


def _kv_cache(section: dict[str, Any]) -> str:
    if section["format"] == "none":
        return FLOAT
    static = ("scale", "percentile") if section["scale"] == "percentile" else ("scale",)
    line = _settings(section, "format", "granularity", *(() if section["granularity"] == "token" else static))
    skipped = ", ".join(section["skip"])
    return f"{line}; {FLOAT}: {skipped}" if skipped else line


def _settings(section: dict[str, Any], *keys: str) -> str:
    return ", ".join(f"{key} {section[key]}" for key in keys)


def _override(override: dict[str, Any]) -> str:
    settings = {**override["weights"]}, {**override["activations"]}
    parts = (("weights", settings[0]), ("activations", settings[1]))
    return ", ".join(f"{name} {key} {value}" for name, part in parts for key, value in part.items())
