"""What each kernel takes: its runtime arguments in order, and its constants from a spec.

The plugin and `launch` pass runtime arguments in exactly this order. Arguments a spec does not use
(scales of an unquantized cache, norms without QK-norm) are passed all the same and never read. Scales are
static ones [K], or with `token_scales` those of every slot [B, K, C], which are written too.
"""

import math
from typing import Any

from toolchain.errors import DtoolError
from toolchain.ops.attention import AttentionSpec
from toolchain.ops.kernels.tiles import Launch, launches, padded_dim

COMPUTE = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Triton's name of each compute dtype."""
CACHE = {"int8": "i8", "fp8_e4m3": "fp8e4nv"}
"""Triton's name of each code dtype."""
CACHE_BYTES = {"int8": 1, "fp8_e4m3": 1}
FP8_SM = 89
"""First compute capability with e4m3 conversions."""

_SHARED = ("qkv", "cos", "sin", "past_lengths", "key_cache", "value_cache", "key_scale", "value_scale")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "cache_write": (*_SHARED, "k_norm", "new_tokens", "capacity"),
    "prefill": (*_SHARED, "q_norm", "out", "new_tokens", "capacity"),
    "decode_split": (*_SHARED, "q_norm", "k_norm", "partial_out", "partial_lse", "capacity", "splits"),
    "decode_merge": ("partial_out", "partial_lse", "out", "splits"),
}
"""Runtime arguments of each kernel, in order."""
INTEGERS = frozenset({"new_tokens", "capacity", "splits"})


def argument_type(name: str, compute_dtype: str, cache_format: str) -> str:
    """Triton's type of a runtime argument, `*fp16` or `i32` for example."""
    if name in INTEGERS:
        return "i32"
    if name == "past_lengths":
        return "*i64"
    if name in {"key_cache", "value_cache"}:
        return "*" + CACHE.get(cache_format, COMPUTE[compute_dtype])
    compute = name in {"qkv", "q_norm", "k_norm", "out"}
    return "*" + (COMPUTE[compute_dtype] if compute else "fp32")


def check_spec(spec: AttentionSpec, sm: int) -> None:
    """Raise DtoolError for what the kernels do not compute, or not on this GPU."""
    problems = {
        f"head_dim {spec.head_dim}": spec.head_dim % 2 or not 16 <= spec.head_dim <= 256,
        f"rotary_dim {spec.rotary_dim}": spec.rotary_dim % 2 or not 2 <= spec.rotary_dim <= spec.head_dim,
        f"{spec.num_heads} query heads over {spec.num_kv_heads} KV heads": spec.num_heads % spec.num_kv_heads,
        f"scale {spec.scale}": not (math.isfinite(spec.scale) and spec.scale > 0),
        f"cache format {spec.cache_format}": spec.cache_format not in {"none", *CACHE},
        "scales of tokens without a cache of codes": spec.token_scales and not spec.quantized,
    }
    found = [name for name, bad in problems.items() if bad]
    if found:
        raise DtoolError(
            "the attention kernels do not cover this attention node",
            expected="an even head_dim of 16..256, an even rotary_dim of 2..head_dim, whole groups, a positive scale, "
            "a cache of none, int8 or fp8_e4m3",
            found=", ".join(found),
            fix="run this model with a backend other than tensorrt",
        )
    if spec.cache_format == "fp8_e4m3" and sm < FP8_SM:
        raise DtoolError(
            f"sm_{sm} has no e4m3 conversions, so it cannot hold an fp8 cache",
            expected=f"sm_{FP8_SM} or newer for kv_cache format fp8_e4m3",
            found=f"sm_{sm}",
            fix="set kv_cache.format to int8 or none in the recipe",
        )


def plan(spec: AttentionSpec, sm: int, compute_dtype: str) -> dict[str, Launch]:
    """The `Launch` of each kernel for a spec on a GPU. Raises DtoolError as `check_spec` does."""
    check_spec(spec, sm)
    cache_bytes = CACHE_BYTES.get(spec.cache_format, 4 if compute_dtype == "float32" else 2)
    extras = frozenset(name for name in ("window", "softcap", "qk_norm", "token_scales") if getattr(spec, name))
    return launches(sm, spec.head_dim, spec.num_heads // spec.num_kv_heads, cache_bytes, extras)


def constants(name: str, spec: AttentionSpec, tile: dict[str, int], *, native: bool = True) -> dict[str, Any]:
    """The constexpr arguments of kernel `name`; not `native` in the interpreter, which cannot run PTX."""
    heads = {"HEADS": spec.num_heads, "HEAD_DIM": spec.head_dim, "PADDED": padded_dim(spec.head_dim)}
    if name == "decode_merge":
        return heads | tile
    rows = heads | {
        "KV_HEADS": spec.num_kv_heads,
        "ROTARY": spec.rotary_dim,
        "INTERLEAVED": spec.interleaved,
        "NORM_EPS": float(spec.qk_norm_eps),
        "CACHE": spec.cache_format,
        "TOKEN_SCALES": spec.token_scales,
    }
    if name == "cache_write":
        return rows | tile
    if name == "prefill":
        rows |= {"APART": 0}  # where the table does not say
    return (
        rows
        | {"SCALE": float(spec.scale), "SOFTCAP": float(spec.softcap), "WINDOW": spec.window, "NATIVE": native}
        | tile
    )
