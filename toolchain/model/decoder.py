"""The reference decoder: one module for every supported model, steered by `DecoderConfig`.

    h = E[ids];  per layer:  h += O(attention(QKV(norm(h))));  h += down(act(gate(norm(h))) * up(norm(h)))
    logits = W norm(h)

Parameters carry the Hugging Face names, so loading needs no map; but q, k and v, and gate and up, which
read one input, are one matrix each (`MERGED`), so that every runtime makes one product of them. The
cache is written in place.

Legend: B batch, T new tokens, E hidden, F feed-forward, V vocab, C capacity, K KV heads, D head dim.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from toolchain.formats import format_named
from toolchain.model.config import DecoderConfig
from toolchain.model.rope import rope_tables
from toolchain.ops.attention import AttentionSpec, attend_in_place, fused_attention

LayerCache = tuple[torch.Tensor, torch.Tensor]
HALF_PRODUCT_ROWS = 8


def attention_spec(config: DecoderConfig, cache_format: str = "none") -> AttentionSpec:
    """The attributes of every attention node of this model."""
    return AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=1.0 / math.sqrt(config.head_dim),
        rotary_dim=config.head_dim,
        cache_format=cache_format,
    )


class Linear(nn.Linear):
    """A matrix whose values always come from a file, so none are drawn."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """The product; in half precision on the CPU with float32 sums, as GPUs form them.

        From a few rows on, torch's own half products are five times slower there.
        """
        rows = input.numel() // input.shape[-1]
        if input.dtype != torch.float16 or input.device.type != "cpu" or rows < HALF_PRODUCT_ROWS:
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias).to(input.dtype)


class Embedding(nn.Embedding):
    """A table whose values always come from a file, so none are drawn."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w, computed in float32 (arXiv 1910.07467 eq. 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x_BTE.float(), (x_BTE.shape[-1],), self.weight.float(), self.eps)
        return normed.to(x_BTE.dtype)


class Attention(nn.Module):
    """Projections around the one attention op."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.spec = attention_spec(config)
        hidden, bias = config.hidden_size, config.attention_bias
        self.qkv_proj = Linear(hidden, self.spec.packed_width, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * config.head_dim, hidden, bias=bias)
        self.scales_K: LayerCache | None = None

    def forward(
        self, x_BTE: torch.Tensor, rope: LayerCache, past_lengths_B: torch.Tensor, cache: LayerCache
    ) -> tuple[torch.Tensor, LayerCache]:
        inputs = (self.qkv_proj(x_BTE), *rope, past_lengths_B, *cache)
        if torch.compiler.is_exporting():
            out_BTE, *new_cache = fused_attention(*inputs, self.spec.num_heads, self.spec.num_kv_heads)
            return self.o_proj(out_BTE), (new_cache[0], new_cache[1])
        out_BTE = attend_in_place(*inputs, self.spec, scales_K=self.scales_K)
        return self.o_proj(out_BTE), cache

    def quantize_cache(self, scales_K: LayerCache, cache_format: str) -> None:
        """Keep codes of `cache_format` in the cache from now on, with these float32 scales [K] of K and V."""
        self.scales_K, self.spec = scales_K, replace(self.spec, cache_format=cache_format)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202 eq. 6)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        gate_BTF, up_BTF = self.gate_up_proj(x_BTE).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x_BTE: torch.Tensor, rope: LayerCache, past_lengths_B: torch.Tensor, cache: LayerCache
    ) -> tuple[torch.Tensor, LayerCache]:
        attended_BTE, cache = self.self_attn(self.input_layernorm(x_BTE), rope, past_lengths_B, cache)
        x_BTE = x_BTE + attended_BTE
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE)), cache


class Trunk(nn.Module):
    """Embedding, layers and last norm: what the checkpoints call `model`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """The whole model. `rope` holds the cosine and sine tables [positions, head_dim / 2]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rope: LayerCache = rope_tables(config)

    def forward(
        self, input_ids_BT: torch.Tensor, past_lengths_B: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """float32 logits [B, T, V]; the new keys and values are written into `caches`."""
        return self.logits(self.hidden_states(input_ids_BT, past_lengths_B, caches))

    def hidden_states(
        self, input_ids_BT: torch.Tensor, past_lengths_B: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """The residual stream [B, T, E] after the last layer."""
        x_BTE = self.model.embed_tokens(input_ids_BT)
        for block, cache in zip(self.model.layers, caches, strict=True):
            x_BTE, _ = block(x_BTE, self.rope, past_lengths_B, cache)
        return x_BTE

    def logits(self, x_BTE: torch.Tensor) -> torch.Tensor:
        """float32 logits of the rows given."""
        return self.lm_head(self.model.norm(x_BTE)).float()

    def new_caches(self, batch: int, capacity: int, cache_format: str = "none") -> list[LayerCache]:
        """Zeroed caches [B, K, C, D] for every layer, in the compute dtype or the cache's format."""
        shape = (batch, self.config.num_key_value_heads, capacity, self.config.head_dim)
        dtype = self.model.norm.weight.dtype if cache_format == "none" else format_named(cache_format).torch_dtype
        options = {"dtype": dtype, "device": self.model.norm.weight.device}
        return [(torch.zeros(shape, **options), torch.zeros(shape, **options)) for _ in self.model.layers]
