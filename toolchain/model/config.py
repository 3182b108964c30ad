"""What a decoder is, as data: every mechanism is a field, under its Hugging Face name."""

from typing import Literal, Self

import pydantic


class RopeScaling(pydantic.BaseModel, frozen=True, extra="forbid"):
    """How rotary frequencies are stretched beyond the trained context.

    `linear`: all frequencies divided by `factor` (position interpolation, arXiv 2306.15595).
    `llama3`: low frequencies divided, high ones kept, the band between interpolated (Llama 3.1).
    """

    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = pydantic.Field(default=1.0, gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Self:
        if self.rope_type == "llama3" and self.original_max_position_embeddings < 1:
            raise ValueError("llama3 rope scaling needs original_max_position_embeddings")
        return self


MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices with one input are stored and multiplied as one: rows of the parts, one after the other."""


class DecoderConfig(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Shape and mechanisms of one decoder-only model."""

    vocab_size: int = pydantic.Field(ge=1)
    hidden_size: int = pydantic.Field(ge=1)
    intermediate_size: int = pydantic.Field(ge=1)
    num_hidden_layers: int = pydantic.Field(ge=1)
    num_attention_heads: int = pydantic.Field(ge=1)
    num_key_value_heads: int = pydantic.Field(ge=1)
    head_dim: int = pydantic.Field(ge=2)
    max_position_embeddings: int = pydantic.Field(ge=1)
    rms_norm_eps: float = pydantic.Field(gt=0)
    rope_theta: float = pydantic.Field(gt=0)
    rope_scaling: RopeScaling = RopeScaling()
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary pairs need an even one")
        return self

    def part_sizes(self, name: str) -> tuple[int, ...] | None:
        """Rows of each part of a merged matrix, by the name of its parameter; None for a matrix of one part."""
        q, kv = (n * self.head_dim for n in (self.num_attention_heads, self.num_key_value_heads))
        sizes = {"qkv_proj": (q, kv, kv), "gate_up_proj": (self.intermediate_size,) * 2}
        return next((sizes[part] for part in name.split(".") if part in sizes), None)

    @property
    def kv_bytes_per_token_fp16(self) -> int:
        """Cache bytes of one token in fp16: 2 (K and V) * layers * kv_heads * head_dim * 2."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * 2
