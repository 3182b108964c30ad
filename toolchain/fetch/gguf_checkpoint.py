"""A Hugging Face folder from a llama-architecture GGUF file with a byte-level BPE tokenizer.

Weights: every tensor is dequantized to fp32 and written under its Hugging Face name, one at a time,
so the peak is one tensor and not the model. llama.cpp stores the rows of q and k so that a rotary
pair is adjacent (2i, 2i+1); Hugging Face's rotate-half wants it half a head apart (i, i + D/2). For
each head the rows go [D/2, 2] -> [2, D/2]. The swap leaves every norm and every score of an unrotated
product alone, so a missing one shows only as a bad perplexity. A head tied to the embedding is stored once.

Tokenizer: built from the file's tokens, merges and token types with `tokenizers`, not by
transformers' GGUF loader, which drops the Digits pre-tokenizer of `smollm`: "2024" must be four
tokens, as in training. A pre-tokenizer this module does not know is refused, not guessed.

Source: llama.cpp convert_hf_to_gguf.py (LlamaModel.permute), GGUF specification (metadata keys).
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolchain.artifact import dump_json
from toolchain.errors import DtoolError, name_list

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer

# GGUF token types (llama.h, llama_token_type): 3 control, 4 user defined.
CONTROL_TOKEN, USER_TOKEN = 3, 4
F32_BYTES = 4

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_from_gguf(gguf_path: Path, folder: Path) -> None:
    """Fill `folder` with config.json, model.safetensors, tokenizer files and generation_config.json.

    Equal GGUF bytes give equal output bytes. Raises DtoolError for a file that is no GGUF, another
    architecture or tokenizer, a missing or unknown tensor, or metadata that is not there.
    """
    reader = open_gguf(gguf_path)
    config = config_from_gguf(reader)
    tokenizer = tokenizer_from_gguf(reader)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = special_tokens_from_gguf(reader)
    _write(folder / "tokenizer_config.json", _tokenizer_config(reader, special, config["max_position_embeddings"]))
    token_ids = {f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    _write(folder / "generation_config.json", {"_from_model_config": True, **token_ids})
    _write(folder / "config.json", config)
    write_weights(reader, config, folder / "model.safetensors")


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(dump_json(document), "utf-8")


def open_gguf(path: Path) -> "GGUFReader":
    """A reader of the file (memory mapped). Raises DtoolError when it is no GGUF of architecture llama."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
    except (ValueError, IndexError, OSError) as error:
        raise DtoolError(f"{path} cannot be read", expected="a GGUF file", found=str(error) or "a cut file") from error
    architecture = _meta(reader, "general.architecture")
    if architecture != "llama":
        raise DtoolError(
            f"{path} cannot be turned into a Hugging Face folder",
            expected="general.architecture llama",
            found=str(architecture),
            fix="give the model's Hugging Face folder instead of a GGUF file",
        )
    return reader


