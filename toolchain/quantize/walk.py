"""The walk: calibration text goes through the model layer by layer, and each layer is quantized on the way.

One layer's float weights and the activations between two layers are all that is in memory, so the size of
a model does not matter. For each layer, in float:

    1. rotation puts it into a basis without large channels (`rotation`), and the excess of a few is set apart
    2. its input, kept from the layer before, runs through it; the inputs of its products and its cache are seen
    3. smoothing divides what is still hard to round (`smoothing`, `keys`)
    4. one text runs through it again: what is left must be the function it was
    5. its matrices are rounded with what was seen (`rounding`)
    6. the layer's float output is the next layer's input

With `calibration.inputs` quantized, what a layer sees is what the rounded layers before it made (GPTQ, arXiv
2210.17323, section 4), else what the float model makes.

Statistics of the unsmoothed layer are divided as the activations are, so one pass serves both.

Legend: B batch, T tokens, I inputs of a product, E hidden, K KV heads, C capacity, D head dim.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from toolchain.errors import DtoolError
from toolchain.formats import format_named
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Block, LayerCache, Norm
from toolchain.model.positions import position_tables, rope_table_names
from toolchain.model.quantized import INPUT_SCALE, KV_SCALES, InputShape
from toolchain.numerics import dequantize, quantize, scale_from_amax, token_scale
from toolchain.quantize.cache_scales import CacheSeen, cache_scale, needs_histogram
from toolchain.quantize.excess import PRODUCT, Excess
from toolchain.quantize.job import Job
from toolchain.quantize.keys import smooth_keys
from toolchain.quantize.layer import embedded_text, fill, load_layer, run_layer
from toolchain.quantize.plan import QuantizePlan
from toolchain.quantize.progress import time_span
from toolchain.quantize.rotation import rotate_feed_forward, rotate_stream, rotate_values, rotation_matrix
from toolchain.quantize.smoothing import Site, fold, shared_by_heads, sites, smoothing_scale, weight_sizes
from toolchain.recipe import Recipe
from toolchain.tensor_file import TensorEntry

IDENTITY = 1e-4
"""Relative difference that float32 leaves between a layer before and after rotation and smoothing."""


@dataclass(slots=True)
class Seen:
    """What one product's input was: of each channel [I] the range and the sum of sizes, its sum [I], and H [I, I].

    `balanced` is its sum with every token at the same length, `weight` the sum of those weights 1 / |x|^2: massive
    activations of a few tokens say nothing of the mean of all others.
    """

    low: torch.Tensor
    high: torch.Tensor
    total: torch.Tensor
    signed: torch.Tensor
    balanced: torch.Tensor
    weight: float = 0.0
    tokens: int = 0
    hessian: torch.Tensor | None = None

    @property
    def amax(self) -> torch.Tensor:
        """The largest magnitude of each channel [I]."""
        return torch.maximum(self.high, -self.low)

    @property
    def center(self) -> torch.Tensor:
        """The mean of each channel [I], every token weighing 1 / |x|^2."""
        return self.balanced / max(self.weight, 1e-30)

    def add(self, x_BTI: torch.Tensor) -> None:
        """Take in one batch."""
        x_NI = x_BTI.float().flatten(0, -2)
        weight_N = 1 / x_NI.square().sum(1).clamp_min(1e-30)
        self.low, self.high = torch.minimum(self.low, x_NI.amin(0)), torch.maximum(self.high, x_NI.amax(0))  # NaN stays
        self.total = self.total + x_NI.abs().sum(0)
        self.signed = self.signed + x_NI.sum(0)
        self.balanced = self.balanced + weight_N @ x_NI
        self.weight += float(weight_N.sum())
        self.tokens += len(x_NI)
        if self.hessian is not None:
            self.hessian.addmm_(x_NI.mT, x_NI)

    def divide(self, scale_I: torch.Tensor) -> None:
        """As if every input had been divided by `scale_I`."""
        self.low, self.high, self.total = self.low / scale_I, self.high / scale_I, self.total / scale_I
        self.signed, self.balanced = self.signed / scale_I, self.balanced / scale_I
        if self.hessian is not None:
            self.hessian.div_(scale_I[:, None]).div_(scale_I[None, :])

    def shift(self, center_I: torch.Tensor) -> None:
        """As if every input had been `center_I` less."""
        self.low, self.high = self.low - center_I, self.high - center_I
        if self.hessian is not None:
            about_I = self.signed - self.tokens * center_I / 2
            self.hessian.addr_(about_I, center_I, alpha=-1).addr_(center_I, about_I, alpha=-1)
        self.signed = self.signed - self.tokens * center_I


@dataclass(slots=True)
class WalkedLayer:
    """One layer, rotated, smoothed and still in float: its tensors by name, and what its products and cache saw.

    `shape`: what its last product does to its input before rounding, None for nothing. `means`: of the centered
    products the means [I] that were taken off what they saw, and what the float product makes of those [O].
    """

    index: int
    tensors: dict[str, torch.Tensor]
    shape: InputShape | None = None
    seen: dict[str, Seen] = field(default_factory=dict)
    means: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    cache: dict[str, CacheSeen] = field(default_factory=dict)
    identity_error: float = 0.0


def walk(job: Job) -> Iterator[WalkedLayer]:
    """Every layer in turn, then the head's input under the index `num_hidden_layers`.

    Of the plan's matrices those inputs are watched that decide something; what the job's progress holds is not
    walked again. Raises DtoolError when a value is not finite, or a layer is no longer itself.
    """
    entries, config, recipe, plan, progress = job.entries, job.config, job.recipe, job.plan, job.progress
    products = watched_products(entries, recipe, plan)
    exact_EE = rotation_matrix(config.hidden_size) if recipe.rotation.stream else None
    stream_EE = None if exact_EE is None else exact_EE.float()
    first, streams = (0, None) if progress is None else (progress.first, progress.streams)
    streams = streams or [
        x_BTE if stream_EE is None else x_BTE @ stream_EE
        for x_BTE in embedded_text(entries, config, job.blocks, recipe.calibration.batch)
    ]
    begin = time.monotonic()
    tables = position_tables(config)
    for i in range(first, config.num_hidden_layers):
        block, layer = load_layer(entries, config, i), WalkedLayer(i, {})
        cos, sin = rope_table_names(config.layer(i).rope)
        rope = (tables[cos], tables[sin])
        sample_BTE = streams[0][:1]
        before_BTE = _plain_output(block, rope, sample_BTE, stream_EE)
        with torch.no_grad():
            _rotate(block, layer, config, recipe, exact_EE, job.excess.get(i))
            outputs = _run(block, rope, streams, recipe, plan, layer, products)
            if recipe.smoothing.algorithm != "none":
                _smooth(block, layer, config, recipe)
            if recipe.smoothing.keys:
                smooth_keys(block, i, layer.cache[KV_SCALES[0]], config)
            layer.identity_error = _identity_error(run_layer(block, rope, sample_BTE)[0], before_BTE)
            _center(block, layer, job)
        layer.tensors = {f"model.layers.{i}.{name}": p.detach() for name, p in block.named_parameters()}
        yield layer
        if recipe.calibration.inputs == "quantized":  # the block's matrices have been rounded in place
            _round_inputs(block, layer, plan)
            outputs = [run_layer(block, rope, x_BTE)[0] for x_BTE in streams]
        streams = outputs
        if progress is not None:
            progress.keep_streams(i + 1, streams)
        left = (time.monotonic() - begin) / (i + 1 - first) * (config.num_hidden_layers - i - 1)
        job.report(f"layer {i + 1} of {config.num_hidden_layers}, {time_span(left)} left")
    if "lm_head" in products:
        if stream_EE is not None:
            streams = [x_BTE @ stream_EE.mT for x_BTE in streams]
        yield _head_input(entries, config, streams)


def watched_products(entries: Mapping[str, TensorEntry], recipe: Recipe, plan: QuantizePlan) -> tuple[str, ...]:
    """The products whose inputs decide a scale or a rounding; an expert's are never watched."""
    watched = {*plan.static, *plan.centered}
    if plan.uses_hessian or recipe.smoothing.algorithm != "none":
        watched |= {name.removesuffix(".weight") for name in entries if name.endswith("_proj.weight")}
    return tuple(sorted(name for name in watched if ".experts." not in name))


