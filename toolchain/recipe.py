"""Recipes: the TOML file that says what to build and what the proofs must show.

A recipe is readable alone and never names a model. Unknown keys, wrong types and impossible
combinations are refused with the key's path and near matches; `--set section.key=value` overrides.
"""

import fnmatch
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic

from toolchain.errors import DtoolError, did_you_mean
from toolchain.recipe_changes import apply_change
from toolchain.recipe_faults import Misfit, faults_of, invalid_recipe, misfit
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


EMBEDDED = ("backend", "batch", "prompt_len", "kv_capacity")
"""What of [engine] the embedded backend goes by."""
CODES = ("int8", "fp8_e4m3", "int4")
NEEDS: dict[str, tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...]] = {
    "weights": (
        (("granularity", "group_size", "algorithm", "clip", "refinements", "skip"), "weights.format", CODES),
        (("group_size",), "weights.format", ("int4",)),
        (("refinements",), "weights.algorithm", ("gptq",)),
    ),
    "activations": (
        (("granularity", "skip"), "activations.format", CODES),
        (("center",), "weights.format", CODES),
    ),
    "smoothing": ((("alpha",), "smoothing.algorithm", ("smoothquant", "awq")),),
    "kv_cache": (
        (("granularity", "scale", "percentile", "skip"), "kv_cache.format", CODES),
        (("percentile",), "kv_cache.scale", ("percentile",)),
    ),
    "engine": (
        (
            tuple(name for name in Engine.model_fields if name not in EMBEDDED),
            "engine.backend",
            ("tensorrt", "tensorrt-rtx"),
        ),
        (("timing_cache",), "engine.backend", ("tensorrt",)),
    ),
}
"""By section: settings, and the values of another one that they need to do anything."""
ASK_NOTHING = ((), [], None, "none", "stored")
"""Values that are as asked wherever nothing is done; stored scales may be those of the cache alone."""


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
        for at in self.places:
            self._stored_as_they_are(at, self._together(at)[0])
        if self.smoothing.keys and self.kv_cache.format == "none":
            raise misfit(
                "smoothing.keys",
                expected="a quantized cache, whose keys it is for",
                found="kv_cache.format none",
                fix="set kv_cache.format to int8 or fp8_e4m3, or smoothing.keys to false",
            )
        return self

    def _together(self, at: Sequence[int]) -> tuple[Weights, Activations]:
        """What `_with` gives for the overrides at these places. Raises Misfit where it is no valid pair of sections."""
        head = f"overrides.{at[-1]}." if at else ""  # where what is wrong can be set right
        try:
            weights, activations = self._with(self.overrides[i] for i in at)
        except pydantic.ValidationError as error:
            section = error.title.lower()
            said_at = lambda name: self.said_at(f"{section}.{name}", at)  # noqa: E731
            raise Misfit(*faults_of(error, Weights, head + section, said_at)) from error
        if activations.format not in ("none", weights.format):
            theirs, ours = (self.said_at(f"{section}.format", at) for section in ("weights", "activations"))
            raise misfit(
                f"{head}activations.format",
                expected=f"none, or that of {theirs}: both sides of a product have one format",
                found=f"{ours} {activations.format} with {theirs} {weights.format}",
                fix=f"set {head}weights.format to {activations.format} too, or {head}activations.format to none",
            )
        return weights, activations

    def said_at(self, key: str, at: Sequence[int]) -> str:
        """The key that a matrix which the overrides at these places match has its `key` from."""
        section, name = key.split(".")
        said = [i for i in at if name in getattr(self.overrides[i], section)]
        return f"overrides.{said[-1]}.{key}" if said else key

    def _stored_as_they_are(self, at: tuple[int, ...], weights: Weights) -> None:
        changed = {
            f"smoothing.algorithm {self.smoothing.algorithm}": self.smoothing.algorithm != "none",
            "smoothing.keys": self.smoothing.keys,
            "a rotation": self.rotation.is_on,
        } | {f"overrides.{i}.weights": bool(self.overrides[i].weights) for i in at}
        if "stored" in (self.weights.algorithm, weights.algorithm) and any(changed.values()):
            what = ", ".join(name for name, there in changed.items() if there)
            expected = f"other than stored with {what}: other weights have other codes"
            if all(name.startswith("overrides.") for name, there in changed.items() if there):
                expected = f"no {what} beside stored, which goes for all matrices or for none"
            key = self.said_at("weights.algorithm", at if weights.algorithm == "stored" else ())
            raise misfit(
                key,
                expected=expected,
                found="stored",
                fix=f"set {key} to rtn or gptq, or leave out {what}",
            )

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
        """How the matrix `name` and the input of its product are stored, overrides applied; `skip` is not looked at.

        Raises DtoolError where overrides that match it do not go together.
        """
        try:
            return self._together(self.matching(name))
        except Misfit as error:  # each override alone is possible, but several match
            raise invalid_recipe(f"what the overrides together make of {name}", error.faults) from error

    def matching(self, name: str) -> tuple[int, ...]:
        """The places of the overrides that match the matrix `name`."""
        return tuple(i for i, o in enumerate(self.overrides) if any(fnmatch.fnmatchcase(name, p) for p in o.match))

    def weight_formats(self, matrices: Iterable[str] | None = None) -> dict[str, tuple[str, ...]]:
        """The formats that matrices end with, each with the keys that give it.

        `matrices`: those of a model that are quantized. Without them a format counts unless what comes later
        hides it in any model.
        """
        if matrices is None:
            found = ((fmt, key) for at, key, fmt in self._said_formats() if not self._is_hidden(at))
        else:
            at = {name: self.matching(name) for name in matrices}
            found = ((self.of_matrix(n)[0].format, self.said_at("weights.format", i)) for n, i in at.items())
        keys: dict[str, tuple[str, ...]] = {}
        for fmt, key in sorted(set(found)):
            keys[fmt] = (*keys.get(fmt, ()), key)
        return keys

    def _said_formats(self) -> Iterator[tuple[int, str, str]]:
        """Place, key and value of every format of weights that is said; the section's place is -1."""
        yield -1, "weights.format", self.weights.format
        for i, override in enumerate(self.overrides):
            if "format" in override.weights:
                yield i, f"overrides.{i}.weights.format", override.weights["format"]

    def _is_hidden(self, at: int) -> bool:
        """Whether later overrides with a format, or `weights.skip`, match whatever the one at this place does."""
        later = [override.match for override in self.overrides[at + 1 :] if "format" in override.weights]
        above = [pattern for patterns in (*later, self.weights.skip) for pattern in patterns]
        return all(any(_covers(p, own) for p in above) for own in (self.overrides[at].match if at >= 0 else "*"))

    @property
    def variants(self) -> tuple[tuple[Weights, Activations], ...]:
        """The sections' own settings, then those of each override by itself."""
        return tuple(self._with(self.overrides[i] for i in at) for at in self.places)

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Of each of the `variants`, the place of its override in the list."""
        return ((), *((i,) for i in range(len(self.overrides))))

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

    def idle(self, stages: Iterable[str], tried: Iterable[str] = ()) -> list[str]:
        """What was set for these stages and does nothing beside other settings, in lines; defaults are never told.

        `tried`: formats that a search may give to matrices, as `int4` or `int8:int8`; it reads calibration text too.
        """
        return [told(*found) for found in self.idle_settings(stages, tried)]

    def idle_settings(
        self, stages: Iterable[str], tried: Iterable[str] = ()
    ) -> Iterator[tuple[str, Sequence[str], str]]:
        """What `idle` tells: the place of settings, their names there, and where they do nothing."""
        searched = tuple(tried)
        for section in (name for stage in stages for name in STAGE_SECTIONS[stage]):
            for at, said in self.said(section):
                place, keys = section if at is None else f"overrides.{at}.{section}", list(said)
                for names, needed, values in NEEDS.get(section, ()):
                    found = self._values(needed, at, searched)
                    idle = [name for name in names if name in keys and not set(found) & set(values)]
                    keys = [name for name in keys if name not in idle]
                    if idle:
                        yield place, idle, f"with {needed} {' or '.join(found)}"
                if section == "calibration" and not (searched or (self.quantizes and self.needs_calibration)) and keys:
                    yield place, keys, "where nothing is measured on text"
                if section in ("rotation", "smoothing") and not (searched or self.quantizes) and keys:
                    yield place, keys, "where nothing is quantized"

    def said(self, section: str) -> Iterator[tuple[int | None, dict[str, Any]]]:
        """What a section asks for, then each override of it, with its place in the list; defaults are left out."""
        own = getattr(self, section)
        if isinstance(own, Section):
            own = {name: getattr(own, name) for name in type(own).model_fields if name in own.model_fields_set}
            if own.get("granularity") == "group":  # which follows from the format, said or not
                del own["granularity"]
            yield None, _asking(own)
        if section in ("weights", "activations"):
            for i, override in enumerate(self.overrides):  # a granularity of weights follows from the format there
                said = getattr(override, section).items()
                yield i, _asking({key: value for key, value in said if (section, key) != ("weights", "granularity")})

    def _values(self, key: str, at: int | None, tried: Iterable[str]) -> list[str]:
        """What `key` may be for a matrix that the section alone rules, or the override at the place `at` too."""
        section, name = key.split(".")
        said = [getattr(override, section, {}).get(name) for override in self.overrides]
        if at is not None and said[at] is not None:
            said = said[at:]  # later ones win
        else:
            said.insert(0, getattr(getattr(self, section), name))
        if at is None and name == "format" and section in ("weights", "activations"):
            parts = [fmt.partition(":")[0 if section == "weights" else 2] for fmt in tried]
            said += [part or "none" for part in parts]
        return list(dict.fromkeys(value for value in said if value is not None))

    def sections(self, stage: str) -> dict[str, Any]:
        """The part of the recipe that shapes the output of `stage`, as plain JSON types."""
        return self.model_dump(mode="json", include=set(STAGE_SECTIONS[stage]))


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe at a path, or called `name` in the recipes folder, with `key=value` overrides.

    Raises DtoolError for a missing file, bad TOML, unknown keys (with near matches) or values.
    """
    path = find_recipe(name)
    try:
        document = tomllib.loads(path.read_text("utf-8-sig"))  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise DtoolError(
            f"{path} is not text in UTF-8",
            expected="a TOML file, which is in UTF-8",
            found=f"byte 0x{error.object[error.start]:02x} at {error.start}: {error.reason}",
            fix="save it again with the encoding UTF-8, if it is the recipe",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DtoolError(
            f"{path} is not valid TOML",
            expected="key = value and [section] lines",
            found=str(error),
            fix="mend that line",
        ) from error
    for override in overrides:
        apply_change(document, override)
    return parse_recipe(document, f"{path} with what --set changes" if overrides else str(path))


def parse_recipe(document: dict[str, Any], origin: str) -> Recipe:
    """The recipe in `document`; `origin` is named in errors."""
    try:
        return Recipe.model_validate(document)
    except pydantic.ValidationError as error:
        raise invalid_recipe(origin, list(faults_of(error, Recipe))) from error


def find_recipe(name: str) -> Path:
    """The file of a recipe given as a path or as a name in the recipes folder."""
    path = Path(name)
    if path.is_file():
        return path
    known = {p.stem: p for p in sorted(RECIPES_DIR.glob("*.toml"))}
    if name in known:
        return known[name]
    raise DtoolError(
        f"no recipe {name!r}",
        expected="a .toml file or a recipe's name",
        found="neither",
        fix=did_you_mean(name, known),
    )


def find_data(name: str, by: str = "--set") -> Path:
    """The text file that a recipe or the option `by` names, looked for here and beside the recipes folder."""
    for base in (Path(), RECIPES_DIR.parent):
        if (base / name).is_file():
            return base / name
    raise DtoolError(
        f"no text at {name!r}",
        expected='a .jsonl file, one {"text": ...} a line',
        found="no such file",
        fix=f"run `dtool fetch calibration`, or name your own text with {by}",
    )


def _covers(pattern: str, other: str) -> bool:
    """Whether a glob pattern surely matches all that another one does."""
    told_by_text = "[" not in pattern + other and "?" not in pattern  # a * takes whatever the other's own may be
    return pattern == other or (told_by_text and fnmatch.fnmatchcase(other, pattern))


def told(place: str, names: Sequence[str], where: str) -> str:
    """The line that tells of idle settings at a place."""
    keys = ", ".join(f"{place}.{name}" for name in names)
    return f"{keys} {'does' if len(names) == 1 else 'do'} nothing {where}"


def _asking(said: dict[str, Any]) -> dict[str, Any]:
    """Of what was said, what is not as asked where nothing is done."""
    return {name: value for name, value in said.items() if value is not False and value not in ASK_NOTHING}
