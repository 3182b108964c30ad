"""Engines for one row: the compiler makes its products as multiply-and-sum, and the check still counts all of them."""

from collections import Counter

import pytest

from tests.conftest import random_ids
from toolchain.engine.stage import build_engine
from toolchain.quantize.stage import quantize_artifact

pytestmark = pytest.mark.compiles

ONE = {"min": 1, "opt": 1, "max": 1}
WEIGHTS = {
    "float16": ({}, ("Half", "Half")),
    "int8": ({"weights": {"format": "int8"}}, ("Half", "Int8")),
    "int8 x int8": ({"weights": {"format": "int8"}, "activations": {"format": "int8"}}, ("Int8", "Int8")),
    "int4": ({"weights": {"format": "int4", "group_size": 32}}, ("Half", "Int4")),
}


def quiet(_):
    pass


@pytest.mark.parametrize("layout", ["separate", "shared"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_product_of_one_row_is_found_in_its_types(name, layout, fp16, tmp_path, monkeypatch, make_recipe):
    sections, types = WEIGHTS[name]
    monkeypatch.setattr("toolchain.quantize.stage._calibration_blocks", lambda *_: random_ids(11, 4, 48))
    monkeypatch.setattr("toolchain.quantize.stage._lineage", lambda exported, _: {"source": exported.identity})
    recipe = make_recipe(sections=sections, targets=["sm89"], attention="native", batch=ONE, layout=layout)
    source = quantize_artifact(fp16.path, recipe, tmp_path / "q", report=quiet) if sections else fp16
    engine = build_engine(source.path, recipe, tmp_path / "engine", report=quiet)
    layers = engine.json("decoder.json")["num_hidden_layers"]
    for phase in ("prefill", "decode"):
        summary = engine.json("report.json")["engines"][phase]["summary"]
        found = Counter()
        for row in summary["products"]["precisions"]:
            found[row["activations"], row["weights"]] += row["products"]
        assert found == Counter({types: 4 * layers}) + Counter({("Half", "Half"): 1})
        assert summary["products"]["without_kernel"] == []
        assert summary["attention"]["fused"] == layers


def test_a_prompt_of_one_token_makes_prefill_a_step_of_one_row(fp16, tmp_path, make_recipe):
    recipe = make_recipe(targets=["sm89"], attention="native", batch=ONE, prompt_len=ONE)
    engine = build_engine(fp16.path, recipe, tmp_path / "engine", report=quiet)
    assert engine.json("report.json")["engines"]["prefill"]["summary"]["products"]["without_kernel"] == []
