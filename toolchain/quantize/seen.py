"""What calibration text shows: of one product's input its ranges, sums and second moments; of a layer all of it.

Legend: B batch, T tokens, N tokens of all texts, I inputs of a product.
"""

from dataclasses import dataclass, field

import torch

from toolchain.model.quantized import InputShape
from toolchain.quantize.cache_scales import CacheSeen


@dataclass(slots=True)
class Seen:
    """What one product's input was: of each channel [I] the range and the sum of sizes, its sum [I], and H [I, I].

    `balanced` is its sum with every token at the same length, `weight` the sum of those weights 1 / |x|^2: massive
    activations of a few tokens say nothing of the mean of all others.
    """

    low: torch.Tensor
    high: torch.Tensor
    total: torch.Tensor
    signed: torch.Tensor
    balanced: torch.Tensor
    weight: torch.Tensor
    tokens: int = 0
    hessian: torch.Tensor | None = None

    @property
    def amax(self) -> torch.Tensor:
        """The largest magnitude of each channel [I]."""
        return torch.maximum(self.high, -self.low)

    @property
    def center(self) -> torch.Tensor:
        """The mean of each channel [I], every token weighing 1 / |x|^2."""
        return self.balanced / self.weight.clamp_min(1e-30)

    def reach(self, center_I: torch.Tensor) -> torch.Tensor:
        """How far each channel [I] reaches from a center."""
        return torch.maximum(self.high - center_I, center_I - self.low)

    def add(self, x_BTI: torch.Tensor) -> None:
        """Take in one batch."""
        x_NI = x_BTI.float().flatten(0, -2)
        weight_N = 1 / torch.linalg.vector_norm(x_NI, dim=1).square().clamp_min(1e-30)
        once_N = torch.ones(len(x_NI))  # a product takes half the time of a sum over rows
        self.low, self.high = torch.minimum(self.low, x_NI.amin(0)), torch.maximum(self.high, x_NI.amax(0))  # NaN stays
        self.total = self.total + once_N @ x_NI.abs()
        self.signed = self.signed + once_N @ x_NI
        self.balanced = self.balanced + weight_N @ x_NI
        self.weight = self.weight + weight_N.sum()
        self.tokens += len(x_NI)
        if self.hessian is not None:
            self.hessian.addmm_(x_NI.mT, x_NI)

    def divide(self, scale_I: torch.Tensor) -> None:
        """As if every input had been divided by `scale_I`."""
        self.low, self.high, self.total = self.low / scale_I, self.high / scale_I, self.total / scale_I
        self.signed, self.balanced = self.signed / scale_I, self.balanced / scale_I
        if self.hessian is not None:
            self.hessian.div_(scale_I[:, None]).div_(scale_I[None, :])

    def shift(self, center_I: torch.Tensor) -> None:
        """As if every input had been `center_I` less."""
        self.low, self.high = self.low - center_I, self.high - center_I
        if self.hessian is not None:
            about_I = self.signed - self.tokens * center_I / 2
            self.hessian.addr_(about_I, center_I, alpha=-1).addr_(center_I, about_I, alpha=-1)
        self.signed = self.signed - self.tokens * center_I


def nothing_seen(width: int, *, hessian: bool = False) -> Seen:
    """Before any text, of a product of `width` inputs."""
    hessian_II = torch.zeros(width, width) if hessian else None
    low_I, high_I, total_I, signed_I, balanced_I = torch.zeros(5, width)
    return Seen(low_I, high_I, total_I, signed_I, balanced_I, torch.zeros(()), hessian=hessian_II)


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
