"""Round to nearest: the codes and scales of a matrix, symmetric.

    scale_o = max_i |W[o, i]| / 127        one per output channel (or one for the tensor)
    code    = clamp(round_half_even(W / scale), -128, 127)

Source: ONNX QuantizeLinear; Nagel et al., arXiv 2106.08295, eq. 4-7. Zero rows get a tiny positive
scale, so that they stay exactly zero.
"""

import torch

from toolchain.numerics import quantize, scale_from_amax


def round_to_nearest(weight_OI: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [O, I] and float32 scales [O]; with `tensor` granularity all scales are equal.

    Raises ValueError when the weight holds inf or NaN.
    """
    amax_O = weight_OI.float().abs().amax(-1)
    if granularity == "tensor":
        amax_O = amax_O.max().expand_as(amax_O)
    scale_O = scale_from_amax(amax_O)
    return quantize(weight_OI, scale_O[:, None]), scale_O
