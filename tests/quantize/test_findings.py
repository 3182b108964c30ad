"""Dead channels, groups and layers, and outliers: borne by every format, and told by name (H-01, H-09)."""

import pytest
import torch

from tests.conftest import make_recipe, save_tiny
from toolchain.export.stage import export_checkpoint
from toolchain.model.quantized import dequantize_weight
from toolchain.numerics import smallest_scale
from toolchain.quantize.findings import text_warnings
from toolchain.quantize.rounding import round_matrix
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe_sections import Weights
from toolchain.tensor_file import read_header, read_tensor

DOWN = "model.layers.0.mlp.down_proj"
FORMATS = {
    "int8": {"weights": {"format": "int8"}},
    "int8_gptq": {"weights": {"format": "int8", "algorithm": "gptq", "clip": "search"}},
    "int4": {"weights": {"format": "int4", "group_size": 32}},
    "int4_gptq": {"weights": {"format": "int4", "group_size": 32, "algorithm": "gptq", "clip": "search"}},
    "fp8_static": {"weights": {"format": "fp8_e4m3"}, "activations": {"format": "fp8_e4m3", "granularity": "tensor"}},
    "int8_static": {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"}},
}


def export(folder, change):
    model = save_tiny(folder / "model")
    with torch.no_grad():
        change(model.model.layers)
    model.save_pretrained(folder / "model")
    export_checkpoint(folder / "model", make_recipe(), folder / "onnx", report=lambda _: None)
    return folder / "onnx"


def shown(artifact, module):
    entries = read_header(artifact.file("weights.safetensors"))
    return dequantize_weight(*(read_tensor(entries[f"{module}.{part}"]) for part in ("weight", "weight_scale")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return export(tmp_path_factory.mktemp("whole"), lambda _: None)


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """Row 0 of a down_proj, a group of another row, and all that enters the second layer's down_proj are zero."""

    def change(layers):
        layers[0].mlp.down_proj.weight[0] = 0
        layers[0].mlp.down_proj.weight[5, 32:64] = 0
        layers[1].mlp.up_proj.weight.zero_()

    return export(tmp_path_factory.mktemp("dead"), change)


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_dead_stays_zero_and_is_named(name, dead, whole, tmp_path):
    lines = []
    artifact = quantize_artifact(dead, make_recipe(**FORMATS[name]), tmp_path / "dead", report=lines.append)
    entries = read_header(artifact.file("weights.safetensors"))
    scales = {n: read_tensor(e) for n, e in entries.items() if n.endswith("_scale")}
    assert all(bool((s > 0).all()) and bool(torch.isfinite(s).all()) for s in scales.values())
    matrix = shown(artifact, DOWN)
    assert not bool(matrix[0].any())
    assert bool(torch.isfinite(matrix).all())
    if name.startswith("int4"):
        assert not bool(matrix[5, 32:64].any())
    assert any(line.startswith(f"warning: {DOWN}: ") and "zeros only" in line for line in lines)
    if "static" in name:
        assert any("layers.1.mlp.down_proj: its input was zero" in line for line in lines)
    if name in {"int8", "int4", "int8_static", "fp8_static"}:  # rounding to the nearest looks at one row at a time
        other = shown(
            quantize_artifact(whole, make_recipe(**FORMATS[name]), tmp_path / "w", report=lambda _: None), DOWN
        )
        assert torch.equal(matrix[1:5], other[1:5])


@pytest.mark.usefixtures("random_calibration")
def test_an_input_with_one_huge_channel_is_named_with_the_way_out(tmp_path):
    """H-09: one channel x1000 under a static scale."""

    def change(layers):
        layers[1].mlp.up_proj.weight[3] *= 1000

    recipe, lines = make_recipe(**FORMATS["int8_static"]), []
    quantize_artifact(export(tmp_path, change), recipe, tmp_path / "q", report=lines.append)
    (line,) = [line for line in lines if line.startswith("warning")]
    assert "model.layers.1.mlp.down_proj" in line
    assert "excess_channels" in line


def test_a_scale_below_the_half_type_is_counted():
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    weight[2] *= 1e-7
    rounded = round_matrix(weight, Weights(format="int8"), held_in=torch.float16)
    assert float(rounded.scale[2]) == smallest_scale(torch.float16)


@pytest.mark.usefixtures("random_calibration")
def test_the_report_has_scales_outliers_and_the_text_seen(whole, tmp_path):
    artifact = quantize_artifact(whole, make_recipe(**FORMATS["int8_static"]), tmp_path / "q", report=lambda _: None)
    document = artifact.json("quantization.json")
    row = next(row for row in document["matrices"] if row["matrix"] == DOWN)
    assert 0 < row["scale_min"] < row["scale_max"]
    assert row["bits"] == pytest.approx(8 + 32 / 96, abs=0.2)
    assert row["input_outlier_ratio"] >= 1
    assert document["calibration"]["tokens"] == 4 * 48
    assert document["warnings"] == []


def test_a_text_of_few_tokens_is_told():
    few = {"distinct_tokens": 3, "tokens": 2048}
    assert "only 3 distinct tokens" in text_warnings(few)[0]
    assert text_warnings(few | {"distinct_tokens": 500}) == []
    assert text_warnings({"distinct_tokens": 20, "tokens": 96}) == []  # a short text can have no more
    assert text_warnings(None) == []
