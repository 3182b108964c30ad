"""A tiny llama GGUF file written as llama.cpp's converter would, and the checkpoint it was made from."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 64, 4, 2, 16, 96, 2


@dataclass(frozen=True)
class TinyGguf:
    path: Path
    tensors: dict[str, np.ndarray]
    """Under their Hugging Face names, before llama.cpp's permutation."""


def byte_vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "th", "the", "Ġthe"]


MERGES = ["1 2", "t h", "th e", "Ġ the"]


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As in llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def tiny_tensors(vocabulary: int, *, tied: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, HIDDEN)
    for layer in range(LAYERS):
        head = f"model.layers.{layer}."
        shapes |= {
            head + "input_layernorm.weight": (HIDDEN,),
            head + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            head + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            head + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            head + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            head + "post_attention_layernorm.weight": (HIDDEN,),
            head + "mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
            head + "mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
            head + "mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        }
    return {
        name: (rng.standard_normal(shape) * 0.3 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def gguf_name(name: str) -> str:
    from toolchain.fetch.gguf_checkpoint import BLOCK_NAMES, TOP_NAMES

    for ours, theirs in TOP_NAMES.items():
        if name == theirs:
            return ours
    layer, module = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    theirs_to_ours = {v: k for k, v in BLOCK_NAMES.items()}
    return f"blk.{layer}.{theirs_to_ours[module]}.weight"


def write_tiny_gguf(
    path: Path,
    *,
    tied: bool = True,
    pre: str = "smollm",
    architecture: str = "llama",
    drop: str = "",
    quantized: str = "",
) -> TinyGguf:
    import gguf

    vocabulary = byte_vocabulary()
    tensors = tiny_tensors(len(vocabulary), tied=tied)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    for name, values in tensors.items():
        if name == drop:
            continue
        module = name.split(".")[-2]
        stored = llama_cpp_permute(values, heads[module]) if module in heads else values
        if name == quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyGguf(path, tensors)
