"""The reference decoder: one module for every supported model, steered by `DecoderConfig`.

    x = E[ids] * embedding_multiplier (+ position table)
    a layer       x += r * attention(norm(x));   x += r * mlp(norm(x))            pre-norm
                  x += r * norm(attention(x));   x += r * norm(mlp(x))            output norm; sandwich has both
                  x = norm(x + attention(x));    x = norm(x + mlp(x))             stream
                  x += r * (attention(norm(x)) + mlp(norm(x)))                    parallel
    logits = cap(W norm(x) * logit_multiplier)

Parameters carry the names of Hugging Face's Llama (with those of GLM-4 for the norms Llama lacks), so
most checkpoints need no map; but q, k and v, and gate and up, which read one input, are one matrix
each (`MERGED`), so that every runtime makes one product of them. The cache is written in place.

Legend: B batch, T new tokens, E hidden, F feed-forward, V vocab, C capacity, H query heads, K KV heads,
D head dim, N packed width of q, k and v, k experts of a token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from toolchain.formats import format_named, format_of
from toolchain.model.caches import SCALE_PARTS, CacheFormat
from toolchain.model.config import DecoderConfig
from toolchain.model.positions import SINUSOIDAL, position_tables, rope_table_names
from toolchain.model.quantized import InputShape
from toolchain.ops.attention import AttentionSpec, attend_in_place, fused_attention
from toolchain.ops.experts import ACTIVATIONS, ExpertsSpec, experts, mix_experts

LayerCache = tuple[torch.Tensor, ...]
"""Key and value cache [B, K, C, D], and where tokens have scales of their own those of both, float32 [B, K, C]."""
Pair = tuple[torch.Tensor, torch.Tensor]
HALF_PRODUCT_ROWS = 8


def attention_spec(config: DecoderConfig, layer: int, cache: CacheFormat | None = None) -> AttentionSpec:
    """The attributes of one layer's attention node; without `cache` it keeps values."""
    return AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.score_scale,
        rotary_dim=config.rotary_dim,
        cache_format=cache.dtype if cache is not None and cache.quantized else "none",
        interleaved=config.rope_interleaved,
        softcap=config.attention_softcap,
        window=config.layer(layer).window,
        qk_norm_eps=config.norm_eps if config.qk_norm == "head" else 0.0,
        token_scales=cache is not None and cache.token_scales,
    )


def experts_spec(config: DecoderConfig) -> ExpertsSpec:
    """The sizes and the activation of this model's mixtures."""
    return ExpertsSpec(config.num_experts, config.hidden_size, config.moe_intermediate_size, config.hidden_act)


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


class Norm(nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * w (arXiv 1910.07467 eq. 4), or LayerNorm (arXiv 1607.06450 eq. 3).

    Computed in float32. The weight may be missing, or stored as its difference from one.
    """

    def __init__(self, config: DecoderConfig, size: int | None = None, *, bias: bool | None = None) -> None:
        super().__init__()
        size = size or config.hidden_size
        self.kind, self.eps, self.offset = config.norm, config.norm_eps, float(config.norm_unit_offset)
        self.weight = nn.Parameter(torch.empty(size)) if config.norm_weight else None
        self.bias = nn.Parameter(torch.empty(size)) if (config.norm_bias if bias is None else bias) else None

    def multiplier(self) -> torch.Tensor | None:
        """What the normed values are multiplied by, in the weight's type."""
        return self.weight + self.offset if self.weight is not None and self.offset else self.weight

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        width = (x_BTE.shape[-1],)
        weight = None if self.weight is None else self.weight.float()
        if weight is not None and self.offset:
            weight = weight + self.offset
        if self.kind == "rms":
            return F.rms_norm(x_BTE.float(), width, weight, self.eps).to(x_BTE.dtype)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x_BTE.float(), width, weight, bias, self.eps).to(x_BTE.dtype)


