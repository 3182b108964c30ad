"""What the quantizer saw of each matrix: the rows of the report, and what of them should worry a person.

outlier ratio   largest |x| of all channels over the median channel's largest, of a product's input
at the floor    scales that would be smaller than the type that holds them has: what they scale is rounded to zero
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from toolchain.formats import format_named
from toolchain.numerics import CODE_RANGE, smallest_scale
from toolchain.quantize.gptq import DAMPING
from toolchain.recipe_sections import Activations, Weights
from toolchain.report import significant

if TYPE_CHECKING:
    from toolchain.quantize.rounding import RoundedMatrix
    from toolchain.quantize.seen import Seen

FEW_TOKENS = 100
WORRYING_RATIO = 100.0
"""A static scale of 127 steps leaves the median channel of such an input about one step."""


def describe_matrix(
    module: str,
    weights: Weights,
    group_size: int | None,
    value_OI: torch.Tensor,
    rounded: "RoundedMatrix",
    seen: "Seen | None",
    held_in: torch.dtype,
) -> dict[str, Any]:
    """One row of the report: format, scales, losses in dB, and what the product's input was like.

    Measured numbers have the digits that mean something (`report.significant`).
    """
    floor = rounded.scale <= smallest_scale(held_in)
    blank = (value_OI.unflatten(-1, (-1, group_size)) if group_size else value_OI).abs().amax(-1) == 0
    typical = None if seen is None else float(seen.amax.median())
    row = {
        "matrix": module,
        "format": weights.format,
        "group_size": group_size,
        "bits": {"int4": 4}.get(weights.format, 8) + 32 * rounded.scale.numel() / value_OI.numel(),
        "scale_min": float(rounded.scale.min()),
        "scale_max": float(rounded.scale.max()),
        "scales_of_zeros": int((floor & blank).sum()),
        "scales_at_floor": int((floor & ~blank).sum()),
        "weight_sqnr_db": rounded.weight_sqnr_db,
        "output_sqnr_db": rounded.output_sqnr_db,
        "clipped_share": rounded.clipped_share,
        "damping": rounded.damping,
        "input_amax": None if seen is None else float(seen.amax.max()),
        "input_outlier_ratio": float(seen.amax.max()) / typical if seen is not None and typical else None,
        "input_dead": None if seen is None else bool(seen.tokens and not float(seen.amax.max())),
    }
    return {key: significant(value) if isinstance(value, float) else value for key, value in row.items()}


def warnings(rows: Iterable[Mapping[str, Any]], rounded: Mapping[str, Activations], held_in: str) -> list[str]:
    """What a person should know, each with the matrix and the way out."""
    found, least = [], smallest_scale(format_named(held_in).torch_dtype)
    for row in rows:
        name, activations = row["matrix"], rounded.get(row["matrix"])
        if row["scales_of_zeros"]:
            found.append(f"{name}: {row['scales_of_zeros']} scales are of zeros only; they stay zero")
        if row["scales_at_floor"]:
            count = row["scales_at_floor"]
            found.append(
                f"{name}: {count} scales are below what {held_in} holds, and what they scale becomes zero; "
                "export with compute_dtype float32 or bfloat16"
            )
        if (row["damping"] or 0.0) > DAMPING:
            found.append(
                f"{name}: GPTQ could factor its second moments only with {row['damping']:g} times their mean diagonal "
                f"added, not {DAMPING:g}: more calibration text, or another kind, makes them regular"
            )
        if row["input_dead"]:
            found.append(f"{name}: its input was zero on all of the calibration text; its scale is a default")
        reach = row["input_amax"] or 0.0
        if activations is not None and activations.is_static and 0 < reach / CODE_RANGE[activations.format][1] < least:
            found.append(
                f"{name}: its input reaches {reach:.2g} at most, whose scale is below what {held_in} holds, and much "
                "of it becomes zero; export with compute_dtype float32 or bfloat16, or name it in activations.skip"
            )
        ratio = row["input_outlier_ratio"] or 0.0
        if activations is not None and activations.is_static and ratio > WORRYING_RATIO:
            found.append(
                f"{name}: one channel of its input reaches {ratio:.0f} times the median channel, which one static "
                "scale wipes out; activations.excess_channels = 8, granularity token or activations.skip spares it"
            )
    return found


def text_warnings(text: Mapping[str, Any] | None) -> list[str]:
    """What of the calibration text should worry a person; `text`: see `coverage`."""
    if text is None or text["distinct_tokens"] >= min(FEW_TOKENS, text["tokens"] // 8):
        return []
    count = text["distinct_tokens"]
    return [f"the calibration text has only {count} distinct tokens: give one like what the model will read"]


def worst_rows(rows: list[dict[str, Any]], count: int = 3) -> list[str]:
    """The matrices that lost most, as lines: by their outputs where those were seen, else by their weights."""
    key = "output_sqnr_db" if any(row["output_sqnr_db"] is not None for row in rows) else "weight_sqnr_db"
    ranked = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key])
    what = "of its output" if key.startswith("output") else "of its weights"
    return [f"  {row['matrix']}: {row[key]:.1f} dB {what}" for row in ranked[:count]]


def coverage(blocks: Any, vocab_size: int) -> dict[str, Any] | None:
    """What the calibration text was: blocks, tokens, and how much of the vocabulary it names."""
    if blocks is None:
        return None
    distinct = len(torch.from_numpy(blocks).unique())
    samples, seq_len = blocks.shape
    return {
        "samples": samples,
        "seq_len": seq_len,
        "tokens": samples * seq_len,
        "distinct_tokens": distinct,
        "vocabulary_share": significant(distinct / vocab_size),
    }
