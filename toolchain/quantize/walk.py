"""The walk: calibration text goes through the model layer by layer, and each layer is quantized on the way.

One layer's float weights and the activations between two layers are all that is in memory, so the size of
a model does not matter. For each layer, in float:

    1. its input, kept from the layer before, runs through it; the inputs of its products and its cache are seen
    2. smoothing divides what is hard to round (`smoothing`), an identity
    3. its matrices are rounded with what was seen (`rounding`)
    4. the layer's float output is the next layer's input

Statistics of the unsmoothed layer are divided as the activations are, so one pass serves both.

Legend: B batch, T tokens, I inputs of a product, E hidden, K KV heads, C capacity, D head dim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Block, Decoder
from toolchain.model.parameters import EMBEDDING, POSITIONS
from toolchain.model.positions import position_tables, rope_table_names
from toolchain.model.quantized import INPUT_SCALE, KV_SCALES
from toolchain.numerics import scale_from_amax
from toolchain.quantize.smoothing import Site, fold, shared_by_heads, sites, smoothing_scale, weight_sizes
from toolchain.recipe import Recipe
from toolchain.tensor_file import TensorEntry, read_tensor

Report = Callable[[str], None]
IDENTITY = 1e-4
"""Relative difference that float32 leaves between a layer before and after smoothing."""


@dataclass(slots=True)
class Seen:
    """What one product's input was: the largest magnitude of each channel [I], their sum [I], and H [I, I]."""

    amax: torch.Tensor
    total: torch.Tensor
    tokens: int = 0
    hessian: torch.Tensor | None = None

    def add(self, x_BTI: torch.Tensor) -> None:
        """Take in one batch."""
        x_NI = x_BTI.float().flatten(0, -2)
        size_NI = x_NI.abs()
        self.amax = torch.maximum(self.amax, size_NI.amax(0))  # a NaN stays a NaN
        self.total = self.total + size_NI.sum(0)
        self.tokens += len(x_NI)
        if self.hessian is not None:
            self.hessian.addmm_(x_NI.mT, x_NI)

    def divide(self, scale_I: torch.Tensor) -> None:
        """As if every input had been divided by `scale_I`."""
        self.amax, self.total = self.amax / scale_I, self.total / scale_I
        if self.hessian is not None:
            self.hessian.div_(scale_I[:, None]).div_(scale_I[None, :])


@dataclass(slots=True)
class WalkedLayer:
    """One layer, smoothed and still in float: its tensors by name, and what its products and its cache saw."""

    index: int
    tensors: dict[str, torch.Tensor]
    seen: dict[str, Seen] = field(default_factory=dict)
    cache_amax: dict[str, torch.Tensor] = field(default_factory=dict)
    identity_error: float = 0.0


def walk(
    entries: Mapping[str, TensorEntry],
    config: DecoderConfig,
    recipe: Recipe,
    blocks: Any,
    products: tuple[str, ...],
    report: Report,
) -> Iterator[WalkedLayer]:
    """Every layer in turn, then the head's input under the index `num_hidden_layers`.

    `blocks`: token ids int64 [samples, seq_len]; `products`: names of the products whose inputs are watched.
    Raises DtoolError when a value is not finite.
    """
    streams = _embedded(entries, config, blocks, recipe.calibration.batch)
    tables = position_tables(config)
    for i in range(config.num_hidden_layers):
        with torch.no_grad():
            prefix = f"model.layers.{i}."
            block = _load(Block(config, i).eval(), entries, prefix)
            watched = {name.removeprefix(prefix) for name in products if name.startswith(prefix)}
            layer = WalkedLayer(i, {})
            cos, sin = rope_table_names(config.layer(i).rope)
            rope, inputs = (tables[cos], tables[sin]), streams
            layer.seen, streams = _run(block, watched, rope, inputs, recipe, config, layer)
            if recipe.smoothing.algorithm != "none":
                _smooth(block, layer, config, recipe)
                layer.identity_error = _identity_error(block, rope, inputs[0][:1], streams[0][:1], config)
        layer.tensors = {prefix + name: p.detach() for name, p in block.named_parameters()}
        report(f"layer {i + 1} of {config.num_hidden_layers}")
        yield layer
    if "lm_head" in products:
        yield _head_input(entries, config, streams)


def _load(module: Any, entries: Mapping[str, TensorEntry], prefix: str) -> Any:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        parameter.copy_(read_tensor(entries[prefix + name]).float())
    return module


@torch.no_grad()
def _embedded(entries: Mapping[str, TensorEntry], config: DecoderConfig, blocks: Any, batch: int) -> list[torch.Tensor]:
    """What enters the first layer, float32 [B, T, E] by batch."""
    with torch.device("meta"):
        frame = Decoder(config.model_copy(update={"num_hidden_layers": 1, "layers": config.layers[:1]})).eval()
    for name in (EMBEDDING, POSITIONS):
        if name in entries:
            weight = torch.nn.Parameter(read_tensor(entries[name]).float(), requires_grad=False)
            frame.get_submodule(name.removesuffix(".weight")).weight = weight
    ids = torch.from_numpy(blocks)
    return [frame.embedded(part, torch.zeros(len(part), dtype=torch.int64)) for part in ids.split(batch)]


