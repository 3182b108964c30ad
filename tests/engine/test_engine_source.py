"""A source that is not what the recipe describes is refused, by whatever key it differs."""

import shutil

import pytest

from tests.conftest import make_recipe
from tests.test_cli import RECIPE, call
from toolchain.engine.source import check_source
from toolchain.errors import DtoolError
from toolchain.quantize.stage import quantize_artifact


def recipe_of(texts, **changes):
    sections = {
        "weights": {"format": "int8"},
        "kv_cache": {"format": "int8"},
        "calibration": {"data": str(texts["calibration"]), "samples": 2, "seq_len": 16},
    }
    return make_recipe(**{name: sections.get(name, {}) | changes.get(name, {}) for name in {**sections, **changes}})


@pytest.fixture(scope="module")
def quantized(text_export, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("source") / "q"
    return quantize_artifact(text_export, recipe_of(texts), out, report=lambda _: None)


@pytest.mark.parametrize(
    ("section", "key", "value", "found"),
    [
        ("rotation", "stream", True, "false"),
        ("activations", "center", True, "false"),
        ("smoothing", "algorithm", "smoothquant", "none"),
        ("smoothing", "keys", True, "false"),
        ("calibration", "inputs", "quantized", "float"),
        ("calibration", "samples", 3, "2"),
        ("weights", "clip", "search", "amax"),
        ("kv_cache", "scale", "mse", "amax"),
        ("weights", "format", "none", "int8"),
    ],
)
def test_every_key_of_the_quantize_stage_is_compared(quantized, texts, section, key, value, found):
    with pytest.raises(DtoolError, match="is not what the recipe describes") as refusal:
        check_source(quantized, recipe_of(texts, **{section: {key: value}}))
    assert refusal.value.found == f"{section}.{key} {found}, from stage quantize"
    assert "`dtool quantize`" in refusal.value.fix
    assert f"--set {section}.{key}={found}" in refusal.value.fix


def test_overrides_are_compared_and_an_export_has_none(quantized, text_export, texts):
    override = {"match": ["model.layers.0.*"], "weights": {"format": "int8"}}
    recipe = recipe_of(texts).model_copy(update={"overrides": make_recipe(overrides=[override]).overrides})
    with pytest.raises(DtoolError, match="expected: overrides "):
        check_source(quantized, recipe)
    from toolchain.artifact import open_artifact

    with pytest.raises(DtoolError, match="expected: overrides "):
        check_source(open_artifact(text_export), make_recipe(overrides=[override]))


def test_what_does_nothing_need_not_agree(quantized, text_export, texts, tmp_path):
    from toolchain.artifact import open_artifact

    check_source(quantized, recipe_of(texts))
    check_source(quantized, recipe_of(texts, smoothing={"alpha": 0.3}, activations={"skip": []}))
    check_source(quantized, recipe_of(texts, weights={"group_size": 32, "refinements": 5}))
    moved = shutil.copy(texts["calibration"], tmp_path / "moved.jsonl")
    check_source(quantized, recipe_of(texts, calibration={"data": str(moved)}))
    idle = make_recipe(rotation={"stream": True}, smoothing={"algorithm": "awq"}, calibration={"samples": 3})
    check_source(open_artifact(text_export), idle)


def test_text_other_than_that_of_the_source_is_refused_and_absent_text_is_not_needed(quantized, texts, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("{}")
    with pytest.raises(DtoolError, match=r"expected: calibration\.data .*other"):
        check_source(quantized, recipe_of(texts, calibration={"data": str(other)}))


def test_commands_refuse_it_at_once(tiny_text, text_export, texts, tmp_path, monkeypatch):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(**texts))
    _, err = call("build-engine", text_export, "-r", path, "-o", tmp_path / "e", code=1)
    assert "weights.format int8" in err
    assert "dtool quantize" in err
    monkeypatch.setattr("toolchain.quantize.stage.quantize_artifact", None)
    for key, wanted, found in (("compute_dtype", "float16", "float32"), ("context_len", "64", "128")):
        change = ("--set", f"{key}={wanted}")
        _, err = call("quantize", text_export, "-r", path, *change, "-o", tmp_path / "q", code=1)
        assert f"expected: {key} {wanted}" in err
        assert (
            f"run `dtool export` with this recipe first, or give the one it was made with: --set {key}={found}" in err
        )
