"""Decode: one new token a row, its cache split over many programs (Flash-Decoding, Dao et al. 2023).

With T = 1 there are only K * B tiles of queries, too few for a GPU, and the time is that of reading
the cache once. So the seen slots of each (row, KV head) are cut into `splits` pieces; a program folds its
piece with the running softmax of FlashAttention-2 and leaves a normalised result o_s with the
logarithm of its weight sum l_s, and `decode_merge` combines them exactly:

    o = sum_s 2^(l_s - l) o_s,   l = log2 sum_s 2^l_s        (arXiv 2307.08691, section 3.1)

The G query heads of a KV head share the rows of one product (padded to 16, the least a tensor core
takes), so K and V cross memory once whatever G is. The split that owns the newest slot makes its key and
value itself, stores them, and adds them from registers, round-tripped through the cache's format: no
other launch is needed before, and no program depends on another's store. Every tile is masked at its
end: the loop waits for memory, so predicates cost nothing and there is no second loop to drain.

Given up: float32 partials cross memory (B H splits D words, small beside the cache); with G < 16 most
of each product is padding; a piece is whole tiles, so the last may be short or empty.

Legend: M padded query heads, E padded head dim, S splits of a block.
"""

# Parameters of a Triton function are values of the device or constexpr; Python types say nothing of them.
# ruff: noqa: ANN001, ANN201
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from toolchain.ops.kernels.codes import encode, head_scale, write_scale
from toolchain.ops.kernels.device import LOG2E, attend_ranges, rotated_rows, softcap


