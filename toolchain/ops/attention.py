"""`dtool::FusedAttention`: one attention op with a linear in-place KV cache.

For a row with `p` cached tokens and T new ones, token i (0 <= i < T) sits at position p + i:

    q, k          normed per head (if asked):  x / sqrt(mean(x^2) + eps) * w    arXiv 1910.07467 eq. 4
    q, k          rotated by R(p + i) over the first rotary_dim dims            RoFormer, arXiv 2104.09864 eq. 34
    cache[p + i]  = k, v   (quantized: code of x / scale, for K and V apart, with
                            one static scale per KV head, or scale = max|x| / qmax of this token and KV head,
                            kept in the cache beside its code)
    s_ij          = scale * q_i . K[j];  cap * tanh(s / cap) if capped          Gemma 2, arXiv 2408.00118
    out_i         = softmax_j(s_ij) . V[j]    over  p + i - window < j <= p + i   arXiv 1706.03762 eq. 1

`qkv` is the packed projection: H query heads, then K key heads, then K value heads of D dims each, so
one product makes it. Query head h reads KV head h // (H / K) (grouped-query attention, arXiv
2305.13245). A window of w sees w tokens, the token itself among them (0: all of them). Positions come
from the cache length alone, so a padded row always sees at least its own token and no row is ever
fully masked. Slots beyond p + i are never read, whatever they hold. New keys and values are read
back from the cache, so that a token attends to what later tokens will see.

This file holds life 1 and the shape rules: the plain torch computation, in place on the caches,
and the traceable torch op. `function_body` is life 2, `kernels` and `plugin` are life 3.

Legend: B batch, T new tokens, C capacity, H query heads, K KV heads, D head dim, P positions, S slots
seen, G query heads of a KV head, R = G * T, N = (H + 2 K) D packed width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812 - the usual name

from toolchain.numerics import dequantize, quantize, token_scale

ABI = 3
"""Version of the op's inputs and attributes; a graph of another abi is refused by the plugin."""

QUERY_PART = 128
"""Queries whose scores are in memory at once: a long prompt costs half of T x T, and memory that grows with T alone."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attributes of one attention node. Zero turns softcap, window and qk_norm_eps (QK-norm) off.

    `token_scales`: each token of a quantized cache has scales of its own, in the cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary_dim: int
    cache_format: str
    interleaved: bool = False
    softcap: float = 0.0
    window: int = 0
    qk_norm_eps: float = 0.0
    token_scales: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the cache holds codes with scales instead of values."""
        return self.cache_format != "none"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed per head before rotation."""
        return self.qk_norm_eps > 0

    @property
    def packed_width(self) -> int:
        """Elements of one token of `qkv`: (H + 2 K) D."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def rotate(
    x_BTND: torch.Tensor, cos_BT1R: torch.Tensor, sin_BT1R: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the first 2R dims in pairs (i, i + R), or (2i, 2i + 1) when interleaved; the rest passes."""
    half = cos_BT1R.shape[-1]
    turned, rest = x_BTND[..., : 2 * half], x_BTND[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pairs = (first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((rotated, rest), dim=-1)


def attend_in_place(
    qkv_BTN: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    past_lengths_B: torch.Tensor,
    key_cache_BKCD: torch.Tensor,
    value_cache_BKCD: torch.Tensor,
    spec: AttentionSpec,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms_D: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The attention output [B, T, H*D]; writes the new keys and values into the caches.

    The caches are fp tensors of the compute dtype, or codes (int8, float8_e4m3fn) with float32
    `scales` for K and V: static ones [K], or with `token_scales` those of every slot [B, K, C], which
    are written as the caches are. `norms_D` are the weights of QK-norm for q and k. The caller has
    checked that past + T fits the capacity.
    """
    batch, new = qkv_BTN.shape[:2]
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    packed_BTXD = qkv_BTN.reshape(batch, new, heads + 2 * kv_heads, dim)
    q_BTHD, k_BTKD, v_BTKD = packed_BTXD.split((heads, kv_heads, kv_heads), dim=2)
    if norms_D is not None:
        q_BTHD, k_BTKD = (_norm(x, w, spec.qk_norm_eps) for x, w in zip((q_BTHD, k_BTKD), norms_D, strict=True))

    positions_BT = past_lengths_B[:, None] + torch.arange(new, device=qkv_BTN.device)
    rope = (table_PR[positions_BT][:, :, None].to(qkv_BTN.dtype) for table_PR in (cos_PR, sin_PR))
    cos_BT1R, sin_BT1R = rope
    q_BTHD = rotate(q_BTHD, cos_BT1R, sin_BT1R, interleaved=spec.interleaved)
    k_BTKD = rotate(k_BTKD, cos_BT1R, sin_BT1R, interleaved=spec.interleaved)

    seen = int(past_lengths_B.max()) + new
    key_scale, value_scale = scales or (None, None)
    keys_BKSD = _store(key_cache_BKCD, k_BTKD, key_scale, positions_BT, seen, spec)
    values_BKSD = _store(value_cache_BKCD, v_BTKD, value_scale, positions_BT, seen, spec)

    written_BS = torch.arange(seen, device=qkv_BTN.device) < past_lengths_B[:, None] + new
    values_BKSD = values_BKSD.masked_fill(~written_BS[:, None, :, None], 0.0)  # 0 * NaN would be NaN
    out_parts = []
    for first in range(0, new, QUERY_PART):  # no query sees a slot beyond its own: what is above them is left out
        part, end = slice(first, first + QUERY_PART), seen - new + min(first + QUERY_PART, new)
        sees_BKsD = keys_BKSD[:, :, :end], values_BKSD[:, :, :end]
        out_parts.append(_attend(q_BTHD[:, part], *sees_BKsD, positions_BT[:, part], spec))
    return torch.cat(out_parts, dim=1)


