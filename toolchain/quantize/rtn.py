"""Round to nearest: the codes and scales of a matrix, symmetric.

    scale_o  = max_i |W[o, i]| / qmax                          one per output channel, or one for the tensor
    scale_og = max_{i in g} |W[o, i]| / qmax                   one per group of inputs of a channel (int4)
    code     = clamp(round_half_even(W / scale))               qmax 127 (int8), 7 (int4), 448 (fp8 e4m3)

Source: ONNX QuantizeLinear; Nagel et al., arXiv 2106.08295, eq. 4-7. Zero rows get a tiny positive
scale, so that they stay exactly zero. The parts of a merged matrix have scales of their own.
"""

from collections.abc import Sequence

import torch

from toolchain.numerics import pack_int4, quantize, scale_from_amax


def round_to_nearest(
    weight_OI: torch.Tensor,
    fmt: str,
    granularity: str,
    *,
    parts: Sequence[int] | None = None,
    group_size: int = 0,
    held_in: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and float32 scales of a matrix.

    int8 and fp8_e4m3: codes [O, I], scales [O] (`tensor`: all equal within each of `parts` rows).
    int4: packed uint8 [O, I / 2], scales [O, I / group_size]. The scales are values of `held_in`.
    Raises ValueError when the weight holds inf or NaN.
    """
    if granularity == "group":
        groups_OGg = weight_OI.float().unflatten(-1, (-1, group_size))
        scale_OG = scale_from_amax(groups_OGg.abs().amax(-1), fmt, held_in=held_in)
        return pack_int4(quantize(groups_OGg, scale_OG[..., None], fmt).flatten(1)), scale_OG
    amax_O = weight_OI.float().abs().amax(-1)
    if granularity == "tensor":
        whole = [part.max().expand_as(part) for part in amax_O.split(list(parts or amax_O.shape))]
        amax_O = torch.cat(whole)
    scale_O = scale_from_amax(amax_O, fmt, held_in=held_in)
    return quantize(weight_OI, scale_O[:, None], fmt), scale_O
