"""Searches over a tiny model: what is written, that it reruns to the same bytes, and what is refused."""

import tomllib

import pytest
import torch

from tests.search.conftest import TRT, export_to
from toolchain.artifact import open_artifact
from toolchain.engine.rules import _other_attention
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


def quiet(_):
    return None


def search(export, recipe, out, kind, most, formats=("int8", "int4", "none"), **how):
    how = {"blocks": 2, "seq_len": 32} | how
    return search_formats(export, recipe, Question(Budget(kind, most), formats, **how), out, report=quiet)


@pytest.mark.parametrize(("kind", "most"), [("kl", 0.3), ("rise", 0.03), ("mb", 0.085)])
def test_the_written_recipe_meets_the_budget_and_reruns_to_the_same_bytes(half_export, half, tmp_path, kind, most):
    recipe = half()
    result = search(half_export, recipe, tmp_path / "mix.toml", kind, most)
    assert result.passed
    best = result.best
    assert result.budget.is_met(best.bytes, best.kl, best.rise)
    assert kind == "rise" or len(set(best.mix.values())) > 1
    written = load_recipe(str(tmp_path / "mix.toml"))
    one, two = (quantize_artifact(half_export, written, tmp_path / n, report=quiet) for n in ("one", "two"))
    assert one.manifest == two.manifest
    entries = read_header(one.file("weights.safetensors"))
    weights = sum(entry.length for entry in entries.values())
    assert weights == best.bytes - best.cache_bytes
    assert best.bytes == result.problem.bytes_of(best.mix)
    search(half_export, recipe, tmp_path / "again.toml", kind, most)
    assert (tmp_path / "again.toml").read_bytes() == (tmp_path / "mix.toml").read_bytes()


@pytest.mark.parametrize(
    "sections",
    [
        {"activations": {"format": "int8", "granularity": "tensor"}},
        {"rotation": {"stream": True, "values": True, "feed_forward": True}, "smoothing": {"algorithm": "awq"}},
        {"weights": {"format": "int8", "algorithm": "gptq", "clip": "search"}},
        {"activations": {"format": "int8", "center": True}},
        {"weights": {"format": "none"}},
        {"overrides": [{"match": ["model.layers.0.*"], "weights": {"format": "none"}}]},
    ],
    ids=["static", "rotated", "gptq", "centered", "from float", "with overrides"],
)
def test_every_kind_of_recipe_can_be_searched(half_export, half, tmp_path, sections):
    result = search(half_export, half(**sections), tmp_path / "mix.toml", "kl", 0.1)
    assert result.passed
    assert result.best.estimated_kl == pytest.approx(result.best.kl, rel=1.0)
    assert result.best.bytes == result.problem.bytes_of(result.best.mix)


def test_a_format_of_inputs_is_no_choice_where_no_input_is_rounded(text_export, base, tmp_path):
    recipe = base(weights={"format": "int8", "skip": []}, activations={"format": "int8"})
    result = search(text_export, recipe, tmp_path / "mix.toml", "kl", 10.0, formats=("int8", "none"))
    assert result.best.mix["head"] == "int8"
    assert "int8:int8" not in result.problem.bytes["head"]
    assert "int8:int8" in result.problem.bytes["layer 0 attention"]
    asked = [override for override in result.best.recipe.splitlines() if "lm_head" in override]
    assert not asked  # the base recipe makes that of it


def test_a_budget_out_of_reach_gives_the_nearest_mix(text_export, half_export, base, half, tmp_path):
    result = search(text_export, base(), tmp_path / "mix.toml", "kl", 1e-9, formats=("none",))
    assert result.passed  # all in float
    result = search(half_export, half(), tmp_path / "near.toml", "kl", 1e-9, formats=("int4",))
    assert not result.passed
    assert set(result.best.mix.values()) == {"int8"}
    assert load_recipe(str(tmp_path / "near.toml")).quantizes


@pytest.mark.parametrize(
    ("formats", "targets", "words"),
    [
        (("int3",), ["sm89"], "did you mean int"),
        (("fp8_e4m3",), ["sm80"], "sm80 has no fp8_e4m3"),
        (("int8",), ["sm89"], "nothing to choose between"),
    ],
)
def test_formats_that_cannot_be_are_refused(half_export, half, tmp_path, formats, targets, words):
    with pytest.raises(DtoolError, match=words):
        search(half_export, half(engine=TRT | {"targets": targets}), tmp_path / "m", "kl", 0.1, formats=formats)


def test_onnx_runtime_has_no_int4(text_export, base, tmp_path):
    with pytest.raises(DtoolError, match="no products of int4"):
        search(text_export, base(), tmp_path / "mix.toml", "kl", 0.1)


