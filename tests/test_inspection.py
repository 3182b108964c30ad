import json
import subprocess
import sys
import time

import pytest

from tests.conftest import BASE, make_recipe
from toolchain.errors import DtoolError
from toolchain.inspection import Question, _weight_format, inspect_path
from toolchain.quantize.stage import quantize_artifact
from toolchain.report import Roofline, render_html, render_text
from toolchain.tensor_file import TensorEntry, read_header

LLAMA_2_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
GPU_KEYS = {"name", "memory_bytes", "bandwidth_bytes_per_s", "ridge_flops_per_byte", "largest_batch", "sources"}


@pytest.fixture
def llama_2_7b(tmp_path):
    folder = tmp_path / "llama-2-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


def test_a_config_without_weights_is_accounted_for(llama_2_7b):
    document, page = inspect_path(llama_2_7b)
    assert document["parameters"] == 6_738_415_616
    assert document["kv_bytes_per_token"]["float16"] == 524_288
    assert document["bytes_by_format"] == {}
    assert document["notes"] == [f"{llama_2_7b} holds no weights: the account is of the config alone"]
    costs = document["accounting"]
    assert costs["setting"] == {"context_tokens": 4096, "batch": 1, "weights": "float16", "cache": "float16"}
    assert costs["kv_cache_bytes"] == 2 * 2**30
    assert costs["weights_bytes"]["float16"] == 2 * 6_738_415_616
    assert sum(costs["parameters"]["components"].values()) == costs["parameters"]["total"]
    assert len(costs["gpus"]) == 11
    assert all(set(gpu) >= GPU_KEYS for gpu in costs["gpus"])
    assert json.loads(json.dumps(document)) == document
    text = render_text(page)
    for word in ("6,738,415,616", "524,288", "feed forward", "H200", "memory", "compute", "lower bounds", "datasheet"):
        assert word in text


def test_the_page_has_bars_per_component_and_the_roofline(llama_2_7b):
    _, page = inspect_path(llama_2_7b, Question(gpus=("h200", "RTX 4090"), batch=4, context=2048))
    html = render_html(page)
    assert "parameters by component" in html
    assert html.count('<rect class="bar"') == 6
    assert html.count('<g class="roof">') == 2
    assert "H200, prefill x 4: 989.5 TFLOP/s" in html
    assert "RTX 4090, prefill x 4" in html
    assert "RTX 4090, decode x 16" not in html  # does not fit
    (plot,) = [part for part in page.parts if isinstance(part, Roofline)]
    assert [load.label for load in plot.loads] == [
        "prefill x 4", "decode x 1", "decode x 4", "decode x 16", "decode x 64",
    ]  # fmt: skip


def test_what_does_not_fit_is_said_and_gets_no_time(llama_2_7b):
    question = Question(gpus=("L4", "H200"), batch=8, weights="bfloat16")
    document, page = inspect_path(llama_2_7b, question)
    small, large = document["accounting"]["gpus"]
    assert (small["largest_batch"], small["fits"], small["weights_fit"]) == (3, False, True)
    assert (large["largest_batch"], large["fits"]) == (52, True)
    assert "batch does not fit" in render_text(page)
    question = Question(gpus=("L4",), weights="float32")
    document, page = inspect_path(llama_2_7b, question)
    assert document["accounting"]["gpus"][0]["largest_batch"] == 0
    assert "weights do not fit" in render_text(page)
    assert "<circle" not in render_html(page)


def test_formats_asked_for_are_those_accounted_for(llama_2_7b):
    document, page = inspect_path(llama_2_7b, Question(weights="int4_g128", cache="int8"))
    costs = document["accounting"]
    assert costs["kv_cache_bytes"] == 2**30
    assert "3.965 GB in int4_g128" in render_text(page)
    # four bits each, a float32 scale for 128, the rest in float16
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert costs["weights_bytes"]["int4_g128"] == matrices // 2 + matrices // 128 * 4 + 2 * (6_738_415_616 - matrices)


def test_a_wrong_gpu_a_wrong_format_and_a_broken_config_are_refused(llama_2_7b, tmp_path):
    with pytest.raises(DtoolError, match="no figures for a GPU called 'H3000'"):
        inspect_path(tmp_path / "none", Question(gpus=("H3000",)))
    with pytest.raises(DtoolError, match="unknown weight format 'int7'"):
        inspect_path(llama_2_7b, Question(weights="int7"))
    with pytest.raises(DtoolError, match="5000"):
        inspect_path(llama_2_7b, Question(context=5000))
    (llama_2_7b / "config.json").write_text("{")
    with pytest.raises(DtoolError, match="is not JSON"):
        inspect_path(llama_2_7b)
    with pytest.raises(DtoolError, match="not a checkpoint"):
        inspect_path(tmp_path / "none")


