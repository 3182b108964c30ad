"""The integer program: one format per unit, exactly.

    x[u, f] in {0, 1},  sum_f x[u, f] = 1
    min sum bytes[u, f] x[u, f]   subject to   sum loss[u, f] x[u, f] <= L        `cheapest`
    min sum loss[u, f] x[u, f]    subject to   sum bytes[u, f] x[u, f] <= B       `least_loss`

A multiple-choice knapsack. HiGHS proves the optimum (gap 0); it takes a constraint as met within 1e-6, so the sums
are formed again from the numbers themselves, and a bound that was overstepped is tightened. Of mixes of the same
bytes `cheapest` gives the one of least loss.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from toolchain.errors import DtoolError
from toolchain.search.units import Mix

TIGHTER = 1 - 4e-6
TRIES = 6
SOLVE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Bytes and loss (nats, not negative) of each unit in each of its formats, by their names.

    `fixed_bytes`, `fixed_loss`: of everything that is no choice.
    """

    bytes: Mapping[str, Mapping[str, int]]
    loss: Mapping[str, Mapping[str, float]]
    fixed_bytes: int = 0
    fixed_loss: float = 0.0

    def bytes_of(self, mix: Mix) -> int:
        """Bytes of a mix, all included."""
        return self.fixed_bytes + sum(self.bytes[unit][fmt] for unit, fmt in mix.items())

    def loss_of(self, mix: Mix) -> float:
        """The sum of the losses of a mix, all included."""
        return self.fixed_loss + sum(self.loss[unit][fmt] for unit, fmt in mix.items())

    def uniform(self, fmt: str) -> dict[str, str]:
        """Every unit in one format, or in its first where it cannot take that."""
        return {unit: fmt if fmt in formats else next(iter(formats)) for unit, formats in self.bytes.items()}

    def extremes(self) -> tuple[dict[str, str], dict[str, str]]:
        """The mix of fewest bytes and that of least loss; ties go to the other measure."""
        small = {u: min(f, key=lambda fmt, u=u: (f[fmt], self.loss[u][fmt])) for u, f in self.bytes.items()}
        exact = {u: min(f, key=lambda fmt, u=u: (f[fmt], self.bytes[u][fmt])) for u, f in self.loss.items()}
        return small, exact


def cheapest(problem: Problem, most_loss: float) -> dict[str, str] | None:
    """The mix of fewest bytes whose loss is at most `most_loss` (nats); None where there is none."""
    found = _solve(problem, "bytes", most_loss)
    return None if found is None else least_loss(problem, problem.bytes_of(found)) or found


def least_loss(problem: Problem, most_bytes: int) -> dict[str, str] | None:
    """The mix of least loss of at most `most_bytes`; None where there is none."""
    return _solve(problem, "loss", most_bytes)


def frontier(problem: Problem, points: int = 24) -> list[dict[str, str]]:
    """Mixes of least loss for budgets from the fewest bytes to the most, each cheaper and worse than the next."""
    small, exact = problem.extremes()
    low, high = problem.bytes_of(small), problem.bytes_of(exact)
    found: list[dict[str, str]] = []
    for budget in np.geomspace(low, high, points):
        mix = least_loss(problem, round(float(budget)))
        if mix is not None and (not found or problem.loss_of(mix) < problem.loss_of(found[-1])):
            found.append(mix)
    return found


def _solve(problem: Problem, minimise: str, bound: float) -> dict[str, str] | None:
    pairs = [(unit, fmt) for unit, formats in problem.bytes.items() for fmt in formats]
    sizes = np.array([problem.bytes[unit][fmt] for unit, fmt in pairs], dtype=np.float64)
    losses = np.array([problem.loss[unit][fmt] for unit, fmt in pairs], dtype=np.float64)
    by_bytes = minimise == "bytes"
    small, exact = problem.extremes()
    if by_bytes:
        cost, weight, room, easiest = sizes, losses, bound - problem.fixed_loss, exact
    else:
        cost, weight, room, easiest = losses, sizes, bound - problem.fixed_bytes, small
    total = problem.loss_of if by_bytes else problem.bytes_of
    if total(easiest) > bound:
        return None
    tight = 1.0
    for _ in range(TRIES):
        mix = _program(pairs, list(problem.bytes), cost, weight, room * tight)
        if mix is None:
            break
        if total(mix) <= bound:
            return mix
        tight *= TIGHTER
    return easiest


def _program(
    pairs: list[tuple[str, str]], units: list[str], cost: np.ndarray, weight: np.ndarray, room: float
) -> dict[str, str] | None:
    """The optimum, or None where HiGHS sees no mix within the room (one on its very edge, perhaps)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    choice = np.zeros((len(units), len(pairs)))
    for j, (unit, _) in enumerate(pairs):
        choice[units.index(unit), j] = 1
    least = np.where(choice > 0, weight, np.inf).min(axis=1)
    extra, slack = weight - least @ choice, room - float(least.sum())
    if slack < 0:
        return None
    fits = extra <= slack  # of what is left the scale is that of the room, and so is the tolerance
    largest = max(float(np.abs(cost[fits]).max(initial=0)), 1e-300)
    scale = slack or 1.0
    with _silent():
        result = milp(
            cost / largest,
            integrality=np.ones(len(pairs)),
            bounds=Bounds(0, fits.astype(np.float64)),
            constraints=[
                LinearConstraint(choice, 1, 1),
                LinearConstraint(np.where(fits, extra, 0)[None] / scale, ub=slack / scale),
            ],
            options={"mip_rel_gap": 0.0, "time_limit": SOLVE_SECONDS},
        )
    if result.x is None:
        if result.status in (0, 2):
            return None
        expected, found = f"an answer in {SOLVE_SECONDS:.0f} s", str(result.message)
        raise DtoolError("the integer program was not solved", expected=expected, found=found, fix="name fewer formats")
    return {unit: fmt for (unit, fmt), taken in zip(pairs, result.x, strict=True) if taken > 0.5}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing of what the solver's C++ prints reaches stdout, which holds results alone.

    HiGHS (scipy 1.17) prints a line whenever it repairs a solution, whatever its options; C buffers it.
    """
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
