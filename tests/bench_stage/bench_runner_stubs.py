"""A clock that only stubs move, runners that cost what a test says, and artifacts without graphs."""

from dataclasses import dataclass, field

import numpy as np
import torch

from toolchain.artifact import create_artifact, open_artifact
from toolchain.model.config import DecoderConfig
from toolchain.model.hf import config_from_hf
from toolchain.model.parameters import parameter_shapes
from toolchain.runners.runner import KVState, Limits
from toolchain.tensor_file import write_tensors


def tiny_document(**changes):
    """A config.json."""
    return {
        "vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "model_type": "llama", "dtype": "float32",
    } | changes  # fmt: skip


def tiny_config(**changes) -> DecoderConfig:
    return config_from_hf(tiny_document(**changes), {})


@dataclass
class FakeClock:
    now: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += 1000.0  # must never show in a result


@dataclass
class StubRunner:
    """`costs(phase, call number)` gives the seconds of a step; `log` collects (name, phase, T)."""

    clock: FakeClock
    costs: object
    name: str = "stub"
    config: DecoderConfig = field(default_factory=tiny_config)
    limits: Limits = field(default_factory=Limits)
    log: list = field(default_factory=list)
    calls: int = 0
    bad_logits: bool = False

    def new_state(self, batch: int, capacity: int) -> KVState:
        return KVState(capacity, np.zeros(batch, np.int64), None)

    def step(self, state, input_ids, new_lengths, phase):
        assert phase == "decode" or not state.lengths.any(), "a prefill starts from an empty cache"
        assert input_ids.min() >= 0
        assert input_ids.max() < self.config.vocab_size
        self.log.append((self.name, phase, input_ids.shape[1]))
        self.clock.now += self.costs(phase, self.calls)
        self.calls += 1
        state.lengths = state.lengths + new_lengths
        assert state.lengths.max() <= state.capacity
        logits = np.zeros((state.batch, 1, self.config.vocab_size), np.float32)
        return logits + np.nan if self.bad_logits else logits


@dataclass
class QueueingRunner(StubRunner):
    """Returns at once; the work is done in `synchronize`."""

    queued: float = 0.0
    waits: int = 0

    def step(self, state, input_ids, new_lengths, phase):
        before = self.clock.now
        logits = super().step(state, input_ids, new_lengths, phase)
        self.queued += self.clock.now - before
        self.clock.now = before
        return logits

    def synchronize(self) -> None:
        self.waits += 1
        self.clock.now += self.queued
        self.queued = 0.0


@dataclass
class CopyingRunner(StubRunner):
    """Counts the cache bytes it moves between host and device, `per_step` each step."""

    per_step: int = 0
    copied_cache_bytes: int = 0

    def step(self, state, input_ids, new_lengths, phase):
        self.copied_cache_bytes += self.per_step if phase == "decode" else 0
        return super().step(state, input_ids, new_lengths, phase)


def make_artifact(path, config, dtype=torch.float32, extra=(), cache="float32"):
    with create_artifact(path, "export") as draft:
        tensors = {n: torch.zeros(s, dtype=dtype) for n, s in parameter_shapes(config).items()} | dict(extra)
        write_tensors(draft.path / "weights.safetensors", tensors)
        write_tensors(draft.path / "rope.safetensors", {"cos": torch.zeros(1024, 2)})
        draft.write_json("decoder.json", config.model_dump(mode="json"))
        draft.kv_contract = {"dtype": cache}
    return open_artifact(path)
