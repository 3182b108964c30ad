"""Static scales of a cache: what calibration saw of K and V, and the clip that its scales are made of.

    amax          c = max|x|                                   nothing is clipped
    percentile    c = the p-th percentile of |x|               1 - p / 100 of all values are clipped
    mse           c = argmin over clips of  sum_n h_n (v_n - s code(v_n / s))^2,   s = c / qmax
                  the range with the least squared error of rounding and clipping together, over a histogram h of
                  sizes v: Nagel et al., A White Paper on Neural Network Quantization, arXiv 2106.08295, 3.1

Each KV head has a clip of its own, K and V apart; with granularity `tensor` all heads of a layer share one.

Sizes are counted in a histogram for every channel, whatever the text's length: BINS counts over (-2^e, 2^e), e
the exponent of the channel's largest value. Where a value is beyond, e grows and whole bins are merged; as all
edges are powers of two times whole numbers, the counts are those of one pass with the final range, so neither the
order of the texts nor the size of a batch matters. A fixed number of the largest values would need less
memory, but knows nothing of the rounding error of all others, nor of channels that smoothing divides afterwards.

Legend: B batch, K KV heads, T tokens, D head dim, N bins.
"""

from dataclasses import dataclass
from typing import Self

import torch

from toolchain.numerics import dequantize, quantize, scale_from_amax
from toolchain.quantize.pieces import in_pieces
from toolchain.recipe_sections import KVCache

BINS = 4096
"""Of a channel, both signs together: at least eight to an INT8 step, as 2^e is below twice the largest value."""
MERGED = 8192
"""Bins of the sizes of a head, over all its channels."""
LEAST_EXPONENT = -100
CLIPS = torch.linspace(1.0, 0.2, 161)
"""Parts of the largest value that `mse` tries: a range of a fifth clips as much as four bits would ask for."""


