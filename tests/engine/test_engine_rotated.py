"""Embedded engines of rotated models and of massive activations' excess compute what the artifact does."""

import numpy as np
import pytest

from tests.conftest import make_recipe, random_ids
from tests.quantize.test_rotation import ALL, STATIC, TOKEN, massive
from toolchain.engine.stage import build_engine
from toolchain.export.stage import export_checkpoint
from toolchain.quantize.stage import quantize_artifact
from toolchain.runners.open import fake_quant_runner, open_runner

EXCESS = STATIC | {"activations": STATIC["activations"] | {"excess_channels": 2}}
RECIPES = {"static": (EXCESS, 1e-4), "token": (TOKEN, 1e-4), "weights": ({"weights": {"format": "int8"}}, 1e-2)}
"""Weight-only products round their input to two digits of 8 bits; the others have the reference's own codes."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotated")
    massive(folder / "model")
    export_checkpoint(folder / "model", make_recipe(), folder / "onnx", report=lambda _: None)
    return folder / "onnx"


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("name", RECIPES)
def test_embedded_engines_compute_the_rotated_artifact(name, exported, tmp_path):
    sections, tolerance = RECIPES[name]
    recipe = make_recipe(**sections, rotation=ALL)
    artifact = quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None)
    engine = build_engine(artifact.path, recipe, tmp_path / "engine", report=lambda _: None)
    ids, lengths = random_ids(5, 2, 63), np.array([63, 31])
    last = []
    for runner in (open_runner(engine.path), fake_quant_runner(artifact.path)):
        state = runner.new_state(2, 64)
        first = runner.step(state, ids, lengths, "prefill")
        last.append((first, runner.step(state, ids[:, :1], np.array([1, 1]), "decode")))
    for ours, theirs in zip(*last, strict=True):
        assert float(abs(ours - theirs).max()) <= tolerance * float(abs(theirs).max())
