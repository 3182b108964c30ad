"""The sections of a recipe: what each may say, with every default. `recipe` puts them together."""

import math
from typing import Annotated, Any, Literal, Self

import pydantic

from toolchain.recipe_faults import Misfit, misfit, shown, unknown_key


class Section(pydantic.BaseModel, frozen=True, extra="forbid", strict=True):
    """Values keep the type they are written with: `true` is no 1, "5" is no 5."""


Strings = Annotated[tuple[str, ...], pydantic.Field(strict=False)]
"""TOML has lists only."""


class Weights(Section, frozen=True):
    """How the matrices are stored: one scale per output channel, tensor, or `group_size` inputs of a channel.

    `algorithm`: round to nearest, or GPTQ with the second moments of the calibration text. `clip`: scales of
    the largest weight, or of the range with the least error. `refinements`: rounds of better scales and codes
    after GPTQ. `stored`: with the scales that the checkpoint was quantized with, which gives its codes back; static
    scales of inputs and of the cache are its own too.

    `skip` holds exact module names or glob patterns.
    """

    format: Literal["none", "int8", "fp8_e4m3", "int4"] = "none"
    granularity: Literal["channel", "tensor", "group"] = "channel"
    group_size: Literal[32, 64, 128] = 128
    algorithm: Literal["rtn", "gptq", "stored"] = "rtn"
    clip: Literal["amax", "search"] = "amax"
    refinements: int = pydantic.Field(default=2, ge=0)
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
        searched = self.clip == "search" and self.granularity != "tensor"  # whose scale is of the largest weight
        return self.format != "none" and (self.algorithm == "gptq" or searched)

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.format == "int4") != (self.granularity == "group"):
            expected = "group" if self.format == "int4" else "channel or tensor"
            raise misfit(
                "granularity",
                expected=f"{expected} with .format {self.format}: int4 is in groups, other formats are not",
                found=f".granularity {self.granularity}",
                fix=f"set .granularity to {expected}, or .format to another",
            )
        if self.algorithm == "stored" and self.clip != "amax":
            raise misfit(
                "clip",
                expected="amax with .algorithm stored: the scales are the checkpoint's own",
                found=f".clip {self.clip}",
                fix="set .clip to amax, or .algorithm to rtn or gptq",
            )
        return self


class Activations(Section, frozen=True):
    """How the inputs of the quantized products are rounded.

    `token`: a dynamic scale per token. `tensor`: one static scale per product, from calibration.
    `excess_channels`: where a few channels of a feed-forward's last input hold values far beyond all others, at
    most so many have that excess taken to the product in float, so that it does not set the static scale.
    `center`: the mean of every channel is taken off before rounding, and what the product makes of it added after
    in float; where inputs stay in float, what rounding the weights does to the mean is made good (bias correction).
    `skip` names products whose input stays in float; the head feeds no layer, only the choice.
    """

    format: Literal["none", "int8", "fp8_e4m3"] = "none"
    granularity: Literal["token", "tensor"] = "token"
    excess_channels: int = pydantic.Field(default=0, ge=0)
    center: bool = False
    skip: Strings = ("lm_head",)

    @pydantic.model_validator(mode="after")
    def _excess_is_of_a_static_scale(self) -> Self:
        if self.excess_channels and not self.is_static:
            raise misfit(
                "excess_channels",
                expected="0, or static scales: a format, and granularity tensor",
                found=f".excess_channels {self.excess_channels} with .format {self.format} and .granularity "
                + self.granularity,
                fix="set .format to a type and .granularity to tensor, or .excess_channels to 0",
            )
        return self

    @property
    def is_static(self) -> bool:
        """Whether inputs are rounded with scales fixed in advance."""
        return self.format != "none" and self.granularity == "tensor"


class Override(Section, frozen=True):
    """Other settings for the matrices that `match` (exact names or glob patterns) names; the last override wins.

    `weights` and `activations` hold only what differs from those sections.
    """

    match: Strings
    weights: dict[str, Any] = {}
    activations: dict[str, Any] = {}

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.match or not (self.weights or self.activations):
            found = "no match" if not self.match else "neither weights nor activations"
            raise misfit(
                "",
                expected="match, and weights or activations",
                found=found,
                fix="say which matrices, and what of them",
            )
        for name, given, section in (
            ("weights", self.weights, Weights),
            ("activations", self.activations, Activations),
        ):
            known = set(section.model_fields) - {"skip"}
            if "skip" in given:
                fix = 'leave matrices out with format = "none"'
                raise misfit(f"{name}.skip", expected="skip in the section alone", found="it in an override", fix=fix)
            if unknown := sorted(set(given) - known):
                raise Misfit(*(unknown_key(f"{name}.{key}", known) for key in unknown))
        return self


