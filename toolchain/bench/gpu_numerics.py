"""Attention kernels against float64: output errors, and the cache bit by bit.

    error = max |kernel output - o|,   o_i = softmax_j(scale q_i . K[j]) . V[j]   in float64

q is rotated with the roundings to the compute dtype that the op's definition has (in full precision the
definition itself would be 1e-3 off in float16, since rounded queries move scores). K and V are what the
kernel stored (codes times their scale), so a code's rounding is in no error; the codes are compared with
those of the op's definition instead: the whole cache, also the slots that must stay as they are. Slots
beyond the written ones hold NaN (int8: code -128), so a kernel that reads them shows.

One scenario is a prompt on rows of different lengths, then the next token for several split counts: each
overwrites the same slot with the same values.

Legend: B batch, T new tokens, H query heads, K KV heads, G = H / K, D head dim, C capacity, S slots seen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from toolchain.bench.gpu_results import Result, judge
from toolchain.numerics import CODE_RANGE, UNIT_ROUNDOFF, dequantize, quantize
from toolchain.ops.attention import AttentionSpec, attend_in_place

ERROR_BAR = {"float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest |error| of an output. Rounding the weights and rounding the result move it by at most half a step each of a
value just below 4: 2^-10 in float16, 2^-7 in bfloat16, so 1.95e-3 and 1.56e-2 together. Sums in float32 add little."""
APART_BAR = 1e-4
"""Share of stored values that may be one step from the definition's."""
QK_NORM_APART_BAR = 2e-3
"""As above with QK-norm, whose reciprocal square root is rounded otherwise than torch's."""
LARGEST = 3.9
SPARE_SLOTS = 9
FORMATS = ("none", "int8", "fp8_e4m3")
DTYPES = ("float16", "bfloat16")

Attend = Callable[..., torch.Tensor]
"""`toolchain.ops.kernels.launch.attend`, or the plugin's entry point with `splits` taken off."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A node, a prompt of `new` tokens behind `past` ones of each row, and the split counts of the token after it.

    Split count None is the kernel's own choice.
    """

    name: str
    spec: AttentionSpec
    new: int
    past: tuple[int, ...]
    splits: tuple[int | None, ...] = (None,)


def _node(heads: int, kv_heads: int, dim: int, **options: Any) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, dim**-0.5, **({"rotary_dim": dim, "cache_format": "none"} | options))


# scores have unit variance, so only a small cap bends them; windows are shorter than every long row
_ALL: dict[str, Any] = {"window": 200, "softcap": 5.0, "qk_norm_eps": 1e-5, "interleaved": True, "rotary_dim": 32}
SCENARIOS = (
    Scenario("gqa4 d128", _node(8, 2, 128), 130, (0, 5000, 255), (None, 1, 3, 7, 32)),
    Scenario("mha d64 window", _node(4, 4, 64, window=96), 70, (300, 5), (None, 4)),
    Scenario("gqa8 d256 qk-norm", _node(8, 1, 256, qk_norm_eps=1e-6), 33, (0, 511), (None, 2)),
    Scenario(
        "gqa4 d80 partial interleaved", _node(4, 1, 80, rotary_dim=32, interleaved=True), 65, (129, 64), (None, 5)
    ),
    Scenario("gqa8 d128 softcap", _node(16, 2, 128, softcap=5.0), 40, (77, 1000), (None, 6)),
    Scenario("gqa4 d64 all", _node(8, 2, 64, **_ALL), 100, (1023, 0, 40), (None, 1, 9)),
)


def scenarios_for(dtype: str, cache: str) -> tuple[Scenario, ...]:
    """All of them with a cache format; half of them where both the dtype and the format are not the plain ones."""
    chosen = SCENARIOS
    if dtype == "bfloat16" and cache != "none":
        chosen = (SCENARIOS[0], SCENARIOS[2], SCENARIOS[-1])
    return tuple(replace(s, spec=replace(s.spec, cache_format=cache)) for s in chosen)


@dataclass(slots=True)
class Inputs:
    """Arguments of the op, changed in place by it: `lengths` [B] grows with the caches."""

    spec: AttentionSpec
    dtype: torch.dtype
    cos: torch.Tensor
    sin: torch.Tensor
    lengths: torch.Tensor
    caches: list[torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor] | None
    norms: tuple[torch.Tensor, torch.Tensor] | None

    def values(self) -> list[torch.Tensor]:
        """float64 K and V [B, K, C, D] of what the caches hold."""
        scales = self.scales or (None, None)
        return [
            x.double() if s is None else dequantize(x, s[:, None, None]).double()
            for x, s in zip(self.caches, scales, strict=True)
        ]


