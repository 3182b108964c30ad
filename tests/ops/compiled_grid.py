"""What every kernel compiles to: `python -m tests.ops.compiled_grid [SM ...]` prints registers, spills, shared KB."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toolchain.ops.attention import AttentionSpec
from toolchain.ops.kernels.bindings import FP8_SM
from toolchain.ops.kernels.compile import CompiledKernel, compile_kernels
from toolchain.ops.kernels.tiles import SHARED_LIMIT

FORMATS = ("none", "int8", "fp8_e4m3", "int8_token", "fp8_e4m3_token")
CAP, WINDOW, NORM = {"softcap": 30.0}, {"window": 4096}, {"qk_norm_eps": 1e-6}
VARIANTS: dict[str, dict] = {
    "plain": {},
    "norm": NORM,
    "window": WINDOW,
    "capwin": CAP | WINDOW,
    "normwin": NORM | WINDOW,
    "all": CAP | WINDOW | NORM,
}


def spec_of(dim: int, cache: str, **options: object) -> AttentionSpec:
    """32 query heads over 8 KV heads."""
    kind = {"cache_format": cache.removesuffix("_token"), "token_scales": cache.endswith("_token")}
    return AttentionSpec(32, 8, dim, dim**-0.5, rotary_dim=dim, **kind, **options)


def faults(kernels: tuple[CompiledKernel, ...]) -> list[str]:
    """What breaks the budget: registers spilled, too many, or too much shared memory."""
    found = []
    for kernel in kernels:
        if kernel.spill_bytes:
            found.append(f"{kernel.name} sm_{kernel.sm}: {kernel.spill_bytes} bytes spilled")
        if kernel.registers > 255 or kernel.registers * kernel.num_warps * 32 > 65536:
            found.append(f"{kernel.name} sm_{kernel.sm}: {kernel.registers} registers, {kernel.num_warps} warps")
        if kernel.shared_bytes > SHARED_LIMIT[kernel.sm]:
            found.append(f"{kernel.name} sm_{kernel.sm}: {kernel.shared_bytes} bytes of shared memory")
    return found


def grid(sms: list[int]) -> Iterator[tuple[int, int, str, str, str]]:
    """sm, head dim, cache format, compute dtype and variant: every GPU, head dim, legal format and mix of extras."""
    for sm in sms:
        for cache in FORMATS:
            if cache.startswith("fp8") and sm < FP8_SM:
                continue
            for dim in (32, 64, 128, 256):
                for variant in VARIANTS:
                    yield sm, dim, cache, "float16", variant
                yield sm, dim, cache, "bfloat16", "all"


def main() -> None:
    """Print one line a kernel set, and exit 1 if any breaks the budget."""
    sms = [int(word) for word in sys.argv[1:]] or sorted(SHARED_LIMIT)
    broken = []
    with tempfile.TemporaryDirectory() as scratch:
        for sm, dim, cache, dtype, variant in grid(sms):
            spec = spec_of(dim, cache, **VARIANTS[variant])
            kernels = compile_kernels(spec, sm, dtype, cache_dir=Path(scratch))
            cells = [f"{k.name} {k.registers}r {k.spill_bytes}s {k.shared_bytes // 1024}K" for k in kernels]
            print(f"{sm:4} {dim:4} {cache:14} {dtype:9} {variant:6}", " | ".join(cells), flush=True)
            broken += faults(kernels)
    print(*broken, sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
