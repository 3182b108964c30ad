"""Smoothing: channels that are large in the activations are made smaller there and larger in the weights.

    x' = x / s,   W' = W diag(s)        so that  x' W'^T = x W^T              SmoothQuant, arXiv 2211.10438 eq. 3
    s_j = amax(x_j)^alpha / amax(W_j)^(1 - alpha)                             its eq. 4: alpha moves the difficulty

Activation-aware scaling for weight-only formats (AWQ, arXiv 2306.00978 eq. 4) is the same folding with
s_j = mean|x_j|^alpha / amax(W_j)^(1 - alpha): weights that meet large inputs are rounded on a finer grid.

Dividing x costs nothing where what makes it can be divided instead: a norm's weight (and bias), the rows
of `up` before the product with the gate, the rows of V before attention. V's heads serve several query
heads, so they share one s. Where the norm multiplies by 1 + w, what is stored is (1 + w) / s - 1. All of it
is an identity before rounding, and `fold` is tested to be one for every family.

Searched, alpha is of each input the one that minimises the mean over a text's tokens of
|x W^T - Q(x / s) Q(W diag(s))^T|^2 / |x W^T|^2. AWQ does so in its section 3.2 for weights alone, and does not divide:
then a token with massive activations decides alone. 1 for all of s is among the tried.

Legend: I inputs of a product, E hidden, F feed-forward, D head dim, K KV heads, G query heads of a KV head.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolchain.model.config import DecoderConfig
from toolchain.numerics import dequantize, quantize, scale_from_amax, token_scale
from toolchain.quantize.pieces import in_pieces
from toolchain.recipe_sections import Activations

SMALLEST, LARGEST = 1e-4, 1e4
"""Bounds of s relative to its middle: beyond them a half type loses what was gained."""


ALPHAS = tuple(step / 10 for step in range(11))
SEEN_SHARE = 0.8
"""Of a static range, for the search. The text that is searched on is part of the text that gave the range, and never
clipped; text to come reaches further in some channels, the more so where alpha makes all channels reach the range."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A product that reads an input: its matrix [O, I], and how both sides are rounded; None where one stays in float.

    `group_size`: of an int4 matrix, 0 for a scale per channel. `center` and `amax` [I]: what is taken off the input
    before it is rounded, and how far it reaches from there on all of the text.
    """

    weight: torch.Tensor
    weight_format: str | None
    group_size: int
    activations: Activations | None
    center: torch.Tensor
    amax: torch.Tensor

    def error(self, x_NI: torch.Tensor, scale_I: torch.Tensor) -> float:
        """Share of a token's outputs that rounding to the nearest adds, by squares, the input divided by `scale_I`."""
        wanted_NO = x_NI @ self.weight.mT
        x_NI = x_NI - self.center
        shown_OI, weight_OI, rounded_NI = self.weight, self.weight * scale_I, x_NI / scale_I
        if self.weight_format is not None:
            groups_OGg = weight_OI.unflatten(-1, (-1, self.group_size or weight_OI.shape[1]))
            scale_OG1 = scale_from_amax(groups_OGg.abs().amax(-1, keepdim=True), self.weight_format)
            shown_OI = dequantize(quantize(groups_OGg, scale_OG1, self.weight_format), scale_OG1).flatten(1) / scale_I
        if self.activations is not None:
            fmt = self.activations.format
            static, reach = self.activations.is_static, (self.amax / scale_I).max()
            step = scale_from_amax(SEEN_SHARE * reach, fmt) if static else token_scale(rounded_NI, fmt)
            rounded_NI = dequantize(quantize(rounded_NI, step, fmt), step)
        error_NO = wanted_NO - self.weight @ self.center - (rounded_NI * scale_I) @ shown_OI.mT
        return float((error_NO.square().sum(1) / wanted_NO.square().sum(1).clamp_min(1e-30)).mean())


@dataclass(frozen=True, slots=True)
class Site:
    """One input that can be divided: what makes it, and the products of the layer that read it.

    `maker`: a norm, or the matrix whose rows are divided; the first of `readers` names the site.
    """

    maker: str
    readers: tuple[str, ...]


