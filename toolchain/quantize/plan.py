"""Which matrices a recipe quantizes, by exact name, decided before any work."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from toolchain.errors import DtoolError, did_you_mean
from toolchain.model.config import DecoderConfig
from toolchain.model.parameters import matrix_names, parameter_shapes
from toolchain.recipe import Recipe
from toolchain.recipe_sections import Activations, Weights

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
PRODUCT = "mlp.down_proj"
"""The last product of a layer's dense feed-forward, by its name in the layer."""
FLOAT_EXPERTS = "the inputs of experts stay in float; their weights are quantized"
UNCENTERED_EXPERTS = "the inputs of experts are not centered"
UNSEEN_NEAREST = "whose inputs are not seen: rounded to the nearest"
INT4_GROUPS = (128, 64, 32)
"""Group sizes that compilers take, largest first."""


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """What happens to each matrix, by exact module name.

    `weights`: those that become codes, and how. `rounded`: those whose product's input is rounded, and how.
    `skipped`: what stays in float. `groups`: the group size of each int4 matrix. `centered`: the products that
    take the mean of their input apart.
    """

    weights: dict[str, Weights]
    rounded: dict[str, Activations]
    skipped: tuple[str, ...]
    groups: dict[str, int]
    notes: tuple[str, ...]
    centered: tuple[str, ...] = ()

    @property
    def uses_hessian(self) -> bool:
        """Whether some matrix is rounded with the second moments of its inputs."""
        return any(weights.uses_hessian for name, weights in self.weights.items() if is_watched(name))

    @property
    def static(self) -> tuple[str, ...]:
        """The products whose input is rounded with a scale from calibration."""
        return tuple(name for name, activations in self.rounded.items() if activations.is_static)


def in_a_layer(name: str) -> bool:
    """Whether a matrix is of a layer: neither embedding nor head."""
    return name.startswith("model.layers.")


def is_expert(name: str) -> bool:
    """Whether a matrix is of routed experts."""
    return ".experts." in name


def is_watched(name: str) -> bool:
    """Whether calibration sees second moments of what a matrix reads: an expert's inputs depend on the routing."""
    return in_a_layer(name) and not is_expert(name)


def quantizable(config: DecoderConfig) -> list[str]:
    """The matrices that a recipe may name; a tied head is one, for its input is."""
    modules, _ = matrix_names(config)
    return [*modules, HEAD] if config.tie_word_embeddings else modules


def plan_quantization(config: DecoderConfig, recipe: Recipe) -> QuantizePlan:
    """The plan of a recipe for this model. Raises DtoolError for a pattern that matches nothing."""
    modules, kept_in_float = matrix_names(config)
    tied = config.tie_word_embeddings
    names = quantizable(config)
    for i, override in enumerate(recipe.overrides):
        match_patterns(f"overrides.{i}.match", override.match, names)
    asked = {name: recipe.of_matrix(name) for name in names}
    left_out = match_patterns("weights.skip", recipe.weights.skip, names)
    skipped = left_out | {name for name, (weights, _) in asked.items() if weights.format == "none"}
    notes = []
    if tied and (HEAD in skipped or EMBEDDING in skipped):
        if not {HEAD, EMBEDDING} <= skipped:
            notes.append(f"{HEAD} and {EMBEDDING} are one tied matrix: skipping one skips both")
        skipped |= {HEAD, EMBEDDING}
    weights = {name: asked[name][0] for name in modules if name not in skipped}
    rounded = _rounded(recipe, asked, skipped, notes)
    groups = _int4_groups(config, weights, notes)
    centered = _centered(asked, weights, notes)
    notes += _unseen(weights)
    return QuantizePlan(weights, rounded, tuple(sorted(skipped | set(kept_in_float))), groups, tuple(notes), centered)


def _rounded(
    recipe: Recipe, asked: dict[str, tuple[Weights, Activations]], skipped: set[str], notes: list[str]
) -> dict[str, Activations]:
    """The products whose input is rounded; an expert's stays in float."""
    wanted = {name for name, (_, activations) in asked.items() if activations.format != "none"} - skipped
    if any(map(is_expert, wanted)):
        notes.append(FLOAT_EXPERTS)
    products = [name for name in asked if name != EMBEDDING and not is_expert(name)]
    kept = match_patterns("activations.skip", recipe.activations.skip, products) if wanted else set()
    return {name: asked[name][1] for name in products if name in wanted - kept}


def _centered(
    asked: dict[str, tuple[Weights, Activations]], weights: dict[str, Weights], notes: list[str]
) -> tuple[str, ...]:
    wanted = [name for name in weights if asked[name][1].center and name != EMBEDDING]
    if any(map(is_expert, wanted)):
        notes.append(UNCENTERED_EXPERTS)
    return tuple(filter(is_watched, wanted))


def _unseen(weights: dict[str, Weights]) -> list[str]:
    """Which matrices GPTQ is asked for and passes over."""
    passed = [name for name, w in weights.items() if w.algorithm == "gptq" and not is_watched(name)]
    kinds = {"the head": HEAD in passed, "the embedding": EMBEDDING in passed, "experts": any(map(is_expert, passed))}
    named = [kind for kind, there in kinds.items() if there]
    return [f"no GPTQ for {', '.join(named)}, {UNSEEN_NEAREST}"] if named else []


def _int4_groups(config: DecoderConfig, weights: dict[str, Weights], notes: list[str]) -> dict[str, int]:
    """The group size of every int4 matrix: the asked one, or the largest smaller one that divides its inputs."""
    asked = {name: w.group_size for name, w in weights.items() if w.format == "int4"}
    shapes = parameter_shapes(config)
    widths = {name: shapes[f"{name}.weight"][1] for name in asked}
    groups = {name: legal_group(width, asked[name]) for name, width in widths.items()}
    for name, group in groups.items():
        if group is None:
            raise DtoolError(
                f"{name} cannot be stored as int4",
                expected=f"more inputs than, and a multiple of, one of {', '.join(map(str, INT4_GROUPS))}",
                found=f"{widths[name]} inputs",
                fix=f"leave it out: --set 'weights.skip=[\"{name}\", ...]'",
            )
    smaller: dict[tuple[int, int], list[str]] = {}
    for name, group in groups.items():
        if group is not None and group != asked[name]:
            smaller.setdefault((group, asked[name]), []).append(name)
    for (group, wanted), names in sorted(smaller.items()):
        width = widths[names[0]]
        notes.append(f"{len(names)} matrices in groups of {group}: {wanted} does not cut {width} inputs in two or more")
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
                found=pattern or "an empty name",
                fix=did_you_mean(pattern, names),
            )
        found |= set(matched)
    return found
