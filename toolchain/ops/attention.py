"""`dtool::FusedAttention`: one attention op with a linear in-place KV cache.

For a row with `p` cached tokens and T new ones, token i (0 <= i < T) sits at position p + i:

    q, k          rotated by R(p + i)                                  RoFormer, arXiv 2104.09864 eq. 34
    cache[p + i]  = k, v   (quantized: clamp(round(x / scale), -128, 127), one scale per KV head)
    out_i         = softmax(scale * q_i . K[0..p+i]) . V[0..p+i]       arXiv 1706.03762 eq. 1

Query head h reads KV head h // (H / K) (grouped-query attention, arXiv 2305.13245). Positions come
from the cache length alone, so a padded row always sees at least its own token and no row is ever
fully masked. Slots beyond p + i are never read, whatever they hold. New keys and values are read
back from the cache, so that a token attends to what later tokens will see.

This file holds life 1 and the shape rules: the plain torch computation, in place on the caches,
and the traceable torch op. `function_body` is life 2.

Legend: B batch, T new tokens, C capacity, H query heads, K KV heads, D head dim, P positions, S slots
seen, G query heads of a KV head, R = G * T.
"""

from dataclasses import dataclass

import torch

from toolchain.numerics import dequantize, quantize

ABI = 1
"""Version of the op's inputs and attributes; a graph of another abi is refused by the plugin."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attributes of one attention node."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary_dim: int
    cache_format: str

    @property
    def quantized(self) -> bool:
        """Whether the cache holds codes with scales instead of values."""
        return self.cache_format == "int8"


def rotate(x_BTND: torch.Tensor, cos_BT1R: torch.Tensor, sin_BT1R: torch.Tensor) -> torch.Tensor:
    """Rotate half-split pairs (i, i + R) of the first 2R dims; the rest passes unchanged."""
    half = cos_BT1R.shape[-1]
    first, second, rest = x_BTND[..., :half], x_BTND[..., half : 2 * half], x_BTND[..., 2 * half :]
    rotated = (first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R, rest)
    return torch.cat(rotated, dim=-1)


def attend_in_place(
    q_BTE: torch.Tensor,
    k_BTE: torch.Tensor,
    v_BTE: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    past_lengths_B: torch.Tensor,
    key_cache_BKCD: torch.Tensor,
    value_cache_BKCD: torch.Tensor,
    key_scale_K: torch.Tensor | None,
    value_scale_K: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """The attention output [B, T, H*D]; writes the new keys and values into the caches.

    The caches are fp tensors of the compute dtype, or int8 with float32 scales [K]. The caller has
    checked that past + T fits the capacity.
    """
    batch, new = q_BTE.shape[:2]
    groups = spec.num_heads // spec.num_kv_heads
    q_BTHD = q_BTE.reshape(batch, new, spec.num_heads, spec.head_dim)
    k_BTKD = k_BTE.reshape(batch, new, spec.num_kv_heads, spec.head_dim)
    v_BTKD = v_BTE.reshape(batch, new, spec.num_kv_heads, spec.head_dim)

    positions_BT = past_lengths_B[:, None] + torch.arange(new, device=q_BTE.device)
    cos_BT1R = cos_PR[positions_BT][:, :, None].to(q_BTE.dtype)
    sin_BT1R = sin_PR[positions_BT][:, :, None].to(q_BTE.dtype)
    q_BTHD, k_BTKD = rotate(q_BTHD, cos_BT1R, sin_BT1R), rotate(k_BTKD, cos_BT1R, sin_BT1R)

    seen = int(past_lengths_B.max()) + new
    keys_BKSD = _store(key_cache_BKCD, k_BTKD, key_scale_K, positions_BT, seen)
    values_BKSD = _store(value_cache_BKCD, v_BTKD, value_scale_K, positions_BT, seen)

    slots_S = torch.arange(seen, device=q_BTE.device)
    written_B1S1 = (slots_S < past_lengths_B[:, None] + new)[:, None, :, None]
    values_BKSD = values_BKSD.masked_fill(~written_B1S1, 0.0)  # 0 * NaN would be NaN
    # the query heads of a group stand in the rows of one product, so that K and V are not repeated
    rows = groups * new
    q_BKRD = q_BTHD.transpose(1, 2).reshape(batch, spec.num_kv_heads, rows, spec.head_dim)
    scores_BKRS = (q_BKRD.float() @ keys_BKSD.float().mT) * spec.scale
    scores_BKGTS = scores_BKRS.reshape(batch, spec.num_kv_heads, groups, new, seen)
    hidden_BTS = slots_S > positions_BT[:, :, None]
    scores_BKGTS = scores_BKGTS.masked_fill(hidden_BTS[:, None, None], float("-inf"))
    weights_BKRS = scores_BKGTS.softmax(-1).to(q_BTE.dtype).reshape(batch, spec.num_kv_heads, rows, seen)
    out_BKRD = (weights_BKRS.float() @ values_BKSD.float()).to(q_BTE.dtype)
    out_BHTD = out_BKRD.reshape(batch, spec.num_heads, new, spec.head_dim)
    return out_BHTD.transpose(1, 2).reshape(batch, new, -1)


def _store(
    cache_BKCD: torch.Tensor,
    x_BTKD: torch.Tensor,
    scale_K: torch.Tensor | None,
    positions_BT: torch.Tensor,
    seen: int,
) -> torch.Tensor:
    """Write the new tokens and return slots 0..seen-1 as values of the compute dtype."""
    rows_B1 = torch.arange(x_BTKD.shape[0], device=x_BTKD.device)[:, None]
    scale_K11 = None if scale_K is None else scale_K[:, None, None]
    stored = x_BTKD.to(cache_BKCD.dtype) if scale_K is None else quantize(x_BTKD, scale_K[:, None])
    cache_BKCD[rows_B1, :, positions_BT] = stored
    visible = cache_BKCD[:, :, :seen]
    return visible if scale_K11 is None else dequantize(visible, scale_K11).to(x_BTKD.dtype)


@torch.library.custom_op("dtool::fused_attention", mutates_args=())
def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    past_lengths: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    rotary_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The traceable form, without side effects: output and both caches after the write."""
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, scale, rotary_dim, "none")
    key_cache, value_cache = past_key.clone(), past_value.clone()
    out = attend_in_place(q, k, v, cos, sin, past_lengths, key_cache, value_cache, None, None, spec)
    return out, key_cache, value_cache


@fused_attention.register_fake
def _shapes(q, k, v, cos, sin, past_lengths, past_key, past_value, *_):  # noqa: ANN001, ANN002, ANN202, ARG001
    return torch.empty_like(q), torch.empty_like(past_key), torch.empty_like(past_value)
