"""Rotation: bases in which no channel is large, so that one scale serves all of them.

    stream         x' = x R,  every reader W' = W diag(g) R,  every writer W' = R^T W    QuaRot, arXiv 2404.00456, 4.1
    values         V' = H^T V,  O' = O H per head: attention mixes tokens, not channels   SpinQuant, 2405.16406, 3.1
    feed forward   down(x) = (W K) (K^T x), K of blocks of at most BLOCK channels: its input comes from a product
                   of two others, so that K^T x is computed as the graph runs             QuaRot, 4.2

RMSNorm commutes with R once its weight g stands in the readers. The embedding, the last norm and the head stay
as they are, tied where they are tied: R enters behind the embedding and R^T before the last norm, two small
products. All of it is an identity before rounding, which the walk checks in every layer.

R is a random sign per channel times the Kronecker product of a Hadamard matrix (the power of two in the width)
and a Hartley matrix cas(2 pi j k / m) / sqrt(m) (the odd rest): orthogonal for any width, entries at most
sqrt(2) times the mean.

Legend: E hidden, F feed-forward, D head dim, N all heads of the values.
"""

import math
from typing import Any

import torch

from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig
from toolchain.quantize.pieces import matrix_product
from toolchain.recipe_sections import Rotation

BLOCK = 128
"""Most channels of one block of the feed-forward's rotation: its cost against that of the product is BLOCK / E."""


def rotation_matrix(width: int, seed: int = 0) -> torch.Tensor:
    """An orthogonal matrix [width, width], float64, of entries of much the same size; the same for a seed."""
    odd, hadamard = width, torch.ones(1, 1, dtype=torch.float64)
    while odd % 2 == 0:
        odd //= 2
        upper, lower = torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)
        hadamard = torch.cat((upper, lower), 0)
    steps = torch.arange(odd, dtype=torch.float64)
    angles = 2 * math.pi * (torch.outer(steps, steps) % odd) / odd
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return signs[:, None] * torch.kron(hadamard, torch.cos(angles) + torch.sin(angles)) / math.sqrt(width)


def block_width(width: int) -> int:
    """Channels of a block of the feed-forward's rotation: the largest divisor of `width` up to BLOCK."""
    return max(n for n in range(1, min(width, BLOCK) + 1) if width % n == 0)


def check_rotation(config: DecoderConfig, rotation: Rotation) -> None:
    """Raises DtoolError naming what of the model does not commute with the rotations asked for."""
    experts = any(layer.experts for layer in config.layers)
    normed = config.norm != "rms" or config.norm_placement != "pre" or config.norm_bias
    obstacles = {
        "stream": {"norms other than RMSNorm before each part": normed, "experts": experts},
        "values": {"values clipped between the product and attention": bool(config.qkv_clip)},
        "feed_forward": {"experts": experts},
    }
    for name, reasons in obstacles.items():
        found = [what for what, there in reasons.items() if there and getattr(rotation, name)]
        if found:
            raise DtoolError(
                f"rotation.{name} is no identity for this model",
                expected="RMSNorm before each part, and dense layers" if name == "stream" else "none of what was found",
                found=", ".join(found),
                fix=f"--set rotation.{name}=false",
            )


@torch.no_grad()
def rotate_stream(block: Any, rotation_EE: torch.Tensor) -> None:
    """A layer that reads and writes x R where it read and wrote x, in place."""
    first = "gate_up_proj" if block.mlp.gated else "up_proj"
    shared = [getattr(block.mlp, first)]
    readers = {block.input_layernorm: [block.self_attn.qkv_proj]}
    if block.shares_norm:
        readers[block.input_layernorm] += shared
    else:
        readers[block.post_attention_layernorm] = shared
    for norm, products in readers.items():
        multiplier_E = norm.multiplier()
        for product in products:
            weight = product.weight.double()
            weight = weight if multiplier_E is None else weight * multiplier_E.double()
            product.weight.copy_(matrix_product(weight, rotation_EE))
        if multiplier_E is not None:
            norm.weight.fill_(1.0 - norm.offset)
    for product in (block.self_attn.o_proj, block.mlp.down_proj):
        product.weight.copy_(matrix_product(rotation_EE.mT, product.weight.double()))
        if product.bias is not None:
            product.bias.copy_(product.bias.double() @ rotation_EE)


@torch.no_grad()
def rotate_values(block: Any, config: DecoderConfig) -> None:
    """A layer whose values, head by head, lie in the basis of `rotation_matrix(D)`, in place."""
    rotation_DD = rotation_matrix(config.head_dim)
    first = sum(config.qkv_sizes[:2])
    qkv, out = block.self_attn.qkv_proj, block.self_attn.o_proj
    values = qkv.weight[first:].double().unflatten(0, (-1, config.head_dim))
    turned = [matrix_product(rotation_DD.mT, value_DE) for value_DE in values]
    qkv.weight[first:] = torch.cat(turned).to(qkv.weight.dtype)
    if qkv.bias is not None:
        bias = qkv.bias[first:].double().unflatten(0, (-1, config.head_dim)) @ rotation_DD
        qkv.bias[first:] = bias.flatten().to(qkv.bias.dtype)
    heads = out.weight.double().unflatten(1, (-1, config.head_dim))
    out.weight.copy_(matrix_product(heads, rotation_DD).flatten(1))


@torch.no_grad()
def rotate_feed_forward(block: Any) -> torch.Tensor:
    """Put the last product's weight into the basis K of its input, in place; returns K [n, n], float64."""
    weight = block.mlp.down_proj.weight
    rotation_nn = rotation_matrix(block_width(weight.shape[1]))
    blocks = weight.double().unflatten(1, (-1, len(rotation_nn)))
    weight.copy_(matrix_product(blocks, rotation_nn).flatten(1))
    return rotation_nn