def _meta(reader: "GGUFReader", key: str, *default: Any) -> Any:
    """One metadata value; `default`, when given, stands in for a key that is not there."""
    field = reader.fields.get(key)
    if field is not None:
        return field.contents()
    if default:
        return default[0]
    raise DtoolError(
        "the GGUF file is incomplete",
        expected=f"the metadata key {key}",
        found="no such key",
        fix="give a file written by llama.cpp's converter",
    )


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999747378752e-06 was 1e-05 before it was stored."""
    import numpy as np

    return float(str(np.float32(value)))


def config_from_gguf(reader: "GGUFReader") -> dict[str, Any]:
    """config.json of a LlamaForCausalLM, with the dtype float32 of the weights written beside it."""
    heads = int(_meta(reader, "llama.attention.head_count"))
    hidden = int(_meta(reader, "llama.embedding_length"))
    names = {tensor.name for tensor in reader.tensors}
    scaling = _meta(reader, "llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        raise DtoolError(
            "the GGUF file stretches its rotary frequencies",
            expected="no rope scaling",
            found=scaling if scaling != "none" else "a rope_freqs tensor",
            fix="give the model's Hugging Face folder instead",
        )
    token = "tokenizer.ggml.{}_token_id".format
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": len(_meta(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": int(_meta(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_meta(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_meta(reader, "llama.attention.head_count_kv", heads)),
        "head_dim": int(_meta(reader, "llama.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(_meta(reader, "llama.context_length")),
        "rms_norm_eps": _shortest(_meta(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(_meta(reader, "llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _meta(reader, token("bos"), None),
        "eos_token_id": _meta(reader, token("eos"), None),
        "pad_token_id": _meta(reader, token("padding"), None),
    }


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises DtoolError for one llama models do not have."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
    raise DtoolError(
        "the GGUF file has a tensor this conversion does not know",
        expected="the tensors of a llama model without biases",
        found=name,
        fix="give the model's Hugging Face folder instead",
    )


def write_weights(reader: "GGUFReader", config: dict[str, Any], path: Path) -> None:
    """model.safetensors in fp32, written one tensor at a time, in the order of the names.

    Raises DtoolError when a tensor is missing, unknown, or of another shape than the config says.
    """
    tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
    shapes = _expected_shapes(config)
    if missing := sorted(set(shapes) - set(tensors)):
        raise DtoolError("the GGUF file is incomplete", expected=f"the tensors {name_list(missing)}", found="none such")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        shape = [int(n) for n in reversed(tensors[name].shape)]
        if shape != shapes.get(name):
            raise DtoolError(f"{name} has another shape", expected=str(shapes.get(name)), found=str(shape))
        end = offset + F32_BYTES * int(tensors[name].n_elements)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the first tensor to 8 bytes
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, values in _dequantized(tensors, config):
            if values.nbytes != header[name]["data_offsets"][1] - header[name]["data_offsets"][0]:
                raise DtoolError(f"{name} has another size than the GGUF file says")
            stream.write(values.data)


def _expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    E, F, V, D = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    HD, KD = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    shapes = {"model.embed_tokens.weight": [V, E], "model.norm.weight": [E]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [V, E]
    block = {
        "input_layernorm": [E],
        "self_attn.q_proj": [HD, E],
        "self_attn.k_proj": [KD, E],
        "self_attn.v_proj": [KD, E],
        "self_attn.o_proj": [E, HD],
        "post_attention_layernorm": [E],
        "mlp.gate_proj": [F, E],
        "mlp.up_proj": [F, E],
        "mlp.down_proj": [E, F],
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def _dequantized(tensors: dict[str, "ReaderTensor"], config: dict[str, Any]) -> Iterator[tuple[str, "np.ndarray"]]:
    """(name, fp32 values, C order) of each tensor in the order of the names, rows of q and k put back."""
    import numpy as np
    from gguf import dequantize

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name in sorted(tensors):
        values = dequantize(tensors[name].data, tensors[name].tensor_type)
        projection = name.split(".")[-2]
        if projection in heads:
            values = undo_rope_permutation(values, heads[projection])
        yield name, np.ascontiguousarray(values, dtype="<f4")


def undo_rope_permutation(rows_OI: "np.ndarray", heads: int) -> "np.ndarray":
    """Rows of a q or k projection from llama.cpp's order (pairs adjacent) to Hugging Face's (halves)."""
    out, width = rows_OI.shape
    half = out // heads // 2
    return rows_OI.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(out, width)


def tokenizer_from_gguf(reader: "GGUFReader") -> "Tokenizer":
    """A byte-level BPE tokenizer that adds no tokens of its own to a text.

    Raises DtoolError for another tokenizer model or a pre-tokenizer not known here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = _meta(reader, "tokenizer.ggml.model"), _meta(reader, "tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in {"smollm", "gpt-2"}:
        raise DtoolError(
            "the GGUF file has a tokenizer this conversion does not know",
            expected="model gpt2 with the pre-tokenizer smollm or gpt-2",
            found=f"model {kind} with {pre}",
            fix="give the model's Hugging Face folder instead",
        )
    tokens = _meta(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _meta(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = _meta(reader, "tokenizer.ggml.token_type")
    for text, token_type in zip(tokens, types, strict=True):  # in order: each keeps its id of the vocabulary
        if token_type in {CONTROL_TOKEN, USER_TOKEN}:
            special = token_type == CONTROL_TOKEN
            token = AddedToken(text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


def special_tokens_from_gguf(reader: "GGUFReader") -> dict[str, str]:
    """The texts of bos_token, eos_token, pad_token and unk_token, those the file names."""
    tokens = _meta(reader, "tokenizer.ggml.tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: _meta(reader, f"tokenizer.ggml.{key}_token_id", None) for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def _tokenizer_config(reader: "GGUFReader", special: dict[str, str], max_tokens: int) -> dict[str, Any]:
    config = {
        # The class that loads tokenizer.json as it is; a model's own class would rebuild its parts.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **special,
    }
    template = _meta(reader, "tokenizer.chat_template", None)
    return config | ({"chat_template": template} if template else {})