class HeadLayerNorm(nn.Module):
    """LayerNorm of every head on its own, without bias; the weights [heads * D] of the heads follow one another."""

    def __init__(self, heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads * dim))
        self.heads, self.dim, self.eps = heads, dim, eps

    def forward(self, x_BTN: torch.Tensor) -> torch.Tensor:
        heads_BTHD = x_BTN.float().unflatten(-1, (self.heads, self.dim))
        normed_BTN = F.layer_norm(heads_BTHD, (self.dim,), eps=self.eps).flatten(-2)
        return (normed_BTN * self.weight.float()).to(x_BTN.dtype)


class Attention(nn.Module):
    """Projections around the one attention op, which rotates and norms per head; wider norms come before it."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.spec = attention_spec(config, layer)
        self.clip, self.sizes, self.qk_norm = config.qkv_clip, config.qkv_sizes, config.qk_norm
        self.qkv_proj = Linear(config.hidden_size, self.spec.packed_width, bias=config.qkv_bias)
        self.o_proj = Linear(self.sizes[0], config.hidden_size, bias=config.o_bias)
        if config.qk_norm == "head_layer":
            heads = (config.num_attention_heads, config.num_key_value_heads)
            self.q_norm, self.k_norm = (HeadLayerNorm(n, config.head_dim, config.norm_eps) for n in heads)
        elif config.qk_norm != "none":
            widths = self.sizes[:2] if config.qk_norm == "width" else (config.head_dim,) * 2
            self.q_norm, self.k_norm = (Norm(config, width, bias=False) for width in widths)
        self.scales_K: Pair | None = None

    def forward(
        self, x_BTE: torch.Tensor, rope: Pair, past_lengths_B: torch.Tensor, cache: LayerCache
    ) -> tuple[torch.Tensor, LayerCache]:
        key_cache, value_cache, *token_scales = cache
        inputs = (self.packed(x_BTE), *rope, past_lengths_B, key_cache, value_cache)
        norms: list[Any] = [self.q_norm, self.k_norm] if self.qk_norm == "head" else []
        norms_D: Any = tuple(norm.multiplier() for norm in norms) or None
        if torch.compiler.is_exporting():
            heads = (self.spec.num_heads, self.spec.num_kv_heads)
            out_BTE, *new_cache = fused_attention(*inputs, list(norms_D or ()), *heads)
            return self.o_proj(out_BTE), (new_cache[0], new_cache[1])
        scales: Any = tuple(token_scales) if self.spec.token_scales else self.scales_K
        out_BTE = attend_in_place(*inputs, self.spec, scales=scales, norms_D=norms_D)
        return self.o_proj(out_BTE), cache

    def packed(self, x_BTE: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [B, T, N], normed over their width and clipped where the model asks."""
        qkv_BTN = self.qkv_proj(x_BTE)
        if self.qk_norm in {"width", "head_layer"}:
            q, k = self.sizes[0], self.sizes[0] + self.sizes[1]
            parts = self.q_norm(qkv_BTN[..., :q]), self.k_norm(qkv_BTN[..., q:k]), qkv_BTN[..., k:]
            qkv_BTN = torch.cat(parts, dim=-1)
        return qkv_BTN.clamp(-self.clip, self.clip) if self.clip else qkv_BTN

    def quantize_cache(self, cache_format: str, scales_K: Pair | None = None) -> None:
        """Keep codes of `cache_format` in the cache from now on.

        With float32 `scales_K` [K] of K and V these are static; without, every token gets scales of its own.
        """
        self.scales_K = scales_K
        self.spec = replace(self.spec, cache_format=cache_format, token_scales=scales_K is None)


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)) (arXiv 2002.05202 eq. 6), or down(act(up(x)))."""

    def __init__(self, config: DecoderConfig, inner: int | None = None) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, inner or config.intermediate_size, config.mlp_bias
        self.act, self.gated = ACTIVATIONS[config.hidden_act], config.gated_mlp
        if self.gated:
            self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias)
        else:
            self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.shape: InputShape | None = None

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        if self.gated:
            gate_BTF, up_BTF = self.gate_up_proj(x_BTE).chunk(2, dim=-1)
            inner_BTF = self.act(gate_BTF) * up_BTF
        else:
            inner_BTF = self.act(self.up_proj(x_BTE))
        if self.shape is None:
            return self.down_proj(inner_BTF)
        inner_BTF, added_BTE = self.shape(inner_BTF)
        down_BTE = self.down_proj(inner_BTF)
        return down_BTE if added_BTE is None else down_BTE + added_BTE


class ExpertMatrices(nn.Module):
    """The matrices of all experts, one below the other; see `ops.experts`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = Linear(hidden, count * 2 * inner, bias=False)
        self.down_proj = Linear(inner, count * hidden, bias=False)


