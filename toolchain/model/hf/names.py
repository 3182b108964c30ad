"""What the checkpoints of each Hugging Face family call the decoder's modules; Llama's own names are left out.

A part of the table in `hf`.
"""

from toolchain.model.config import DecoderConfig
from toolchain.model.family import Names

FUSED_GATE: Names = {"mlp.gate_up_proj": "mlp.gate_up_proj"}
FUSED: Names = {**FUSED_GATE, "self_attn.qkv_proj": "self_attn.qkv_proj"}
MIXTRAL: Names = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.experts.gate_up_proj": ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    "mlp.experts.down_proj": "block_sparse_moe.experts.{e}.w2",
}
OLMO2: Names = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
GEMMA2: Names = {**OLMO2, "post_attention_layernorm": "pre_feedforward_layernorm"}
PHI: Names = {
    "model.norm": "model.final_layernorm",
    "self_attn.o_proj": "self_attn.dense",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
STARCODER2: Names = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
GPT: Names = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
}
GPT2: Names = {
    **GPT,
    "model.embed_positions": "transformer.wpe",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
GPTJ: Names = {
    **GPT,
    "self_attn.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
}
DENSE_4H: Names = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
GPT_NEOX: Names = {
    **DENSE_4H,
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
}
XGLM: Names = {
    "model.norm": "model.layer_norm",
    "input_layernorm": "self_attn_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "post_attention_layernorm": "final_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
OPT: Names = {
    **XGLM,
    "model.embed_tokens": "model.decoder.embed_tokens",
    "model.embed_positions": "model.decoder.embed_positions",
    "model.norm": "model.decoder.final_layer_norm",
}
STABLELM: Names = {
    "self_attn.q_norm": "self_attn.q_layernorm.norms.{h}",
    "self_attn.k_norm": "self_attn.k_layernorm.norms.{h}",
}


def falcon(config: DecoderConfig) -> Names:
    """By the norms: a parallel layer with two of them calls them after what reads them."""
    two = config.parallel_residual and config.parallel_norms == 2
    return {
        **DENSE_4H,
        "model.embed_tokens": "transformer.word_embeddings",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_attn" if two else "input_layernorm",
        "post_attention_layernorm": "ln_mlp" if two else "post_attention_layernorm",
        "self_attn.qkv_proj": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
    }
