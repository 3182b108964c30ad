"""What calibration text shows: of one product's input its ranges, sums and second moments; of a layer all of it.

Legend: B batch, T tokens, N tokens of all texts, I inputs of a product.
"""

from dataclasses import dataclass, field

import torch

from toolchain.model.quantized import InputShape
from toolchain.quantize.cache_scales import CacheSeen
from toolchain.quantize.pieces import in_pieces

COLUMNS = 128
"""Channels of a piece: what is seen of a channel, a row of H too, does not depend on other pieces."""


@dataclass(slots=True)
class Seen:
    """What one product's input was: of each channel [I] the range, and what else was asked for; None where not.

    `total`: the sum of sizes [I]. `hessian`: H [I, I]. For a center: the sum `signed` [I], and `balanced` [I], the sum
    with every token at the same length, and `weight` [], that of the weights 1 / |x|^2: massive activations of a few
    tokens say nothing of the mean of all others.
    """

    low: torch.Tensor
    high: torch.Tensor
    total: torch.Tensor | None = None
    signed: torch.Tensor | None = None
    balanced: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    tokens: int = 0
    hessian: torch.Tensor | None = None

    @property
    def amax(self) -> torch.Tensor:
        """The largest magnitude of each channel [I]."""
        return torch.maximum(self.high, -self.low)

    @property
    def mean_size(self) -> torch.Tensor:
        """The mean magnitude of each channel [I]."""
        assert self.total is not None
        return self.total / max(self.tokens, 1)

    @property
    def center(self) -> torch.Tensor:
        """The mean of each channel [I], every token weighing 1 / |x|^2."""
        assert self.balanced is not None
        assert self.weight is not None
        return self.balanced / self.weight.clamp_min(1e-30)

    def reach(self, center_I: torch.Tensor) -> torch.Tensor:
        """How far each channel [I] reaches from a center."""
        return torch.maximum(self.high - center_I, center_I - self.low)

    def add(self, x_BTI: torch.Tensor) -> None:
        """Take in one batch."""
        x_NI = x_BTI.float().flatten(0, -2)
        once_N = weight_N = torch.ones(len(x_NI))  # a product takes half the time of a sum over rows
        if self.weight is not None:
            weight_N = 1 / torch.linalg.vector_norm(x_NI, dim=1).square().clamp_min(1e-30)
            self.weight += weight_N.sum()
        self.tokens += len(x_NI)

        def add_columns(start: int) -> None:
            part = slice(start, start + COLUMNS)
            x_Nc = x_NI[:, part]
            torch.minimum(self.low[part], x_Nc.amin(0), out=self.low[part])  # NaN stays
            torch.maximum(self.high[part], x_Nc.amax(0), out=self.high[part])
            if self.total is not None:
                self.total[part] += once_N @ x_Nc.abs()
            if self.signed is not None:
                self.signed[part] += once_N @ x_Nc
            if self.balanced is not None:
                self.balanced[part] += weight_N @ x_Nc
            if self.hessian is not None:
                self.hessian[part].addmm_(x_Nc.mT, x_NI)

        list(in_pieces(add_columns, range(0, x_NI.shape[1], COLUMNS)))

    def divide(self, scale_I: torch.Tensor) -> None:
        """As if every input had been divided by `scale_I`."""
        for name in ("low", "high", "total", "signed", "balanced"):
            value_I = getattr(self, name)
            if value_I is not None:
                setattr(self, name, value_I / scale_I)
        if self.hessian is not None:
            self.hessian.div_(scale_I[:, None]).div_(scale_I[None, :])

    def shift(self, center_I: torch.Tensor) -> None:
        """As if every input had been `center_I` less; H moves by what `signed` says."""
        self.low, self.high = self.low - center_I, self.high - center_I
        assert self.signed is not None
        if self.hessian is not None:
            about_I = self.signed - self.tokens * center_I / 2
            self.hessian.addr_(about_I, center_I, alpha=-1).addr_(center_I, about_I, alpha=-1)
        self.signed = self.signed - self.tokens * center_I


def nothing_seen(width: int, *, hessian: bool = False, sizes: bool = False, center: bool = False) -> Seen:
    """Before any text, of a product of `width` inputs: its range, and on demand H, the sizes, what centers need."""
    low_I, high_I = torch.zeros(2, width)
    seen = Seen(low_I, high_I)
    if hessian:
        seen.hessian = torch.zeros(width, width)
    if sizes:
        seen.total = torch.zeros(width)
    if center:
        seen.signed, seen.balanced = torch.zeros(2, width)
        seen.weight = torch.zeros(())
    return seen


@dataclass(slots=True)
class WalkedLayer:
    """One layer, rotated, smoothed and still in float: its tensors by name, and what its products and cache saw.

    `shape`: what its last product does to its input before rounding, None for nothing. `means`: of the centered
    products the means [I] that were taken off what they saw, and what the float product makes of those [O]. `alphas`:
    of the products whose input was smoothed, None where searching found nothing better than leaving it.
    """

    index: int
    tensors: dict[str, torch.Tensor]
    shape: InputShape | None = None
    seen: dict[str, Seen] = field(default_factory=dict)
    means: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    alphas: dict[str, float | None] = field(default_factory=dict)
    cache: dict[str, CacheSeen] = field(default_factory=dict)
    identity_error: float = 0.0
