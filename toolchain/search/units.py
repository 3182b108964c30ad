"""What can be chosen: units of matrices, the formats each may take, and what a mix is as a recipe.

A unit is what gets one format: the attention of a layer, its feed-forward, the embedding, the head (tied: both),
and where the base recipe quantizes the KV cache, the cache of a layer: the recipe's format or the compute type.
Matrices that `weights.skip` or an override of the base recipe names, and caches that `kv_cache.skip` names, are no
longer a choice and stay as they say.
A choice is the base recipe's own settings with other formats; what a recipe makes of a matrix (groups, inputs that
stay in float) is always asked of `quantize.plan`, so that what is searched is what `dtool quantize` does.
"""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolchain.engine.targets import targets_named
from toolchain.errors import DtoolError, did_you_mean, name_list
from toolchain.model.caches import CacheFormat
from toolchain.model.config import DecoderConfig
from toolchain.model.parameters import matrix_names, parameter_shapes
from toolchain.model.quantized import KV_SCALES
from toolchain.quantize.cache import ATTENTION_NAME, plan_caches
from toolchain.quantize.job import Job
from toolchain.quantize.plan import EMBEDDING, HEAD, is_expert, legal_group, match_patterns, plan_quantization
from toolchain.quantize.stream import QuantizedStream
from toolchain.recipe import Recipe
from toolchain.recipe_sections import Engine, KVCache, Override
from toolchain.tensor_file import TensorEntry

WEIGHTS = ("int4", "int8", "fp8_e4m3", "none")
ACTIVATIONS = ("int8", "fp8_e4m3")
EMBEDDED = ("int8", "none")
"""What ONNX Runtime has products of."""
FORMATS = (*WEIGHTS, *(f"{fmt}:{fmt}" for fmt in ACTIVATIONS))

Mix = Mapping[str, str]
"""The format of each unit, by their names."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrices that get one format, or a layer's cache (`is_cache`, no matrices).

    `layer` is the first that reads them, the number of layers for a head of its own.
    """

    name: str
    layer: int
    matrices: tuple[str, ...]
    is_cache: bool = False


def base_format(recipe: Recipe) -> str:
    """The format of the recipe's own sections: `int4`, or `int8:int8` with rounded inputs."""
    weights, activations = recipe.weights.format, recipe.activations.format
    return weights if activations == "none" else f"{weights}:{activations}"


def choose_formats(recipe: Recipe, asked: Iterable[str]) -> tuple[str, ...]:
    """The formats to choose from, the base recipe's first; without any asked for, all that make sense beside it.

    Raises DtoolError for a name that is none, and for a format the recipe's engine cannot take; whether it takes the
    base recipe's own, which overrides may leave to no matrix, is told by `check_export`.
    """
    base, asked = base_format(recipe), tuple(dict.fromkeys(asked))
    for fmt in asked:
        if fmt not in FORMATS:
            raise DtoolError(
                f"unknown format {fmt!r}",
                expected="formats of weights, or weights:inputs",
                found=fmt,
                fix=did_you_mean(fmt, FORMATS),
            )
    if not asked:
        others = ("int4", "none") if base.startswith(("int8", "fp8")) else ("int4", "int8", "none")
        asked = tuple(fmt for fmt in others if not lacking(fmt, recipe.engine))
    formats = tuple(dict.fromkeys((base, *asked)))
    if len(formats) < 2 and recipe.kv_cache.format == "none":
        raise DtoolError(
            "there is nothing to choose between",
            expected="two formats or more, the base recipe's among them, or a quantized cache",
            found=base,
            fix="name others with --formats, or take an engine that has more: --set engine.backend=tensorrt-rtx",
        )
    for fmt in asked:
        reason = lacking(fmt, recipe.engine)
        if reason:
            raise DtoolError(
                f"the engine of the recipe cannot take {fmt}",
                expected=name_list(f for f in FORMATS if not lacking(f, recipe.engine)),
                found=f"{reason} (engine.backend {recipe.engine.backend})",
                fix="leave it out of --formats, or start from a recipe of another engine",
            )
    return formats


def lacking(fmt: str, engine: Engine) -> str:
    """Why the engine cannot take a format; empty where it can."""
    weights = fmt.partition(":")[0]
    if engine.backend == "onnxruntime":
        return "" if weights in EMBEDDED else f"ONNX Runtime has no products of {weights}"
    if not engine.targets:
        return ""
    without = [t.name for t in targets_named(engine.targets, engine.backend) if not t.has_format(weights)]
    return f"{', '.join(without)} has no {weights}" if without else ""


