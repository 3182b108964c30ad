"""`dtool search` as a user types it."""

import json
import tomllib

import pytest

from tests.search.conftest import COSTLY
from tests.test_cli import call
from toolchain.report import format_cell
from toolchain.search.written import recipe_text

FEW = ("--blocks", 2, "--seq-len", 32)


@pytest.fixture
def recipe_file(half, tmp_path):
    path = tmp_path / "base.toml"
    path.write_text(recipe_text(half()))
    return path


def test_a_search_writes_a_recipe_a_document_and_a_page(half_export, recipe_file, tmp_path):
    out, page = tmp_path / "mix.toml", tmp_path / "page.html"
    arguments = ("search", half_export, "-r", recipe_file, *FEW, "--formats", "int4,none", "--budget-kl", 0.3)
    stdout, stderr = call(*arguments, "--json", "--html", page, "-o", out)
    document = json.loads(stdout)
    assert document["verdict"] == "passed"
    assert document["chosen"]["kl"] <= 0.3
    points = [(p["bytes"], p["estimated_kl"]) for p in document["frontier"]]
    assert points == sorted(points, key=lambda p: (p[0], -p[1]))
    assert "left" in stderr
    written = tomllib.loads(out.read_text())
    assert written["overrides"]
    assert written["about"] == "Formats mixed by dtool search from base, asked for at most 0.3 nats of KL"
    html = page.read_text()
    assert "What other budgets would buy" in html
    assert "chosen, measured" in html
    call("quantize", half_export, "-r", out, "-o", tmp_path / "quantized")
    weights = (tmp_path / "quantized" / "weights.safetensors").read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")
    assert document["chosen"]["bytes"] - document["chosen"]["cache_bytes"] == len(weights) - header
    assert document["counted"] == "tensors and one full cache, without the header of the weights file"
    assert document["counted"] in html
    stdout, _ = call(*arguments, "-o", tmp_path / "again.toml")
    assert "PASSED" in stdout
    assert (tmp_path / "again.toml").read_bytes() == out.read_bytes()


def test_caches_and_their_heads_are_told(outlier_export, base, tmp_path):
    recipe, out, page = tmp_path / "base.toml", tmp_path / "mix.toml", tmp_path / "page.html"
    recipe.write_text(recipe_text(base(kv_cache={"format": "int8"}, activations={"format": "int8"})))
    arguments = ("search", outlier_export, "-r", recipe, *FEW, "--formats", "int8", "--budget-kl", 0.1, "--heads")
    stdout, stderr = call(*arguments, "--json", "--html", page, "-o", out)
    document = json.loads(stdout)
    losses = {(row["layer"], head): kl for row in document["heads"] for head, kl in enumerate(row["kl"])}
    assert set(losses) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    worst = max(losses, key=losses.get)
    assert worst == (COSTLY["layer"], COSTLY["head"])
    assert document["cache_tokens"] == 64
    assert document["chosen"]["mix"]["layer 1 cache"] == "none"
    assert "4 of 4 KV heads: those of layer 1 cost" in stderr
    html = page.read_text()
    assert f"<title>layer 1, KV head 1: {format_cell(losses[worst])} KL (nats)</title>" in html
    assert "int8 (1 layers), none (1 layers); counted for one sequence of 64 tokens" in html
    text, _ = call(*arguments, "-o", tmp_path / "again.toml")
    _, _, worst_first = text.partition("KL of each KV head's cache alone: the 4 largest of 4\n")
    table = [line.split() for line in worst_first.splitlines()]
    assert table[2][:2] == ["1", "1"]
    costs = next(s["kl"] for s in document["sensitivity"] if (s["unit"], s["format"]) == ("layer 1 cache", "int8"))
    assert ["layer", "1", "cache", "none"] in [line[:4] for line in table]
    assert any(line[:3] == ["layer", "1", "cache"] and format_cell(costs) in line for line in table)


def test_heads_need_a_quantized_cache(half_export, recipe_file, tmp_path):
    how = ("-r", recipe_file, *FEW, "--budget-kl", 0.1, "--heads", "-o", tmp_path / "mix.toml")
    _, stderr = call("search", half_export, *how, code=1)
    assert "no quantized cache whose heads" in stderr


def test_a_budget_that_is_missed_ends_with_exit_3_and_the_nearest_recipe(half_export, recipe_file, tmp_path):
    out = tmp_path / "mix.toml"
    how = ("-r", recipe_file, *FEW, "--formats", "int4", "--budget-kl", 1e-9, "-o", out)
    _, stderr = call("search", half_export, *how, code=3)
    assert "no mix was found" in stderr
    assert out.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 1, "one budget"),
        (("--budget-kl", 0.1, "--budget-mb", 1), 1, "one budget"),
        (("--budget-kl", "nan"), 1, "no budget"),
        (("--budget-kl", "-1"), 1, "no budget"),
        (("--budget-kl", "few"), 2, "not a valid float"),
        (("--budget-kl", 0.1, "--formats", "int5"), 1, "did you mean"),
        (("--budget-mb", 0.001), 1, "no mix of these formats is that small"),
        (("--budget-kl", 0.1, "--blocks", 0), 2, "--blocks"),
        (("--budget-kl", 0.1, "--formats", ""), 2, "name some, or leave --formats out"),
        (("--budget-kl", 0.1, "--formats", " , "), 2, "name some, or leave --formats out"),
        (("--budget-kl", 0.1, *FEW, "--text", "no/such.jsonl"), 1, "name your own text with --text"),
        (("--budget-kl", 0.1, *FEW, "--text", ""), 2, "'--text': it is empty"),
        (("--budget-kl", 0.1, *FEW, "--blocks", 100_000), 1, "expected: 100000 blocks\n"),
        (("--budget-kl", 0.1, *FEW, "--blocks", 100_000), 1, "tokens after the 4 that calibration takes"),
        (("--budget-kl", 0.1, *FEW, "--blocks", 100_000), 1, "fewer --blocks"),
    ],
)
def test_mistakes_are_named(half_export, recipe_file, tmp_path, arguments, code, words):
    out = tmp_path / "mix.toml"
    _, stderr = call("search", half_export, "-r", recipe_file, *arguments, "-o", out, code=code)
    assert words in stderr
    assert not out.exists()


def test_a_page_in_the_place_of_the_recipe_is_refused_before_any_work(half_export, recipe_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("mix.toml")
    how = ("-r", recipe_file, *FEW, "--formats", "int4", "--budget-kl", 1e9, "-o", tmp_path / "mix.toml")
    for page in (tmp_path / "mix.toml", "mix.toml", tmp_path / "search" / ".." / "mix.toml", "link"):
        _, stderr = call("search", half_export, *how, "--html", page, code=1)
        assert "--html and -o are in each other's way" in stderr
        assert "left" not in stderr
    before = recipe_file.read_text()
    _, stderr = call("search", half_export, *how, "--html", recipe_file, code=1)
    assert "something dtool did not write" in stderr
    assert recipe_file.read_text() == before
    assert not (tmp_path / "mix.toml").exists()
