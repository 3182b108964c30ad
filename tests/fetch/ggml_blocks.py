"""What the bytes of ggml's blocks mean, written out: for each format, the number at every place of a block.

From the structs of ggml-common.h and dequantize_row_* of ggml-quants.c; nothing of the `gguf` package
is used. Each function takes blocks [N, bytes] and gives numbers [N, elements] in float64.
"""

import numpy as np


def f16(blocks, at):
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float64)[:, 0]


def u8(blocks, at):
    return blocks[:, at].astype(np.int64)


def i8(blocks, at):
    return blocks[:, at].view(np.int8).astype(np.float64)


def q4_0(b):
    d, y = f16(b, 0), np.empty((len(b), 32))
    for j in range(16):
        q = u8(b, 2 + j)
        y[:, j], y[:, j + 16] = d * ((q & 15) - 8), d * ((q >> 4) - 8)
    return y


def q4_1(b):
    d, m, y = f16(b, 0), f16(b, 2), np.empty((len(b), 32))
    for j in range(16):
        q = u8(b, 4 + j)
        y[:, j], y[:, j + 16] = d * (q & 15) + m, d * (q >> 4) + m
    return y


def fifth_bits(b, at, j):
    high = sum(u8(b, at + i) << (8 * i) for i in range(4))
    return (high >> j & 1) << 4, (high >> (j + 16) & 1) << 4


def q5_0(b):
    d, y = f16(b, 0), np.empty((len(b), 32))
    for j in range(16):
        q, (low, high) = u8(b, 6 + j), fifth_bits(b, 2, j)
        y[:, j], y[:, j + 16] = d * ((q & 15 | low) - 16), d * ((q >> 4 | high) - 16)
    return y


def q5_1(b):
    d, m, y = f16(b, 0), f16(b, 2), np.empty((len(b), 32))
    for j in range(16):
        q, (low, high) = u8(b, 8 + j), fifth_bits(b, 4, j)
        y[:, j], y[:, j + 16] = d * (q & 15 | low) + m, d * (q >> 4 | high) + m
    return y


def q8_0(b):
    d = f16(b, 0)
    return np.stack([d * i8(b, 2 + j) for j in range(32)], axis=1)


def q2_k(b):
    d, least, y = f16(b, 80), f16(b, 82), np.empty((len(b), 256))
    for place in range(256):
        half, within = divmod(place, 128)
        pair, column = divmod(within, 32)
        scale = u8(b, place // 16)
        q = u8(b, 16 + 32 * half + column) >> (2 * pair) & 3
        y[:, place] = d * (scale & 15) * q - least * (scale >> 4)
    return y


def q3_k(b):
    d, y = f16(b, 108), np.empty((len(b), 256))
    for place in range(256):
        half, within = divmod(place, 128)
        pair, column = divmod(within, 32)
        k = place // 16
        low = u8(b, 96 + k % 8) >> (4 * (k // 8)) & 15
        scale = (low | (u8(b, 96 + 8 + k % 4) >> (2 * (k // 4)) & 3) << 4) - 32
        q = u8(b, 32 + 32 * half + column) >> (2 * pair) & 3
        bit = u8(b, column) >> (4 * half + pair) & 1
        y[:, place] = d * scale * (q - 4 * (1 - bit))
    return y


def k4_scale_and_min(b, j):
    """The 6-bit scale and minimum of sub-block j, packed in bytes 4..15."""
    s = [u8(b, 4 + i) for i in range(12)]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def q4_k(b):
    d, least, y = f16(b, 0), f16(b, 2), np.empty((len(b), 256))
    for place in range(256):
        j, column = divmod(place, 32)
        scale, minimum = k4_scale_and_min(b, j)
        q = u8(b, 16 + 32 * (j // 2) + column) >> (4 * (j % 2)) & 15
        y[:, place] = d * scale * q - least * minimum
    return y


def q5_k(b):
    d, least, y = f16(b, 0), f16(b, 2), np.empty((len(b), 256))
    for place in range(256):
        j, column = divmod(place, 32)
        scale, minimum = k4_scale_and_min(b, j)
        q = u8(b, 48 + 32 * (j // 2) + column) >> (4 * (j % 2)) & 15
        bit = u8(b, 16 + column) >> j & 1
        y[:, place] = d * scale * (q + 16 * bit) - least * minimum
    return y


def q6_k(b):
    d, y = f16(b, 208), np.empty((len(b), 256))
    for place in range(256):
        half, within = divmod(place, 128)
        quarter, column = divmod(within, 32)
        low = u8(b, 64 * half + 32 * (quarter % 2) + column) >> (4 * (quarter // 2)) & 15
        high = u8(b, 128 + 32 * half + column) >> (2 * quarter) & 3
        y[:, place] = d * i8(b, 192 + place // 16) * ((low | high << 4) - 32)
    return y


FORMATS = {
    "Q4_0": (18, 32, q4_0, (0,)),
    "Q4_1": (20, 32, q4_1, (0, 2)),
    "Q5_0": (22, 32, q5_0, (0,)),
    "Q5_1": (24, 32, q5_1, (0, 2)),
    "Q8_0": (34, 32, q8_0, (0,)),
    "Q2_K": (84, 256, q2_k, (80, 82)),
    "Q3_K": (110, 256, q3_k, (108,)),
    "Q4_K": (144, 256, q4_k, (0, 2)),
    "Q5_K": (176, 256, q5_k, (0, 2)),
    "Q6_K": (210, 256, q6_k, (208,)),
}
"""By format: bytes and elements of a block, its numbers, and where its half-precision factors stand."""


def random_blocks(kind, rows, columns, rng):
    """Any bytes with factors that make numbers of about 0.1: [rows, bytes of a row]."""
    size, elements, meaning, factors = FORMATS[kind]
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for at in factors:
        blocks[:, at : at + 2] = rng.uniform(0.5, 1.5, (len(blocks), 1)).astype("<f2").view(np.uint8)
    largest = np.abs(meaning(blocks)).mean()
    for at in factors:
        value = blocks[:, at : at + 2].copy().view("<f2").astype(np.float64) * (0.1 / largest)
        blocks[:, at : at + 2] = value.astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def numbers(kind, stored):
    """What the bytes of rows mean, [rows, columns]."""
    size, _, meaning, _ = FORMATS[kind]
    return meaning(stored.reshape(-1, size)).reshape(len(stored), -1)
