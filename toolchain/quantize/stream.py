"""The quantized weights file as a stream: its layout in advance, its tensors one after the other.

Where the recipe needs to see activations, layers come from the walk, smoothed and with what their
products saw; else each tensor comes from the file as it is. Nothing is held but the layer at hand, the
static scales, and the rows of the report.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from toolchain.errors import DtoolError
from toolchain.formats import format_named
from toolchain.model.quantized import (
    CENTER,
    CHANNEL_WEIGHT,
    CHANNELS,
    FEED_FORWARD_ROTATION,
    INPUT_SCALE,
    KV_SCALES,
    LIMIT,
    OFFSET,
    ROTATION,
    SCALE_SUFFIX,
    checked_scale,
    dequantize_weight,
)
from toolchain.quantize.excess import PRODUCT
from toolchain.quantize.findings import describe_matrix
from toolchain.quantize.job import Job
from toolchain.quantize.pieces import matrix_product
from toolchain.quantize.rotation import block_width, rotation_matrix
from toolchain.quantize.rounding import round_matrix
from toolchain.quantize.seen import Seen
from toolchain.quantize.walk import WalkedLayer, static_scales, walk
from toolchain.tensor_file import TensorEntry, read_tensor

LAYERS = "model.layers."
Shape = tuple[int, ...]


@dataclass(slots=True)
class QuantizedStream:
    """The tensors of one quantized artifact, in the order of `layout`; `rows` fill as they are made."""

    job: Job
    rows: list[dict[str, Any]] = field(default_factory=list)
    identity_error: float = 0.0

    def layout(self) -> dict[str, tuple[str, Shape]]:
        """Format and shape of every tensor, by name."""
        layout: dict[str, tuple[str, Shape]] = {}
        plan = self.job.plan
        for name, entry in self.job.entries.items():
            module = name.removesuffix(".weight")
            if module not in plan.weights or name == module:
                layout[name] = (entry.dtype, entry.shape)
                continue
            rows, width = entry.shape
            group, fmt = plan.groups.get(module), plan.weights[module].format
            stored = (fmt, entry.shape) if group is None else ("uint8", (rows, width // 2))
            layout[name] = stored
            layout[name + SCALE_SUFFIX] = ("float32", (rows,) if group is None else (rows, width // group))
        layout |= {name: ("float32", shape) for name, shape in self._static_shapes().items()}
        return layout | self._shape_layout()

    def _static_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for i, cache in enumerate(self.job.caches):
            if cache.quantized and not cache.token_scales:
                shapes |= {f"{LAYERS}{i}.self_attn.{n}": (self.job.config.num_key_value_heads,) for n in KV_SCALES}
        return shapes | {f"{name}.{INPUT_SCALE}": () for name in self.job.plan.static}

    def _shape_layout(self) -> dict[str, tuple[str, Shape]]:
        """Of the bases, and of the parts of an input's shape: see `model.quantized.InputShape`."""
        config, rotation, held = self.job.config, self.job.recipe.rotation, self.job.held_in
        layout: dict[str, tuple[str, Shape]] = {}
        if rotation.stream:
            layout[ROTATION] = (held, (config.hidden_size, config.hidden_size))
        if rotation.feed_forward:
            layout[FEED_FORWARD_ROTATION] = (held, (block_width(config.intermediate_size),) * 2)
        for name in self.job.plan.centered:
            rows, width = self.job.entries[f"{name}.weight"].shape
            if name in self.job.plan.rounded:
                layout[f"{name}.{CENTER}"] = (held, (width,))
            layout[f"{name}.{OFFSET}"] = (held, (rows,))
        for i, excess in self.job.excess.items():
            name, count = f"{LAYERS}{i}.{PRODUCT}", len(excess.channels)
            layout[f"{name}.{LIMIT}"] = (held, (config.intermediate_size,))
            layout[f"{name}.{CHANNELS}"] = ("int64", (count,))
            layout[f"{name}.{CHANNEL_WEIGHT}"] = (held, (count, config.hidden_size))
        return layout

    def _shape_tensors(self, shapes: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        for name, (held, shape) in self._shape_layout().items():
            value = shapes[name] if name in shapes else rotation_matrix(shape[0])
            yield value.to(format_named(held).torch_dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of `layout`, in its order."""
        job = self.job
        layers = iter(()) if job.blocks is None else walk(job)
        found: dict[str, torch.Tensor] = {}
        for layer, names in itertools.groupby(job.entries, self._walked_layer):
            if layer is None:
                for name in names:
                    yield from self._stored(name, job.entries[name], read_tensor(job.entries[name]), {})
                continue
            kept = None if job.progress is None else job.progress.layer(layer)
            if kept is None:
                kept = self._finish(next(layers), list(names))
            self.rows += kept["rows"]
            self.identity_error = max(self.identity_error, kept["identity_error"])
            found |= kept["found"]
            yield from kept["tensors"]
        for rest in layers:
            found |= self._scales(rest)
        if job.stored is not None:
            found |= job.stored.static_scales(format_named(job.held_in).torch_dtype)
        yield from (checked_scale(name, found[name], shape) for name, shape in self._static_shapes().items())
        yield from self._shape_tensors(found)

    def _walked_layer(self, name: str) -> int | None:
        """The layer whose tensors come from the walk; None where a tensor is taken from the file."""
        return int(name.split(".")[2]) if self.job.blocks is not None and name.startswith(LAYERS) else None

    def _finish(self, layer: WalkedLayer, names: list[str]) -> dict[str, Any]:
        """A layer as it will be stored, its rows of the report, and its scales and limits by name."""
        before, tensors, found = len(self.rows), [], _parts_of_shape(layer)
        for name in names:
            stored = list(self._stored(name, self.job.entries[name], layer.tensors[name], layer.seen))
            found |= self._means(layer, name, stored)
            tensors += stored
        rows = [row | self._alpha(layer, row["matrix"]) for row in self.rows[before:]]
        del self.rows[before:]
        found |= self._scales(layer)
        kept = {"tensors": tensors, "rows": rows, "identity_error": layer.identity_error, "found": found}
        if self.job.progress is not None:
            self.job.progress.keep_layer(layer.index, kept)
        return kept

    @staticmethod
    def _alpha(layer: WalkedLayer, module: str) -> dict[str, Any]:
        product = module.removeprefix(f"{LAYERS}{layer.index}.")
        return {"smoothing_alpha": layer.alphas[product]} if product in layer.alphas else {}

    def _means(self, layer: WalkedLayer, name: str, stored: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a centered product takes off its input, and adds to its output: see `model.quantized`."""
        module = name.removesuffix(".weight")
        mean = layer.means.get(module.removeprefix(f"{LAYERS}{layer.index}."))
        if mean is None or name == module:
            return {}
        center_I, offset_O = mean
        if module in self.job.plan.rounded:
            return {f"{module}.{CENTER}": center_I, f"{module}.{OFFSET}": offset_O}
        return {f"{module}.{OFFSET}": offset_O - matrix_product(dequantize_weight(*stored), center_I)}

    def _scales(self, layer: WalkedLayer) -> dict[str, Any]:
        held_in = format_named(self.job.held_in).torch_dtype
        try:
            return static_scales(layer, self.job.recipe, self.job.plan, held_in)
        except ValueError as error:
            raise DtoolError(
                f"layer {layer.index} cannot be calibrated",
                expected="finite values on the calibration text",
                found=str(error),
                fix="check the weights for inf or NaN",
            ) from error

    def _stored(
        self, name: str, entry: TensorEntry, value: torch.Tensor, seen: Mapping[str, Seen]
    ) -> Iterator[torch.Tensor]:
        """A tensor as it is in the file: as it was, or its codes and its scales."""
        job, held_in, module = self.job, format_named(entry.dtype).torch_dtype, name.removesuffix(".weight")
        if module not in job.plan.weights or name == module:
            yield value.to(held_in)
            return
        weights, group = job.plan.weights[module], job.plan.groups.get(module)
        watched = seen.get(module.split(".", 3)[3]) if module.startswith(LAYERS) else None
        try:
            rounded = (
                job.stored.round(module, value.to(held_in))
                if job.stored is not None
                else round_matrix(
                    value,
                    weights,
                    parts=job.config.part_sizes(name),
                    group_size=group or 0,
                    held_in=held_in,
                    hessian_II=None if watched is None else watched.hessian,
                )
            )
        except ValueError as error:
            found, fix = str(error), "check the checkpoint"
            raise DtoolError(f"{name} cannot be quantized", expected="finite weights", found=found, fix=fix) from error
        self.rows.append(describe_matrix(module, weights, group, value, rounded, watched, held_in))
        if job.recipe.calibration.inputs == "quantized":
            value.copy_(rounded.shown)  # the walk goes on with it
        yield rounded.codes
        yield rounded.scale


def _parts_of_shape(layer: WalkedLayer) -> dict[str, torch.Tensor]:
    """What the shape of a layer's last input has for itself, by name."""
    shape = layer.shape
    if shape is None or shape.limit is None:
        return {}
    parts = {LIMIT: shape.limit, CHANNELS: shape.channels, CHANNEL_WEIGHT: shape.weight}
    return {f"{LAYERS}{layer.index}.{PRODUCT}.{part}": value for part, value in parts.items() if value is not None}
