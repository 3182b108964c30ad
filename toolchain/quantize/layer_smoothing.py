"""Smoothing of one layer at hand: which alpha, folded where, and what was seen divided alike.

Legend: B batch, T tokens, N tokens of all texts, E hidden, I inputs of a product.
"""

from collections.abc import Callable, Iterable

import torch

from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Block, LayerCache
from toolchain.model.quantized import KV_SCALES
from toolchain.quantize.excess import PRODUCT
from toolchain.quantize.job import Job
from toolchain.quantize.layer import run_layer
from toolchain.quantize.seen import WalkedLayer
from toolchain.quantize.smoothing import (
    ALPHAS,
    Reader,
    Site,
    fold,
    least_error,
    shared_by_heads,
    sites,
    smoothing_scale,
    weight_sizes,
)


def smooth_layer(block: Block, layer: WalkedLayer, job: Job, rope: LayerCache, sample_BTE: torch.Tensor) -> None:
    """Fold a scale into every input that can take one, and divide what was seen alike.

    An input that is rotated or limited as the graph runs can take none. `sample_BTE`: a text as it enters the layer,
    on which alpha is searched where it is.
    """
    config, smoothing = job.config, job.recipe.smoothing
    searched = smoothing.alpha == "search"
    texts = _inputs(block, rope, sample_BTE, layer.seen) if searched else {}
    shaped = getattr(block.mlp, "shape", None) is not None
    for site in sites(config, layer.index):
        seen = layer.seen.get(site.readers[0])
        if seen is None or (shaped and site.readers[0] == PRODUCT):
            continue
        size_I = seen.amax if smoothing.algorithm == "smoothquant" else seen.mean_size
        weights_I = weight_sizes(block, site.readers)
        alphas = ALPHAS if smoothing.alpha == "search" else (smoothing.alpha,)
        scales = {alpha: smoothing_scale(size_I, weights_I, alpha) for alpha in alphas}
        if site.maker.endswith("qkv_proj"):
            scales = {alpha: shared_by_heads(scale_I, config) for alpha, scale_I in scales.items()}
        alpha, scale_I = next(iter(scales.items()))
        if texts:
            readers = [_reader(block, layer, job, name) for name in site.readers]
            alpha, scale_I = least_error(scales.items(), readers, texts[site.readers[0]])
        layer.alphas |= dict.fromkeys(site.readers, alpha)
        fold(block, site, scale_I, config)
        _divide_seen(layer, site, scale_I, config)


def _inputs(block: Block, rope: LayerCache, x_BTE: torch.Tensor, products: Iterable[str]) -> dict[str, torch.Tensor]:
    """What the layer's products read of a text, float32 [N, I] by product."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _, inputs: found.update({name: inputs[0].flatten(0, -2)})

    handles = [block.get_submodule(name).register_forward_pre_hook(keep(name)) for name in products]
    run_layer(block, rope, x_BTE)
    for handle in handles:
        handle.remove()
    return found


def _reader(block: Block, layer: WalkedLayer, job: Job, product: str) -> Reader:
    """What rounding will do to both sides of a product."""
    module, seen = f"model.layers.{layer.index}.{product}", layer.seen[product]
    center_I = seen.center if module in job.plan.centered else torch.zeros_like(seen.high)
    weights, weight_OI = job.plan.weights.get(module), block.get_submodule(product).weight
    assert isinstance(weight_OI, torch.Tensor)
    return Reader(
        weight_OI,
        None if weights is None else weights.format,
        job.plan.groups.get(module, 0),
        job.plan.rounded.get(module),
        center_I,
        seen.reach(center_I),
    )


def _divide_seen(layer: WalkedLayer, site: Site, scale_I: torch.Tensor, config: DecoderConfig) -> None:
    for reader in site.readers:
        if reader in layer.seen:
            layer.seen[reader].divide(scale_I)
    if site.maker.endswith("qkv_proj") and KV_SCALES[1] in layer.cache:
        layer.cache[KV_SCALES[1]].divide(scale_I.reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0])
