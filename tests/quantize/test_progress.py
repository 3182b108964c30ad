"""A killed quantization goes on at its last finished layer and gives the bytes of a run without a break."""

import errno
import shutil

import pytest

from tests.conftest import make_recipe
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.quantize import walk as walk_module
from toolchain.quantize.progress import Progress
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


@pytest.mark.usefixtures("random_calibration")
def test_room_for_the_output_and_for_the_kept_layers_is_checked_before_any_work(exported, tmp_path, monkeypatch):
    made = quantize_artifact(exported, make_recipe(**RECIPE), tmp_path / "whole", report=lambda _: None)
    weights, usage = made.manifest.files["weights.safetensors"].bytes, shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=weights))
    with pytest.raises(DtoolError, match="no room for"):
        quantize_artifact(exported, make_recipe(**RECIPE), tmp_path / "out", report=lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["whole"]


@pytest.mark.usefixtures("random_calibration")
def test_a_full_disk_says_what_stays_and_the_next_run_goes_on_from_it(exported, tmp_path, monkeypatch):
    keep = Progress.keep_layer

    def full(progress, index, layer):
        if index == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        keep(progress, index, layer)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "keep_layer", full)
        with pytest.raises(DtoolError, match="No space left on device") as failure:
            quantize_artifact(exported, make_recipe(**RECIPE), tmp_path / "out", report=lambda _: None)
    assert f"left: {tmp_path / '.out.progress'}, " in failure.value.found
    assert "nothing" not in failure.value.fix
    lines = []
    quantize_artifact(exported, make_recipe(**RECIPE), tmp_path / "out", report=lines.append)
    assert any("going on at layer 2" in line for line in lines)


def test_a_layer_that_cannot_be_kept_is_an_error_of_the_system(tmp_path):
    """Given a path instead of a stream, torch makes an internal error of its own of a full disk."""
    import torch

    progress = Progress(tmp_path / "out", "key")
    (progress.folder / "layer-0.pt.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        progress.keep_layer(0, {"tensors": [torch.zeros(1 << 20)]})


@pytest.mark.usefixtures("random_calibration")
def test_progress_of_an_output_behind_a_link_is_on_its_disk(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "data")
    assert Progress(tmp_path / "out", "key").folder == tmp_path / "disk" / ".data.progress"
