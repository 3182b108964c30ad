"""Layers on their own: exact where logits drift apart, and blind to nothing that matters."""

import shutil

import numpy as np
import pytest
from tiny_parity import VOCAB, make_recipe

from tests.conftest import seal
from toolchain.artifact import open_artifact
from toolchain.engine.stage import build_engine
from toolchain.model.load import load_artifact_decoder
from toolchain.parity.layerwise import layer_errors, layer_rows
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe_sections import Gates
from toolchain.tensor_file import read_header

INTEGER = {
    "weights": {"format": "int8", "skip": []},
    "activations": {"format": "int8", "skip": []},
    "kv_cache": {"format": "int8"},
    "engine": {"kv_capacity": 64, "prompt_len": {"min": 1, "opt": 8, "max": 64}},
}
IDS = np.random.default_rng(3).integers(0, VOCAB, (2, 40))


@pytest.fixture(scope="module")
def recipe(text_file):
    return make_recipe(**INTEGER, calibration={"data": str(text_file), "samples": 4, "seq_len": 30})


@pytest.fixture(scope="module")
def quantized(exported, recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("layers") / "q"
    quantize_artifact(exported, recipe, out, report=lambda _: None)
    return out


def errors(candidate, source):
    return layer_errors(open_artifact(candidate), load_artifact_decoder(open_artifact(source)), IDS)


def test_graph_and_engine_of_integer_products_are_exact_layer_by_layer(quantized, recipe, tmp_path):
    engine = build_engine(quantized, recipe, tmp_path / "e", report=lambda _: None)
    for candidate in (quantized, engine.path):
        found = errors(candidate, quantized)
        assert found.shape == (2, 2, 40)
        assert np.median(found, axis=(1, 2)).max() < 2e-6


def test_float_export_is_exact_layer_by_layer(exported):
    assert errors(exported, exported).max() < 1e-5


@pytest.mark.parametrize("name", ["self_attn.v_scale", "self_attn.k_scale", "mlp.gate_up_proj.weight_scale"])
def test_one_wrong_scale_is_seen_in_its_layer_and_in_no_other(quantized, tmp_path, name):
    shutil.copytree(quantized, tmp_path / "bad")
    entry = read_header(tmp_path / "bad" / "weights.safetensors")[f"model.layers.1.{name}"]
    values = np.memmap(entry.path, np.float32, "r+", entry.offset, entry.shape)
    values *= 1.1
    values.flush()
    seal(tmp_path / "bad")
    found = np.median(errors(tmp_path / "bad", quantized), axis=(1, 2))
    assert found[0] < 2e-6
    assert found[1] > 1e-4


def test_rows_are_gated_by_the_median_of_the_worst_layer():
    found_LT = np.array([[1e-7, 1e-7, 1e-1], [1.9e-6, 2e-6, 3e-6]])
    found_LRT = np.repeat(found_LT[:, None], 8, axis=1)
    median, largest = layer_rows(found_LRT, Gates(layer_error_median=1e-6), 0.95)
    assert (median.value, median.verdict, median.where) == (pytest.approx(2e-6), "failed", "layers.1")
    assert (largest.value, largest.passed, largest.where) == (pytest.approx(0.1), True, "layers.0")


def test_two_rows_of_text_do_not_decide_a_median_between_their_values():
    found_LRT = np.array([[[1e-7] * 4, [1e-5] * 4]])
    median, _ = layer_rows(found_LRT, Gates(layer_error_median=1e-6), 0.95)
    assert median.verdict == "undecided"
