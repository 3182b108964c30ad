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

import math
import threading
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
from toolchain.quantize.layer_smoothing import smooth_layer
from toolchain.quantize.pieces import in_pieces, matrix_product
from toolchain.quantize.plan import QuantizePlan, is_expert
from toolchain.quantize.progress import time_span
from toolchain.quantize.rotation import rotate_feed_forward, rotate_stream, rotate_values, rotation_matrix
from toolchain.quantize.seen import WalkedLayer, nothing_seen
from toolchain.recipe import Recipe
from toolchain.tensor_file import TensorEntry

IDENTITY = 1e-4
"""Relative difference that float32 leaves between a layer before and after rotation and smoothing."""
SAMPLE_TOKENS = 128
"""Of the first text: what a layer is compared with itself on, and alpha searched; massive activations come first."""


@dataclass(slots=True)
class WalkedText:
    """What enters layer `at` of the float model, by batch; made when it is asked for, from the ids if it must."""

    job: Job
    exact_EE: torch.Tensor | None  # noqa: N815 - the shape suffix
    at: int = 0
    streams: list[torch.Tensor] | None = None
    tables: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tables = position_tables(self.job.config)

    def rope(self, index: int) -> LayerCache:
        """The rotary tables of layer `index`."""
        cos, sin = rope_table_names(self.job.config.layer(index).rope)
        return self.tables[cos], self.tables[sin]

    def entering(self, index: int) -> list[torch.Tensor]:
        """What enters layer `index`, float32 [B, T, E] by batch."""
        entries, config, recipe = self.job.entries, self.job.config, self.job.recipe
        if self.streams is None:
            embedded = embedded_text(entries, config, self.job.blocks, recipe.calibration.batch)
            turned_EE = None if self.exact_EE is None else self.exact_EE.float()
            self.streams = embedded if turned_EE is None else [matrix_product(x_BTE, turned_EE) for x_BTE in embedded]
            self.at = 0
        for i in range(self.at, index):  # layers whose statistics were there
            block = load_layer(entries, config, i)
            with torch.no_grad():
                _rotate(block, WalkedLayer(i, {}), config, recipe, self.exact_EE, self.job.excess.get(i))
            self.leave(i, _outputs(block, self.rope(i), self.streams))
        return self.streams

    def leave(self, index: int, outputs: list[torch.Tensor]) -> None:
        """Take what layer `index` made of it."""
        self.streams, self.at = outputs, index + 1


def walk(job: Job) -> Iterator[WalkedLayer]:
    """Every layer in turn, then the head's input under the index `num_hidden_layers`.

    Of the plan's matrices those inputs are watched that decide something; what the job's progress holds is not
    walked again, and what its statistics hold is not run. Raises DtoolError when a value is not finite, or a layer
    is no longer itself.
    """
    config, recipe, progress = job.config, job.recipe, job.progress
    products = watched_products(job.entries, recipe, job.plan)
    exact_EE = rotation_matrix(config.hidden_size) if recipe.rotation.stream else None
    first, streams = (0, None) if progress is None else (progress.first, progress.streams)
    text = WalkedText(job, exact_EE, first, streams)
    begin = time.monotonic()
    for i in range(first, config.num_hidden_layers):
        block, layer = load_layer(job.entries, config, i), WalkedLayer(i, {})
        with torch.no_grad():
            entered = _see(job, block, layer, text, products)
        layer.tensors = {f"model.layers.{i}.{name}": p.detach() for name, p in block.named_parameters()}
        yield layer
        if recipe.calibration.inputs == "quantized":  # the block's matrices have been rounded in place
            _round_inputs(block, layer, job.plan)
            text.leave(i, _outputs(block, text.rope(i), entered))
        del entered
        if progress is not None:
            progress.keep_streams(i + 1, text.streams if text.at == i + 1 else None)
        left = (time.monotonic() - begin) / (i + 1 - first) * (config.num_hidden_layers - i - 1)
        job.report(f"layer {i + 1} of {config.num_hidden_layers}, {time_span(left)} left")
    if "lm_head" in products:
        yield _head_input(job, text)


