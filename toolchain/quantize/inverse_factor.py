"""The upper triangular U with U^T U = H^-1, for a positive definite H.

    H = R R^T,  R upper triangular,   so that   H^-1 = R^-T R^-1   and   U = R^-1

R is found from the last block of columns to the first, U from the first to the last, both in the memory of H:

    R_kk R_kk^T = H_kk,    R_ik = H_ik R_kk^-T,    H_ij = H_ij - R_ik R_jk^T       for blocks i <= j < k
    U_kk = R_kk^-1,        U_ik = -(sum of U_ij R_jk over i <= j < k) U_kk         for blocks i < k

That is half of the work of LAPACK's way to U (factor H, invert it, factor the inverse), and almost all of it is
products, which can be cut in fixed pieces (`pieces`): LAPACK's own factors depend on the number of threads.

Source: Golub and Van Loan, Matrix Computations, 4.2.6 (blocked Cholesky), from the other end; 3.1.8 (block inverse).

Legend: I the matrix's width, c columns of a block, r rows of a piece.
"""

import torch

from toolchain.quantize.pieces import in_pieces, matrix_product

BLOCK = 128
"""Columns of a block, and rows of a piece."""


def inverse_factor_(matrix_II: torch.Tensor) -> bool:
    """Put U in the place of H, float64; False where H is not positive definite, and the matrix is lost."""
    starts = range(0, len(matrix_II), BLOCK)
    for start in reversed(starts):
        if not _factor_block(matrix_II, start):
            return False
    for start in starts[1:]:
        _invert_block(matrix_II, start)
    matrix_II.triu_()
    return True


def _factor_block(matrix_II: torch.Tensor, start: int) -> bool:
    """Put R_ik in the column of block k, but U_kk in its corner, and take R_ik R_jk^T off all columns before it."""
    corner_cc, above_Ic = _column(matrix_II, start)
    # the lower factor of the block in reversed order is R_kk in reversed order
    reversed_cc, fault = torch.linalg.cholesky_ex(corner_cc.flip(0, 1))
    if int(fault):
        return False
    identity_cc = torch.eye(len(corner_cc), dtype=matrix_II.dtype)
    corner_cc.copy_(torch.linalg.solve_triangular(reversed_cc.flip(0, 1), identity_cc, upper=True))
    above_Ic.copy_(matrix_product(above_Ic, corner_cc.mT))

    def take_off(row: int) -> None:
        stop = min(row + BLOCK, start)
        matrix_II[row:stop, row:start].addmm_(above_Ic[row:stop], above_Ic[row:].mT, alpha=-1)

    list(in_pieces(take_off, range(0, start, BLOCK)))
    return True


def _invert_block(matrix_II: torch.Tensor, start: int) -> None:
    """Put U_ik in the place of R_ik; all columns before them hold U."""
    corner_cc, above_Ic = _column(matrix_II, start)

    def invert(row: int) -> torch.Tensor:
        stop = min(row + BLOCK, start)
        return (matrix_II[row:stop, row:start] @ above_Ic[row:] @ corner_cc).neg_()

    above_Ic.copy_(torch.cat(list(in_pieces(invert, range(0, start, BLOCK)))))


def _column(matrix_II: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The corner [c, c] on the diagonal of a block's columns, and all rows [start, c] above it."""
    columns = slice(start, min(start + BLOCK, len(matrix_II)))
    return matrix_II[columns, columns], matrix_II[:start, columns]
