import json

import pytest
import torch
from bench_runner_stubs import make_artifact, tiny_config

from toolchain.bench import memory
from toolchain.errors import DtoolError
from toolchain.model.hf import parameter_shapes, stored_shapes
from toolchain.recipe import Bench
from toolchain.tensor_file import write_tensors

TINY_BENCH = Bench(prompt_lens=(4, 8), new_tokens=2)


def write_checkpoint(folder, config):
    folder.mkdir()
    document = config.model_dump(mode="json", exclude={"rope_scaling", "eos_token_ids"})
    (folder / "config.json").write_text(json.dumps(document | {"model_type": "llama"}))
    tensors = {n: torch.rand(s) for n, s in stored_shapes(config).items()}
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
