"""Which matrices a recipe quantizes, by exact name, decided before any work."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from toolchain.errors import DtoolError, did_you_mean
from toolchain.model.config import DecoderConfig
from toolchain.model.parameters import matrix_names, parameter_shapes
from toolchain.recipe import Recipe

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
INT4_GROUPS = (128, 64, 32)
"""Group sizes that compilers take, largest first."""


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Exact module names: whose weight becomes codes, whose input is rounded, what is left.

    `groups`: the group size of each int4 matrix.
    """

    weights: tuple[str, ...]
    rounded: tuple[str, ...]
    skipped: tuple[str, ...]
    groups: dict[str, int]
    notes: tuple[str, ...]


def plan_quantization(config: DecoderConfig, recipe: Recipe) -> QuantizePlan:
    """The plan of a recipe for this model. Raises DtoolError for a pattern that matches nothing."""
    modules, kept_in_float = matrix_names(config)
    tied = config.tie_word_embeddings
    names = [*modules, HEAD] if tied else modules
    skipped = match_patterns("weights.skip", recipe.weights.skip, names)
    notes = []
    if tied and (HEAD in skipped or EMBEDDING in skipped):
        if not {HEAD, EMBEDDING} <= skipped and recipe.weights.format != "none":
            notes.append(f"{HEAD} and {EMBEDDING} are one tied matrix: skipping one skips both")
        skipped |= {HEAD, EMBEDDING}
    if recipe.weights.format == "none":
        skipped = set(names)
    weights = tuple(name for name in modules if name not in skipped)
    rounded: tuple[str, ...] = ()
    if recipe.activations.format != "none":
        experts = [name for name in names if ".experts." in name]
        products = [name for name in names if name != EMBEDDING and name not in experts]
        if set(experts) - skipped:
            notes.append("the inputs of experts stay in float; their weights are quantized")
        kept = match_patterns("activations.skip", recipe.activations.skip, products)
        rounded = tuple(name for name in products if name not in skipped | kept)
    groups = _int4_groups(config, recipe, weights, notes) if recipe.weights.format == "int4" else {}
    return QuantizePlan(weights, rounded, tuple(sorted(skipped | set(kept_in_float))), groups, tuple(notes))


def _int4_groups(config: DecoderConfig, recipe: Recipe, names: tuple[str, ...], notes: list[str]) -> dict[str, int]:
    """The group size of every matrix: the asked one, or the largest smaller one that divides its inputs."""
    asked = recipe.weights.group_size
    widths = {name: parameter_shapes(config)[f"{name}.weight"][1] for name in names}
    groups = {name: legal_group(width, asked) for name, width in widths.items()}
    for name, group in groups.items():
        if group is None:
            raise DtoolError(
                f"{name} cannot be stored as int4",
                expected=f"more inputs than, and a multiple of, one of {', '.join(map(str, INT4_GROUPS))}",
                found=f"{widths[name]} inputs",
                fix=f"leave it out: --set 'weights.skip=[\"{name}\", ...]'",
            )
    for group in sorted({g for g in groups.values() if g != asked and g is not None}):
        smaller = [name for name, g in groups.items() if g == group]
        notes.append(f"{len(smaller)} matrices in groups of {group}: {asked} does not cut {widths[smaller[0]]} inputs")
    return {name: group for name, group in groups.items() if group is not None}


def legal_group(width: int, asked: int) -> int | None:
    """The largest group size at most `asked` that cuts `width` into two or more; None if there is none.

    A single group a channel is not fused into the product by TensorRT-RTX.
    """
    return next((g for g in INT4_GROUPS if g <= asked and g < width and width % g == 0), None)


def match_patterns(key: str, patterns: Iterable[str], names: list[str], what: str = "matrix") -> set[str]:
    """The names that glob patterns match. Raises DtoolError for one that matches nothing."""
    found: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise DtoolError(
                f"{key} {pattern!r} matches no {what}",
                expected=f"the name of a {what} or a glob pattern",
                found=pattern,
                fix=did_you_mean(pattern, names),
            )
        found |= set(matched)
    return found
