"""Settings of a recipe that do nothing to this model, told before the work.

`Recipe.idle` tells those that other settings make idle whatever the model. Here every matrix is asked which of the
settings that hold for it are used, by its final format and by its place in the model; what none of them uses is told,
with what stood in the way.
"""

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

from toolchain.model.config import DecoderConfig
from toolchain.quantize.plan import (
    EMBEDDING,
    FLOAT_EXPERTS,
    HEAD,
    PRODUCT,
    UNCENTERED_EXPERTS,
    UNSEEN_NEAREST,
    QuantizePlan,
    in_a_layer,
    is_expert,
    is_watched,
    quantizable,
)
from toolchain.recipe import NEEDS, Recipe, told
from toolchain.recipe_sections import Activations, Weights

SECTIONS = ("weights", "activations")
"""Those that overrides change by matrix."""
MIXED = ("qkv_proj", "o_proj")
"""The matrices of a layer that make, and read, what attention mixes."""


def idle_notes(config: DecoderConfig, recipe: Recipe, plan: QuantizePlan, *, calibrates: bool) -> tuple[str, ...]:
    """A line for all settings that one thing makes idle. `calibrates`: whether something is measured on text."""
    before = {f"{place}.{name}" for place, names, _ in recipe.idle_settings(["quantize"]) for name in names}
    lines: dict[tuple[str, str], list[str]] = {}
    for place, name, where in (*_by_matrix(config, recipe, plan), *_by_section(recipe, plan, calibrates)):
        if f"{place}.{name}" not in before:
            lines.setdefault((place, where), []).append(name)
    return tuple(told(place, names, where) for (place, where), names in lines.items())


def all_notes(config: DecoderConfig, recipe: Recipe, plan: QuantizePlan, *, calibrates: bool) -> tuple[str, ...]:
    """The plan's notes and those of idle settings; of two that tell one fact, that of the setting."""
    idle = idle_notes(config, recipe, plan, calibrates=calibrates)
    same = {
        FLOAT_EXPERTS: ("activations.format", _FLOAT_INPUTS),
        UNCENTERED_EXPERTS: ("activations.center", _NOT_CENTERED),
        UNSEEN_NEAREST: ("weights.algorithm", _UNSEEN),
    }
    twice = tuple(end for end, (key, why) in same.items() if any(key in line and why in line for line in idle))
    return (*(note for note in plan.notes if not note.endswith(twice)), *idle)


def _by_section(recipe: Recipe, plan: QuantizePlan, calibrates: bool) -> Iterator[tuple[str, str, str]]:
    """What was said for the model as a whole and does nothing, with the reason."""
    layers = any(in_a_layer(name) for name in plan.weights)
    caches = recipe.kv_cache.format != "none"
    last = any(map(_ends_a_feed_forward, plan.weights))
    nothing = "for rounding: no matrix of a layer is quantized"
    mixed = caches or any(in_a_layer(name) and name.endswith(MIXED) for name in plan.weights)
    unused = {
        "rotation.stream": None if layers else nothing,
        "rotation.values": None if mixed else f"for rounding: neither {' nor '.join(MIXED)} nor a cache is quantized",
        "rotation.feed_forward": None if last else f"for rounding: no {PRODUCT} is quantized",
        "calibration.inputs": None if layers else "where no matrix of a layer is quantized",
    }
    unused |= dict.fromkeys(("smoothing.algorithm", "smoothing.alpha"), None if layers or caches else nothing)
    for section in ("rotation", "smoothing", "calibration"):
        for _, said in recipe.said(section):
            for name, value in said.items():
                where = None if value == "float" else unused.get(f"{section}.{name}")
                if section == "calibration" and not calibrates:
                    where = "where nothing is measured on text"
                if where is not None:
                    yield section, name, where


def _by_matrix(config: DecoderConfig, recipe: Recipe, plan: QuantizePlan) -> Iterator[tuple[str, str, str]]:
    """What was said of matrices and none of them uses, with its place and the reason."""
    obstacles = {name: _obstacles(name, recipe, plan) for name in quantizable(config)}
    working: set[int | None] = set()
    for setting in _settings(recipe):
        at, section, key = setting
        found = [of_matrix[setting] for of_matrix in obstacles.values() if setting in of_matrix]
        if None in found:
            working.add(at)
        else:
            yield section if at is None else f"overrides.{at}.{section}", key, _listed(found)
    for i in (i for i in range(len(recipe.overrides)) if i in working):
        for pattern in recipe.overrides[i].match:
            matched = [obstacles[name] for name in fnmatch.filter(obstacles, pattern)]
            found = {why for of_matrix in matched for (at, _, _), why in of_matrix.items() if at == i}
            if found == {_skipped(recipe)}:  # what else makes settings idle leaves a format none: no setting here
                yield f"overrides.{i}", f"match {pattern!r}", _skipped(recipe)


def _listed(obstacles: Iterable[str | None]) -> str:
    """All the reasons, each once; that of a tied head only where it is the one: its matrix has reasons of its own."""
    reasons = list(dict.fromkeys(why for why in obstacles if why is not None))
    reasons = [why for why in reasons if why != _TIED] or reasons
    beside = [why.removeprefix(_BESIDE) for why in reasons if why.startswith(_BESIDE)]
    others = [why for why in reasons if not why.startswith(_BESIDE)]
    return ", and ".join([*others, *([_BESIDE + ", ".join(beside)] if beside else [])])


