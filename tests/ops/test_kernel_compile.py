"""Ahead-of-time compilation without a GPU, and the budget of registers and shared memory.

A few combinations, every GPU and every cache format among them; `python -m tests.ops.compiled_grid` does all.
"""

from pathlib import Path

import pytest

from tests.ops.compiled_grid import VARIANTS, faults, spec_of
from toolchain.errors import DtoolError
from toolchain.ops.kernels import compile as kernel_compile
from toolchain.ops.kernels.bindings import ARGUMENTS
from toolchain.ops.kernels.compile import compile_kernels
from toolchain.ops.kernels.tiles import SHARED_LIMIT, choose_splits, launches

pytest.importorskip("triton")

CHOSEN = [
    (80, 64, "int8", "float16", "plain"),
    (86, 64, "none", "float16", "plain"),
    (89, 128, "fp8_e4m3", "float16", "plain"),
    (90, 128, "none", "bfloat16", "plain"),
    (90, 128, "fp8_e4m3", "float16", "all"),
    (100, 64, "int8", "bfloat16", "plain"),
    (120, 64, "fp8_e4m3", "float16", "plain"),
]


@pytest.mark.parametrize(("sm", "dim", "cache", "dtype", "variant"), CHOSEN)
def test_budget(sm: int, dim: int, cache: str, dtype: str, variant: str, tmp_path: Path) -> None:
    kernels = compile_kernels(spec_of(dim, cache, **VARIANTS[variant]), sm, dtype, cache_dir=tmp_path)
    assert [kernel.name for kernel in kernels] == list(ARGUMENTS)
    assert faults(kernels) == []
    for kernel in kernels:
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.function.encode() in kernel.cubin
        assert b"/toolchain/" not in kernel.cubin


def test_bytes_are_the_same_in_another_process(tmp_path: Path) -> None:
    """The child is also the way out of a process in which the interpreter is on."""
    spec = spec_of(32, "int8")
    here = compile_kernels(spec, 89, "float16", cache_dir=tmp_path / "here")
    there = kernel_compile._compile_in_child(spec, 89, "float16", tmp_path / "there")
    assert here == there


@pytest.mark.parametrize(
    ("sm", "changes", "dtype", "expected"),
    [
        (80, {"cache": "fp8_e4m3"}, "float16", "sm_89"),
        (75, {}, "float16", "one of sm"),
        (90, {"dim": 257}, "float16", "head_dim"),
        (90, {}, "float32", "float16 or bfloat16"),
    ],
)
def test_refusals(sm: int, changes: dict, dtype: str, expected: str) -> None:
    spec = spec_of(**({"dim": 64, "cache": "none"} | changes))
    with pytest.raises(DtoolError) as caught:
        compile_kernels(spec, sm, dtype)
    assert expected in caught.value.expected
    assert caught.value.found
    assert caught.value.fix


@pytest.mark.parametrize("sm", sorted(SHARED_LIMIT))
@pytest.mark.parametrize("dim", [16, 80, 192, 256])
def test_every_gpu_has_tiles(sm: int, dim: int) -> None:
    for cache_bytes in (1, 2, 4):
        table = launches(sm, dim, 3, cache_bytes)
        assert set(table) == set(ARGUMENTS)
        assert all(size & (size - 1) == 0 for launch in table.values() for size in launch.tile.values())


def test_splits_fill_the_gpu_but_leave_no_split_less_than_a_tile() -> None:
    assert choose_splits(1, 8, 8192, 64, 132) == 49
    assert choose_splits(64, 8, 8192, 64, 132) == 1
    assert choose_splits(1, 1, 100, 64, 132) == 2
