"""Teacher-forced runs: every model sees the same ids, in the four ways a cache can be filled.

    prefill          whole rows at once, logits of every position (evaluation graph)
    chunked_prefill  the same rows in three ragged chunks, the later ones with a past (evaluation graph)
    prefill_last     the beginning of the rows, last token only (the prefill graph itself)
    decode           the rest of the rows, one token a step (the decode graph)

Rows of a batch have different lengths (whole, two thirds, one third), so padding and per-row
positions are always at work.

Legend: B batch, T new tokens, V vocab, N valid positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from toolchain.parity.metrics import NO_TARGET
from toolchain.runners.runner import Runner

Array = np.ndarray[Any, Any]
PROMPT_PHASES = ("prefill", "chunked_prefill", "prefill_last")
PROMPT, DECODE = "prompt", "decode"
"""The two samples of a proof: what every phase of a prompt saw, and the steps after it."""
MODEL_PHASES = (*PROMPT_PHASES, DECODE)
CHUNK_ENDS = (0.4, 0.7, 1.0)
LENGTH_THIRDS = (3, 2, 1)
SHORTEST = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded ids int64 [B, T] and the valid length [B] of each row, at least SHORTEST."""

    ids: Array
    lengths: Array

    def targets(self, rows_N: Array, positions_N: Array) -> Array:
        """The token after each position, NO_TARGET after a row's last."""
        inside_N = positions_N + 1 < self.lengths[rows_N]
        following_N = np.minimum(positions_N + 1, self.ids.shape[1] - 1)
        return np.where(inside_N, self.ids[rows_N, following_N], NO_TARGET)


@dataclass(frozen=True, slots=True)
class PhaseLogits:
    """float32 logits [N, V] of a phase, with the row and position [N] of each."""

    phase: str
    logits: Array
    rows: Array
    positions: Array


def plan_batches(blocks_NT: Array, batch: int) -> list[Batch]:
    """The blocks in batches of at most `batch` rows of ragged length."""
    seq_len = blocks_NT.shape[1]
    batches = []
    for i in range(0, len(blocks_NT), batch):
        ids_BT = blocks_NT[i : i + batch].copy()
        lengths_B = row_lengths(len(ids_BT), seq_len)
        ids_BT[np.arange(seq_len) >= lengths_B[:, None]] = 0
        batches.append(Batch(ids_BT, lengths_B))
    return batches


def row_lengths(rows: int, seq_len: int) -> Array:
    """Valid tokens [B] of each row of a batch: the first is whole."""
    thirds = (LENGTH_THIRDS[b % len(LENGTH_THIRDS)] for b in range(rows))
    return np.array([max(SHORTEST, seq_len * n // 3) for n in thirds], np.int64)


def decode_steps(lengths_B: Array, asked: int) -> int:
    """How many tokens of every row are decoded one by one: some of the shortest go through prefill."""
    return min(asked, int(lengths_B.min()) - 1)


def run_phases(runner: Runner, batch: Batch, steps: int) -> Iterator[PhaseLogits]:
    """The logits of each of MODEL_PHASES in turn, so that several models can be walked in step."""
    yield _run_chunks(runner, batch, "prefill", [np.zeros_like(batch.lengths), batch.lengths])
    yield _run_chunks(runner, batch, "chunked_prefill", chunk_bounds(batch.lengths))
    yield from _run_decode(runner, batch, decode_steps(batch.lengths, steps))


def chunk_bounds(lengths_B: Array) -> list[Array]:
    """Where the chunks of each row begin and end: [0, .., lengths], every chunk at least one token."""
    bounds = [np.zeros_like(lengths_B)]
    for fraction in CHUNK_ENDS:
        bounds.append(np.maximum(bounds[-1] + 1, (lengths_B * fraction).astype(np.int64)))
    bounds[-1] = lengths_B
    return bounds


def rows_between(ids_BT: Array, start_B: Array, end_B: Array) -> Array:
    """Ids [B, max(end - start)]: each row's own stretch, right-padded with 0."""
    new_B = end_B - start_B
    piece_BT = np.zeros((len(ids_BT), int(new_B.max())), np.int64)
    for b, (start, end) in enumerate(zip(start_B, end_B, strict=True)):
        piece_BT[b, : end - start] = ids_BT[b, start:end]
    return piece_BT


def capacity_for(bounds: Sequence[Array]) -> int:
    """Slots that steps with these bounds need, padding included."""
    return max(int(start.max() + (end - start).max()) for start, end in pairwise(bounds))


def _run_chunks(runner: Runner, batch: Batch, phase: str, bounds: Sequence[Array]) -> PhaseLogits:
    state = runner.new_state(len(batch.ids), capacity_for(bounds))
    logits, rows, positions = [], [], []
    for start_B, end_B in pairwise(bounds):
        new_B = end_B - start_B
        logits_BTV = runner.step(state, rows_between(batch.ids, start_B, end_B), new_B, "evaluation")
        row_N, offset_N = np.nonzero(np.arange(logits_BTV.shape[1]) < new_B[:, None])
        logits.append(logits_BTV[row_N, offset_N])
        rows.append(row_N)
        positions.append(start_B[row_N] + offset_N)
    return PhaseLogits(phase, np.concatenate(logits), np.concatenate(rows), np.concatenate(positions))


def _run_decode(runner: Runner, batch: Batch, steps: int) -> Iterator[PhaseLogits]:
    prefix_B = batch.lengths - steps
    state = runner.new_state(len(batch.ids), int(batch.lengths.max()))
    rows_B, ones_B = np.arange(len(prefix_B)), np.ones_like(prefix_B)
    first_BT = rows_between(batch.ids, np.zeros_like(prefix_B), prefix_B)
    last_B1V = runner.step(state, first_BT, prefix_B, "prefill")
    yield PhaseLogits("prefill_last", last_B1V[:, 0], rows_B, prefix_B - 1)
    logits = []
    for i in range(steps):
        ids_B1 = batch.ids[rows_B, prefix_B + i][:, None]
        logits.append(runner.step(state, ids_B1, ones_B, "decode")[:, 0].copy())
    positions = np.concatenate([prefix_B + i for i in range(steps)])
    yield PhaseLogits("decode", np.concatenate(logits), np.tile(rows_B, steps), positions)


def logits_at(whole: PhaseLogits, rows_N: Array, positions_N: Array) -> Array:
    """Of a phase that covers whole rows, the logits [N, V] at the given rows and positions."""
    where = {pair: i for i, pair in enumerate(zip(whole.rows.tolist(), whole.positions.tolist(), strict=True))}
    wanted = zip(rows_N.tolist(), positions_N.tolist(), strict=True)
    return whole.logits[[where[pair] for pair in wanted]]
