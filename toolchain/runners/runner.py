"""What every backend offers: one `step` over a state that holds the cache.

The checks are here, before any backend is called: a cache that would overflow, ids outside the
vocabulary and shapes outside an engine's range are refused with both numbers. (Some backends drop
such writes without a word.)
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError
from toolchain.graph_io import Phase
from toolchain.model.config import DecoderConfig
from toolchain.recipe_sections import Engine

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class KVState:
    """A linear cache of `capacity` slots per row; `lengths` [B] tokens are valid. Belongs to one runner.

    `bindings` is the backend's own: what it prepared once for these caches.
    """

    capacity: int
    lengths: Array
    caches: Any = field(repr=False)
    bindings: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return len(self.lengths)


class Runner(Protocol):
    """A backend that runs one model."""

    name: str

    @property
    def config(self) -> DecoderConfig:
        """The model's config."""
        ...

    def new_state(self, batch: int, capacity: int) -> KVState:
        """An empty cache. Raises DtoolError outside what the engine was built for."""
        ...

    def step(self, state: KVState, input_ids: Array, new_lengths: Array, phase: Phase) -> Array:
        """float32 logits [B, 1, V] of each row's last valid token, or [B, T, V] for `evaluation`.

        `input_ids` int64 [B, T], right-padded; `new_lengths` int64 [B], 1..T valid ones. Advances
        `state`. Raises DtoolError before computing when the step cannot fit.
        """
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The ranges an engine was built for; None is unlimited. `min_prompt`: of prefill, decode takes one token."""

    max_batch: int | None = None
    max_prompt: int | None = None
    capacity: int | None = None
    min_batch: int = 1
    min_prompt: int = 1


def artifact_limits(artifact: Artifact) -> Limits:
    """The ranges that the runner of an artifact will hold it to."""
    target, asked = artifact.manifest.target, artifact.manifest.recipe.get("engine", {})
    largest = (target.get("max_batch"), target.get("max_prompt"), target.get("kv_capacity"))
    if target.get("backend", "onnxruntime") == "onnxruntime":
        return Limits(*largest)
    return Limits(*largest, *(asked.get(key, {}).get("min", 1) for key in ("batch", "prompt_len")))


def recipe_limits(engine: Engine) -> Limits:
    """Those of the engine that a recipe asks for: a compiled one has smallest sizes too."""
    batch, prompt = engine.batch, engine.prompt_len
    least = (1, 1) if engine.backend == "onnxruntime" else (batch.min, prompt.min)
    return Limits(batch.max, prompt.max, engine.kv_capacity, *least)


def check_state(config: DecoderConfig, limits: Limits, batch: int, capacity: int) -> None:
    """Refuse a cache the engine or the model cannot have."""
    if limits.max_batch is not None and batch > limits.max_batch:
        raise _outside("batch", batch, limits.max_batch)
    if limits.capacity is not None and capacity > limits.capacity:
        raise _outside("cache capacity", capacity, limits.capacity)
    if capacity > config.context_len:
        raise _outside("cache capacity", capacity, config.context_len)


def check_step(
    config: DecoderConfig, limits: Limits, state: KVState, ids: Array, new_lengths: Array, phase: Phase
) -> None:
    """Refuse a step that does not fit the contract, the vocabulary or the cache."""
    if ids.dtype != np.int64 or ids.ndim != 2 or ids.shape[0] != state.batch:
        raise DtoolError(
            "input_ids do not fit",
            expected=f"int64 [{state.batch}, T]",
            found=f"{ids.dtype} {ids.shape}",
            fix="pass one row of ids for each row of the state",
        )
    tokens = ids.shape[1]
    if phase == "decode" and tokens != 1:
        raise DtoolError(
            "decode takes one token per row",
            expected="T = 1",
            found=f"T = {tokens}",
            fix="take more tokens through prefill",
        )
    if new_lengths.shape != (state.batch,) or new_lengths.min() < 1 or new_lengths.max() > tokens:
        raise DtoolError(
            "new_lengths do not fit",
            expected=f"[{state.batch}] of 1..{tokens}",
            found=str(new_lengths),
            fix="pass the number of valid tokens of each row",
        )
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise DtoolError(
            "a token id is outside the vocabulary",
            expected=f"0..{config.vocab_size - 1}",
            found=str(ids.max()),
            fix="check that the tokenizer is the model's",
        )
    if phase != "decode" and limits.max_prompt is not None and tokens > limits.max_prompt:
        raise _outside("prompt length", tokens, limits.max_prompt)
    needed = int(state.lengths.max()) + tokens
    if needed > state.capacity:
        raise DtoolError(
            f"the cache is full: {needed} > {state.capacity}",
            expected=f"at most {state.capacity} tokens per row, padding included",
            found=f"{int(state.lengths.max())} cached and {tokens} new",
            fix="use a shorter prompt or a larger kv_capacity",
        )


def _outside(what: str, value: int, largest: int) -> DtoolError:
    return DtoolError(
        f"{what} {value} not in [1, {largest}]",
        expected=f"at most {largest}",
        found=str(value),
        fix="ask for less, or build an engine with a larger range",
    )
