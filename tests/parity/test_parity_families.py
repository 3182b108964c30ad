"""The whole proof on models that are no Llama: norms behind, two rotations, experts, stretched frequencies."""

import pytest
from tiny_parity import make_recipe, write_tokenizer

from tests.model.families import CONTEXT_LEN, save_variant
from toolchain.engine.stage import build_engine
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.parity.stage import run_parity
from toolchain.quantize.stage import quantize_artifact

GATES = {
    "eager": {"kl_mean": 1e-6, "max_abs_logit": 2e-3},
    "self_consistency": {"max_abs_logit": 2e-3},
}


def quiet(_):
    pass


def exported(folder, name, **sections):
    save_variant(folder / "model", name)
    write_tokenizer(folder / "model")
    sections |= {"context_len": CONTEXT_LEN[name]} if name in CONTEXT_LEN else {}
    recipe = make_recipe(**sections)
    return recipe, export_checkpoint(folder / "model", recipe, folder / "onnx", report=quiet)


@pytest.mark.parametrize("name", ["gemma3_text", "olmo2", "opt_stream", "phi3_long", "qwen2_moe_mixed"])
def test_an_export_of_any_family_is_proved(name, tmp_path, text_file):
    _, artifact = exported(tmp_path, name)
    recipe = make_recipe(parity={**GATES, "data": str(text_file)})
    result = run_parity(artifact.path, recipe, model=tmp_path / "model", report=quiet)
    assert result.verdict == "passed", result.failure_text()


def test_experts_in_integers_are_proved_layer_by_layer_and_against_themselves_only_shown(tmp_path, text_file):
    parity = {"data": str(text_file), "fake_quant": {"layer_error_median": 1e-2}}
    integers = {
        "weights": {"format": "int8"},
        "kv_cache": {"format": "int8"},
        "calibration": {"data": str(text_file), "samples": 2, "seq_len": 30},
        "engine": {"backend": "onnxruntime", "kv_capacity": 64, "prompt_len": {"min": 1, "opt": 8, "max": 64}},
    }
    _, artifact = exported(tmp_path, "qwen3_moe")
    recipe = make_recipe(parity=parity | {"self_consistency": {"max_abs_logit": 1e-9}}, **integers)
    quantize_artifact(artifact.path, recipe, tmp_path / "int8", report=quiet)
    build_engine(tmp_path / "int8", recipe, tmp_path / "engine", report=quiet)
    result = run_parity(tmp_path / "engine", recipe, model=tmp_path / "model", source=tmp_path / "int8", report=quiet)
    assert result.verdict == "passed", result.failure_text()
    assert any("self_consistency is not gated" in note for note in result.notes)
    assert any(row.reference == "self" and row.metric == "max_abs_logit" and row.gate is None for row in result.rows)


def test_a_recipe_for_other_positions_than_the_artifacts_is_refused(tmp_path, text_file):
    _, artifact = exported(tmp_path, "phi3_long")
    recipe = make_recipe(parity={**GATES, "data": str(text_file)}, context_len=64)
    with pytest.raises(DtoolError, match="serves other positions than the recipe asks for"):
        run_parity(artifact.path, recipe, model=tmp_path / "model", report=quiet)
    with pytest.raises(DtoolError, match="context_len 64"):
        build_engine(artifact.path, recipe, tmp_path / "engine", report=quiet)