def test_a_format_that_no_matrix_is_left_is_not_held_against_a_recipe(text_export, base, tmp_path):
    sections = {
        "weights": {"format": "int4"},
        "kv_cache": {"format": "int8", "granularity": "token"},
        "overrides": [{"match": ["*"], "weights": {"format": "int8"}}],
    }
    result = search(text_export, base(**sections), tmp_path / "mix.toml", "kl", 1.0, formats=())
    assert result.passed
    sections["overrides"] = [{"match": ["*.mlp.*"], "weights": {"format": "int8"}}]
    with pytest.raises(DtoolError, match=r"onnxruntime cannot take weights\.format int4"):
        search(text_export, base(**sections), tmp_path / "no.toml", "kl", 1.0, formats=())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache": {"format": "int8"}}, "native attention cannot take kv_cache.format int8"),
        ({"engine": {"attention": "plugin"}}, "no kernel for head_dim 16"),
        ({"engine": {"prompt_len": {"min": 1, "opt": 8, "max": 65}}}, "longest prompt does not fit"),
        ({"engine": {"kv_capacity": 129}}, "longer than the model's positions"),
        ({"engine": {"targets": ["sm90"]}}, "cannot compile for sm90"),
        ({"engine": {"targets": ["sm75"], "attention": "plugin"}}, "no attention kernels for sm75"),
        ({"engine": {"targets": []}}, "needs a target"),
        ({"engine": {"refit": True}}, "cannot build with engine.refit"),
        ({"engine": {"backend": "onnxruntime", "targets": []}}, "cannot take compute_dtype float16"),
        ({"compute_dtype": "bfloat16"}, "is not what the recipe describes"),
    ],
)
def test_what_build_engine_would_refuse_is_refused_at_once(half_export, half, tmp_path, changes, words):
    recipe = half(**(changes | {"engine": TRT | changes.get("engine", {})}))
    with pytest.raises(DtoolError, match=words):
        search(half_export, recipe, tmp_path / "mix.toml", "kl", 0.1, text="no such text")


def test_a_head_dim_without_kernels_is_told_by_layer_with_all_that_another_engine_needs(half_export, half, tmp_path):
    recipe = half(engine=TRT | {"attention": "plugin"})
    with pytest.raises(DtoolError) as refusal:
        search(half_export, recipe, tmp_path / "mix.toml", "kl", 0.1, text="no such text")
    assert refusal.value.found == "head_dim 16 in every layer, by the model's config"
    assert refusal.value.fix.startswith("--set engine.attention=native with kv_cache.format none, or export with")
    assert "compute_dtype float32, weights and cache in int8 or none" in refusal.value.fix


@pytest.mark.parametrize(
    ("head_dim", "softcap", "other"), [(16, 0.0, "native"), (16, 30.0, ""), (50, 0.0, "plugin"), (512, 0.0, "")]
)
def test_the_other_attention_is_named_only_where_it_computes_the_model(head_dim, softcap, other):
    assert other in _other_attention(head_dim, softcap)
    assert bool(_other_attention(head_dim, softcap)) == bool(other)


def test_a_search_for_a_gpu_host_needs_neither_gpu_nor_its_packages(half_export, half, tmp_path, monkeypatch):
    monkeypatch.setattr("toolchain.engine.preflight.installed_gpus", list)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    recipe = half(engine=TRT | {"backend": "tensorrt", "targets": []})
    assert search(half_export, recipe, tmp_path / "mix.toml", "kl", 0.3, formats=("int4",)).passed


def test_blocks_are_at_most_as_long_as_the_context_that_is_served(tiny_text, base, texts, tmp_path):
    export = export_to(tmp_path / "export", tiny_text, context_len=64)
    search(export, base(), tmp_path / "fits.toml", "kl", 1.0, formats=("none",), seq_len=64, text=texts["evaluation"])
    with pytest.raises(DtoolError, match="to measure on are longer") as refusal:
        search(export, base(), tmp_path / "mix.toml", "kl", 1.0, formats=("none",), seq_len=65)
    assert "64 (context_len)" in refusal.value.expected
    long = base(kv_cache={"format": "int8"})
    long = long.model_copy(update={"calibration": long.calibration.model_copy(update={"seq_len": 65})})
    with pytest.raises(DtoolError, match="calibration blocks are longer"):
        search(export, long, tmp_path / "mix.toml", "kl", 1.0, formats=("none",))


def test_impossible_requests_are_refused_before_any_work(half_export, half, tmp_path):
    out = tmp_path / "mix.toml"
    with pytest.raises(DtoolError, match="smallest formats of all units") as refusal:
        search(half_export, half(), out, "mb", 0.01)
    least = float(refusal.value.fix.split()[1].rstrip(","))
    assert search(half_export, half(), out, "mb", least).passed
    with pytest.raises(DtoolError, match="cannot be written"):
        search(half_export, half(), out, "mb", least)
    artifact = quantize_artifact(half_export, half(), tmp_path / "q", report=quiet)
    with pytest.raises(DtoolError, match="quantize"):
        search(artifact.path, half(), tmp_path / "x.toml", "mb", least)
    with pytest.raises(DtoolError, match="too short"):
        search(half_export, half(), tmp_path / "x.toml", "mb", least, blocks=10_000)


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


def test_the_source_is_left_alone(half_export, half, tmp_path):
    search(half_export, half(), tmp_path / "mix.toml", "kl", 0.1)
    open_artifact(half_export, check_hashes=True)


def test_an_artifact_as_the_place_and_blocks_too_long_are_refused(half_export, half, tmp_path):
    with pytest.raises(DtoolError, match="outside artifacts"):
        search(half_export, half(), half_export / "mix.toml", "kl", 0.1)
    with pytest.raises(DtoolError, match="longer than the model's positions"):
        search(half_export, half(), tmp_path / "mix.toml", "kl", 0.1, seq_len=129)