def _run(
    block: Block,
    watched: set[str],
    rope: tuple[torch.Tensor, torch.Tensor],
    streams: list[torch.Tensor],
    recipe: Recipe,
    config: DecoderConfig,
    layer: WalkedLayer,
) -> tuple[dict[str, Seen], list[torch.Tensor]]:
    """The layer's output for every batch; what its products and its cache saw on the way."""
    seen = {name: _nothing(block.get_submodule(name).weight.shape[1], recipe) for name in watched}  # type: ignore[union-attr, index]
    handles = [block.get_submodule(name).register_forward_pre_hook(_watch(product)) for name, product in seen.items()]
    outputs = []
    shape = (config.num_key_value_heads, streams[0].shape[1], config.head_dim)
    for x_BTE in streams:
        cache = torch.zeros(2, len(x_BTE), *shape)
        out_BTE, _ = block(x_BTE, rope, torch.zeros(len(x_BTE), dtype=torch.int64), (cache[0], cache[1]))
        outputs.append(out_BTE)
        if recipe.kv_cache.is_static:
            for name, cache_BKCD in zip(KV_SCALES, cache, strict=True):
                size_KD = cache_BKCD.abs().amax((0, 2))
                layer.cache_amax[name] = torch.maximum(layer.cache_amax.get(name, torch.zeros_like(size_KD)), size_KD)
    for handle in handles:
        handle.remove()
    if not all(bool(torch.isfinite(out).all()) for out in outputs):
        raise DtoolError(
            f"layer {layer.index} gives inf or NaN on the calibration text",
            expected="finite activations",
            fix="check the weights, or the compute type: values may not fit it",
        )
    return seen, outputs


def _watch(product: Seen) -> Callable[..., None]:
    return lambda _, inputs: product.add(inputs[0])


def _nothing(width: int, recipe: Recipe) -> Seen:
    hessian_II = torch.zeros(width, width) if recipe.weights.uses_hessian else None
    return Seen(torch.zeros(width), torch.zeros(width), hessian=hessian_II)


def _smooth(block: Block, layer: WalkedLayer, config: DecoderConfig, recipe: Recipe) -> None:
    """Fold a scale into every input that can take one, and divide what was seen alike."""
    smoothing = recipe.smoothing
    for site in sites(config, layer.index):
        seen = layer.seen.get(site.readers[0])
        if seen is None:
            continue
        size_I = seen.amax if smoothing.algorithm == "smoothquant" else seen.total / max(seen.tokens, 1)
        scale_I = smoothing_scale(size_I, weight_sizes(block, site.readers), smoothing.alpha)
        if site.maker.endswith("qkv_proj"):
            scale_I = shared_by_heads(scale_I, config)
        fold(block, site, scale_I, config)
        _divide_seen(layer, site, scale_I, config)


def _identity_error(block: Block, rope: Any, x_BTE: torch.Tensor, before_BTE: torch.Tensor, config: Any) -> float:
    """||after - before|| / ||before|| of what the layer adds up to. Raises DtoolError when smoothing changed it."""
    cache = torch.zeros(2, len(x_BTE), config.num_key_value_heads, x_BTE.shape[1], config.head_dim)
    after_BTE, _ = block(x_BTE, rope, torch.zeros(len(x_BTE), dtype=torch.int64), (cache[0], cache[1]))
    error = float((after_BTE - before_BTE).norm() / before_BTE.norm().clamp_min(1e-30))
    if not error <= IDENTITY:
        raise DtoolError(
            "smoothing changed what a layer computes",
            expected=f"a relative difference of at most {IDENTITY:g}",
            found=f"{error:.2g}",
            fix="this is a fault of dtool with this model: please report it; smoothing.algorithm none avoids it",
        )
    return error


def _divide_seen(layer: WalkedLayer, site: Site, scale_I: torch.Tensor, config: DecoderConfig) -> None:
    for reader in site.readers:
        if reader in layer.seen:
            layer.seen[reader].divide(scale_I)
    if site.maker.endswith("qkv_proj") and KV_SCALES[1] in layer.cache_amax:
        heads = scale_I.reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0]
        layer.cache_amax[KV_SCALES[1]] = layer.cache_amax[KV_SCALES[1]] / heads


@torch.no_grad()
def _head_input(entries: Mapping[str, TensorEntry], config: DecoderConfig, streams: list[torch.Tensor]) -> WalkedLayer:
    """What the head reads: the last norm's output."""
    norm = torch.nn.Identity()
    if config.final_norm:
        from toolchain.model.decoder import Norm

        norm = _load(Norm(config), entries, "model.norm.")
    seen = Seen(torch.zeros(config.hidden_size), torch.zeros(config.hidden_size))
    for x_BTE in streams:
        seen.add(norm(x_BTE))
    return WalkedLayer(config.num_hidden_layers, {}, {"lm_head": seen})


def static_scales(layer: WalkedLayer, recipe: Recipe, rounded: set[str], held_in: torch.dtype) -> dict[str, Any]:
    """float32 scales by parameter name: [K] of the cache, [] of every input that is rounded with a fixed scale."""
    prefix = f"model.layers.{layer.index}."
    found: dict[str, Any] = {}
    for part, amax_KD in layer.cache_amax.items():
        amax_K = amax_KD.amax(-1)
        if recipe.kv_cache.granularity == "tensor":
            amax_K = amax_K.max().expand_as(amax_K).contiguous()
        found[f"{prefix}self_attn.{part}"] = scale_from_amax(amax_K, recipe.kv_cache.format)
    if recipe.has_static_activations:
        for name, seen in layer.seen.items():
            full = name if name == "lm_head" else prefix + name
            if full in rounded:
                scale = scale_from_amax(seen.amax.max(), recipe.activations.format, held_in=held_in)
                found[f"{full}.{INPUT_SCALE}"] = scale
    return found
