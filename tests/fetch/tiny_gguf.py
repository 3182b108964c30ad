"""Tiny GGUF files written as llama.cpp's converter would, and the checkpoints they were made from."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 64, 4, 2, 16, 96, 2
MERGES = ["1 2", "t h", "th e", "Ġ the"]
KEYS = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": FEED_FORWARD,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}

Tensors = dict[str, np.ndarray]
Blocks = Callable[[str, np.ndarray], tuple[np.ndarray, Any] | None]
"""For a tensor: its bytes and their GGUF type, or None to store the numbers as they are."""


@dataclass(frozen=True)
class TinyGguf:
    path: Path
    tensors: Tensors
    """Under their Hugging Face names, before llama.cpp's permutation."""


def byte_vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "th", "the", "Ġthe"]


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As in llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def tiny_tensors(vocabulary: int, *, tied: bool) -> Tensors:
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


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Tensors,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    blocks: Blocks = lambda name, stored: None,
) -> Path:
    """`keys` without the architecture's prefix; `tensors` by Hugging Face names, in llama.cpp's order of rows."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add_value(writer, key if key.startswith(("split.", "other.")) else f"{architecture}.{key}", value)
    for key, value in (tokenizer or byte_tokenizer()).items():
        add_value(writer, f"tokenizer.{key}", value)
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(known.get(architecture, gguf.MODEL_ARCH.LLAMA), keys["block_count"])
    for name, stored in merge_experts(tensors).items():
        theirs = table.get_name(name, try_suffixes=(".weight", ".bias")) or name
        data, kind = blocks(name, stored) or (stored, None)
        writer.add_tensor(theirs, data, raw_dtype=kind)
    for name, stored in (extra or {}).items():
        writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def merge_experts(tensors: Tensors) -> Tensors:
    """The experts of a layer one behind the other, as llama.cpp stores them."""
    merged: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors, key=lambda n: [int(p) if p.isdigit() else 0 for p in n.split(".")]):
        merged.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(tensors[name])
    return {name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in merged.items()}


def byte_tokenizer(pre: str = "smollm") -> dict[str, Any]:
    vocabulary = byte_vocabulary()
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": vocabulary,
        "ggml.token_type": [3] * len(SPECIAL) + [1] * (len(vocabulary) - len(SPECIAL)),
        "ggml.merges": MERGES,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.padding_token_id": 2,
        "ggml.unknown_token_id": 0,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tiny_gguf(
    path: Path,
    *,
    tied: bool = True,
    pre: str = "smollm",
    architecture: str = "llama",
    drop: str = "",
    quantized: str = "",
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> TinyGguf:
    import gguf

    tensors = tiny_tensors(len(byte_vocabulary()), tied=tied)
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    stored = {
        name: llama_cpp_permute(values, heads[name.split(".")[-2]]) if name.split(".")[-2] in heads else values
        for name, values in tensors.items()
        if name != drop
    }

    def blocks(name: str, values: np.ndarray) -> tuple[np.ndarray, Any] | None:
        kind = gguf.GGMLQuantizationType.Q8_0
        return (gguf.quantize(values, kind), kind) if name == quantized else None

    write_gguf(
        path, architecture, KEYS | dict(keys or {}), stored, tokenizer=byte_tokenizer(pre), extra=extra, blocks=blocks
    )
    return TinyGguf(path, tensors)
