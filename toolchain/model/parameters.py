"""The decoder's parameters from the config alone: names, shapes and order, without torch.

The same list as `Decoder(config).named_parameters()`, which a test holds it to, so that a checkpoint is
matched, and memory and work are counted, in milliseconds and before anything is loaded.
"""

from toolchain.model.config import DecoderConfig

Shapes = dict[str, tuple[int, ...]]
EMBEDDING, POSITIONS, HEAD = "model.embed_tokens.weight", "model.embed_positions.weight", "lm_head.weight"


def parameter_shapes(config: DecoderConfig) -> Shapes:
    """Name and shape of every parameter of the decoder, in order, a tied head left out."""
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden)}
    if config.position_embedding == "learned":
        shapes[POSITIONS] = (config.max_position_embeddings + config.position_offset, hidden)
    for i in range(config.num_hidden_layers):
        for name, shape in layer_shapes(config, experts=config.layer(i).experts).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    if config.final_norm:
        shapes |= _norm(config, "model.norm")
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    if config.lm_head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def matrix_names(config: DecoderConfig) -> tuple[list[str], list[str]]:
    """Modules whose weight is a matrix: those that can be stored as codes, and those that always stay in float.

    A router's choice and a position's row are small and touch every token; weights of norms are vectors.
    """
    found = [n.removesuffix(".weight") for n, shape in parameter_shapes(config).items() if len(shape) == 2]
    found = [name for name in found if name.rpartition(".")[2] not in {"q_norm", "k_norm"}]
    kept = [name for name in found if name.rpartition(".")[2] in {"embed_positions", "gate", "shared_expert_gate"}]
    return [name for name in found if name not in kept], kept


def layer_shapes(config: DecoderConfig, *, experts: bool) -> Shapes:
    """The parameters of one layer, by their names within it."""
    placement = config.norm_placement
    shapes: Shapes = {}
    if placement != "output":
        shapes |= _norm(config, "input_layernorm")
    shapes |= _attention(config)
    if placement in {"output", "sandwich"}:
        shapes |= _norm(config, "post_self_attn_layernorm")
    if placement != "output" and not (config.parallel_residual and config.parallel_norms == 1):
        shapes |= _norm(config, "post_attention_layernorm")
    shapes |= _experts(config) if experts else _feed_forward(config, "mlp", config.intermediate_size)
    if placement in {"output", "sandwich"}:
        shapes |= _norm(config, "post_mlp_layernorm")
    return shapes


def _attention(config: DecoderConfig) -> Shapes:
    q_rows, kv_rows, _ = config.qkv_sizes
    heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    shapes = _linear("self_attn.qkv_proj", q_rows + 2 * kv_rows, config.hidden_size, config.qkv_bias)
    shapes |= _linear("self_attn.o_proj", config.hidden_size, q_rows, config.o_bias)
    for name, count in heads.items() if config.qk_norm != "none" else ():
        shapes[f"self_attn.{name}.weight"] = (config.head_dim * (1 if config.qk_norm == "head" else count),)
    return shapes


def _feed_forward(config: DecoderConfig, path: str, inner: int) -> Shapes:
    first, rows = ("gate_up_proj", 2 * inner) if config.gated_mlp else ("up_proj", inner)
    shapes = _linear(f"{path}.{first}", rows, config.hidden_size, config.mlp_bias)
    return shapes | _linear(f"{path}.down_proj", config.hidden_size, inner, config.mlp_bias)


def _experts(config: DecoderConfig) -> Shapes:
    count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    shapes = _linear("mlp.gate", count, hidden, bias=False)
    shapes |= _linear("mlp.experts.gate_up_proj", count * 2 * inner, hidden, bias=False)
    shapes |= _linear("mlp.experts.down_proj", count * hidden, inner, bias=False)
    if config.shared_expert_intermediate_size:
        shapes |= _feed_forward(config, "mlp.shared_expert", config.shared_expert_intermediate_size)
        shapes |= _linear("mlp.shared_expert_gate", 1, hidden, bias=False)
    return shapes


def _linear(name: str, out: int, into: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def _norm(config: DecoderConfig, name: str) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (config.hidden_size,)} if config.norm_weight else {}
    return shapes | ({f"{name}.bias": (config.hidden_size,)} if config.norm_bias else {})
