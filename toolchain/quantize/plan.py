"""Which matrices a recipe quantizes, by exact name, decided before any work."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from toolchain.errors import DtoolError, did_you_mean
from toolchain.model.config import DecoderConfig
from toolchain.model.hf import parameter_shapes
from toolchain.recipe import Recipe

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Exact module names: whose weight becomes codes, whose input is rounded per token, what is left."""

    weights: tuple[str, ...]
    per_token: tuple[str, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]


def plan_quantization(config: DecoderConfig, recipe: Recipe) -> QuantizePlan:
    """The plan of a recipe for this model. Raises DtoolError for a pattern that matches nothing."""
    modules = [n.removesuffix(".weight") for n, shape in parameter_shapes(config).items() if len(shape) == 2]
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
    per_token: tuple[str, ...] = ()
    if recipe.activations.format != "none":
        products = [name for name in names if name != EMBEDDING]
        kept = match_patterns("activations.skip", recipe.activations.skip, products)
        per_token = tuple(name for name in products if name not in skipped | kept)
    return QuantizePlan(weights, per_token, tuple(sorted(skipped)), tuple(notes))


def match_patterns(key: str, patterns: Iterable[str], names: list[str]) -> set[str]:
    """The names that glob patterns match. Raises DtoolError for one that matches nothing."""
    found: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise DtoolError(
                f"{key} {pattern!r} matches no matrix",
                expected="the name of a matrix or a glob pattern",
                found=pattern,
                fix=did_you_mean(pattern, names),
            )
        found |= set(matched)
    return found
