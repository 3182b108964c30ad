"""Tiny random Hugging Face models of every family and variant that dtool supports.

`VARIANTS`: by name the model_type and what its config changes. `save_variant` writes the checkpoint and
returns the transformers model, in eval mode and with eager attention: the oracle. Weights are large
enough to show faults (transformers' own initialisation gives almost uniform attention), every bias is
non-zero, and no norm is the identity.
"""

import os
from copy import deepcopy

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from typing import Any

Variant = tuple[str, dict[str, Any]]

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
INNER_KEYS = {"gpt2": "n_inner", "gptj": "n_inner", "opt": "ffn_dim", "xglm": "ffn_dim", "falcon": "ffn_hidden_size"}
MHA_FAMILIES = {"gpt2", "gptj", "gpt_neox", "opt", "xglm", "falcon"}
HEAD_DIM_FAMILIES = {"qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4"}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0], [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


def _rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0} | fields}


VARIANTS: dict[str, Variant] = {
    "llama": ("llama", {}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_wide_heads": ("llama", {"head_dim": 32}),
    "llama_groups_of_three": ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_gelu": ("llama", {"hidden_act": "gelu"}),
    "llama_relu": ("llama", {"hidden_act": "relu"}),
    "llama_relu2": ("llama", {"hidden_act": "relu2"}),
    "llama_linear": ("llama", _rope("linear", factor=4.0)),
    "llama_dynamic": ("llama", _rope("dynamic", factor=4.0) | {"max_position_embeddings": 32}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_all_fields": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16.0, "truncate": False}},
    ),
    "llama_llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "mistral": ("mistral", {"sliding_window": 16}),
    "mistral_no_window": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen2_moe": ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 80}),
    "qwen2_moe_mixed": (
        "qwen2_moe",
        MOE
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 32, "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_biases": ("qwen3", {"attention_bias": True, "head_dim": 24}),
    "qwen3_moe": ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        MOE | {"num_hidden_layers": 3, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 30},
    ),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 16, "sliding_window": 10}),
    "gemma3_text": ("gemma3_text", {"num_hidden_layers": 4, "sliding_window": 14, "sliding_window_pattern": 3}),
    "gemma3_scaled": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 20, "partial_rotary_factor": 0.75}),
    "phi3_short": ("phi3", {"original_max_position_embeddings": 112, "rope_parameters": LONGROPE}),
    "phi3_long": ("phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "gpt2": ("gpt2", {}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_in_turn": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "opt": ("opt", {}),
    "opt_stream": ("opt", {"do_layer_norm_before": False}),
    "opt_bare": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "xglm": ("xglm", {"pad_token_id": 1}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0}),
    "cohere": ("cohere", {"logit_scale": 1.0}),
    "cohere_qk_norm": (
        "cohere",
        {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.75},
    ),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 18, "logit_scale": 1.25}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.8},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3_window": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 9, "mlp_bias": True},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 40}),
    "falcon": ("falcon", {}),
    "falcon_in_turn": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon_grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon_one_norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
}

CONTEXT_LEN = {"llama_dynamic": 100, "phi3_long": 128}
"""Positions to serve, where the longest that the frequencies of short texts allow is not enough."""
STD = 0.3
"""Of every weight but the norms', in all variants: no tiny model is deep enough to need less."""


def hf_config(name: str) -> Any:
    """The transformers config of a variant."""
    from transformers import CONFIG_MAPPING

    family, changes = deepcopy(VARIANTS[name])  # transformers writes into its blocks
    fields = COMMON | {INNER_KEYS.get(family, "intermediate_size"): 128}
    if family not in MHA_FAMILIES:
        fields["num_key_value_heads"] = 2
    if family in HEAD_DIM_FAMILIES:
        fields["head_dim"] = 16
    return CONFIG_MAPPING[family](**(fields | changes))


def save_variant(folder: Path, name: str) -> Any:
    """Save the checkpoint of a variant to `folder` and return its transformers model."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(sorted(VARIANTS).index(name))
    model = AutoModelForCausalLM.from_config(hf_config(name), attn_implementation="eager").eval()
    _draw(model)
    model.save_pretrained(folder)
    return model


def _draw(model: Any) -> None:
    import torch

    with torch.no_grad():
        for path, module in model.named_modules():
            is_norm = "Norm" in type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                if not is_norm or name != "weight":
                    parameter.normal_(std=STD)
                elif "Gemma" in type(module).__name__:  # multiplies by one plus its weight
                    parameter.uniform_(-0.5, 0.5)
                elif ".q_" in path or ".k_" in path:  # far from alike, so that a rotation before the norm shows
                    parameter.uniform_(0.2, 3.0)
                else:
                    parameter.uniform_(0.5, 1.5)
