"""GPTQ: round a matrix column by column, each column's error made good by those not yet rounded.

    minimise  tr((W - Q) H (W - Q)^T),   H = sum over tokens of x x^T
    column j:  e = (w_j - q_j) / U_jj,   w_k -= e U_jk for k > j,   U = upper Cholesky factor of H^-1

Columns go in blocks, so that most of the work is one product per block, and from the most to the
least used input (act-order). The scales are chosen before, for groups of columns in their own order, so
the order of rounding leaves no trace in what is stored. Scales come from a search over clipped ranges
that weighs the error of a group by its part of H (`search_scale`), which here matters more than the
rest: with scales from the largest weight alone, GPTQ is hardly better than rounding.

A Hessian of few tokens is singular: a share of its mean diagonal is added (damping), ten times more
whenever the factorization fails. Inputs that are always zero take no part.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1 and section 3.3; OBQ, arXiv 2208.11580.

Legend: O outputs, I inputs, G groups, g inputs of a group, c columns of a block.
"""

import torch

from toolchain.errors import DtoolError
from toolchain.numerics import dequantize, quantize, scale_from_amax

BLOCK = 128
DAMPING, MOST_DAMPING = 0.01, 10.0
"""Share of the mean diagonal that is added to all of it: at first, and when nothing more helps."""
CLIPS = tuple(1.0 - 0.025 * step for step in range(21))
"""Shares of the largest weight that a scale is tried for."""


def search_scale(
    weight_OI: torch.Tensor,
    fmt: str,
    group_size: int,
    *,
    hessian_II: torch.Tensor | None = None,
    held_in: torch.dtype = torch.float32,
) -> torch.Tensor:
    """float32 scales [O, G] of least error d H_gg d^T per channel and group, H the identity when not given.

    For groups larger than BLOCK the diagonal of H stands for all of it: the whole costs I^2 per row and step.
    """
    groups_OGg = weight_OI.float().unflatten(-1, (-1, group_size))
    amax_OG = groups_OGg.abs().amax(-1)
    parts_Ggg = None if hessian_II is None or group_size > BLOCK else _diagonal_blocks(hessian_II, group_size)
    size_Gg = 1.0 if hessian_II is None else hessian_II.diagonal().unflatten(0, (-1, group_size))
    best_OG = torch.full_like(amax_OG, float("inf"))
    found_OG = scale_from_amax(amax_OG, fmt, held_in=held_in)
    for clip in CLIPS:
        scale_OG = scale_from_amax(amax_OG * clip, fmt, held_in=held_in)
        shown = dequantize(quantize(groups_OGg, scale_OG[..., None], fmt), scale_OG[..., None])
        error_OGg = shown - groups_OGg
        weighed = error_OGg * size_Gg if parts_Ggg is None else torch.einsum("ogi,gij->ogj", error_OGg, parts_Ggg)
        cost_OG = (weighed * error_OGg).sum(-1)
        better = cost_OG < best_OG
        best_OG = torch.where(better, cost_OG, best_OG)
        found_OG = torch.where(better, scale_OG, found_OG)
    return found_OG


def _diagonal_blocks(hessian_II: torch.Tensor, size: int) -> torch.Tensor:
    count = hessian_II.shape[0] // size
    return torch.stack([hessian_II[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])


def round_with_hessian(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor, scale_OG: torch.Tensor, fmt: str
) -> torch.Tensor:
    """The matrix [O, I] that codes with these scales stand for, rounded so that the outputs err least.

    Raises DtoolError when the Hessian cannot be factored.
    """
    weight = weight_OI.float().clone()
    group_size = weight.shape[1] // scale_OG.shape[1]
    scale_OI = scale_OG.repeat_interleave(group_size, dim=1)
    order = torch.argsort(hessian_II.diagonal(), descending=True)
    weight, scale_OI = weight[:, order], scale_OI[:, order]
    upper_II = _inverse_factor(hessian_II[order][:, order])
    rounded = torch.empty_like(weight)
    for start in range(0, weight.shape[1], BLOCK):
        stop = min(start + BLOCK, weight.shape[1])
        errors_Oc = torch.empty_like(weight[:, start:stop])
        block_Oc, upper_cc = weight[:, start:stop], upper_II[start:stop, start:stop]
        for j in range(stop - start):
            scale_O = scale_OI[:, start + j]
            shown_O = dequantize(quantize(block_Oc[:, j], scale_O, fmt), scale_O)
            rounded[:, start + j] = shown_O
            error_O = (block_Oc[:, j] - shown_O) / upper_cc[j, j]
            errors_Oc[:, j] = error_O
            block_Oc[:, j + 1 :] -= error_O[:, None] * upper_cc[j, j + 1 :]
        weight[:, stop:] -= errors_Oc @ upper_II[start:stop, stop:]
    return rounded[:, torch.argsort(order)]


def _inverse_factor(hessian_II: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped H."""
    if not bool(torch.isfinite(hessian_II).all()):
        raise DtoolError("the calibration's second moments are not finite", fix="check the weights for inf or NaN")
    mean, damping = float(hessian_II.diagonal().mean()), DAMPING
    if mean == 0:
        return torch.eye(hessian_II.shape[0])
    while damping <= MOST_DAMPING:
        damped_II = hessian_II.double() + torch.eye(hessian_II.shape[0], dtype=torch.float64) * damping * mean
        lower_II, fault = torch.linalg.cholesky_ex(damped_II)
        upper_II, fault_above = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
        if not int(fault) and not int(fault_above):
            return upper_II.float()
        damping *= 10
    raise DtoolError(
        "the calibration's second moments cannot be factored",
        expected="a positive definite matrix, with damping",
        found=f"none with {MOST_DAMPING:g} times the mean of the diagonal added",
        fix="use more calibration text, or weights.algorithm rtn",
    )
