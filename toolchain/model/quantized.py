"""The exact arithmetic of quantized layers, as torch modules: what the graphs must compute.

weight-only      y = x (codes * scale)^T                       one scale per output channel
per token        s = max|x| / 127,  q = clamp(round(x / s));  y = s * (q (codes * scale)^T)
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from toolchain.numerics import dequantize, quantize, token_scale

SCALE_SUFFIX = "_scale"
KV_SCALES = ("k_scale", "v_scale")
"""Per layer, under `self_attn`: the static scales [K] of a quantized cache."""


class QuantizedLinear(nn.Module):
    """A linear layer over int8 codes [O, I] with float32 scales [O] or [1]."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: Any, *, per_token: bool) -> None:
        super().__init__()
        self.register_buffer("weight", dequantize(codes, scale[:, None]))
        self.bias = bias
        self.per_token = per_token

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        assert isinstance(weight, torch.Tensor)
        if not self.per_token:
            return F.linear(x_BTI, weight.to(x_BTI.dtype), self.bias)
        scale_BT1 = token_scale(x_BTI)
        codes_BTI = quantize(x_BTI, scale_BT1).float()
        y_BTO = (F.linear(codes_BTI, weight) * scale_BT1).to(x_BTI.dtype)
        return y_BTO if self.bias is None else y_BTO + self.bias


class QuantizedEmbedding(nn.Module):
    """Rows of int8 codes [V, E], each with its float32 scale."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", dequantize(codes, scale[:, None]).to(dtype))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        assert isinstance(weight, torch.Tensor)
        return F.embedding(ids_BT, weight)
