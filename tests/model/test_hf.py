"""What the families' keys and tensors mean, where a number or a name says it better than a whole model."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import random_ids
from tests.model.families import VARIANTS, hf_config, save_variant
from toolchain.errors import DtoolError
from toolchain.model.checkpoint import open_checkpoint
from toolchain.model.config import DecoderConfig
from toolchain.model.hf import config_from_hf, stored_parts
from toolchain.model.load import load_decoder
from toolchain.model.parameters import parameter_shapes

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 9}
NO_WINDOW = [0] * 6


def config_of(family, **fields):
    return config_from_hf({"model_type": family, **SIZES, "num_key_value_heads": 4} | fields, {})


def windows_of(family, **fields):
    config = config_of(family, **fields)
    return [config.layer(i).window for i in range(config.num_hidden_layers)]


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 4}, [4] * 6),
        ("mistral", {"sliding_window": None}, NO_WINDOW),
        ("mistral", {}, [4096] * 6),
        ("mixtral", {}, NO_WINDOW),
        ("phi3", {}, NO_WINDOW),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}, NO_WINDOW),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4}, [0, 0, 0, 0, 4, 4]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4}, NO_WINDOW),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4}
            | {"layer_types": ["sliding_attention", "full_attention"] * 3},
            [4, 0] * 3,
        ),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}, [4, 0, 4, 0, 0, 0]),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}, [4] * 6),
        ("gemma2", {}, [4096, 0] * 3),
        ("gemma3_text", {"sliding_window": 7}, [7, 7, 7, 7, 7, 0]),
        ("gemma3_text", {"sliding_window": 7, "sliding_window_pattern": 2}, [7, 0] * 3),
        ("cohere2", {"sliding_window": 5}, [5, 5, 5, 0, 5, 5]),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5}, [0, 0, 0, 5, 0, 0]),
    ],
)
def test_windows_are_those_of_the_familys_rule(family, fields, windows):  # D-04
    assert windows_of(family, **fields) == windows


def test_layers_of_one_model_may_rotate_differently():
    gemma3 = config_of("gemma3_text", rope_theta=500000.0, rope_local_base_freq=2000.0)
    assert [gemma3.layer(i).rope for i in range(6)] == ["local_rope"] * 5 + ["rope"]
    assert (gemma3.rope.rope_theta, gemma3.local_rope.rope_theta) == (500000.0, 2000.0)
    scaled = config_of("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (scaled.rope.rope_type, scaled.rope.factor, scaled.rope.rope_theta) == ("linear", 8.0, 1e6)
    assert (scaled.local_rope.rope_type, scaled.local_rope.rope_theta) == ("default", 10000.0)
    assert [config_of("cohere2").layer(i).rope for i in range(4)] == ["rope", "rope", "rope", "no_rope"]
    assert [config_of("smollm3").layer(i).rope for i in range(4)] == ["rope", "rope", "rope", "no_rope"]


@pytest.mark.parametrize(
    ("family", "fields", "key"),
    [
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gptj", {"rotary_dim": 8, "rotary": False}, "rotary"),
        ("gptj", {"rotary_dim": 8, "scale_attn_weights": False}, "scale_attn_weights"),
        ("gptj", {"rotary_dim": None}, "rotary_dim"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("xglm", {"pad_token_id": 5}, "pad_token_id"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type"),
        ("falcon", {"alibi": True}, "alibi"),
        ("falcon", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("olmoe", {"clip_qkv": -1.0}, "qkv_clip"),
    ],
)
def test_mechanisms_dtool_does_not_have_are_refused_by_their_key(family, fields, key):
    with pytest.raises(DtoolError, match=rf"\b{key}\b"):
        config_of(family, **fields)


def test_the_first_gemma_configs_mean_the_tanh_form_by_gelu():
    assert config_of("gemma", hidden_act="gelu", hidden_activation=None).hidden_act == "gelu_tanh"
    assert config_of("gemma2", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh").hidden_act == "gelu_tanh"


# fmt: off
PUBLISHED = [
    (124_439_808, {  # gpt2
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}),
    (125_239_296, {  # opt-125m
        "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "num_attention_heads": 12,
        "max_position_embeddings": 2048, "vocab_size": 50272, "word_embed_proj_dim": 768}),
    (6_050_882_784, {  # gptj-6b
        "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400,
        "tie_word_embeddings": False}),
    (70_426_624, {  # pythia-70m
        "model_type": "gpt_neox", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "intermediate_size": 2048, "vocab_size": 50304}),
    (494_032_768, {  # qwen2.5-0.5b
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}),
    (596_049_920, {  # qwen3-0.6b
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True}),
    (14_315_784_192, {  # qwen1.5-moe
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts": 60}),
    (30_532_122_624, {  # qwen3-30b-a3b
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "moe_intermediate_size": 768, "num_experts": 128}),
    (2_506_172_416, {  # gemma-2b
        "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000}),
    (2_614_341_888, {  # gemma-2-2b
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000}),
    (999_885_952, {  # gemma-3-1b
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144}),
    (2_779_683_840, {  # phi-2
        "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 51200}),
    (3_821_079_552, {  # phi-3-mini
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064}),
    (46_702_792_704, {  # mixtral
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8}),
    (6_921_720_704, {  # falcon-7b
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False,
        "new_decoder_architecture": False}),
    (1_235_814_400, {  # llama-3.2-1b
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
        "head_dim": 64}),
    (1_176_764_416, {  # olmo-1b
        "model_type": "olmo", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 16, "vocab_size": 50304, "tie_word_embeddings": True}),
    (6_919_161_856, {  # olmoe
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 64}),
    (1_644_515_328, {  # stablelm-2-1.6b
        "model_type": "stablelm", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352, "use_qkv_bias": True}),
    (3_030_371_328, {  # starcoder2-3b
        "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152}),
    (34_980_831_232, {  # command-r
        "model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256000}),
    (564_463_616, {  # xglm-564m
        "model_type": "xglm", "d_model": 1024, "num_layers": 24, "attention_heads": 16, "ffn_dim": 4096,
        "vocab_size": 256008}),
    (9_399_951_360, {  # glm-4-9b
        "model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552}),
]
# fmt: on
"""What the model cards count, and the part of the config.json that gives it."""


@pytest.mark.parametrize(("parameters", "document"), PUBLISHED)
def test_models_have_the_number_of_parameters_that_is_published(parameters, document):
    shapes = parameter_shapes(config_from_hf(document, {}))
    assert sum(map(math.prod, shapes.values())) == parameters


def stored(name):
    document = {"model_type": VARIANTS[name][0], **hf_config(name).to_dict()}
    config = config_from_hf(document, {})
    return config, stored_parts(document, config)


def test_grouped_rows_come_apart_into_queries_keys_and_values():
    config, parts = stored("falcon_grouped")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    rows = torch.arange(8).repeat_interleave(16)  # two groups of two query heads, a key and a value
    for name, tensor in (("weight", rows[:, None].expand(128, 64)), ("bias", rows)):
        arranged = parts[f"model.layers.0.self_attn.qkv_proj.{name}"].arrange(tensor)
        heads = arranged.reshape(8, 16, -1)[:, 0, 0].tolist()
        assert heads == [0, 1, 4, 5, 2, 6, 3, 7]


def test_transposed_matrices_come_back_and_vectors_stay():
    _, parts = stored("gpt2")
    weight, bias = (parts[f"model.layers.1.mlp.up_proj.{kind}"] for kind in ("weight", "bias"))
    assert (weight.names, weight.shapes) == (("transformer.h.1.mlp.c_fc.weight",), ((64, 128),))
    assert torch.equal(weight.arrange(torch.arange(6).reshape(2, 3)), torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert torch.equal(bias.arrange(torch.arange(4)), torch.arange(4))


def test_the_matrices_of_experts_follow_one_another_gate_before_up():
    _, parts = stored("mixtral_window")
    gate_up = parts["model.layers.1.mlp.experts.gate_up_proj.weight"]
    path = "model.layers.1.block_sparse_moe.experts"
    assert gate_up.names == tuple(f"{path}.{e}.{w}.weight" for e in range(3) for w in ("w1", "w3"))
    assert gate_up.shapes == ((128, 64),) * 6
    assert parts["model.layers.1.mlp.gate.weight"].names == ("model.layers.1.block_sparse_moe.gate.weight",)


def test_a_norm_per_head_is_read_head_by_head():
    _, parts = stored("stablelm_parallel")
    key_norm = parts["model.layers.0.self_attn.k_norm.weight"]
    assert key_norm.names == tuple(f"model.layers.0.self_attn.k_layernorm.norms.{h}.weight" for h in range(2))
    assert key_norm.shapes == ((16,), (16,))


@pytest.mark.parametrize(
    ("name", "root", "tables"),
    [
        ("gpt2", "transformer.", {"h.0.attn.bias": (1, 1, 8, 8), "h.1.attn.masked_bias": ()}),
        ("gpt_neox", "gpt_neox.", {"layers.0.attention.bias": (1, 1, 8, 8), "layers.1.attention.masked_bias": ()}),
        ("opt", "model.", {}),
        ("xglm", "model.", {"embed_positions.weights": (130, 64)}),
    ],
)
def test_old_checkpoints_without_a_root_and_with_stored_tables_are_read(tmp_path, name, root, tables):
    save_variant(tmp_path / "new", name)
    old = shutil.copytree(tmp_path / "new", tmp_path / "old")
    tensors = load_file(old / "model.safetensors")
    tensors = {key.removeprefix(root): tensor for key, tensor in tensors.items()}
    save_file(tensors | {key: torch.zeros(shape) for key, shape in tables.items()}, old / "model.safetensors")
    ids = torch.from_numpy(random_ids(2, 1, 9))
    with torch.inference_mode():
        decoders = [load_decoder(tmp_path / folder) for folder in ("new", "old")]
        new, old_ = (d(ids, torch.zeros(1, dtype=torch.int64), d.new_caches(1, 9)) for d in decoders)
    assert torch.equal(new, old_)
    notes = open_checkpoint(old).notes
    assert any("without its head" in note for note in notes)
    assert any("computed anew" in note for note in notes) == bool(tables)


def test_a_config_that_contradicts_itself_is_no_config():
    good = config_of("llama").model_dump()
    for change, text in (
        ({"rotary_dim": 18}, "rotary_dim 18"),
        ({"layers": ({"rope": "local_rope"},) * 6}, "local_rope"),
        ({"layers": ({"experts": True},) * 6}, "experts"),
        ({"qk_norm": "head", "qkv_clip": 1.0}, "qkv_clip"),
        ({"position_embedding": "learned", "context_len": 4096}, "rows of the position table"),
    ):
        with pytest.raises(ValueError, match=text):
            DecoderConfig.model_validate(good | change)
