"""`python -m tests.model.family_table`: the README's table of families, made from what the tests run.

Each row joins the mechanisms of all of a family's variants, read from the configs they load as. A test
holds the README to it.
"""

from tests.model.families import VARIANTS, hf_config
from toolchain.model.config import DecoderConfig
from toolchain.model.hf import config_from_hf

HEADER = "| `model_type` | variants | attention and positions | norms, feed-forward, rest |\n|---|---|---|---|"
ACTIVATIONS = {
    (True, "silu"): "SwiGLU",
    (True, "gelu"): "GeGLU (erf)",
    (True, "gelu_tanh"): "GeGLU (tanh)",
    (True, "relu"): "ReGLU",
    (True, "relu2"): "gated ReLU²",
    (False, "silu"): "SiLU",
    (False, "gelu"): "GELU (erf)",
    (False, "gelu_tanh"): "GELU (tanh)",
    (False, "relu"): "ReLU",
    (False, "relu2"): "ReLU²",
}
QK_NORMS = {"head": "QK-norm per head", "head_layer": "QK LayerNorm per head", "width": "QK-norm over the width"}
PLACEMENTS = {"pre": "pre-norm", "output": "output norms", "sandwich": "sandwich norms", "stream": "post-norm"}


def attention_words(c: DecoderConfig) -> list[str]:
    """Attention and positions of one config."""
    groups = c.num_attention_heads // c.num_key_value_heads
    words = ["MHA" if groups == 1 else "MQA" if c.num_key_value_heads == 1 else "GQA"]
    ropes = [rope for rope in map(c.rope_named, c.rope_names) if rope is not None]
    if ropes:
        words.append("RoPE " + ("interleaved" if c.rope_interleaved else "half-split"))
        words += ["partial"] if c.rotary_dim < c.head_dim else []
        words += [rope.rope_type for rope in ropes if rope.rope_type != "default"]
        words += ["two bases"] if len(ropes) > 1 else []
        words += ["layers without RoPE"] if "no_rope" in c.rope_names else []
    if c.position_embedding != "none":
        words.append(f"{c.position_embedding} positions")
    words += ["window"] if any(c.windows) else []
    words += ["soft cap"] if c.attention_softcap else []
    words += ["scale of its own"] if c.attention_scale else []
    words += [QK_NORMS[c.qk_norm]] if c.qk_norm != "none" else []
    words += ["clipped q, k, v"] if c.qkv_clip else []
    return words + (["biases"] if c.qkv_bias or c.o_bias else [])


def other_words(c: DecoderConfig) -> list[str]:
    """Norms, feed-forward, embedding and head of one config."""
    norm = "RMSNorm" if c.norm == "rms" else "LayerNorm"
    norm += " 1 + w" if c.norm_unit_offset else ""
    norm += "" if c.norm_weight else " without weight"
    words = [norm, PLACEMENTS[c.norm_placement]]
    if c.parallel_residual:
        words.append("parallel, one norm" if c.parallel_norms == 1 else "parallel, two norms")
    words.append(ACTIVATIONS[c.gated_mlp, c.hidden_act])
    if c.num_experts:
        words.append("experts" + (" and a shared one" if c.shared_expert_intermediate_size else ""))
    words += ["tied head"] if c.tie_word_embeddings else []
    words += ["head bias"] if c.lm_head_bias else []
    words += ["logit cap"] if c.final_logit_softcap else []
    multipliers = (c.embedding_multiplier, c.residual_multiplier, c.logit_multiplier)
    return words + (["multipliers"] if any(m != 1 for m in multipliers) else [])


def family_table() -> str:
    """The table as Markdown, one row a family, by name."""
    rows: dict[str, tuple[list[str], dict[str, None], dict[str, None]]] = {}
    for name, (family, _) in VARIANTS.items():
        config = config_from_hf(hf_config(name).to_dict() | {"model_type": family, "dtype": "float32"}, {})
        variants, attention, other = rows.setdefault(family, ([], {}, {}))
        variants.append(name)
        attention |= dict.fromkeys(attention_words(config))
        other |= dict.fromkeys(other_words(config))
    lines = [f"| `{f}` | {len(v)} | {', '.join(a)} | {', '.join(o)} |" for f, (v, a, o) in sorted(rows.items())]
    return "\n".join([HEADER, *lines])


if __name__ == "__main__":
    print(family_table())
