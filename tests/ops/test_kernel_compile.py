"""Ahead-of-time compilation without a GPU, and the budget of registers and shared memory.

A few combinations, every GPU and every cache format among them; `python -m tests.ops.compiled_grid` does all.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.ops.compiled_grid import VARIANTS, faults, spec_of
from toolchain.errors import DtoolError
from toolchain.ops.kernels import compile as kernel_compile
from toolchain.ops.kernels.bindings import ARGUMENTS
from toolchain.ops.kernels.compile import compile_kernels
from toolchain.ops.kernels.tiles import MOST_SPLITS, SHARED_LIMIT, Launch, choose_splits, launches

triton = pytest.importorskip("triton")

CHOSEN = [
    (80, 64, "int8", "float16", "plain"),
    (86, 64, "none", "float16", "plain"),
    (89, 128, "fp8_e4m3", "float16", "plain"),
    (90, 128, "none", "bfloat16", "plain"),
    (80, 128, "int8_token", "float16", "plain"),
]
LARGE = [  # by `make matrix`: ten seconds each
    (90, 128, "fp8_e4m3", "bfloat16", "all"),
    (90, 256, "int8", "bfloat16", "all"),
    (100, 128, "int8", "float16", "plain"),
    (120, 64, "fp8_e4m3", "float16", "plain"),
    (90, 128, "int8_token", "bfloat16", "all"),
    (89, 64, "fp8_e4m3_token", "float16", "plain"),
]
MATRIX = [pytest.param(*each, marks=pytest.mark.matrix) for each in LARGE]


def local_accesses(cubin: bytes) -> int:
    """Instructions that store to or load from local memory: counted in the machine code, whatever its header says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "EXIT" in text
    return len(re.findall(r"\b(?:STL|LDL)\b", text))


@pytest.mark.parametrize(("sm", "dim", "cache", "dtype", "variant"), [*CHOSEN, *MATRIX])
def test_budget(sm: int, dim: int, cache: str, dtype: str, variant: str, tmp_path: Path) -> None:
    kernels = compile_kernels(spec_of(dim, cache, **VARIANTS[variant]), sm, dtype, cache_dir=tmp_path)
    assert [kernel.name for kernel in kernels] == list(ARGUMENTS)
    assert faults(kernels) == []
    for kernel in kernels:
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.function.encode() in kernel.cubin
        assert b"/toolchain/" not in kernel.cubin
        assert local_accesses(kernel.cubin) == 0


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


def test_a_failure_of_triton_names_the_kernel_and_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = Launch({"BLOCK_T": 3}, 4, 1)
    monkeypatch.setattr(kernel_compile, "plan", lambda *_: dict.fromkeys(ARGUMENTS, broken))
    with pytest.raises(DtoolError) as caught:
        compile_kernels(spec_of(64, "int8"), 90, "float16", cache_dir=tmp_path)
    for word in ("cache_write", "sm_90", "head_dim 64", "cache int8"):
        assert word in caught.value.problem
    assert "power of 2" in caught.value.found
    assert caught.value.expected
    assert caught.value.fix


def test_a_child_hands_its_error_on(tmp_path: Path) -> None:
    with pytest.raises(DtoolError) as caught:
        kernel_compile._compile_in_child(spec_of(64, "fp8_e4m3"), 80, "float16", tmp_path)
    assert "sm_89" in caught.value.expected


@pytest.mark.parametrize("cache", ["none", "int8", "fp8_e4m3", "int8_token"])
def test_the_least_head_dim_compiles(cache: str, tmp_path: Path) -> None:
    """Pairs of codes halve a tile of heads, which is padded so that a product still takes it."""
    kernels = compile_kernels(spec_of(16, cache), 89, "float16", cache_dir=tmp_path)
    assert [kernel.name for kernel in kernels] == list(ARGUMENTS)


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
    assert choose_splits(1, 1, 100_000, 64, 132) == MOST_SPLITS
