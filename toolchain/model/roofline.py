"""The least time a GPU needs for a step, what bounds it, and the largest batch that fits.

    time = max(FLOPs / peak, bytes / bandwidth)      Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009

A step whose FLOPs per byte exceed the ridge, peak / bandwidth, is bound by compute, any other by memory.
FLOPs of two formats are timed at their own rates and added. Peaks are the vendor's dense ones in
`gpus.toml`, which no kernel reaches, so every time is a lower bound and every rate an upper one.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic

from toolchain.errors import DtoolError, did_you_mean
from toolchain.model.accounting import (
    CACHE_FORMATS,
    WEIGHT_FORMATS,
    Setting,
    Work,
    count_active,
    count_parameters,
    decode_work,
    expected_experts,
    kv_bytes_per_token,
    prefill_work,
    training_bytes,
    weight_bytes,
)
from toolchain.model.config import DecoderConfig

GPUS_FILE = Path(__file__).with_name("gpus.toml")
USABLE_MEMORY = 0.9
"""Part of a GPU's memory for weights and cache; the rest is the driver's, the activations' and the workspace's."""
DECODE_BATCHES = (1, 4, 16, 64, 256)
NOTES = (
    "times are lower bounds: dense datasheet peaks, one GPU, activations' bytes and all but matrix products left out",
    "8-bit formats count 8-bit products (activations too) where the GPU has a rate for them, int4 float16 products",
    "a batch fits in 0.9 of the memory beside the weights",
)


class Figure(pydantic.BaseModel, frozen=True, extra="forbid"):
    """A number and the document it is from."""

    value: int | float = pydantic.Field(gt=0)
    source: str = pydantic.Field(min_length=1)


class Gpu(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Dense peaks of one GPU, as `gpus.toml` has them."""

    name: str
    product: str
    sm: Figure
    float16_flops_per_s: Figure
    int8_flops_per_s: Figure | None = None
    fp8_e4m3_flops_per_s: Figure | None = None
    memory_bytes: Figure
    bandwidth_bytes_per_s: Figure

    @property
    def figures(self) -> dict[str, Figure]:
        """Every figure there is, by name."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, Figure)}

    def rate(self, products: str) -> float:
        """FLOP/s of products in a format; float16's where there is no figure, the codes being widened first."""
        figure = self.figures.get(f"{products}_flops_per_s", self.float16_flops_per_s)
        return figure.value

    def time(self, work: Work, products: str) -> tuple[float, str]:
        """The least milliseconds a step can take, and what bounds it: "compute" or "memory"."""
        compute_s = work.product_flops / self.rate(products) + work.float_flops / self.rate("float16")
        memory_s = work.bytes / self.bandwidth_bytes_per_s.value
        return 1e3 * max(compute_s, memory_s), "compute" if compute_s > memory_s else "memory"


def gpus_named(names: Iterable[str] = ()) -> tuple[Gpu, ...]:
    """GPUs of `gpus.toml` by name, each once; all of them where none is named.

    Case, spaces, hyphens and the order of the words do not matter. Raises DtoolError for an unknown name.
    """
    tables = tomllib.loads(GPUS_FILE.read_text("utf-8"))
    known = {_key(name): name for name in tables}
    chosen: dict[str, None] = {}
    for name in names:
        if _key(name) not in known:
            known, fix = f"one of: {', '.join(tables)}", did_you_mean(name, tables)
            raise DtoolError(f"no figures for a GPU called {name!r}", expected=known, found=name, fix=fix)
        chosen[known[_key(name)]] = None
    return tuple(Gpu(name=name, **tables[name]) for name in chosen or tables)


def _key(name: str) -> tuple[str, ...]:
    """The same for "RTX 6000 Pro", "rtx-pro-6000" and "RTX PRO 6000"."""
    return tuple(sorted(re.findall(r"[a-z]+|\d+", name.lower())))


