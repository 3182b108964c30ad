"""Codes out of 32-bit words, for each order in which libraries put them there.

A word holds 32 / b codes of b bits, the first in its lowest bits. Words are read as bytes, in the order of a
little-endian machine, so that no step is wider than a code.

Legend: O outputs, I inputs, J words, N the other axis.
"""

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which column of its eight each nibble of an AWQ word holds, from the lowest."""


def unpack_words(words_NJ: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [N, J * 32 / bits]: the codes of each row of int32 words, 4 or 8 bits each, without their sign."""
    bytes_NB = words_NJ.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_NB
    return torch.stack((bytes_NB & 0xF, bytes_NB >> 4), dim=-1).flatten(-2)


def unpack_rows(words_JN: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [J * 32 / bits, N]: the codes of words that run down the columns."""
    return unpack_words(words_JN.mT, bits).mT


def unpack_awq(words_NJ: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 8 J]: AWQ's nibbles, each back in its column."""
    places = torch.tensor(AWQ_ORDER).argsort()
    return unpack_words(words_NJ, 4).unflatten(-1, (-1, len(AWQ_ORDER)))[..., places].flatten(-2)


def centred(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8: unsigned codes less the middle of their range, 2^(bits - 1)."""
    middle = 1 << (bits - 1)
    return (codes ^ middle).view(torch.int8) if bits == 8 else codes.to(torch.int8) - middle
