"""The one table of tolerances, and the quantizer's arithmetic.

Tolerance of a logit: every layer adds two branches to the residual stream, each a chain of dot
products of length about `width`. Sums are formed in float32 whatever the storage, and blocked
summation errs by u32 * sqrt(log2(width)) relative to its result (Higham, Accuracy and Stability,
4.2); storing a branch rounds it once more, by u of the dtype. A relative error e of a softmax score
of size s moves its weight by s * e, and SCORE_SIZE is that s for sharp attention. N = 2 * layers + 1
independent errors add as sqrt(N), those of the two computations compared as sqrt(2).

    tolerance = SCORE_SIZE * (u + u32 * sqrt(log2(width))) * sqrt(2 * (2 * layers + 1)) * max|reference|

Symmetric quantization as ONNX QuantizeLinear defines it: code = clamp(round_half_even(x / scale)).
"""

import math

import torch

SCORE_SIZE = 8.0
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
INT8_QMAX = 127.0
SMALLEST_SCALE = 2.0**-100
"""Scale of a row of zeros: positive and finite, so that 0 / scale is 0 and never NaN."""


def logit_tolerance(dtype: str, *, layers: int, width: int, largest: float) -> float:
    """Largest |difference| of logits that rounding in `dtype` explains; `largest` = max|reference|."""
    relative = UNIT_ROUNDOFF[dtype] + UNIT_ROUNDOFF["float32"] * math.sqrt(math.log2(width))
    return SCORE_SIZE * relative * math.sqrt(2 * (2 * layers + 1)) * largest


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8 codes of `x`; `scale` broadcasts against it."""
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of int8 codes; `scale` broadcasts against them."""
    return codes.float() * scale


def scale_from_amax(amax: torch.Tensor, qmax: float = INT8_QMAX) -> torch.Tensor:
    """float32 scales amax / qmax, positive and finite. Raises ValueError on a non-finite amax."""
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("amax is not finite: the tensor holds inf or NaN")
    return torch.where(amax > 0, amax.float() / qmax, SMALLEST_SCALE).clamp_min(SMALLEST_SCALE)


def token_scale(x_BTI: torch.Tensor) -> torch.Tensor:
    """Dynamic scale of each token: max|x| / 127 over the last axis, kept as a dim of 1."""
    return x_BTI.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST_SCALE * INT8_QMAX) / INT8_QMAX
