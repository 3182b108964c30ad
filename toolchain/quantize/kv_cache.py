"""Static scales of the INT8 cache: one per layer and KV head, for K and for V apart.

The reference decoder runs over the calibration blocks with a float cache; what then lies in the
cache is exactly what an INT8 cache will have to hold (keys after rotation), so its largest
magnitude is the statistic and no hook is needed. Blocks are full, so no padding enters.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from toolchain.errors import DtoolError
from toolchain.model.decoder import Decoder
from toolchain.model.quantized import KV_SCALES
from toolchain.numerics import scale_from_amax


@torch.inference_mode()
def calibrate_cache(
    decoder: Decoder, blocks: "np.ndarray", *, batch: int, granularity: str, report: Callable[[str], None]
) -> dict[str, torch.Tensor]:
    """Scale tensors float32 [K] by parameter name, from token blocks int64 [samples, seq_len].

    Raises DtoolError when a key or value is not finite.
    """
    amax: dict[str, torch.Tensor] = {}
    done = 0
    for ids_BT in _batches(blocks, batch):
        caches = decoder.new_caches(len(ids_BT), ids_BT.shape[1])
        decoder.hidden_states(ids_BT, torch.zeros(len(ids_BT), dtype=torch.int64), caches)
        for i, layer in enumerate(caches):
            for name, cache_BKCD in zip(KV_SCALES, layer, strict=True):
                seen_K = cache_BKCD.float().abs().amax((0, 2, 3))
                key = f"model.layers.{i}.self_attn.{name}"
                amax[key] = torch.maximum(amax.get(key, torch.zeros_like(seen_K)), seen_K)
        done += len(ids_BT)
        report(f"calibrating the cache: {done} of {len(blocks)} blocks")
    return {name: _scale(name, value_K, granularity) for name, value_K in amax.items()}


def _batches(blocks: "np.ndarray", size: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(blocks), size):
        yield torch.from_numpy(blocks[start : start + size])


def _scale(name: str, amax_K: torch.Tensor, granularity: str) -> torch.Tensor:
    if granularity == "tensor":
        amax_K = amax_K.max().expand_as(amax_K).contiguous()
    try:
        return scale_from_amax(amax_K)
    except ValueError as error:
        raise DtoolError(
            f"{name} cannot be calibrated", found=str(error), fix="check the weights for inf or NaN"
        ) from error
