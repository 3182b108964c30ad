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

Legend: O outputs, r some of them, I inputs, G groups, g inputs of a group, c columns of a block.
"""

import torch

from toolchain.errors import DtoolError
from toolchain.numerics import CODE_RANGE, dequantize, quantize, scale_from_amax
from toolchain.quantize.inverse_factor import inverse_factor_
from toolchain.quantize.pieces import add_product, in_pieces, matrix_product

BLOCK = 64
"""Columns rounded before the rest of the matrix hears of it."""
DAMPING, MOST_DAMPING = 0.01, 10.0
"""Share of the mean diagonal that is added to all of it: at first, and when nothing more helps."""
FULL_GROUP = 128
CACHED, REUSED, HELD = 1 << 20, 1 << 22, 1 << 24
"""Values of a matrix that are taken at a time, whole rows: what is made on the way stays in the processor's cache,
or in memory that the allocator has at hand, or is at least small beside H."""
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
    parts_Ggg = None if hessian_II is None or group_size > FULL_GROUP else _diagonal_blocks(hessian_II, group_size)
    size_Gg = None if hessian_II is None else hessian_II.diagonal().clone().unflatten(0, (-1, group_size))

    def search(rows_OGg: torch.Tensor) -> torch.Tensor:
        return _search_rows(rows_OGg, fmt, parts_Ggg, size_Gg, held_in)

    return torch.cat(list(in_pieces(search, groups_OGg.split(_rows(CACHED, weight_OI)))))


def _rows(values: int, weight_OI: torch.Tensor) -> int:
    return max(values // weight_OI.shape[1], 1)


def _search_rows(
    groups_OGg: torch.Tensor,
    fmt: str,
    parts_Ggg: torch.Tensor | None,
    size_Gg: torch.Tensor | None,
    held_in: torch.dtype,
) -> torch.Tensor:
    amax_OG = groups_OGg.abs().amax(-1)
    best_OG = torch.full_like(amax_OG, float("inf"))
    found_OG = scale_from_amax(amax_OG, fmt, held_in=held_in)
    for clip in CLIPS:
        scale_OG = scale_from_amax(amax_OG * clip, fmt, held_in=held_in)
        error_OGg = _nearest(groups_OGg, scale_OG[..., None], fmt).sub_(groups_OGg)
        if parts_Ggg is not None:
            weighed = torch.einsum("ogi,gij->ogj", error_OGg, parts_Ggg)
        else:
            weighed = error_OGg if size_Gg is None else error_OGg * size_Gg
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
) -> tuple[torch.Tensor, float]:
    """The matrix [O, I] that codes with these scales stand for, rounded so that the outputs err least; the damping.

    Raises DtoolError when the Hessian cannot be factored.
    """
    order = torch.argsort(hessian_II.diagonal(), descending=True)
    upper_II, damping = _inverse_factor(hessian_II, order)
    rows = _rows(HELD, weight_OI)
    parts = zip(weight_OI.split(rows), scale_OG.split(rows), strict=True)
    return torch.cat([_round_rows(weight, upper_II, order, scale, fmt) for weight, scale in parts]), damping


def _round_rows(
    weight_OI: torch.Tensor, upper_II: torch.Tensor, order: torch.Tensor, scale_OG: torch.Tensor, fmt: str
) -> torch.Tensor:
    weight_IO = weight_OI.float().mT[order]  # a column of the matrix lies in one piece
    scale_GO = scale_OG.mT.contiguous()
    group_I = (order // (len(weight_IO) // len(scale_GO))).tolist()
    rounded_IO = torch.empty_like(weight_IO)
    for start in range(0, len(weight_IO), BLOCK):
        stop = min(start + BLOCK, len(weight_IO))
        block_cO, upper_cc = weight_IO[start:stop], upper_II[start:stop, start:stop]
        errors_cO = torch.empty_like(block_cO)
        for j in range(stop - start):
            rounded_IO[start + j] = _nearest(block_cO[j], scale_GO[group_I[start + j]], fmt)
            errors_cO[j] = (block_cO[j] - rounded_IO[start + j]) / upper_cc[j, j]
            block_cO[j + 1 :].addr_(upper_cc[j, j + 1 :], errors_cO[j], alpha=-1)
        add_product(weight_IO[stop:], upper_II[start:stop, stop:].mT, errors_cO, factor=-1)
    return rounded_IO[torch.argsort(order)].mT.contiguous()


def refine(
    weight_OI: torch.Tensor,
    shown_OI: torch.Tensor,
    hessian_II: torch.Tensor,
    scale_OG: torch.Tensor,
    fmt: str,
    *,
    rounds: int = 1,
    held_in: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each round: better scales for the codes of `shown_OI`, then better codes for those scales.

    Scales: the least squares solution of a row, one small system of its groups. Codes: coordinate descent, every
    column once, each at its optimum given the others. What a half type cannot hold of a scale is lost.
    """
    damped_II = hessian_II.clone()
    damped_II.diagonal().add_(DAMPING * hessian_II.diagonal().mean())
    matrices = (x.split(_rows(HELD, weight_OI)) for x in (weight_OI, shown_OI, scale_OG))
    refined = [
        _refine_rows(weight, shown, scale, damped_II, fmt, rounds, held_in)
        for weight, shown, scale in zip(*matrices, strict=True)
    ]
    shown_parts, scale_parts = zip(*refined, strict=True)
    return torch.cat(shown_parts), torch.cat(scale_parts)