def make_inputs(scenario: Scenario, dtype: str, device: str, generator: torch.Generator) -> Inputs:
    """Seeded unit-variance values, the same on every device; what is not written yet is poisoned."""
    spec, kind, batch = scenario.spec, getattr(torch, dtype), len(scenario.past)
    capacity = max(scenario.past) + scenario.new + SPARE_SLOTS
    half = spec.rotary_dim // 2
    angles = torch.arange(capacity)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    caches = [_normal(generator, kind, batch, spec.num_kv_heads, capacity, spec.head_dim) for _ in range(2)]
    scales = norms = None
    if spec.quantized:
        # a few values lie beyond the range and are clamped; none is 4 or more, where a half rounds by 2e-3
        step = 3.5 / CODE_RANGE[spec.cache_format][1]
        draws = (torch.rand(spec.num_kv_heads, generator=generator) for _ in range(2))
        key_scale, value_scale = (step * (1 + 0.1 * draw) for draw in draws)
        scales = key_scale.to(device), value_scale.to(device)
        pairs = zip(caches, (key_scale, value_scale), strict=True)
        caches = [quantize(x, s[:, None, None], spec.cache_format) for x, s in pairs]
    if spec.qk_norm:
        q_norm, k_norm = (1 + 0.2 * _normal(generator, kind, spec.head_dim) for _ in range(2))
        norms = q_norm.to(device), k_norm.to(device)
    for x in caches:
        for row, past in enumerate(scenario.past):
            poison(x[row, :, past:])
    lengths = torch.tensor(scenario.past, device=device)
    tables = angles.cos().to(device), angles.sin().to(device)
    return Inputs(spec, kind, *tables, lengths, [x.to(device) for x in caches], scales, norms)


def _normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    # cut at 4 (one value in 16,000 lies beyond), so that the error bar follows from the roundings alone
    return torch.randn(*shape, generator=generator).clamp(-LARGEST, LARGEST).to(dtype)


def poison(slots: torch.Tensor) -> None:
    """Fill a view of a cache with NaN; int8 has none and gets -128, the largest code."""
    if slots.dtype == torch.int8:
        slots.fill_(-128)
    elif slots.dtype == torch.float8_e4m3fn:
        slots.view(torch.uint8).fill_(0x7F)
    else:
        slots.fill_(float("nan"))


@dataclass(slots=True)
class Found:
    """What a scenario showed: worst output error, and how its cache differs from the definition's.

    `apart` of `stored` written values are a step or more off; `far` of them are further off than rounding
    explains, or lie in a slot that must not change. An output that is not a number is an infinite error.
    """

    error: float = 0.0
    apart: int = 0
    far: int = 0
    stored: int = 0

    def add_error(self, error: float) -> None:
        """Keep the largest; NaN is larger than all."""
        self.error = max(self.error, math.inf if math.isnan(error) else error)

    @property
    def fraction(self) -> float:
        """Share of the written values that differ at all."""
        return self.apart / max(1, self.stored)


def run_scenario(scenario: Scenario, dtype: str, device: str, attend: Attend, *, seed: int = 0) -> Found:
    """A prompt and the token after it by `attend`, against float64 and the op's definition."""
    generator = torch.Generator().manual_seed(seed)
    inputs, found = make_inputs(scenario, dtype, device, generator), Found()
    spec, batch = inputs.spec, len(scenario.past)
    options: dict[str, Any] = {"scales": inputs.scales, "norms": inputs.norms}
    for new, counts in ((scenario.new, (None,)), (1, scenario.splits)):
        qkv = _normal(generator, inputs.dtype, batch, new, spec.packed_width).to(device)
        arguments = (qkv, inputs.cos, inputs.sin, inputs.lengths)
        for splits in counts:
            expected = [x.clone() for x in inputs.caches]
            out = attend(*arguments, *inputs.caches, spec, **options, splits=splits)
            attend_in_place(*arguments, expected[0], expected[1], spec, scales=inputs.scales, norms_D=inputs.norms)
            found.add_error((out.double() - exact_output(qkv, inputs)).abs().max().item())
            _compare_caches(inputs, expected, new, found)
        inputs.lengths += new
    return found


