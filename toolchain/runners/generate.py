"""Generating tokens: prefill once, then decode, one `step` protocol for every backend."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolchain.errors import DtoolError
from toolchain.runners.runner import Array, Runner

# Tokens decoded with the next one, to tell what it stands for. One that has text would do for every
# decoder of the `tokenizers` package.
CONTEXT = 64


@dataclass(slots=True)
class Sampler:
    """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 keep everything.

    `allowed` are the ids that may be chosen, ascending; None allows all. A model may have rows beyond or
    between the tokenizer's ids: those stand for nothing. Nucleus sampling: Holtzman et al.,
    arXiv 1904.09751.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    allowed: Sequence[int] | None = None
    allowed_ids: Array | None = field(init=False)
    random: Any = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise DtoolError(
                "sampling options do not fit",
                expected="temperature >= 0, 0 < top_p <= 1, top_k >= 0",
                found=f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}",
                fix="choose values in these ranges",
            )
        self.allowed_ids = None if self.allowed is None else np.array(self.allowed, np.int64)
        self.random = np.random.default_rng(self.seed)

    def choose(self, logits_V: Array) -> int:
        """The next id."""
        ids = np.arange(len(logits_V)) if self.allowed_ids is None else self.allowed_ids
        scores = logits_V[ids].astype(np.float64)
        if self.temperature == 0:
            return int(ids[scores.argmax()])
        scores = scores / self.temperature
        order = np.argsort(-scores, kind="stable")[: self.top_k or None]
        weights = np.exp(scores[order] - scores[order[0]])
        weights /= weights.sum()
        kept = int(np.searchsorted(np.cumsum(weights), self.top_p)) + 1
        weights = weights[:kept] / weights[:kept].sum()
        return int(ids[self.random.choice(order[:kept], p=weights)])


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


def whole_characters(ids: Sequence[int], text: str) -> str:  # noqa: ARG001 - some decoders need the ids
    """The text without the character at its end that lacks bytes."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def stream_text(
    ids: Iterator[int],
    decode: Callable[[list[int]], str],
    settled: Callable[[Sequence[int], str], str] = whole_characters,
) -> Iterator[str]:
    """Text as it becomes certain, in pieces that together are the text of all ids.

    `decode` maps ids to text: the text of a token depends on those before it, a leading space above all.
    `settled` gives the part of that text which later ids leave alone.
    """
    window: list[int] = []
    shown = 0
    for token in ids:
        window.append(token)
        whole = decode(window)
        text = settled(window, whole)
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)
        # Decoding everything for each token would cost the square of the length. Where nothing is held
        # back, the last tokens are context enough for the next, if alone they give the same text.
        if len(window) >= 2 * CONTEXT and shown == len(whole):
            tail = decode(window[-CONTEXT:])
            if tail and whole.endswith(tail):
                window, shown = window[-CONTEXT:], len(tail)
    whole = decode(window) if window else ""
    if len(whole) > shown:
        yield whole[shown:]
