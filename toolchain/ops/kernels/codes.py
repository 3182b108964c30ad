"""Codes of the quantized cache: into codes when a token is written, back to values when a tile is read.

Written: code = clamp(round_half_even(x / scale)), as ONNX QuantizeLinear defines it. int8 rounds by adding
1.5 * 2^23, where a float32 holds integers only; e4m3 is rounded by hand to a value it holds, because
Triton's interpreter rounds e4m3 wrongly, and a cast of such a value is exact everywhere.

A token's own scale is max|x| / qmax, as numerics.token_scale has it.

Read: a code is exact in fp16 and bf16 (|int8| <= 128; e4m3 has 4 significant bits), so tiles enter the
tensor cores as codes and no scale is multiplied in: that of K goes into the scores, that of V into the
result; those of tokens go into the scores and the weights of their slots (`device.scaled_weights`). The plain
cast costs one slow conversion and two byte moves an element, more than all the rest of a decode loop, and
a transposing read of shared memory (ldmatrix.trans) moves 16 bits at least. So two neighbouring codes are
read as one int16, even and odd dims are multiplied apart, and `pair_half` makes the values of two slots at
once in a few packed instructions:

    fp16   the byte u = code + 128 under 0x64 is the number 1024 + u; less 1152 it is the code
    bf16   0x4300 with the low 7 bits is 128 + low; less 0x4300 with the sign bit (128 or 256) it is the code
    e4m3   the hardware's own conversion of two codes, after a byte permutation

Given up: the packed way is PTX, which the interpreter cannot run. It computes the plain cast there (NATIVE
False); a test computes the instructions by hand for all 256 codes, another runs them where there is a GPU.
"""

# Parameters of a Triton function are values of the device or constexpr; Python types say nothing of them.
# ruff: noqa: ANN001, ANN201
# pyright: reportArgumentType=false

import triton
import triton.language as tl

INT8_MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 near it has a unit in the last place of 1."""
E4M3_MAGIC = tl.constexpr(24576.0)
"""1.5 * 2^14: a float32 near it has a unit in the last place of 2^-9, the step of e4m3's subnormals."""
INT8_LARGEST = tl.constexpr(127.0)
E4M3_LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-100)
"""numerics.SMALLEST_SCALE."""
E4M3_SMALLEST_NORMAL = tl.constexpr(0.015625)

# prmt picks bytes: 0..3 of the codes, 4..7 of the second operand. A register holds codes c0 c1 of one slot and
# c2 c3 of the next; the low halves are c0 c2, the high ones c1 c3. lop3 0xEA is (a & b) | c.
_TO_HALF = (
    "{ .reg .b32 t, m; xor.b32 t, $1, 0x80808080; prmt.b32 t, t, 0x64646464, %s; "
    "mov.b32 m, 0xE480E480; add.f16x2 $0, t, m; }"  # -1152 twice
)
_TO_BFLOAT = (
    "{ .reg .b32 t, u, k, m; prmt.b32 t, $1, 0, %s; mov.b32 k, 0x43004300; lop3.b32 u, t, 0x007F007F, k, 0xEA; "
    "lop3.b32 t, t, 0x00800080, k, 0xEA; mov.b32 m, 0xBF80BF80; fma.rn.bf16x2 $0, t, m, u; }"  # -1 twice
)
_FROM_E4M3 = "{ .reg .b32 t; .reg .b16 h; prmt.b32 t, $1, 0, %s; cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $0, h; }"
HALF_LOW, HALF_HIGH = tl.constexpr(_TO_HALF % "0x4240"), tl.constexpr(_TO_HALF % "0x4341")
BFLOAT_LOW, BFLOAT_HIGH = tl.constexpr(_TO_BFLOAT % "0x4240"), tl.constexpr(_TO_BFLOAT % "0x4341")
E4M3_LOW, E4M3_HIGH = tl.constexpr(_FROM_E4M3 % "0x4420"), tl.constexpr(_FROM_E4M3 % "0x4431")