def sites(config: DecoderConfig, layer: int) -> tuple[Site, ...]:
    """The inputs of one layer that can be divided, in the order they are computed."""
    found: list[Site] = []
    shares_norm = config.parallel_residual and config.parallel_norms == 1
    normed = config.norm_placement in {"pre", "sandwich"} and config.norm_weight
    experts = config.layer(layer).experts
    first = "mlp.gate_up_proj" if config.gated_mlp else "mlp.up_proj"
    feed_forward = () if experts else (first,)
    if normed and not (shares_norm and experts):
        shared = feed_forward if shares_norm else ()
        found.append(Site("input_layernorm", ("self_attn.qkv_proj", *shared)))
    if not config.qkv_clip:
        found.append(Site("self_attn.qkv_proj", ("self_attn.o_proj",)))
    if normed and not shares_norm and feed_forward:
        found.append(Site("post_attention_layernorm", feed_forward))
    if config.gated_mlp and not experts:
        found.append(Site("mlp.gate_up_proj", ("mlp.down_proj",)))
    return tuple(found)


def smoothing_scale(inputs_I: torch.Tensor, weights_I: torch.Tensor, alpha: float) -> torch.Tensor:
    """S [I] from the size of every input and of the weights that meet it; channels that are always zero get 1."""
    dead_I = (inputs_I <= 0) | (weights_I <= 0)
    scale_I = inputs_I.clamp_min(1e-30) ** alpha / weights_I.clamp_min(1e-30) ** (1 - alpha)
    scale_I = torch.where(dead_I, torch.ones_like(scale_I), scale_I)
    middle = scale_I.log().mean().exp()  # a common factor changes nothing but the numbers' range
    return torch.where(dead_I, torch.ones_like(scale_I), (scale_I / middle).clamp(SMALLEST, LARGEST))


def least_error(
    candidates: Iterable[tuple[float, torch.Tensor]], readers: Sequence[Reader], x_NI: torch.Tensor
) -> tuple[float | None, torch.Tensor]:
    """The (alpha, s [I]) whose readers err least together; alpha None and s = 1 where none is better than that."""
    best, plain_I = None, torch.ones(x_NI.shape[1])
    tried = [(best, plain_I), *candidates]

    def error_of(scale_I: torch.Tensor) -> float:
        return sum(reader.error(x_NI, scale_I) for reader in readers)

    least, found_I = math.inf, plain_I
    for (alpha, scale_I), error in zip(tried, in_pieces(error_of, [scale_I for _, scale_I in tried]), strict=True):
        if error < least:
            best, least, found_I = alpha, error, scale_I
    return best, found_I


def shared_by_heads(scale_I: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """S of the attention output [H * D] with one value per channel of a KV head: the largest of its query heads."""
    kv_heads, dim = config.num_key_value_heads, config.head_dim
    groups_KGD = scale_I.reshape(kv_heads, -1, dim)
    return groups_KGD.amax(1, keepdim=True).expand_as(groups_KGD).reshape(-1)


@torch.no_grad()
def fold(block: Any, site: Site, scale_I: torch.Tensor, config: DecoderConfig) -> None:
    """Divide the site's input by s and multiply its readers' columns, in place: an identity before rounding."""
    maker = block.get_submodule(site.maker)
    if site.maker.endswith("layernorm"):
        maker.weight.copy_((maker.weight + maker.offset) / scale_I - maker.offset)
        if maker.bias is not None:
            maker.bias.div_(scale_I)
    elif site.maker.endswith("qkv_proj"):
        q_rows, k_rows, _ = config.qkv_sizes
        scale_KD = scale_I.reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0].reshape(-1)
        _divide_rows(maker, slice(q_rows + k_rows, None), scale_KD)
    else:
        _divide_rows(maker, slice(maker.weight.shape[0] // 2, None), scale_I)
    for reader in site.readers:
        block.get_submodule(reader).weight.mul_(scale_I)


def _divide_rows(linear: Any, rows: slice, scale: torch.Tensor) -> None:
    linear.weight[rows].div_(scale[:, None])
    if linear.bias is not None:
        linear.bias[rows].div_(scale)


def weight_sizes(block: Any, readers: Sequence[str]) -> torch.Tensor:
    """The largest weight that meets each input [I], over all readers."""
    return torch.stack([block.get_submodule(name).weight.abs().amax(0) for name in readers]).amax(0)
