"""Static scales from calibration text: of the cache, and of the inputs of products.

The reference decoder runs over the blocks in float. What then lies in the cache is exactly what a
quantized cache will have to hold (keys after rotation), so its largest magnitude per layer and KV
head, for K and for V apart, is the statistic and no hook is needed. The inputs of the products are
seen by hooks; their statistic is the largest magnitude of all (amax). Blocks are full, so no padding
enters.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from toolchain.errors import DtoolError
from toolchain.model.decoder import Decoder
from toolchain.model.quantized import INPUT_SCALE, KV_SCALES
from toolchain.numerics import scale_from_amax
from toolchain.recipe import Recipe

Amax = dict[str, torch.Tensor]


@torch.inference_mode()
def calibrate(
    decoder: Decoder,
    blocks: "np.ndarray",
    recipe: Recipe,
    products: Sequence[str],
    held_in: torch.dtype,
    report: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """float32 scales by parameter name: [K] of each cache, [] of the input of each of `products`.

    `blocks`: token ids int64 [samples, seq_len]. Scales of inputs are values of `held_in`. Raises
    DtoolError when a value is not finite.
    """
    amax: Amax = {}
    handles = [
        decoder.get_submodule(name).register_forward_pre_hook(_input_hook(amax, f"{name}.{INPUT_SCALE}"))
        for name in products
    ]
    done = 0
    try:
        for ids_BT in _batches(blocks, recipe.calibration.batch):
            caches = decoder.new_caches(len(ids_BT), ids_BT.shape[1])
            hidden_BTE = decoder.hidden_states(ids_BT, torch.zeros(len(ids_BT), dtype=torch.int64), caches)
            if "lm_head" in products:
                decoder.logits(hidden_BTE)
            if recipe.kv_cache.format != "none":
                _see_caches(amax, caches)
            done += len(ids_BT)
            report(f"calibrating: {done} of {len(blocks)} blocks")
    finally:
        for handle in handles:
            handle.remove()
    return {name: _scale(name, value, recipe, held_in) for name, value in amax.items()}


def _batches(blocks: "np.ndarray", size: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(blocks), size):
        yield torch.from_numpy(blocks[start : start + size])


def _input_hook(amax: Amax, name: str) -> Callable[..., None]:
    def see(_module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        _raise_to(amax, name, inputs[0].float().abs().amax())

    return see


def _see_caches(amax: Amax, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for i, layer in enumerate(caches):
        for name, cache_BKCD in zip(KV_SCALES, layer, strict=True):
            _raise_to(amax, f"model.layers.{i}.self_attn.{name}", cache_BKCD.float().abs().amax((0, 2, 3)))


def _raise_to(amax: Amax, name: str, seen: torch.Tensor) -> None:
    amax[name] = torch.maximum(amax.get(name, torch.zeros_like(seen)), seen)  # a NaN stays a NaN


def _scale(name: str, amax: torch.Tensor, recipe: Recipe, held_in: torch.dtype) -> torch.Tensor:
    is_cache = not name.endswith(INPUT_SCALE)
    if is_cache and recipe.kv_cache.granularity == "tensor":
        amax = amax.max().expand_as(amax).contiguous()
    try:
        if is_cache:
            return scale_from_amax(amax, recipe.kv_cache.format)
        return scale_from_amax(amax, recipe.activations.format, held_in=held_in)
    except ValueError as error:
        raise DtoolError(
            f"{name} cannot be calibrated", found=str(error), fix="check the weights for inf or NaN"
        ) from error