@triton.jit
def round_e4m3(x):
    """float32 `x`, |x| <= 448, rounded half to even to a value e4m3 holds."""
    size = tl.abs(x)
    bits = x.to(tl.int32, bitcast=True)
    odd = (bits >> 20) & 1
    normal = ((bits + 0x7FFFF + odd) & -0x100000).to(tl.float32, bitcast=True)
    small = (size + E4M3_MAGIC) - E4M3_MAGIC
    return tl.where(size >= E4M3_SMALLEST_NORMAL, normal, tl.where(x < 0, -small, small))


@triton.jit
def encode(x, scale, CACHE: tl.constexpr):
    """What the cache stores for `x` of the compute dtype; `scale` is read by quantized caches alone."""
    if CACHE == "int8":
        ratio = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -128.0, 127.0)
        code = ((ratio + INT8_MAGIC) - INT8_MAGIC).to(tl.int8)
    elif CACHE == "fp8_e4m3":
        ratio = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -E4M3_LARGEST, E4M3_LARGEST)
        code = round_e4m3(ratio).to(tl.float8e4nv)
    else:
        code = x
    return code


@triton.jit
def head_scale(scale, kv_head, CACHE: tl.constexpr, TOKEN_SCALES: tl.constexpr):
    """float32 scale that all slots of a KV head share: 1 for a cache of values, and where tokens have their own."""
    if CACHE == "none" or TOKEN_SCALES:  # noqa: SIM108 - one side alone is compiled
        factor = 1.0
    else:
        factor = tl.load(scale + kv_head)
    return factor


@triton.jit
def larger(a, b):
    """The larger one; NaN wins, so that a token with one is NaN in the cache, as in the reference."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def write_scale(x_TE, slots, slot_T, valid_T, factor, CACHE: tl.constexpr, TOKEN_SCALES: tl.constexpr):
    """What new tokens are encoded with: scales [T, 1] of their own, stored at `slots` of the KV head, or `factor`."""
    if TOKEN_SCALES:
        LARGEST: tl.constexpr = INT8_LARGEST if CACHE == "int8" else E4M3_LARGEST
        amax_T = tl.reduce(tl.abs(x_TE.to(tl.float32)), 1, larger)
        amax_T = larger(amax_T, SMALLEST_SCALE * LARGEST)
        scale_T = tl.div_rn(amax_T, LARGEST)
        tl.store(slots + slot_T, scale_T, valid_T)
        scale = scale_T[:, None]
    else:
        scale = factor
    return scale


@triton.jit
def pair_half(pair, dtype: tl.constexpr, HIGH: tl.constexpr, CACHE: tl.constexpr, NATIVE: tl.constexpr):
    """The low (even dim) or HIGH (odd dim) code of int16 pairs as values of the compute dtype, exactly."""
    if NATIVE and CACHE == "fp8_e4m3":
        ASM: tl.constexpr = E4M3_HIGH if HIGH else E4M3_LOW
        value = tl.inline_asm_elementwise(ASM, "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2).to(dtype)
    elif NATIVE and dtype == tl.float16:
        ASM: tl.constexpr = HALF_HIGH if HIGH else HALF_LOW
        value = tl.inline_asm_elementwise(ASM, "=r,r", [pair], dtype=tl.float16, is_pure=True, pack=2)
    elif NATIVE and dtype == tl.bfloat16:
        ASM: tl.constexpr = BFLOAT_HIGH if HIGH else BFLOAT_LOW
        value = tl.inline_asm_elementwise(ASM, "=r,r", [pair], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif CACHE == "int8":
        value = (pair >> 8).to(dtype) if HIGH else ((pair << 8) >> 8).to(dtype)
    else:
        byte = (pair >> 8 if HIGH else pair) & 0xFF
        value = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return value
