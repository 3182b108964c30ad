"""The compiled kernels on a CUDA GPU against the op's definition: what the interpreter cannot show (bf16, PTX)."""

import pytest
import torch

from tests.ops.attention_cases import Case, make_inputs, reference, renamed
from tests.ops.test_kernel_numerics import CASES

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2}
LONG = [
    Case("prefill_long", 700, (1300, 0), heads=8, dim=128),
    Case("decode_long", 1, (4000, 17), heads=8, dim=128, splits=11),
]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("cache", ["none", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("case", CASES + LONG, ids=lambda case: case.name)
def test_matches_the_definition(case: Case, cache: str, dtype: str) -> None:
    from toolchain.ops.kernels.launch import attend

    if cache == "fp8_e4m3" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 conversions")
    case = renamed(case, cache=cache, dtype=dtype)
    inputs = make_inputs(case)
    moved = {
        name: tuple(x.cuda() for x in value) if isinstance(value, tuple) else value if value is None else value.cuda()
        for name, value in inputs.items()
    }
    want, *want_caches = reference(case, inputs)
    names = ("qkv", "cos", "sin", "past_lengths", "key_cache", "value_cache")
    out = attend(
        *(moved[name] for name in names), case.spec, scales=moved["scales"], norms=moved["norms"], splits=case.splits
    )
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=TOLERANCE[dtype])
    for name, want_cache in zip(names[4:], want_caches, strict=True):
        got, expected = moved[name].cpu().float(), want_cache.float()
        unequal = (got != expected) & ~(got.isnan() & expected.isnan())
        assert unequal.float().mean() < (0.002 if case.spec.qk_norm else 1e-4)
