"""What a run leaves in its folder: proofs of the engine that lies there, and of no other."""

import json
from types import SimpleNamespace

import pytest

from tests.conftest import make_recipe, save_tiny
from tests.model.families import save_variant
from tests.test_cli import RECIPE, call
from toolchain import pipeline
from toolchain.engine import preflight
from toolchain.errors import DtoolError
from toolchain.model.checkpoint import open_checkpoint
from toolchain.pipeline import check_parity
from toolchain.recipe import load_recipe
from toolchain.report import Page
from toolchain.search.written import recipe_text

ONE_TO_16 = {"min": 1, "opt": 8, "max": 16}


@pytest.fixture
def run(tiny_text, texts, tmp_path, monkeypatch):
    """Run into one folder with changed settings; the bench is a stand-in."""
    (tmp_path / "recipe.toml").write_text(RECIPE.format(**texts))

    def bench(*arguments):
        pipeline.write_report(tmp_path / "run", "bench", {}, Page("times"))

    monkeypatch.setattr(pipeline, "_bench", bench)

    def start(*options, code=0):
        return call("run", tiny_text, "-r", tmp_path / "recipe.toml", "-o", tmp_path / "run", *options, code=code)[1]

    return start


def pages(folder):
    return sorted(path.name for path in folder.glob("*.*"))


def test_pages_of_an_engine_that_is_made_again_do_not_stay(run, tmp_path):
    run()
    both = ["bench.html", "bench.json", "parity.html", "parity.json"]
    assert pages(tmp_path / "run") == both
    run("--no-bench")  # of these very files
    assert pages(tmp_path / "run") == both
    err = run("--no-bench", "--set", "engine.kv_capacity=96")
    assert "bench.html: removed" in err
    assert pages(tmp_path / "run") == both[2:]
    run()
    run("--no-bench", "--set", "parity.eager.kl_mean=1e-9", "--set", "engine.kv_capacity=80", code=3)
    assert pages(tmp_path / "run") == both[2:]


def test_a_run_that_fails_on_the_way_leaves_no_older_proof(run, tmp_path, monkeypatch):
    run("--no-bench")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for the report of what dtool takes for its bug
    monkeypatch.setattr("toolchain.engine.stage.build_engine", None)
    run("--no-bench", "--set", "engine.kv_capacity=96", code=1)
    assert pages(tmp_path / "run") == []


@pytest.mark.parametrize("name", ["parity.html", "parity.json", "bench.html", "bench.json"])
@pytest.mark.parametrize("text", ["<html>mine</html>", "{}", None], ids=["page", "json", "folder"])
def test_a_file_of_the_users_own_is_never_removed(run, name, text, tmp_path):
    own = tmp_path / "run" / name
    own.mkdir(parents=True) if text is None else (own.parent.mkdir(), own.write_text(text))
    err = run("--no-bench", code=1)
    assert "holds what dtool did not write" in err
    assert f"found:    {name}" in err
    assert "to do:" in err
    assert own.is_dir() if text is None else own.read_text() == text
    assert pages(own.parent) == [name]


@pytest.mark.parametrize("stage", ["export", "quantized", "engine"])
def test_a_foreign_folder_in_the_way_of_a_stage_is_refused_before_any_work(run, stage, tmp_path):
    own = tmp_path / "run" / stage
    own.mkdir(parents=True)
    (own / "notes.txt").write_text("mine")
    err = run("--no-bench", code=1)
    assert "something dtool did not write" in err
    assert [path.name for path in own.parent.iterdir()] == [stage]


def test_a_bench_that_does_not_fit_the_cache_is_refused_before_any_work(run, tmp_path):
    err = run("--set", "bench.prompt_lens=[60]", "--set", "bench.new_tokens=8", code=1)
    assert "the longest prompt and bench.new_tokens is 68" in err
    assert not (tmp_path / "run").exists()
    run("--no-bench", "--set", "bench.prompt_lens=[60]", "--set", "bench.new_tokens=8")


def test_quantized_weights_of_an_earlier_recipe_do_not_stay(run, tmp_path):
    run("--no-bench")
    plain = ("--set", "weights.format=none", "--set", "kv_cache.format=none")
    assert "quantized: removed, this recipe quantizes nothing" in run("--no-bench", *plain)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["engine", "export"]


