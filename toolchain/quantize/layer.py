"""One layer of the float model at a time: loaded from the weights file, and run over calibration text.

Legend: B batch, T tokens, E hidden, K KV heads, C capacity, D head dim.
"""

from collections.abc import Mapping
from typing import Any

import torch

from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Block, Decoder, LayerCache
from toolchain.model.parameters import EMBEDDING, POSITIONS
from toolchain.tensor_file import TensorEntry, read_tensor


def load_layer(entries: Mapping[str, TensorEntry], config: DecoderConfig, index: int) -> Block:
    """Layer `index` in float32."""
    return fill(Block(config, index).eval(), entries, f"model.layers.{index}.")


def fill(module: Any, entries: Mapping[str, TensorEntry], prefix: str) -> Any:
    """The module with its parameters from the file, in float32."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(False)
            parameter.copy_(read_tensor(entries[prefix + name]).float())
    return module


@torch.no_grad()
def embedded_text(
    entries: Mapping[str, TensorEntry], config: DecoderConfig, blocks: Any, batch: int, batches: int | None = None
) -> list[torch.Tensor]:
    """What enters the first layer, float32 [B, T, E] by batch; `blocks` are ids [samples, T]."""
    with torch.device("meta"):
        frame = Decoder(config.model_copy(update={"num_hidden_layers": 1, "layers": config.layers[:1]})).eval()
    for name in (EMBEDDING, POSITIONS):
        if name in entries:
            weight = torch.nn.Parameter(read_tensor(entries[name]).float(), requires_grad=False)
            frame.get_submodule(name.removesuffix(".weight")).weight = weight
    parts = torch.from_numpy(blocks).split(batch)[:batches]
    return [frame.embedded(part, torch.zeros(len(part), dtype=torch.int64)) for part in parts]


@torch.no_grad()
def run_layer(block: Block, rope: LayerCache, x_BTE: torch.Tensor) -> tuple[torch.Tensor, LayerCache]:
    """The layer's output for whole texts, and its filled caches [B, K, T, D]."""
    spec = block.self_attn.spec
    shape = (len(x_BTE), spec.num_kv_heads, x_BTE.shape[1], spec.head_dim)
    cache = (torch.zeros(shape), torch.zeros(shape))
    out_BTE, _ = block(x_BTE, rope, torch.zeros(len(x_BTE), dtype=torch.int64), cache)
    return out_BTE, cache