def _plain_output(block: Block, rope: Any, x_BTE: torch.Tensor, stream_EE: torch.Tensor | None) -> torch.Tensor:
    """What the layer as it came makes of a text, in the basis of the stream."""
    if stream_EE is None:
        return run_layer(block, rope, x_BTE)[0]
    return run_layer(block, rope, x_BTE @ stream_EE.mT)[0] @ stream_EE


def _rotate(
    block: Block,
    layer: WalkedLayer,
    config: DecoderConfig,
    recipe: Recipe,
    stream_EE: torch.Tensor | None,
    excess: Excess | None,
) -> None:
    """The layer in the bases the recipe asks for; the excess of its last input set apart."""
    rotation, parts = recipe.rotation, ()
    if stream_EE is not None:
        rotate_stream(block, stream_EE)
    if rotation.values:
        rotate_values(block, config)
    if excess is not None:
        weight_OI = block.get_submodule(PRODUCT).weight
        assert isinstance(weight_OI, torch.Tensor)
        parts = (excess.bounds(weight_OI.shape[1]), excess.channels, weight_OI[:, excess.channels].mT.contiguous())
    if rotation.feed_forward or excess is not None:
        turned_nn = rotate_feed_forward(block).float() if rotation.feed_forward else None
        layer.shape = block.mlp.shape = InputShape(turned_nn, *parts)  # type: ignore[union-attr]


