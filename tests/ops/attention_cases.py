"""Seeded inputs of the attention op, and a second oracle in float64 loops."""

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import torch

from toolchain.numerics import CODE_RANGE, quantize, token_scale
from toolchain.ops.attention import AttentionSpec, attend_in_place

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One call: shapes, attributes, the GPU whose tiles are used, and the pieces of decode."""

    name: str
    new: int
    past: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    capacity: int = 0
    cache: str = "none"
    dtype: str = "fp16"
    splits: int | None = None
    sm: int = 89
    seed: int = 0
    options: dict = field(default_factory=dict)

    @property
    def spec(self) -> AttentionSpec:
        cache = self.cache.removesuffix("_token")
        options = {"rotary_dim": self.dim, "cache_format": cache, "token_scales": cache != self.cache} | self.options
        return AttentionSpec(self.heads, self.kv_heads, self.dim, self.dim**-0.5, **options)


def make_inputs(case: Case) -> dict:
    """Arguments of the op; slots beyond the valid length hold NaN, or codes far from any written."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, spec, batch = DTYPES[case.dtype], case.spec, len(case.past)
    capacity = case.capacity or max(case.past) + case.new + 9

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    half = spec.rotary_dim // 2
    angles = torch.arange(capacity)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    caches = [normal(batch, spec.num_kv_heads, capacity, spec.head_dim) for _ in range(2)]
    scales = None
    if spec.token_scales:
        scales = tuple(token_scale(x, spec.cache_format).squeeze(-1) for x in caches)
        caches = [quantize(x, s[..., None], spec.cache_format) for x, s in zip(caches, scales, strict=True)]
    elif spec.quantized:
        # the largest of the standard normal values lie beyond the range, so that they are clamped
        step = 3.5 / CODE_RANGE[case.cache][1]
        scales = tuple(step * (1 + 0.3 * torch.rand(spec.num_kv_heads, generator=generator)) for _ in range(2))
        caches = [quantize(x, s[:, None, None], case.cache) for x, s in zip(caches, scales, strict=True)]
    for row, past in enumerate(case.past):
        for cache in (*caches, *(scales if spec.token_scales else ())):
            _poison(cache, row, past)
    norms = tuple(normal(spec.head_dim) + 1.5 for _ in range(2)) if spec.qk_norm else None
    return {
        "qkv": normal(batch, case.new, spec.packed_width),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "past_lengths": torch.tensor(case.past),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "scales": scales,
        "norms": norms,
    }


def _poison(cache: torch.Tensor, row: int, past: int) -> None:
    if cache.dtype == torch.int8:
        cache[row, :, past:] = -128
    elif cache.dtype == torch.float8_e4m3fn:
        cache.view(torch.uint8)[row, :, past:] = 0x7F  # NaN
    else:
        cache[row, :, past:] = float("nan")


def reference(case: Case, inputs: dict) -> tuple[torch.Tensor, ...]:
    """Output, both caches, and the scales where the cache is quantized, by the op's own torch definition."""
    key, value = inputs["key_cache"].clone(), inputs["value_cache"].clone()
    scales = tuple(scale.clone() for scale in inputs["scales"] or ())
    arguments = [inputs[name] for name in ("qkv", "cos", "sin", "past_lengths")]
    out = attend_in_place(*arguments, key, value, case.spec, scales=scales or None, norms_D=inputs["norms"])
    return out, key, value, *scales


def exact(case: Case, inputs: dict) -> np.ndarray:
    """The output of an unquantized call in float64, by loops over rows, heads and tokens."""
    spec, (batch, new) = case.spec, inputs["qkv"].shape[:2]
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = inputs["qkv"].double().numpy().reshape(batch, new, -1, dim)
    out = np.zeros((batch, new, heads, dim))
    for b, past in enumerate(case.past):
        keys = inputs["key_cache"][b].double().numpy()
        values = inputs["value_cache"][b].double().numpy()
        for t in range(new):
            keys[:, past + t] = [_turn(case, inputs, qkv[b, t, heads + k], past + t, 1) for k in range(kv_heads)]
            values[:, past + t] = qkv[b, t, heads + kv_heads :]
        for t in range(new):
            first = max(0, past + t + 1 - spec.window) if spec.window else 0
            for h in range(heads):
                k = h // (heads // kv_heads)
                query = _turn(case, inputs, qkv[b, t, h], past + t, 0)
                scores = keys[k, first : past + t + 1] @ query * spec.scale
                if spec.softcap:
                    scores = spec.softcap * np.tanh(scores / spec.softcap)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights @ values[k, first : past + t + 1] / weights.sum()
    return out.reshape(batch, new, -1)


def _turn(case: Case, inputs: dict, x: np.ndarray, position: int, which: int) -> np.ndarray:
    spec = case.spec
    if inputs["norms"] is not None:
        x = x / math.sqrt((x * x).mean() + spec.qk_norm_eps) * inputs["norms"][which].double().numpy()
    half, y = spec.rotary_dim // 2, x.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if spec.interleaved else (i, i + half)
        cos, sin = float(inputs["cos"][position, i]), float(inputs["sin"][position, i])
        y[a], y[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return y


def renamed(case: Case, **changes: object) -> Case:
    """`case` with changes."""
    return dataclasses.replace(case, **changes)
