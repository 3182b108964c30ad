"""The packed conversions of codes are PTX: here a few instructions of it are computed by hand, for every code."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from toolchain.ops.kernels import codes


def halves(register: int, dtype: torch.dtype) -> list[float]:
    words = np.array([register & 0xFFFF, register >> 16], dtype=np.uint16)
    return torch.from_numpy(words.view(np.int16)).view(dtype).double().tolist()


def pack(values: list[float], dtype: torch.dtype) -> int:
    low, high = torch.tensor(values).to(dtype).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def prmt(a: int, b: int, selector: int) -> int:
    bytes_ = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return int.from_bytes(bytes(bytes_[selector >> 4 * i & 7] for i in range(4)), "little")


def add_halves(a: int, b: int) -> int:
    return pack([x + y for x, y in zip(halves(a, torch.float16), halves(b, torch.float16), strict=True)], torch.float16)


def fma_bfloats(a: int, b: int, c: int) -> int:
    parts = zip(*(halves(register, torch.bfloat16) for register in (a, b, c)), strict=True)
    return pack([x * y + z for x, y, z in parts], torch.bfloat16)


def unpack_e4m3(a: int) -> int:
    pair = torch.tensor([a & 0xFF, a >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return pack(pair.double().tolist(), torch.float16)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": prmt,
    "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c}[table],
    "add.f16x2": add_halves,
    "fma.rn.bf16x2": fma_bfloats,
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "cvt.rn.f16x2.e4m3x2": unpack_e4m3,
}


def run_ptx(text: str, source: int) -> int:
    """Value of $0 after the block `text` with $1 = `source`. PTX ISA 8.7, chapter 9.7."""
    registers = {"$1": source}
    for statement in re.sub(r"\.reg [^;]*;", "", text.strip("{} ")).split(";"):
        words = statement.replace(",", " ").split()
        if words:
            name, target, *operands = words
            args = [registers[word] if word in registers else int(word, 0) for word in operands]
            registers[target] = INSTRUCTIONS[name](*args)
    return registers["$0"]


@pytest.mark.parametrize(
    ("low", "high", "kind", "dtype"),
    [
        (codes.HALF_LOW, codes.HALF_HIGH, torch.int8, torch.float16),
        (codes.BFLOAT_LOW, codes.BFLOAT_HIGH, torch.int8, torch.bfloat16),
        (codes.E4M3_LOW, codes.E4M3_HIGH, torch.float8_e4m3fn, torch.float16),
    ],
)
def test_every_code(low: object, high: object, kind: torch.dtype, dtype: torch.dtype) -> None:
    """Bytes 0 and 1 are dims 2 f and 2 f + 1 of one slot, bytes 2 and 3 those of the next."""
    for code in range(256):
        quad = [code, (code * 7 + 3) % 256, (code * 31 + 5) % 256, 255 - code]
        want = torch.tensor(quad, dtype=torch.uint8).view(kind).double().tolist()
        register = int.from_bytes(bytes(quad), "little")
        np.testing.assert_array_equal(halves(run_ptx(low.value, register), dtype), [want[0], want[2]])
        np.testing.assert_array_equal(halves(run_ptx(high.value, register), dtype), [want[1], want[3]])
