"""What rounding in float32 may move the logits of one model by, measured on the model itself.

No formula of depth and width knows how a model passes its errors on: of two random models of the same
sizes, one with sharp attention moves five times as far as the other, on every instruction set. So the
tolerance is measured by stochastic arithmetic (D. S. Parker, Monte Carlo Arithmetic, 1997): the
reference runs again with every product disturbed at random by what rounding may do to it,

    y + e * rms(y) * N(0, 1),    e = u * (1 + sqrt(log2(n))),    u = 2^-24

where sums of n terms in float32 err by u * sqrt(log2(n)) (Higham, Accuracy and Stability, 4.2) relative
to the size of their terms' sums, which is that of a row and not of one value, and the operations
between two products add one rounding more. The largest move of all logits is taken over several draws.
Two computations are compared, each with errors of its own: sqrt(2).

Measured over all tiny models, two computations differ by 0.05 to 0.66 of the largest move, with kernels
for SSE, AVX2 and AVX-512 alike.

A disturbance three times as large as rounding itself also shows a near-tie of a router: where it turns
the choice of an expert, logits move by a tenth of their size or so. Such a model is no test of
arithmetic, and is refused: draw another one.
"""

import math
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from toolchain.numerics import UNIT_ROUNDOFF

Plan = list[tuple[slice, tuple[int, ...], Any]]
"""The steps of a walk: columns of the ids, the new lengths of the rows, and the phase."""
DRAWS, CODE_DRAWS = 6, 12
PRODUCTS = {"linear", "matmul", "__matmul__", "bmm", "addmm", "_grouped_mm"}
"""Names of the torch functions that form sums of products: all that transformers' models use."""
MOST_MOVED = 2.0**-12
"""Of the largest logit: rounding moves the worst conditioned tiny model by a tenth of it."""


class DisturbedProducts(TorchFunctionMode):
    """Within it every product has random errors of so many `times` the size that rounding may make."""

    def __init__(self, seed: int, times: float = 1.0) -> None:
        super().__init__()
        self.roundoff = times * UNIT_ROUNDOFF["float32"]
        self.random = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = func(*args, **(kwargs or {}))
        if func.__name__ not in PRODUCTS:
            return product
        terms = (args[1] if func.__name__ == "addmm" else args[0]).shape[-1]
        size = self.roundoff * (1 + math.sqrt(math.log2(terms)))
        row_rms = product.square().mean(-1, keepdim=True).sqrt()
        return product + size * row_rms * torch.randn(product.shape, generator=self.random)


def rounding_tolerance(model: Any, ids: torch.Tensor) -> float:
    """Largest |difference| of a transformers model's float32 logits for `ids` that rounding explains."""
    with torch.inference_mode():
        plain = model(ids).logits
        moves = []
        for seed in range(DRAWS):
            with DisturbedProducts(seed):
                moves.append(float((model(ids).logits - plain).abs().max()))
    assert 0 < max(moves) < MOST_MOVED * float(plain.abs().max()), "a near-tie of a router: draw another model"
    return math.sqrt(2) * max(moves)


def walked(runner: Any, ids: np.ndarray, plan: Plan, capacity: int) -> np.ndarray:
    """The valid logits [positions, vocab] of every step of a plan."""
    state, found = runner.new_state(len(ids), capacity), []
    for columns, new_lengths, phase in plan:
        logits_BTV = runner.step(state, ids[:, columns], np.array(new_lengths), phase)
        rows = zip(logits_BTV, new_lengths, strict=True)
        found += [row_TV[: new if phase == "evaluation" else 1] for row_TV, new in rows]
    return np.concatenate(found)


def assert_equal_up_to_rounding(
    reference: Any, runner: Any, ids: np.ndarray, plan: Plan, capacity: int, *, times: float = 4.0, least: float = 0.0
) -> None:
    """Hold a runner to the torch runner of the same arithmetic, where rounding may turn a code.

    A value on the edge between two codes becomes the other one by a last bit, and stays so in the cache. How
    far that moves a position depends on the model and the format, and which positions on the kernels. So the
    torch runner is disturbed by four `times` what rounding may do. A value so near to an edge that rounding
    turns it (within two standard deviations of what rounding does) is turned by more than a third of the
    draws, and by one of twelve at least with a probability above 0.99.

    The median move of a position may be that of the worst draw: most positions see no code turned. The
    largest may be twice that of the worst draw, since two codes may add up. A runner whose own arithmetic
    errs more than rounding has more `times`, or may move at `least` so far.
    """
    theirs = walked(reference, ids, plan, capacity)
    draws = []
    for seed in range(CODE_DRAWS):
        with DisturbedProducts(seed, times):
            draws.append(abs(walked(reference, ids, plan, capacity) - theirs).max(-1))
    moved = abs(walked(runner, ids, plan, capacity) - theirs).max(-1)
    medians, largest = [float(np.median(draw)) for draw in draws], [float(draw.max()) for draw in draws]
    assert float(np.median(moved)) <= max(least, *medians)
    assert float(moved.max()) <= 2 * max(least, *largest)