def _run(
    block: Block,
    rope: LayerCache,
    streams: list[torch.Tensor],
    recipe: Recipe,
    plan: QuantizePlan,
    layer: WalkedLayer,
    products: tuple[str, ...],
) -> list[torch.Tensor]:
    """The layer's output for every batch; `layer` learns what its products and its cache saw on the way."""
    prefix, handles, outputs = f"model.layers.{layer.index}.", [], []
    for name in (name.removeprefix(prefix) for name in products if name.startswith(prefix)):
        module = block.get_submodule(name)
        layer.seen[name] = _nothing(module.weight.shape[1], plan.uses_hessian)  # type: ignore[union-attr, index]
        handles.append(module.register_forward_pre_hook(_watch(layer.seen[name])))
    if recipe.kv_cache.is_static or recipe.smoothing.keys:
        spec, counted = block.self_attn.spec, needs_histogram(recipe.kv_cache)
        nothing = (CacheSeen.nothing(spec.num_kv_heads, spec.head_dim, histogram=counted) for _ in KV_SCALES)
        layer.cache = dict(zip(KV_SCALES, nothing, strict=True))
    for x_BTE in streams:
        out_BTE, cache = run_layer(block, rope, x_BTE)
        outputs.append(out_BTE)
        for seen, cache_BKCD in zip(layer.cache.values(), cache, strict=False):  # where it is not watched, none
            seen.add(cache_BKCD)
    for handle in handles:
        handle.remove()
    if not all(bool(torch.isfinite(out).all()) for out in outputs):
        raise DtoolError(
            f"layer {layer.index} gives inf or NaN on the calibration text",
            expected="finite activations",
            fix="check the weights, or the compute type: values may not fit it",
        )
    return outputs


def _watch(product: Seen) -> Callable[..., None]:
    return lambda _, inputs: product.add(inputs[0])


def _center(block: Block, layer: WalkedLayer, job: Job) -> None:
    """Take the means of centered products off what they saw, as their stored type holds them."""
    for product, seen in layer.seen.items():
        if f"model.layers.{layer.index}.{product}" in job.plan.centered:
            center_I = seen.center.to(format_named(job.held_in).torch_dtype).float()
            seen.shift(center_I)
            layer.means[product] = (center_I, block.get_submodule(product).weight @ center_I)  # type: ignore[operator]


def _round_inputs(block: Block, layer: WalkedLayer, plan: QuantizePlan) -> None:
    """Round the inputs of the layer's products from now on, and add its offsets, as the finished model will."""
    prefix = f"model.layers.{layer.index}."
    for product, (center_I, mean_O) in layer.means.items():
        module = block.get_submodule(product)
        offset_O = mean_O - module.weight @ center_I  # type: ignore[operator]
        module.register_forward_hook(lambda _, __, y_BTO, offset_O=offset_O: y_BTO + offset_O)
    for name, how in plan.rounded.items():
        if not name.startswith(prefix):
            continue
        product = name.removeprefix(prefix)
        fixed = scale_from_amax(layer.seen[product].amax.max(), how.format) if how.is_static else None
        center = layer.means[product][0] if product in layer.means else torch.zeros(())

        def rounded(
            _: Any,
            inputs: Any,
            fmt: str = how.format,
            fixed: torch.Tensor | None = fixed,
            center: torch.Tensor = center,
        ) -> torch.Tensor:
            x_BTI = inputs[0] - center
            scale = token_scale(x_BTI, fmt) if fixed is None else fixed
            return dequantize(quantize(x_BTI, scale, fmt), scale) + center

        block.get_submodule(product).register_forward_pre_hook(rounded)


