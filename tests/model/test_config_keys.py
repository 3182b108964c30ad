"""Reading config.json: every spelling of every version, defaults as transformers has them, and what is refused."""

import json
import time
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from tests.model.families import INNER_KEYS, VARIANTS, hf_config
from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig
from toolchain.model.hf import FAMILIES, config_from_hf, stored_parts
from toolchain.model.positions import inverse_frequencies, position_tables

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
TOKENS = {"bos_token_id", "eos_token_ids"}  # absent here means that generation asks elsewhere


def read(document):
    """The config a document describes, as a dictionary without the special tokens."""
    return config_from_hf(deepcopy(document), {}).model_dump(exclude=TOKENS)


def outcome(document):
    """What `read` gives, or that it refuses."""
    try:
        return read(document)
    except DtoolError:
        return "refused"


def document_of(name):
    return json.loads(hf_config(name).to_json_string(use_diff=False)) | {"model_type": VARIANTS[name][0]}


def as_transformers_reads(document):
    """The document with everything filled in that transformers takes for granted."""
    config = CONFIG_MAPPING[document["model_type"]].from_dict(deepcopy(document))
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_missing_key_means_what_it_means_to_transformers(name):
    document = document_of(name)
    aliases = FAMILIES[VARIANTS[name][0]].aliases
    needed = {*SIZES, *(aliases.get(key, key) for key in SIZES)}
    for key in sorted(set(document) - {"model_type"}):
        fewer = {k: v for k, v in document.items() if k != key}
        if key not in needed:
            assert outcome(fewer) == outcome(as_transformers_reads(fewer)), key
        elif key not in INNER_KEYS.values():  # some families say four times the hidden size
            with pytest.raises(DtoolError, match=key):
                read(fewer)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_alone_are_a_config(family):
    sizes = {"vocab_size": 97, "hidden_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 32}
    aliases = FAMILIES[family].aliases
    document = {aliases.get(key, key): value for key, value in (sizes | {"intermediate_size": 128}).items()}
    document["model_type"] = family
    assert read(document) == read(as_transformers_reads(document))


def old_spelling(document):
    """The document as transformers 4 would have written it: no `rope_parameters`, no `layer_types`."""
    old = {k: v for k, v in document.items() if k not in {"rope_parameters", "layer_types", "dtype"}}
    block = dict(document.get("rope_parameters") or {})
    if "full_attention" in block:
        old["rope_local_base_freq"] = block["sliding_attention"]["rope_theta"]
        block = dict(block["full_attention"])
    neox = document["model_type"] == "gpt_neox"
    theta, share = block.pop("rope_theta", None), block.pop("partial_rotary_factor", None)
    if theta is not None:
        old["rotary_emb_base" if neox else "rope_theta"] = theta
    if share is not None:
        old["rotary_pct" if neox else "partial_rotary_factor"] = share
    rope_type = block.pop("rope_type", "default")
    old["rope_scaling"] = None if rope_type == "default" else {"type": rope_type} | block
    if document["model_type"] in {"gemma3_text", "cohere2"}:
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern", 4)
    return old


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"gemma3_scaled"}))  # whose layers follow no pattern
def test_configs_of_transformers_4_mean_the_same(name):
    document = document_of(name)
    assert read(old_spelling(document)) == read(document)


@pytest.mark.parametrize(
    ("fields", "second"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 0.193923),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_theta": 10000.0}, 0.193923),
        ({"rope_theta": 500000.0}, 0.193923),
        ({}, 0.316228),
        ({"rope_theta": None, "rope_parameters": None}, 0.316228),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 0.0790569),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 0.0790569),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}}, 0.0790569),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": None}}, 0.0790569),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}}, 0.193923 / 4),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500000.0}, 0.193923 / 4),
        ({"rope_scaling": None}, 0.316228),
        ({"rope_scaling": {}}, 0.316228),
    ],
)
def test_rotary_base_and_scaling_are_found_where_any_version_puts_them(fields, second):  # C-01, C-02
    config = config_from_hf(LLAMA | fields, {})
    assert float(inverse_frequencies(config, config.rope)[1]) == pytest.approx(second, rel=1e-5)


