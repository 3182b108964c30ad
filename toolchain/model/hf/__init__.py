"""Hugging Face families: what a config.json means and what its checkpoint calls things.

A table: a family says what differs from Llama (`family.Family`). Keys that need more than a constant are
read by `keys`, tensors named by `names`; nothing outside this folder knows a model's name. Nothing is assumed: a
key with a meaning dtool does not have is refused, and one that no family reads is noted. CONTRIBUTING.md
shows how a family is added.
"""

from collections.abc import Mapping

from toolchain.errors import DtoolError, did_you_mean
from toolchain.model.config import DecoderConfig
from toolchain.model.config_keys import Document
from toolchain.model.family import BY_HEAD, GROUPED, TRANSPOSED, Family, Fields, Stored, read_config, stored_tensors
from toolchain.model.hf import keys, names
from toolchain.tensor_file import TensorEntry

LAYER_NORM: Fields = {"norm": "layer", "norm_bias": True}
BIASES = keys.BIASES
# fmt: off
QWEN: Fields = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
GEMMA: Fields = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "sliding_window": 4096,
}
COHERE: Fields = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
GLM: Fields = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5, "attention_bias": True,
}
ONE_EPS = {"rms_norm_eps": "layer_norm_eps"}
GPT_KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "intermediate_size": "n_inner", "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
GPT_INERT = (
    "n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
    "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
)

