"""Work in pieces of fixed size, each on one thread, so that results do not depend on the number of threads.

A kernel of BLAS, LAPACK or torch that may use several threads splits its work by their number, and with it the order of
its sums: the factor of a matrix, the sum of a large tensor and the edges of a product then differ in their last bits
between one thread and two. A value on the edge between two codes follows, and with it the hash of the weights.

So quantization uses threads from above. Inside `fixed_pieces` every kernel has one thread; what costs time is cut into
pieces whose size depends on the problem alone, and as many pieces run at once as torch had threads before:

    the text          by batch, and what was seen of it is added in the order of the batches
    a product         by rows of its result, never along the sum
    second moments    by rows of H
    rows of weights   a matrix's scales and codes do not depend on those of other rows

Threads that each have a piece wait for one another once a piece, not once a kernel: this is also faster.
"""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

PIECE = 1 << 25
"""Multiplications of a piece of a product: about a millisecond, a hundred times what it costs to hand it over."""
LEAST_ROWS = 64
"""Of a piece, however long they are: with fewer a product becomes as slow as memory."""
SUMMED_ROWS = 1024
"""Rows of a piece that is only read and summed."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Crew:
    pool: ThreadPoolExecutor
    threads: int


# of a context: the threads of the pool see none, so that a piece computes what it needs by itself
_CREW: ContextVar[_Crew | None] = ContextVar("crew", default=None)


@contextlib.contextmanager
def fixed_pieces() -> Iterator[None]:
    """Give every kernel one thread, and the threads that torch had to `in_pieces`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    token = _CREW.set(_Crew(pool, threads) if threads > 1 else None)
    try:
        yield
    finally:
        _CREW.reset(token)
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def in_pieces(function: Callable[..., Result], *arguments: Iterable[Any]) -> Iterator[Result]:
    """Map `function` over pieces, results in order; a few pieces are computed at once, and few results wait.

    Outside `fixed_pieces`, and in a piece, they are computed one after the other. No gradients are kept.
    """
    crew, compute = _CREW.get(), torch.no_grad()(function)
    if crew is None:
        yield from (compute(*piece) for piece in zip(*arguments, strict=True))
        return
    begun: deque[Any] = deque()
    for piece in zip(*arguments, strict=True):
        begun.append(crew.pool.submit(compute, *piece))
        if len(begun) > crew.threads:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def matrix_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left` [..., K] @ `right` [K, M], or [K]."""
    rows_NK = left.flatten(0, -2)
    result = rows_NK.new_empty(len(rows_NK), *right.shape[1:])

    def compute(rows: slice) -> None:
        torch.matmul(rows_NK[rows], right, out=result[rows])

    list(in_pieces(compute, _row_slices(len(rows_NK), right.numel())))
    return result.reshape(*left.shape[:-1], *right.shape[1:])


def add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, factor: float = 1.0) -> None:
    """`target` += factor * `left` @ `right`, in place."""

    def compute(rows: slice) -> None:
        target[rows].addmm_(left[rows], right, alpha=factor)

    list(in_pieces(compute, _row_slices(len(left), right.numel())))


def squared_length(matrix: torch.Tensor, metric: torch.Tensor | None = None) -> float:
    """Sum over the rows x of a matrix of x M x^T, M the identity when not given.

    Rows are summed in float64, and their sums without error: in whatever order they come, the result is the same.
    """

    def compute(rows: slice) -> list[float]:
        weighed = matrix[rows] if metric is None else matrix[rows] @ metric
        return (weighed * matrix[rows]).sum(-1, dtype=torch.float64).tolist()

    slices = _row_slices(len(matrix), 0 if metric is None else metric.numel())
    return math.fsum(itertools.chain.from_iterable(in_pieces(compute, slices)))


def _row_slices(count: int, work: int) -> Iterator[slice]:
    """Rows of pieces, `work` multiplications each."""
    rows = max(PIECE // work, LEAST_ROWS) if work else SUMMED_ROWS
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))
