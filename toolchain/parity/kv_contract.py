"""The cache's promises, checked on a runner bit for bit: no tolerance, since no rounding is involved, but in one.

    poison_never_shows      NaN (int8: code 127) in every slot beyond the valid length changes nothing
    slots_never_rewritten   later steps leave the slots of earlier tokens as they are
    stale_cache_ignored     prompt B over the cache of a longer prompt A equals B over a new cache
    neighbour_isolated      other ids in row 2 leave row 1 as it is
    batch_permutes          permuted rows give permuted results, up to rounding
    overflow_refused        a 17th token into 16 slots is refused before the call, the state unchanged

The value of a row counts what went wrong (elements that differ, or refusals missing); the gate is 0.

A row that changes its place in the batch may change its place in the tiles of a matrix product, and kernels
of some processors add up the rows at the edge of a tile in another order. A row that is permuted is held to
what rounding explains, then, where the others see the same shapes in the same places.

Legend: B batch, T new tokens, C capacity, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolchain.errors import DtoolError
from toolchain.graph_io import Phase
from toolchain.parity.bisect import relative_error
from toolchain.parity.metrics import Row
from toolchain.parity.statistics import Verdict
from toolchain.runners.runner import KVState, Limits, Runner

Array = np.ndarray[Any, Any]
PHASE = "kv_contract"
CAPACITY = 16
CODE_POISON = 127
"""The largest int8 code, and the bits of an E4M3 NaN."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Ids int64 [B, CAPACITY] and the steps to take over them: new lengths [B] and a phase for each."""

    ids: Array
    steps: tuple[tuple[Array, Phase], ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """What a trial gave: the valid logits of each step, per row [T, V]."""

    logits: tuple[tuple[Array, ...], ...]


def check_kv_contract(runner: Runner, tolerance: float, *, finite_slots: bool = False) -> list[Row]:
    """One row per promise. `tolerance`: the relative error of logits that rounding explains.

    `finite_slots`: the backend asks for finite values in unused slots. Then the poison is a large finite
    value instead of NaN. Promises about neighbours are left out where the engine takes one row only.
    """
    limits = getattr(runner, "limits", Limits())
    rows = max(min(3, limits.max_batch or 3), limits.min_batch)
    trial = _trial(runner, rows, min(5, limits.max_prompt or 5))
    clean = walk(runner, trial, _new_state(runner, trial))
    found: dict[str, tuple[float, str]] = {
        "poison_never_shows": (poison_shown(runner, trial, clean, finite=finite_slots), "values changed"),
        "slots_never_rewritten": (slots_rewritten(runner, trial), "values changed"),
        "stale_cache_ignored": (stale_values_seen(runner, trial), "values changed"),
    }
    if rows > 1:
        found["neighbour_isolated"] = (neighbour_seen(runner, trial, clean), "values changed")
        found["batch_permutes"] = (permutation_seen(runner, trial, clean, tolerance), "values changed")
    found["overflow_refused"] = (overflows_let_through(runner, trial), "refusals missing")
    return [
        Row(reference="self", phase=PHASE, metric=name, value=value, unit=unit, gate=0.0, verdict=_kept(value))
        for name, (value, unit) in found.items()
    ]


def _kept(value: float) -> Verdict:
    return "passed" if value == 0.0 else "failed"


def _trial(runner: Runner, rows: int, prompt: int) -> Trial:
    ids_BT = np.random.default_rng(0).integers(0, runner.config.vocab_size, (rows, CAPACITY), np.int64)
    ragged_B = np.maximum(1, prompt - 2 * np.arange(rows))
    ones_B = np.ones(rows, np.int64)
    return Trial(ids_BT, ((ragged_B, "evaluation"), (ragged_B, "evaluation"), (ones_B, "decode"), (ones_B, "decode")))


def walk(runner: Runner, trial: Trial, state: KVState, before: Callable[[KVState], None] | None = None) -> Walk:
    """Take every step of a trial; `before` sees the state ahead of each."""
    logits = []
    for new_B, phase in trial.steps:
        if before is not None:
            before(state)
        logits_BTV = runner.step(state, _next_ids(trial, state, new_B), new_B, phase)
        logits.append(tuple(logits_BTV[b, : max(1, n)].copy() for b, n in enumerate(new_B)))
    return Walk(tuple(logits))


def _next_ids(trial: Trial, state: KVState, new_B: Array) -> Array:
    """Each row's next ids, right-padded with 0."""
    ids_BT = np.zeros((len(new_B), int(new_B.max())), np.int64)
    for b, (past, new) in enumerate(zip(state.lengths, new_B, strict=True)):
        ids_BT[b, :new] = trial.ids[b, past : past + new]
    return ids_BT


def poison_shown(runner: Runner, trial: Trial, clean: Walk, *, finite: bool) -> float:
    """Logits that change when every slot beyond the valid length is poisoned before each step."""
    poisoned = walk(runner, trial, _new_state(runner, trial), lambda state: poison(state, finite=finite))
    return _differing(clean, poisoned)


def slots_rewritten(runner: Runner, trial: Trial) -> float:
    """Cache values of earlier tokens that a later step changed."""
    state = _new_state(runner, trial)
    kept: list[tuple[Array, list[Array]]] = []
    walk(runner, trial, state, lambda s: kept.append((s.lengths.copy(), [c.copy() for c in read_caches(s)])))
    last = read_caches(state)
    changed = 0
    for lengths_B, caches in kept:
        for old, new in zip(caches, last, strict=True):
            changed += sum(_unequal(old[b, :, :n], new[b, :, :n]) for b, n in enumerate(lengths_B))
    return float(changed)


def stale_values_seen(runner: Runner, trial: Trial) -> float:
    """Logits of prompt B that depend on a longer prompt A having used the same cache before."""
    state = _new_state(runner, trial)
    walk(runner, trial, state)
    state.lengths = np.zeros_like(state.lengths)
    second = Trial((trial.ids + 1) % runner.config.vocab_size, (trial.steps[0], trial.steps[2]))
    return _differing(walk(runner, second, state), walk(runner, second, _new_state(runner, second)))


def neighbour_seen(runner: Runner, trial: Trial, clean: Walk) -> float:
    """Logits of row 1 that change with the ids of row 2 (same shapes and lengths)."""
    ids_BT = trial.ids.copy()
    ids_BT[1] = (ids_BT[1] + 1) % runner.config.vocab_size
    other = walk(runner, Trial(ids_BT, trial.steps), _new_state(runner, trial))
    return float(sum(_unequal(a[0], b[0]) for a, b in zip(clean.logits, other.logits, strict=True)))


def permutation_seen(runner: Runner, trial: Trial, clean: Walk, tolerance: float) -> float:
    """Logits that change when the rows of the batch are rotated by one: of the steps that err by more."""
    order = np.roll(np.arange(len(trial.ids)), 1)
    rotated = Trial(trial.ids[order], tuple((new_B[order], phase) for new_B, phase in trial.steps))
    expected = [step[i] for step in clean.logits for i in order]
    found = [row for step in walk(runner, rotated, _new_state(runner, trial)).logits for row in step]
    pairs = zip(found, expected, strict=True)
    return float(sum(_unequal(a, b) for a, b in pairs if not relative_error(a, b) <= tolerance))


def overflows_let_through(runner: Runner, trial: Trial) -> float:
    """Steps beyond the capacity that were not refused with both numbers, or that changed the state."""
    rows = len(trial.ids)
    state, missing = _new_state(runner, trial), 0
    chunk = int(trial.steps[0][0].max())
    if chunk < getattr(runner, "limits", Limits()).min_prompt:
        chunk = 1  # the engine takes no prompt as short as the cache is here: it is filled by decode alone
    while int(state.lengths[0]) < CAPACITY:
        new = chunk if int(state.lengths[0]) + chunk <= CAPACITY else 1
        past = int(state.lengths[0])
        phase: Phase = "decode" if new == 1 else "prefill"
        runner.step(state, trial.ids[:, past : past + new], np.full(rows, new, np.int64), phase)
        over = CAPACITY + 1 - past - new
        if over <= min(2, chunk):
            missing += not _refuses(runner, state, trial.ids[:, :over], "decode" if over == 1 else "prefill")
    return float(missing)


def _refuses(runner: Runner, state: KVState, ids_BT: Array, phase: Phase) -> bool:
    """Whether the step that would make CAPACITY + 1 tokens is refused and leaves lengths and caches alone."""
    lengths_B, caches = state.lengths.copy(), [c.copy() for c in read_caches(state)]
    try:
        runner.step(state, ids_BT, np.full(len(ids_BT), ids_BT.shape[1], np.int64), phase)
    except DtoolError as error:
        told = f"{CAPACITY + 1} > {CAPACITY}" in str(error)
        same = np.array_equal(lengths_B, state.lengths)
        same &= not any(_unequal(a, b) for a, b in zip(caches, read_caches(state), strict=True))
        return told and bool(same)
    return False


def _new_state(runner: Runner, trial: Trial) -> KVState:
    return runner.new_state(len(trial.ids), CAPACITY)


def read_caches(state: KVState) -> list[Array]:
    """Every cache as bits [B, K, C, bytes of a slot], layer by layer; scales of tokens are caches too."""
    arrays = (np.ascontiguousarray(_as_numpy(cache)) for cache in _flat(state.caches))
    return [array.reshape(*array.shape[:3], -1).view(np.uint8) for array in arrays]


def poison(state: KVState, *, finite: bool = False) -> None:
    """Fill every slot beyond each row's valid length with NaN, or a large value, or the code 127 (E4M3's NaN)."""
    for cache in _flat(state.caches):
        values = _as_numpy(cache).copy()
        code = CODE_POISON if values.dtype.itemsize == 1 else 1000.0 if finite else np.nan
        for b, length in enumerate(state.lengths):
            values[b, :, length:] = _bits(code, values.dtype)
        if hasattr(cache, "update_inplace"):
            cache.update_inplace(values)
        else:
            cache.copy_(_as_torch(values, cache.dtype))


def _flat(caches: Sequence[Any]) -> list[Any]:
    """The caches one by one; the eager ones come as a tuple for each layer."""
    return [part for item in caches for part in (item if isinstance(item, tuple) else (item,))]


def _as_numpy(cache: Any) -> Array:
    """A cache as numpy; types that numpy has not as their bits: bfloat16 as uint16, float8 as uint8."""
    import torch

    if isinstance(cache, torch.Tensor) and cache.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        return cache.view(torch.uint16 if cache.dtype == torch.bfloat16 else torch.uint8).numpy()
    return cache.numpy()


def _bits(value: float, dtype: np.dtype[Any]) -> Any:
    """`value` as it is stored in an array of `dtype` (uint16 holds bfloat16: the upper half of a float32)."""
    return np.float32(value).view(np.uint32) >> 16 if dtype == np.uint16 else value


def _as_torch(values: Array, dtype: Any) -> Any:
    import torch

    tensor = torch.from_numpy(values)
    return tensor.view(dtype) if tensor.dtype != dtype else tensor


def _differing(first: Walk, second: Walk) -> float:
    """Logits that differ in any bit, or are not finite, between two walks."""
    pairs = [pair for a, b in zip(first.logits, second.logits, strict=True) for pair in zip(a, b, strict=True)]
    return float(sum(_unequal(a, b) + int((~np.isfinite(a)).sum()) for a, b in pairs))


def _unequal(a: Array, b: Array) -> int:
    """Elements that differ; NaN equals nothing."""
    return int((a != b).sum())
