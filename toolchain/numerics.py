"""The one table of tolerances, and the quantizer's arithmetic.

Tolerance of a logit: every layer adds two branches to the residual stream, each a chain of dot
products of length about `width`. Sums are formed in float32 whatever the storage, and blocked
summation errs by u32 * sqrt(log2(width)) relative to its result (Higham, Accuracy and Stability,
4.2); storing a branch rounds it once more, by u of the dtype. A relative error e of a softmax score
of size s moves its weight by s * e, and SCORE_SIZE is that s for sharp attention. N = 2 * layers + 1
independent errors add as sqrt(N), those of the two computations compared as sqrt(2). That is the size of
rounding in a model that passes errors on as most do, and no bound: one with sharper attention, or a mixture,
passes on several times as much. Tests that hold a model to another measure its own (`tests.rounding`).

    tolerance = SCORE_SIZE * (u + u32 * sqrt(log2(width))) * sqrt(2 * (2 * layers + 1)) * max|reference|

Symmetric quantization as ONNX QuantizeLinear defines it: code = clamp(round_half_even(x / scale)).
E4M3 has no infinity: a cast beyond its range gives NaN in some libraries, so values are clamped first.
"""

import math

import torch

SCORE_SIZE = 8.0
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
INT8_QMAX = 127.0
CODE_RANGE = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0), "fp8_e4m3": (-448.0, 448.0)}
"""Smallest and largest code of each quantized format."""
SMALLEST_SCALE = 2.0**-100
"""Least float32 scale: positive, so that 0 / scale is 0 and never NaN."""


def logit_tolerance(dtype: str, *, layers: int, width: int, largest: float) -> float:
    """Largest |difference| of logits that rounding in `dtype` explains; `largest` = max|reference|."""
    relative = UNIT_ROUNDOFF[dtype] + UNIT_ROUNDOFF["float32"] * math.sqrt(math.log2(width))
    return SCORE_SIZE * relative * math.sqrt(2 * (2 * layers + 1)) * largest


def quantize(x: torch.Tensor, scale: torch.Tensor, fmt: str = "int8") -> torch.Tensor:
    """Codes of `x` in `fmt`; `scale` broadcasts against it. int4 codes lie one to a byte, as int8."""
    low, high = CODE_RANGE[fmt]
    ratio = x.float() / scale
    if fmt == "fp8_e4m3":
        return ratio.clamp(low, high).to(torch.float8_e4m3fn)
    return ratio.round().clamp(low, high).to(torch.int8)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of codes; `scale` broadcasts against them."""
    return codes.float() * scale


def scale_from_amax(amax: torch.Tensor, fmt: str = "int8", *, held_in: torch.dtype = torch.float32) -> torch.Tensor:
    """float32 scales amax / (largest code), positive and finite. Raises ValueError on a non-finite amax.

    Their values are ones that `held_in` has, so that a graph may cast them to it without loss.
    """
    qmax = CODE_RANGE[fmt][1]
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("amax is not finite: the tensor holds inf or NaN")
    return (amax.float() / qmax).clamp_min(smallest_scale(held_in)).to(held_in).float()


def smallest_scale(held_in: torch.dtype) -> float:
    """The least scale of a type: positive, and no denormal number of a half."""
    return SMALLEST_SCALE if held_in == torch.float32 else torch.finfo(held_in).tiny


def token_scale(x_BTI: torch.Tensor, fmt: str = "int8") -> torch.Tensor:
    """Dynamic scale of each token: max|x| / qmax over the last axis, kept as a dim of 1."""
    qmax = CODE_RANGE[fmt][1]
    return x_BTI.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST_SCALE * qmax) / qmax


def pack_int4(codes_OI: torch.Tensor) -> torch.Tensor:
    """uint8 [O, I / 2] of int4 codes held as int8 [O, I]; the first of a pair in the low nibble, as in ONNX."""
    nibbles = codes_OI.view(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed_OJ: torch.Tensor) -> torch.Tensor:
    """int8 codes [O, 2J] of packed nibbles uint8 [O, J]."""
    nibbles = torch.stack((packed_OJ & 0xF, packed_OJ >> 4), dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
