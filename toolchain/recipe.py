"""Recipes: the TOML file that says what to build and what the proofs must show.

A recipe is readable alone and never names a model. Unknown keys, wrong types and impossible
combinations are refused with the key's path and near matches; `--set section.key=value` overrides.
"""

import fnmatch
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import pydantic

from toolchain.errors import DtoolError, did_you_mean
from toolchain.recipe_sections import (
    Activations,
    Bench,
    Calibration,
    Engine,
    KVCache,
    Override,
    Parity,
    Rotation,
    Section,
    Smoothing,
    Weights,
)

SCHEMA_VERSION = 1
RECIPES_DIR = Path(__file__).parent.parent / "recipes"

STAGE_SECTIONS = {
    "export": ("compute_dtype", "context_len"),
    "quantize": ("weights", "activations", "overrides", "rotation", "smoothing", "kv_cache", "calibration"),
    "engine": ("engine",),
}
"""What of a recipe each stage depends on; a change elsewhere leaves its output reusable."""

BACKEND_MODULES = {
    "tensorrt": ("tensorrt", "trt"),
    "tensorrt-rtx": ("tensorrt_rtx", "rtx"),
    "onnxruntime": ("onnxruntime", "ort"),
}
"""Per engine.backend: the Python module it needs, and the extra of dtool that installs it."""


class Recipe(Section, frozen=True):
    """A whole recipe with every default filled in."""

    schema_version: int = pydantic.Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    about: str
    compute_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    context_len: int | None = pydantic.Field(default=None, ge=1)
    """Positions the graphs serve; without it all that one set of the model's rotary frequencies can."""
    weights: Weights = Weights()
    activations: Activations = Activations()
    overrides: Annotated[tuple[Override, ...], pydantic.Field(strict=False)] = ()
    rotation: Rotation = Rotation()
    smoothing: Smoothing = Smoothing()
    kv_cache: KVCache = KVCache()
    calibration: Calibration = Calibration()
    engine: Engine = Engine()
    parity: Parity = Parity()
    bench: Bench = Bench()

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Self:
        for override in ((), *((override,) for override in self.overrides)):
            weights, activations = (section.format for section in self._with(override))
            if activations not in ("none", weights):
                where = f" for {', '.join(override[0].match)}" if override else ""
                raise ValueError(
                    f"activations.format {activations} needs weights.format {activations}, not {weights}{where}: "
                    "both sides of a product have one format"
                )
            self._stored_as_they_are(override)
        if self.smoothing.keys and self.kv_cache.format == "none":
            raise ValueError("smoothing.keys is for a quantized cache: set kv_cache.format, or leave it out")
        return self

    def _stored_as_they_are(self, override: tuple[Override, ...]) -> None:
        changed = {
            f"smoothing.algorithm {self.smoothing.algorithm}": self.smoothing.algorithm != "none",
            "smoothing.keys": self.smoothing.keys,
            "a rotation": self.rotation.is_on,
            "an override of weights": bool(override and override[0].weights),
        }
        stored = any(weights.algorithm == "stored" for weights in (self.weights, self._with(override)[0]))
        if stored and any(changed.values()):
            what = ", ".join(name for name, there in changed.items() if there)
            raise ValueError(f"{what} does not go with weights.algorithm stored: other weights have other codes")

    def _with(self, overrides: Iterable[Override]) -> tuple[Weights, Activations]:
        changed = [self.weights.model_dump(exclude_unset=True), self.activations.model_dump(exclude_unset=True)]
        for override in overrides:
            if "int4" in {changed[0].get("format"), override.weights.get("format", changed[0].get("format"))}:
                changed[0].pop("granularity", None)  # which follows from the format here
            changed[0] |= override.weights
            changed[1] |= override.activations
            static = changed[1].get("format", "none") != "none" and changed[1].get("granularity") == "tensor"
            if not static and "excess_channels" not in override.activations:
                changed[1].pop("excess_channels", None)  # which only a static scale has a use for
        return Weights.model_validate(changed[0]), Activations.model_validate(changed[1])

    def of_matrix(self, name: str) -> tuple[Weights, Activations]:
        """How the matrix `name` and the input of its product are stored, overrides applied; `skip` is not looked at."""
        return self._with(o for o in self.overrides if any(fnmatch.fnmatchcase(name, p) for p in o.match))

    @property
    def variants(self) -> tuple[tuple[Weights, Activations], ...]:
        """The sections' own settings, then those of each override by itself."""
        return (self._with(()), *(self._with((override,)) for override in self.overrides))

    @property
    def quantizes(self) -> bool:
        """Whether the quantize stage has anything to do."""
        return self.kv_cache.format != "none" or any(weights.format != "none" for weights, _ in self.variants)

    @property
    def needs_calibration(self) -> bool:
        """Whether anything in the recipe is measured on text: static scales, second moments, sizes of channels."""
        measured = any(w.uses_hessian or a.is_static or a.center for w, a in self.variants)
        changed = self.rotation.is_on or self.smoothing.is_on  # and checked on text to be an identity
        return measured or changed or self.kv_cache.is_static

    def sections(self, stage: str) -> dict[str, Any]:
        """The part of the recipe that shapes the output of `stage`, as plain JSON types."""
        return self.model_dump(mode="json", include=set(STAGE_SECTIONS[stage]))


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe at a path, or called `name` in the recipes folder, with `key=value` overrides.

    Raises DtoolError for a missing file, bad TOML, unknown keys (with near matches) or values.
    """
    path = find_recipe(name)
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DtoolError(f"{path} is not valid TOML", found=str(error)) from error
    for override in overrides:
        _apply_override(document, override)
    return parse_recipe(document, str(path))


def parse_recipe(document: dict[str, Any], origin: str) -> Recipe:
    """The recipe in `document`; `origin` is named in errors."""
    try:
        return Recipe.model_validate(document)
    except pydantic.ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise DtoolError(
            f"{origin} is not a valid recipe", found="\n            ".join(lines), fix="mend the keys named"
        ) from error


def find_recipe(name: str) -> Path:
    """The file of a recipe given as a path or as a name in the recipes folder."""
    path = Path(name)
    if path.is_file():
        return path
    known = {p.stem: p for p in sorted(RECIPES_DIR.glob("*.toml"))}
    if name in known:
        return known[name]
    raise DtoolError(f"no recipe {name!r}", expected="a .toml file or a recipe's name", fix=did_you_mean(name, known))


def find_data(name: str) -> Path:
    """The text file a recipe names, looked for here and beside the recipes folder."""
    for base in (Path(), RECIPES_DIR.parent):
        if (base / name).is_file():
            return base / name
    raise DtoolError(
        f"no text at {name!r}",
        expected='a .jsonl file, one {"text": ...} a line',
        found="no such file",
        fix="run `dtool fetch calibration`, or name your own text with --set",
    )


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise DtoolError(f"--set {override!r} has no value", expected="section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.strip().split(".")
    table = document
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise DtoolError(f"--set {key}: {section!r} is a value, not a section")
    table[last] = value


def _explain(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "recipe"
    if item["type"] != "extra_forbidden":
        return f"{where}: {item['msg']} (got {item['input']!r})"
    model: Any = Recipe
    for part in item["loc"][:-1]:
        if isinstance(part, str):  # else a place in a list of sections
            annotation = model.model_fields[part].annotation
            model = next(iter(get_args(annotation)), annotation)
    return f"{where}: unknown key; {did_you_mean(str(item['loc'][-1]), model.model_fields)}"