def find_units(config: DecoderConfig, recipe: Recipe) -> tuple[Unit, ...]:
    """The units whose format is open, in the order of the model. Raises DtoolError where nothing is."""
    names, _ = matrix_names(config)
    fixed = [*recipe.weights.skip, *(pattern for override in recipe.overrides for pattern in override.match)]
    match_patterns("weights.skip", recipe.weights.skip, [*names, HEAD])
    tied, count = config.tie_word_embeddings, config.num_hidden_layers
    groups: dict[tuple[str, int], list[str]] = {}
    for name in (*names, *((HEAD,) if tied else ())):
        parts = name.split(".")
        if name in (HEAD, EMBEDDING):
            key = ("head", 0) if tied else ((name, 0) if name == EMBEDDING else (name, count))
        else:
            key = (f"layer {parts[2]} {'attention' if parts[3] == 'self_attn' else 'feed-forward'}", int(parts[2]))
        groups.setdefault(key, []).append(name)
    units = []
    for (title, layer), group in groups.items():
        left = [name for name in group if not any(fnmatch.fnmatchcase(name, pattern) for pattern in fixed)]
        if left and (title != "head" or len(left) == len(group)):
            units.append(Unit(title, layer, tuple(left)))
    caches = plan_caches(config, recipe, recipe.compute_dtype)
    units += [Unit(f"layer {i} cache", i, (), is_cache=True) for i, cache in enumerate(caches) if cache.quantized]
    if not units:
        raise DtoolError(
            "no matrix is open to a choice",
            expected="matrices that neither weights.skip nor an override of the recipe names, or a quantized cache",
            found=name_list(fixed),
            fix="start from a recipe that leaves some open",
        )
    return tuple(units)


def possible_formats(config: DecoderConfig, unit: Unit, recipe: Recipe, formats: Sequence[str]) -> tuple[str, ...]:
    """The formats a unit can be stored in: int4 needs inputs that a group divides; a cache has its own or none."""
    if unit.is_cache:
        return (recipe.kv_cache.format, "none")
    shapes = parameter_shapes(config)
    widths = [shapes[f"{name}.weight"][1] for name in unit.matrices if f"{name}.weight" in shapes]
    cut, rounds = all(legal_group(width, recipe.weights.group_size) for width in widths), rounds_inputs(unit, recipe)
    same = [fmt for fmt in formats if not rounds and ":" in fmt and fmt.partition(":")[0] in formats]
    return tuple(fmt for fmt in formats if (cut or not fmt.startswith("int4")) and fmt not in same)


def rounds_inputs(unit: Unit, recipe: Recipe) -> bool:
    """Whether a format of inputs does anything to the unit: an embedding reads none, experts' and skipped ones stay."""
    kept = recipe.activations.skip
    names = [name for name in unit.matrices if name != EMBEDDING and not is_expert(name)]
    return any(not any(fnmatch.fnmatchcase(name, pattern) for pattern in kept) for name in names)


def mixed_recipe(base: Recipe, units: Iterable[Unit], mix: Mix, about: str) -> Recipe:
    """The base recipe with one override, of exact names, for every format of the mix that is not its own.

    Raises DtoolError when the result is not a valid recipe.
    """
    own, units, by_format = base_format(base), list(units), {}
    base = _with_caches(base, [unit for unit in units if unit.is_cache], mix)
    for unit in (unit for unit in units if not unit.is_cache):
        asked = [mix[unit.name], own]
        fmt, own_here = asked if rounds_inputs(unit, base) else [fmt.partition(":")[0] for fmt in asked]
        if fmt != own_here:
            by_format.setdefault(fmt, []).extend(unit.matrices)
    added = [Override(match=tuple(names), **_settings(base, fmt)) for fmt, names in sorted(by_format.items())]
    changed = {"about": about} | ({"overrides": (*base.overrides, *added)} if added else {})
    return base.model_copy(update=changed)


def _with_caches(base: Recipe, caches: Sequence[Unit], mix: Mix) -> Recipe:
    """The recipe with the caches that the mix has in none left out; without a quantized cache where that is all."""
    plain = [unit.layer for unit in caches if mix[unit.name] == "none"]
    if not plain:
        return base
    if len(plain) < len(caches):
        return skip_cache(base, plain)
    changed: dict[str, Any] = {"kv_cache": KVCache(format="none")}
    if base.smoothing.keys:  # which are for a quantized cache alone
        changed["smoothing"] = base.smoothing.model_copy(update={"keys": False})
    return base.model_copy(update=changed)