def test_a_failed_gate_prints_the_document_as_a_passed_one(tiny_text, run, tmp_path):
    recipe, out = tmp_path / "recipe.toml", tmp_path / "run"
    strict = ("--set", "parity.eager.kl_mean=1e-9", "--json")
    document, err = call("run", tiny_text, "-r", recipe, "-o", out, *strict, code=3)
    assert "parity failed" in err
    found = json.loads(document)
    assert found["parity"]["verdict"] == "failed"
    assert sorted(found["artifacts"]) == ["engine", "export", "quantized"]
    assert found["bench"] is None


def test_proofs_of_a_version_that_did_not_mark_them_are_written_anew(run, tmp_path):
    run()
    out = tmp_path / "run"
    parity = json.loads((out / "parity.json").read_text())
    del parity["generator"]
    (out / "parity.json").write_text(json.dumps(parity | {"rows": ["of another schema"]}))
    bench = dict.fromkeys(("candidate", "stage", "engine", "eager", "speedup", "environment"))
    (out / "bench.json").write_text(json.dumps(bench))
    err = run()
    assert "parity: reused" not in err
    for name in ("parity.json", "bench.json"):
        assert json.loads((out / name).read_text())["generator"] == "dtool"
    assert isinstance(json.loads((out / "parity.json").read_text())["rows"][0], dict)


def test_every_file_in_the_way_is_named(run, tmp_path):
    names = [f"note{i}.txt" for i in range(7)]
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).write_text("mine")
    err = run("--no-bench", code=1)
    assert f"found:    {', '.join(names)}\n" in err
    assert "move these away" in err


def test_the_verdict_is_of_what_was_compared_and_the_recipe_stands_beside_it(tiny_text, run, tmp_path):
    recipe, out = tmp_path / "recipe.toml", tmp_path / "run"
    options = (tiny_text, "-r", recipe, "-o", out, "--no-bench")
    text = call("run", *options)[0]
    compared = "Parity of the engine artifact (onnxruntime) with float32 torch and with its exact arithmetic in torch"
    assert text.startswith(f"{compared}: PASSED\nrecipe  test\n")
    assert "passed: the same model, up to" in text
    text = call("run", *options, "--set", "parity.eager.kl_mean=1e-9", code=3)[0]
    assert text.startswith(f"{compared}: FAILED\n")
    assert "the same model" not in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": 0.1, "decode": None}, "no finite KL to fp32 torch"),
        (
            {"prompt": 0.1, "decode": 0.2, "prefill_last": 0.3},
            "0.2000 nats of KL to fp32 torch, 0 is equal (decode; 0.1000 to 0.4000 at 95 %, 8 rows)",
        ),
        ({}, "no finite KL to fp32 torch"),
    ],
)
def test_a_distance_that_is_not_finite_is_not_shown_as_none(values, said):
    rows = [
        {"reference": "eager", "metric": "kl_mean", "phase": phase, "value": value}
        | {"low": None if value is None else value / 2, "high": None if value is None else 2 * value}
        for phase, value in values.items()
    ]
    facts = {"candidate": "engine, run by onnxruntime", "references": "eager"}
    parity = {"verdict": "failed", "rows": rows, "facts": facts, "confidence": 0.95, "rows_of_text": 8}
    page = pipeline.summary_page(pipeline.RunResult({}, parity, None), load_recipe("int8"))
    assert dict(page.parts[0].rows)["  distance"] == said
    assert page.title.endswith("with float32 torch")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("engine.kv_capacity=12", "engine.prompt_len={min=1, opt=8, max=12}"), "the cache of the recipe's engine"),
        (("engine.prompt_len={min=1, opt=2, max=3}",), "takes too short prompts to prove"),
        (("parity.blocks=100000",), "the text is too short"),
    ],
)
def test_a_proof_that_cannot_be_made_is_refused_before_any_work(settings, said, run, tmp_path):
    err = run("--no-bench", *(part for setting in settings for part in ("--set", setting)), code=1)
    assert said in err
    assert "expected:" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("sm", "refused"), [(89, True), (80, False)])