def _attend(
    q_BTHD: torch.Tensor,
    keys_BKSD: torch.Tensor,
    values_BKSD: torch.Tensor,
    positions_BT: torch.Tensor,
    spec: AttentionSpec,
) -> torch.Tensor:
    """What the queries at some positions read of the slots up to their own: [B, T, H*D]."""
    batch, new, heads, dim = q_BTHD.shape
    kv_heads, seen = keys_BKSD.shape[1:3]
    # the query heads of a group stand in the rows of one product, so that K and V are not repeated
    groups = heads // kv_heads
    q_BKRD = q_BTHD.transpose(1, 2).reshape(batch, kv_heads, groups * new, dim)
    scores_BKRS = (q_BKRD.float() @ keys_BKSD.float().mT).mul_(spec.scale)
    if spec.softcap:
        scores_BKRS = spec.softcap * torch.tanh(scores_BKRS / spec.softcap)
    scores_BKGTS = scores_BKRS.reshape(batch, kv_heads, groups, new, seen)
    first = 0 if spec.window else int(positions_BT.min()) + 1  # slots before it hide from none
    slots_s = torch.arange(first, seen, device=q_BTHD.device)
    hidden_BTs = slots_s > positions_BT[:, :, None]
    if spec.window:
        hidden_BTs = hidden_BTs | (slots_s <= positions_BT[:, :, None] - spec.window)
    most_BTs = torch.where(hidden_BTs, float("-inf"), float("inf"))  # fmin: a fill with -inf, in a third of the time
    scores_BKGTs = scores_BKGTS[..., first:]
    torch.fmin(scores_BKGTs, most_BTs[:, None, None], out=scores_BKGTs)
    weights_BKRS = scores_BKGTS.softmax(-1).to(q_BTHD.dtype).reshape(batch, kv_heads, groups * new, seen)
    out_BKRD = (weights_BKRS.float() @ values_BKSD.float()).to(q_BTHD.dtype)
    out_BHTD = out_BKRD.reshape(batch, heads, new, dim)
    return out_BHTD.transpose(1, 2).reshape(batch, new, -1)


def _norm(x_BTND: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x_BTND.float(), (x_BTND.shape[-1],), weight_D.float(), eps).to(x_BTND.dtype)


def _store(
    cache_BKCD: torch.Tensor,
    x_BTKD: torch.Tensor,
    scale: torch.Tensor | None,
    positions_BT: torch.Tensor,
    seen: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Write the new tokens and return slots 0..seen-1 as values of the compute dtype."""
    rows_B1 = torch.arange(x_BTKD.shape[0], device=x_BTKD.device)[:, None]
    if scale is None:
        cache_BKCD[rows_B1, :, positions_BT] = x_BTKD.to(cache_BKCD.dtype)
        return cache_BKCD[:, :, :seen]
    if spec.token_scales:
        new_BTK1 = token_scale(x_BTKD, spec.cache_format)
        scale[rows_B1, :, positions_BT] = new_BTK1.squeeze(-1)
        read_BKS1 = scale[:, :, :seen, None]
    else:
        new_BTK1, read_BKS1 = scale[None, None, :, None], scale[None, :, None, None]
    codes = quantize(x_BTKD, new_BTK1, spec.cache_format)
    # bytes are moved as bytes: torch cannot index float8 tensors on every device
    cache_BKCD.view(torch.int8)[rows_B1, :, positions_BT] = codes.view(torch.int8)
    return dequantize(cache_BKCD[:, :, :seen], read_BKS1).to(x_BTKD.dtype)


@torch.library.custom_op("dtool::fused_attention", mutates_args=())
def fused_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    past_lengths: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    norms: Sequence[torch.Tensor],
    num_heads: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The op as the exporter sees it: output and both caches after the write. Shapes alone: never computed.

    `norms`: the weights of QK-norm for q and k, or none.
    """
    raise NotImplementedError("fused_attention is traced, not run: attend_in_place computes it")


@fused_attention.register_fake
def _shapes(qkv, cos, sin, past_lengths, past_key, past_value, norms, num_heads, num_kv_heads):  # noqa: ANN001, ANN202, ARG001
    width = qkv.shape[-1] // (num_heads + 2 * num_kv_heads) * num_heads
    return qkv.new_empty(*qkv.shape[:2], width), torch.empty_like(past_key), torch.empty_like(past_value)
