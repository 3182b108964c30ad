"""How much each format of each unit costs, measured: KL of the logits with that unit alone quantized.

    loss[u, f] = mean over positions of sum_v p_v (ln p_v - ln q_v),   p: the float model, q: with unit u in format f

The float model is the one that is rounded: rotated and smoothed as the recipe asks. Weights are rounded to the
nearest (with the recipe's clip by the weights alone), inputs and caches as in the artifact. The stream before every
layer is kept, so a trial runs only what comes after its unit. Small losses of different units add up nearly: they
are of second order in independent errors (Nagel et al., arXiv 2106.08295, 4.3, use the same sum for bit widths).

Memory: the model in float32, the streams, and the float log-probabilities, 4 bytes x positions x vocabulary.

Legend: B batch, T tokens, E hidden, V vocab.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from toolchain.model.decoder import Decoder
from toolchain.model.quantized import KV_SCALES, QuantizedEmbedding, QuantizedLinear
from toolchain.numerics import scale_from_amax
from toolchain.quantize.cache_scales import cache_scale
from toolchain.quantize.excess import survey_excess
from toolchain.quantize.job import Job
from toolchain.quantize.plan import HEAD, QuantizePlan, plan_quantization
from toolchain.quantize.rotation import rotation_matrix
from toolchain.quantize.rounding import round_matrix
from toolchain.quantize.seen import Seen
from toolchain.quantize.walk import walk
from toolchain.recipe import Recipe
from toolchain.tensor_file import TensorEntry

POSITIONS = 64
"""Rows of logits that are compared at once."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Against the float model: mean KL, and the rise of the mean NLL of the next token; both in nats."""

    kl: float
    rise: float


@dataclass(slots=True)
class FloatModel:
    """The float model over some text: its streams before each layer and its predictions.

    `decoder` is in float32, `ids_BT` the text, `held_in` the type that scales must fit.
    """

    decoder: Decoder
    ids_BT: torch.Tensor  # noqa: N815 - the shape suffix
    held_in: torch.dtype
    cache_format: str = "none"
    seen: dict[str, Seen] = field(default_factory=dict)
    cache_scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    streams: list[torch.Tensor] = field(default_factory=list)
    reference: list[torch.Tensor] = field(default_factory=list)

    @torch.inference_mode()
    def run(self) -> None:
        """Keep what the float model computes: before every layer, and at the end."""
        x_BTE = self.decoder.embedded(self.ids_BT, torch.zeros(len(self.ids_BT), dtype=torch.int64))
        self.streams = [x_BTE]
        for i in range(len(self.decoder.model.layers)):
            self.streams.append(self.layer(i, self.streams[-1]))
        self.reference = [rows.log_softmax(-1) for rows in self._logits(self.streams[-1])]

    def layer(self, index: int, x_BTE: torch.Tensor) -> torch.Tensor:
        """The output of one layer as it is now, for whole texts."""
        block: Any = self.decoder.model.layers[index]
        cache = self.decoder.new_cache(self.decoder.cache_formats()[index], *x_BTE.shape[:2])
        past_B = torch.zeros(len(x_BTE), dtype=torch.int64)
        return block(x_BTE, self.decoder.layer_rope(index), past_B, cache)[0]

    def _logits(self, x_BTE: torch.Tensor) -> Iterator[torch.Tensor]:
        for rows in x_BTE.flatten(0, 1).split(POSITIONS):
            yield self.decoder.logits(rows[None])[0]

    @torch.inference_mode()
    def loss_from(self, layer: int) -> Loss:
        """The loss of the decoder as it is now, which is the float one before `layer`."""
        if layer == 0:
            x_BTE = self.decoder.embedded(self.ids_BT, torch.zeros(len(self.ids_BT), dtype=torch.int64))
        else:
            x_BTE = self.streams[layer]
        for i in range(layer, len(self.decoder.model.layers)):
            x_BTE = self.layer(i, x_BTE)
        return self.compare(self._logits(x_BTE))

    def compare(self, logits: Iterator[torch.Tensor]) -> Loss:
        """The loss of logits [<= POSITIONS, V], part by part of all positions in order; NaN or inf count as inf."""
        next_BT = torch.full_like(self.ids_BT, -1)
        next_BT[:, :-1] = self.ids_BT[:, 1:]
        kl = rise = 0.0
        targets = next_BT.flatten().split(POSITIONS)
        for log_p, rows, tokens in zip(self.reference, logits, targets, strict=True):
            log_q = rows.float().log_softmax(-1)
            kl += float((log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).double().sum())
            known = tokens >= 0
            picked = tokens[known, None]
            rise += float((log_p[known].gather(1, picked) - log_q[known].gather(1, picked)).double().sum())
        batch, new = self.ids_BT.shape
        mean = kl / (batch * new)
        return Loss(mean, rise / (batch * (new - 1))) if math.isfinite(mean) else Loss(float("inf"), float("inf"))

    @contextlib.contextmanager
    def quantized(self, matrices: Sequence[str], plan: QuantizePlan) -> Iterator[None]:
        """Within the block these matrices are rounded as the plan has them."""
        undo: list[Callable[[], None]] = []
        try:
            with torch.inference_mode():
                for name in matrices:
                    if name in plan.weights:
                        self._round(name, plan, undo)
            yield
        finally:
            for step in reversed(undo):
                step()

    @contextlib.contextmanager
    def quantized_cache(self, layer: int) -> Iterator[None]:
        """Within the block the cache of this layer holds codes."""
        attention: Any = self.decoder.model.layers[layer].self_attn
        before = attention.scales_K, attention.spec
        attention.quantize_cache(self.cache_format, self.cache_scales.get(layer))
        try:
            yield
        finally:
            attention.scales_K, attention.spec = before

    def _round(self, name: str, plan: QuantizePlan, undo: list[Callable[[], None]]) -> None:
        path, _, attribute = name.rpartition(".")
        parent = self.decoder.get_submodule(path)
        old: Any = getattr(parent, attribute)
        config = self.decoder.config
        rounded = round_matrix(
            old.weight,
            plan.weights[name],
            parts=config.part_sizes(f"{name}.weight"),
            group_size=plan.groups.get(name, 0),
            held_in=self.held_in,
        )
        undo.append(lambda p=parent, a=attribute, o=old: setattr(p, a, o))
        if isinstance(old, nn.Embedding):
            setattr(parent, attribute, QuantizedEmbedding(rounded.codes, rounded.scale, torch.float32))
            if config.tie_word_embeddings:
                head = self.decoder.lm_head
                undo.append(lambda o=head: setattr(self.decoder, HEAD, o))
                made = QuantizedLinear(rounded.codes, rounded.scale, None, *self._input(HEAD, plan))
                self.decoder.lm_head = made  # type: ignore[assignment]
            return
        setattr(parent, attribute, QuantizedLinear(rounded.codes, rounded.scale, old.bias, *self._input(name, plan)))

    def _input(self, name: str, plan: QuantizePlan) -> tuple[tuple[str, ...] | None, torch.Tensor | None]:
        """How the input of a product is rounded: (format, granularity), and its static scale."""
        how = plan.rounded.get(name)
        if how is None:
            return None, None
        if not how.is_static:
            return (how.format, how.granularity), None
        scale = scale_from_amax(self.seen[name].amax.max(), how.format, held_in=self.held_in)
        return (how.format, how.granularity), scale


