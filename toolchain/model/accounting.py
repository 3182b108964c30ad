"""What a model costs, counted from its config alone: parameters, bytes, and the work of prefill and decode.

    product      2 FLOPs per element of a matrix and token; the head once a sequence; a looked-up row none
    attention    4 H D FLOPs per layer, token and token it sees: q k^T and p v, 2 H D each (arXiv 2001.08361, 2.1)
    experts      k of n run for a token; m tokens that choose alike read n (1 - (1 - k/n)^m) of them
    bytes moved  every weight once a step (of a table the rows looked up), and the cache read and written
    training     16 bytes per parameter: float16 weights and gradients, float32 weights and both Adam
                 moments (ZeRO, arXiv 1910.02054, 3.1)

Left out: softmax, norms, RoPE and the activations' bytes, most of which fused kernels hide. A cache here
is linear: a window saves reading, not memory. `roofline` turns the work into times.
Parameters come from `parameter_shapes`, which the decoder itself is held to, so every count is exact.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolchain.errors import DtoolError, did_you_mean
from toolchain.formats import FORMATS
from toolchain.model.caches import CacheFormat, cache_format_named, name_caches
from toolchain.model.config import DecoderConfig
from toolchain.model.parameters import EMBEDDING, POSITIONS, parameter_shapes

DEFAULT_CONTEXT = 4096
TRAINING_BYTES_PER_PARAMETER = 16
SCALE_BYTES = FORMATS["float32"].bytes
CACHE_FORMATS = ("float32", "float16", "bfloat16", "int8", "fp8_e4m3", "int8_token", "fp8_e4m3_token")
_COMPONENT_OF_PART = {
    "qkv_proj": "attention_qkv",
    "o_proj": "attention_output",
    "gate": "router",
    "shared_expert_gate": "router",
    "experts": "experts",
    "shared_expert": "shared_expert",
    "mlp": "feed_forward",
    "lm_head": "head",
}
"""The first of these that is a part of a parameter's name tells its component."""
COMPONENTS = ("embedding", "positions", *dict.fromkeys(_COMPONENT_OF_PART.values()), "norms")
QUANTIZED = ("attention_qkv", "attention_output", "experts", "shared_expert", "feed_forward")
"""Components whose matrices become codes; the rest, and every bias, stays in float, as recipes have it by default."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored and multiplied.

    `bits` of a code; `group`: codes that share a float32 scale, 0 for a whole channel, None for no scale;
    `other`: the format of what is not quantized; `products`: whose rate the products of codes run at, the
    fastest the format allows (8-bit activations too), so that no time is more than a lower bound.
    """

    bits: int
    group: int | None
    other: str
    products: str

    def matrix_bytes(self, rows: int, width: int) -> int:
        """Bytes of a matrix and its scales; one that no group cuts stays in float, as recipes must leave it."""
        group = width if self.group == 0 else _legal_group(width, self.group or width)
        if self.group is not None and group is None:
            return rows * width * FORMATS[self.other].bytes
        scales = rows * (width // group) if self.group is not None and group else 0
        return rows * width * self.bits // 8 + scales * SCALE_BYTES


def _legal_group(width: int, asked: int) -> int | None:
    """The group size `quantize` takes: the largest of 128, 64, 32 up to `asked` that cuts the inputs in two or more."""
    return next((g for g in (128, 64, 32) if g <= asked and g < width and width % g == 0), None)


WEIGHT_FORMATS = {
    "float32": WeightFormat(32, None, "float32", "float16"),
    "float16": WeightFormat(16, None, "float16", "float16"),
    "bfloat16": WeightFormat(16, None, "bfloat16", "float16"),
    "int8": WeightFormat(8, 0, "float16", "int8"),
    "fp8_e4m3": WeightFormat(8, 0, "float16", "fp8_e4m3"),
    "int4_g128": WeightFormat(4, 128, "float16", "float16"),
    "int4_g64": WeightFormat(4, 64, "float16", "float16"),
    "int4_g32": WeightFormat(4, 32, "float16", "float16"),
}
"""float32 has no rate of its own in `gpus.toml`: at float16's its times are lower bounds all the same."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is served: `batch` sequences of `context_tokens` tokens, weights and cache in these formats.

    `cache` names what `layer_caches` says of every layer. `stored`: bytes of every component as an artifact has them,
    where `weights` is its format; head and embedding may be codes there, and some matrices in float.
    """

    context_tokens: int
    batch: int
    weights: str
    layer_caches: tuple[CacheFormat, ...]
    stored: Mapping[str, int] | None = None

    @property
    def cache(self) -> str:
        """The caches in a few words."""
        return name_caches(self.layer_caches)

    def kv_bytes_per_token(self, config: DecoderConfig) -> int:
        """Cache bytes of one token of one sequence in all layers."""
        return sum(cache.token_bytes(config.num_key_value_heads, config.head_dim) for cache in self.layer_caches)

    def weight_bytes(self, config: DecoderConfig) -> dict[str, int]:
        """Bytes of every component's weights: those stored, or what the format makes of the config."""
        return weight_bytes(config, self.weights) if self.stored is None else dict(self.stored)

    def document(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "context_tokens": self.context_tokens,
            "batch": self.batch,
            "weights": self.weights,
            "cache": self.cache,
        }

    @property
    def weight_format(self) -> WeightFormat:
        """The format called `weights`."""
        return WEIGHT_FORMATS[self.weights]


def make_setting(
    config: DecoderConfig,
    context: int | None = None,
    batch: int = 1,
    weights: str | None = None,
    cache: str | None = None,
    *,
    layer_caches: Sequence[CacheFormat] = (),
    stored: Mapping[str, int] | None = None,
) -> Setting:
    """A setting this model can be served in, None being the default: 4096 tokens or all it has, float16.

    `layer_caches`: those of an artifact, which hold unless `cache` asks for another. `stored`: see `Setting`.

    Raises DtoolError for an unknown format and for more tokens than the model has positions for.
    """
    context = min(DEFAULT_CONTEXT, config.context_len) if context is None else context
    if not 1 <= context <= config.context_len:
        raise DtoolError(
            f"a context of {context} tokens cannot be served",
            expected=f"1 to {config.context_len}, the model's positions",
            found=str(context),
            fix="give a smaller --context",
        )
    asked, weights, cache = cache is not None, weights or "float16", cache or "float16"
    for kind, name, known in (("weight", weights, tuple(WEIGHT_FORMATS)), ("cache", cache, CACHE_FORMATS)):
        if name not in known:
            expected, fix = f"one of: {', '.join(known)}", did_you_mean(name, known)
            raise DtoolError(f"unknown {kind} format {name!r}", expected=expected, found=name, fix=fix)
    alike = (cache_format_named(cache),) * config.num_hidden_layers
    return Setting(context, batch, weights, alike if asked or not layer_caches else tuple(layer_caches), stored)


def component_of(name: str) -> str:
    """The component a parameter belongs to, by its name."""
    if name in {EMBEDDING, POSITIONS}:
        return "embedding" if name == EMBEDDING else "positions"
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norms"
    return next(component for part, component in _COMPONENT_OF_PART.items() if part in parts)


def stored_bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of every component of stored tensors, by name; scales count with their matrix, what has none as norms."""
    found = dict.fromkeys(COMPONENTS, 0)
    for name, size in sizes.items():
        matrix = f"{name.rpartition('.')[0]}.weight"
        parts = {part for part in matrix.split(".") if part in _COMPONENT_OF_PART}
        found[component_of(matrix) if parts or matrix in (EMBEDDING, POSITIONS) else "norms"] += size
    return found


def count_parameters(config: DecoderConfig) -> dict[str, int]:
    """Parameters of every component, biases with their matrix; a tied head is counted as the embedding."""
    counts = dict.fromkeys(COMPONENTS, 0)
    for name, shape in parameter_shapes(config).items():
        counts[component_of(name)] += math.prod(shape)
    return counts


def count_active(config: DecoderConfig) -> dict[str, int]:
    """Parameters that one token uses: of n experts those of k."""
    counts = count_parameters(config)
    if config.num_experts:
        counts["experts"] = counts["experts"] * config.num_experts_per_tok // config.num_experts
    return counts


def weight_bytes(config: DecoderConfig, weights: str) -> dict[str, int]:
    """Bytes of every component's weights in a format, scales included."""
    fmt, sizes = WEIGHT_FORMATS[weights], dict.fromkeys(COMPONENTS, 0)
    for name, shape in parameter_shapes(config).items():
        component = component_of(name)
        codes = component in QUANTIZED and len(shape) == 2
        sizes[component] += fmt.matrix_bytes(*shape) if codes else math.prod(shape) * FORMATS[fmt.other].bytes
    return sizes


def kv_bytes_per_token(config: DecoderConfig, cache: str) -> int:
    """Cache bytes of one token of one sequence: 2 L K D elements, and scales where each token has some."""
    one = cache_format_named(cache).token_bytes(config.num_key_value_heads, config.head_dim)
    return config.num_hidden_layers * one


def training_bytes(config: DecoderConfig) -> int:
    """Memory of mixed-precision training with Adam, activations left out."""
    return TRAINING_BYTES_PER_PARAMETER * sum(count_parameters(config).values())


@dataclass(frozen=True, slots=True)
class Work:
    """One step of the whole batch.

    `product_flops` of the matrices that are codes run at their format's rate; `float_flops` of the head,
    the router and attention at float16's.
    """

    product_flops: int
    float_flops: int
    weight_bytes: int
    kv_bytes: int

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return self.product_flops + self.float_flops

    @property
    def bytes(self) -> int:
        """All bytes moved from and to the GPU's memory."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes

    def document(self) -> dict[str, Any]:
        """JSON types."""
        totals = {"flops": self.flops, "bytes": self.bytes, "intensity_flops_per_byte": self.intensity}
        return totals | asdict(self)


def prefill_work(config: DecoderConfig, setting: Setting) -> Work:
    """A prompt of `context_tokens` tokens in every sequence, from an empty cache; only the last tokens reach the head.

    Token t of a layer with window w sees min(t, w) tokens. The cache is written once and read once.
    """
    tokens = setting.context_tokens
    seen = sum(_prompt_pairs(tokens, config.layer(i).window) for i in range(config.num_hidden_layers))
    return _work(config, setting, tokens, seen, [2 * tokens] * config.num_hidden_layers)


def decode_work(config: DecoderConfig, setting: Setting) -> Work:
    """One more token in every sequence, number `context_tokens` = t: it sees min(t, w) tokens, itself among them."""
    seen = [_seen(setting.context_tokens, config.layer(i).window) for i in range(config.num_hidden_layers)]
    return _work(config, setting, 1, sum(seen), [count + 1 for count in seen])


def _seen(token: int, window: int) -> int:
    return min(token, window) if window else token


def _prompt_pairs(tokens: int, window: int) -> int:
    """The sum of min(t, w) over t = 1..T: a triangle, and behind it a band of the window's width."""
    ramp = _seen(tokens, window)
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * ramp


def _work(config: DecoderConfig, setting: Setting, tokens: int, seen: int, moved: Sequence[int]) -> Work:
    """A step of `tokens` new tokens a sequence.

    `seen`: query-key pairs of a sequence in all layers, `moved`: cache entries read and written in each layer.
    """
    elements: Counter[str] = Counter()
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 2:
            elements[component_of(name)] += math.prod(shape)
    if config.num_experts:
        elements["experts"] = elements["experts"] * config.num_experts_per_tok // config.num_experts
    products = sum(elements[component] for component in QUANTIZED)
    head = config.vocab_size * config.hidden_size
    attention = 4 * config.num_attention_heads * config.head_dim * seen
    batch = setting.batch
    sizes = [cache.token_bytes(config.num_key_value_heads, config.head_dim) for cache in setting.layer_caches]
    return Work(
        product_flops=2 * batch * tokens * products,
        float_flops=batch * (2 * tokens * elements["router"] + 2 * head + attention),
        weight_bytes=_weights_read(config, setting, batch * tokens),
        kv_bytes=batch * sum(count * size for count, size in zip(moved, sizes, strict=True)),
    )


def _weights_read(config: DecoderConfig, setting: Setting, tokens: int) -> int:
    """Weight bytes a step of `tokens` tokens reads: of the tables the rows, of the experts the expected part."""
    sizes, shapes = setting.weight_bytes(config), parameter_shapes(config)
    tables = {"embedding": EMBEDDING, "positions": POSITIONS}
    row = sum(sizes[component] // shapes[name][0] for component, name in tables.items() if name in shapes)
    if not config.tie_word_embeddings:  # a tied table is read whole, as the head
        sizes["embedding"] = 0
    sizes["positions"] = 0
    experts = sizes.pop("experts") * expected_experts(config, tokens) / (config.num_experts or 1)
    return sum(sizes.values()) + tokens * row + round(experts)


def expected_experts(config: DecoderConfig, tokens: int) -> float:
    """Distinct experts of a layer that `tokens` tokens choose, each k of n and all alike: n (1 - (1 - k/n)^m)."""
    count = config.num_experts
    return count * (1 - (1 - config.num_experts_per_tok / count) ** tokens) if count else 0.0