def exact_output(qkv_BTN: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """float64 attention [B, T, H*D] over the caches as they are, the new tokens already stored in them."""
    spec, (batch, new) = inputs.spec, qkv_BTN.shape[:2]
    heads, dim, group = spec.num_heads, spec.head_dim, spec.num_heads // spec.num_kv_heads
    keys_BKCD, values_BKCD = inputs.values()
    out = torch.zeros(batch, new, heads * dim, dtype=torch.float64, device=qkv_BTN.device)
    for row, past in enumerate(inputs.lengths.tolist()):
        position_T = past + torch.arange(new, device=qkv_BTN.device)
        q_THD = qkv_BTN[row, :, : heads * dim].reshape(new, heads, dim)
        q_TKGD = _turned(q_THD, position_T, inputs).reshape(new, -1, group, dim)
        keys_KSD, values_KSD = (x[row, :, : past + new] for x in (keys_BKCD, values_BKCD))
        scores_TKGS = torch.einsum("tkgd,ksd->tkgs", q_TKGD, keys_KSD) * spec.scale
        if spec.softcap:
            scores_TKGS = spec.softcap * torch.tanh(scores_TKGS / spec.softcap)
        age_TS = position_T[:, None] - torch.arange(past + new, device=qkv_BTN.device)
        hidden_TS = (age_TS < 0) | (age_TS >= spec.window) if spec.window else age_TS < 0
        weights_TKGS = scores_TKGS.masked_fill(hidden_TS[:, None, None], -torch.inf).softmax(-1)
        out[row] = torch.einsum("tkgs,ksd->tkgd", weights_TKGS, values_KSD).reshape(new, -1)
    return out


def _turned(q_THD: torch.Tensor, position_T: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Queries normed and rotated, pair (a, b) -> (a cos - b sin, b cos + a sin), each step rounded as the op says."""
    spec, half = inputs.spec, inputs.spec.rotary_dim // 2
    if inputs.norms is not None:
        x_THD = q_THD.double()
        x_THD = x_THD / (x_THD.square().mean(-1, keepdim=True) + spec.qk_norm_eps).sqrt()
        q_THD = (x_THD * inputs.norms[0].double()).to(inputs.dtype)
    cos, sin = (table[position_T][:, None].to(inputs.dtype) for table in (inputs.cos, inputs.sin))
    first, second = slice(half), slice(half, 2 * half)
    if spec.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    turned = q_THD.clone()
    turned[..., first] = q_THD[..., first] * cos - q_THD[..., second] * sin
    turned[..., second] = q_THD[..., second] * cos + q_THD[..., first] * sin
    return turned.double()


def _compare_caches(inputs: Inputs, expected: Sequence[torch.Tensor], new: int, found: Found) -> None:
    """Count the values that differ from the definition's caches; those next to each other may, once in a while."""
    slots = torch.arange(expected[0].shape[2], device=expected[0].device)
    age = slots - inputs.lengths[:, None]
    written = ((age >= 0) & (age < new))[:, None, :, None]
    dtype = str(inputs.dtype).removeprefix("torch.")
    for which, want in enumerate(expected):
        got = inputs.caches[which]
        steps = (ordered_bits(got) - ordered_bits(want)).abs()
        far = (steps > 1) & written
        if inputs.norms is not None and which == 0:
            # one rounding of a normed value may flip, and its rotation may cancel: many steps of a small result
            scale = 1.0 if inputs.scales is None else inputs.scales[0][:, None, None]
            off = (got.float() - want.float()).abs() * scale
            far &= ~(off <= 8 * UNIT_ROUNDOFF[dtype] * LARGEST)
        found.apart += int(((steps > 0) & written).sum())
        found.far += int(far.sum()) + int(((steps > 0) & ~written).sum())
        found.stored += int(written.sum()) * want.shape[1] * want.shape[3]


def ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """int32 that are one apart for neighbouring values: the code of int8, sign and magnitude of the others."""
    if x.dtype == torch.int8:
        return x.int()
    width = 8 * x.element_size()
    bits = x.view(torch.int8 if width == 8 else torch.int16).int()
    magnitude = bits & ((1 << width - 1) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def stored_problem(found: Found, spec: AttentionSpec) -> str:
    """What is wrong with the stored values; empty when they are the definition's but for a rounding here and there."""
    bar = QK_NORM_APART_BAR if spec.qk_norm else APART_BAR
    if found.far:
        return f"{found.far} stored values are wrong"
    return f"{found.fraction:.1e} of the stored values differ, bar {bar:g}" if found.fraction > bar else ""


def check_numerics(
    cache: str,
    dtype: str,
    device: str,
    attend: Attend,
    *,
    scenarios: Callable[[str, str], Sequence[Scenario]] = scenarios_for,
) -> Result:
    """The worst output error of all scenarios of a dtype and a cache format; wrong stored values fail it too."""
    chosen = scenarios(dtype, cache)
    found = {s.name: run_scenario(s, dtype, device, attend) for s in chosen}
    worst = max(found, key=lambda name: found[name].error)
    problems = {s.name: stored_problem(found[s.name], s.spec) for s in chosen}
    failed = "; ".join(f"{name}: {problem}" for name, problem in problems.items() if problem)
    apart = max(one.fraction for one in found.values())
    details = {name: asdict(one) | {"fraction": one.fraction} for name, one in found.items()}
    case = f"{dtype}, cache {cache}: {worst}; stored apart {apart:.1g}"
    return judge(
        "numerics", case, found[worst].error, "max abs err", most=ERROR_BAR[dtype], failed=failed, details=details
    )
