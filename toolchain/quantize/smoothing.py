"""Smoothing: channels that are large in the activations are made smaller there and larger in the weights.

    x' = x / s,   W' = W diag(s)        so that  x' W'^T = x W^T              SmoothQuant, arXiv 2211.10438 eq. 3
    s_j = amax(x_j)^alpha / amax(W_j)^(1 - alpha)                             its eq. 4: alpha moves the difficulty

Activation-aware scaling for weight-only formats (AWQ, arXiv 2306.00978 eq. 4) is the same folding with
s_j = mean|x_j|^alpha / amax(W_j)^(1 - alpha): weights that meet large inputs are rounded on a finer grid.

Dividing x costs nothing where what makes it can be divided instead: a norm's weight (and bias), the rows
of `up` before the product with the gate, the rows of V before attention. V's heads serve several query
heads, so they share one s. Where the norm multiplies by 1 + w, what is stored is (1 + w) / s - 1. All of it
is an identity before rounding, and `fold` is tested to be one for every family.

Legend: I inputs of a product, E hidden, F feed-forward, D head dim, K KV heads, G query heads of a KV head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolchain.model.config import DecoderConfig

SMALLEST, LARGEST = 1e-4, 1e4
"""Bounds of s relative to its middle: beyond them a half type loses what was gained."""


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
