"""Speed of the kernels on a CUDA GPU: `python -m tests.ops.bench_attention [decode] [prefill] [--sweep]`.

Decode is held against the bandwidth of a device copy, prefill against torch's flash attention. Both are
timed as replays of a CUDA graph, so that launches from Python do not count. --sweep also tries other tiles.
"""

import itertools
import math
import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench_cudagraph

from toolchain.ops.attention import AttentionSpec
from toolchain.ops.kernels.launch import attend
from toolchain.ops.kernels.tiles import Launch

HEADS, KV_HEADS, DIM = 32, 8, 128
TARGETS = {"decode": 0.8, "prefill": 0.7}
STORED = {"none": None, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of one call."""
    return do_bench_cudagraph(call, rep=50, return_mode="median")


def copy_bandwidth() -> float:
    """Bytes a second of a device copy of 1 GiB, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def call_of(batch: int, new: int, past: int, cache: str, dtype: torch.dtype, **options: object) -> Callable[[], object]:
    """One call of the op on random inputs with `past` cached tokens a row."""
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, DIM, cache)
    capacity = past + new
    stored = STORED[cache] or dtype
    caches = [torch.randn(batch, KV_HEADS, capacity, DIM, device="cuda") for _ in range(2)]
    caches = [(x * 30).to(stored) if cache != "none" else x.to(stored) for x in caches]
    qkv = torch.randn(batch, new, spec.packed_width, device="cuda").to(dtype)
    angles = torch.rand(capacity, DIM // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    lengths = torch.full((batch,), past, device="cuda")
    scales = tuple(torch.full((KV_HEADS,), 1 / 30, device="cuda") for _ in range(2)) if cache != "none" else None
    return lambda: attend(qkv, cos, sin, lengths, *caches, spec, scales=scales, **options)


def decode(sweep: bool) -> None:
    """Batch 8 at 8k context, in GB/s of cache read."""
    peak = copy_bandwidth()
    print(f"copy {peak / 1e9:.0f} GB/s")
    past = 8191
    for cache, batch in itertools.product(STORED, (8, 1)):
        element = 2 if cache == "none" else 1
        read = 2 * batch * KV_HEADS * (past + 1) * DIM * element
        tries: list[dict] = [{}]
        if sweep:
            shapes = itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (None, 4, 8, 16, 32))
            tries += [
                {"tiles": {"decode_split": Launch({"BLOCK_G": 16, "BLOCK_N": n}, w, s)}, "splits": p}
                for n, w, s, p in shapes
            ]
        report(
            "decode",
            f"{cache} batch {batch}",
            tries,
            lambda t, c=cache, b=batch, r=read: rate(b, 1, past, c, t, r),
            peak,
        )


def prefill(sweep: bool) -> None:
    """Causal prompts of one row, in TFLOP/s of the products under the diagonal."""
    for cache, new in itertools.product(STORED, (2048, 8192)):
        shape = [(1, heads, new, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shape)
        flops = 2 * HEADS * new * new * DIM
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            time = milliseconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))  # noqa: B023
        tries: list[dict] = [{}]
        if sweep:
            shapes = itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
            tries += [
                {"tiles": {"prefill": Launch({"BLOCK_M": m, "BLOCK_N": n}, w, s)}}
                for m, n, w, s in shapes
                if m <= 16 * w
            ]
        report(
            "prefill",
            f"{cache} {new} tokens",
            tries,
            lambda t, c=cache, n=new, f=flops: rate(1, n, 0, c, t, f),
            flops / time * 1e3,
        )


def rate(batch: int, new: int, past: int, cache: str, options: dict, work: float) -> float:
    """`work` a second, or NaN where the tiles do not fit the GPU."""
    try:
        return work / milliseconds(call_of(batch, new, past, cache, torch.bfloat16, **options)) * 1e3
    except Exception as error:  # noqa: BLE001 - a sweep goes on past tiles that do not fit
        print("   ", options, type(error).__name__)
        return math.nan


def report(kind: str, name: str, tries: list[dict], measure: Callable[[dict], float], whole: float) -> None:
    """The table's tiles first, then the five best others."""
    rates = [(measure(options), options) for options in tries]
    share = rates[0][0] / whole
    verdict = "meets" if share >= TARGETS[kind] else "MISSES"
    print(
        f"{kind} {name}: {rates[0][0] / 1e9:.0f} G/s of {whole / 1e9:.0f}, {share:.0%}, {verdict} {TARGETS[kind]:.0%}"
    )
    ranked = sorted((pair for pair in rates[1:] if not math.isnan(pair[0])), key=lambda pair: -pair[0])
    for speed, options in ranked[:5]:
        print(f"    {speed / whole:.0%}", options, flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    for name, measure in (("decode", decode), ("prefill", prefill)):
        if name in words or not set(words) - {"--sweep"}:
            measure("--sweep" in words)
