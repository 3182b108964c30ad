"""Speed of the attention kernels on a GPU, against what the same GPU does best.

    copy bandwidth  2 n / t            bytes read + bytes written of a copy of n bytes
    decode          2 B K S D e / t    bytes of K and V read (e bytes an element), over the whole call: split + merge
    prefill         4 B H D T (T + 1) / 2 / t    floating-point operations of the causal half, over the whole call

Calls are captured in a CUDA graph and replayed, so no launch from the host is in a time; times are medians
of event pairs. Decode walks through so many caches that each is out of the L2 cache when its turn comes.
Prefill is compared with torch's flash attention on the same q, k and v (cos = 1 and sin = 0 make the
rotation the identity; ours also stores the cache), both over warm memory.

Legend: B batch, T new tokens, S slots seen, H query heads, K KV heads, D head dim.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from toolchain.bench.gpu_results import Result, judge
from toolchain.numerics import CODE_RANGE, quantize
from toolchain.ops.attention import AttentionSpec

DECODE_BAR = 0.80
"""Cache bytes a second of decode, relative to the copy bandwidth."""
PREFILL_BAR = 0.70
"""Speed of prefill relative to torch's flash attention."""
AGREEMENT_BAR = 4e-3
"""Largest difference of prefill from flash attention in float16: both are within 2e-3 of the truth."""
COPY_BYTES = 2 << 30
ROTATE_BYTES = 1 << 30
"""Caches a decode timing walks through, in all: many times an L2 cache (60 MB on an H200)."""
MOST_CACHES = 256
DECODE_CALLS, PREFILL_CALLS = 32, 4
"""Fewest calls in one graph, so that its own launch weighs nothing."""
TARGET_S = 0.04
"""Seconds a timing aims to take in all."""
FEWEST_SAMPLES, MOST_SAMPLES = 11, 101
BYTES = {"none": 2, "int8": 1, "fp8_e4m3": 1}

Attend = Callable[..., torch.Tensor]


class Timer(Protocol):
    """How calls are timed; the tests put another one in its place."""

    def capture(self, body: Callable[[], object]) -> Callable[[], None]:
        """`body`, warmed up, as one launch without host work in it."""
        ...

    def sample(self, launch: Callable[[], None]) -> list[float]:
        """Seconds of each of several launches."""
        ...


class CudaTimer:
    """CUDA graphs and events on the current device."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def capture(self, body: Callable[[], object]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            body()
            self._stream.synchronize()
            # not torch.cuda.graph: it empties the allocator each time, and a sweep captures hundreds
            graph.capture_begin()
            try:
                body()
            finally:
                graph.capture_end()
        return graph.replay

    def sample(self, launch: Callable[[], None]) -> list[float]:
        first = self._timed(launch, 3)
        return self._timed(launch, min(MOST_SAMPLES, max(FEWEST_SAMPLES, int(TARGET_S / max(min(first), 1e-6)))))

    def _timed(self, launch: Callable[[], None], count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            begin.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in events]


def median_seconds(timer: Timer, body: Callable[[], object], calls: int = 1, walks: int = 1) -> float:
    """Median seconds of one call; `body` makes `calls` of them, and one launch runs it `walks` times."""

    def repeated() -> None:
        for _ in range(walks):
            body()

    return statistics.median(timer.sample(timer.capture(repeated))) / (calls * walks)


def copy_bandwidth(device: str, timer: Timer, *, count: int = COPY_BYTES) -> float:
    """Bytes read and written a second by a copy of `count` random bytes."""
    source = torch.randint(-(1 << 62), 1 << 62, (count // 8,), device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 8 / median_seconds(timer, lambda: target.copy_(source))


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention call: `tokens` are the slots decode sees, or the new tokens of prefill."""

    cache: str
    tokens: int
    batch: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "float16"

    @property
    def spec(self) -> AttentionSpec:
        """The attributes of the node."""
        return AttentionSpec(self.heads, self.kv_heads, self.dim, self.dim**-0.5, self.dim, self.cache)

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V: 2 B K S D e."""
        return 2 * self.batch * self.kv_heads * self.tokens * self.dim * BYTES[self.cache]

    @property
    def flops(self) -> float:
        """Operations of causal prefill: two products over T (T + 1) / 2 pairs, B H of them, 2 D each."""
        return 2.0 * self.batch * self.heads * self.dim * self.tokens * (self.tokens + 1)


DECODE_CASES = tuple(Shape(cache, 8192, 8) for cache in BYTES)
DECODE_OTHERS = ((1024, 8), (32768, 8), (8192, 1))
"""Contexts and batches reported beside the bar."""
PREFILL_CASES = (Shape("none", 4096, 1), Shape("none", 4096, 2), Shape("none", 1024, 2), Shape("none", 8192, 1))
PREFILL_BAR_TOKENS = 4096


def _arguments(shape: Shape, new: int, device: str) -> tuple[torch.Tensor, ...]:
    """Random qkv, tables of the identity rotation, and lengths that make the last new token see `tokens` slots."""
    width = shape.spec.packed_width
    qkv = torch.randn(shape.batch, new, width, device=device).to(getattr(torch, shape.dtype))
    cos = torch.ones(shape.tokens, shape.dim // 2, device=device)
    lengths = torch.full((shape.batch,), shape.tokens - new, dtype=torch.int64, device=device)
    return qkv, cos, torch.zeros_like(cos), lengths


def _scales(shape: Shape, device: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    if shape.cache == "none":
        return None
    scale = torch.full((shape.kv_heads,), 4.0 / CODE_RANGE[shape.cache][1], device=device)
    return scale, scale.clone()


def _caches(shape: Shape, device: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` pairs of random caches; each after the first is a copy, since their addresses alone matter."""
    pair = []
    for _ in range(2):
        values = torch.randn(shape.batch, shape.kv_heads, shape.tokens, shape.dim, device=device)
        scales = _scales(shape, device)
        pair.append(
            values.to(getattr(torch, shape.dtype))
            if scales is None
            else quantize(values, scales[0][:, None, None], shape.cache)
        )
    return [(pair[0], pair[1])] + [(pair[0].clone(), pair[1].clone()) for _ in range(count - 1)]


