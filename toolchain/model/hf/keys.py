"""What the keys of each Hugging Face family's config.json mean: functions from them to fields of `DecoderConfig`.

A part of the table in `hf`. A key that asks for a mechanism dtool does not have is refused by `only`.
"""

from toolchain.model.config import Layer, Rope
from toolchain.model.config_keys import FULL, SLIDING, Keys, rope_fields, windows
from toolchain.model.family import ACTIVATIONS, Fields

BIASES: Fields = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def window_of_all(c: Keys) -> int:
    """The one window of all layers; 0 where it is null."""
    return 0 if c.get("sliding_window") is None else c.size("sliding_window")


def one_window(c: Keys) -> Fields:
    """The same window in every layer, unless it is null."""
    return {"layers": [Layer(window=window_of_all(c))] * c.layers}


def unrotated(c: Keys) -> Fields:
    """Layers that rotate nothing; the op still needs a pair to turn, by zero."""
    return {"layers": [Layer(rope="no_rope")] * c.layers, "rotary_dim": 2, "rope": Rope()}


def experts(c: Keys, width_key: str = "moe_intermediate_size") -> Fields:
    """How many experts, how wide, and how tokens are routed to them."""
    return {
        "num_experts": c.size("num_experts"),
        "num_experts_per_tok": c.size("num_experts_per_tok"),
        "moe_intermediate_size": c.size(width_key),
        "norm_topk_prob": c.flag("norm_topk_prob", False),
    }