def test_both_spellings_of_the_rope_block_may_stand_side_by_side_if_they_agree():
    newer = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500000.0}
    older = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read(LLAMA | {"rope_parameters": newer, "rope_scaling": older}) == read(LLAMA | {"rope_parameters": newer})
    with pytest.raises(DtoolError, match="contradict each other"):
        read(LLAMA | {"rope_parameters": newer, "rope_scaling": older | {"factor": 8.0}})
    with pytest.raises(DtoolError, match="contradict each other"):
        read(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": older})


def test_the_first_phi3_configs_call_longrope_su():
    block = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    document = LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": block}
    rope = config_from_hf(document, {}).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("longrope", 2.0, 64)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "lama"}, "did you mean llama"),
        ({"model_type": None}, "expected: the key model_type"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "RoPE type 'foo'"),
        ({"rope_scaling": {"type": "foo"}}, "default, linear, ntk, dynamic, yarn, llama3, longrope"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "RoPE type 'proportional'"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "unknown beta"),
        ({"rope_scaling": {"factor": 8.0}}, "names no type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "low_freq_factor below high_freq_factor",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "no long_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
            "a factor for every rotary pair",
        ),
        ({"rope_scaling": "linear"}, "not an object"),
        ({"rope_theta": float("inf")}, "finite"),
        ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ({"hidden_act": "swiglu"}, "silu, swish, gelu"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
        ({"hidden_act": {"name": "silu"}}, "is not supported"),
        ({"rope_theta": 0}, "rope_theta: Input should be greater than 0"),
        ({"rope_theta": -10000.0}, "rope_theta: Input should be greater than 0"),
        ({"rope_theta": "10000"}, "rope_theta: Input should be a valid number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "rope_theta: Input should be greater"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor: Input should be a valid number"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor: Input should be a valid number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": "32"}},
            "original_max_position_embeddings of config.json is no size",
        ),
        ({"model_type": "stablelm", "partial_rotary_factor": "0.5"}, "partial_rotary_factor of config.json is no"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps of config.json is no number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps of config.json is no number"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings of config.json is no truth value"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings of config.json is no truth value"),
        ({"attention_bias": "false"}, "attention_bias of config.json is no truth value"),
        ({"model_type": "cohere", "use_qk_norm": "no"}, "use_qk_norm of config.json is no truth value"),
        ({"model_type": "cohere", "logit_scale": "0.5"}, "logit_scale of config.json is no number"),
        ({"model_type": "gemma2", "attn_logit_softcapping": "50"}, "attn_logit_softcapping of config.json is no"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -256}, "query_pre_attn_scalar of config.json is no"),
        ({"model_type": "qwen2", "max_window_layers": "1"}, "max_window_layers of config.json is no size"),
        ({"model_type": "smollm3", "no_rope_layers": ["no", "no"]}, "no_rope_layers of config.json is no list"),
        ({"eos_token_id": "2"}, "eos_token_ids.0: Input should be a valid integer"),
        ({"bos_token_id": True}, "bos_token_id: Input should be a valid integer"),
        ({"is_encoder_decoder": True}, "sets is_encoder_decoder"),
        ({"add_cross_attention": True}, "sets add_cross_attention"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
        ({"architectures": ["LlamaForTokenClassification"]}, "found:    LlamaForTokenClassification"),
        ({"architectures": "LlamaForCausalLM"}, "no list of names"),
        ({"vocab_size": None}, "the key vocab_size"),
        ({"hidden_size": "64"}, "hidden_size of config.json is no size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "1..4096"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"rms_norm_eps": -1.0}, "norm_eps"),
        ({"dtype": "float64"}, "dtype"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "1 layers are described"),
        ({"model_type": "gemma2", "sliding_window": 0}, "a sliding_window of at least 1"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 0}, "decoder_sparse_step of config.json is no size"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "config.json describes no decoder"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "short_factor": [1], "long_factor": [1]}}, "unknown"),
    ],
)
def test_configs_dtool_cannot_build_are_refused_at_once(changes, text):
    start = time.perf_counter()
    with pytest.raises(DtoolError) as failure:
        read(LLAMA | changes)
    assert time.perf_counter() - start < 0.5
    assert text in str(failure.value)


