"""One quantization: what is quantized, how, and on which text, as the stage, the stream and the walk pass it on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError
from toolchain.model.caches import CacheFormat
from toolchain.model.config import DecoderConfig
from toolchain.quantize.cache import plan_caches
from toolchain.quantize.idle import all_notes
from toolchain.quantize.plan import QuantizePlan, plan_quantization
from toolchain.quantize.stored import StoredScales, needs_calibration, open_stored
from toolchain.recipe import Recipe
from toolchain.tensor_file import TensorEntry, read_header

if TYPE_CHECKING:
    from toolchain.quantize.excess import Excess
    from toolchain.quantize.progress import Progress
    from toolchain.quantize.statistics import Statistics

WEIGHTS = "weights.safetensors"


@dataclass(frozen=True, slots=True)
class Job:
    """A recipe planned for the tensors `entries` of an export, by name.

    `caches`: of every layer. `stored`: scales that come from the checkpoint. `blocks`: calibration text as ids
    int64 [samples, seq_len], None where nothing is measured. `excess`: by layer. `progress`: what of the work is
    finished already. `statistics`: what earlier walks saw.
    """

    entries: Mapping[str, TensorEntry]
    config: DecoderConfig
    recipe: Recipe
    plan: QuantizePlan
    caches: tuple[CacheFormat, ...] = ()
    stored: StoredScales | None = None
    blocks: Any = None
    report: Callable[[str], None] = lambda _: None
    excess: Mapping[int, "Excess"] = field(default_factory=dict)
    progress: "Progress | None" = None
    statistics: "Statistics | None" = None

    @property
    def held_in(self) -> str:
        """The float type of the export's tensors."""
        return next(iter(self.entries.values())).dtype

    @property
    def calibrates(self) -> bool:
        """Whether something is still to be measured on text."""
        return needs_calibration(self.recipe, self.plan, self.config, self.stored)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the plan before the work."""
        stored = () if self.stored is None else self.stored.notes
        return stored + all_notes(self.config, self.recipe, self.plan, calibrates=self.calibrates)


def plan_job(exported: Artifact, recipe: Recipe) -> Job:
    """The job of a recipe for an export, without text; the exceptions of `plan_recipe`, and of `open_stored`."""
    config = exported.read("decoder.json", DecoderConfig)
    plan, caches = plan_recipe(config, recipe, str(exported.manifest.details["compute_dtype"]))
    entries = read_header(exported.file(WEIGHTS))
    return Job(entries, config, recipe, plan, caches, open_stored(exported, recipe, plan))


def plan_recipe(
    config: DecoderConfig, recipe: Recipe, compute_dtype: str
) -> tuple[QuantizePlan, tuple[CacheFormat, ...]]:
    """What a recipe does to each matrix and each cache of a model.

    Raises DtoolError for a recipe that asks for codes and leaves everything out, patterns that match nothing, groups
    that cut no matrix, and bases or keys' factors that are no identity for the model: all that shapes alone tell.
    """
    plan, caches = plan_quantization(config, recipe), plan_caches(config, recipe, compute_dtype)
    check_work(recipe, plan, caches)
    if recipe.rotation.is_on:
        from toolchain.quantize.rotation import check_rotation

        check_rotation(config, recipe.rotation)
    if recipe.smoothing.keys:
        from toolchain.quantize.keys import check_keys

        check_keys(config)
    return plan, caches


def check_work(recipe: Recipe, plan: QuantizePlan, caches: tuple[CacheFormat, ...]) -> None:
    """Refuse a recipe with formats that no matrix and no cache of the model takes."""
    if recipe.quantizes and not plan.weights and not any(c.quantized for c in caches):
        raise DtoolError(
            "the recipe quantizes nothing",
            expected="a matrix or a cache that weights.skip, kv_cache.skip and overrides leave to be quantized",
            found="all of them left out",
            fix=f"leave out less; for an engine in float run neither this stage nor a search, and give `dtool run`, or "
            f"`dtool build-engine` of the export, {_in_float(recipe)}",
        )


def _in_float(recipe: Recipe) -> str:
    """The changes that leave a recipe, whose caches are float already, with no formats."""
    changed = {
        "weights.format=none": recipe.weights.format != "none",
        "weights.granularity=channel": recipe.weights.granularity == "group",
        "activations.format=none": recipe.activations.format != "none",
        "activations.excess_channels=0": recipe.activations.excess_channels > 0,
        "'overrides=[]'": bool(recipe.overrides),
    }
    return " ".join(f"--set {change}" for change, needed in changed.items() if needed)
