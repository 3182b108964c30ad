"""Smoothed keys: every channel of a head of K reaches as far as the others, so that one scale serves them all.

    k' = k / s,   q' = s q     so that  q' . k' = q . k        SmoothAttention, QServe, arXiv 2405.04532, 4.2
    s_j = max(amax(k_j), amax(k_i)),  i the other channel of j's rotary pair

RoPE turns a pair of channels into one another, so both are divided by one factor, before the rotation as behind it;
channels that are not rotated have a factor each. It is folded where K and Q are made: into the rows of W_k and W_q and
their biases, or, where a norm follows those, into its weights. All query heads of a KV head take its factors.

QServe raises s to a power of 0.5. Here q stays in float and the power is 1, which is best: with one scale per head
the error of a score is of variance  sum_j (q_j s_j)^2 d^2,  d = max_j(amax(k_j) / s_j) / qmax,  and among all s with
that maximum none has smaller s_j than s_j = amax(k_j). Rows of weights have scales of their own: nothing is lost there.

A channel that is not rotated may also lose a constant: q . (k_j - c) = q . k_j - q . c lowers all scores of a query
alike, which softmax does not see (SageAttention, arXiv 2410.02367, 4.2). With a bias to hold it, the middle of its
range is taken off; a soft cap would see it. Behind a rotation no constant before it is one.

Legend: K KV heads, H query heads, D head dim.
"""

from typing import Any

import torch

from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig
from toolchain.quantize.cache_scales import CacheSeen
from toolchain.quantize.smoothing import LARGEST, SMALLEST


def check_keys(config: DecoderConfig) -> None:
    """Raises DtoolError naming what of the model stands between K and a factor on it."""
    obstacles = {
        "keys and queries that are clipped": bool(config.qkv_clip),
        "norms of keys and queries without a weight": config.qk_norm in {"head", "width"} and not config.norm_weight,
    }
    found = [what for what, there in obstacles.items() if there]
    if found:
        raise DtoolError(
            "smoothing.keys is no identity for this model",
            expected="a matrix or the weight of a norm whose output is the key",
            found=", ".join(found),
            fix="--set smoothing.keys=false, or kv_cache.granularity=token",
        )


def partners(config: DecoderConfig, layer: int) -> torch.Tensor:
    """For each channel of a head, int64 [D], the one that the layer's rotation mixes it with: itself where none."""
    partner_D, rotated = torch.arange(config.head_dim), config.rotary_dim
    if config.layer(layer).rope == "no_rope":
        return partner_D
    if config.rope_interleaved:
        partner_D[:rotated] ^= 1
    else:
        partner_D[:rotated] = partner_D[:rotated].roll(rotated // 2)
    return partner_D


def key_scale(amax_KD: torch.Tensor, partner_D: torch.Tensor, *, shared: bool) -> torch.Tensor:
    """The factors s [K, D] of keys that reach `amax_KD`, of geometric mean 1 in a head; 1 for channels that are zero.

    `shared`: all heads have one, as a norm's weight for all of them does.
    """
    size_KD = torch.maximum(amax_KD, amax_KD[:, partner_D])
    if shared:
        size_KD = size_KD.amax(0, keepdim=True).expand_as(size_KD)
    live_KD = size_KD > 0
    log_KD = size_KD.clamp_min(1e-30).log().where(live_KD, 0.0)
    middle_K1 = log_KD.sum(-1, keepdim=True) / live_KD.sum(-1, keepdim=True).clamp_min(1)
    return (log_KD - middle_K1).exp().clamp(SMALLEST, LARGEST).where(live_KD, 1.0)


@torch.no_grad()
def smooth_keys(block: Any, layer: int, seen: CacheSeen, config: DecoderConfig) -> None:
    """Even out the keys of a layer by what was seen of them, in place; `seen` becomes what the new ones would show."""
    partner_D = partners(config, layer)
    if _may_shift(config):
        middle_KD = ((seen.high_KD + seen.low_KD) / 2).where(partner_D == torch.arange(len(partner_D)), 0.0)
        q_rows, k_rows, _ = config.qkv_sizes
        block.self_attn.qkv_proj.bias[q_rows : q_rows + k_rows] -= middle_KD.flatten()
        seen.shift(middle_KD)
    scale_KD = key_scale(seen.amax_KD, partner_D, shared=config.qk_norm == "head")
    fold_keys(block, scale_KD, config)
    seen.divide(scale_KD)


def _may_shift(config: DecoderConfig) -> bool:
    """Whether K may lose a constant: it has a bias, and the scores go to the softmax as they are."""
    return config.qkv_bias and config.qk_norm == "none" and not config.attention_softcap


@torch.no_grad()
def fold_keys(block: Any, scale_KD: torch.Tensor, config: DecoderConfig) -> None:
    """Divide the keys by s and multiply the queries, in place: an identity before rounding.

    With a norm of one weight for all heads, those of `scale_KD` must be alike.
    """
    scale_HD = scale_KD.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0)
    attention = block.self_attn
    if config.qk_norm == "none":
        qkv, q_rows, k_rows = attention.qkv_proj, *config.qkv_sizes[:2]
        factor = torch.cat((scale_HD.flatten(), 1 / scale_KD.flatten()))
        qkv.weight[: q_rows + k_rows] *= factor[:, None]
        if qkv.bias is not None:
            qkv.bias[: q_rows + k_rows] *= factor
        return
    for norm, factor_ND in ((attention.q_norm, scale_HD), (attention.k_norm, 1 / scale_KD)):
        factor = (factor_ND[0] if config.qk_norm == "head" else factor_ND).flatten()
        offset = getattr(norm, "offset", 0.0)
        norm.weight.copy_((norm.weight + offset) * factor - offset)
