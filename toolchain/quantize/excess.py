"""Massive activations: a few channels that reach hundreds of times as far as all others, on a few tokens.

They sit at the input of the last product of some feed-forwards, on the first token of every text (Sun et al.,
Massive Activations in Large Language Models, arXiv 2402.17762). A static scale that spans them rounds everything
else to zero; a clipped one loses what holds attention's sink. Here their excess over a limit goes to the product
in float, k columns of it (`model.quantized.InputShape`), and the limit is what all other channels reach.

One batch tells which channels they are: they are the model's, not the text's. Later text only moves the scale.

Legend: I inputs of the product, O outputs, k channels.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from toolchain.model.positions import position_tables, rope_table_names
from toolchain.quantize.job import Job
from toolchain.quantize.layer import embedded_text, load_layer, run_layer
from toolchain.quantize.plan import PRODUCT

LEAST_RATIO = 3.0
"""How far beyond all others the largest channel must reach before its excess is worth a second product."""


@dataclass(frozen=True, slots=True)
class Excess:
    """The channels [k] of one product's input that have an excess, and the limit of what stays, float32 []."""

    channels: torch.Tensor
    limit: float

    def bounds(self, width: int) -> torch.Tensor:
        """float32 [I]: the limit for the channels, and for all others what any type holds."""
        bounds_I = torch.full((width,), float(torch.finfo(torch.float16).max))
        bounds_I[self.channels] = self.limit
        return bounds_I


def find_excess(amax_I: torch.Tensor, most: int) -> Excess | None:
    """The channels above all others, if the first is far above; `most` of them at most."""
    most = min(most, len(amax_I) - 1)
    if most <= 0:
        return None
    top = amax_I.topk(most + 1)
    limit = float(top.values[-1])
    if not float(top.values[0]) > LEAST_RATIO * limit or limit <= 0:
        return None
    return Excess(top.indices[:-1][top.values[:-1] > limit].sort().values, limit)


def asked_excess(job: Job) -> dict[int, int]:
    """By layer, how many channels at the input of its last product may have an excess."""
    inputs = {i: job.plan.rounded.get(f"model.layers.{i}.{PRODUCT}") for i in range(job.config.num_hidden_layers)}
    return {i: a.excess_channels for i, a in inputs.items() if a is not None and a.is_static and a.excess_channels}


def survey_excess(job: Job) -> dict[int, Excess]:
    """By layer, the excess at the input of its last product, from the first batch of the calibration text."""
    asked, found = asked_excess(job), {}
    if not asked:
        return found
    expected = {str(i): torch.empty(0) for i in asked}
    sizes = None if job.statistics is None else job.statistics.recall("survey", expected)
    if sizes is None:
        sizes = _survey(job, asked)
        if job.statistics is not None:
            job.statistics.keep("survey", sizes)
    for i, most in asked.items():
        excess, reach = find_excess(sizes[str(i)], most), float(sizes[str(i)].max())
        if excess is not None:
            found[i] = excess
            said = f"{len(excess.channels)} channels reach {reach:.4g}, all others at most {excess.limit:.4g}"
            job.report(f"layer {i}: {said}")
    return found


@torch.no_grad()
def _survey(job: Job, asked: Collection[int]) -> dict[str, torch.Tensor]:
    """How far every channel [I] of the inputs of the layers `asked` reaches in the first batch."""
    config, sizes = job.config, {}
    stream_BTE = embedded_text(job.entries, config, job.blocks, job.recipe.calibration.batch, batches=1)[0]
    tables = position_tables(config)
    for i in range(max(asked) + 1):
        block = load_layer(job.entries, config, i)
        if i in asked:
            watch = lambda _, x, i=i: sizes.update({str(i): x[0].abs().flatten(0, -2).amax(0)})  # noqa: E731
            block.get_submodule(PRODUCT).register_forward_pre_hook(watch)
        cos, sin = rope_table_names(config.layer(i).rope)
        stream_BTE, _ = run_layer(block, (tables[cos], tables[sin]), stream_BTE)
    return sizes