@dataclass(slots=True)
class CacheSeen:
    """What the K or the V of one layer were on the calibration text, channel by channel.

    `low_KD`, `high_KD`: float32, the least and largest value. `counts_KDN`: int32, how often each size came; None
    where only the largest matters. `offset_KD`, `factor_KD`: what is subtracted, then divided, by `shift`, `divide`.
    """

    low_KD: torch.Tensor  # noqa: N815 - the shape suffix
    high_KD: torch.Tensor  # noqa: N815
    exponent_KD: torch.Tensor  # noqa: N815
    counts_KDN: torch.Tensor | None  # noqa: N815
    offset_KD: torch.Tensor  # noqa: N815
    factor_KD: torch.Tensor  # noqa: N815

    @classmethod
    def nothing(cls, heads: int, dim: int, *, histogram: bool) -> Self:
        """Before the first text."""
        zeros_KD = torch.zeros(heads, dim)
        low_KD, exponent_KD = zeros_KD + torch.inf, torch.full((heads, dim), LEAST_EXPONENT, dtype=torch.int32)
        counts_KDN = torch.zeros(heads, dim, BINS, dtype=torch.int32) if histogram else None
        return cls(low_KD, -low_KD, exponent_KD, counts_KDN, zeros_KD, zeros_KD + 1)

    def add(self, x_BKTD: torch.Tensor) -> None:
        """Take in one batch; a NaN stays one in the range, and what is not finite is not counted."""
        x_BKTD = x_BKTD.float()
        low_KD, high_KD = x_BKTD.amin((0, 2)), x_BKTD.amax((0, 2))
        self.low_KD, self.high_KD = torch.minimum(self.low_KD, low_KD), torch.maximum(self.high_KD, high_KD)
        size_KD = torch.maximum(-low_KD, high_KD)
        if self.counts_KDN is None or not bool(torch.isfinite(size_KD).all()):
            return
        self._widen(torch.frexp(size_KD).exponent.where(size_KD > 0, LEAST_EXPONENT))
        bins_BKTD = (x_BKTD / self.width_KD[:, None]).floor().long() + BINS // 2
        channels_KD = torch.arange(self.exponent_KD.numel()).reshape(self.exponent_KD.shape)
        index_N = (channels_KD[:, None] * BINS + bins_BKTD).flatten()
        self.counts_KDN.view(-1).scatter_add_(0, index_N, torch.ones_like(index_N, dtype=torch.int32))

    def _widen(self, exponent_KD: torch.Tensor) -> None:
        """Merge bins where values reach beyond the range."""
        assert self.counts_KDN is not None
        wider_KD = torch.maximum(self.exponent_KD, exponent_KD)
        merged_KD = (wider_KD - self.exponent_KD).clamp_max(BINS.bit_length())
        if bool(merged_KD.any()):
            centred_N = torch.arange(BINS) - BINS // 2
            target_KDN = (centred_N >> merged_KD[..., None].long()) + BINS // 2  # rounds down, as `floor` does
            self.counts_KDN = torch.zeros_like(self.counts_KDN).scatter_add_(-1, target_KDN, self.counts_KDN)
        self.exponent_KD = wider_KD

    def shift(self, offset_KD: torch.Tensor) -> None:
        """As if `offset_KD` had been subtracted from every value; before any `divide`."""
        self.offset_KD = self.offset_KD + offset_KD

    def divide(self, scale_KD: torch.Tensor) -> None:
        """As if every value had been divided by `scale_KD`."""
        self.factor_KD = self.factor_KD * scale_KD

    @property
    def width_KD(self) -> torch.Tensor:  # noqa: N802 - the shape suffix
        """The width of a channel's bins, a power of two: float32 [K, D]."""
        return torch.exp2(self.exponent_KD.float()) / (BINS // 2)

    @property
    def amax_KD(self) -> torch.Tensor:  # noqa: N802
        """The largest magnitude of every channel, float32 [K, D]."""
        reach_KD = torch.maximum(self.high_KD - self.offset_KD, self.offset_KD - self.low_KD)
        return reach_KD / self.factor_KD

    def sizes_of(self, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """How often each size of these heads came, over all their channels: counts float64 [MERGED] by upper edge."""
        assert self.counts_KDN is not None
        value_KDN = (torch.arange(BINS) - BINS // 2 + 0.5) * self.width_KD[heads, :, None]
        amax_KD = self.amax_KD[heads]
        size_KDN = (value_KDN - self.offset_KD[heads, :, None]).abs() / self.factor_KD[heads, :, None]
        width = float(amax_KD.max()) / MERGED
        bins_KDN = (torch.minimum(size_KDN, amax_KD[..., None]) / width).long().clamp_max(MERGED - 1)
        counts_N = torch.zeros(MERGED, dtype=torch.float64)
        counts_N.scatter_add_(0, bins_KDN.flatten(), self.counts_KDN[heads].flatten().double())
        return counts_N, (torch.arange(MERGED) + 1) * width


def needs_histogram(kv_cache: KVCache) -> bool:
    """Whether sizes must be counted."""
    return kv_cache.is_static and kv_cache.scale != "amax"


def cache_scale(seen: CacheSeen, kv_cache: KVCache) -> torch.Tensor:
    """float32 static scales [K] of a cache that held what was `seen`, one per head or one for all.

    Positive and finite. Raises ValueError where a value was inf or NaN.
    """
    amax_K = seen.amax_KD.amax(-1)
    if not bool(torch.isfinite(amax_K).all()):
        raise ValueError("the cache's values are not finite: the tensor holds inf or NaN")
    heads = (
        [slice(0, len(amax_K))] if kv_cache.granularity == "tensor" else [slice(k, k + 1) for k in range(len(amax_K))]
    )

    def clip(part: slice) -> torch.Tensor:
        return _clip(seen, part, amax_K[part].max(), kv_cache)

    clips = torch.stack(list(in_pieces(clip, heads)))
    return scale_from_amax(clips.expand_as(amax_K).contiguous(), kv_cache.format)


def _clip(seen: CacheSeen, heads: slice, amax: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
    """The largest magnitude [] that the codes of these heads reach."""
    if kv_cache.scale == "amax" or not float(amax) or (kv_cache.scale == "percentile" and kv_cache.percentile == 100):
        return amax
    counts_N, edges_N = seen.sizes_of(heads)
    if kv_cache.scale == "mse":
        return least_error_clip(counts_N, edges_N, kv_cache.format)
    wanted = counts_N.sum() * (kv_cache.percentile / 100)
    below = int(torch.searchsorted(counts_N.cumsum(0), wanted * (1 - 1e-12)))
    return torch.minimum(edges_N[min(below, MERGED - 1)], amax)


def least_error_clip(counts_N: torch.Tensor, edges_N: torch.Tensor, fmt: str) -> torch.Tensor:
    """The clip [] with the least squared error of sizes in bins that end at `edges_N`, each counted at its middle."""
    size_N = edges_N - edges_N[0] / 2
    scale_C1 = scale_from_amax(edges_N[-1] * CLIPS, fmt)[:, None]
    error_CN = dequantize(quantize(size_N, scale_C1, fmt), scale_C1) - size_N
    return edges_N[-1] * CLIPS[(error_CN.double().square() @ counts_N).argmin()]
