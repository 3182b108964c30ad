"""Generating tokens: prefill once, then decode, one `step` protocol for every backend."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolchain.errors import DtoolError
from toolchain.runners.runner import Array, Runner


@dataclass(slots=True)
class Sampler:
    """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 keep everything.

    `allowed` is the number of ids the tokenizer knows: rows the model pads beyond them are never
    chosen. Nucleus sampling: Holtzman et al., arXiv 1904.09751.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    allowed: int | None = None
    random: Any = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise DtoolError(
                "sampling options do not fit",
                expected="temperature >= 0, 0 < top_p <= 1, top_k >= 0",
                found=f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}",
                fix="choose values in these ranges",
            )
        self.random = np.random.default_rng(self.seed)

    def choose(self, logits_V: Array) -> int:
        """The next id."""
        scores = logits_V[: self.allowed].astype(np.float64)
        if self.temperature == 0:
            return int(scores.argmax())
        scores = scores / self.temperature
        order = np.argsort(-scores, kind="stable")[: self.top_k or None]
        weights = np.exp(scores[order] - scores[order[0]])
        weights /= weights.sum()
        kept = int(np.searchsorted(np.cumsum(weights), self.top_p)) + 1
        weights = weights[:kept] / weights[:kept].sum()
        return int(self.random.choice(order[:kept], p=weights))


@dataclass(slots=True)
class Generation:
    """Iterate for the new ids; afterwards `finish` says why it ended: stop, length or cache full."""

    runner: Runner
    prompt: list[int]
    sampler: Sampler
    max_new_tokens: int
    capacity: int
    stop_ids: tuple[int, ...] = ()
    finish: str = ""

    def __iter__(self) -> Iterator[int]:
        if not self.prompt:
            raise DtoolError("the prompt is empty", expected="at least one token", found="none", fix="give some text")
        state = self.runner.new_state(1, self.capacity)
        ids = np.array([self.prompt], np.int64)
        logits = self.runner.step(state, ids, np.array([ids.shape[1]], np.int64), "prefill")
        one = np.ones(1, np.int64)
        for count in range(1, self.max_new_tokens + 1):
            if int(state.lengths[0]) >= self.capacity:
                self.finish = "cache full"
                return
            require_finite(self.runner, logits[0, -1])
            token = self.sampler.choose(logits[0, -1])
            if token in self.stop_ids:
                self.finish = "stop"
                return
            yield token
            if count == self.max_new_tokens:
                break
            logits = self.runner.step(state, np.array([[token]], np.int64), one, "decode")
        self.finish = "length"


def require_finite(runner: Runner, logits_V: Array) -> None:
    """Refuse logits that choose no token: a NaN among them, an infinite one, or none above minus infinity."""
    largest = float(logits_V.max())  # NaN where any is
    if math.isfinite(largest):
        return
    artifact = getattr(runner, "artifact", None)
    compute_dtype = "float32" if artifact is None else artifact.manifest.details.get("compute_dtype", "float32")
    fix = "run `dtool parity`: it shows how far this is from the checkpoint; check its weights"
    if compute_dtype == "float16":
        fix = "export it again with --set compute_dtype=bfloat16 or float32: float16 ends at 65504"
    raise DtoolError(
        f"the model gives logits that are not finite, computing in {compute_dtype}",
        expected="a finite logit for the next token",
        found=f"{largest} as the largest of {len(logits_V)}",
        fix=fix,
    )


def stream_text(ids: Iterator[int], decode: Any) -> Iterator[str]:
    """Text as it becomes certain: a piece is held back while it ends inside a multi-byte character.

    `decode` maps a list of ids to text.
    """
    seen: list[int] = []
    shown = ""
    for token in ids:
        seen.append(token)
        text = decode(seen)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and len(text) > len(shown):
            yield text[len(shown) :]
            shown = text
    text = decode(seen) if seen else ""
    if len(text) > len(shown):
        yield text[len(shown) :]
