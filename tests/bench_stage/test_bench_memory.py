import json

import pytest
import torch
from bench_runner_stubs import make_artifact, tiny_config, tiny_document

from toolchain.bench import memory
from toolchain.bench.export_cost import stored_shapes
from toolchain.errors import DtoolError
from toolchain.model.caches import CacheFormat, describe_caches
from toolchain.model.parameters import parameter_shapes
from toolchain.recipe_sections import Bench
from toolchain.tensor_file import write_tensors

TINY_BENCH = Bench(prompt_lens=(4, 8), new_tokens=2)


def write_checkpoint(folder, config):
    folder.mkdir()
    document = tiny_document(tie_word_embeddings=config.tie_word_embeddings)
    (folder / "config.json").write_text(json.dumps(document))
    tensors = {n: torch.rand(s) for n, s in stored_shapes(document, config).items()}
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def test_a_tied_matrix_is_read_whole_by_the_head(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    step = memory.artifact_step_bytes(make_artifact(tmp_path / "a", config), config)
    assert step == memory.eager_step_bytes(config)
    parameters = sum(torch.Size(s).numel() for s in parameter_shapes(config).values())
    assert step.weight_bytes == 4 * parameters
    assert step.row_bytes == 0


def test_of_an_untied_embedding_one_row_is_read(tmp_path):
    config = tiny_config()
    step = memory.artifact_step_bytes(make_artifact(tmp_path / "a", config, torch.float16, cache="int8"), config)
    parameters = sum(torch.Size(s).numel() for s in parameter_shapes(config).values())
    assert step.weight_bytes == 2 * (parameters - 50 * 8)
    assert step.row_bytes == 2 * 8
    assert step.kv_bytes_per_token == 2 * 2 * 1 * 4


def test_scales_of_a_quantized_embedding_are_looked_up_too(tmp_path):
    config = tiny_config()
    scales = {"model.embed_tokens.weight_scale": torch.zeros(50)}
    plain = memory.artifact_step_bytes(make_artifact(tmp_path / "a", config), config)
    step = memory.artifact_step_bytes(make_artifact(tmp_path / "b", config, extra=scales.items()), config)
    assert step.weight_bytes == plain.weight_bytes
    assert step.row_bytes == plain.row_bytes + 4


def test_bandwidth_use_counts_weights_once_and_each_rows_cache():
    step = memory.StepBytes(weight_bytes=1_000_000, row_bytes=0, kv_bytes_per_token=1000)
    mbu = memory.bandwidth_utilization(step, batch=2, prompt_tokens=95, new_tokens=9, tpot_ms=1.0, bandwidth_gb_s=2.4)
    assert mbu == pytest.approx((1_000_000 + 2 * 1000 * 100) / 1e-3 / 2.4e9)


def test_bandwidth_is_of_this_machine(monkeypatch):
    monkeypatch.setattr(memory, "BUFFER_BYTES", 1 << 24)
    assert 0.5 < memory.measure_bandwidth() < 5000


def test_peak_memory_is_that_of_a_fresh_process(tmp_path):
    folder = write_checkpoint(tmp_path / "model", tiny_config())
    ballast = torch.ones(100 << 20)  # 400 MB of ours, which the child must not show
    peak = memory.measure_peak(folder, TINY_BENCH, eager=True)
    assert ballast.numel() * 4 < memory.own_memory().peak_bytes
    assert 50e6 < peak.anonymous_bytes <= peak.peak_bytes
    assert peak.peak_bytes < memory.own_memory().peak_bytes


def test_a_child_that_fails_says_why(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DtoolError, match="could not be measured") as caught:
        memory.measure_peak(tmp_path, TINY_BENCH, eager=False)
    assert "schema version" in str(caught.value)


def test_of_experts_those_that_the_rows_are_expected_to_choose_are_read():
    """2 of 8 experts: one row reads a quarter, two rows 1 - (3/4)^2 of them."""
    step = memory.StepBytes(
        weight_bytes=100, row_bytes=0, kv_bytes_per_token=0, expert_bytes=800, num_experts=8, experts_per_token=2
    )
    assert step.total(1, 10) == pytest.approx(100 + 800 / 4)
    assert step.total(2, 10) == pytest.approx(100 + 800 * (1 - (3 / 4) ** 2))


def test_scales_of_tokens_and_layers_left_in_float_are_counted(tmp_path):
    """Two layers of one KV head of 4 dims: int8 with two float32 scales a token, and float32."""
    config = tiny_config()
    artifact = make_artifact(tmp_path / "a", config)
    caches = (CacheFormat("int8", token_scales=True), CacheFormat("float32"))
    artifact.manifest.kv_contract.update(describe_caches(caches))
    step = memory.artifact_step_bytes(artifact, config)
    assert step.layer_kv_bytes == (2 * (4 + 4), 2 * 4 * 4)
    assert step.kv_bytes_per_token == 48
    assert step.total(3, 10) == step.weight_bytes + 3 * (step.row_bytes + 10 * 48)
    windowed = step.model_copy(update={"windows": (0, 5)})
    assert windowed.total(1, 10) == step.weight_bytes + step.row_bytes + 10 * 16 + 5 * 32


def test_a_layer_with_a_window_reads_the_window():
    """Two layers of 10 bytes a token each: one sees 100 tokens, the other 16."""
    step = memory.StepBytes(weight_bytes=0, row_bytes=0, kv_bytes_per_token=20, windows=(0, 16))
    assert step.total(1, 100) == pytest.approx(10 * 100 + 10 * 16)
    assert step.total(1, 8) == pytest.approx(20 * 8)
