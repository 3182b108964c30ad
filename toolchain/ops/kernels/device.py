"""Device functions the kernels share: rotated rows, the softmax over a range of slots, softcap.

Rotation. Element d of a rotated head is  x_d cos + s_d x_p(d) sin  with partner p(d) = d +- R/2 and
sign s_d = -+1 (half-split), or p(d) = d ^ 1 (interleaved): RoFormer, arXiv 2104.09864 eq. 34. A lane
cannot read its neighbour's register without a shuffle whose form depends on the layout, so the row is
loaded twice, once as x and once as x_p: the second load hits L1, and one row is loaded once per tile
while its cache is read thousands of times. cos, sin, both products and the sum are each rounded to the
compute dtype: that is what eager torch does, so keys and codes come out equal to the reference's.

Given up: two loads of each row; the head dim is padded to a power of two (80 computes as 128).

Legend: M rows of a tile, E head dim padded to a power of two, F = E / 2 pairs of dims, N slots of a tile.
"""

# Parameters of a Triton function are values of the device or constexpr; Python types say nothing of them.
# Of an `if` on a constexpr one side is compiled, so what it leaves unbound is never read.
# ruff: noqa: ANN001, ANN201
# pyright: reportPossiblyUnboundVariable=false, reportUnboundVariable=false

import triton
import triton.language as tl