def test_a_checkpoint_with_weights_shows_what_is_stored_and_what_it_costs(tiny):
    folder, model = tiny
    document, page = inspect_path(folder)
    assert document["parameters"] == sum(p.numel() for p in model.parameters())
    assert document["bytes_by_format"] == {"float32": 4 * document["parameters"]}
    assert document["accounting"]["setting"]["context_tokens"] == BASE["max_position_embeddings"]
    assert "stored weights" in render_text(page)


def test_an_artifact_is_accounted_for_in_its_own_formats(exported):
    document, page = inspect_path(exported)
    setting = document["accounting"]["setting"]
    assert (setting["weights"], setting["cache"]) == ("float32", document["kv_contract"]["dtype"])
    text = render_text(page)
    assert "past_key_values.0.key" in text
    assert "roofline" in text


@pytest.mark.parametrize(
    "weights", [{"format": "int8", "skip": []}, {"format": "int8"}, {"format": "int4", "group_size": 32}]
)
def test_the_account_of_a_quantized_artifact_is_of_the_bytes_it_stores(weights, exported, tmp_path):
    artifact = quantize_artifact(exported, make_recipe(weights=weights), tmp_path / "q", report=lambda _: None)
    costs = inspect_path(tmp_path / "q")[0]["accounting"]
    stored = {name: entry.length for name, entry in read_header(artifact.file("weights.safetensors")).items()}
    assert costs["served_weights_bytes"] == sum(stored.values())
    table = sum(size for name, size in stored.items() if name.startswith("model.embed_tokens"))
    row = table // BASE["vocab_size"]  # of the table a step reads one row, all else whole
    assert costs["decode"]["weight_bytes"] == sum(stored.values()) - table + row
    assert costs["notes"][-1].startswith("weights as they are stored")
    asked = inspect_path(tmp_path / "q", Question(weights="float16"))[0]["accounting"]
    assert asked["served_weights_bytes"] == asked["weights_bytes"]["float16"]


def test_an_artifact_with_several_kinds_of_cache_is_accounted_for_layer_by_layer(exported, tmp_path):
    recipe = make_recipe(kv_cache={"format": "int8", "granularity": "token", "skip": ["model.layers.1.*"]})
    quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None)
    document, page = inspect_path(tmp_path / "q")
    costs, name = document["accounting"], "int8_token with 1 of 2 layers in float32"
    assert costs["setting"]["cache"] == name
    assert costs["kv_cache_bytes_per_token"][name] == 2 * 2 * (16 + 4) + 2 * 2 * 16 * 4
    assert costs["kv_cache_bytes"] == costs["kv_cache_bytes_per_token"][name] * costs["setting"]["context_tokens"]
    shown = render_text(page)
    assert "past_key_values.0.key_scale" in shown
    assert "past_key_values.1.value" in shown
    asked, _ = inspect_path(tmp_path / "q", Question(cache="int8_token"))
    assert asked["accounting"]["kv_cache_bytes_per_token"]["int8_token"] == 2 * 2 * 2 * (16 + 4)


@pytest.mark.parametrize(
    ("dtype", "codes", "scale", "name"),
    [
        ("float16", (96, 64), None, "float16"), ("int8", (96, 64), (96,), "int8"),
        ("fp8_e4m3", (96, 64), (96,), "fp8_e4m3"), ("uint8", (96, 64), (96, 4), "int4_g32"),
        ("uint8", (96, 64), (96, 1), "int4_g128"), ("uint8", (96, 64), (96, 8), None), ("int64", (96, 64), None, None),
    ],
)  # fmt: skip
def test_the_format_of_stored_weights_is_told_by_codes_and_scales(dtype, codes, scale, name, tmp_path):
    matrix = "model.layers.0.self_attn.qkv_proj.weight"
    stored = {"model.embed_tokens.weight": TensorEntry(tmp_path, "float32", (10, 64), 0, 0)}
    assert _weight_format(stored) is None
    stored[matrix] = TensorEntry(tmp_path, dtype, codes, 0, 0)
    if scale:
        stored[f"{matrix}_scale"] = TensorEntry(tmp_path, "float32", scale, 0, 0)
    assert _weight_format(stored) == name


def test_inspecting_a_big_config_takes_no_second_and_no_torch(llama_2_7b):
    code = (
        "import sys; from pathlib import Path; from toolchain.inspection import inspect_path;"
        "inspect_path(Path(sys.argv[1]));"
        "print([m for m in ('torch', 'numpy', 'onnx', 'transformers') if m in sys.modules])"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code, llama_2_7b], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    assert time.perf_counter() - start < 5  # half a second; a torch import alone takes more than this on a busy machine


def test_a_context_beyond_the_model_is_refused_in_the_words_of_the_command(tiny):
    with pytest.raises(DtoolError, match="--context 100000 is more than the model has positions") as caught:
        inspect_path(tiny[0], Question(context=100000))
    assert "--set" not in str(caught.value)
