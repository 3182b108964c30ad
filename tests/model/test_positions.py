"""Rotary frequencies by their closed forms and by known numbers, and what a rotation must keep."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig, Layer, Rope
from toolchain.model.hf import config_from_hf
from toolchain.model.positions import (
    attention_factor,
    inverse_frequencies,
    position_tables,
    rope_table_names,
    rope_tables,
    sinusoidal_table,
)
from toolchain.ops.attention import rotate
from toolchain.runners.runner import Limits, check_state

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "norm_eps": 1e-6}
LLAMA = {"model_type": "llama", **SIZES, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 128}


def config(head_dim=16, positions=128, **fields):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    return DecoderConfig(**SIZES, **shape, **{"max_position_embeddings": positions} | fields)


def frequencies(c):
    return inverse_frequencies(c, c.rope)


def closed_form(theta, dim):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


def llama(**fields):
    return config_from_hf(LLAMA | fields, {})


@pytest.mark.parametrize(("theta", "dim"), [(10000.0, 16), (500000.0, 128), (1e6, 2), (2.0, 64)])
def test_plain_frequencies_have_their_closed_form(theta, dim):
    ours = frequencies(config(head_dim=dim, rope=Rope(rope_theta=theta)))
    np.testing.assert_allclose(ours, closed_form(theta, dim), rtol=1e-6)


def test_linear_scaling_divides_every_frequency():  # C-03
    ours = frequencies(llama(rope_scaling={"rope_type": "linear", "factor": 4.0}))
    np.testing.assert_allclose(ours, closed_form(10000.0, 16) / 4, rtol=1e-6)
    np.testing.assert_allclose(ours[:3], [0.25, 0.0790569, 0.025], rtol=1e-5)


def test_ntk_scaling_stretches_the_base():
    ours = frequencies(llama(rope_scaling={"rope_type": "ntk", "factor": 4.0}))
    np.testing.assert_allclose(ours, closed_form(10000.0 * 4 ** (16 / 14), 16), rtol=1e-6)
    assert float(ours[-1]) == pytest.approx(
        10000.0 ** (-14 / 16) / 4, rel=1e-6
    )  # the slowest pair is slowed by all of it


@pytest.mark.parametrize("served", [32, 40, 100])
def test_dynamic_scaling_stretches_the_base_by_the_length_served(served):
    c = config_from_hf(
        LLAMA | {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {},
        context_len=served,
    )
    stretch = (4.0 * served / 32 - 3.0) ** (16 / 14)
    np.testing.assert_allclose(frequencies(c), closed_form(10000.0 * stretch, 16), rtol=1e-6)


def test_llama3_bands_have_their_known_ratios():  # C-03
    bands = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    small = llama(rope_scaling=bands | {"factor": 8.0, "original_max_position_embeddings": 64})
    ratio = frequencies(small) / frequencies(llama())
    np.testing.assert_allclose(ratio, [1, 0.772812, 0.130423, 0.125, 0.125, 0.125, 0.125, 0.125], rtol=1e-5)
    large = Rope(rope_theta=5e5, factor=32.0, original_max_position_embeddings=8192, **bands)
    ratio = frequencies(config(64, rope=large)) / frequencies(config(64, rope=Rope(rope_theta=5e5)))
    np.testing.assert_allclose(ratio, [1.0] * 15 + [0.605573, 0.303743, 0.103448] + [0.03125] * 14, rtol=1e-5)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_yarn_has_its_known_frequencies():  # C-05
    ours = frequencies(llama(rope_scaling=YARN))
    np.testing.assert_allclose(ours[:4], [1, 0.197642, 0.025, 0.00790569], rtol=1e-5)
    np.testing.assert_allclose(ours[3:], closed_form(10000.0, 16)[3:] / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 1.138629),
        ({"mscale": 0.707}, 1.138629),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, 0.964327),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"attention_factor": 1.5, "mscale": 0.707, "mscale_all_dim": 1.0}, 1.5),
    ],
)
def test_yarn_multiplies_cosines_and_sines_by_its_factor(fields, factor):  # C-05
    c = llama(rope_scaling=YARN | fields)
    assert attention_factor(c.rope) == pytest.approx(factor, rel=1e-6)
    cos, sin = rope_tables(c, c.rope)
    np.testing.assert_allclose(cos.square() + sin.square(), np.full((128, 8), factor**2), rtol=1e-6)


LONGROPE = {"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 2, 4, 8]}


def longrope(context_len=None):
    sizes = {"hidden_size": 32, "head_dim": 8, "max_position_embeddings": 64, "original_max_position_embeddings": 16}
    return config_from_hf(LLAMA | sizes | {"rope_scaling": LONGROPE}, {}, context_len=context_len)


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (None, [1, 0.1, 0.01, 0.001]),
        (16, [1, 0.1, 0.01, 0.001]),
        (17, [1, 0.05, 0.0025, 0.000125]),
        (64, [1, 0.05, 0.0025, 0.000125]),
    ],
)
def test_longrope_takes_one_list_for_good_by_the_positions_served(served, expected):  # C-07
    c = longrope(served)
    np.testing.assert_allclose(frequencies(c), expected, rtol=1e-5)
    assert attention_factor(c.rope) == pytest.approx(1.224745, rel=1e-6)


def test_longrope_never_crosses_the_boundary_between_its_lists():  # C-07: 14 tokens and 6 more
    with pytest.raises(DtoolError, match=r"cache capacity 20 not in \[1, 16\]"):
        check_state(longrope(), Limits(), 1, 20)
    check_state(longrope(20), Limits(), 1, 20)
    with pytest.raises(DtoolError, match=r"context_len 65 is not in 1\.\.64"):
        longrope(65)


def test_longrope_keeps_the_frequencies_of_a_short_text_when_it_grows():  # C-07
    short, long = (rope_tables(c, c.rope)[0] for c in (longrope(17), longrope(64)))
    assert torch.equal(short, long[:17])


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotation_turns_the_first_dims_and_leaves_the_rest_alone(interleaved):  # C-08
    fields = {"num_attention_heads": 4, "max_position_embeddings": 128, "partial_rotary_factor": 0.25}
    c = config_from_hf({"model_type": "stablelm", **SIZES, **fields, "num_key_value_heads": 4}, {})
    assert (c.head_dim, c.rotary_dim) == (16, 4)
    x = torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = (table[100] for table in rope_tables(c, c.rope))
    turned = rotate(x, cos[None, None, None], sin[None, None, None], interleaved=interleaved)[0, 0, 0].tolist()
    x = x[0, 0, 0].tolist()
    assert turned[4:] == x[4:]
    for pair, (i, j) in enumerate([(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]):
        angle = 100 * 10000.0 ** (-pair / 2)
        assert turned[i] == pytest.approx(x[i] * math.cos(angle) - x[j] * math.sin(angle), abs=1e-5)
        assert turned[j] == pytest.approx(x[j] * math.cos(angle) + x[i] * math.sin(angle), abs=1e-5)


TABLES = rope_tables(config(), Rope())
positions = st.integers(0, 60)


@settings(deadline=None, max_examples=40)
@given(m=positions, n=positions, shift=st.integers(0, 67), interleaved=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_the_inner_product_of_rotated_vectors_depends_on_their_distance_alone(m, n, shift, interleaved, seed):
    q, k = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def product(at_q, at_k):
        turned = [
            rotate(x[None, None, None], *(t[None, None, None, p].double() for t in TABLES), interleaved=interleaved)
            for x, p in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(m + shift, n + shift) == pytest.approx(product(m, n), abs=1e-4)


def test_cosines_stay_exact_at_far_positions():
    c = config(64, positions=100_000)
    cos, sin = rope_tables(c, c.rope)
    angles = 99_999 * inverse_frequencies(c, c.rope)  # in float32, as the tables have them
    np.testing.assert_array_equal(cos[-1], np.cos(angles.numpy().astype(np.float64)).astype(np.float32))
    np.testing.assert_array_equal(sin[-1], np.sin(angles.numpy().astype(np.float64)).astype(np.float32))


def test_a_layer_without_rotation_is_turned_by_zero():
    c = config(layers=(Layer(rope="no_rope"), Layer()))
    tables = position_tables(c)
    cos, sin = (tables[name] for name in rope_table_names("no_rope"))
    x = torch.randn(1, 128, 2, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotate(x, cos[None, :, None], sin[None, :, None]), x)
    assert set(tables) == {"rope.cos", "rope.sin", "no_rope.cos", "no_rope.sin"}


@pytest.mark.parametrize("fields", [{}, {"position_embedding": "sinusoidal"}])
def test_tables_too_large_to_hold_are_refused_before_they_are_built(fields):
    start = time.perf_counter()
    with pytest.raises(DtoolError, match=r"--set context_len=131072") as failure:
        position_tables(config(positions=10**9, **fields))
    assert time.perf_counter() - start < 1
    assert "GiB" in failure.value.found
    position_tables(config(positions=10**9, context_len=1000, **fields))


@pytest.mark.parametrize("offset", [0, 2])
def test_sinusoidal_positions_have_their_closed_form(offset):
    c = config(position_embedding="sinusoidal", position_offset=offset)
    table = sinusoidal_table(c).numpy()
    assert table.shape == (128, 64)
    for position in (0, 1, 50, 127):
        for i in (0, 1, 17, 31):
            angle = (position + offset) * 10000.0 ** (-i / 31)
            np.testing.assert_allclose(table[position, [i, 32 + i]], [math.sin(angle), math.cos(angle)], atol=2e-5)
