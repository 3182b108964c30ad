"""Which tiles and split counts are fastest on this GPU: information for `ops.kernels.tiles`, whole in the JSON.

Kernels are compiled ahead of their first launch, many at a time. A configuration that does not fit the
GPU is recorded with the reason. When time runs out a sweep ends early and says after how many.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from toolchain.bench.gpu_results import Budget, Result, first_line
from toolchain.bench.gpu_speed import (
    AGREEMENT_BAR,
    BYTES,
    DECODE_OTHERS,
    Attend,
    Decode,
    Prefill,
    Shape,
    Timer,
    capability,
    default_splits,
)
from toolchain.ops.attention import AttentionSpec

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TILE_SPLITS = (3, 4, 6, 8, 12, 16)
"""Split counts each decode tile is tried with; the table's own tile takes all of `SPLITS`."""
DECODE_BLOCKS, DECODE_WARPS, DECODE_STAGES = (32, 64, 128, 256), (4, 8), (2, 3, 4, 5)
PREFILL_ROWS, PREFILL_BLOCKS, PREFILL_WARPS, PREFILL_STAGES = (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)
MOST_REGISTERS = 255
SPARE_S = 5.0
"""Seconds of the budget a sweep leaves."""

Compile = tuple[AttentionSpec, str, str, Any]
"""A kernel to compile: spec, dtype, kernel name, `Launch`."""


def compile_ahead(requests: Sequence[Compile], workers: int) -> None:
    """Compile kernels side by side, so that their first launch finds them; one that fails raises there again.

    The arguments are as aligned as torch's tensors, so the kernels are those the launches look for.
    """
    import triton

    from toolchain.ops.kernels.bindings import ARGUMENTS, argument_type, constants
    from toolchain.ops.kernels.decode import decode_merge, decode_split
    from toolchain.ops.kernels.prefill import cache_write, prefill

    kernels: dict[str, Any] = {"cache_write": cache_write, "prefill": prefill}
    kernels |= {"decode_split": decode_split, "decode_merge": decode_merge}
    types: dict[str, Any] = {"*fp16": torch.float16, "*bf16": torch.bfloat16, "*fp32": torch.float32}
    types |= {"*i64": torch.int64, "*i8": torch.int8, "*fp8e4nv": torch.float8_e4m3fn, "i32": 2}
    with ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for spec, dtype, name, launch in requests:
            arguments = [types[argument_type(a, dtype, spec.cache_format)] for a in ARGUMENTS[name]]
            fixed = constants(name, spec, launch.tile)
            kernels[name].warmup(*arguments, grid=(1,), **fixed, **launch.options)


def default_kernels(spec: AttentionSpec, dtype: str, device: str) -> list[Compile]:
    """The four kernels of a spec as `launch.attend` compiles them."""
    from toolchain.ops.kernels.bindings import plan

    return [(spec, dtype, name, launch) for name, launch in plan(spec, capability(device), dtype).items()]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a sweep needs: where and how it runs, until when, and how many compilers beside each other."""

    device: str
    attend: Attend
    timer: Timer
    budget: Budget
    workers: int


def decode_tiles(shape: Shape, sm: int) -> list[Any]:
    """`Launch`es of decode_split whose stages of K and V tiles fit in shared memory."""
    from toolchain.ops.kernels.tiles import SHARED_LIMIT, Launch, launches

    group = launches(sm, shape.dim, shape.heads // shape.kv_heads, BYTES[shape.cache])["decode_split"].tile["BLOCK_G"]
    found = []
    for block, warps, stages in product(DECODE_BLOCKS, DECODE_WARPS, DECODE_STAGES):
        if stages * 2 * block * shape.dim * BYTES[shape.cache] <= SHARED_LIMIT[sm]:
            found.append(Launch({"BLOCK_G": group, "BLOCK_N": block}, warps, stages))
    return found


def prefill_tiles(shape: Shape, sm: int) -> list[Any]:
    """`Launch`es of prefill within the bounds that `ops.kernels.tiles` gives for registers and shared memory."""
    from toolchain.ops.kernels.tiles import SHARED_LIMIT, Launch

    found = []
    for rows, block, warps, stages in product(PREFILL_ROWS, PREFILL_BLOCKS, PREFILL_WARPS, PREFILL_STAGES):
        registers = (shape.dim + 1.5 * block) * rows / (32 * warps)
        shared = stages * 2 * block * shape.dim * BYTES[shape.cache] + 2 * rows * shape.dim
        if 16 * warps <= rows and registers <= MOST_REGISTERS and shared <= SHARED_LIMIT[sm]:
            found.append(Launch({"BLOCK_M": rows, "BLOCK_N": block}, warps, stages))
    return found


def sweep_decode(shape: Shape, tuning: Tuning) -> Result:
    """Decode by every tile and split count, against what the table chooses."""
    from toolchain.ops.kernels.bindings import plan

    decode = Decode(shape, tuning.device)
    sm = capability(tuning.device)
    chosen = plan(shape.spec, sm, shape.dtype)["decode_split"]
    rows: list[dict[str, Any]] = []

    def measure(launch: Any, counts: Sequence[int]) -> None:
        tiles = {"decode_split": launch}
        rows.extend(_row(decode, launch, tuning, tiles=tiles, splits=splits) for splits in counts)

    default = default_splits(shape, tuning.device)
    measure(chosen, [default, *(n for n in SPLITS if n != default)])
    launches = [tile for tile in decode_tiles(shape, sm) if tile != chosen]
    done = _tried(launches, "decode_split", shape, tuning, lambda launch: measure(launch, TILE_SPLITS))
    return _summary("decode", shape, rows, done, len(launches))


def sweep_splits(cache: str, tuning: Tuning) -> Result:
    """The table's decode tile by split count at the other contexts and batches."""
    found: dict[str, Any] = {}
    words = []
    for tokens, batch in DECODE_OTHERS:
        if tuning.budget.left < SPARE_S:
            break
        shape = Shape(cache, tokens, batch)
        decode, default = Decode(shape, tuning.device), default_splits(shape, tuning.device)
        counts = sorted({default, *SPLITS})
        times = {n: decode.seconds(tuning.attend, tuning.timer, splits=n) for n in counts}
        best = min(times, key=lambda n: times[n])
        name = f"{tokens // 1024}k b{batch}"
        found[name] = {"chosen": default, "best": best, "seconds": times}
        words.append(f"{name}: {best} ({times[default] / times[best]:.2f}x)")
    return Result("sweep splits", f"{cache} best {', '.join(words)}", verdict="info", details=found)


