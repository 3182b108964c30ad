"""What a run leaves in its folder: proofs of the engine that lies there, and of no other."""

import json

import pytest

from tests.test_cli import RECIPE, call
from toolchain import pipeline
from toolchain.report import Page


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
    monkeypatch.setattr("toolchain.engine.stage.build_engine", None)
    with pytest.raises(TypeError):
        run("--no-bench", "--set", "engine.kv_capacity=96")
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
