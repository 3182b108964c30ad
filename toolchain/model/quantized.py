"""The exact arithmetic of quantized layers, as torch modules: what the graphs must compute.

weight-only      y = x W'^T,                W' = codes * scale      a scale per output channel, or per group of it
per token        s = max|x| / qmax,  q = code of x / s;    y = s * (q W'^T)
static           q = code of x / s,  s from calibration;   y = (q s) W'^T
centered         y = y'(x - m) + W m,  or  y = x W'^T + (W - W') m  where x stays in float     m: the input's means
rotated, limited  see `InputShape`
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from toolchain.errors import DtoolError
from toolchain.numerics import dequantize, quantize, token_scale, unpack_int4

SCALE_SUFFIX = "_scale"
INPUT_SCALE = "input_scale"
"""Per product: the static scale [] of its input."""
ROTATION, FEED_FORWARD_ROTATION = "rotation.stream", "rotation.feed_forward"
"""Bases [E, E] of the residual stream and [n, n] of blocks of the feed-forward's last input."""
LIMIT, CHANNELS, CHANNEL_WEIGHT = "input_limit", "excess_channels", "excess_weight"
"""Per product with an excess: its bounds [I], the channels [k] (int64) and their part of the weight [k, O]."""
CENTER, OFFSET = "input_center", "output_offset"
"""Per centered product: the means [I] taken off its rounded input, and what is added to its output [O]."""
KV_SCALES = ("k_scale", "v_scale")
"""Per layer, under `self_attn`: the static scales [K] of a quantized cache."""


def dequantize_weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [O, I] of stored codes: int8 or float8 [O, I] with scales [O], or packed int4 with scales [O, I / g]."""
    if codes.dtype != torch.uint8:
        return dequantize(codes, scale[:, None])
    codes_OGg = unpack_int4(codes).reshape(*scale.shape, -1)
    return dequantize(codes_OGg, scale[..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class InputShape:
    """What the feed-forward's last product does to its input before it is rounded, and gives back after.

        x' = min(max(x, -l), l) K,    y = x' W'^T + ((x - min(max(x, -l), l))_S) W_S^T,    W' = W K

    `rotation` [n, n] is K, over blocks of n channels. `limit` [I] bounds the few channels S whose rare excess, some
    hundred times what the others reach (massive activations, arXiv 2402.17762), would take all of a static scale;
    `channels` [k] are S and `weight` [k, O] their columns in the compute type. Each may be None.
    """

    rotation: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    channels: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    def __call__(self, x_BTI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """X' [B, T, I], and what the excess adds to the product [B, T, O]."""
        added_BTO = None
        if self.limit is not None:
            assert self.channels is not None
            assert self.weight is not None
            limited_BTI = torch.maximum(torch.minimum(x_BTI, self.limit), -self.limit)
            added_BTO = (x_BTI - limited_BTI)[..., self.channels] @ self.weight
            x_BTI = limited_BTI
        if self.rotation is not None:
            x_BTI = (x_BTI.unflatten(-1, (-1, len(self.rotation))) @ self.rotation).flatten(-2)
        return x_BTI, added_BTO


def checked_scale(name: str, scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The scale itself. Raises DtoolError unless it is of that shape, and positive and finite everywhere."""
    if tuple(scale.shape) != shape or not bool(((scale > 0) & torch.isfinite(scale)).all()):
        least = float(scale.min()) if scale.numel() else float("nan")
        raise DtoolError(
            f"{name} is no scale",
            expected=f"float32 {list(shape)}, above zero and finite",
            found=f"{list(scale.shape)}, the least {least:g}",
            fix="quantize again; for a scale of the checkpoint's own, --set weights.algorithm=rtn",
        )
    return scale


class QuantizedLinear(nn.Module):
    """A linear layer over stored codes; its input in float, or rounded per token or with a static scale.

    `activations` is (format, granularity) or None; `input_scale` belongs to granularity `tensor`; `center` [I] and
    `offset` [O] to a centered product, the former only where its input is rounded.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: Any,
        activations: tuple[str, ...] | None = None,
        input_scale: torch.Tensor | None = None,
        center: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", dequantize_weight(codes, scale))
        self.bias = bias
        self.activations = activations
        self.input_scale, self.center, self.offset = input_scale, center, offset

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        y_BTO = self._product(x_BTI if self.center is None else x_BTI - self.center)
        if self.offset is not None:
            y_BTO = y_BTO + self.offset
        return y_BTO if self.bias is None else y_BTO + self.bias

    def _product(self, x_BTI: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        assert isinstance(weight, torch.Tensor)
        if self.activations is None:
            return F.linear(x_BTI, weight.to(x_BTI.dtype))
        fmt, granularity = self.activations
        if granularity == "token":
            scale_BT1 = token_scale(x_BTI, fmt)
            y_BTO = F.linear(quantize(x_BTI, scale_BT1, fmt).float(), weight) * scale_BT1
        else:
            scale = self.input_scale
            assert scale is not None
            y_BTO = F.linear(dequantize(quantize(x_BTI, scale, fmt), scale), weight)
        return y_BTO.to(x_BTI.dtype)


class QuantizedEmbedding(nn.Module):
    """Rows of codes [V, E], each with its float32 scales."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", dequantize_weight(codes, scale).to(dtype))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        assert isinstance(weight, torch.Tensor)
        return F.embedding(ids_BT, weight)
