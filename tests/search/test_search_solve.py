"""The integer program against brute force, and the frontier."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from toolchain.search.solve import Problem, cheapest, frontier, least_loss

FORMATS = ("none", "int8", "int4")


def random_problem(seed, units=6):
    random = np.random.default_rng(seed)
    sizes = {f"u{i}": dict(zip(FORMATS, (64, 16, 9), strict=True)) for i in range(units)}
    sizes = {u: {f: int(b * (1 + random.integers(3))) * 4 for f, b in formats.items()} for u, formats in sizes.items()}
    loss = {u: dict(zip(FORMATS, (0.0, *sorted(10 ** random.uniform(-6, 0, 2))), strict=True)) for u in sizes}
    return Problem(sizes, loss, fixed_bytes=1000, fixed_loss=1e-3)


def every_mix(problem):
    for formats in itertools.product(FORMATS, repeat=len(problem.bytes)):
        yield dict(zip(problem.bytes, formats, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_the_program_finds_what_trying_everything_finds(seed):
    problem = random_problem(seed)
    mixes = [(problem.bytes_of(mix), problem.loss_of(mix)) for mix in every_mix(problem)]
    for budget in (1e-3, 1.00001e-3, 2e-3, 0.05, 0.4, 10.0):
        found = cheapest(problem, budget)
        assert (problem.bytes_of(found), problem.loss_of(found)) == pytest.approx(
            min(mix for mix in mixes if mix[1] <= budget), rel=1e-9
        )
        assert problem.loss_of(found) <= budget
    for budget in sorted({size for size, _ in mixes})[::40]:
        found = least_loss(problem, budget)
        assert problem.bytes_of(found) <= budget
        assert problem.loss_of(found) == pytest.approx(min(loss for size, loss in mixes if size <= budget), rel=1e-6)


def test_what_cannot_be_is_none():
    problem = random_problem(0)
    assert cheapest(problem, 0.5e-3) is None
    assert least_loss(problem, 1000) is None


def test_the_frontier_is_monotone_from_the_smallest_to_the_most_exact():
    problem = random_problem(3, units=12)
    points = [(problem.bytes_of(mix), problem.loss_of(mix)) for mix in frontier(problem)]
    assert len(points) > 5
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(points))
    small, exact = problem.extremes()
    assert points[0][0] == problem.bytes_of(small)
    assert points[-1][1] == problem.loss_of(exact)


def test_a_model_of_eighty_layers_is_solved():
    problem = random_problem(5, units=161)
    found = cheapest(problem, 0.3)
    assert problem.loss_of(found) <= 0.3


def test_the_solver_prints_nothing():
    """A knapsack of real losses, for which HiGHS repairs solutions and says so on stdout."""
    code = "import tests.search.test_search_solve as t; [t.frontier(t.random_problem(s, 61)) for s in range(3)]"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == ""