def _settings(recipe: Recipe) -> dict[tuple[int | None, str, str], Any]:
    """What was said of matrices: place of the override or None, section, key, and the value."""
    said = ((at, section, values) for section in SECTIONS for at, values in recipe.said(section))
    values = {(at, section, key): value for at, section, values in said for key, value in values.items()}
    return {setting: value for setting, value in values.items() if setting[2] != "skip" and value != 0}


def _obstacles(name: str, recipe: Recipe, plan: QuantizePlan) -> dict[tuple[int | None, str, str], str | None]:
    """For everything that was said of a matrix, why it does nothing there; None where it does something."""
    matching, pair, unused = recipe.matching(name), recipe.of_matrix(name), _unused(name, recipe, plan)
    found: dict[tuple[int | None, str, str], str | None] = {}
    for (at, section, key), value in _settings(recipe).items():
        if at is None or at in matching:
            later = [i for i in matching if at is None or i > at]
            why = unused.get(f"{section}.{key}")
            found[at, section, key] = why or _hidden(recipe, pair, section, key, value, later)
    return found


def _hidden(
    recipe: Recipe, pair: tuple[Weights, Activations], section: str, key: str, value: Any, later: list[int]
) -> str | None:
    """What took the place of a value that was said for a matrix of the final settings `pair`; None where it holds."""
    weights, activations = pair
    winners = [i for i in later if key in getattr(recipe.overrides[i], section)]
    if winners:
        return f"{_BESIDE}overrides.{winners[-1]}"
    if getattr(weights if section == "weights" else activations, key) == value:
        return None
    if section == "weights":  # a granularity that does not go with the format
        return f"with weights.format {weights.format}"
    return f"with inputs of format {activations.format}, granularity {activations.granularity}"  # which have no excess


def _unused(name: str, recipe: Recipe, plan: QuantizePlan) -> dict[str, str]:
    """By key, why the final settings of a matrix and of its product's input do nothing."""
    weights, activations = recipe.of_matrix(name)
    found = _left_out(name, weights, recipe, plan)
    final = {"weights": weights, "activations": activations}
    for section in SECTIONS:
        for names, needed, values in NEEDS[section]:
            of, key = needed.split(".")
            value = getattr(final[of], key)
            if value not in values:
                found |= {f"{section}.{n}": f"with {needed} {value}" for n in names if f"{section}.{n}" not in found}
    return _of_its_place(name, recipe, plan) | found


def _of_its_place(name: str, recipe: Recipe, plan: QuantizePlan) -> dict[str, str]:
    """By key, what calibration and the graph do not do for a matrix of this place, or with one scale for a matrix."""
    weights, activations = recipe.of_matrix(name)
    reasons: dict[str, str] = {}
    if not is_watched(name):
        unseen = ("algorithm", "refinements") if weights.algorithm == "gptq" else ("refinements",)
        reasons |= {f"weights.{key}": _UNSEEN for key in unseen}
    if weights.granularity == "tensor":
        searched = ("clip", "refinements") if weights.clip == "search" else ("refinements",)
        reasons |= {f"weights.{key}": "with weights.granularity tensor" for key in searched}
    if name not in plan.centered:
        reasons["activations.center"] = _NOT_CENTERED
    if not _ends_a_feed_forward(name):
        reasons["activations.excess_channels"] = f"elsewhere than at {PRODUCT}"
    if activations.format != "none" and name not in plan.rounded:
        rounding = ("format", "granularity", "excess_channels")
        reasons |= {f"activations.{key}": _input_stays(name, recipe) for key in rounding}
    return reasons


def _ends_a_feed_forward(name: str) -> bool:
    return in_a_layer(name) and name.endswith(f".{PRODUCT}")


_BESIDE = "beside "
_TIED = f"for {HEAD}, which is the tied {EMBEDDING}"
_UNSEEN = "for the head, the embedding and experts, whose inputs are not seen"
_FLOAT_INPUTS = "for experts, whose inputs stay in float"
_NOT_CENTERED = "for the head, the embedding and experts, whose inputs are not centered"


def _skipped(recipe: Recipe) -> str:
    return f"where {_skip_of(recipe, 'weights')} leaves matrices in float"


def _skip_of(recipe: Recipe, section: str) -> str:
    """The key of a section's `skip`, with what it holds where nobody wrote it."""
    settings: Weights | Activations = getattr(recipe, section)
    default = "" if "skip" in settings.model_fields_set else f" (by default {' and '.join(settings.skip)})"
    return f"{section}.skip{default}"


def _input_stays(name: str, recipe: Recipe) -> str:
    """Why the input of a product is not rounded although its settings say so."""
    if name == EMBEDDING:
        return f"for {EMBEDDING}, which reads no activations"
    if is_expert(name):
        return _FLOAT_INPUTS
    return f"where {_skip_of(recipe, 'activations')} leaves inputs in float"


def _left_out(name: str, weights: Weights, recipe: Recipe, plan: QuantizePlan) -> dict[str, str]:
    """Why nothing said of a matrix is used, by key: it stays in float, or is another one."""
    fields = [f"weights.{key}" for key in Weights.model_fields]
    if name == HEAD and name not in plan.weights and name not in plan.skipped:
        return dict.fromkeys(fields, _TIED)
    if name in plan.weights or weights.format == "none":
        return {}
    skips = any(fnmatch.fnmatchcase(name, pattern) for pattern in recipe.weights.skip)
    why = _skipped(recipe) if skips else "where the tied matrix stays in float"
    return dict.fromkeys((*fields, *(f"activations.{key}" for key in Activations.model_fields)), why)
