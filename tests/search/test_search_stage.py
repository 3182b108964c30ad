"""Searches over a tiny model: what is written, that it reruns to the same bytes, and what is refused."""

import tomllib

import pytest
import torch

from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.model.load import load_artifact_decoder
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe import RECIPES_DIR, load_recipe, parse_recipe
from toolchain.search.budget import Budget, Question, make_budget
from toolchain.search.sensitivity import FloatModel
from toolchain.search.stage import held_out_text, search_formats
from toolchain.search.units import mixed_recipe, skip_cache
from toolchain.search.written import recipe_text
from toolchain.tensor_file import read_header

TRT = {"backend": "tensorrt-rtx", "targets": ["sm89"], "kv_capacity": 64}


def quiet(_):
    return None


def search(export, recipe, out, kind, most, formats=("int8", "int4", "none"), **how):
    how = {"blocks": 2, "seq_len": 32} | how
    return search_formats(export, recipe, Question(Budget(kind, most), formats, **how), out, report=quiet)


@pytest.mark.parametrize(("kind", "most"), [("kl", 0.3), ("rise", 0.03), ("mb", 0.085)])
def test_the_written_recipe_meets_the_budget_and_reruns_to_the_same_bytes(text_export, base, tmp_path, kind, most):
    recipe = base(engine=TRT)
    result = search(text_export, recipe, tmp_path / "mix.toml", kind, most)
    assert result.passed
    best = result.best
    assert result.budget.is_met(best.bytes, best.kl, best.rise)
    assert kind == "rise" or len(set(best.mix.values())) > 1
    written = load_recipe(str(tmp_path / "mix.toml"))
    one, two = (quantize_artifact(text_export, written, tmp_path / n, report=quiet) for n in ("one", "two"))
    assert one.manifest == two.manifest
    entries = read_header(one.file("weights.safetensors"))
    assert sum(entry.length for entry in entries.values()) == best.bytes == result.problem.bytes_of(best.mix)
    search(text_export, recipe, tmp_path / "again.toml", kind, most)
    assert (tmp_path / "again.toml").read_bytes() == (tmp_path / "mix.toml").read_bytes()


@pytest.mark.parametrize(
    "sections",
    [
        {"activations": {"format": "int8", "granularity": "tensor"}, "kv_cache": {"format": "int8"}},
        {"rotation": {"stream": True, "values": True, "feed_forward": True}, "smoothing": {"algorithm": "awq"}},
        {"weights": {"format": "int8", "algorithm": "gptq", "clip": "search"}},
        {"weights": {"format": "none"}},
        {"overrides": [{"match": ["model.layers.0.*"], "weights": {"format": "none"}}]},
    ],
    ids=["static and cache", "rotated", "gptq", "from float", "with overrides"],
)
def test_every_kind_of_recipe_can_be_searched(text_export, base, tmp_path, sections):
    result = search(text_export, base(engine=TRT, **sections), tmp_path / "mix.toml", "kl", 0.1)
    assert result.passed
    assert result.best.estimated_kl == pytest.approx(result.best.kl, rel=1.0)


def test_a_budget_out_of_reach_gives_the_nearest_mix(text_export, base, tmp_path):
    result = search(text_export, base(), tmp_path / "mix.toml", "kl", 1e-9, formats=("none",))
    assert result.passed  # all in float
    result = search(text_export, base(engine=TRT), tmp_path / "near.toml", "kl", 1e-9, formats=("int4",))
    assert not result.passed
    assert set(result.best.mix.values()) == {"int8"}
    assert load_recipe(str(tmp_path / "near.toml")).quantizes


@pytest.mark.parametrize(
    ("formats", "engine", "words"),
    [
        (("int3",), TRT, "did you mean int"),
        (("int4",), {"backend": "onnxruntime"}, "no products of int4"),
        (("fp8_e4m3",), TRT | {"targets": ["sm80"]}, "sm80 has no fp8_e4m3"),
        (("int8",), TRT, "nothing to choose"),
    ],
)
def test_formats_that_cannot_be_are_refused(text_export, base, tmp_path, formats, engine, words):
    with pytest.raises(DtoolError, match=words):
        search(text_export, base(engine=engine), tmp_path / "mix.toml", "kl", 0.1, formats=formats)


