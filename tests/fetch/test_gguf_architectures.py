"""Every architecture of the table: written as llama.cpp's converter does, it has the logits of its original."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KEYS, KV_HEADS, LAYERS, byte_vocabulary, llama_cpp_permute, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from tests.rounding import rounding_tolerance
from toolchain.errors import DtoolError
from toolchain.fetch.gguf_architectures import ARCHITECTURES
from toolchain.fetch.gguf_checkpoint import checkpoint_from_gguf
from toolchain.model.checkpoint import open_checkpoint
from toolchain.model.load import load_decoder

BASE = {
    "vocab_size": len(byte_vocabulary()),
    "hidden_size": HIDDEN,
    "intermediate_size": KEYS["feed_forward_length"],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": KEYS["context_length"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA = {"head_dim": 32, "tie_word_embeddings": True, "sliding_window": 5}
GEMMA_KEYS = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 5}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 24}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 32}
GEMMA2_KEYS = GEMMA_KEYS | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
THIRDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
LONG = {"long_factor": [2.0, 3.5] * 4, "short_factor": [1.0, 1.25] * 4}
PHI3_LONG = {
    "rope_scaling": {"type": "longrope", **LONG}, "max_position_embeddings": 128,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def llama3_divisors(theta):
    """As LlamaModel.generate_extra_tensors of llama.cpp's converter writes them in rope_freqs.weight."""
    frequencies = 1.0 / (theta ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    divisors = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(divisors, np.float32)


def long_factors():
    return {f"rope_factors_{w}.weight": np.array(LONG[f"{w}_factor"], np.float32) for w in ("long", "short")}


CASES = {
    "llama": ("llama", "llama", {}, {}, {}),
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True}, {}, {}),
    "llama with biases": ("llama", "llama", {"attention_bias": True}, {}, {}),
    "llama with its own head size": ("llama", "llama", {"head_dim": 32}, {"attention.key_length": 32}, {}),
    "llama linear without its type": (
        "llama", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"rope.scaling.factor": 4.0}, {},
    ),
    "llama linear of old": (
        "llama", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"rope.scale_linear": 4.0}, {},
    ),
    "llama linear": (
        "llama", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {},
    ),
    "llama 3 bands": (
        "llama", "llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, {"rope.freq_base": 500000.0},
        {"rope_freqs.weight": llama3_divisors(500000.0)},
    ),
    "mixtral": ("llama", "mixtral", EXPERTS, {"expert_count": 4, "expert_used_count": 2}, {}),
    "qwen2": ("qwen2", "qwen2", {}, {}, {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}, {"attention.key_length": 32}, {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", EXPERTS | {"norm_topk_prob": True}, EXPERT_KEYS, {}),
    "gemma": ("gemma", "gemma", GEMMA, {"attention.key_length": 32, "attention.value_length": 32}, {}),
    "gemma2": ("gemma2", "gemma2", GEMMA2, GEMMA2_KEYS, {}),
    "gemma2 27B": (
        "gemma2", "gemma2", GEMMA2 | {"num_hidden_layers": 46, "query_pre_attn_scalar": HIDDEN // HEADS},
        GEMMA2_KEYS | {"block_count": 46}, {},
    ),
    "gemma3": ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 7, "query_pre_attn_scalar": 32},
               GEMMA_KEYS | {"block_count": 7}, {}),
    "gemma3 linear": (
        "gemma3", "gemma3_text",
        GEMMA | {
            "num_hidden_layers": 7, "query_pre_attn_scalar": 32, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        GEMMA_KEYS | {
            "block_count": 7, "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        }, {},
    ),
    "gemma3 27B": ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 62, "query_pre_attn_scalar": 16},
                   GEMMA_KEYS | {"block_count": 62}, {}),
    "phi3": ("phi3", "phi3", {"sliding_window": 5}, {"attention.sliding_window": 5}, {}),
    "gemma3 pattern": (
        "gemma3", "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "query_pre_attn_scalar": 32, "layer_types": THIRDS},
        GEMMA_KEYS | {"block_count": 7, "attention.sliding_window_pattern": 3}, {},
    ),
    "phi3 in part": (
        "phi3", "phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}, {"rope.dimension_count": 8}, {},
    ),
    "phi3 long": (
        "phi3", "phi3", PHI3_LONG,
        {"rope.scaling.original_context_length": 64,
         "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(2) / np.log(64)))},
        long_factors(),
    ),
}  # fmt: skip


def save_original(model_type, changes, folder):
    """A random model as transformers saves it; the model and its stored tensors."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(BASE | changes))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    gemma = "gemma" in model_type
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(*((-0.5, 0.5) if gemma else (0.5, 1.5)))
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    tensors = {name: t.numpy() for name, t in load_file(folder / "model.safetensors").items()}
    return model, tensors


def as_llama_cpp(architecture, tensors):
    """modify_tensors of llama.cpp's converter."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS} if architecture == "llama" else {}
    stored = dict(tensors)
    for name, values in tensors.items():
        if name.split(".")[-2] in heads:
            stored[name] = llama_cpp_permute(values, heads[name.split(".")[-2]])
        if "gemma" in architecture and name.endswith("norm.weight"):
            stored[name] = values + 1
    return stored


@pytest.fixture
def convert(tmp_path):
    def convert(case):
        architecture, model_type, changes, keys, extra = CASES[case]
        model, tensors = save_original(model_type, changes, tmp_path / "original")
        stored = as_llama_cpp(architecture, tensors)
        write_gguf(tmp_path / "m.gguf", architecture, KEYS | keys, stored, extra=extra)
        folder = tmp_path / "m"
        folder.mkdir()
        checkpoint_from_gguf(tmp_path / "m.gguf", folder, print)
        return model, tensors, folder

    return convert


def test_every_architecture_of_the_table_has_a_case():
    assert {case[0] for case in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_a_model_written_as_llama_cpp_does_comes_back(convert, case):
    model, tensors, folder = convert(case)
    ours = load_file(folder / "model.safetensors")
    assert set(ours) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_allclose(ours[name].numpy(), values, rtol=0, atol=2e-7 if "gemma" in case else 0)
    assert not [n for n in open_checkpoint(folder).notes if "does not know" in n]
    ids = torch.randint(3, BASE["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(1))
    again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32").eval()
    decoder = load_decoder(folder)
    caches = decoder.new_caches(2, 24)
    with torch.no_grad():
        theirs = model(ids).logits
        logits = {"transformers": again(ids).logits, "ours": decoder(ids, torch.zeros(2, dtype=torch.int64), caches)}
    most = rounding_tolerance(model, ids)
    for found in logits.values():  # sums in another order, and Gemma's norms by the last bit of 1 + w
        torch.testing.assert_close(found, theirs, rtol=0, atol=most)


@pytest.mark.parametrize(
    ("keys", "extra", "text"),
    [
        ({}, {"rope_freqs.weight": llama3_divisors(500000.0) * 1.01}, "in another way than Llama 3"),
        ({}, {"rope_freqs.weight": llama3_divisors(500000.0)[:-1]}, "in another way than Llama 3"),
        ({"rope.scaling.type": "linear"}, {"rope_freqs.weight": llama3_divisors(500000.0)}, "stretches its rotary"),
    ],
)
def test_divisors_that_are_not_those_of_the_bands_are_refused(tmp_path, keys, extra, text):
    _, tensors = save_original("llama", {}, tmp_path / "original")
    stored = as_llama_cpp("llama", tensors)
    keys = KEYS | {"rope.freq_base": 500000.0} | keys
    path = write_gguf(tmp_path / "m.gguf", "llama", keys, stored, extra=extra)
    with pytest.raises(DtoolError, match=text):
        checkpoint_from_gguf(path, tmp_path, print)