def sparse_layers(c: Keys) -> list[bool]:
    """Which layers have experts: every so many, but for those named dense."""
    dense, step = c.counts("mlp_only_layers", []), c.size("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(c.layers)]


def mixtral(c: Keys) -> Fields:
    """Experts everywhere, as wide as a dense layer, their weights adding up to one."""
    layers = [Layer(window=window_of_all(c), experts=True)] * c.layers
    return {**experts(c, "intermediate_size"), "norm_topk_prob": True, "layers": layers}


def switched_window(c: Keys) -> int | None:
    """`sliding_window`, which counts only where another key turns it on."""
    window = c.get("sliding_window")
    return window if c.flag("use_sliding_window", False) else None


def qwen2(c: Keys) -> Fields:
    """A window from some layer on."""
    first = c.size("max_window_layers", 28, least=0)
    return {"layers": [Layer(window=w) for w in windows(c, switched_window(c), lambda i: i >= first)]}


def qwen2_moe(c: Keys) -> Fields:
    """A window in every other layer up to some; experts and a shared one."""
    last = c.size("max_window_layers", 28, least=0)
    each = windows(c, switched_window(c), lambda i: i % 2 == 0 and i < last)
    return {
        **experts(c),
        "qkv_bias": c.flag("qkv_bias", True),
        "o_bias": False,
        "shared_expert_intermediate_size": c.size("shared_expert_intermediate_size"),
        "layers": [Layer(window=w, experts=e) for w, e in zip(each, sparse_layers(c), strict=True)],
    }


def qwen3_moe(c: Keys) -> Fields:
    """One window for all layers, and experts."""
    window = 0 if switched_window(c) is None else window_of_all(c)
    return {**experts(c), "layers": [Layer(window=window, experts=e) for e in sparse_layers(c)]}


def olmo(c: Keys) -> Fields:
    """Clipped queries, keys and values."""
    return {"qkv_clip": c.real("clip_qkv", 0.0)}


def olmoe(c: Keys) -> Fields:
    """The same, and experts in every layer, as wide as a dense one."""
    return {**olmo(c), **experts(c, "intermediate_size"), "layers": [Layer(experts=True)] * c.layers}


def gemma(c: Keys) -> Fields:
    """Embeddings scaled by sqrt(hidden); the first configs say gelu and mean its tanh form."""
    c.only("use_bidirectional_attention", False)
    c.only("hidden_activation", "gelu_pytorch_tanh")
    act = c.one_of("hidden_act", ACTIVATIONS | {"gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
    return {"embedding_multiplier": c.size("hidden_size") ** 0.5, "hidden_act": act}


def gemma2(c: Keys) -> Fields:
    """Soft caps, a score scale of its own, and a window in every other layer."""
    c.only("use_bidirectional_attention", False)
    return {
        "embedding_multiplier": c.size("hidden_size") ** 0.5,
        "attention_scale": c.real("query_pre_attn_scalar", 256, positive=True) ** -0.5,
        "attention_softcap": c.real("attn_logit_softcapping", 0.0),
        "final_logit_softcap": c.real("final_logit_softcapping", 0.0),
        "layers": [Layer(window=w) for w in windows(c, c.get("sliding_window"), lambda i: i % 2 == 0)],
    }


def gemma3(c: Keys) -> Fields:
    """A window in all layers but every sixth, with a rotation of its own."""
    c.only("attn_logit_softcapping", None)
    each = patterned_windows(c, 6)
    return {
        **gemma2(c),
        "layers": [Layer(window=w, rope="local_rope" if w else "rope") for w in each],
        "rope": rope_fields(c, FULL),
        "local_rope": rope_fields(c, SLIDING, "rope_local_base_freq"),
    }


def patterned_windows(c: Keys, default: int) -> list[int]:
    """A window in all layers but every so many."""
    pattern = c.size("sliding_window_pattern", default)
    return windows(c, c.get("sliding_window"), lambda i: bool((i + 1) % pattern))


def phi(c: Keys) -> Fields:
    """Nothing of its own: a LayerNorm per head with one weight and bias for all is not supported."""
    c.only("qk_layernorm", False)
    return {}


def wide_inner(c: Keys) -> Fields:
    """The inner size, four times the hidden one where it is missing."""
    return {"intermediate_size": c.size("intermediate_size", 4 * c.size("hidden_size"))}


def gpt2(c: Keys) -> Fields:
    """Scores divided by sqrt(head_dim), or not at all."""
    c.only("scale_attn_by_inverse_layer_idx", False)
    scale = 0.0 if c.flag("scale_attn_weights", True) else 1.0
    return {**unrotated(c), **wide_inner(c), "attention_scale": scale}


def gptj(c: Keys) -> Fields:
    """A part of each head is rotated, at the base of the paper."""
    c.only("rotary", True)
    c.only("scale_attn_weights", True)
    return {**wide_inner(c), "rotary_dim": c.size("rotary_dim"), "rope": Rope()}


def gpt_neox(c: Keys) -> Fields:
    """Parallel parts with a norm each, or one after the other."""
    return {"parallel_residual": c.flag("use_parallel_residual", True), "parallel_norms": 2}


def opt(c: Keys) -> Fields:
    """Norms before each part, or behind each sum and then none at the end."""
    c.only("word_embed_proj_dim", c.size("hidden_size"))
    before, affine = c.flag("do_layer_norm_before", True), c.flag("layer_norm_elementwise_affine", True)
    bare = c.flag("_remove_final_layer_norm", False)
    return {
        **unrotated(c),
        **dict.fromkeys(BIASES, c.flag("enable_bias", True)),
        "norm_weight": affine,
        "norm_bias": affine,
        "norm_placement": "pre" if before else "stream",
        "final_norm": before and not bare,
    }


def xglm(c: Keys) -> Fields:
    """Embeddings scaled by sqrt(hidden) where asked; the row of the padding token in the position table is unused."""
    c.only("pad_token_id", 1)
    scale = c.size("hidden_size") ** 0.5 if c.flag("scale_embedding", True) else 1.0
    return {**unrotated(c), "embedding_multiplier": scale}


def stablelm(c: Keys) -> Fields:
    """Biases of q, k and v, a norm per head, parallel parts: each where asked."""
    return {
        "qkv_bias": c.flag("use_qkv_bias", False),
        "o_bias": False,
        "qk_norm": "head_layer" if c.flag("qk_layernorm", False) else "none",
        "parallel_residual": c.flag("use_parallel_residual", False),
    }


def cohere(c: Keys) -> Fields:
    """Scaled logits; a norm per head where asked."""
    norm = "head_layer" if c.flag("use_qk_norm", False) else "none"
    return {"logit_multiplier": c.real("logit_scale", 0.0625), "qk_norm": norm}


def cohere2(c: Keys) -> Fields:
    """Scaled logits; a window in all layers but every fourth, which has no rotation."""
    layers = [Layer(window=w, rope="rope" if w else "no_rope") for w in patterned_windows(c, 4)]
    return {"logit_multiplier": c.real("logit_scale", 0.0625), "layers": layers}


def granite(c: Keys) -> Fields:
    """Four multipliers."""
    return {
        "attention_scale": c.real("attention_multiplier", 1.0),
        "embedding_multiplier": c.real("embedding_multiplier", 1.0),
        "residual_multiplier": c.real("residual_multiplier", 1.0),
        "logit_multiplier": 1.0 / c.real("logits_scaling", 1.0, positive=True),
    }


def glm(c: Keys) -> Fields:
    """Biases of q, k and v only."""
    return {"qkv_bias": c.flag("attention_bias", True), "o_bias": False}


def smollm3(c: Keys) -> Fields:
    """No rotation in every fourth layer, which may have a window."""
    interval = c.size("no_rope_layer_interval", 4)
    turns = c.counts("no_rope_layers", [(i + 1) % interval != 0 for i in range(c.layers)])
    each = windows(c, switched_window(c), lambda i: not turns[i])
    return {"layers": [Layer(window=w, rope="rope" if t else "no_rope") for w, t in zip(each, turns, strict=True)]}


def starcoder2(c: Keys) -> Fields:
    """One window, and biases everywhere or nowhere."""
    c.only("norm_type", "layer_norm")
    c.only("mlp_type", "default")
    return {**one_window(c), **dict.fromkeys(BIASES, c.flag("use_bias", True))}


def falcon(c: Keys) -> Fields:
    """One KV head, all of them, or groups; parallel parts with one norm or two."""
    c.only("alibi", False)
    c.only("apply_residual_connection_post_layernorm", False)
    new, heads = c.flag("new_decoder_architecture", False), c.size("num_attention_heads")
    c.only(*(("parallel_attn", True) if new else ("num_ln_in_parallel_attn", 1)))
    one, grouped = c.flag("multi_query", True), c.size("num_kv_heads", heads)
    return {
        **wide_inner(c),
        **dict.fromkeys(BIASES, c.flag("bias", False)),
        "num_key_value_heads": grouped if new else 1 if one else heads,
        "parallel_residual": c.flag("parallel_attn", True),
        "parallel_norms": c.size("num_ln_in_parallel_attn", 2) if new else 1,
    }