def test_impossible_requests_are_refused_before_any_work(text_export, base, tmp_path):
    out = tmp_path / "mix.toml"
    with pytest.raises(DtoolError, match="smallest formats of all units") as refusal:
        search(text_export, base(engine=TRT), out, "mb", 0.01)
    least = float(refusal.value.fix.split()[1].rstrip(","))
    assert search(text_export, base(engine=TRT), out, "mb", least).passed
    with pytest.raises(DtoolError, match="cannot be written"):
        search(text_export, base(engine=TRT), out, "mb", least)
    artifact = quantize_artifact(text_export, base(), tmp_path / "q", report=quiet)
    with pytest.raises(DtoolError, match="quantize"):
        search(artifact.path, base(engine=TRT), tmp_path / "x.toml", "mb", least)
    with pytest.raises(DtoolError, match="too short"):
        search(text_export, base(engine=TRT), tmp_path / "x.toml", "mb", least, blocks=10_000)


@pytest.mark.parametrize(
    "given", [(None, None, None), (1.0, 1.0, None), (-1.0, None, None), (None, float("nan"), None)]
)
def test_there_is_one_budget_above_zero(given):
    with pytest.raises(DtoolError, match="budget"):
        make_budget(*given)


def test_sensitivities_nearly_add_up(text_export, base, tmp_path):
    result = search(text_export, base(), tmp_path / "mix.toml", "kl", 0.1, formats=("none",))
    every = dict.fromkeys(result.problem.loss, "int8")
    assert result.best.mix == every
    assert result.best.kl == pytest.approx(result.problem.loss_of(every), rel=0.5)
    assert all(costs["none"] == 0 < costs["int8"] for costs in result.problem.loss.values())


def test_a_sensitivity_is_the_loss_of_the_artifact_with_that_unit_alone(text_export, base, tmp_path):
    """The fake-quantized trial and `dtool quantize` agree, weights, inputs and head alike."""
    recipe = base(activations={"format": "int8", "skip": []})
    result = search(text_export, recipe, tmp_path / "mix.toml", "kl", 0.5, formats=("none",))
    for name in ("head", "layer 1 feed-forward"):
        mix = dict.fromkeys(result.problem.loss, "none") | {name: "int8:int8"}
        exact = result.problem.loss[name]["int8:int8"]
        alone = mixed_recipe(recipe, result.found, mix, "alone")
        assert measure_alone(text_export, alone, recipe, tmp_path / name) == pytest.approx(exact, rel=1e-3)


def measure_alone(export, recipe, base, out):
    question = Question(Budget("kl", 1.0), (), None, 2, 32)
    ids_BT, _ = held_out_text(open_artifact(export), base, question)
    model = FloatModel(load_artifact_decoder(open_artifact(export)), ids_BT, torch.float32)
    model.run()
    decoder = load_artifact_decoder(quantize_artifact(export, recipe, out, report=quiet))
    model.decoder = decoder
    return model.loss_from(0).kl


def test_the_recipe_says_which_caches_stay_in_float(base):
    recipe = base(kv_cache={"format": "int8"})
    written = skip_cache(recipe, [3, 1])
    assert written.kv_cache.skip == ("model.layers.1.self_attn", "model.layers.3.self_attn")
    assert written.kv_cache.format == "int8"
    assert recipe.kv_cache.skip == ()


def test_a_recipe_survives_being_written():
    for path in sorted(RECIPES_DIR.glob("*.toml")):
        recipe = load_recipe(str(path))
        assert parse_recipe(tomllib.loads(recipe_text(recipe)), "written") == recipe


def test_the_source_is_left_alone(text_export, base, tmp_path):
    search(text_export, base(engine=TRT), tmp_path / "mix.toml", "kl", 0.1)
    open_artifact(text_export, check_hashes=True)


def test_nothing_to_choose_an_artifact_as_the_place_and_blocks_too_long_are_refused(text_export, base, tmp_path):
    with pytest.raises(DtoolError, match="nothing to choose between"):
        search(text_export, base(engine=TRT), tmp_path / "mix.toml", "kl", 0.1, formats=("int8",))
    with pytest.raises(DtoolError, match="outside artifacts"):
        search(text_export, base(engine=TRT), text_export / "mix.toml", "kl", 0.1)
    with pytest.raises(DtoolError, match="longer than the model's positions"):
        search(text_export, base(engine=TRT), tmp_path / "mix.toml", "kl", 0.1, seq_len=100_000)
