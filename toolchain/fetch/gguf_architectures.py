"""GGUF architectures: which Hugging Face config each stands for, and how its tensors were rearranged.

The one place beside `model.hf` that knows models by name. Tensor names are no part of it: `hf` says
what a family's tensors are called, and `gguf.tensor_mapping` what llama.cpp calls the same. Left out
are architectures whose files do not hold all that the model needs (starcoder2: its window).

llama.cpp stores the rows of q and k of some so that a rotary pair is adjacent (2i, 2i+1), where
Hugging Face's rotate-half wants it half a head apart, and the norms of Gemma as 1 + w. What it has
in its code instead of the file stands here with the line it is from.

Source: llama.cpp, convert_hf_to_gguf.py (set_gguf_parameters, modify_tensors) and src/llama-model.cpp.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolchain.errors import DtoolError, did_you_mean
from toolchain.fetch.gguf_file import INSTEAD, PLAIN_TYPES, Gguf
from toolchain.fetch.gguf_keys import refuse_unread

Config = dict[str, Any]
LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""As published with every Llama 3; the file has their result only, which must agree."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture`.

    `keys`: what differs in config.json from what all have. `permuted`: rows of q and k are. `norm_offset`
    was added to the norms.
    """

    model_type: str
    causal_lm: str
    keys: Callable[[Gguf], Config] = lambda _: {}
    permuted: bool = False
    norm_offset: float = 0.0


def _llama(gguf: Gguf) -> Config:
    if gguf.own("expert_count", 0):
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": gguf.size("expert_count"),
            "num_experts_per_tok": gguf.size("expert_used_count"),
        }
    return {"attention_bias": "blk.0.attn_q.bias" in gguf.tensors, "mlp_bias": False}


def _qwen3_moe(gguf: Gguf) -> Config:
    # src/models/qwen3moe.cpp, build_moe_ffn: norm_w is true
    return {
        "num_experts": gguf.size("expert_count"),
        "num_experts_per_tok": gguf.size("expert_used_count"),
        "moe_intermediate_size": gguf.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(_: Gguf) -> Config:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(gguf: Gguf, layers_of_27b: int) -> int:
    # f_attention_scale: 1/sqrt(n_embd / n_head) for the type 27B, 1/sqrt(n_embd_head_k) for the others
    if gguf.size("block_count") == layers_of_27b:
        return gguf.size("embedding_length") // gguf.size("attention.head_count")
    return gguf.size("attention.key_length")


def _gemma2(gguf: Gguf) -> Config:
    return _pattern(gguf) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": gguf.real("attn_logit_softcapping"),
        "final_logit_softcapping": gguf.real("final_logit_softcapping"),
        "sliding_window": gguf.size("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scalar(gguf, 46),
    }


def _gemma3(gguf: Gguf) -> Config:
    # set_swa_pattern(6); rope_freq_base_train_swa = 10000 where the file has none
    return _pattern(gguf) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": gguf.size("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": gguf.real("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(gguf, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": gguf.own("final_logit_softcapping", None),
    }


def _pattern(gguf: Gguf) -> Config:
    """Which layers have the window, where the file says it: all but every so many, or one by one."""
    key = "attention.sliding_window_pattern"
    found, layers = gguf.own(key, None), gguf.size("block_count")
    if found is None:
        return {}
    if isinstance(found, list):
        slides = [bool(one) for one in found]
    else:
        period = gguf.size(key)
        slides = [i % period < period - 1 for i in range(layers)]
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in slides]}


def _phi3(gguf: Gguf) -> Config:
    longest = gguf.size("context_length")
    trained = gguf.size("rope.scaling.original_context_length", longest)
    long = _long_factors(gguf, longest, trained)
    return {
        "sliding_window": gguf.own("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": trained,
        "partial_rotary_factor": _share(gguf.size("rope.dimension_count", head_dim(gguf)), head_dim(gguf)),
        **({"rope_scaling": long} if long else {}),
    }


def _share(rotated: int, dim: int) -> float:
    """What part of a head is rotated, such that int(dim * share) gives `rotated` back."""
    share = rotated / dim
    return share if int(dim * share) == rotated else math.nextafter(share, 2.0)


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, norm_offset=1.0),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3),
}


def architecture_of(gguf: Gguf) -> Architecture:
    """The row of a file's architecture. Raises DtoolError for one that is not in the table."""
    name = gguf.architecture
    if name not in ARCHITECTURES:
        raise DtoolError(
            f"{gguf.path} holds a model of another architecture than dtool reads from GGUF",
            expected=", ".join(ARCHITECTURES),
            found=name,
            fix=f"{hint} Or {INSTEAD}" if (hint := did_you_mean(name, ARCHITECTURES)).startswith("did") else INSTEAD,
        )
    return ARCHITECTURES[name]


