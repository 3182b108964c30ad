"""The Triton kernels, interpreted on the CPU, against the op's definition and against float64 loops.

Keys, values and codes must equal the reference's: the kernels round where eager torch rounds. Only QK-norm
may move a key by one unit in the last place, as its sum of squares is formed in another order. Outputs
of unit-variance inputs agree to 2e-3 in fp16 (one unit in the last place of values in 2..4).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.attention_cases import DTYPES, Case, exact, make_inputs, reference, renamed
from tests.ops.interpreter import Interpreter, run_attend, run_write
from toolchain.numerics import SMALLEST_SCALE, dequantize, quantize

HALF_TOLERANCE = 2e-3
SINGLE_TOLERANCE = 2e-5
NORMED = {"qk_norm_eps": 1e-6}

CASES = [
    Case("mha", 5, (0, 3), heads=2),
    Case("gqa4_long", 70, (61, 0, 40), heads=8),
    Case("gqa3_partial_tiles", 37, (20, 130), heads=6, dim=32),
    Case("gqa8_dim128", 19, (70,), heads=8, kv_heads=1, dim=128),
    Case("dim16_codes", 9, (20, 3), dim=16),
    Case("decode_dim16_codes", 1, (70,), dim=16, splits=2),
    Case("dim80", 33, (12, 64), dim=80),
    Case("dim100_partial_rotary", 9, (65,), dim=100, options={"rotary_dim": 20}),
    Case("dim256", 20, (40,), dim=256, heads=2, kv_heads=1),
    Case("softcap", 40, (63, 5), options={"softcap": 5.0}),
    Case("window_small", 150, (90, 3), heads=2, options={"window": 20}),
    Case("window_large", 30, (50, 3), options={"window": 500}),
    Case("normed", 30, (62, 5), options=NORMED),
    Case("interleaved_partial", 20, (61,), options={"interleaved": True, "rotary_dim": 32}),
    Case(
        "everything", 40, (300, 5), heads=6, dim=80, options=NORMED | {"softcap": 9.0, "window": 70, "rotary_dim": 32}
    ),
    Case("hopper_tiles", 150, (10, 130), heads=2, kv_heads=1, sm=90),
    Case("hopper_apart", 40, (300,), 2, 1, dim=256, sm=90, options=NORMED | {"window": 200, "rotary_dim": 128}),
    Case("decode_mha", 1, (7, 20), heads=2, splits=3),
    Case("decode_gqa4", 1, (300, 0, 63), heads=8, splits=4),
    Case("decode_gqa3", 1, (129, 64), heads=6, dim=32, splits=2),
    Case("decode_gqa8", 1, (200,), heads=8, kv_heads=1, dim=128, splits=5),
    Case("decode_dim80", 1, (130, 3), dim=80, splits=3),
    Case("decode_dim256", 1, (70,), dim=256, heads=2, kv_heads=1, splits=2),
    Case("decode_one_split", 1, (150, 64)),
    Case("decode_many_splits", 1, (66, 0), splits=40),
    Case("decode_window_small", 1, (300, 5), options={"window": 70}, splits=3),
    Case("decode_window_large", 1, (100, 5), options={"window": 5000}, splits=3),
    Case("decode_softcap", 1, (100, 61), options={"softcap": 5.0}, splits=2),
    Case("decode_normed", 1, (100, 61), options=NORMED, splits=2),
    Case("decode_everything", 1, (200,), heads=6, dim=80, splits=3, options=NORMED | {"softcap": 9.0, "window": 90}),
    Case("decode_full", 1, (127,), capacity=128, splits=3),
]
CODED = [case for case in CASES if {"dim80", "gqa4", "codes"} & set(case.name.split("_"))]


def check(case: Case, interpreter: Interpreter) -> None:
    inputs = make_inputs(case)
    want, *want_caches = reference(case, inputs)
    got, *got_caches = interpreter(run_attend, case, inputs)
    tolerance = HALF_TOLERANCE if case.dtype == "fp16" else SINGLE_TOLERANCE
    tolerance += moved_output(case, inputs, got_caches, want_caches)
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    for got_cache, want_cache in zip(got_caches, want_caches, strict=True):
        if got_cache.dtype == torch.float32 and case.spec.qk_norm:  # scales of tokens
            torch.testing.assert_close(got_cache, want_cache, rtol=2**-10, atol=0, equal_nan=True)
            continue
        unequal = (got_cache.float() != want_cache.float()) & ~(got_cache.float().isnan() & want_cache.float().isnan())
        if not case.spec.qk_norm:
            assert not unequal.any()
            continue
        assert unequal.float().mean() < 0.002
        # a step of e4m3 is 1/8 of a value, of fp16 1/1024; of int8 it is 1
        torch.testing.assert_close(got_cache.float(), want_cache.float(), rtol=0.13, atol=1.01, equal_nan=True)


def moved_output(case: Case, inputs: dict, got_caches: list, want_caches: list) -> float:
    """How far an output may move where QK-norm moved a query or a key by one unit, and with a key a code by one step.

    A score s of probability p moves the output by p (1 - p) ds (v - o), o what all other values make: at most
    ds |v - o| / 4. Queries, keys and values are taken to reach 4, and v - o to reach 8.
    """
    if not case.spec.qk_norm:
        return 0.0
    moved = 4 * torch.finfo(DTYPES[case.dtype]).eps
    if case.spec.quantized:
        scales = [c[2] for c in (got_caches, want_caches)] if case.spec.token_scales else [inputs["scales"][0]] * 2
        shape = (..., None) if case.spec.token_scales else (slice(None), None, None)
        pairs = zip((got_caches[0], want_caches[0]), scales, strict=True)
        got, want = (dequantize(codes, scale[shape]).nan_to_num() for codes, scale in pairs)
        moved += float((got - want).abs().max())
    return case.spec.scale * 4 * moved * 8 / 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(case: Case, interpreter: Interpreter) -> None:
    check(case, interpreter)


@pytest.mark.parametrize("cache", ["int8", "fp8_e4m3", "int8_token", "fp8_e4m3_token"])
@pytest.mark.parametrize("case", CODED, ids=lambda case: case.name)
def test_codes(case: Case, cache: str, interpreter: Interpreter) -> None:
    check(renamed(case, cache=cache, seed=1), interpreter)


@pytest.mark.parametrize("name", ["gqa3_partial_tiles", "everything", "decode_gqa8", "decode_everything"])
def test_float64(name: str, interpreter: Interpreter) -> None:
    """In fp32 the kernels agree with the loops to 2e-5: the formula is right, rounding apart."""
    case = renamed(next(case for case in CASES if case.name == name), dtype="fp32")
    inputs = make_inputs(case)
    want = exact(case, inputs)
    got = interpreter(run_attend, case, inputs)[0]
    assert np.abs(got.double().numpy() - want).max() < SINGLE_TOLERANCE


@pytest.mark.parametrize(("cache", "step"), [("int8", 1.0), ("int8", 0.37), ("fp8_e4m3", 1.0), ("fp8_e4m3", 0.37)])
def test_every_half_is_encoded_as_torch_does(cache: str, step: float, interpreter: Interpreter) -> None:
    """All finite fp16 values, ties and values beyond the range among them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    finite = bits.view(torch.float16)
    finite = finite[finite.isfinite()]
    case = Case("codes", len(finite) // 64, (0,), heads=1, kv_heads=1, dim=64, cache=cache)
    inputs = make_inputs(case)
    inputs["qkv"][0, :, 128:] = finite.reshape(-1, 64)
    inputs["scales"] = (torch.tensor([step]), torch.tensor([step]))
    codes = interpreter(run_write, case, inputs)[1][0, 0, : case.new]
    assert torch.equal(codes.float().flatten(), quantize(finite, torch.tensor(step), cache).float())


@pytest.mark.parametrize("cache", ["int8_token", "fp8_e4m3_token"])
@pytest.mark.parametrize("new", [1, 40])
def test_one_token_far_larger_than_the_others_leaves_them_their_precision(
    cache: str, new: int, interpreter: Interpreter
) -> None:
    """Weights are multiplied in units of the largest value scale so far; here it is 1000 times the others'."""
    case = Case("outlier", new, (200, 63), heads=8, cache=cache, splits=3)
    inputs = make_inputs(case)
    inputs["scales"][1][:, :, 40] *= 1000
    inputs["scales"][0][:, :, 40] = 0.0  # its score is 0, so it is seen like any other
    want, got = reference(case, inputs)[0], interpreter(run_attend, case, inputs)[0]
    torch.testing.assert_close(got, want, rtol=2e-3, atol=HALF_TOLERANCE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("new", [1, 9])
def test_a_token_that_is_not_finite_shows_and_spoils_no_other_row(
    bad: float, new: int, interpreter: Interpreter
) -> None:
    case = Case("bad", new, (70, 20), cache="int8_token")
    inputs = make_inputs(case)
    inputs["qkv"][0, 0, case.heads * case.dim + 3] = bad  # a key of KV head 0
    want, got = reference(case, inputs), interpreter(run_attend, case, inputs)
    heads_seen, groups = got[0][0].unflatten(-1, (case.heads, case.dim)), case.heads // case.kv_heads
    assert heads_seen[:, :groups].isnan().all()
    assert heads_seen[:, groups:].isfinite().all()
    assert got[0][1].isfinite().all()
    for ours, theirs in zip(got[3:], want[3:], strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("new", [1, 5])
def test_tokens_of_zeros_get_the_least_scale_and_read_as_zeros(new: int, interpreter: Interpreter) -> None:
    case = Case("zeros", new, (0, 0), cache="int8_token")
    inputs = make_inputs(case)
    inputs["qkv"].zero_()
    out, _, _, key_scale, value_scale = interpreter(run_attend, case, inputs)
    assert (out == 0).all()
    assert all((scale[:, :, :new] == SMALLEST_SCALE).all() for scale in (key_scale, value_scale))


@pytest.mark.parametrize("new", [1, 12])
def test_nothing_is_written_beyond_the_capacity(new: int, interpreter: Interpreter) -> None:
    case = Case("overrun", new, (30 if new > 1 else 32,), capacity=32)
    inputs = make_inputs(renamed(case, past=(10,), new=1))
    inputs |= {"qkv": make_inputs(renamed(case, capacity=64))["qkv"], "past_lengths": torch.tensor(case.past)}
    arena = torch.full((4, *inputs["key_cache"].shape), 7.0, dtype=torch.float16)
    arena[1], arena[2] = inputs["key_cache"], inputs["value_cache"]
    _, guard = interpreter(run_in_arena, case, inputs, arena)
    assert (guard[0] == 7).all()
    assert (guard[3] == 7).all()
    if new == 1:
        assert torch.equal(guard[1:3].nan_to_num(), arena[1:3].nan_to_num())


def run_in_arena(case: Case, inputs: dict, arena: torch.Tensor) -> tuple:
    inputs |= {"key_cache": arena[1], "value_cache": arena[2]}
    return run_attend(case, inputs)[0], arena


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small calls of every kind."""
    new = draw(st.sampled_from([1, 1, 2, 17, 66]))
    group, kv_heads = draw(st.sampled_from([1, 2, 3, 4, 5, 8])), draw(st.integers(1, 2))
    dim = draw(st.sampled_from([32, 48, 64, 80, 96, 128]))
    options = {
        "rotary_dim": draw(st.sampled_from([dim, dim // 2, 16])),
        "interleaved": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 4.0, 30.0])),
        "window": draw(st.sampled_from([0, 0, 1, 33, 64, 1000])),
        "qk_norm_eps": draw(st.sampled_from([0.0, 1e-5])),
    }
    past = tuple(draw(st.lists(st.integers(0, 200), min_size=1, max_size=3)))
    cache = draw(st.sampled_from(["none", "int8", "fp8_e4m3", "int8_token", "fp8_e4m3_token"]))
    splits, sm = draw(st.sampled_from([1, 2, 7])), draw(st.sampled_from([89, 90]))
    seed = draw(st.integers(0, 1000))
    return Case("drawn", new, past, group * kv_heads, kv_heads, dim, 0, cache, "fp16", splits, sm, seed, options)


@pytest.mark.matrix
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(case=cases())
def test_sweep(case: Case, interpreter: Interpreter) -> None:
    check(case, interpreter)
