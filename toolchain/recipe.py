"""Recipes: the TOML file that says what to build and what the proofs must show.

A recipe is readable alone and never names a model. Unknown keys, wrong types and impossible
combinations are refused with the key's path and near matches; `--set section.key=value` overrides.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic

from toolchain.errors import DtoolError, did_you_mean

SCHEMA_VERSION = 1
RECIPES_DIR = Path(__file__).parent.parent / "recipes"

STAGE_SECTIONS = {
    "export": ("compute_dtype", "context_len"),
    "quantize": ("weights", "activations", "smoothing", "kv_cache", "calibration"),
    "engine": ("engine",),
}
"""What of a recipe each stage depends on; a change elsewhere leaves its output reusable."""

BACKEND_MODULES = {
    "tensorrt": ("tensorrt", "trt"),
    "tensorrt-rtx": ("tensorrt_rtx", "rtx"),
    "onnxruntime": ("onnxruntime", "ort"),
}
"""Per engine.backend: the Python module it needs, and the extra of dtool that installs it."""


class _Section(pydantic.BaseModel, frozen=True, extra="forbid", strict=True):
    """Values keep the type they are written with: `true` is no 1, "5" is no 5."""


Strings = Annotated[tuple[str, ...], pydantic.Field(strict=False)]
"""TOML has lists only."""


class Weights(_Section, frozen=True):
    """How the matrices are stored: one scale per output channel, tensor, or `group_size` inputs of a channel.

    `algorithm`: round to nearest, or GPTQ with the second moments of the calibration text. `clip`: scales of
    the largest weight, or of the range with the least error. `stored`: with the scales that the checkpoint was
    quantized with, which gives its codes back; static scales of inputs and of the cache are its own too.

    `skip` holds exact module names or glob patterns.
    """

    format: Literal["none", "int8", "fp8_e4m3", "int4"] = "none"
    granularity: Literal["channel", "tensor", "group"] = "channel"
    group_size: Literal[32, 64, 128] = 128
    algorithm: Literal["rtn", "gptq", "stored"] = "rtn"
    clip: Literal["amax", "search"] = "amax"
    skip: Strings = ("lm_head", "model.embed_tokens")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _int4_is_in_groups(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("format") == "int4":
            return {"granularity": "group"} | values
        return values

    @property
    def uses_hessian(self) -> bool:
        """Whether the second moments of the inputs are needed."""
        return self.format != "none" and (self.algorithm == "gptq" or self.clip == "search")

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.format == "int4") != (self.granularity == "group"):
            raise ValueError(f"granularity {self.granularity} does not go with format {self.format}: int4 is in groups")
        if self.algorithm == "stored" and self.clip != "amax":
            raise ValueError(f"clip {self.clip} does not go with algorithm stored: the scales are the checkpoint's own")
        return self


class Activations(_Section, frozen=True):
    """How the inputs of the quantized products are rounded.

    `token`: a dynamic scale per token. `tensor`: one static scale per product, from calibration.
    `skip` names products whose input stays in float; the head feeds no layer, only the choice.
    """

    format: Literal["none", "int8", "fp8_e4m3"] = "none"
    granularity: Literal["token", "tensor"] = "token"
    skip: Strings = ("lm_head",)


class Smoothing(_Section, frozen=True):
    """Channels made smaller in the activations and larger in the weights before anything is rounded.

    `smoothquant` goes by the largest activation of a channel, `awq` by the mean; `alpha` by how much.
    """

    algorithm: Literal["none", "smoothquant", "awq"] = "none"
    alpha: float = pydantic.Field(default=0.5, ge=0, le=1)


class KVCache(_Section, frozen=True):
    """How the cache is stored; the scale is static, per layer, for K and V apart."""

    format: Literal["none", "int8", "fp8_e4m3"] = "none"
    granularity: Literal["head", "tensor"] = "head"


class Calibration(_Section, frozen=True):
    """Which text the statistics come from: `samples` blocks of `seq_len` tokens."""

    data: str = "calib_data/calibration.jsonl"
    samples: int = pydantic.Field(default=32, ge=1)
    seq_len: int = pydantic.Field(default=512, ge=2)
    batch: int = pydantic.Field(default=4, ge=1)
    seed: int = 0


class Range(_Section, frozen=True):
    """A dynamic dimension of an engine: min <= opt <= max."""

    min: int = pydantic.Field(default=1, ge=1)
    opt: int = 1
    max: int = 1

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"min <= opt <= max does not hold: {self.min}, {self.opt}, {self.max}")
        return self


class Engine(_Section, frozen=True):
    """What the engine is compiled by and for.

    `attention`: `plugin` is dtool's own kernels over a cache of any format; `native` is TensorRT's, over
    a cache in the compute type. `layout`: prefill and decode as two engines (`separate`), or as two
    profiles of one engine, which holds the weights once (`shared`). `memory_limit_mb` bounds the
    builder's workspace; `weight_streaming_budget_mb` is how much of the weights stays on the GPU;
    `strip_weights` leaves them out of the plans, to be filled in from the weights file on loading.
    """

    backend: Literal["onnxruntime", "tensorrt", "tensorrt-rtx"] = "onnxruntime"
    targets: Strings = ()
    attention: Literal["native", "plugin"] = "native"
    layout: Literal["separate", "shared"] = "separate"
    batch: Range = Range(min=1, opt=1, max=8)
    prompt_len: Range = Range(min=1, opt=512, max=2048)
    kv_capacity: int = pydantic.Field(default=2048, ge=2)
    optimization_level: Annotated[int, pydantic.Field(ge=0, le=5)] | None = None
    memory_limit_mb: Annotated[int, pydantic.Field(ge=1)] | None = None
    timing_cache: bool = True
    weight_streaming: bool = False
    weight_streaming_budget_mb: Annotated[int, pydantic.Field(ge=0)] | None = None
    refit: bool = False
    strip_weights: bool = False
    hardware_compatibility: Literal["none", "ampere_plus", "same_compute_capability"] = "none"
    version_compatible: bool = False

    @pydantic.model_validator(mode="after")
    def _budget_has_a_stream(self) -> Self:
        if self.weight_streaming_budget_mb is not None and not self.weight_streaming:
            raise ValueError("weight_streaming_budget_mb needs weight_streaming = true")
        return self


Bound = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class Gates(_Section, frozen=True):
    """Bounds of one comparison; None is not gated. KL in nats, over positions.

    `layer_error_median` (fake_quant alone) bounds the relative error of each layer fed the
    candidate's own input: the test of an implementation whose activations or cache are rounded.
    """

    kl_mean: Bound | None = None
    kl_p99: Bound | None = None
    top1_agreement: Bound | None = None
    max_abs_logit: Bound | None = None
    layer_error_median: Bound | None = None


class Parity(_Section, frozen=True):
    """Which text the proof runs over, and the gates against each reference."""

    data: str = "calib_data/evaluation.jsonl"
    blocks: int = pydantic.Field(default=8, ge=1)
    seq_len: int = pydantic.Field(default=256, ge=8)
    batch: int = pydantic.Field(default=3, ge=1)
    decode_steps: int = pydantic.Field(default=32, ge=1)
    eager: Gates = Gates()
    fake_quant: Gates = Gates()
    self_consistency: Gates = Gates()


class Bench(_Section, frozen=True):
    """What is timed: each prompt length is followed by `new_tokens` decode steps."""

    prompt_lens: Annotated[tuple[int, ...], pydantic.Field(strict=False)] = (32, 256)
    new_tokens: int = pydantic.Field(default=32, ge=2)
    batch: int = pydantic.Field(default=1, ge=1)
    repeats: int = pydantic.Field(default=5, ge=1)
    warmup: int = pydantic.Field(default=1, ge=0)
    threads: int = pydantic.Field(default=0, ge=0)


class Recipe(_Section, frozen=True):
    """A whole recipe with every default filled in."""

    schema_version: int = pydantic.Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    about: str
    compute_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    context_len: int | None = pydantic.Field(default=None, ge=1)
    """Positions the graphs serve; without it all that one set of the model's rotary frequencies can."""
    weights: Weights = Weights()
    activations: Activations = Activations()
    smoothing: Smoothing = Smoothing()
    kv_cache: KVCache = KVCache()
    calibration: Calibration = Calibration()
    engine: Engine = Engine()
    parity: Parity = Parity()
    bench: Bench = Bench()

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Self:
        weights, activations = self.weights.format, self.activations.format
        if activations not in ("none", weights):
            raise ValueError(
                f"activations.format {activations} needs weights.format {activations}, not {weights}: "
                "both sides of a product have one format"
            )
        if self.weights.algorithm == "stored" and self.smoothing.algorithm != "none":
            raise ValueError(
                f"smoothing.algorithm {self.smoothing.algorithm} does not go with weights.algorithm stored: "
                "smoothed weights have other codes"
            )
        return self

    @property
    def quantizes(self) -> bool:
        """Whether the quantize stage has anything to do."""
        return self.weights.format != "none" or self.kv_cache.format != "none"

    @property
    def needs_calibration(self) -> bool:
        """Whether anything in the recipe is measured on text: static scales, second moments, sizes of channels."""
        measured = self.weights.uses_hessian or self.smoothing.algorithm != "none"
        return self.kv_cache.format != "none" or self.has_static_activations or measured

    @property
    def has_static_activations(self) -> bool:
        """Whether activations are rounded with scales fixed in advance."""
        return self.activations.format != "none" and self.activations.granularity == "tensor"

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
        model = model.model_fields[part].annotation
    return f"{where}: unknown key; {did_you_mean(str(item['loc'][-1]), model.model_fields)}"