def _settings(base: Recipe, fmt: str) -> dict[str, dict[str, Any]]:
    """What an override must say so that a matrix has this format, whatever the sections hold."""
    weights, _, activations = fmt.partition(":")
    granularity = "channel" if base.weights.granularity == "group" else base.weights.granularity
    said: dict[str, dict[str, Any]] = {"weights": {"format": weights}}
    if weights != "none":
        said["weights"]["granularity"] = "group" if weights == "int4" else granularity
    elif base.weights.granularity == "group":
        said["weights"]["granularity"] = "channel"
    if (activations or "none") != base.activations.format:
        said["activations"] = {"format": activations or "none"}
        if not activations and base.activations.excess_channels:
            said["activations"]["excess_channels"] = 0
    return {name: section for name, section in said.items() if section}


def layout_bytes(entries: Mapping[str, TensorEntry], config: DecoderConfig, recipe: Recipe) -> dict[str, int]:
    """Bytes of every tensor of the weights file that `dtool quantize` would write, by name."""
    from toolchain.formats import format_named

    caches = plan_caches(config, recipe, next(iter(entries.values())).dtype)
    layout = QuantizedStream(Job(entries, config, recipe, plan_quantization(config, recipe), caches)).layout()
    return {name: math.prod(shape) * format_named(fmt).bytes for name, (fmt, shape) in layout.items()}


def format_bytes(
    entries: Mapping[str, TensorEntry],
    config: DecoderConfig,
    base: Recipe,
    units: Sequence[Unit],
    choices: Mapping[str, Sequence[str]],
) -> tuple[dict[str, dict[str, int]], int]:
    """Bytes of each unit in each of its formats, scales included, and of all the rest of weights and caches.

    A cache counts with one sequence that fills `engine.kv_capacity`.
    """
    found: dict[str, dict[str, int]] = {unit.name: {} for unit in units}
    matrices, rest, sizes = [unit for unit in units if not unit.is_cache], 0, {}
    for fmt in dict.fromkeys(fmt for unit in matrices for fmt in choices[unit.name]) or (base_format(base),):
        mix = {unit.name: fmt if fmt in choices[unit.name] else choices[unit.name][0] for unit in matrices}
        sizes = layout_bytes(entries, config, mixed_recipe(base, matrices, mix, base.about))
        owned = {unit.name: sum(_of_matrix(sizes, name) for name in unit.matrices) for unit in matrices}
        rest = sum(sizes.values()) - sum(owned.values())
        for unit in matrices:
            found[unit.name][mix[unit.name]] = owned[unit.name]
    plain = CacheFormat(next(iter(entries.values())).dtype)
    caches, tokens = plan_caches(config, base, plain.dtype), base.engine.kv_capacity
    rest += cache_bytes(config, caches, tokens)
    for unit in (unit for unit in units if unit.is_cache):
        quantized, scales = cache_bytes(config, (caches[unit.layer],), tokens), _cache_scales(sizes, unit.layer)
        found[unit.name] = {base.kv_cache.format: quantized + scales, "none": cache_bytes(config, (plain,), tokens)}
        rest -= quantized + scales
    return found, rest


def _of_matrix(sizes: Mapping[str, int], matrix: str) -> int:
    """Bytes of a matrix: its codes, its scales, all that goes with its input; not its bias."""
    return sum(size for name, size in sizes.items() if name.rpartition(".")[0] == matrix and name != f"{matrix}.bias")


def _cache_scales(sizes: Mapping[str, int], layer: int) -> int:
    """Bytes of the static scales of a layer's cache, which lie with the weights."""
    return sum(sizes.get(f"{ATTENTION_NAME.format(layer)}.{part}", 0) for part in KV_SCALES)


def cache_bytes(config: DecoderConfig, caches: Iterable[CacheFormat], tokens: int) -> int:
    """Bytes of layers' caches of one sequence of so many tokens, with the scales that every token brings."""
    return tokens * sum(cache.token_bytes(config.num_key_value_heads, config.head_dim) for cache in caches)


def skip_cache(recipe: Recipe, layers: Iterable[int]) -> Recipe:
    """The recipe with the caches of these layers left in the compute type, by exact names in `kv_cache.skip`."""
    names = tuple(f"model.layers.{i}.self_attn" for i in sorted(layers))
    section = recipe.kv_cache.model_dump(exclude_unset=True) | {"skip": [*recipe.kv_cache.skip, *names]}
    return recipe.model_copy(update={"kv_cache": type(recipe.kv_cache).model_validate(section)})
