"""The model's own metadata keys, strictly: each is read, says nothing about inference, has no effect, or is refused.

llama.cpp knows far more keys than the config.json of any one architecture has a place for. One that is
not read may stand in a file only with the value that changes nothing: a score scale of 1 / sqrt(head
dim), a cap of 0. Whatever is on no list is refused too, as no one knows what it would change.

Source of keys: gguf-py/gguf/constants.py; of what a missing one means: src/llama-model.cpp (load_hparams).
"""

import math
from typing import Any

from toolchain.errors import DtoolError, name_list
from toolchain.fetch.gguf_file import INSTEAD, Gguf

Config = dict[str, Any]

INERT = frozenset(
    {
        "vocab_size",  # the embedding has as many rows, and is what is used
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",  # counts for yarn and longrope alone, which do read it
        "decoder_start_token_id",
    }
)
OFF: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_scale": (0,),
    "attention.temperature_length": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_attn_factor": (1,),
    "use_parallel_residual": (False,),
    "swin_norm": (False,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),
}
"""The values with which a key that nothing read has no effect. Gating 1 is softmax; norms of expert weights are on."""
FOREIGN = ("GGUF", "general", "tokenizer", "split", "quantize", "imatrix")
"""Prefixes of keys that are not the model's own."""


def refuse_unread(gguf: Gguf, config: Config) -> None:
    """Raises DtoolError for own keys that neither `config` came from nor are without effect."""
    off, prefix = OFF | _off_by_size(gguf, config), f"{gguf.architecture}."
    bad: dict[str, str] = {}
    for full in gguf.reader.fields:
        key = full.removeprefix(prefix)
        if key == full or key in gguf.read or key in INERT:
            continue
        value = gguf.own(key)
        allowed = off.get(key, ())
        if not any(_equal(value, one) for one in allowed):
            bad[f"{full} {_short(value)}"] = f"{full} {' or '.join(map(_short, allowed)) if allowed else 'absent'}"
    if bad:
        raise DtoolError(
            f"{gguf.path} sets what dtool does not compute for {gguf.architecture}",
            expected=name_list(bad.values(), 8),
            found=name_list(bad, 8),
            fix=f"{INSTEAD}; dtool never leaves a mechanism out",
        )


def foreign_keys(gguf: Gguf) -> list[str]:
    """Keys that are of no known kind and not the model's own."""
    known = (*FOREIGN, gguf.architecture)
    return [key for key in gguf.reader.fields if key.split(".")[0] not in known]


def _off_by_size(gguf: Gguf, config: Config) -> dict[str, tuple[Any, ...]]:
    """As `OFF`, for keys whose neutral value depends on the model."""
    dim, theta = config["head_dim"], config["rope_theta"]
    longest, window = config["max_position_embeddings"], gguf.get(f"{gguf.architecture}.attention.sliding_window", 0)
    unbounded = window if isinstance(window, int) and window > longest else longest
    lengths = (f"attention.{which}_length{kind}" for which in ("key", "value") for kind in ("", "_swa"))
    return {
        **dict.fromkeys((*lengths, "rope.dimension_count", "rope.dimension_count_swa"), (dim,)),
        "attention.scale": (0, 1 / math.sqrt(config.get("query_pre_attn_scalar", dim))),
        "attention.layer_norm_epsilon": (config["rms_norm_eps"],),
        "attention.sliding_window": (0, unbounded),
        "embedding_length_out": (config["hidden_size"],),
        "rope.freq_base_swa": (theta,),
    } | ({"expert_feed_forward_length": (0, config["intermediate_size"])} if "num_local_experts" in config else {})


def _equal(value: Any, neutral: Any) -> bool:
    if isinstance(neutral, bool | str) or isinstance(value, bool):
        return value is neutral if isinstance(neutral, bool) else value == neutral and not isinstance(value, bool)
    return isinstance(value, int | float) and math.isclose(value, neutral, rel_tol=1e-5)


def _short(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)[:60]