def _see(job: Job, block: Block, layer: WalkedLayer, text: WalkedText, products: tuple[str, ...]) -> list[torch.Tensor]:
    """Steps 1 to 4 of a layer, and its means; what entered it, nothing where statistics were kept and no text ran."""
    config, recipe, rope = job.config, job.recipe, text.rope(layer.index)
    excess, entered = job.excess.get(layer.index), []
    _expect(block, layer, job, products)
    sample_BTE = _recall(job, layer)
    if sample_BTE is None:
        entered = text.entering(layer.index)
        sample_BTE = entered[0][:1, :SAMPLE_TOKENS]
    changes = recipe.rotation.is_on or recipe.smoothing.is_on or excess is not None
    before_BTE = _plain_output(block, rope, sample_BTE, text.exact_EE) if changes else sample_BTE
    _rotate(block, layer, config, recipe, text.exact_EE, excess)
    if entered:
        text.leave(layer.index, _run(block, rope, entered, layer))
        if job.statistics is not None:
            job.statistics.keep(*_kept(layer, sample_BTE))
    if recipe.smoothing.algorithm != "none":
        smooth_layer(block, layer, job, rope, sample_BTE)
    if recipe.smoothing.keys:
        smooth_keys(block, layer.index, layer.cache[KV_SCALES[0]], config)
    if changes:
        layer.identity_error = _identity_error(run_layer(block, rope, sample_BTE)[0], before_BTE)
    _center(block, layer, job)
    return entered