def _nothing(width: int, hessian: bool = False) -> Seen:
    hessian_II = torch.zeros(width, width) if hessian else None
    low_I, high_I, total_I, signed_I, balanced_I = torch.zeros(5, width)
    return Seen(low_I, high_I, total_I, signed_I, balanced_I, hessian=hessian_II)


def _smooth(block: Block, layer: WalkedLayer, config: DecoderConfig, recipe: Recipe) -> None:
    """Fold a scale into every input that can take one, and divide what was seen alike.

    An input that is rotated or limited as the graph runs can take none.
    """
    smoothing = recipe.smoothing
    shaped = getattr(block.mlp, "shape", None) is not None
    for site in sites(config, layer.index):
        seen = layer.seen.get(site.readers[0])
        if seen is None or (shaped and site.readers[0] == PRODUCT):
            continue
        size_I = seen.amax if smoothing.algorithm == "smoothquant" else seen.total / max(seen.tokens, 1)
        scale_I = smoothing_scale(size_I, weight_sizes(block, site.readers), smoothing.alpha)
        if site.maker.endswith("qkv_proj"):
            scale_I = shared_by_heads(scale_I, config)
        fold(block, site, scale_I, config)
        _divide_seen(layer, site, scale_I, config)


def _identity_error(after_BTE: torch.Tensor, before_BTE: torch.Tensor) -> float:
    """||after - before|| / ||before||. Raises DtoolError when rotation or smoothing changed what the layer does."""
    error = float((after_BTE - before_BTE).norm() / before_BTE.norm().clamp_min(1e-30))
    if not error <= IDENTITY:
        raise DtoolError(
            "rotation or smoothing changed what a layer computes",
            expected=f"a relative difference of at most {IDENTITY:g}",
            found=f"{error:.2g}",
            fix="this is a fault of dtool with this model: please report it; without either it does not occur",
        )
    return error


def _divide_seen(layer: WalkedLayer, site: Site, scale_I: torch.Tensor, config: DecoderConfig) -> None:
    for reader in site.readers:
        if reader in layer.seen:
            layer.seen[reader].divide(scale_I)
    if site.maker.endswith("qkv_proj") and KV_SCALES[1] in layer.cache:
        layer.cache[KV_SCALES[1]].divide(scale_I.reshape(config.num_key_value_heads, -1, config.head_dim)[:, 0])


@torch.no_grad()
def _head_input(entries: Mapping[str, TensorEntry], config: DecoderConfig, streams: list[torch.Tensor]) -> WalkedLayer:
    """What the head reads: the last norm's output."""
    norm = fill(Norm(config), entries, "model.norm.") if config.final_norm else torch.nn.Identity()
    seen = _nothing(config.hidden_size)
    for x_BTE in streams:
        seen.add(norm(x_BTE))
    return WalkedLayer(config.num_hidden_layers, {}, seen={"lm_head": seen})


def static_scales(layer: WalkedLayer, recipe: Recipe, plan: QuantizePlan, held_in: torch.dtype) -> dict[str, Any]:
    """float32 scales by parameter name: [K] of the cache, [] of every input that is rounded with a fixed scale."""
    prefix = f"model.layers.{layer.index}."
    found: dict[str, Any] = {}
    for part, cache in layer.cache.items() if recipe.kv_cache.is_static else ():
        found[f"{prefix}self_attn.{part}"] = cache_scale(cache, recipe.kv_cache)
    for name, seen in layer.seen.items():
        full = name if name == "lm_head" else prefix + name
        if full in plan.static:
            fmt = plan.rounded[full].format
            found[f"{full}.{INPUT_SCALE}"] = scale_from_amax(seen.amax.max(), fmt, held_in=held_in)
    return found
