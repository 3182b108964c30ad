"""What every KV head of a cache costs alone, measured: KL of the logits with its K and V rounded, all else in float.

A query head reads one KV head, so the cache of one head alone is the float attention with the outputs of that head's
queries taken from the attention over a quantized cache: all others stay as they are, bit for bit. Two runs of a layer
serve all its heads; each head then costs a run of the layers that follow.

Legend: B batch, T tokens, N = H D outputs of the heads side by side.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from toolchain.quantize.progress import time_span
from toolchain.search.sensitivity import FloatModel


@torch.inference_mode()
def head_losses(model: FloatModel, layers: Sequence[int], report: Callable[[str], None]) -> dict[int, list[float]]:
    """KL (nats) of each KV head of these layers, its cache alone in the format of the model's."""
    heads, begin = model.decoder.config.num_key_value_heads, time.perf_counter()
    asked, found = len(layers) * heads, dict[int, list[float]]()
    for done, layer in enumerate(layers, 1):
        with model.quantized_cache(layer):
            rounded_BTN = attended(model, layer)
        found[layer] = []
        for head in range(heads):
            with spliced(model, layer, head, rounded_BTN):
                found[layer].append(model.loss_from(layer).kl)
        left = (time.perf_counter() - begin) / done * (len(layers) - done)
        costs = ", ".join(f"{kl:.3g}" for kl in found[layer])
        report(f"{done * heads} of {asked} KV heads: those of layer {layer} cost {costs} nats; {time_span(left)} left")
    return found


def attended(model: FloatModel, layer: int) -> torch.Tensor:
    """What a layer's heads make of the text, [B, T, N], as the layer is now."""
    seen: list[torch.Tensor] = []
    with _before_output(model, layer, lambda _, inputs: seen.append(inputs[0])):
        model.layer(layer, model.streams[layer])
    return seen[0]


@contextlib.contextmanager
def spliced(model: FloatModel, layer: int, head: int, rounded_BTN: torch.Tensor) -> Iterator[None]:
    """Within the block the outputs of the queries of one KV head are those of `rounded_BTN`."""
    width = rounded_BTN.shape[-1] // model.decoder.config.num_key_value_heads
    own = slice(head * width, (head + 1) * width)

    def splice(_: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        mixed_BTN = inputs[0].clone()
        mixed_BTN[..., own] = rounded_BTN[..., own]
        return mixed_BTN

    with _before_output(model, layer, splice):
        yield


@contextlib.contextmanager
def _before_output(model: FloatModel, layer: int, hook: Callable[..., Any]) -> Iterator[None]:
    attention: Any = model.decoder.model.layers[layer].self_attn
    handle = attention.o_proj.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