class MixtureOfExperts(nn.Module):
    """Each token goes to its top k experts, weighted by their softmax (arXiv 2401.04088), and to the shared one."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.spec, self.top_k, self.normed = experts_spec(config), config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = ExpertMatrices(config)
        self.shared = config.shared_expert_intermediate_size
        if self.shared:
            self.shared_expert = FeedForward(config, self.shared)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        weights_BTk, ids_BTk = self.gate(x_BTE).float().softmax(-1).topk(self.top_k, dim=-1)
        if self.normed:
            weights_BTk = weights_BTk / weights_BTk.sum(-1, keepdim=True)
        weights_BTk = weights_BTk.to(x_BTE.dtype)
        matrices = self.experts.gate_up_proj.weight, self.experts.down_proj.weight
        if torch.compiler.is_exporting():
            y_BTE = experts(x_BTE, weights_BTk, ids_BTk, *matrices)
        else:
            y_BTE = mix_experts(x_BTE, weights_BTk, ids_BTk, *matrices, self.spec)
        if not self.shared:
            return y_BTE
        # a matrix of one row as a sum: kernels for one column add in an order that depends on the batch
        share_BT1 = (x_BTE * self.shared_expert_gate.weight).sum(-1, keepdim=True).sigmoid()
        return y_BTE + share_BT1 * self.shared_expert(x_BTE)


class Block(nn.Module):
    """One layer: attention, feed-forward, their norms, and how they join the stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        placement, parallel = config.norm_placement, config.parallel_residual
        self.stream, self.parallel, self.scale = placement == "stream", parallel, config.residual_multiplier
        self.shares_norm = parallel and config.parallel_norms == 1
        before, after = placement != "output", placement in {"output", "sandwich"}
        self.input_layernorm = Norm(config) if before else nn.Identity()
        self.self_attn = Attention(config, layer)
        self.post_self_attn_layernorm = Norm(config) if after else nn.Identity()
        self.post_attention_layernorm = Norm(config) if before and not self.shares_norm else nn.Identity()
        self.mlp = MixtureOfExperts(config) if config.layer(layer).experts else FeedForward(config)
        self.post_mlp_layernorm = Norm(config) if after else nn.Identity()

    def forward(
        self, x_BTE: torch.Tensor, rope: Pair, past_lengths_B: torch.Tensor, cache: LayerCache
    ) -> tuple[torch.Tensor, LayerCache]:
        read_BTE = x_BTE if self.stream else self.input_layernorm(x_BTE)
        attended_BTE, cache = self.self_attn(read_BTE, rope, past_lengths_B, cache)
        attended_BTE = self.scaled(self.post_self_attn_layernorm(attended_BTE))
        if self.parallel:
            read_BTE = read_BTE if self.shares_norm else self.post_attention_layernorm(x_BTE)
            return x_BTE + (attended_BTE + self.scaled(self.post_mlp_layernorm(self.mlp(read_BTE)))), cache
        x_BTE = x_BTE + attended_BTE
        if self.stream:
            x_BTE = self.input_layernorm(x_BTE)
            return self.post_attention_layernorm(x_BTE + self.scaled(self.mlp(x_BTE))), cache
        added_BTE = self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x_BTE)))
        return x_BTE + self.scaled(added_BTE), cache

    def scaled(self, added_BTE: torch.Tensor) -> torch.Tensor:
        """What a part adds to the stream, times the residual multiplier."""
        return added_BTE if self.scale == 1.0 else added_BTE * self.scale