def sweep_prefill(shape: Shape, tuning: Tuning) -> Result:
    """Prefill by every tile, against what the table chooses."""
    from toolchain.ops.kernels.bindings import plan

    prefill = Prefill(shape, tuning.device)
    sm = capability(tuning.device)
    chosen = plan(shape.spec, sm, shape.dtype)["prefill"]
    rows: list[dict[str, Any]] = []

    def measure(launch: Any) -> None:
        rows.append(_row(prefill, launch, tuning, tiles={"prefill": launch}))

    measure(chosen)
    launches = [tile for tile in prefill_tiles(shape, sm) if tile != chosen]
    done = _tried(launches, "prefill", shape, tuning, measure)
    return _summary("prefill", shape, rows, done, len(launches))


def _row(subject: Decode | Prefill, launch: Any, tuning: Tuning, **options: Any) -> dict[str, Any]:
    """Seconds of a configuration and how far its output is from the table's, or why it does not run."""
    row = asdict(launch) | {name: value for name, value in options.items() if name != "tiles"}
    try:
        off = subject.run(tuning.attend, **options).float() - subject.run(tuning.attend).float()
        row["difference"] = off.abs().max().item()
        return row | {"seconds": subject.seconds(tuning.attend, tuning.timer, **options)}
    except Exception as error:  # noqa: BLE001 - a tile that does not fit this GPU is a finding, whatever it raises
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises when the GPU is lost
        return row | {"error": f"{type(error).__name__}: {first_line(str(error))}"}


def _tried(launches: Sequence[Any], name: str, shape: Shape, tuning: Tuning, measure: Callable[[Any], None]) -> int:
    """Compile and measure launches, as many at a time as there are workers; how many before time ran out."""
    done = 0
    while done < len(launches) and tuning.budget.left > SPARE_S:
        batch = launches[done : done + tuning.workers]
        compile_ahead([(shape.spec, shape.dtype, name, launch) for launch in batch], tuning.workers)
        for launch in batch:
            measure(launch)
        done += len(batch)
    return done


def _summary(what: str, shape: Shape, rows: Sequence[dict[str, Any]], done: int, planned: int) -> Result:
    """The fastest row that computes the same against the first, which is the table's."""
    timed = [row for row in rows if "seconds" in row and row["difference"] <= AGREEMENT_BAR]
    best = min(timed, key=lambda row: row["seconds"], default=None)
    if best is None:
        raise RuntimeError(
            f"no configuration runs and agrees with the table's: {rows[0].get('error', 'wrong results')}"
        )
    tile = ", ".join(
        f"{name.removeprefix('BLOCK_')} {size}" for name, size in best["tile"].items() if name != "BLOCK_G"
    )
    splits = f" splits {best['splits']}" if "splits" in best else ""
    case = f"{shape.cache}: {tile} w{best['warps']} s{best['stages']}{splits}, {best['seconds'] * 1e6:.1f} us"
    first = rows[0].get("seconds", float("nan"))
    details = {"rows": list(rows), "shape": asdict(shape), "tried": done, "planned": planned}
    ended = "" if done == planned else f"time ran out after {done} of {planned} tiles"
    return Result(f"sweep {what}", case, first / best["seconds"], "chosen/best", reason=ended, details=details)


def kernel_times(body: Callable[[], object], names: Sequence[str]) -> dict[str, float]:
    """Mean microseconds of each kernel that `body` launches, by torch's profiler; gaps between them are in none."""
    from torch.profiler import ProfilerActivity, profile

    body()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        body()
        torch.cuda.synchronize()
    found = {event.key: event.device_time_total / event.count for event in profiler.key_averages()}
    return {name: found.get(name, float("nan")) for name in names}


def kernel_breakdown(caches: Sequence[str], device: str, attend: Attend) -> Result:
    """Where the time of the main cases goes, kernel by kernel."""
    found: dict[str, dict[str, float]] = {}
    for cache in caches:
        decode = Decode(Shape(cache, 8192, 8), device)
        found[cache] = kernel_times(lambda d=decode: d.walk(attend), ("decode_split", "decode_merge"))
        prefill = Prefill(Shape(cache, 4096, 1), device)
        found[cache] |= kernel_times(lambda p=prefill: p.run(attend), ("cache_write", "prefill"))
    words = ", ".join(f"{cache} {'/'.join(f'{us:.1f}' for us in times.values())}" for cache, times in found.items())
    return Result("kernel times", f"split/merge/write/prefill: {words}", unit="us", details=found)
