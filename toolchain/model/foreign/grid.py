"""The grid of a coded matrix, its codes, and the numbers both stand for.

    W[o, i] = (code[o, i] - zero[o, g(i)]) * scale[o, g(i)]

Codes and zero points are taken relative to the middle of their range, so that a symmetric matrix has none of the
latter. Everything is float32: a product of an 8-bit code and a float16 or bfloat16 scale is exact in it.

Legend: O outputs, I inputs, G groups, g inputs of a group.
"""

from dataclasses import dataclass

import torch

from toolchain.errors import DtoolError, name_list
from toolchain.model.foreign.coded import PIECES, CodedTensor
from toolchain.model.foreign.packing import centred, unpack_awq, unpack_rows, unpack_words
from toolchain.model.foreign.scheme import INSTEAD
from toolchain.tensor_file import read_tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the numbers of a matrix lie: float32 scales [O, G], and what moves them.

    `zero`: int16 [O, G]; None where all are in the middle. `group`: int64 [I], the group of each input; None
    where groups are blocks of equal length, in order.
    """

    scale: torch.Tensor
    zero: torch.Tensor | None = None
    group: torch.Tensor | None = None


def read_grid(coded: CodedTensor) -> Grid:
    """The grid of a matrix. Raises DtoolError for zero points or groups that contradict the config."""
    codes = PIECES[coded.scheme.layout][0][0]
    pieces = {piece: read_tensor(entry) for piece, entry in coded.pieces.items() if piece != codes}
    out, _ = coded.shape
    if "scales" in pieces:
        scale_OG = pieces["scales"].float().mT
    else:
        scale = pieces["weight_scale"].float()
        scale_OG = (scale if scale.ndim == 2 else scale.reshape(-1, 1)).expand(out, -1)
    zero_OG = _zero(coded, pieces)
    if zero_OG is not None and not bool(zero_OG.any()):
        zero_OG = None
    if zero_OG is not None and coded.scheme.symmetric:
        raise _off_middle(coded, zero_OG)
    group_I = _group(coded, pieces.get("g_idx", pieces.get("weight_g_idx")), scale_OG.shape[1])
    return Grid(scale_OG.contiguous(), zero_OG, group_I)


def _zero(coded: CodedTensor, pieces: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """int16 zero points [O, G] relative to the middle of the codes; None where the layout has none."""
    scheme, middle = coded.scheme, 1 << (coded.scheme.bits - 1)
    if scheme.layout == "awq":
        return centred(unpack_awq(pieces["qzeros"]), 4).short().mT
    if scheme.layout == "gptq":
        stored_GO = unpack_words(pieces["qzeros"], scheme.bits).short()
        if scheme.zero_offset and bool((stored_GO == 2 * middle - 1).any()):
            raise DtoolError(
                f"a zero point of {coded.name} is stored as {2 * middle - 1}, which readers of this format take apart",
                expected=f"0..{2 * middle - 2} where zero points are stored less one",
                found=f"{2 * middle - 1}: {2 * middle} to some, 0 to others",
                fix="give the checkpoint in checkpoint_format gptq_v2, or the one that was not quantized",
            )
        return (stored_GO + scheme.zero_offset - middle).mT
    zero = pieces.get("weight_zero_point")
    if zero is None:
        if scheme.symmetric is None:
            raise DtoolError(
                f"the config says that codes are not symmetric, but {coded.name} has no zero points",
                expected="weight_zero_point beside the codes",
                found="none",
                fix="download the checkpoint again; if its codes are symmetric, its config.json must say so",
            )
        return None
    if zero.dtype == torch.int32 and scheme.layout == "packed":
        return centred(unpack_rows(zero, scheme.bits), scheme.bits)[: coded.shape[0]].short()
    zero_OG = zero if zero.ndim == 2 else zero.reshape(-1, 1)
    return zero_OG.float().short().expand(coded.shape[0], -1)


def _off_middle(coded: CodedTensor, zero_OG: torch.Tensor) -> DtoolError:
    middle, fix = 1 << (coded.scheme.bits - 1), INSTEAD
    if coded.scheme.layout == "gptq":
        other = "gptq_v2" if coded.scheme.zero_offset else "gptq"
        fix = f"if its writer stores zero points the other way, set checkpoint_format {other} in its config.json"
    return DtoolError(
        f"the config says that codes are symmetric, but zero points of {coded.name} are not in the middle",
        expected=f"zero point {middle}",
        found=name_list(str(middle + int(zero)) for zero in zero_OG.unique().tolist()),
        fix=fix,
    )


def _group(coded: CodedTensor, index_I: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """int64 [I]: the group of each input; None where groups are equal blocks in order."""
    into = coded.shape[1]
    even = into % groups == 0
    if index_I is None and even:
        return None
    group_I = torch.arange(into) // (coded.scheme.group_size or into) if index_I is None else index_I.long()
    if not torch.equal(group_I.unique(), torch.arange(groups)):
        raise DtoolError(
            f"the group index of {coded.name} does not name each of its groups",
            expected=f"0..{groups - 1}, each at least once",
            found=name_list(map(str, group_I.unique().tolist())),
            fix=INSTEAD,
        )
    return None if even and torch.equal(group_I, torch.arange(into) // (into // groups)) else group_I


def read_codes(coded: CodedTensor) -> torch.Tensor:
    """The codes of a matrix [O, I]: int8 relative to the middle, or E4M3."""
    scheme = coded.scheme
    stored = read_tensor(coded.pieces[PIECES[scheme.layout][0][0]])
    if scheme.layout == "plain":
        return stored
    if scheme.layout == "gptq":
        return centred(unpack_rows(stored, scheme.bits), scheme.bits).mT
    if scheme.layout == "awq":
        return centred(unpack_awq(stored), scheme.bits).mT
    return centred(unpack_words(stored, scheme.bits), scheme.bits)[:, : coded.shape[1]]


def dequantize(codes_OI: torch.Tensor, grid: Grid) -> torch.Tensor:
    """float32 [O, I]: (code - zero) * scale, by the group of each input."""
    values_OI = codes_OI.float().contiguous()
    if grid.group is None:
        values_OGg = values_OI.unflatten(1, (grid.scale.shape[1], -1))
        if grid.zero is not None:
            values_OGg.sub_(grid.zero[..., None])
        values_OGg.mul_(grid.scale[..., None])
        return values_OI
    for o, row_I in enumerate(values_OI):  # a row at a time: the scale of each input would be a second matrix
        if grid.zero is not None:
            row_I.sub_(grid.zero[o, grid.group])
        row_I.mul_(grid.scale[o, grid.group])
    return values_OI