class Decode:
    """One decode shape with its caches in memory; made once, timed in many ways."""

    def __init__(self, shape: Shape, device: str, *, rotate_bytes: int = ROTATE_BYTES) -> None:
        count = min(MOST_CACHES, max(2, -(-rotate_bytes // shape.cache_bytes)))
        self.shape = shape
        self.arguments = _arguments(shape, 1, device)
        self.scales = _scales(shape, device)
        self.caches = _caches(shape, device, count)

    def walk(self, attend: Attend, **options: Any) -> None:
        """One call on each cache."""
        for key, value in self.caches:
            attend(*self.arguments, key, value, self.shape.spec, scales=self.scales, **options)

    def run(self, attend: Attend, **options: Any) -> torch.Tensor:
        """The output [B, 1, H*D] on the first cache."""
        return attend(*self.arguments, *self.caches[0], self.shape.spec, scales=self.scales, **options)

    def seconds(self, attend: Attend, timer: Timer, **options: Any) -> float:
        """Median seconds of a call."""
        walks = -(-DECODE_CALLS // len(self.caches))
        return median_seconds(timer, lambda: self.walk(attend, **options), len(self.caches), walks)


def default_splits(shape: Shape, device: str) -> int:
    """The split count that `launch.attend` chooses by itself."""
    from toolchain.ops.kernels.bindings import plan
    from toolchain.ops.kernels.tiles import choose_splits

    block = plan(shape.spec, capability(device), shape.dtype)["decode_split"].tile["BLOCK_N"]
    count = torch.cuda.get_device_properties(device).multi_processor_count if device != "cpu" else 1
    return choose_splits(shape.batch, shape.kv_heads, shape.tokens, block, count)


def capability(device: str) -> int:
    """Compute capability, 10 * major + minor; 90 where there is no GPU."""
    if device == "cpu":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def decode_speed(shape: Shape, device: str, attend: Attend, timer: Timer, bandwidth: float) -> Result:
    """Share of the copy bandwidth at which decode reads its cache, against the bar."""
    seconds = Decode(shape, device).seconds(attend, timer)
    share = shape.cache_bytes / seconds / bandwidth
    splits = default_splits(shape, device)
    case = f"{shape.cache} {shape.tokens // 1024}k b{shape.batch} splits {splits}, {seconds * 1e6:.1f} us"
    details = {"seconds": seconds, "bytes": shape.cache_bytes, "bytes_per_s": shape.cache_bytes / seconds}
    return judge("decode", case, share, "of copy BW", least=DECODE_BAR, details=details | {"splits": splits})


def decode_elsewhere(cache: str, device: str, attend: Attend, timer: Timer, bandwidth: float) -> Result:
    """The same share at other contexts and batches, for information."""
    found = {}
    for tokens, batch in DECODE_OTHERS:
        shape = Shape(cache, tokens, batch)
        seconds = Decode(shape, device).seconds(attend, timer)
        share, splits = shape.cache_bytes / seconds / bandwidth, default_splits(shape, device)
        found[f"{tokens // 1024}k b{batch}"] = {"seconds": seconds, "share": share, "splits": splits}
    shares = "/".join(f"{one['share']:.2f}" for one in found.values())
    return Result("decode", f"{cache} {' / '.join(found)}", shares, "of copy BW", details=found)


class Prefill:
    """One prefill shape in memory, and torch's flash attention on the same q, k and v."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        self.arguments = _arguments(shape, shape.tokens, device)
        self.scales = _scales(shape, device)
        ((self.key, self.value),) = _caches(shape, device, 1)

    def run(self, attend: Attend, **options: Any) -> torch.Tensor:
        """Our output [B, T, H*D]."""
        return attend(*self.arguments, self.key, self.value, self.shape.spec, scales=self.scales, **options)

    def seconds(self, attend: Attend, timer: Timer, **options: Any) -> float:
        """Median seconds of a call."""
        return median_seconds(timer, lambda: self.run(attend, **options), walks=PREFILL_CALLS)

    def flash(self) -> tuple[Callable[[], torch.Tensor], str]:
        """Flash attention of torch, output [B, H, T, D], and how its KV heads are shared."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        shape = self.shape
        heads = self.arguments[0].unflatten(-1, (-1, shape.dim)).transpose(1, 2)
        q, k, v = (x.contiguous() for x in heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1))

        def shared() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return sdpa(q, k, v, is_causal=True, enable_gqa=True)

        try:
            shared()
        except RuntimeError:  # this torch's flash attention does not share KV heads
            group = shape.heads // shape.kv_heads
            keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

            def plain() -> torch.Tensor:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    return sdpa(q, keys, values, is_causal=True)

            return plain, "repeated heads"
        return shared, "enable_gqa"


def prefill_speed(shape: Shape, device: str, attend: Attend, timer: Timer) -> Result:
    """Our speed over flash attention's: judged at one length, with the results compared; information at others."""
    prefill = Prefill(shape, device)
    flash, sharing = prefill.flash()
    error = (prefill.run(attend).float() - flash().transpose(1, 2).flatten(2).float()).abs().max().item()
    ours, theirs = prefill.seconds(attend, timer), median_seconds(timer, flash, walks=PREFILL_CALLS)
    tflops = {"ours": shape.flops / ours / 1e12, "flash": shape.flops / theirs / 1e12}
    case = f"T {shape.tokens} b{shape.batch}: {tflops['ours']:.0f} of {tflops['flash']:.0f} TFLOP/s, flash by {sharing}"
    details = {"seconds": ours, "flash_seconds": theirs, "tflops": tflops, "flash": sharing, "difference": error}
    failed = "" if error <= AGREEMENT_BAR else f"differs from flash by {error:.2g}, bar {AGREEMENT_BAR:g}"
    if shape.tokens != PREFILL_BAR_TOKENS and not failed:
        return Result("prefill", case, theirs / ours, "of flash", details=details)
    return judge("prefill", case, theirs / ours, "of flash", least=PREFILL_BAR, failed=failed, details=details)


def prefill_codes(cache: str, device: str, attend: Attend, timer: Timer) -> Result:
    """TFLOP/s of prefill over a cache of codes, for information."""
    shape = Shape(cache, PREFILL_BAR_TOKENS, 1)
    seconds = Prefill(shape, device).seconds(attend, timer)
    case = f"T {shape.tokens} b{shape.batch} cache {cache}, {seconds * 1e6:.1f} us"
    return Result("prefill", case, shape.flops / seconds / 1e12, "TFLOP/s", details={"seconds": seconds})
