"""Centered inputs: an identity before rounding, less error after it, and graphs like the torch model."""

import numpy as np
import pytest
import torch

from tests.conftest import make_recipe, random_ids, save_tiny
from tests.quantize.test_rotation import ALL
from tests.quantize.test_smoothing import logits_of
from toolchain.engine.stage import build_engine
from toolchain.export.stage import export_checkpoint
from toolchain.model.quantized import QuantizedLinear
from toolchain.quantize.seen import nothing_seen
from toolchain.quantize.stage import quantize_artifact
from toolchain.runners.open import fake_quant_runner, open_runner
from toolchain.tensor_file import read_header, read_tensor

CENTER = {"center": True}
FP8 = {"weights": {"format": "fp8_e4m3"}, "activations": {"format": "fp8_e4m3", "granularity": "tensor"} | CENTER}
STATIC = {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"} | CENTER}
TOKEN = {"weights": {"format": "int8", "algorithm": "gptq"}, "activations": {"format": "int8"} | CENTER}
INT4 = {"weights": {"format": "int4", "group_size": 32}, "activations": CENTER}
WEIGHTS = {"weights": {"format": "int8"}, "activations": CENTER}
QUANTIZED_INPUTS = {"calibration": {"inputs": "quantized"}}


def seen_of(*batches):
    width = batches[0].shape[-1]
    seen = nothing_seen(width, hessian=True, center=True)
    for x in batches:
        seen.add(x)
    return seen


def test_what_was_seen_shifts_as_the_inputs_do():
    x, center = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0)) + 2, torch.linspace(-1, 3, 8)
    shifted, made = seen_of(x[:1], x[1:]), seen_of(x[:1] - center, x[1:] - center)
    shifted.shift(center)
    for name in ("low", "high", "signed", "hessian"):
        if name not in {"low", "high"}:  # those begin at zero
            torch.testing.assert_close(getattr(shifted, name), getattr(made, name), rtol=1e-4, atol=1e-3)
    assert bool((shifted.amax >= (x - center).abs().amax((0, 1)) - 1e-6).all())


def test_massive_tokens_leave_the_center_where_it_was():
    x = torch.randn(1, 500, 8, generator=torch.Generator().manual_seed(0)) + 3
    plain = seen_of(x).center
    x[0, 0, 2] = 5000
    torch.testing.assert_close(seen_of(x).center, plain, rtol=0.02, atol=0.02)
    assert float(x[..., 2].mean() - plain[2]) > 9  # the mean would have moved


def test_a_centered_product_is_the_product():
    generator = torch.Generator().manual_seed(0)
    x, codes = torch.randn(2, 5, 16, generator=generator) + 4, torch.randint(-127, 128, (6, 16), generator=generator)
    scale, center = torch.rand(6, generator=generator) / 100, torch.full((16,), 4.0)
    weight = codes * scale[:, None]
    fine = QuantizedLinear(codes.to(torch.int8), scale, None, ("int8", "token"), None, center, weight @ center)
    coarse = QuantizedLinear(codes.to(torch.int8), scale, None, ("int8", "token"))
    errors = [float((linear(x) - x @ weight.mT).abs().mean()) for linear in (fine, coarse)]
    assert errors[0] < errors[1] / 1.5, errors


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A tiny model whose inputs have means, as real ones do: positive norms, and one direction in all embeddings."""
    folder = tmp_path_factory.mktemp("center")
    model = save_tiny(folder / "model", attention_bias=True)
    with torch.no_grad():
        model.model.embed_tokens.weight += 3 * model.model.embed_tokens.weight[:1]
    model.save_pretrained(folder / "model")
    export_checkpoint(folder / "model", make_recipe(), folder / "onnx", report=lambda _: None)
    return folder / "onnx"


CASES = {
    "static": STATIC,
    "token": TOKEN,
    "weights": WEIGHTS,
    "rotated": STATIC | {"rotation": ALL},
    "quantized inputs": TOKEN | QUANTIZED_INPUTS,
}


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("name", CASES)
def test_centered_graphs_and_engines_compute_what_torch_does(name, exported, tmp_path):
    recipe = make_recipe(**CASES[name])
    artifact = quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None)
    names = set(read_header(artifact.file("weights.safetensors")))
    assert ("model.layers.1.mlp.down_proj.input_center" in names) == (name != "weights")
    assert "model.layers.0.self_attn.qkv_proj.output_offset" in names
    ids, lengths = random_ids(5, 2, 64), [64, 41]
    theirs = logits_of(fake_quant_runner(artifact.path), ids, lengths)
    ours = logits_of(open_runner(artifact.path), ids, lengths)
    # a code on an edge may fall to the other side: most values agree far closer
    assert float(np.median(abs(ours - theirs))) < 1e-3
    assert float(abs(ours - theirs).max()) < 0.05 * float(abs(theirs).max())
    engine = build_engine(artifact.path, recipe, tmp_path / "engine", report=lambda _: None)
    runner = open_runner(engine.path)
    last = runner.step(runner.new_state(2, 64), ids, np.array(lengths), "prefill")[:, 0]
    rows = theirs[np.arange(2), np.array(lengths) - 1]
    assert float(np.median(abs(last - rows))) < 1e-3 * float(abs(theirs).max())


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_centering_lowers_the_error(name, exported, tmp_path):
    """Of the logits, against the float model: errors of FP8 are relative, so a mean taken off takes its part along."""
    sections = FP8 if name == "fp8" else INT4
    ids, lengths = random_ids(5, 2, 40), [40, 40]
    float_logits = logits_of(open_runner(exported), ids, lengths)
    errors = []
    for center in (True, False):
        recipe = make_recipe(**{**sections, "activations": {**sections["activations"], "center": center}})
        artifact = quantize_artifact(exported, recipe, tmp_path / str(center), report=lambda _: None)
        errors.append(float(abs(logits_of(fake_quant_runner(artifact.path), ids, lengths) - float_logits).mean()))
    assert errors[0] < 0.9 * errors[1], errors


@pytest.mark.usefixtures("random_calibration")
def test_the_offset_makes_good_what_rounding_the_weights_does_to_the_mean(exported, tmp_path):
    """(W - W') m, of the mean the float product would have seen: with exact weights it is W m."""
    static = quantize_artifact(exported, make_recipe(**STATIC), tmp_path / "s", report=lambda _: None)
    entries, source = (read_header(p / "weights.safetensors") for p in (static.path, exported))
    module = "model.layers.0.mlp.gate_up_proj"
    center, offset = (read_tensor(entries[f"{module}.{part}"]) for part in ("input_center", "output_offset"))
    torch.testing.assert_close(offset, read_tensor(source[f"{module}.weight"]) @ center)
    assert float(center.abs().max()) > 0.1