ONE_KV_EACH = ("num_key_value_heads", "head_dim")
"""Keys of families whose query heads all have a key of their own and hidden / heads elements."""

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(
        keys.one_window,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "mixtral": Family(
        keys.mixtral,
        aliases={"num_experts": "num_local_experts"},
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_experts": 8, "num_experts_per_tok": 2,
        },
        names=names.MIXTRAL,
    ),
    "qwen2": Family(keys.qwen2, fixed={"qkv_bias": True, "o_bias": False}, defaults=QWEN),
    "qwen2_moe": Family(
        keys.qwen2_moe,
        defaults={
            **QWEN, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3": Family(keys.qwen2, fixed={"qk_norm": "head"}, defaults={**QWEN, "head_dim": 128}),
    "qwen3_moe": Family(
        keys.qwen3_moe,
        fixed={"qk_norm": "head"},
        aliases={"num_experts": "num_local_experts"},
        defaults={
            **QWEN, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        inert=("max_window_layers",),
    ),
    "gemma": Family(keys.gemma, fixed={"norm_unit_offset": True}, defaults={**GEMMA, "num_key_value_heads": 16}),
    "gemma2": Family(
        keys.gemma2,
        fixed={"norm_unit_offset": True, "norm_placement": "sandwich"},
        aliases={"hidden_act": "hidden_activation"},
        defaults={**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        names=names.GEMMA2,
    ),
    "gemma3_text": Family(
        keys.gemma3,
        fixed={"norm_unit_offset": True, "norm_placement": "sandwich", "qk_norm": "head"},
        aliases={"hidden_act": "hidden_activation"},
        defaults={**GEMMA, "max_position_embeddings": 131072, "rope_theta": 1e6},
        names=names.GEMMA2,
        inert=("_sliding_window_pattern",),
    ),
    "phi": Family(
        keys.phi,
        fixed={**LAYER_NORM, **BIASES, "lm_head_bias": True, "gated_mlp": False, "parallel_residual": True},
        aliases=ONE_EPS,
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        names=names.PHI,
    ),
    "phi3": Family(
        keys.one_window,
        defaults={
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
        },
        names=names.FUSED,
    ),
    "gpt2": Family(
        keys.gpt2,
        fixed={**LAYER_NORM, **BIASES, "gated_mlp": False, "position_embedding": "learned"},
        aliases=GPT_KEYS,
        defaults={
            "hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        names=names.GPT2,
        layouts=dict.fromkeys(("self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"), TRANSPOSED),
        layer="transformer.h.{i}", root="transformer.", benign=(".attn.bias", ".attn.masked_bias"), inert=GPT_INERT,
        ignored=ONE_KV_EACH,
    ),
    "gptj": Family(
        keys.gptj,
        fixed={
            **LAYER_NORM, "mlp_bias": True, "lm_head_bias": True, "gated_mlp": False, "parallel_residual": True,
            "rope_interleaved": True,
        },
        aliases=GPT_KEYS,
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "rotary_dim": 64},
        names=names.GPTJ,
        layer="transformer.h.{i}", root="transformer.", benign=(".attn.bias", ".attn.masked_bias"), inert=GPT_INERT,
        ignored=(*ONE_KV_EACH, "attention_bias"),
    ),
    "gpt_neox": Family(
        keys.gpt_neox,
        fixed={**LAYER_NORM, "mlp_bias": True, "gated_mlp": False},
        aliases={**ONE_EPS, "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "attention_bias": True},
        names=names.GPT_NEOX,
        layouts={"self_attn.qkv_proj": GROUPED},
        layer="gpt_neox.layers.{i}", root="gpt_neox.", benign=(".attention.bias", ".attention.masked_bias"),
        ignored=("num_key_value_heads",),
    ),
    "opt": Family(
        keys.opt,
        fixed={
            "norm": "layer", "norm_eps": 1e-5, "gated_mlp": False, "position_embedding": "learned",
            "position_offset": 2,
        },
        aliases={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        defaults={"hidden_act": "relu", "tie_word_embeddings": True},
        names=names.OPT,
        layer="model.decoder.layers.{i}",
        ignored=ONE_KV_EACH,
    ),
    "xglm": Family(
        keys.xglm,
        fixed={
            **LAYER_NORM, **BIASES, "norm_eps": 1e-5, "gated_mlp": False, "position_embedding": "sinusoidal",
            "position_offset": 2,
        },
        aliases={
            "hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads",
            "intermediate_size": "ffn_dim", "hidden_act": "activation_function",
        },
        defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
        names=names.XGLM,
        benign=("embed_positions.weights",),
        ignored=ONE_KV_EACH,
    ),
    "stablelm": Family(
        keys.stablelm,
        fixed=LAYER_NORM,
        aliases=ONE_EPS,
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        names=names.STABLELM,
    ),
    "olmo": Family(keys.olmo, fixed={"norm": "layer", "norm_weight": False, "norm_eps": 1e-5}),
    "olmo2": Family(
        fixed={"norm_placement": "output", "qk_norm": "width"},
        defaults={"rms_norm_eps": 1e-5},
        names=names.OLMO2,
    ),
    "olmoe": Family(
        keys.olmoe,
        fixed={"qk_norm": "width"},
        aliases={"num_experts": "num_local_experts"},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "cohere": Family(
        keys.cohere,
        fixed={"norm": "layer", "parallel_residual": True, "rope_interleaved": True},
        aliases=ONE_EPS,
        defaults={**COHERE, "rope_theta": 5e5},
        layouts={"self_attn.q_norm": BY_HEAD, "self_attn.k_norm": BY_HEAD},
    ),
    "cohere2": Family(
        keys.cohere2,
        fixed={"norm": "layer", "parallel_residual": True, "rope_interleaved": True},
        aliases=ONE_EPS,
        defaults={**COHERE, "sliding_window": 4096},
        inert=("_sliding_window_pattern",),
    ),
    "granite": Family(keys.granite),
    "glm": Family(keys.glm, fixed={"rope_interleaved": True}, defaults=GLM, names=names.FUSED_GATE),
    "glm4": Family(
        keys.glm,
        fixed={"rope_interleaved": True, "norm_placement": "sandwich"},
        defaults=GLM,
        names=names.FUSED_GATE,
    ),
    "smollm3": Family(
        keys.smollm3,
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        inert=("max_window_layers",),
    ),
    "starcoder2": Family(
        keys.starcoder2,
        fixed={**LAYER_NORM, "gated_mlp": False},
        aliases={"rms_norm_eps": "norm_epsilon"},
        defaults={
            "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        },
        names=names.STARCODER2,
    ),
    "falcon": Family(
        keys.falcon,
        fixed={**LAYER_NORM, "gated_mlp": False},
        aliases={
            "hidden_size": "n_embed", "intermediate_size": "ffn_hidden_size", "hidden_act": "activation",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        names=names.falcon,
        layouts={"self_attn.qkv_proj": GROUPED},
        layer="transformer.h.{i}", root="transformer.",
    ),
}
# fmt: on


def family_of(document: Document) -> Family:
    """The family of a config. Raises DtoolError for an unknown one, naming near matches."""
    found = document.get("model_type")
    if found is None:
        raise DtoolError(
            "config.json does not say what model it describes",
            expected="the key model_type",
            found="no such key",
            fix="download config.json again, or add model_type by the model's source",
        )
    name = str(found)
    if name not in FAMILIES:
        hint = did_you_mean(name, FAMILIES)
        raise DtoolError(
            f"model_type {name!r:.80} is not supported",
            expected=", ".join(FAMILIES),
            found=name[:80],
            fix=hint if hint.startswith("did") else "give a checkpoint of one of these",
        )
    return FAMILIES[name]


def config_from_hf(
    document: Document,
    stored: Mapping[str, TensorEntry],
    *,
    context_len: int | None = None,
    notes: list[str] | None = None,
) -> DecoderConfig:
    """The config a `config.json` document describes; `stored` tells the dtype when it does not.

    `context_len`: positions to serve. `notes` gets what a user should see.
    """
    return read_config(family_of(document), document, stored, context_len, notes)


def root_prefix(document: Document) -> str:
    """What the tensors of a trunk saved without its head lack at the front of their names."""
    return family_of(document).root


def benign_suffixes(document: Document) -> tuple[str, ...]:
    """Endings of stored tensors that are computed anew instead of read."""
    return ("rotary_emb.inv_freq", *family_of(document).benign)


def stored_parts(document: Document, config: DecoderConfig) -> dict[str, Stored]:
    """By parameter of the decoder, in order: the tensors a checkpoint of this family must hold for it."""
    return stored_tensors(family_of(document), config)
