"""GPTQ: round a matrix column by column, each column's error made good by those not yet rounded.

    minimise  tr((W - Q) H (W - Q)^T),   H = sum over tokens of x x^T
    column j:  e = (w_j - q_j) / U_jj,   w_k -= e U_jk for k > j,   U = upper Cholesky factor of H^-1

Columns go in blocks, so that most of the work is one product per block, and from the most to the
least used input (act-order). Scales belong to groups of columns in their own order, so the order of rounding
leaves no trace in what is stored. Scales come from a search over clipped ranges
that weighs the error of a group by its part of H (`search_scale`), which here matters more than the
rest: with scales from the largest weight alone, GPTQ is hardly better than rounding.

Rounds of `refine` follow: with the codes fixed the best scales are a small linear system, with the scales fixed
codes descend one column at a time (Behdin et al., QuantEase, arXiv 2309.01885), which both lower the same error.

A Hessian of few tokens is singular: a share of its mean diagonal is added (damping), ten times more
whenever the factorization fails. Inputs that are always zero take no part.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1 and section 3.3; OBQ, arXiv 2208.11580.

Legend: O outputs, I inputs, G groups, g inputs of a group, c columns of a block.
"""

import torch

from toolchain.errors import DtoolError
from toolchain.numerics import dequantize, quantize, scale_from_amax

BLOCK = 64
"""Columns rounded before the rest of the matrix hears of it."""
DAMPING, MOST_DAMPING = 0.01, 10.0
"""Share of the mean diagonal that is added to all of it: at first, and when nothing more helps."""
FULL_GROUP = 128
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

    For groups larger than FULL_GROUP the diagonal of H stands for all of it: the whole costs I^2 per row and step.
    """
    groups_OGg = weight_OI.float().unflatten(-1, (-1, group_size))
    amax_OG = groups_OGg.abs().amax(-1)
    parts_Ggg = None if hessian_II is None or group_size > FULL_GROUP else _diagonal_blocks(hessian_II, group_size)
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
    order = torch.argsort(hessian_II.diagonal(), descending=True)
    weight_IO = weight_OI.float().mT[order]  # a column of the matrix lies in one piece
    scale_IO = _by_column(scale_OG, len(weight_IO))[order]
    upper_II = _inverse_factor(hessian_II[order][:, order])
    rounded_IO = torch.empty_like(weight_IO)
    for start in range(0, len(weight_IO), BLOCK):
        stop = min(start + BLOCK, len(weight_IO))
        block_cO, upper_cc = weight_IO[start:stop], upper_II[start:stop, start:stop]
        errors_cO = torch.empty_like(block_cO)
        for j in range(stop - start):
            rounded_IO[start + j] = _nearest(block_cO[j], scale_IO[start + j], fmt)
            errors_cO[j] = (block_cO[j] - rounded_IO[start + j]) / upper_cc[j, j]
            block_cO[j + 1 :].addr_(upper_cc[j, j + 1 :], errors_cO[j], alpha=-1)
        weight_IO[stop:].addmm_(upper_II[start:stop, stop:].mT, errors_cO, alpha=-1)
    return rounded_IO[torch.argsort(order)].mT.contiguous()


def refine(
    weight_OI: torch.Tensor,
    shown_OI: torch.Tensor,
    hessian_II: torch.Tensor,
    scale_OG: torch.Tensor,
    fmt: str,
    *,
    held_in: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One round: better scales for the codes of `shown_OI`, then better codes for those scales.

    Scales: the least squares solution of a row, one small system of its groups. Codes: coordinate descent, every
    column once, each at its optimum given the others. What a half type cannot hold of a scale is lost.
    """
    damped_II = hessian_II.clone()
    damped_II.diagonal().add_(DAMPING * hessian_II.diagonal().mean())
    scale_OG, shown_OI = _refit_scales(weight_OI, shown_OI, damped_II, scale_OG, held_in)
    return _descend(weight_OI, shown_OI, damped_II, scale_OG, fmt), scale_OG