from toolchain.ops.kernels.codes import SMALLEST_SCALE, pair_half

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rotated_rows(
    base, row_M, position_M, valid_M, cos, sin, norm, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM_EPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Heads at element offsets `row_M` of `base`, normed and rotated: [M, E] in the dtype of `base`.

    Rows that are not valid, and dims beyond the head, come as zeros and read nothing. With APART the second
    half of the rotation is not begun before the first is done, which takes fewer registers.
    """
    dtype = base.dtype.element_ty
    dim_E = tl.arange(0, PADDED)
    x_ME = tl.load(base + row_M[:, None] + dim_E[None, :], valid_M[:, None] & (dim_E < HEAD_DIM)[None, :], 0.0)
    HALF: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner_E = dim_E ^ 1
        sign_E = tl.where(dim_E % 2 == 0, -1.0, 1.0)
        angle_E = dim_E // 2
    else:
        partner_E = tl.where(dim_E < HALF, dim_E + HALF, dim_E - HALF)
        sign_E = tl.where(dim_E < HALF, -1.0, 1.0)
        angle_E = dim_E % HALF
    turned_E = dim_E < ROTARY
    turned_ME = valid_M[:, None] & turned_E[None, :]
    table_ME = position_M[:, None] * HALF + angle_E[None, :]
    partner_ME = base + row_M[:, None] + partner_E[None, :]
    if not APART:
        y_ME = tl.load(partner_ME, turned_ME, 0.0).to(tl.float32)
    x_ME = x_ME.to(tl.float32)
    if NORM_EPS > 0:
        weight_E = tl.load(norm + dim_E, dim_E < HEAD_DIM, 0.0).to(tl.float32)
        partner_weight_E = tl.load(norm + partner_E, turned_E, 0.0).to(tl.float32)
        inverse_M = tl.rsqrt(tl.sum(x_ME * x_ME, 1) / HEAD_DIM + NORM_EPS)
        x_ME = (x_ME * inverse_M[:, None] * weight_E[None, :]).to(dtype).to(tl.float32)
        if not APART:
            y_ME = (y_ME * inverse_M[:, None] * partner_weight_E[None, :]).to(dtype).to(tl.float32)
    # products of two values of the compute dtype are exact in float32, so this rounds exactly as eager torch does
    cos_ME = tl.load(cos + table_ME, turned_ME, 1.0).to(dtype).to(tl.float32)
    along_ME = (x_ME * cos_ME).to(dtype).to(tl.float32)
    if APART:
        tl.debug_barrier()  # ptxas would move the loads up
        y_ME = tl.load(partner_ME, turned_ME, 0.0).to(tl.float32)
        if NORM_EPS > 0:
            y_ME = (y_ME * inverse_M[:, None] * partner_weight_E[None, :]).to(dtype).to(tl.float32)
    sin_ME = tl.load(sin + table_ME, turned_ME, 0.0).to(dtype).to(tl.float32)
    across_ME = (y_ME * (sin_ME * sign_E[None, :])).to(dtype).to(tl.float32)
    return (along_ME + across_ME).to(dtype)


@triton.jit
def load_slots(cache, slot_N, end, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Codes of slots [N, E] of one KV head; with MASKED, slots from `end` on come as zeros and are not read."""
    dim_E = tl.arange(0, PADDED)
    pointer_NE = cache + slot_N[:, None] * HEAD_DIM + dim_E[None, :]
    if MASKED and PADDED != HEAD_DIM:
        tile_NE = tl.load(pointer_NE, (slot_N < end)[:, None] & (dim_E < HEAD_DIM)[None, :], 0.0)
    elif MASKED:
        tile_NE = tl.load(pointer_NE, (slot_N < end)[:, None], 0.0)
    elif PADDED != HEAD_DIM:
        tile_NE = tl.load(pointer_NE, (dim_E < HEAD_DIM)[None, :], 0.0)
    else:
        tile_NE = tl.load(pointer_NE)
    return tile_NE


@triton.jit
def softcap(score, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), in base-2 exponents: times log2(e). Gemma 2, arXiv 2408.00118."""
    # tanh(x) = 1 - 2 / (exp(2 x) + 1): right at both infinities, absolute error of one float32 step
    growth = tl.exp2(score * (2.0 * LOG2E / CAP))
    return (CAP * LOG2E) - (2.0 * CAP * LOG2E) / (growth + 1.0)


@triton.jit
def fold_scores(
    score_MN, top_M, total_M, slot_N, position_M, end, scale, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One tile of raw products into the running softmax: weights, shrink factor, new top and total.

    FlashAttention-2, arXiv 2307.08691, algorithm 1, in base 2: `top` is the running maximum and `total`
    the sum of weights relative to it; earlier sums shrink by 2^(old top - new top).
    MASK: "none" when every row sees every slot; "end" when every row sees all slots below `end`; "window"
    when it sees all but those before its window; "causal" also hides slots from `end` on and after its position.
    """
    factor = scale
    if SOFTCAP > 0:
        score_MN = softcap(score_MN * scale, SOFTCAP)
        factor = 1.0
    if MASK != "none":
        if MASK == "window":
            seen_MN = slot_N[None, :] > position_M[:, None] - WINDOW
        elif MASK == "end":
            seen_MN = (slot_N < end)[None, :]
        else:
            seen_MN = (slot_N < end)[None, :] & (slot_N[None, :] <= position_M[:, None])
            if WINDOW > 0:
                seen_MN = seen_MN & (slot_N[None, :] > position_M[:, None] - WINDOW)
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
    # top starts finite, so that a row which has seen nothing yet gives exp2(-inf), never inf - inf
    new_top_M = tl.maximum(top_M, tl.max(score_MN, 1) * factor)
    weight_MN = tl.exp2(score_MN * factor - new_top_M[:, None])
    shrink_M = tl.exp2(top_M - new_top_M)
    return weight_MN, shrink_M, new_top_M, total_M * shrink_M + tl.sum(weight_MN, 1)


@triton.jit
def attend_slots(
    query_ME, acc_ME, top_M, total_M, keys, values, position_M, start, end, scale, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold slots start..end-1 of one KV head into (acc_ME, top_M, total_M); MASK as in `fold_scores`.

    With MASK "none" and "window", start..end must be whole tiles. acc is the sum of weighted values.
    """
    MASKED: tl.constexpr = MASK == "end" or MASK == "causal"  # noqa: PLR1714 - Triton has no `in`
    for first in range(start, end, BLOCK_N):
        slot_N = first + tl.arange(0, BLOCK_N)
        key_NE = load_slots(keys, slot_N, end, HEAD_DIM, PADDED, MASKED)
        score_MN = tl.dot(query_ME, tl.trans(key_NE), input_precision="ieee")
        weight_MN, shrink_M, top_M, total_M = fold_scores(
            score_MN, top_M, total_M, slot_N, position_M, end, scale, MASK, SOFTCAP, WINDOW
        )
        value_NE = load_slots(values, slot_N, end, HEAD_DIM, PADDED, MASKED)
        acc_ME = tl.dot(weight_MN.to(query_ME.dtype), value_NE, acc_ME * shrink_M[:, None], input_precision="ieee")
    return acc_ME, top_M, total_M


@triton.jit
def load_scales(scales, slot_N, end, MASKED: tl.constexpr):
    """Scales [N] of slots; with MASKED those from `end` on come as zeros and are not read."""
    if MASKED:  # noqa: SIM108 - one side alone is compiled
        scale_N = tl.load(scales + slot_N, slot_N < end, 0.0)
    else:
        scale_N = tl.load(scales + slot_N)
    return scale_N


@triton.jit
def scaled_weights(weight_MN, shrink_M, unit, scale_N):
    """Weights times the value scales of their slots, in units of the largest scale so far: so they fit a half.

    Also the shrink factor that brings earlier sums to the new unit, and the unit. Scales alone would lose the
    weights' low bits: they are 1e-3 to 1e-5, and a half has none of its 11 bits below 6e-8.
    """
    new_unit = tl.maximum(unit, tl.max(scale_N, 0))
    return weight_MN * (scale_N / new_unit)[None, :], shrink_M * (unit / new_unit), new_unit


@triton.jit
def attend_pairs(
    even_MF, odd_MF, acc_even_MF, acc_odd_MF, top_M, total_M, unit, keys, values, key_scales, value_scales, position_M,
    start, end, scale, MASK: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr, CACHE: tl.constexpr, TOKEN_SCALES: tl.constexpr, NATIVE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`attend_slots` for a cache of codes, read as int16 pairs: even and odd dims are multiplied apart.

    With TOKEN_SCALES acc is in units of `unit`, see `scaled_weights`; else `unit` stays as it is.
    """
    dtype: tl.constexpr = even_MF.dtype
    MASKED: tl.constexpr = MASK == "end" or MASK == "causal"  # noqa: PLR1714 - Triton has no `in`
    for first in range(start, end, BLOCK_N):
        slot_N = first + tl.arange(0, BLOCK_N)
        key_NF = load_slots(keys, slot_N, end, HEAD_DIM // 2, PADDED // 2, MASKED)
        even_NF = pair_half(key_NF, dtype, False, CACHE, NATIVE)
        odd_NF = pair_half(key_NF, dtype, True, CACHE, NATIVE)
        score_MN = tl.dot(even_MF, tl.trans(even_NF), input_precision="ieee")
        score_MN = tl.dot(odd_MF, tl.trans(odd_NF), score_MN, input_precision="ieee")
        if TOKEN_SCALES:
            score_MN = score_MN * load_scales(key_scales, slot_N, end, MASKED)[None, :]
        weight_MN, shrink_M, top_M, total_M = fold_scores(
            score_MN, top_M, total_M, slot_N, position_M, end, scale, MASK, SOFTCAP, WINDOW
        )
        if TOKEN_SCALES:
            scale_N = load_scales(value_scales, slot_N, end, MASKED)
            weight_MN, shrink_M, unit = scaled_weights(weight_MN, shrink_M, unit, scale_N)
        weight_MN = weight_MN.to(dtype)
        value_NF = load_slots(values, slot_N, end, HEAD_DIM // 2, PADDED // 2, MASKED)
        even_NF = pair_half(value_NF, dtype, False, CACHE, NATIVE)
        odd_NF = pair_half(value_NF, dtype, True, CACHE, NATIVE)
        acc_even_MF = tl.dot(weight_MN, even_NF, acc_even_MF * shrink_M[:, None], input_precision="ieee")
        acc_odd_MF = tl.dot(weight_MN, odd_NF, acc_odd_MF * shrink_M[:, None], input_precision="ieee")
    return acc_even_MF, acc_odd_MF, top_M, total_M, unit


@triton.jit
def attend_ranges(
    query_ME, keys, values, key_scales, value_scales, position_M, start, whole_start, whole_end, end, scale,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    CACHE: tl.constexpr, TOKEN_SCALES: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax over slots start..end-1: acc [M, E] in codes, top and total [M], and acc's unit; all float32.

    With TOKEN_SCALES `key_scales` and `value_scales` are those of the KV head's slots, acc is in units of `unit`,
    and `unit` is never less than the smallest scale there is. Slots whole_start..whole_end-1 need no mask and are
    whole tiles. With MASK "end" all from `start` are masked.
    """
    top_M, total_M = tl.full((BLOCK_M,), -1.0e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    unit = tl.full((), SMALLEST_SCALE, tl.float32)
    if CACHE == "none":
        acc_ME = tl.zeros((BLOCK_M, PADDED), tl.float32)
        if MASK == "causal":
            if WINDOW > 0:
                acc_ME, top_M, total_M = attend_slots(
                    query_ME, acc_ME, top_M, total_M, keys, values, position_M, start, whole_start, scale,
                    "window", SOFTCAP, WINDOW, HEAD_DIM, PADDED, BLOCK_N,
                )  # fmt: skip
            acc_ME, top_M, total_M = attend_slots(
                query_ME, acc_ME, top_M, total_M, keys, values, position_M, whole_start, whole_end, scale,
                "none", SOFTCAP, WINDOW, HEAD_DIM, PADDED, BLOCK_N,
            )  # fmt: skip
        acc_ME, top_M, total_M = attend_slots(
            query_ME, acc_ME, top_M, total_M, keys, values, position_M, whole_end, end, scale,
            MASK, SOFTCAP, WINDOW, HEAD_DIM, PADDED, BLOCK_N,
        )  # fmt: skip
    else:
        even_MF, odd_MF = tl.split(tl.reshape(query_ME, (BLOCK_M, PADDED // 2, 2)))
        acc_even_MF = tl.zeros((BLOCK_M, PADDED // 2), tl.float32)
        acc_odd_MF = tl.zeros((BLOCK_M, PADDED // 2), tl.float32)
        keys = keys.to(tl.pointer_type(tl.int16), bitcast=True)
        values = values.to(tl.pointer_type(tl.int16), bitcast=True)
        if MASK == "causal":
            if WINDOW > 0:
                acc_even_MF, acc_odd_MF, top_M, total_M, unit = attend_pairs(
                    even_MF, odd_MF, acc_even_MF, acc_odd_MF, top_M, total_M, unit, keys, values, key_scales,
                    value_scales, position_M, start, whole_start, scale, "window", SOFTCAP, WINDOW, HEAD_DIM, PADDED,
                    CACHE, TOKEN_SCALES, NATIVE, BLOCK_N,
                )  # fmt: skip
            acc_even_MF, acc_odd_MF, top_M, total_M, unit = attend_pairs(
                even_MF, odd_MF, acc_even_MF, acc_odd_MF, top_M, total_M, unit, keys, values, key_scales,
                value_scales, position_M, whole_start, whole_end, scale, "none", SOFTCAP, WINDOW, HEAD_DIM, PADDED,
                CACHE, TOKEN_SCALES, NATIVE, BLOCK_N,
            )  # fmt: skip
        acc_even_MF, acc_odd_MF, top_M, total_M, unit = attend_pairs(
            even_MF, odd_MF, acc_even_MF, acc_odd_MF, top_M, total_M, unit, keys, values, key_scales, value_scales,
            position_M, whole_end, end, scale, MASK, SOFTCAP, WINDOW, HEAD_DIM, PADDED, CACHE, TOKEN_SCALES, NATIVE,
            BLOCK_N,
        )  # fmt: skip
        acc_ME = tl.reshape(tl.join(acc_even_MF, acc_odd_MF), (BLOCK_M, PADDED))
    return acc_ME, top_M, total_M, unit