def head_dim(gguf: Gguf) -> int:
    """Elements of one head."""
    return gguf.size("attention.key_length", gguf.size("embedding_length") // gguf.size("attention.head_count"))


def config_from_gguf(gguf: Gguf) -> Config:
    """config.json of the model. Raises DtoolError for metadata that is missing or means what dtool does not know."""
    architecture = architecture_of(gguf)
    heads = gguf.size("attention.head_count")
    if "token_embd.weight" not in gguf.tensors:
        raise DtoolError(
            f"{gguf.path} is incomplete",
            expected="the tensor token_embd.weight",
            found="none such",
            fix="download the file again",
        )
    token = "tokenizer.ggml.{}_token_id".format
    common = {
        "architectures": [architecture.causal_lm],
        "model_type": architecture.model_type,
        "torch_dtype": _dtype(gguf),
        "vocab_size": gguf.shape("token_embd.weight")[0],
        "hidden_size": gguf.size("embedding_length"),
        "intermediate_size": gguf.size("feed_forward_length"),
        "num_hidden_layers": gguf.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.size("attention.head_count_kv", heads),
        "head_dim": head_dim(gguf),
        "hidden_act": "silu",
        "max_position_embeddings": gguf.size("context_length"),
        "rms_norm_eps": gguf.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.get(token("bos"), None),
        "eos_token_id": gguf.get(token("eos"), None),
        "pad_token_id": gguf.get(token("padding"), None),
    }
    config = common | architecture.keys(gguf)
    refuse_unread(gguf, config)
    return config


def _dtype(gguf: Gguf) -> str:
    """The one format of all matrices; float32 where there are several or blocks."""
    types = {tensor.tensor_type.name for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return names[types.pop()] if len(types) == 1 and types <= set(PLAIN_TYPES) else "float32"


def _rope_scaling(gguf: Gguf) -> Config | None:
    # llama.cpp takes a factor without a type for linear, and has an older name for it
    factor = gguf.real("rope.scaling.factor", gguf.real("rope.scale_linear", 1.0)) or 1.0
    kind = gguf.own("rope.scaling.type", "none" if factor == 1 else "linear")
    factors = [name for name in gguf.tensors if name.startswith("rope_f")]
    if factors == ["rope_freqs.weight"] and kind == "none":
        return _llama3_bands(gguf)
    if gguf.architecture == "phi3" and kind in {"none", "longrope"} and len(factors) in {0, 2}:
        return None  # by its two lists, if it has them
    if kind == "none" and not factors:
        return None
    if kind == "linear" and not factors:
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    raise DtoolError(
        f"{gguf.path} stretches its rotary frequencies",
        expected="none, linear, or the bands of Llama 3",
        found=f"{kind} {', '.join(factors)}".strip(),
        fix=INSTEAD,
    )


def _llama3_bands(gguf: Gguf) -> Config:
    """The bands whose divisors of the frequencies the file holds: checked, not guessed."""
    stored = [float(d) for d in gguf.vector("rope_freqs.weight")]
    theta, dim, factor = gguf.real("rope.freq_base", 10000.0), head_dim(gguf), max(stored)
    low, high, trained = LLAMA3_BANDS.values()
    for i, divisor in enumerate(stored):
        turns = trained / (2 * math.pi * theta ** (2 * i / dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if len(stored) != dim // 2 or not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-4):
            raise DtoolError(
                f"{gguf.path} stretches its rotary frequencies in another way than Llama 3",
                expected="divisors by its three bands",
                found=f"{divisor:g} for pair {i}",
                fix=INSTEAD,
            )
    return {"rope_type": "llama3", "factor": round(factor, 4), **LLAMA3_BANDS}


def _long_factors(gguf: Gguf, longest: int, trained: int) -> Config | None:
    names = [f"rope_factors_{which}.weight" for which in ("long", "short")]
    if not all(name in gguf.tensors for name in names):
        return None
    factors = [[float(f"{f:.7g}") for f in gguf.vector(name)] for name in names]
    attention = math.sqrt(1 + math.log(longest / trained) / math.log(trained)) if longest > trained else 1.0
    if not math.isclose(gguf.real("rope.scaling.attn_factor", attention), attention, rel_tol=1e-4):
        raise DtoolError(
            f"{gguf.path} scales its attention in another way than its lengths give",
            expected=f"{attention:g}",
            found=str(gguf.own("rope.scaling.attn_factor")),
            fix=INSTEAD,
        )
    return {"type": "longrope", "long_factor": factors[0], "short_factor": factors[1]}