def test_stored_precision_is_read_from_the_newer_key_first():
    assert read(LLAMA | {"dtype": "bfloat16", "torch_dtype": "float16"})["dtype"] == "bfloat16"
    assert read(LLAMA | {"torch_dtype": "torch.float16"})["dtype"] == "float16"


def test_keys_that_nothing_asks_for_are_noted():
    notes: list[str] = []
    config_from_hf(LLAMA | {"use_cache": True, "attention_sinks": 4, "rope_scaling": None}, {}, notes=notes)
    assert notes == ["config keys that dtool does not know: attention_sinks"]


def test_an_unknown_model_type_prints_the_list_once():
    with pytest.raises(DtoolError) as failure:
        read(LLAMA | {"model_type": "zzzzz"})
    assert str(failure.value).count("starcoder2") == 1


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "gpt_neox", "opt", "xglm", "falcon"])
def test_kv_heads_of_models_that_have_none_are_left_out_with_a_note(model_type):
    document = document_of(model_type)
    notes: list[str] = []
    config = config_from_hf(document | {"num_key_value_heads": 1}, {}, notes=notes)
    assert config == config_from_hf(document, {})
    assert [note for note in notes if "num_key_value_heads" in note]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"eos_token_id": 97}, "eos_token_id 97"),
        ({"eos_token_id": [2, 50256]}, "eos_token_id 50256"),
        ({"eos_token_id": -1}, "eos_token_id -1"),
        ({"bos_token_id": 97}, "bos_token_id 97"),
    ],
)
def test_special_tokens_outside_the_vocabulary_are_noted(fields, text):
    notes: list[str] = []
    config_from_hf(LLAMA | fields, {}, notes=notes)
    assert notes == [f"outside the vocabulary of 97 tokens, so never met: {text}"]


@pytest.mark.parametrize("names", [["LlamaModel"], ["LlamaForCausalLM"], ["Odd", "LlamaForCausalLM"], [], None])
def test_causal_models_and_their_trunks_pass_without_a_note(names):
    notes: list[str] = []
    config_from_hf(LLAMA | {"architectures": names}, {}, notes=notes)
    assert not notes


def test_a_class_of_an_unknown_kind_is_noted():
    notes: list[str] = []
    config_from_hf(LLAMA | {"architectures": ["LlamaThing"]}, {}, notes=notes)
    assert notes == ["the config's architectures say LlamaThing: taken as a causal language model"]


def test_a_context_shorter_than_the_models_is_noted():
    notes: list[str] = []
    assert config_from_hf(LLAMA, {}, context_len=100, notes=notes).context_len == 100
    assert notes == ["serves 100 of 128 positions (context_len)"]
    with pytest.raises(DtoolError, match=r"not in 1\.\.128"):
        config_from_hf(LLAMA, {}, context_len=129)


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31, 10**30]),
    st.floats(),
    st.text(max_size=3),
    st.just([]),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "full_attention"]), st.integers(-1, 4), max_size=2),
)
DOCUMENTS = {name: document_of(name) for name in VARIANTS}


@settings(deadline=2000, max_examples=400)
@given(st.data())
def test_no_config_raises_anything_but_a_refusal(data):
    document = deepcopy(DOCUMENTS[data.draw(st.sampled_from(sorted(DOCUMENTS)))])
    for key in data.draw(st.lists(st.sampled_from(sorted(document)), min_size=1, max_size=3, unique=True)):
        if key == "model_type" or not data.draw(st.booleans()):
            document[key] = data.draw(ODD_VALUES)
        elif isinstance(document[key], dict):
            document[key][data.draw(st.sampled_from(sorted(document[key]) or ["factor"]))] = data.draw(ODD_VALUES)
        else:
            del document[key]
    try:
        config = config_from_hf(document, {}, notes=[])
    except DtoolError:
        return
    stored_parts(document, config)
    if config.context_len < 1000 and config.rotary_dim < 1000:
        position_tables(config)


def test_any_config_survives_its_own_json():
    for name in VARIANTS:
        config = config_from_hf(DOCUMENTS[name], {})
        assert DecoderConfig.model_validate_json(config.model_dump_json()) == config
