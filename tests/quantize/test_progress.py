"""A killed quantization goes on at its last finished layer and gives the bytes of a run without a break."""

import pytest

from tests.conftest import make_recipe
from toolchain.artifact import open_artifact
from toolchain.quantize import walk as walk_module
from toolchain.quantize.stage import quantize_artifact

RECIPE = {
    "weights": {"format": "int8", "algorithm": "gptq", "clip": "search"},
    "activations": {"format": "int8", "granularity": "tensor", "excess_channels": 2},
    "kv_cache": {"format": "int8"},
    "rotation": {"stream": True, "values": True, "feed_forward": True},
}


class Killed(BaseException):
    """Stands for a kill: nothing of dtool catches it."""


def digests(path):
    return {name: entry.sha256 for name, entry in open_artifact(path).manifest.files.items()}


def loaded_layers(monkeypatch, kill_at=None):
    """Count the layers that are walked; die when the given one is loaded."""
    loaded, load = [], walk_module.load_layer

    def counted(entries, config, index):
        if index == kill_at:
            raise Killed
        loaded.append(index)
        return load(entries, config, index)

    monkeypatch.setattr(walk_module, "load_layer", counted)
    return loaded


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("inputs", ["float", "quantized"])
def test_a_killed_run_goes_on_where_it_was(inputs, exported, tmp_path, monkeypatch):
    recipe = make_recipe(**RECIPE, calibration={"inputs": inputs})
    quantize_artifact(exported, recipe, tmp_path / "whole", report=lambda _: None)
    with monkeypatch.context() as patch:
        loaded_layers(patch, kill_at=1)
        with pytest.raises(Killed):
            quantize_artifact(exported, recipe, tmp_path / "out", report=lambda _: None)
    assert not (tmp_path / "out").exists()
    lines = []
    with monkeypatch.context() as patch:
        walked = loaded_layers(patch)
        quantize_artifact(exported, recipe, tmp_path / "out", report=lines.append)
    assert walked == [1]
    assert any("going on at layer 2" in line for line in lines)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.usefixtures("random_calibration")
def test_what_another_recipe_left_is_not_taken_up(exported, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        loaded_layers(patch, kill_at=1)
        with pytest.raises(Killed):
            quantize_artifact(exported, make_recipe(**RECIPE), tmp_path / "out", report=lambda _: None)
    other = make_recipe(**RECIPE | {"rotation": {}})
    with monkeypatch.context() as patch:
        walked = loaded_layers(patch)
        quantize_artifact(exported, other, tmp_path / "out", report=lambda _: None)
    assert walked == [0, 1]
    quantize_artifact(exported, other, tmp_path / "whole", report=lambda _: None)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.usefixtures("random_calibration")
def test_progress_tells_the_time_left(exported, tmp_path):
    lines = []
    quantize_artifact(exported, make_recipe(**RECIPE), tmp_path / "out", report=lines.append)
    assert sum("left" in line for line in lines) == 2
