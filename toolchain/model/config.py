"""What a decoder is, as data: every mechanism is a field, under its Hugging Face name where there is one."""

import math
from typing import Annotated, Any, Literal, Self

import pydantic

RopeType = Literal["default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]
RopeName = Literal["rope", "local_rope", "no_rope"]
MAX_LAYERS = 4096
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices with one input are stored and multiplied as one: rows of the parts, one after the other."""
Int = Annotated[int, pydantic.Strict()]
Real = Annotated[float, pydantic.Strict()]
Flag = Annotated[bool, pydantic.Strict()]
"""No string or bool is taken for a number, and no string or number for a bool."""


class Rope(pydantic.BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Rotary frequencies and how they are stretched beyond the trained context; see `positions`."""

    rope_theta: Real = pydantic.Field(default=10000.0, gt=0)
    rope_type: RopeType = "default"
    factor: Real = pydantic.Field(default=1.0, gt=0)
    original_max_position_embeddings: Int = 0
    attention_factor: Real | None = None
    low_freq_factor: Real = pydantic.Field(default=1.0, gt=0)
    high_freq_factor: Real = pydantic.Field(default=4.0, gt=0)
    beta_fast: Real = pydantic.Field(default=32.0, gt=0)
    beta_slow: Real = pydantic.Field(default=1.0, gt=0)
    mscale: Real | None = None
    mscale_all_dim: Real | None = None
    truncate: Flag = True
    short_factor: tuple[Real, ...] = ()
    long_factor: tuple[Real, ...] = ()

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Self:
        if self.rope_type in {"llama3", "yarn", "longrope", "dynamic"} and self.original_max_position_embeddings < 1:
            raise ValueError(f"{self.rope_type} rope scaling needs original_max_position_embeddings")
        if self.rope_type == "longrope" and not (self.short_factor and self.long_factor):
            raise ValueError("longrope rope scaling needs short_factor and long_factor")
        if self.rope_type == "longrope" and min(*self.short_factor, *self.long_factor) <= 0:
            raise ValueError("longrope rope scaling needs factors above zero")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("llama3 rope scaling needs low_freq_factor below high_freq_factor")
        if self.rope_type in {"yarn", "longrope"} and (
            self.rope_theta == 1 or self.original_max_position_embeddings == 1
        ):
            raise ValueError(f"{self.rope_type} rope scaling needs a rope_theta and a context other than 1")
        return self


class Layer(pydantic.BaseModel, frozen=True, extra="forbid"):
    """What may differ between the layers of one model."""

    window: Int = pydantic.Field(default=0, ge=0)
    """Tokens a query sees, itself among them; 0: all of them."""
    rope: RopeName = "rope"
    """Which of the model's rotations it uses."""
    experts: Flag = False
    """Whether its feed-forward is a mixture of experts."""


class DecoderConfig(pydantic.BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Shape and mechanisms of one decoder-only model."""

    vocab_size: Int = pydantic.Field(ge=1)
    hidden_size: Int = pydantic.Field(ge=1)
    intermediate_size: Int = pydantic.Field(ge=1)
    num_hidden_layers: Int = pydantic.Field(ge=1, le=MAX_LAYERS)
    layers: tuple[Layer, ...] = ()
    """One per layer; empty: all are alike."""

    # attention
    num_attention_heads: Int = pydantic.Field(ge=1)
    num_key_value_heads: Int = pydantic.Field(ge=1)
    head_dim: Int = pydantic.Field(ge=2)
    qkv_bias: Flag = False
    o_bias: Flag = False
    qkv_clip: Real = pydantic.Field(default=0.0, ge=0)
    """Queries, keys and values are clipped to +-this, after a norm over their width; 0: not."""
    qk_norm: Literal["none", "head", "head_layer", "width"] = "none"
    """RMSNorm per head with one weight for all; LayerNorm per head, a weight per head; RMSNorm over all heads."""
    attention_scale: Real = pydantic.Field(default=0.0, ge=0)
    """What scores are multiplied by; 0: 1 / sqrt(head_dim)."""
    attention_softcap: Real = pydantic.Field(default=0.0, ge=0)

    # positions
    max_position_embeddings: Int = pydantic.Field(ge=1)
    """The largest position the checkpoint is made for, plus one."""
    context_len: Int = pydantic.Field(ge=1)
    """Positions that this decoder serves; by default all that `rope` can with one set of frequencies."""
    rope: Rope = Rope()
    local_rope: Rope | None = None
    rotary_dim: Int = pydantic.Field(ge=2)
    rope_interleaved: Flag = False
    position_embedding: Literal["none", "learned", "sinusoidal"] = "none"
    position_offset: Int = pydantic.Field(default=0, ge=0)
    """Row of position 0 in the position table."""

    # norms
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: Real = pydantic.Field(gt=0)
    norm_weight: Flag = True
    norm_bias: Flag = False
    norm_unit_offset: Flag = False
    """Norms multiply by 1 + weight (Gemma)."""
    norm_placement: Literal["pre", "output", "sandwich", "stream"] = "pre"
    """Before each part, behind each part, both, or behind each sum (the first transformers)."""
    parallel_residual: Flag = False
    """Attention and feed-forward read the same stream and are added at once."""
    parallel_norms: Literal[1, 2] = 1
    """Whether the two parts of a parallel layer share one norm."""
    final_norm: Flag = True

    # feed-forward
    hidden_act: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    gated_mlp: Flag = True
    mlp_bias: Flag = False
    num_experts: Int = pydantic.Field(default=0, ge=0, le=4096)
    num_experts_per_tok: Int = pydantic.Field(default=0, ge=0)
    moe_intermediate_size: Int = pydantic.Field(default=0, ge=0)
    norm_topk_prob: Flag = False
    shared_expert_intermediate_size: Int = pydantic.Field(default=0, ge=0)

    # embedding and head
    tie_word_embeddings: Flag = False
    lm_head_bias: Flag = False
    embedding_multiplier: Real = 1.0
    residual_multiplier: Real = 1.0
    logit_multiplier: Real = 1.0
    final_logit_softcap: Real = pydantic.Field(default=0.0, ge=0)

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    bos_token_id: Int | None = None
    eos_token_ids: tuple[Int, ...] = ()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """What follows from other fields: the whole head is rotated, and every position is served."""
        if not isinstance(values, dict):
            return values
        follows = {"rotary_dim": "head_dim", "context_len": "max_position_embeddings"}
        return {new: values[old] for new, old in follows.items() if old in values} | values

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        for fault in _faults(self):
            raise ValueError(fault)
        return self

    def layer(self, index: int) -> Layer:
        """What sets layer `index` apart."""
        return self.layers[index] if self.layers else Layer()

    def rope_named(self, name: RopeName) -> Rope | None:
        """The rotation a layer names; None where nothing is rotated."""
        return {"rope": self.rope, "local_rope": self.local_rope, "no_rope": None}[name]

    @property
    def rope_names(self) -> tuple[RopeName, ...]:
        """The rotations that some layer uses, in a fixed order."""
        used = {self.layer(i).rope for i in range(self.num_hidden_layers)}
        order: tuple[RopeName, ...] = ("rope", "local_rope", "no_rope")
        return tuple(name for name in order if name in used)

    @property
    def windows(self) -> frozenset[int]:
        """The windows of all layers."""
        return frozenset(self.layer(i).window for i in range(self.num_hidden_layers))

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value parts of qkv_proj."""
        kv = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, kv, kv

    def part_sizes(self, name: str) -> tuple[int, ...] | None:
        """Rows of each part of a merged matrix, by the name of its parameter; None for a matrix of one part."""
        inner, kinds = self.intermediate_size, name.split(".")
        if "experts" in kinds:
            gates = 2 if "gate_up_proj" in kinds else 1
            rows = self.hidden_size if "down_proj" in kinds else self.moe_intermediate_size
            return (rows,) * (gates * self.num_experts)
        if "shared_expert" in kinds:
            inner = self.shared_expert_intermediate_size
        sizes = {"qkv_proj": self.qkv_sizes, "gate_up_proj": (inner, inner)}
        return next((sizes[part] for part in kinds if part in sizes), None)


def _faults(c: DecoderConfig) -> list[str]:
    """Everything about a config that contradicts itself."""
    if c.layers and len(c.layers) != c.num_hidden_layers:
        return [f"{len(c.layers)} layers are described, num_hidden_layers is {c.num_hidden_layers}"]
    rules = {
        f"num_attention_heads {c.num_attention_heads} is no multiple of num_key_value_heads {c.num_key_value_heads}": (
            c.num_attention_heads % c.num_key_value_heads
        ),
        f"head_dim {c.head_dim} is odd: rotary pairs need an even one": c.head_dim % 2,
        f"rotary_dim {c.rotary_dim} is odd or more than head_dim {c.head_dim}": (
            c.rotary_dim % 2 or c.rotary_dim > c.head_dim
        ),
        "qkv_clip comes after qk_norm, which the attention op does per head": c.qkv_clip and c.qk_norm == "head",
        "a layer uses local_rope, which is not described": c.local_rope is None and "local_rope" in c.rope_names,
        "a layer has experts, which are not described": (
            any(layer.experts for layer in c.layers) and not (c.num_experts and c.moe_intermediate_size)
        ),
        f"num_experts_per_tok {c.num_experts_per_tok} is not in 1..{c.num_experts}": (
            c.num_experts and not 1 <= c.num_experts_per_tok <= c.num_experts
        ),
        f"context_len {c.context_len} exceeds the {c.max_position_embeddings} rows of the position table": (
            c.position_embedding == "learned" and c.context_len > c.max_position_embeddings
        ),
        "longrope needs a factor for every rotary pair": any(
            len(factors) != c.rotary_dim // 2
            for rope in (c.rope, c.local_rope)
            if rope and rope.rope_type == "longrope"
            for factors in (rope.short_factor, rope.long_factor)
        ),
    }
    return [text for text, broken in rules.items() if broken]