@triton.jit
def piece(split, splits, seen, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots (start, stop) of a split: the visible ones in `splits` pieces of whole tiles; may be empty."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seen - WINDOW, 0)
    length = tl.cdiv(tl.cdiv(seen - first, splits), BLOCK_N) * BLOCK_N
    start = first + split * length
    return start, start + length


@triton.jit
def write_newest(
    packed, kv_head, past, cos, sin, keys, values, key_scales, value_scales, key_factor, value_factor, k_norm,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_EPS: tl.constexpr, CACHE: tl.constexpr, TOKEN_SCALES: tl.constexpr,
):  # fmt: skip
    """Make and store the newest key and value; return both as the cache holds them, float32 codes [1, E].

    With TOKEN_SCALES their own scales, stored too, are multiplied in.
    """
    one = tl.arange(0, 1)
    dim_E = tl.arange(0, PADDED)
    stored = (one == 0)[:, None] & (dim_E < HEAD_DIM)[None, :]
    key_row = one + (HEADS + kv_head) * HEAD_DIM
    key = rotated_rows(
        packed, key_row, one + past, one == 0, cos, sin, k_norm, ROTARY, INTERLEAVED, NORM_EPS, HEAD_DIM, PADDED,
        False,
    )  # fmt: skip
    value = tl.load(packed + (key_row + KV_HEADS * HEAD_DIM)[:, None] + dim_E[None, :], stored, 0.0)
    key_step = write_scale(key, key_scales, one + past, one == 0, key_factor, CACHE, TOKEN_SCALES)
    value_step = write_scale(value, value_scales, one + past, one == 0, value_factor, CACHE, TOKEN_SCALES)
    key_code, value_code = encode(key, key_step, CACHE), encode(value, value_step, CACHE)
    offset = (one + past * HEAD_DIM)[:, None] + dim_E[None, :]
    tl.store(keys + offset, key_code, stored)
    tl.store(values + offset, value_code, stored)
    key, value = key_code.to(tl.float32), value_code.to(tl.float32)
    if TOKEN_SCALES:
        key, value = key * key_step, value * value_step
    return key, value


@triton.jit
def fold_newest(query_ME, key, value, scale, acc_ME, top_M, total_M, SOFTCAP: tl.constexpr):
    """One more slot, its key and value [1, E] in registers, into the running softmax."""
    score_M = tl.sum(query_ME.to(tl.float32) * key, 1) * scale
    if SOFTCAP > 0:
        score_M = softcap(score_M, SOFTCAP)
    new_top_M = tl.maximum(top_M, score_M)
    weight_M, shrink_M = tl.exp2(score_M - new_top_M), tl.exp2(top_M - new_top_M)
    acc_ME = acc_ME * shrink_M[:, None] + weight_M[:, None] * value
    return acc_ME, new_top_M, total_M * shrink_M + weight_M


@triton.jit(do_not_specialize=["capacity", "splits"])
def decode_split(
    qkv, cos, sin, past_lengths, key_cache, value_cache, key_scale, value_scale, q_norm, k_norm,
    partial_out, partial_lse, capacity, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_EPS: tl.constexpr, CACHE: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, NATIVE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One piece of the cache of one KV head: partial result and log2 of its weight sum. Grid (splits, K, B)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past = tl.load(past_lengths + row).to(tl.int32)
    start, stop = piece(split, splits, past + 1, WINDOW, BLOCK_N)
    group_M = tl.arange(0, BLOCK_G)
    head_M, valid_M = kv_head * GROUP + group_M, group_M < GROUP
    packed = qkv + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    position_M = past + group_M * 0
    query_ME = rotated_rows(
        packed, head_M * HEAD_DIM, position_M, valid_M, cos, sin, q_norm, ROTARY, INTERLEAVED, NORM_EPS,
        HEAD_DIM, PADDED, False,
    )  # fmt: skip
    first_slot = (row.to(tl.int64) * KV_HEADS + kv_head) * capacity
    keys, values = key_cache + first_slot * HEAD_DIM, value_cache + first_slot * HEAD_DIM
    key_scales, value_scales = key_scale + first_slot, value_scale + first_slot
    key_factor = head_scale(key_scale, kv_head, CACHE, TOKEN_SCALES)
    value_factor = head_scale(value_scale, kv_head, CACHE, TOKEN_SCALES)
    scale = key_factor * (SCALE if SOFTCAP > 0 else SCALE * LOG2E)
    acc_ME, top_M, total_M, unit = attend_ranges(
        query_ME, keys, values, key_scales, value_scales, position_M, start, start, start,
        tl.minimum(tl.minimum(stop, past), capacity), scale, "end", SOFTCAP, WINDOW, HEAD_DIM, PADDED, CACHE,
        TOKEN_SCALES, NATIVE, BLOCK_G, BLOCK_N,
    )  # fmt: skip
    if TOKEN_SCALES:
        acc_ME = acc_ME * unit  # as values, which the newest one is added to
    if (start <= past) & (past < stop) & (past < capacity):
        key, value = write_newest(
            packed, kv_head, past, cos, sin, keys, values, key_scales, value_scales, key_factor, value_factor, k_norm,
            HEADS, KV_HEADS, HEAD_DIM, PADDED, ROTARY, INTERLEAVED, NORM_EPS, CACHE, TOKEN_SCALES,
        )  # fmt: skip
        acc_ME, top_M, total_M = fold_newest(query_ME, key, value, scale, acc_ME, top_M, total_M, SOFTCAP)
    # an empty piece: total 0, hence log2 weight -inf and a result of zeros, which the merge ignores
    part_M = (row.to(tl.int64) * HEADS + head_M) * splits + split
    some_M = tl.where(total_M > 0, total_M, 1.0)
    tl.store(partial_lse + part_M, tl.where(total_M > 0, top_M + tl.log2(some_M), float("-inf")), valid_M)
    dim_E = tl.arange(0, PADDED)
    out_ME = acc_ME * (value_factor / some_M)[:, None]
    target_ME = partial_out + part_M[:, None] * HEAD_DIM + dim_E[None, :]
    tl.store(target_ME, out_ME, valid_M[:, None] & (dim_E < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["splits"])
def decode_merge(
    partial_out, partial_lse, out, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one query head, BLOCK_S splits at a time. Grid (H, B)."""
    head, row = tl.program_id(0), tl.program_id(1)
    part = (row.to(tl.int64) * HEADS + head) * splits
    dim_E = tl.arange(0, PADDED)
    acc_E = tl.zeros((PADDED,), tl.float32)
    top, total = -1.0e30, 0.0
    for first in range(0, splits, BLOCK_S):
        split_S = first + tl.arange(0, BLOCK_S)
        lse_S = tl.load(partial_lse + part + split_S, split_S < splits, float("-inf"))
        out_SE = tl.load(
            partial_out + (part + split_S)[:, None] * HEAD_DIM + dim_E[None, :],
            (split_S < splits)[:, None] & (dim_E < HEAD_DIM)[None, :],
            0.0,
        )
        new_top = tl.maximum(top, tl.max(lse_S, 0))
        weight_S, shrink = tl.exp2(lse_S - new_top), tl.exp2(top - new_top)
        acc_E = acc_E * shrink + tl.sum(out_SE * weight_S[:, None], 0)
        total = total * shrink + tl.sum(weight_S, 0)
        top = new_top
    result_E = (acc_E / total).to(out.dtype.element_ty)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + dim_E, result_E, dim_E < HEAD_DIM)
