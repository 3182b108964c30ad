"""The account of a model: exact against transformers' own counts, known values, and numbers worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolchain.errors import DtoolError
from toolchain.model.accounting import (
    COMPONENTS,
    WEIGHT_FORMATS,
    count_active,
    count_parameters,
    decode_work,
    expected_experts,
    kv_bytes_per_token,
    make_setting,
    prefill_work,
    training_bytes,
    weight_bytes,
)
from toolchain.model.config import DecoderConfig, Layer
from toolchain.model.parameters import parameter_shapes
from toolchain.model.roofline import Figure, Gpu, account, gpus_named, largest_batch

LLAMA_2_7B = DecoderConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, head_dim=128, max_position_embeddings=4096, norm_eps=1e-5,
)  # fmt: skip
MIXTRAL_8X7B = DecoderConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, norm_eps=1e-5, num_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=14336, layers=(Layer(experts=True),) * 32,
)  # fmt: skip
MISTRAL_LAYERS = tuple(Layer(window=1024 if i % 2 else 0) for i in range(32))
SMALL = {
    "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": 16, "norm_eps": 1e-5,
}  # fmt: skip
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
OURS = SHAPE | {"head_dim": 8, "norm_eps": 1e-5}
MHA = {"num_key_value_heads": 4}
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
LAYER_NORM = {"norm": "layer", "norm_bias": True}
TIED = {"tie_word_embeddings": True}
SHARED = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip

FAMILIES = {
    "LlamaForCausalLM": ({}, {}),
    "Qwen3ForCausalLM": ({"head_dim": 16, **TIED}, {"head_dim": 16, "qk_norm": "head", **TIED}),
    "Olmo2ForCausalLM": ({}, {"norm_placement": "output", "qk_norm": "width"}),
    "Gemma2ForCausalLM": ({"head_dim": 8}, {"norm_placement": "sandwich", **TIED}),
    "CohereForCausalLM": (
        {},
        {"norm": "layer", "parallel_residual": True, **TIED},
    ),
    "PhiForCausalLM": (
        MHA,
        MHA | BIASES | LAYER_NORM | {"gated_mlp": False, "parallel_residual": True, "lm_head_bias": True},
    ),
    "GPTNeoXForCausalLM": (
        MHA,
        MHA | BIASES | LAYER_NORM | {"gated_mlp": False, "parallel_residual": True, "parallel_norms": 2},
    ),
    "OPTForCausalLM": (
        {"ffn_dim": 48, "word_embed_proj_dim": 32},
        MHA | BIASES | LAYER_NORM
        | {"gated_mlp": False, "position_embedding": "learned", "position_offset": 2, **TIED},
    ),
    "GPT2LMHeadModel": (
        {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_inner": 48, "n_positions": 64},
        MHA | BIASES | LAYER_NORM
        | {"gated_mlp": False, "position_embedding": "learned", **TIED},
    ),
    "MixtralForCausalLM": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "layers": (Layer(experts=True),) * 3},
    ),
    "Qwen2MoeForCausalLM": (
        SHARED,
        SHARED | {"qkv_bias": True, "layers": (Layer(experts=True),) * 3},
    ),
}  # fmt: skip


def total(config):
    return sum(count_parameters(config).values())


def toy_gpu(flops_per_s=1000.0, bytes_per_s=100.0, memory_bytes=2000.0, **more):
    figures = {"float16_flops_per_s": flops_per_s, "memory_bytes": memory_bytes, "bandwidth_bytes_per_s": bytes_per_s}
    return Gpu(
        name="toy",
        product="toy",
        **{name: Figure(value=v, source="the test") for name, v in (figures | {"sm": 90} | more).items()},
    )


def test_llama_2_7b_has_its_known_parameters_cache_and_training_memory():
    counts = count_parameters(LLAMA_2_7B)
    assert total(LLAMA_2_7B) == 6_738_415_616
    assert counts["embedding"] == counts["head"] == 32000 * 4096
    assert counts["attention_qkv"] == 32 * 3 * 4096 * 4096
    assert counts["feed_forward"] == 32 * 3 * 4096 * 11008
    assert counts["norms"] == 65 * 4096
    assert kv_bytes_per_token(LLAMA_2_7B, "float16") == 524_288
    assert kv_bytes_per_token(LLAMA_2_7B, "float16") * 4096 == 2 * 2**30
    assert kv_bytes_per_token(LLAMA_2_7B, "int8") == kv_bytes_per_token(LLAMA_2_7B, "fp8_e4m3") == 262_144
    assert training_bytes(LLAMA_2_7B) == 16 * 6_738_415_616
    assert sum(weight_bytes(LLAMA_2_7B, "float16").values()) == 2 * 6_738_415_616


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_transformers_counts(family):
    import torch
    import transformers

    theirs, ours = FAMILIES[family]
    model_class = getattr(transformers, family)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**(SHAPE | theirs)))
    assert total(DecoderConfig(**(OURS | ours))) == sum(p.numel() for p in model.parameters())


def test_a_tied_matrix_counts_once_and_is_read_whole_by_the_head():
    untied, tied = (DecoderConfig(**SMALL, tie_word_embeddings=tie) for tie in (False, True))
    assert total(untied) - total(tied) == 10 * 4
    assert count_parameters(tied)["head"] == 0
    works = [decode_work(config, make_setting(config, 5)) for config in (untied, tied)]
    assert works[0] == works[1]


def test_mixtral_uses_12_9_of_its_46_7_billion_parameters_for_a_token():
    assert total(MIXTRAL_8X7B) == 46_702_792_704
    assert sum(count_active(MIXTRAL_8X7B).values()) == 12_879_925_248


def test_experts_are_read_once_each_however_many_tokens_choose_them():
    assert expected_experts(MIXTRAL_8X7B, 1) == pytest.approx(2)
    assert expected_experts(MIXTRAL_8X7B, 2) == pytest.approx(2 + 2 * 6 / 8)
    assert expected_experts(MIXTRAL_8X7B, 10_000) == pytest.approx(8)
    setting = make_setting(MIXTRAL_8X7B, 128)
    one, full = decode_work(MIXTRAL_8X7B, setting), prefill_work(MIXTRAL_8X7B, setting)
    experts = weight_bytes(MIXTRAL_8X7B, "float16")["experts"]
    assert full.weight_bytes - one.weight_bytes == experts * 3 // 4 + 127 * 4096 * 2
    assert full.product_flops == 128 * one.product_flops


def test_a_small_model_is_what_it_is_by_hand():
    config = DecoderConfig(**SMALL)
    # a layer: qkv (4 + 2 + 2) x 4 = 32, o 4 x 4 = 16, gate and up 12 x 4 = 48, down 4 x 6 = 24; two norms of 4
    expected = {
        "embedding": 40,
        "attention_qkv": 64,
        "attention_output": 32,
        "feed_forward": 144,
        "head": 40,
        "norms": 20,
    }
    assert {name: n for name, n in count_parameters(config).items() if n} == expected
    assert sum(weight_bytes(config, "float32").values()) == 4 * 340
    # codes of 240 elements, a scale for each of 2 x (8 + 4 + 12 + 4) rows, 100 elements in float16
    assert sum(weight_bytes(config, "int8").values()) == 240 + 4 * 56 + 200
    assert kv_bytes_per_token(config, "float16") == 2 * 2 * 1 * 2 * 2
    setting = make_setting(config, 5)
    decode, prefill = decode_work(config, setting), prefill_work(config, setting)
    assert decode.product_flops == 2 * 240
    assert decode.float_flops == 2 * 40 + 2 * (4 * 2 * 2 * 5)  # the head; two layers that see five tokens
    assert decode.weight_bytes == 2 * (340 - 40) + 2 * 4  # all but the table, of which a row
    assert decode.kv_bytes == 2 * 8 * (5 + 1)  # two layers, K and V of 2 elements: five read, one written
    assert decode.intensity == (480 + 80 + 160) / (608 + 96)
    assert prefill.product_flops == 5 * 2 * 240
    assert prefill.float_flops == 2 * 40 + 2 * (4 * 2 * 2) * (1 + 2 + 3 + 4 + 5)
    assert prefill.weight_bytes == 600 + 5 * 8
    assert prefill.kv_bytes == 2 * 8 * (5 + 5)
    batched = decode_work(config, make_setting(config, 5, batch=3))
    assert (batched.flops, batched.kv_bytes) == (3 * decode.flops, 3 * decode.kv_bytes)
    assert batched.weight_bytes == 600 + 3 * 8


def test_times_and_the_largest_batch_are_what_they_are_by_hand():
    config = DecoderConfig(**SMALL)
    setting = make_setting(config, 5)
    work = decode_work(config, setting)
    assert toy_gpu().time(work, "float16") == (pytest.approx(1e3 * 704 / 100), "memory")
    assert toy_gpu(bytes_per_s=1000.0).time(work, "float16") == (pytest.approx(720.0), "compute")
    mixed = toy_gpu(bytes_per_s=1e9, int8_flops_per_s=2000.0)
    assert mixed.time(work, "int8") == (pytest.approx(1e3 * (480 / 2000 + 240 / 1000)), "compute")
    assert toy_gpu(bytes_per_s=1e9).time(work, "int8") == (pytest.approx(720.0), "compute")  # no rate: float16's
    assert largest_batch(config, setting, toy_gpu()) == (1800 - 680) // (16 * 5)
    assert largest_batch(config, setting, toy_gpu(memory_bytes=700.0)) is None
    report = account(config, setting, [toy_gpu(memory_bytes=700.0)])["gpus"][0]
    assert (report["largest_batch"], report["weights_fit"], report["fits"]) == (0, False, False)


def test_decode_at_batch_one_is_memory_bound_and_prefill_compute_bound_on_h200():
    (report,) = account(LLAMA_2_7B, make_setting(LLAMA_2_7B, 2048), gpus_named(["H200"]))["gpus"]
    assert report["decode"]["bound"] == "memory"
    assert report["prefill"]["bound"] == "compute"
    assert report["ridge_flops_per_byte"] == pytest.approx(989.5 / 4.8)
    # 12.95 GB of matrices, the head and 1 GiB of cache at 4.8 TB/s
    assert report["decode"]["tpot_ms"] == pytest.approx(2.977, rel=1e-3)
    assert report["decode"]["tokens_per_s"] == pytest.approx(1e3 / report["decode"]["tpot_ms"])
    assert report["prefill"]["attained_flops_per_s"] == pytest.approx(989.5e12)


def test_intensity_grows_with_the_batch_and_the_bound_turns_where_it_meets_the_ridge():
    config = LLAMA_2_7B.model_copy(update={"num_key_value_heads": 1})
    (report,) = account(config, make_setting(config, 16, batch=4096), gpus_named(["A100"]))["gpus"]
    bounds = [entry["bound"] for entry in report["decode_by_batch"]]
    assert bounds == ["memory"] * 4 + ["compute"] * 2
    rates = [entry["attained_flops_per_s"] for entry in report["decode_by_batch"]]
    assert rates == sorted(rates)
    assert rates[-1] <= report["peak_flops_per_s"] * (1 + 1e-12)


def test_windows_save_reading_and_work_but_no_memory():
    windowed = LLAMA_2_7B.model_copy(update={"layers": MISTRAL_LAYERS})
    setting = make_setting(LLAMA_2_7B, 4096)
    full, local = decode_work(LLAMA_2_7B, setting), decode_work(windowed, setting)
    per_layer = 2 * 32 * 128 * 2
    assert full.kv_bytes - local.kv_bytes == 16 * (4096 - 1024) * per_layer
    assert full.flops - local.flops == 16 * (4096 - 1024) * 4 * 32 * 128
    assert prefill_work(windowed, setting).flops < prefill_work(LLAMA_2_7B, setting).flops
    assert prefill_work(windowed, setting).kv_bytes == prefill_work(LLAMA_2_7B, setting).kv_bytes
    gpu = gpus_named(["h200"])[0]
    assert largest_batch(windowed, setting, gpu) == largest_batch(LLAMA_2_7B, setting, gpu)
    short = make_setting(windowed, 512)
    assert decode_work(windowed, short) == decode_work(LLAMA_2_7B, short)


def test_int4_takes_the_groups_that_quantize_takes():
    from toolchain.quantize.plan import legal_group

    for width in range(2, 1100, 2):
        for asked in (32, 64, 128):
            group = legal_group(width, asked)
            expected = 3 * width * 2 if group is None else 3 * width // 2 + 3 * (width // group) * 4
            assert WEIGHT_FORMATS[f"int4_g{asked}"].matrix_bytes(3, width) == expected


def test_every_figure_has_a_source_and_is_a_dense_one():
    gpus = {gpu.name: gpu for gpu in gpus_named()}
    assert set(gpus) == {
        "H200", "H100", "A100", "L40S", "L4", "A10", "RTX 4090", "RTX 6000 Pro", "B200", "Orin", "Thor",
    }  # fmt: skip
    for gpu in gpus.values():
        assert all(figure.source for figure in gpu.figures.values())
        assert {"sm", "float16_flops_per_s", "memory_bytes", "bandwidth_bytes_per_s"} <= set(gpu.figures)
        assert ("fp8_e4m3_flops_per_s" in gpu.figures) == (gpu.sm.value >= 89)
        # without sparsity 8-bit products run at twice float16's rate, or four times where GeForce halves its sums
        assert gpu.rate("int8") / gpu.rate("float16") == pytest.approx(
            4 if gpu.name == "RTX 4090" else 2, rel=0.02
        ) or (gpu.int8_flops_per_s is None)
        assert 20 < gpu.rate("float16") / gpu.bandwidth_bytes_per_s.value < 1000
    assert gpus["A100"].rate("float16") == 312e12
    assert gpus["A100"].rate("fp8_e4m3") == gpus["A100"].rate("float16")


@pytest.mark.parametrize("name", ["RTX 6000 Pro", "rtx-pro-6000", "RTX PRO 6000", "rtx6000pro"])
def test_a_gpu_is_found_however_it_is_spelt(name):
    assert [gpu.name for gpu in gpus_named([name, "RTX 6000 Pro"])] == ["RTX 6000 Pro"]


def test_what_is_unknown_or_impossible_is_refused():
    with pytest.raises(DtoolError, match=r"no figures for a GPU called 'H300'[\s\S]*did you mean H"):
        gpus_named(["H300"])
    with pytest.raises(DtoolError, match=r"unknown weight format 'int5'[\s\S]*int"):
        make_setting(LLAMA_2_7B, weights="int5")
    with pytest.raises(DtoolError, match=r"unknown cache format 'int4_g32'"):
        make_setting(LLAMA_2_7B, cache="int4_g32")
    for context in (0, 4097):
        with pytest.raises(DtoolError, match=f"a context of {context} tokens"):
            make_setting(LLAMA_2_7B, context)
    assert make_setting(MIXTRAL_8X7B).context_tokens == 4096
    assert make_setting(DecoderConfig(**SMALL)).context_tokens == 16


@st.composite
def configs(draw):
    heads = draw(st.sampled_from([(1, 1), (4, 2), (6, 3), (4, 1)]))
    layers, window = draw(st.integers(1, 4)), st.integers(0, 20)
    experts = draw(st.integers(0, 6))
    mixed = experts > 0 and draw(st.booleans())
    fields = {
        "vocab_size": draw(st.integers(1, 300)),
        "hidden_size": draw(st.sampled_from([8, 64, 100, 256])),
        "intermediate_size": draw(st.integers(1, 300)),
        "num_hidden_layers": layers,
        "layers": tuple(
            Layer(window=draw(window), experts=experts > 0 and not (mixed and i % 2)) for i in range(layers)
        ),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": draw(st.sampled_from([2, 16])),
        "max_position_embeddings": 64,
        "norm_eps": 1e-5,
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)) if experts else 0,
        "moe_intermediate_size": draw(st.integers(1, 200)) if experts else 0,
        "shared_expert_intermediate_size": draw(st.sampled_from([0, 10])),
        "qk_norm": draw(st.sampled_from(["none", "head", "head_layer", "width"])),
        "norm_placement": draw(st.sampled_from(["pre", "output", "sandwich", "stream"])),
        "position_embedding": draw(st.sampled_from(["none", "learned", "sinusoidal"])),
    }
    names = ("qkv_bias", "o_bias", "mlp_bias", "norm_bias", "gated_mlp", "tie_word_embeddings", "lm_head_bias")
    return DecoderConfig(**fields, **{name: draw(st.booleans()) for name in names})


@given(configs(), st.integers(1, 64), st.integers(1, 5), st.sampled_from(sorted(WEIGHT_FORMATS)))
@settings(max_examples=60, deadline=None)
def test_every_account_is_consistent_with_itself(config, context, batch, weights):
    shapes, counts = parameter_shapes(config), count_parameters(config)
    assert tuple(counts) == COMPONENTS
    assert sum(counts.values()) == sum(math.prod(shape) for shape in shapes.values())
    assert sum(weight_bytes(config, "float32").values()) == 4 * sum(counts.values())
    assert all(active <= counts[name] for name, active in count_active(config).items())
    setting = make_setting(config, context, batch, weights)
    prefill, decode = prefill_work(config, setting), decode_work(config, setting)
    windows = [config.layer(i).window or context for i in range(config.num_hidden_layers)]
    pairs = sum(min(t, window) for window in windows for t in range(1, context + 1))
    heads = config.num_attention_heads * config.head_dim
    router = sum(math.prod(shape) for name, shape in shapes.items() if "gate." in name.replace("_gate.", "gate."))
    head = config.vocab_size * config.hidden_size
    assert prefill.float_flops == batch * (2 * context * router + 2 * head + 4 * heads * pairs)
    assert prefill.product_flops == context * decode.product_flops
    first = make_setting(config, 1, batch, weights)
    assert prefill_work(config, first) == decode_work(config, first)
    assert decode.weight_bytes <= prefill.weight_bytes
