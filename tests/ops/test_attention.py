"""The op's own definition against float64 loops, prompts beyond one part of queries among them."""

import numpy as np
import pytest
import torch

from tests.ops.attention_cases import Case, exact, make_inputs, reference, renamed
from toolchain.ops import attention

LONG = [
    Case("one_token_beyond_a_part", 129, (0, 7), heads=2, kv_heads=1, dim=16),
    Case("three_parts", 261, (3, 40), dim=16),
    Case("window", 261, (3, 140), dim=16, options={"window": 70}),
    Case("softcap", 200, (0, 65), dim=16, options={"softcap": 4.0, "window": 500}),
    Case("decode", 1, (300, 0), dim=16),
]


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_prompts_are_the_formula(case):
    case = renamed(case, dtype="fp32")
    inputs = make_inputs(case)
    assert np.abs(reference(case, inputs)[0].double().numpy() - exact(case, inputs)).max() < 2e-5


@pytest.mark.parametrize("cache", ["none", "int8", "int8_token", "fp8_e4m3_token"])
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_parts_of_the_queries_change_nothing_but_last_bits(case, cache, monkeypatch):
    case = renamed(case, cache=cache, dtype="fp32")
    inputs = make_inputs(case)
    out, *caches = reference(case, inputs)
    monkeypatch.setattr(attention, "QUERY_PART", 7)
    small, *small_caches = reference(case, inputs)
    # float32 sums of up to 301 slots in another order: some ten units in the last place of outputs up to 4
    torch.testing.assert_close(small, out, rtol=0, atol=1e-5)
    for one, other in zip(caches, small_caches, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