def test_the_proof_is_checked_against_the_engine_only_where_it_runs(sm, refused, tiny_text, texts, monkeypatch):
    """A GPU of the recipe's targets: the plans are proved, else the artifact they are built from."""
    monkeypatch.setattr(pipeline, "installed_gpus", lambda: [SimpleNamespace(sm=sm)])
    parity = {"data": str(texts["evaluation"]), "blocks": 4, "seq_len": 32, "fake_quant": {"layer_error_median": 0.1}}
    sizes = {"batch": {"min": 2, "opt": 2, "max": 4}, "prompt_len": {"min": 1, "opt": 8, "max": 32}}
    engine = {"backend": "tensorrt-rtx", "targets": ["sm89"], "kv_capacity": 64} | sizes
    recipe, config = make_recipe(engine=engine, parity=parity), open_checkpoint(tiny_text, None).config
    if not refused:
        check_parity(tiny_text, recipe, config)
        return
    with pytest.raises(DtoolError, match="takes larger batches"):
        check_parity(tiny_text, recipe, config)
    whole = make_recipe(engine=engine, parity=parity | {"blocks": 3})
    with pytest.raises(DtoolError, match="cannot be measured on a compiled engine"):
        check_parity(tiny_text, whole, config)


REFUSED_AT_ONCE = [
    ({"head_dim": 288, "num_attention_heads": 1, "num_key_value_heads": 1}, {}, "no kernel for head_dim 288"),
    ({}, {"attention": "plugin"}, "no kernel for head_dim 16"),
    ({}, {"refit": True}, "cannot build with engine.refit"),
    ({}, {"kv_capacity": 4096}, "longer than the model's positions"),
    ({"head_dim": 32}, {"attention": "plugin", "targets": ["sm75"]}, "no attention kernels for sm75"),
]


@pytest.mark.parametrize(("model", "engine", "text"), REFUSED_AT_ONCE)
def test_what_config_and_recipe_tell_is_refused_before_any_work(model, engine, text, tmp_path, monkeypatch):
    """The very rules that build-engine has, after export and quantize."""
    monkeypatch.setattr(preflight, "require_backend", lambda _: None)
    save_tiny(tmp_path / "model", **model)
    defaults = {"backend": "tensorrt-rtx", "targets": ["sm89"], "attention": "native", "kv_capacity": 128}
    sizes = {"prompt_len": {"min": 1, "opt": 32, "max": 64}}
    recipe = make_recipe(compute_dtype="float16", engine=defaults | sizes | engine)
    for plan in (recipe, recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"format": "int8"})})):
        with pytest.raises(DtoolError, match=text):
            pipeline.check_inputs(tmp_path / "model", plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_soft_cap_is_refused_by_run_and_by_export_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "require_backend", lambda _: None)
    save_variant(tmp_path / "model", "gemma2")
    recipe = make_recipe(
        compute_dtype="float16",
        engine={"backend": "tensorrt-rtx", "targets": ["sm89"], "kv_capacity": 32, "prompt_len": ONE_TO_16},
    )
    with pytest.raises(DtoolError, match="cannot cap its scores"):
        pipeline.check_inputs(tmp_path / "model", recipe, tmp_path / "run")
    (tmp_path / "recipe.toml").write_text(recipe_text(recipe))
    asked = ("export", tmp_path / "model", "-r", tmp_path / "recipe.toml", "-o", tmp_path / "x")
    err = call(*asked, code=1)[1]
    assert "native attention cannot cap its scores" in err
    assert not (tmp_path / "x").exists()
    call(*asked, "--set", "engine.attention=plugin")


def test_a_library_that_is_not_there_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "require_backend", lambda _: None)
    save_tiny(tmp_path / "model", head_dim=32)
    recipe = make_recipe(
        compute_dtype="float16",
        engine={"backend": "tensorrt-rtx", "targets": ["sm89"], "kv_capacity": 128, "prompt_len": ONE_TO_16},
    )
    library = tmp_path / "libx.so"
    with pytest.raises(DtoolError, match="no plugin library at"):
        pipeline.check_inputs(tmp_path / "model", recipe, tmp_path / "run", plugin_libraries=[library])


def test_an_artifact_of_another_run_behind_a_link_is_reused_and_never_replaced(run, tmp_path):
    run("--no-bench")
    other = tmp_path / "other"
    (tmp_path / "run" / "export").rename(other)
    (tmp_path / "run" / "export").symlink_to(other)
    before = (other / "manifest.json").read_bytes()
    assert "export: reused" in run("--no-bench")
    assert (tmp_path / "run" / "export").is_symlink()
    err = run("--no-bench", "--set", "context_len=64", "--set", "engine.kv_capacity=64")
    assert f"export: was a link to {other}, which stays as it is" in err
    assert not (tmp_path / "run" / "export").is_symlink()
    assert (other / "manifest.json").read_bytes() == before