class Rotation(Section, frozen=True):
    """Which activations lie in a basis where no channel is large: an identity before rounding.

    `stream`: the residual stream, and `values`: what attention mixes, both folded into the weights but for two
    products at the model's ends. `feed_forward`: the input of its last product, rotated as the graph runs.
    """

    stream: bool = False
    values: bool = False
    feed_forward: bool = False

    @property
    def is_on(self) -> bool:
        """Whether anything is rotated."""
        return self.stream or self.values or self.feed_forward


def _alpha(value: Any) -> float | str:
    if value == "search":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)  # or pydantic warns of a whole number whenever it writes the recipe
    raise misfit("", expected='a number from 0 to 1, or "search"', found=shown(value), fix="0.5 is a good first choice")


class Smoothing(Section, frozen=True):
    """Channels made smaller in the activations and larger in the weights before anything is rounded.

    `smoothquant` goes by the largest activation of a channel, `awq` by the mean; `alpha` by how much, or `search`:
    for each input the one whose products err least on a text once both sides are rounded. `keys`: what
    the cache holds of K, made larger in the queries; it needs no algorithm.
    """

    algorithm: Literal["none", "smoothquant", "awq"] = "none"
    alpha: Annotated[float | Literal["search"], pydantic.PlainValidator(_alpha)] = 0.5
    keys: bool = False

    @pydantic.model_validator(mode="after")
    def _alpha_is_used(self) -> Self:
        if self.algorithm == "none" and self.alpha == "search":
            raise misfit(
                "alpha",
                expected="an algorithm to search it for",
                found=".algorithm none",
                fix="set .algorithm to smoothquant or awq, or .alpha to a number",
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether anything is divided."""
        return self.algorithm != "none" or self.keys


class KVCache(Section, frozen=True):
    """How the cache is stored, per layer, for K and V apart.

    `head`, `tensor`: one static scale per KV head, or for all of them, from calibration. `token`: a dynamic
    scale of every token and KV head, kept in the cache. `scale`: what a static one is made of, the largest value, a
    `percentile` of all sizes, or the clip with the least squared error. `skip` names the attention of layers whose
    cache stays in the compute type, exactly or as glob patterns over `model.layers.{i}.self_attn`.
    """

    format: Literal["none", "int8", "fp8_e4m3"] = "none"
    granularity: Literal["head", "tensor", "token"] = "head"
    scale: Literal["amax", "percentile", "mse"] = "amax"
    percentile: float = pydantic.Field(default=99.9, gt=0, le=100, allow_inf_nan=False)
    skip: Strings = ()

    @pydantic.model_validator(mode="after")
    def _scale_is_static(self) -> Self:
        if self.granularity == "token" and self.scale != "amax":
            raise misfit(
                "scale",
                expected="amax with .granularity token: a token's own scale is of its largest value",
                found=self.scale,
                fix="set .scale to amax, or .granularity to head",
            )
        if self.scale != "percentile" and self.percentile != type(self).model_fields["percentile"].default:
            raise misfit(
                "percentile",
                expected=".scale percentile",
                found=f"{self.percentile} with .scale {self.scale}",
                fix="set .scale to percentile, or leave .percentile out",
            )
        return self

    @property
    def is_static(self) -> bool:
        """Whether its scales are measured on text."""
        return self.format != "none" and self.granularity != "token"


class Calibration(Section, frozen=True):
    """Which text the statistics come from: `samples` blocks of `seq_len` tokens.

    `chat`: the lines are conversations, laid out by the tokenizer's chat template; a "text" is what a user says.
    `inputs`: what products see of it, in the float model, or in the model as quantized up to there.
    """

    data: str = "calib_data/calibration.jsonl"
    chat: bool = False
    samples: int = pydantic.Field(default=32, ge=1)
    seq_len: int = pydantic.Field(default=512, ge=2)
    batch: int = pydantic.Field(default=2, ge=1)
    seed: int = pydantic.Field(default=0, ge=0)
    inputs: Literal["float", "quantized"] = "float"


class Range(Section, frozen=True):
    """A dynamic dimension of an engine: min <= opt <= max."""

    min: int = pydantic.Field(default=1, ge=1)
    opt: int = 1
    max: int = 1

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min <= self.opt <= self.max:
            found = f"min {self.min}, opt {self.opt}, max {self.max}"
            raise misfit("", expected="min <= opt <= max", found=found, fix="set all three, in this order")
        return self


class Engine(Section, frozen=True):
    """What the engine is compiled by and for.

    `attention`: `plugin` is dtool's own kernels over a cache of any format; `native` is TensorRT's, over
    a cache in the compute type. `layout`: prefill and decode as two engines (`separate`), or as two
    profiles of one engine, which holds the weights once (`shared`). `memory_limit_mb` bounds the
    builder's workspace; `weight_streaming_budget_mb` is how much of the weights stays on the GPU;
    `strip_weights` leaves them out of the plans, to be filled in from the weights file on loading.
    Without a `prompt_len` prompts are at most as long as the cache.
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

    @pydantic.model_validator(mode="before")
    @classmethod
    def _default_prompts_fit_the_cache(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "prompt_len" in values:
            return values
        default, capacity = cls.model_fields["prompt_len"].default, values.get("kv_capacity")
        if type(capacity) is not int or not 2 <= capacity < default.max:
            return values
        return values | {"prompt_len": Range(min=1, opt=min(default.opt, capacity), max=capacity)}

    @pydantic.model_validator(mode="after")
    def _budget_has_a_stream(self) -> Self:
        if self.weight_streaming_budget_mb is not None and not self.weight_streaming:
            raise misfit(
                "weight_streaming_budget_mb",
                expected=".weight_streaming true",
                found=".weight_streaming false",
                fix="set .weight_streaming to true, or leave the budget out",
            )
        return self


Bound = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


def _logit_bound(value: Any) -> float | str:
    if value == "rounding":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise misfit(
        "", expected='a number from 0, or "rounding"', found=shown(value), fix='"rounding" fits any model in float'
    )


class Gates(Section, frozen=True):
    """Bounds of one comparison; None is not gated. KL in nats, over positions.

    `top1_agreement` lies below 1: no sample shows that all positions agree; equality is a gate on max_abs_logit.
    `max_abs_logit` bounds every logit that was seen; "rounding" is the bound that the depth, the width and the
    compute type of the model explain (`numerics.logit_tolerance`). `layer_error_median` (fake_quant alone) bounds
    the relative error of each layer fed the candidate's own input: the test of an implementation whose
    activations or cache are rounded.
    """

    kl_mean: Bound | None = None
    kl_p99: Bound | None = None
    top1_agreement: Annotated[float, pydantic.Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    max_abs_logit: Annotated[float | Literal["rounding"], pydantic.PlainValidator(_logit_bound)] | None = None
    layer_error_median: Bound | None = None


class Parity(Section, frozen=True):
    """Which text the proof runs over, and the gates against each reference.

    The proof begins with `blocks` rows of text. While a gate is undecided at the `confidence`, it doubles them, up to
    `max_blocks`.
    """

    data: str = "calib_data/evaluation.jsonl"
    blocks: int = pydantic.Field(default=8, ge=1)
    max_blocks: int = pydantic.Field(default=64, ge=1)
    confidence: float = pydantic.Field(default=0.95, ge=0.5, lt=1, allow_inf_nan=False)
    seq_len: int = pydantic.Field(default=256, ge=8)
    batch: int = pydantic.Field(default=3, ge=1)
    decode_steps: int = pydantic.Field(default=32, ge=1)
    eager: Gates = Gates()
    fake_quant: Gates = Gates()
    self_consistency: Gates = Gates()

    @property
    def looks(self) -> int:
        """How often a proof may look at its gates: with `blocks` rows, twice as many, and so on to `max_blocks`."""
        return max(1, (self.max_blocks // self.blocks).bit_length())


class Bench(Section, frozen=True):
    """What is timed: each prompt length is followed by `new_tokens` decode steps."""

    prompt_lens: Annotated[tuple[int, ...], pydantic.Field(strict=False)] = (32, 256)
    new_tokens: int = pydantic.Field(default=32, ge=2)
    batch: int = pydantic.Field(default=1, ge=1)
    repeats: int = pydantic.Field(default=5, ge=1)
    warmup: int = pydantic.Field(default=1, ge=0)
    threads: int = pydantic.Field(default=0, ge=0)