def _refine_rows(
    weight_OI: torch.Tensor,
    shown_OI: torch.Tensor,
    scale_OG: torch.Tensor,
    hessian_II: torch.Tensor,
    fmt: str,
    rounds: int,
    held_in: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted_OI = matrix_product(weight_OI, hessian_II)

    def refit(
        wanted_rI: torch.Tensor, shown_rI: torch.Tensor, scale_rG: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _refit_scales(wanted_rI, shown_rI, scale_rG, hessian_II, held_in)

    for _ in range(rounds):
        matrices = (x.split(_rows(REUSED, weight_OI)) for x in (wanted_OI, shown_OI, scale_OG))
        refitted = in_pieces(refit, *matrices)
        scale_OG, shown_OI = (torch.cat(parts) for parts in zip(*refitted, strict=True))
        shown_OI = _descend(weight_OI, shown_OI, hessian_II, scale_OG, fmt)
    return shown_OI, scale_OG


def _refit_scales(
    wanted_OI: torch.Tensor,
    shown_OI: torch.Tensor,
    scale_OG: torch.Tensor,
    hessian_II: torch.Tensor,
    held_in: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: minimise (w - sum_g s_g c_g) H (w - sum_g s_g c_g)^T over s; c: codes of its groups, `wanted`: w H."""
    groups = scale_OG.shape[1]
    codes_OGg = shown_OI.unflatten(1, (groups, -1)) / scale_OG[..., None]
    codes_OI, size = codes_OGg.flatten(1), codes_OGg.shape[-1]
    system_OGG = torch.empty(len(scale_OG), groups, groups)
    for g in range(groups):
        product_OI = codes_OGg[:, g] @ hessian_II[g * size : (g + 1) * size]
        system_OGG[:, g] = (codes_OI * product_OI).unflatten(1, (groups, -1)).sum(-1)
    target_OG = (codes_OI * wanted_OI).unflatten(1, (groups, -1)).sum(-1)
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
    scale_GO, size_I = scale_OG.mT.contiguous(), hessian_II.diagonal()
    group = len(rounded_IO) // len(scale_GO)
    gradient_IO = matrix_product(hessian_II, weight_OI.mT - rounded_IO)
    for start in range(0, len(rounded_IO), BLOCK):
        stop = min(start + BLOCK, len(rounded_IO))
        block_cO, hessian_cc = gradient_IO[start:stop], hessian_II[start:stop, start:stop]
        moved_cO = torch.empty_like(block_cO)
        for j in range(stop - start):
            column_O = rounded_IO[start + j]
            better_O = _nearest(column_O + block_cO[j] / size_I[start + j], scale_GO[(start + j) // group], fmt)
            moved_cO[j] = column_O - better_O
            rounded_IO[start + j] = better_O
            block_cO[j + 1 :].addr_(hessian_cc[j, j + 1 :], moved_cO[j])
        add_product(gradient_IO[stop:], hessian_II[stop:, start:stop], moved_cO)
    return rounded_IO.mT.contiguous()


def _nearest(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """What the codes of `x` stand for; of integers without the detour by way of bytes."""
    if fmt == "fp8_e4m3":
        return dequantize(quantize(x, scale, fmt), scale)
    return (x / scale).round_().clamp_(*CODE_RANGE[fmt]).mul_(scale)


def _inverse_factor(hessian_II: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The upper Cholesky factor of the inverse of a damped H, its channels in this order, and the damping it took."""
    if lost := int((~torch.isfinite(hessian_II)).sum()):
        raise DtoolError(
            "the calibration's second moments are not finite",
            expected="finite sums over the text",
            found=f"{lost} of {hessian_II.numel()} inf or NaN",
            fix="check the weights for inf or NaN",
        )
    damping = DAMPING
    while damping <= MOST_DAMPING:
        matrix_II = hessian_II[order][:, order].double()
        mean = float(matrix_II.diagonal().mean())
        if mean == 0:
            return torch.eye(hessian_II.shape[0]), damping
        matrix_II.diagonal().add_(damping * mean)
        if inverse_factor_(matrix_II):
            return matrix_II.float(), damping
        damping *= 10
    raise DtoolError(
        "the calibration's second moments cannot be factored",
        expected="a positive definite matrix, with damping",
        found=f"none with {MOST_DAMPING:g} times the mean of the diagonal added",
        fix="use more calibration text, or weights.algorithm rtn",
    )