def largest_batch(config: DecoderConfig, setting: Setting, gpu: Gpu) -> int | None:
    """Sequences of `context_tokens` tokens that fit beside the weights; None where the weights alone do not fit."""
    room = USABLE_MEMORY * gpu.memory_bytes.value - sum(setting.weight_bytes(config).values())
    if room < 0:
        return None
    return int(room // (setting.kv_bytes_per_token(config) * setting.context_tokens))


def account(config: DecoderConfig, setting: Setting, gpus: Iterable[Gpu]) -> dict[str, Any]:
    """The whole account of a model in one setting, as JSON types; units are the suffixes of the keys."""
    parameters, active = count_parameters(config), count_active(config)
    prefill, sweep = prefill_work(config, setting), _decode_sweep(config, setting)
    return {
        "setting": setting.document(),
        "parameters": {"total": sum(parameters.values()), "components": parameters},
        "active_parameters_per_token": {"total": sum(active.values()), "components": active},
        "weights_bytes": {name: sum(weight_bytes(config, name).values()) for name in WEIGHT_FORMATS},
        "served_weights_bytes": sum(setting.weight_bytes(config).values()),
        "kv_cache_bytes_per_token": {name: kv_bytes_per_token(config, name) for name in CACHE_FORMATS}
        | {setting.cache: setting.kv_bytes_per_token(config)},
        "kv_cache_bytes": setting.kv_bytes_per_token(config) * setting.context_tokens * setting.batch,
        "training_memory_bytes": training_bytes(config),
        "expected_experts_per_decode_step": expected_experts(config, setting.batch) if config.num_experts else None,
        "prefill": prefill.document(),
        "decode": sweep[setting.batch].document(),
        "decode_by_batch": [{"batch": batch} | work.document() for batch, work in sweep.items()],
        "gpus": [_gpu_document(config, setting, gpu, prefill, sweep) for gpu in gpus],
        "notes": [*NOTES, _in_float(setting)],
    }


def _in_float(setting: Setting) -> str:
    if setting.stored is not None:
        return f"weights as they are stored, most of them {setting.weights}; a head's product counts as float16's"
    return "embedding, head, router, norms and biases stay in float"


def _decode_sweep(config: DecoderConfig, setting: Setting) -> dict[int, Work]:
    batches = sorted({*DECODE_BATCHES, setting.batch})
    return {batch: decode_work(config, replace(setting, batch=batch)) for batch in batches}


def _gpu_document(
    config: DecoderConfig, setting: Setting, gpu: Gpu, prefill: Work, sweep: dict[int, Work]
) -> dict[str, Any]:
    """One GPU's limits, what fits, and the bound and the least time of prefill and of every decode batch."""
    products = setting.weight_format.products
    fit = largest_batch(config, setting, gpu)
    ttft_ms, prefill_bound = gpu.time(prefill, products)
    decodes: list[dict[str, Any]] = []
    for batch, work in sweep.items():
        tpot_ms, bound = gpu.time(work, products)
        rates = {"tokens_per_s": 1e3 * batch / tpot_ms, "attained_flops_per_s": 1e3 * work.flops / tpot_ms}
        decodes.append({"batch": batch, "fits": batch <= (fit or 0), "tpot_ms": tpot_ms, "bound": bound} | rates)
    return {
        "name": gpu.name,
        "product": gpu.product,
        **{name: figure.value for name, figure in gpu.figures.items()},
        "peak_flops_per_s": gpu.rate(products),
        "ridge_flops_per_byte": gpu.rate(products) / gpu.bandwidth_bytes_per_s.value,
        "weights_fit": fit is not None,
        "largest_batch": fit or 0,
        "fits": setting.batch <= (fit or 0),
        "prefill": {
            "ttft_ms": ttft_ms,
            "bound": prefill_bound,
            "attained_flops_per_s": 1e3 * prefill.flops / ttft_ms,
        },
        "decode": next(entry for entry in decodes if entry["batch"] == setting.batch),
        "decode_by_batch": decodes,
        "sources": {name: figure.source for name, figure in gpu.figures.items()},
    }
