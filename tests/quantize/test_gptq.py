"""GPTQ and the search of scales: against an independent column-by-column oracle, and what they must improve."""

import itertools

import pytest
import torch

from toolchain.errors import DtoolError
from toolchain.numerics import dequantize, quantize, scale_from_amax
from toolchain.quantize import gptq
from toolchain.quantize.findings import describe_matrix, warnings
from toolchain.quantize.gptq import refine, round_with_hessian, search_scale
from toolchain.quantize.rounding import round_matrix
from toolchain.recipe_sections import Weights


def problem(seed, out=24, width=64, tokens=400):
    """A matrix and the second moments of correlated inputs with a few large channels."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) / width**0.5
    inputs = torch.randn(tokens, width, generator=generator) @ (mixing + torch.eye(width))
    inputs *= 1 + 10 * (torch.rand(width, generator=generator) > 0.95)
    return torch.randn(out, width, generator=generator), inputs.T @ inputs


def rounded(weight, hessian, scale, fmt):
    return round_with_hessian(weight, hessian, scale, fmt)[0]


def loss(weight, shown, hessian):
    error = (weight - shown).double()
    return float(((error @ hessian.double()) * error).sum())


def oracle(weight, hessian, scale_OI, fmt):
    """Optimal brain quantization without blocks or Cholesky: invert the remaining H anew for every column."""
    weight, width = weight.double().clone(), weight.shape[1]
    hessian = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(width, dtype=torch.float64)
    order = torch.argsort(hessian.diagonal(), descending=True).tolist()
    for place, column in enumerate(order):
        left = order[place:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        scale = scale_OI[:, column]
        shown = dequantize(quantize(weight[:, column].float(), scale, fmt), scale).double()
        error = (weight[:, column] - shown) / inverse[0, 0]
        weight[:, left] -= error[:, None] * inverse[0]
        weight[:, column] = shown
    return weight.float()


@pytest.mark.parametrize(("fmt", "group"), [("int4", 32), ("int8", 64), ("fp8_e4m3", 64)])
def test_rounding_equals_optimal_brain_quantization_column_by_column(fmt, group):
    weight, hessian = problem(0)
    scale_OG = search_scale(weight, fmt, group, hessian_II=hessian)
    ours = rounded(weight, hessian, scale_OG, fmt)
    theirs = oracle(weight, hessian, scale_OG.repeat_interleave(group, 1), fmt)
    same = (ours - theirs).abs() <= 1e-4
    assert float(same.float().mean()) > 0.99  # a value on an edge may fall to the other side
    assert loss(weight, ours, hessian) <= 1.02 * loss(weight, theirs, hessian)


@pytest.mark.parametrize("fmt", ["int4", "int8", "fp8_e4m3"])
def test_every_value_is_a_code_of_its_group_and_the_output_errs_less_than_by_rounding(fmt):
    weight, hessian = problem(1)
    scale_OG = scale_from_amax(weight.unflatten(-1, (-1, 32)).abs().amax(-1), fmt)
    ours = rounded(weight, hessian, scale_OG, fmt).unflatten(-1, (-1, 32))
    assert torch.equal(dequantize(quantize(ours, scale_OG[..., None], fmt), scale_OG[..., None]), ours)
    groups = weight.unflatten(-1, (-1, 32))
    nearest = dequantize(quantize(groups, scale_OG[..., None], fmt), scale_OG[..., None])
    assert loss(weight, ours.flatten(1), hessian) < 0.8 * loss(weight, nearest.flatten(1), hessian)


def test_searched_scales_never_err_more_than_those_of_the_largest_weight():
    weight, hessian = problem(2)
    weight[3, 5] = 12.0  # one outlier that a clipped range gives up
    for moments in (None, hessian):
        found, plain = (
            search_scale(weight, "int4", 32, hessian_II=moments),
            scale_from_amax(weight.unflatten(-1, (-1, 32)).abs().amax(-1), "int4"),
        )
        metric = torch.eye(64) if moments is None else moments
        blocks = torch.stack([metric[i : i + 32, i : i + 32] for i in (0, 32)])
        costs = []
        for scale in (found, plain):
            groups = weight.unflatten(-1, (-1, 32))
            error = dequantize(quantize(groups, scale[..., None], "int4"), scale[..., None]) - groups
            costs.append((torch.einsum("ogi,gij->ogj", error, blocks) * error).sum(-1))
        assert bool((costs[0] <= costs[1] * (1 + 1e-5)).all())
        assert float(costs[0].sum()) < float(costs[1].sum())


def test_inputs_that_never_come_and_few_tokens_are_borne():
    weight, _ = problem(3)
    inputs = torch.randn(5, 64)  # fewer tokens than inputs: singular
    inputs[:, 10] = 0
    shown = rounded(weight, inputs.T @ inputs, search_scale(weight, "int4", 32), "int4")
    assert bool(torch.isfinite(shown).all())
    unseen = rounded(weight, torch.zeros(64, 64), search_scale(weight, "int8", 64), "int8")
    assert float((unseen - weight).abs().max()) < 0.05  # nothing is known: the nearest


def test_what_cannot_be_factored_is_damped_ten_times_more_and_it_is_told():
    """Moments with a negative direction of a twentieth of their mean: rounding leaves such."""
    weight, _ = problem(5)
    basis = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(5))).Q
    sizes = torch.ones(64)
    scale = search_scale(weight, "int8", 64)
    assert round_with_hessian(weight, basis @ torch.diag(sizes) @ basis.mT, scale, "int8")[1] == gptq.DAMPING
    sizes[0] = -0.05
    shown, damping = round_with_hessian(weight, basis @ torch.diag(sizes) @ basis.mT, scale, "int8")
    assert damping == 10 * gptq.DAMPING
    assert float((shown - weight).abs().max()) < 0.1
    how = Weights(format="int8", algorithm="gptq")
    found = round_matrix(weight, how, hessian_II=basis @ torch.diag(sizes) @ basis.mT)
    row = describe_matrix("m", how, None, weight, found, None, torch.float32)
    (told,) = warnings([row], {}, "float32")
    assert told.startswith("m: GPTQ could factor its second moments only with 0.1 times their mean diagonal added, not")


def test_moments_that_are_not_finite_are_refused():
    weight, hessian = problem(4)
    hessian[3, 3] = float("nan")
    with pytest.raises(DtoolError, match="not finite"):
        rounded(weight, hessian, search_scale(weight, "int8", 64), "int8")


def test_a_channel_of_zeros_stays_zero():
    weight, hessian = problem(5)
    weight[7] = 0
    rounded = round_matrix(weight, Weights(format="int8", algorithm="gptq", clip="search"), hessian_II=hessian)
    assert bool((rounded.scale > 0).all())
    assert not bool(rounded.codes[7].any())


def test_the_report_tells_the_loss_of_weights_and_outputs():
    weight, hessian = problem(6)
    plain = round_matrix(weight, Weights(format="int8"), hessian_II=hessian)
    better = round_matrix(weight, Weights(format="int8", algorithm="gptq"), hessian_II=hessian)
    assert plain.output_sqnr_db is not None
    assert better.output_sqnr_db is not None
    assert better.output_sqnr_db > plain.output_sqnr_db + 1
    assert better.weight_sqnr_db < plain.weight_sqnr_db  # it is not the nearest
    error = dequantize(plain.codes, plain.scale[:, None]) - weight
    by_hand = 10 * torch.log10(weight.square().sum() / error.square().sum())
    assert plain.weight_sqnr_db == pytest.approx(float(by_hand), abs=1e-4)
    assert plain.clipped_share == 0


@pytest.mark.parametrize(("fmt", "group"), [("int4", 32), ("int8", 64), ("fp8_e4m3", 64)])
def test_refining_lowers_the_damped_error_every_round(fmt, group):
    weight, hessian = problem(7)
    scale = search_scale(weight, fmt, group, hessian_II=hessian)
    shown = rounded(weight, hessian, scale, fmt)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64)
    losses = [loss(weight, shown, damped)]
    for _ in range(3):
        shown, scale = refine(weight, shown, hessian, scale, fmt)
        losses.append(loss(weight, shown, damped))
        groups = shown.unflatten(-1, (-1, group))
        assert torch.equal(dequantize(quantize(groups, scale[..., None], fmt), scale[..., None]), groups)
    assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(losses)), losses
    if fmt == "int4":
        assert losses[-1] < 0.9 * losses[0]


def test_one_pass_of_descent_leaves_no_single_code_to_better():
    """The last column visited is at its optimum: no other code of it lowers the error."""
    weight, hessian = problem(8)
    scale = search_scale(weight, "int4", 32, hessian_II=hessian)
    shown = rounded(weight, hessian, scale, "int4")
    shown, scale = refine(weight, shown, hessian, scale, "int4")
    damped = (hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64)).double()

    def row_losses(matrix):
        error = (weight - matrix).double()
        return ((error @ damped) * error).sum(1)

    best = row_losses(shown)
    for code in range(-8, 8):
        other = shown.clone()
        other[:, -1] = code * scale[:, -1]
        assert bool((row_losses(other) >= best - 1e-6 * best).all())


def test_groups_of_zeros_keep_their_scale_and_scales_are_values_of_the_half_type():
    weight, hessian = problem(9)
    weight[5, 32:] = 0
    scale = search_scale(weight, "int4", 32, held_in=torch.float16)
    shown = rounded(weight, hessian, scale, "int4")
    shown, found = refine(weight, shown, hessian, scale, "int4", held_in=torch.float16)
    assert torch.equal(found, found.half().float())
    assert bool((found > 0).all())
    assert bool(torch.isfinite(shown).all())


@pytest.mark.parametrize(("fmt", "group"), [("int4", 32), ("int8", 64)])
def test_a_matrix_taken_in_parts_and_rounds_taken_together_give_the_same_bits(fmt, group, monkeypatch):
    weight, hessian = problem(8, out=48)
    scale = search_scale(weight, fmt, group, hessian_II=hessian)
    shown = rounded(weight, hessian, scale, fmt)
    first, first_scale = refine(weight, shown, hessian, scale, fmt)
    apart = refine(weight, first, hessian, first_scale, fmt)
    monkeypatch.setattr(gptq, "CACHED", 16 * 64)
    monkeypatch.setattr(gptq, "REUSED", 16 * 64)
    monkeypatch.setattr(gptq, "HELD", 32 * 64)
    assert torch.equal(search_scale(weight, fmt, group, hessian_II=hessian), scale)
    assert torch.equal(rounded(weight, hessian, scale, fmt), shown)
    together = refine(weight, shown, hessian, scale, fmt, rounds=2)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
