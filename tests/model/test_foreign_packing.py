"""Codes out of words, against known values and against a packer of Python integers."""

import numpy as np
import pytest
import torch

from tests.model.foreign_writers import AWQ_COLUMNS, pack
from toolchain.model.foreign.packing import centred, unpack_awq, unpack_rows, unpack_words
from toolchain.numerics import pack_int4


def words(*values):
    return torch.tensor([values], dtype=torch.int64).to(torch.int32)


def test_int4_codes_lie_low_nibble_first():
    assert pack_int4(torch.tensor([[1, -2, 3, 0]], dtype=torch.int8)).numpy().tobytes().hex() == "e103"
    assert unpack_words(words(0x76543210), 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("packed", "bits", "codes"),
    [  # what compressed-tensors 0.20.1 packs, recorded once
        ([2921], 4, [1, -2, 3]),
        ([8617601], 8, [1, -2, 3]),
        ([1985229328, -19088744], 4, list(range(-8, 8))),
        ([2071624056, 2138996092, -2088599168, -2021227132], 8, list(range(-8, 8))),
        ([2139160320, 133], 8, [-128, 127, 0, -1, 5]),
    ],
)
def test_packed_codes_are_those_of_compressed_tensors(packed, bits, codes):
    along = torch.tensor([packed], dtype=torch.int32)
    assert centred(unpack_words(along, bits), bits)[0, : len(codes)].tolist() == codes
    assert centred(unpack_rows(along.mT, bits), bits)[: len(codes), 0].tolist() == codes


def test_a_field_of_7_is_the_middle_where_zero_points_are_stored_less_one():
    stored = unpack_words(words(0x77777777), 4)
    assert (stored + 1 - 8).tolist() == [[0] * 8]


def test_awq_nibbles_come_back_in_their_columns():
    # the word's nibbles from the lowest hold columns 0 2 4 6 1 3 5 7
    assert unpack_awq(words(0x75316420)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("bits", [4, 8])
def test_every_word_is_unpacked_whatever_its_sign(bits):
    values = np.random.default_rng(3).integers(0, 1 << bits, (5, 64))
    assert np.array_equal(unpack_words(pack(values, bits), bits).numpy(), values)
    assert np.array_equal(unpack_rows(pack(values, bits).mT, bits).numpy(), values.T)
    if bits == 4:
        assert np.array_equal(unpack_awq(pack(values, 4, AWQ_COLUMNS)).numpy(), values)
    assert np.array_equal(centred(torch.from_numpy(values.astype(np.uint8)), bits).numpy(), values - (1 << (bits - 1)))
