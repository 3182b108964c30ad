"""Prefill: write the new keys and values, then FlashAttention over the cache.

    o_i = sum_j softmax_j(s_ij) V_j,   s_ij = scale q_i . K_j,   j <= past + i   (window, softcap)

computed tile by tile with the running softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1), in
base 2 with log2(e) folded into the scale. Two kernels: `cache_write` rotates, norms and rounds the new
keys once and stores them; `prefill` then finds every key, old or new, in one place, so the loop has
one source, and a token attends to what later tokens will see. The G query heads of a KV head stand
in the rows of one tile (row r: head r % G, token r // G): K and V are read once for all of them, and a
short prompt still fills a tile. Query rows are rotated in registers as they are loaded.

The key loop runs in up to three parts: tiles the window cuts, tiles every row sees whole (no mask
arithmetic at all), tiles the diagonal cuts. Long tiles start first, so the last wave is short.

Given up: the new keys cross memory once more (write, then read) than a kernel that keeps them in
registers; diagonal tiles are computed whole, half of their products masked; no split over keys, so a
chunk of few tokens over a long cache uses few multiprocessors.

Legend: M rows of a tile, E padded head dim, T new tokens.
"""

# Parameters of a Triton function are values of the device or constexpr; Python types say nothing of them.
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from toolchain.ops.kernels.codes import encode, head_scale, write_scale
from toolchain.ops.kernels.device import LOG2E, attend_ranges, rotated_rows


@triton.jit(do_not_specialize=["new_tokens", "capacity"])
def cache_write(
    qkv, cos, sin, past_lengths, key_cache, value_cache, key_scale, value_scale, k_norm, new_tokens, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_EPS: tl.constexpr, CACHE: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Store the new keys (normed, rotated) and values at slots past..past+T-1. Grid (ceil(T/BLOCK_T), K, B)."""
    kv_head, row = tl.program_id(1), tl.program_id(2)
    past = tl.load(past_lengths + row).to(tl.int32)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    position_T = past + token_T
    valid_T = (token_T < new_tokens) & (position_T < capacity)
    packed = qkv + row.to(tl.int64) * new_tokens * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    key_T = token_T * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + (HEADS + kv_head) * HEAD_DIM
    key_TE = rotated_rows(
        packed, key_T, position_T, valid_T, cos, sin, k_norm, ROTARY, INTERLEAVED, NORM_EPS, HEAD_DIM, PADDED,
        False,
    )  # fmt: skip
    dim_E = tl.arange(0, PADDED)
    stored_TE = valid_T[:, None] & (dim_E < HEAD_DIM)[None, :]
    value_TE = tl.load(packed + (key_T + KV_HEADS * HEAD_DIM)[:, None] + dim_E[None, :], stored_TE, 0.0)
    first_slot = (row.to(tl.int64) * KV_HEADS + kv_head) * capacity
    slot_TE = position_T[:, None] * HEAD_DIM + dim_E[None, :]
    factor = head_scale(key_scale, kv_head, CACHE, TOKEN_SCALES)
    scale_T1 = write_scale(key_TE, key_scale + first_slot, position_T, valid_T, factor, CACHE, TOKEN_SCALES)
    tl.store(key_cache + first_slot * HEAD_DIM + slot_TE, encode(key_TE, scale_T1, CACHE), stored_TE)
    factor = head_scale(value_scale, kv_head, CACHE, TOKEN_SCALES)
    scale_T1 = write_scale(value_TE, value_scale + first_slot, position_T, valid_T, factor, CACHE, TOKEN_SCALES)
    tl.store(value_cache + first_slot * HEAD_DIM + slot_TE, encode(value_TE, scale_T1, CACHE), stored_TE)


@triton.jit
def key_ranges(first, last, past, end, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots (start, whole_start, whole_end) of a tile of tokens first..last; masks are needed outside the whole."""
    whole_end = tl.minimum(past + first + 1, end) // BLOCK_N * BLOCK_N
    start = 0
    whole_start = 0
    if WINDOW > 0:
        start = tl.maximum(past + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole_start = tl.cdiv(tl.maximum(past + last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        whole_start = tl.minimum(whole_start, whole_end)
    return start, whole_start, whole_end


@triton.jit(do_not_specialize=["new_tokens", "capacity"])
def prefill(
    qkv, cos, sin, past_lengths, key_cache, value_cache, key_scale, value_scale, q_norm, out, new_tokens, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_EPS: tl.constexpr, CACHE: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Attention of the new tokens over the cache, already written. Grid (ceil(T*G/BLOCK_M), K, B)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, row = tl.program_id(1), tl.program_id(2)
    past = tl.load(past_lengths + row).to(tl.int32)
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token_M, head_M = row_M // GROUP, kv_head * GROUP + row_M % GROUP
    position_M = past + token_M
    valid_M = (token_M < new_tokens) & (position_M < capacity)
    packed = qkv + row.to(tl.int64) * new_tokens * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    query_M = token_M * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head_M * HEAD_DIM
    query_ME = rotated_rows(
        packed, query_M, position_M, valid_M, cos, sin, q_norm, ROTARY, INTERLEAVED, NORM_EPS, HEAD_DIM, PADDED,
        APART,
    )  # fmt: skip
    first = tile * BLOCK_M // GROUP
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, new_tokens - 1)
    end = tl.minimum(past + last + 1, capacity)
    start, whole_start, whole_end = key_ranges(first, last, past, end, WINDOW, BLOCK_N)
    first_slot = (row.to(tl.int64) * KV_HEADS + kv_head) * capacity
    keys, values = key_cache + first_slot * HEAD_DIM, value_cache + first_slot * HEAD_DIM
    scale = head_scale(key_scale, kv_head, CACHE, TOKEN_SCALES) * (SCALE if SOFTCAP > 0 else SCALE * LOG2E)
    acc_ME, _, total_M, unit = attend_ranges(
        query_ME, keys, values, key_scale + first_slot, value_scale + first_slot, position_M, start, whole_start,
        whole_end, end, scale, "causal", SOFTCAP, WINDOW, HEAD_DIM, PADDED, CACHE, TOKEN_SCALES, NATIVE, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    if not TOKEN_SCALES:
        unit = head_scale(value_scale, kv_head, CACHE, TOKEN_SCALES)
    # a row beyond the last token may have seen nothing; it is not stored
    some_M = tl.where(total_M > 0, total_M, 1.0)
    out_ME = acc_ME * (unit / some_M)[:, None]
    # rows are counted anew from a second read of `past`, which the compiler cannot know to be the same: their
    # offsets would otherwise fill registers through the whole loop
    again = tl.load(past_lengths + row, volatile=True).to(tl.int32) - past
    row_M = tile * BLOCK_M + again + tl.arange(0, BLOCK_M)
    token_M, head_M = row_M // GROUP, kv_head * GROUP + row_M % GROUP
    valid_M = (token_M < new_tokens) & (past + token_M < capacity)
    dim_E = tl.arange(0, PADDED)
    target = out + row.to(tl.int64) * new_tokens * (HEADS * HEAD_DIM)
    target_ME = target + (token_M * (HEADS * HEAD_DIM) + head_M * HEAD_DIM)[:, None] + dim_E[None, :]
    tl.store(target_ME, out_ME.to(out.dtype.element_ty), valid_M[:, None] & (dim_E < HEAD_DIM)[None, :])