def prepare_model(
    decoder: Decoder,
    entries: Mapping[str, TensorEntry],
    recipes: Sequence[Recipe],
    blocks: Any,
    ids_BT: torch.Tensor,
    report: Callable[[str], None],
) -> FloatModel:
    """The float model in the recipe's bases, with what calibration tells of inputs and caches, over the text.

    `recipes`: the mixes to be tried, the base first; `blocks`: calibration ids [samples, seq_len], or None where
    nothing is measured on text. `decoder` is the export's own and is changed in place.
    """
    held_in = decoder.compute_dtype
    model = FloatModel(decoder.float(), ids_BT, held_in)
    model.cache_format = recipes[0].kv_cache.format
    if blocks is not None:
        _walk(model, entries, recipes, blocks, report)
    model.run()
    return model


@torch.no_grad()
def _walk(
    model: FloatModel,
    entries: Mapping[str, TensorEntry],
    recipes: Sequence[Recipe],
    blocks: Any,
    report: Callable[[str], None],
) -> None:
    """Put the decoder into the recipe's bases layer by layer, and keep the ranges of inputs and caches."""
    config, base = model.decoder.config, _nearest(recipes[0])
    plans = [plan_quantization(config, _nearest(recipe)) for recipe in recipes]
    plan = max(plans, key=lambda plan: len(plan.static))
    job = Job(entries, config, base, plan, blocks=blocks, report=report)
    for layer in walk(replace(job, excess=survey_excess(job))):
        prefix = f"model.layers.{layer.index}."
        for name, value in layer.tensors.items():
            model.decoder.get_parameter(name).copy_(value)
        if layer.shape is not None:
            block: Any = model.decoder.model.layers[layer.index]
            block.mlp.shape = layer.shape
        model.seen |= {name if name == HEAD else prefix + name: seen for name, seen in layer.seen.items()}
        if layer.cache and base.kv_cache.is_static:
            first, second = (cache_scale(layer.cache[part], base.kv_cache) for part in KV_SCALES)
            model.cache_scales[layer.index] = (first, second)
    if base.rotation.stream:
        model.decoder.rotation_EE = rotation_matrix(config.hidden_size).float()


def _nearest(recipe: Recipe) -> Recipe:
    """The recipe without GPTQ and searched clips in its sections: no second moments are gathered for it."""
    plain = recipe.weights.model_copy(update={"algorithm": "rtn", "clip": "amax"})
    drop = {"algorithm", "clip", "refinements"}
    overrides = tuple(
        o.model_copy(update={"weights": {k: v for k, v in o.weights.items() if k not in drop}})
        for o in recipe.overrides
    )
    return recipe.model_copy(update={"weights": plain, "overrides": overrides})