def _refit_scales(
    weight_OI: torch.Tensor,
    shown_OI: torch.Tensor,
    hessian_II: torch.Tensor,
    scale_OG: torch.Tensor,
    held_in: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: minimise (w - sum_g s_g c_g) H (w - sum_g s_g c_g)^T over s, c the codes of its groups."""
    groups = scale_OG.shape[1]
    codes_OGg = shown_OI.unflatten(1, (groups, -1)) / scale_OG[..., None]
    codes_OI, size = codes_OGg.flatten(1), codes_OGg.shape[-1]
    system_OGG = torch.empty(len(scale_OG), groups, groups)
    for g in range(groups):
        product_OI = codes_OGg[:, g] @ hessian_II[g * size : (g + 1) * size]
        system_OGG[:, g] = (codes_OI * product_OI).unflatten(1, (groups, -1)).sum(-1)
    target_OG = (codes_OI * (weight_OI @ hessian_II)).unflatten(1, (groups, -1)).sum(-1)
    ridge_OG = 1e-4 * system_OGG.diagonal(dim1=1, dim2=2) + 1e-30
    # the ridge pulls to the present scale, and a group of zeros keeps it
    system_OGG = system_OGG.double() + torch.diag_embed(ridge_OG.double())
    found_OG = torch.linalg.solve(system_OGG, (target_OG + ridge_OG * scale_OG).double()).float().to(held_in).float()
    usable_OG = (found_OG > 0.5 * scale_OG) & (found_OG < 2 * scale_OG)
    scale_OG = torch.where(usable_OG, found_OG, scale_OG)
    return scale_OG, (codes_OGg * scale_OG[..., None]).flatten(1)


def _descend(
    weight_OI: torch.Tensor, shown_OI: torch.Tensor, hessian_II: torch.Tensor, scale_OG: torch.Tensor, fmt: str
) -> torch.Tensor:
    """Every column at its optimum q_j + (H (w - q))_j / H_jj, one after the other."""
    rounded_IO = shown_OI.mT.contiguous()
    scale_IO, size_I = _by_column(scale_OG, len(rounded_IO)), hessian_II.diagonal()
    gradient_IO = hessian_II @ (weight_OI.mT - rounded_IO)
    for start in range(0, len(rounded_IO), BLOCK):
        stop = min(start + BLOCK, len(rounded_IO))
        block_cO, hessian_cc = gradient_IO[start:stop], hessian_II[start:stop, start:stop]
        moved_cO = torch.empty_like(block_cO)
        for j in range(stop - start):
            column_O = rounded_IO[start + j]
            better_O = _nearest(column_O + block_cO[j] / size_I[start + j], scale_IO[start + j], fmt)
            moved_cO[j] = column_O - better_O
            rounded_IO[start + j] = better_O
            block_cO[j + 1 :].addr_(hessian_cc[j, j + 1 :], moved_cO[j])
        gradient_IO[stop:].addmm_(hessian_II[stop:, start:stop], moved_cO)
    return rounded_IO.mT.contiguous()


def _by_column(scale_OG: torch.Tensor, width: int) -> torch.Tensor:
    return scale_OG.mT.repeat_interleave(width // scale_OG.shape[1], dim=0)


def _nearest(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    return dequantize(quantize(x, scale, fmt), scale)


def _inverse_factor(hessian_II: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped H."""
    if not bool(torch.isfinite(hessian_II).all()):
        raise DtoolError("the calibration's second moments are not finite", fix="check the weights for inf or NaN")
    mean, damping = float(hessian_II.diagonal().mean()), DAMPING
    if mean == 0:
        return torch.eye(hessian_II.shape[0])
    while damping <= MOST_DAMPING:
        matrix_II = hessian_II.double()
        matrix_II.diagonal().add_(damping * mean)
        matrix_II, fault = torch.linalg.cholesky_ex(matrix_II)  # each step frees the one before: they are large
        matrix_II = torch.cholesky_inverse(matrix_II)
        matrix_II, fault_above = torch.linalg.cholesky_ex(matrix_II, upper=True)
        if not int(fault) and not int(fault_above):
            return matrix_II.float()
        damping *= 10
    raise DtoolError(
        "the calibration's second moments cannot be factored",
        expected="a positive definite matrix, with damping",
        found=f"none with {MOST_DAMPING:g} times the mean of the diagonal added",
        fix="use more calibration text, or weights.algorithm rtn",
    )
