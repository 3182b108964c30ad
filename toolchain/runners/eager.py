"""The reference: the torch decoder itself, plain or with the exact arithmetic of its quantization."""

from dataclasses import dataclass

import numpy as np
import torch

from toolchain.graph_io import Phase
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Decoder
from toolchain.runners.runner import Array, KVState, Limits, check_state, check_step


@dataclass(slots=True)
class EagerRunner:
    """Runs a torch decoder on a torch device, over caches in its own formats."""

    decoder: Decoder
    name: str = "eager"
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.decoder.to(self.device)
        self.decoder.tables = {name: table.to(self.device) for name, table in self.decoder.tables.items()}

    @property
    def config(self) -> DecoderConfig:
        """The model's config."""
        return self.decoder.config

    def new_state(self, batch: int, capacity: int) -> KVState:
        check_state(self.config, Limits(), batch, capacity)
        caches = self.decoder.new_caches(batch, capacity)
        return KVState(capacity, np.zeros(batch, np.int64), caches)

    @torch.inference_mode()
    def step(self, state: KVState, input_ids: Array, new_lengths: Array, phase: Phase) -> Array:
        check_step(self.config, Limits(), state, input_ids, new_lengths, phase)
        past, ids = (torch.from_numpy(values).to(self.device) for values in (state.lengths, input_ids))
        x_BTE = self.decoder.hidden_states(ids, past, state.caches)
        if phase != "evaluation":
            x_BTE = x_BTE[torch.arange(len(new_lengths)), torch.from_numpy(new_lengths) - 1][:, None]
        state.lengths = state.lengths + new_lengths
        return self.decoder.logits(x_BTE).cpu().numpy()
