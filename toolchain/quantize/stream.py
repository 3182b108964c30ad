"""The quantized weights file as a stream: its layout in advance, its tensors one after the other.

Where the recipe needs to see activations, layers come from the walk, smoothed and with what their
products saw; else each tensor comes from the file as it is. Nothing is held but the layer at hand, the
static scales, and the rows of the report.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from toolchain.errors import DtoolError
from toolchain.formats import format_named
from toolchain.model.config import DecoderConfig
from toolchain.model.quantized import INPUT_SCALE, KV_SCALES, SCALE_SUFFIX
from toolchain.quantize.plan import QuantizePlan
from toolchain.quantize.rounding import round_matrix
from toolchain.quantize.stored import StoredScales
from toolchain.quantize.walk import Seen, WalkedLayer, static_scales, walk
from toolchain.recipe import Recipe
from toolchain.tensor_file import TensorEntry, read_tensor

LAYERS = "model.layers."
Shape = tuple[int, ...]


@dataclass(slots=True)
class QuantizedStream:
    """The tensors of one quantized artifact, in the order of `layout`; `rows` fill as they are made.

    `blocks`: calibration text as ids [samples, seq_len], None where the recipe needs none.
    """

    source: Mapping[str, TensorEntry]
    config: DecoderConfig
    recipe: Recipe
    plan: QuantizePlan
    blocks: Any
    report: Callable[[str], None]
    stored: StoredScales | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    identity_error: float = 0.0

    def layout(self) -> dict[str, tuple[str, Shape]]:
        """Format and shape of every tensor, by name."""
        layout: dict[str, tuple[str, Shape]] = {}
        for name, entry in self.source.items():
            module = name.removesuffix(".weight")
            if module not in self.plan.weights or name == module:
                layout[name] = (entry.dtype, entry.shape)
                continue
            rows, width = entry.shape
            group = self.plan.groups.get(module)
            stored = (self.recipe.weights.format, entry.shape) if group is None else ("uint8", (rows, width // 2))
            layout[name] = stored
            layout[name + SCALE_SUFFIX] = ("float32", (rows,) if group is None else (rows, width // group))
        return layout | {name: ("float32", shape) for name, shape in self._static_shapes().items()}

    def _static_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        if self.recipe.kv_cache.format != "none":
            for i in range(self.config.num_hidden_layers):
                shapes |= {f"{LAYERS}{i}.self_attn.{n}": (self.config.num_key_value_heads,) for n in KV_SCALES}
        if self.recipe.has_static_activations:
            shapes |= {f"{name}.{INPUT_SCALE}": () for name in self.plan.rounded}
        return shapes

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of `layout`, in its order."""
        layers = iter(()) if self.blocks is None else self._walk()
        layer, scales = WalkedLayer(-1, {}), {}
        for name, entry in self.source.items():
            if self.blocks is not None and name.startswith(LAYERS) and int(name.split(".")[2]) != layer.index:
                layer = next(layers)
                self.identity_error = max(self.identity_error, layer.identity_error)
                scales |= self._scales(layer)
            value = layer.tensors.get(name)
            yield from self._stored(name, entry, read_tensor(entry) if value is None else value, layer.seen)
        for rest in layers:
            scales |= self._scales(rest)
        if self.stored is not None:
            scales |= self.stored.static_scales(format_named(next(iter(self.source.values())).dtype).torch_dtype)
        yield from (scales[name] for name in self._static_shapes())

    def _walk(self) -> Iterator[WalkedLayer]:
        recipe, plan = self.recipe, self.plan
        watched = set(plan.rounded) if recipe.has_static_activations else set()
        if recipe.weights.uses_hessian or recipe.smoothing.algorithm != "none":
            watched |= {n.removesuffix(".weight") for n in self.source if n.endswith("_proj.weight")}
        products = tuple(sorted(name for name in watched if ".experts." not in name))
        return walk(self.source, self.config, recipe, self.blocks, products, self.report)

    def _scales(self, layer: WalkedLayer) -> dict[str, Any]:
        held_in = format_named(next(iter(self.source.values())).dtype).torch_dtype
        try:
            return static_scales(layer, self.recipe, set(self.plan.rounded), held_in)
        except ValueError as error:
            raise DtoolError(
                f"layer {layer.index} cannot be calibrated", found=str(error), fix="check the weights for inf or NaN"
            ) from error

    def _stored(
        self, name: str, entry: TensorEntry, value: torch.Tensor, seen: Mapping[str, Seen]
    ) -> Iterator[torch.Tensor]:
        """A tensor as it is in the file: as it was, or its codes and its scales."""
        held_in, module = format_named(entry.dtype).torch_dtype, name.removesuffix(".weight")
        if module not in self.plan.weights or name == module:
            yield value.to(held_in)
            return
        watched = seen.get(module.split(".", 3)[3]) if module.startswith(LAYERS) else None
        try:
            rounded = (
                self.stored.round(module, value.to(held_in))
                if self.stored is not None
                else round_matrix(
                    value,
                    self.recipe.weights,
                    parts=self.config.part_sizes(name),
                    group_size=self.plan.groups.get(module, 0),
                    held_in=held_in,
                    hessian_II=None if watched is None else watched.hessian,
                )
            )
        except ValueError as error:
            raise DtoolError(f"{name} cannot be quantized", found=str(error), fix="check the checkpoint") from error
        row = {name: getattr(rounded, name) for name in ("weight_sqnr_db", "output_sqnr_db", "clipped_share")}
        self.rows.append({"matrix": module, "group_size": self.plan.groups.get(module), **row})
        yield rounded.codes
        yield rounded.scale