def _kept(layer: WalkedLayer, sample_BTE: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """The name of a layer's statistics, and all of them by name: the first text that enters it, what was seen."""
    records: dict[str, Any] = {"sample": sample_BTE}
    for kind, seen in (("seen", layer.seen), ("cache", layer.cache)):
        records |= {f"{kind}/{name}": record for name, record in seen.items()}
    return f"layer-{layer.index}", records


def _recall(job: Job, layer: WalkedLayer) -> torch.Tensor | None:
    """Fill what the layer expects from kept statistics; the first text that enters it, or None where some lack."""
    found = None if job.statistics is None else job.statistics.recall(*_kept(layer, torch.empty(0)))
    if found is None:
        return None
    layer.seen = {name: found[f"seen/{name}"] for name in layer.seen}
    layer.cache = {name: found[f"cache/{name}"] for name in layer.cache}
    return found["sample"]


def watched_products(entries: Mapping[str, TensorEntry], recipe: Recipe, plan: QuantizePlan) -> tuple[str, ...]:
    """The products whose inputs decide a scale or a rounding; an expert's are never watched."""
    watched = {*plan.static, *plan.centered}
    if plan.uses_hessian or recipe.smoothing.algorithm != "none":
        watched |= {name.removesuffix(".weight") for name in entries if name.endswith("_proj.weight")}
    return tuple(sorted(name for name in watched if not is_expert(name)))


def _plain_output(block: Block, rope: Any, x_BTE: torch.Tensor, exact_EE: torch.Tensor | None) -> torch.Tensor:
    """What the layer as it came makes of a text, in the basis of the stream."""
    if exact_EE is None:
        return run_layer(block, rope, x_BTE)[0]
    stream_EE = exact_EE.float()
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


def _expect(block: Block, layer: WalkedLayer, job: Job, products: tuple[str, ...]) -> None:
    """What the layer's products and its cache will be asked for, before any text."""
    prefix = f"model.layers.{layer.index}."
    kept = job.statistics is not None  # for recipes to come too: sums cost little beside H
    for name in (name.removeprefix(prefix) for name in products if name.startswith(prefix)):
        weight_OI = block.get_submodule(name).weight
        assert isinstance(weight_OI, torch.Tensor)
        layer.seen[name] = nothing_seen(
            weight_OI.shape[1],
            hessian=job.plan.uses_hessian,
            sizes=kept or job.recipe.smoothing.algorithm == "awq",
            center=kept or prefix + name in job.plan.centered,
        )
    if job.recipe.kv_cache.is_static or job.recipe.smoothing.keys:
        spec, counted = block.self_attn.spec, needs_histogram(job.recipe.kv_cache)
        nothing = (CacheSeen.nothing(spec.num_kv_heads, spec.head_dim, histogram=counted) for _ in KV_SCALES)
        layer.cache = dict(zip(KV_SCALES, nothing, strict=True))


def _run(block: Block, rope: LayerCache, streams: list[torch.Tensor], layer: WalkedLayer) -> list[torch.Tensor]:
    """The layer's output for every batch; `layer` learns what it expects of its products and its cache on the way."""
    here = threading.local()  # batches run at once: each thread has the inputs of its own

    def keep(name: str) -> Callable[..., None]:
        return lambda _, inputs: here.inputs.update({name: inputs[0]})

    def see(x_BTE: torch.Tensor) -> tuple[torch.Tensor, LayerCache, dict[str, torch.Tensor], int]:
        here.inputs = {}
        out_BTE, cache = run_layer(block, rope, x_BTE)
        # a sum is finite in a fifth of the time, and never where a value is not
        wrong = 0 if math.isfinite(float(out_BTE.sum())) else int((~torch.isfinite(out_BTE)).sum())
        return out_BTE, cache, here.inputs, wrong

    handles = [block.get_submodule(name).register_forward_pre_hook(keep(name)) for name in layer.seen]
    outputs, wrong = [], 0
    for out_BTE, cache, inputs, wrong_here in in_pieces(see, streams):
        outputs.append(out_BTE)
        wrong += wrong_here
        for name, seen in layer.seen.items():
            seen.add(inputs[name])
        for seen, cache_BKCD in zip(layer.cache.values(), cache, strict=False):  # where it is not watched, none
            seen.add(cache_BKCD)
    for handle in handles:
        handle.remove()
    if wrong:
        raise DtoolError(
            f"layer {layer.index} gives inf or NaN on the calibration text",
            expected="finite activations",
            found=f"{wrong} of {sum(out.numel() for out in outputs)} values of its output",
            fix="check the weights, or the compute type: values may not fit it",
        )
    return outputs


def _outputs(block: Block, rope: LayerCache, streams: list[torch.Tensor]) -> list[torch.Tensor]:
    """The layer's output for every batch."""
    return [out_BTE for out_BTE, _ in in_pieces(lambda x_BTE: run_layer(block, rope, x_BTE), streams)]


def _center(block: Block, layer: WalkedLayer, job: Job) -> None:
    """Take the means of centered products off what they saw, as their stored type holds them."""
    for product, seen in layer.seen.items():
        if f"model.layers.{layer.index}.{product}" in job.plan.centered:
            center_I = seen.center.to(format_named(job.held_in).torch_dtype).float()
            seen.shift(center_I)
            weight_OI = block.get_submodule(product).weight
            assert isinstance(weight_OI, torch.Tensor)
            layer.means[product] = (center_I, matrix_product(weight_OI, center_I))


def _round_inputs(block: Block, layer: WalkedLayer, plan: QuantizePlan) -> None:
    """Round the inputs of the layer's products from now on, and add its offsets, as the finished model will."""
    prefix = f"model.layers.{layer.index}."
    for product, (center_I, mean_O) in layer.means.items():
        module = block.get_submodule(product)
        assert isinstance(module.weight, torch.Tensor)
        offset_O = mean_O - matrix_product(module.weight, center_I)
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


@torch.no_grad()
def _head_input(job: Job, text: WalkedText) -> WalkedLayer:
    """What the head reads: the last norm's output."""
    config, expected = job.config, {"lm_head": nothing_seen(job.config.hidden_size)}
    found = None if job.statistics is None else job.statistics.recall("head", expected)
    if found is not None:
        return WalkedLayer(config.num_hidden_layers, {}, seen=found)
    norm = fill(Norm(config), job.entries, "model.norm.") if config.final_norm else torch.nn.Identity()
    back_EE = None if text.exact_EE is None else text.exact_EE.float().mT

    def read(x_BTE: torch.Tensor) -> torch.Tensor:
        return norm(x_BTE if back_EE is None else x_BTE @ back_EE)

    for normed_BTE in in_pieces(read, text.entering(config.num_hidden_layers)):
        expected["lm_head"].add(normed_BTE)
    if job.statistics is not None:
        job.statistics.keep("head", expected)
    return WalkedLayer(config.num_hidden_layers, {}, seen=expected)


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
