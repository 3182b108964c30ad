"""From a float matrix to codes: scales chosen, values rounded, and what that cost.

    SQNR = 10 log10 (sum w^2 / sum (w - q)^2)                      of the weights, in dB
    output SQNR = 10 log10 (tr W H W^T / tr (W - Q) H (W - Q)^T)   of the product on the calibration text

Legend: O outputs, I inputs, G groups, g inputs of a group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolchain.numerics import CODE_RANGE, dequantize, pack_int4, quantize, scale_from_amax
from toolchain.quantize.gptq import refine, round_with_hessian, search_scale
from toolchain.quantize.pieces import squared_length
from toolchain.recipe_sections import Weights


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """Codes and scales as they are stored, the float32 matrix [O, I] they stand for, and the row of the report.

    `damping`: the share of its mean diagonal that GPTQ added to H; None without GPTQ.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    shown: torch.Tensor
    weight_sqnr_db: float
    output_sqnr_db: float | None
    clipped_share: float
    damping: float | None = None


def round_matrix(
    weight_OI: torch.Tensor,
    weights: Weights,
    *,
    parts: Sequence[int] | None = None,
    group_size: int = 0,
    held_in: torch.dtype = torch.float32,
    hessian_II: torch.Tensor | None = None,
) -> RoundedMatrix:
    """A matrix in the recipe's format.

    int8 and fp8_e4m3: codes [O, I], scales [O] (granularity `tensor`: equal within each of `parts` rows).
    int4: packed uint8 [O, I / 2], scales [O, I / group_size]. Scales are float32 numbers that `held_in` has.
    Without a Hessian (a matrix whose inputs were not seen) values are rounded to the nearest. Raises ValueError
    when the weight holds inf or NaN.
    """
    weight_OI, fmt = weight_OI.float(), weights.format
    width = group_size or weight_OI.shape[1]
    scale_OG, damping = _scales(weight_OI, weights, parts, width, held_in, hessian_II), None
    if weights.algorithm == "gptq" and hessian_II is not None:
        shown_OI, damping = round_with_hessian(weight_OI, hessian_II, scale_OG, fmt)
        if weights.refinements and weights.granularity != "tensor":
            rounds = weights.refinements
            shown_OI, scale_OG = refine(weight_OI, shown_OI, hessian_II, scale_OG, fmt, rounds=rounds, held_in=held_in)
        blank_OG = weight_OI.unflatten(-1, (-1, width)).abs().amax(-1) == 0
        shown_OI = shown_OI.masked_fill(blank_OG.repeat_interleave(width, dim=1), 0)  # zeros make nothing good
    else:
        shown_OI = weight_OI
    codes_OGg = quantize(shown_OI.unflatten(-1, (-1, width)), scale_OG[..., None], fmt)
    shown_OI = dequantize(codes_OGg, scale_OG[..., None]).flatten(1)
    reach_OG1 = (scale_OG * CODE_RANGE[fmt][1])[..., None]
    clipped = int((weight_OI.unflatten(-1, (-1, width)).abs() > reach_OG1 * (1 + 1e-5)).sum())
    codes = pack_int4(codes_OGg.flatten(1)) if fmt == "int4" else codes_OGg.flatten(1)
    return RoundedMatrix(
        codes=codes,
        scale=scale_OG if group_size else scale_OG[:, 0],
        shown=shown_OI,
        weight_sqnr_db=sqnr_db(weight_OI, shown_OI),
        output_sqnr_db=None if hessian_II is None else sqnr_db(weight_OI, shown_OI, hessian_II),
        clipped_share=clipped / weight_OI.numel(),
        damping=damping,
    )


def _scales(
    weight_OI: torch.Tensor,
    weights: Weights,
    parts: Sequence[int] | None,
    width: int,
    held_in: torch.dtype,
    hessian_II: torch.Tensor | None,
) -> torch.Tensor:
    """float32 scales [O, G]: of the largest weight, or searched."""
    amax_OG = weight_OI.unflatten(-1, (-1, width)).abs().amax(-1)
    if weights.granularity == "tensor":
        whole = [part.max().expand_as(part) for part in amax_OG.split(list(parts or amax_OG.shape[:1]))]
        return scale_from_amax(torch.cat(whole), weights.format, held_in=held_in)
    smallest = scale_from_amax(amax_OG, weights.format, held_in=held_in)
    if weights.clip == "amax":
        return smallest
    return search_scale(weight_OI, weights.format, width, hessian_II=hessian_II, held_in=held_in)


def sqnr_db(weight_OI: torch.Tensor, shown_OI: torch.Tensor, hessian_II: torch.Tensor | None = None) -> float:
    """The SQNR of the weights, or with H of the outputs; at most 200 dB, which stands for no error at all."""
    power, loss = squared_length(weight_OI, hessian_II), squared_length(weight_OI - shown_OI, hessian_II)
    return 200.0 if loss <= 0 or power <= 0 else min(10 * math.log10(power / loss), 200.0)