class Trunk(nn.Module):
    """Embedding, layers and last norm: what the checkpoints call `model`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding == "learned":
            rows = config.max_position_embeddings + config.position_offset
            self.embed_positions = Embedding(rows, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config) if config.final_norm else nn.Identity()


class Decoder(nn.Module):
    """The whole model. `tables` holds the position tables by name (`model.positions`)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.tables = position_tables(config)
        self.rotation_EE: torch.Tensor | None = None  # the basis of the layers' stream, see quantize.rotation

    def forward(
        self, input_ids_BT: torch.Tensor, past_lengths_B: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """float32 logits [B, T, V]; the new keys and values are written into `caches`."""
        return self.logits(self.hidden_states(input_ids_BT, past_lengths_B, caches))

    def hidden_states(
        self, input_ids_BT: torch.Tensor, past_lengths_B: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """The residual stream [B, T, E] after the last layer."""
        x_BTE = self.embedded(input_ids_BT, past_lengths_B)
        for i, (block, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
            x_BTE, _ = block(x_BTE, self.layer_rope(i), past_lengths_B, cache)
        return x_BTE

    def embedded(self, input_ids_BT: torch.Tensor, past_lengths_B: torch.Tensor) -> torch.Tensor:
        """What enters the first layer [B, T, E]: embedding rows, scaled, with positions where the model adds them."""
        x_BTE = self._embedded(input_ids_BT, past_lengths_B)
        return x_BTE if self.rotation_EE is None else x_BTE @ self.rotation_EE

    def _embedded(self, input_ids_BT: torch.Tensor, past_lengths_B: torch.Tensor) -> torch.Tensor:
        config = self.config
        x_BTE = self.model.embed_tokens(input_ids_BT)
        if config.embedding_multiplier != 1.0:
            x_BTE = x_BTE * config.embedding_multiplier
        if config.position_embedding == "none":
            return x_BTE
        positions_BT = past_lengths_B[:, None] + torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
        if config.position_embedding == "learned":
            return x_BTE + self.model.embed_positions(positions_BT + config.position_offset)
        return x_BTE + F.embedding(positions_BT, self.tables[SINUSOIDAL]).to(x_BTE.dtype)

    def layer_rope(self, layer: int) -> Pair:
        """Cosine and sine tables [context_len, rotary_dim / 2] of one layer."""
        cos, sin = rope_table_names(self.config.layer(layer).rope)
        return self.tables[cos], self.tables[sin]

    def logits(self, x_BTE: torch.Tensor) -> torch.Tensor:
        """float32 logits of the rows given."""
        if self.rotation_EE is not None:
            x_BTE = x_BTE @ self.rotation_EE.mT
        logits_BTV = self.lm_head(self.model.norm(x_BTE)).float()
        if self.config.logit_multiplier != 1.0:
            logits_BTV = logits_BTV * self.config.logit_multiplier
        cap = self.config.final_logit_softcap
        return cap * torch.tanh(logits_BTV / cap) if cap else logits_BTV

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of everything that is not quantized."""
        return self.model.embed_tokens.weight.dtype

    def cache_formats(self) -> tuple[CacheFormat, ...]:
        """How each layer keeps its keys and values."""
        plain = format_of(self.model.embed_tokens.weight)
        blocks: list[Any] = list(self.model.layers)
        specs: list[AttentionSpec] = [block.self_attn.spec for block in blocks]
        return tuple(CacheFormat(s.cache_format if s.quantized else plain, s.token_scales) for s in specs)

    def new_caches(self, batch: int, capacity: int) -> list[LayerCache]:
        """Zeroed caches for every layer, in its own format; see `LayerCache`."""
        return [self.new_cache(cache, batch, capacity) for cache in self.cache_formats()]

    def new_cache(self, cache: CacheFormat, batch: int, capacity: int) -> LayerCache:
        """The zeroed cache of one layer of that format."""
        slots, device = (batch, self.config.num_key_value_heads, capacity), self.model.embed_tokens.weight.device

        def zeros(part: str) -> torch.Tensor:
            shape = slots if part in SCALE_PARTS else (*slots, self.config.head_dim)
            return torch.zeros(shape, dtype=format_named(cache.part_format(part)).torch_dtype, device=device)

        return tuple(zeros(part) for part in cache.parts)
