"""Rotation and the excess of massive activations: identities before rounding, and graphs like the torch model."""

import numpy as np
import pytest
import torch

from tests.conftest import make_recipe, random_ids, save_tiny
from tests.model.families import CONTEXT_LEN, save_variant
from tests.quantize.test_smoothing import logits, logits_of
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.model.load import load_decoder
from toolchain.model.quantized import InputShape
from toolchain.quantize.excess import find_excess
from toolchain.quantize.rotation import (
    block_width,
    check_rotation,
    rotate_feed_forward,
    rotate_stream,
    rotate_values,
    rotation_matrix,
)
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe_sections import Rotation
from toolchain.runners.open import fake_quant_runner, open_runner
from toolchain.tensor_file import read_header

ALL = {"stream": True, "values": True, "feed_forward": True}
FAMILIES = [
    "llama_biases", "llama_groups_of_three", "qwen2", "gemma", "cohere", "qwen3", "mistral", "smollm3", "glm",
    "granite", "phi3_long",
]  # fmt: skip
STATIC = {"weights": {"format": "int8"}, "activations": {"format": "int8", "granularity": "tensor"}}
TOKEN = {"weights": {"format": "int8"}, "activations": {"format": "int8"}, "kv_cache": {"format": "int8"}}


@pytest.mark.parametrize("width", [1, 2, 9, 64, 96, 576, 1536])
def test_the_matrix_is_orthogonal_flat_and_the_same_for_a_seed(width):
    rotation = rotation_matrix(width)
    assert float((rotation @ rotation.mT - torch.eye(width)).abs().max()) < 1e-12
    assert float(rotation.abs().max()) <= (2 / width) ** 0.5 + 1e-12
    assert torch.equal(rotation, rotation_matrix(width))
    assert width == 1 or not torch.equal(rotation, rotation_matrix(width, seed=3))


def test_blocks_are_the_largest_divisor_within_the_limit():
    assert [block_width(n) for n in (1536, 11008, 96, 97, 200)] == [128, 128, 96, 97, 100]


@pytest.mark.parametrize("name", FAMILIES)
def test_rotation_is_an_identity(name, tmp_path):
    save_variant(tmp_path / "model", name)
    decoder = load_decoder(tmp_path / "model", context_len=CONTEXT_LEN.get(name))
    config = decoder.config
    rotation = Rotation(**ALL)
    if config.norm != "rms" or config.norm_placement != "pre":
        with pytest.raises(DtoolError, match="no identity"):
            check_rotation(config, rotation)
        return
    check_rotation(config, rotation)
    ids = torch.from_numpy(random_ids(1, 2, 40, vocab=config.vocab_size))
    before = logits(decoder, ids)
    decoder.rotation_EE = rotation_matrix(config.hidden_size).float()
    for block in decoder.model.layers:
        for parameter in block.parameters():
            parameter.requires_grad_(False)
        rotate_stream(block, rotation_matrix(config.hidden_size))
        rotate_values(block, config)
        block.mlp.shape = InputShape(rotate_feed_forward(block).float())
    after = logits(decoder, ids)
    assert float((after - before).abs().max()) <= 1e-4 * float(before.abs().max())


@pytest.mark.parametrize(("name", "what"), [("gpt2", "stream"), ("gemma2", "stream"), ("olmoe", "feed_forward")])
def test_what_does_not_commute_is_refused_by_name(name, what, tmp_path):
    save_variant(tmp_path / "model", name)
    config = load_decoder(tmp_path / "model").config
    with pytest.raises(DtoolError, match=f"rotation.{what}"):
        check_rotation(config, Rotation(**{what: True}))


# ---- the excess ----


def test_only_channels_far_above_all_others_have_an_excess():
    amax = torch.ones(32)
    assert find_excess(amax, 4) is None
    amax[[3, 9]] = torch.tensor([500.0, 2.0])
    found = find_excess(amax, 4)
    assert found is not None
    assert (found.channels.tolist(), found.limit) == ([3, 9], 1.0)
    bounds = found.bounds(32)
    assert (float(bounds[3]), float(bounds[0])) == (1.0, 65504.0)
    assert find_excess(torch.zeros(32), 4) is None
    assert find_excess(amax, 0) is None


def test_limit_and_excess_together_are_the_product():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 32, generator=generator), torch.randn(7, 32, generator=generator)
    x[1, 0, 3] = -900
    amax = torch.ones(32)
    amax[3] = 900
    found = find_excess(amax, 1)
    assert found is not None
    rotation = rotation_matrix(16).float()
    shape = InputShape(rotation, found.bounds(32), found.channels, weight[:, found.channels].mT)
    shaped, added = shape(x)
    turned = (weight.unflatten(1, (2, 16)) @ rotation).flatten(1)
    torch.testing.assert_close(shaped @ turned.mT + added, x @ weight.mT, rtol=1e-4, atol=1e-3)
    assert float(shaped.abs().max()) < 12


# ---- artifacts ----


def massive(path, **changes):
    """A tiny model one of whose feed-forward channels reaches far beyond all others, as real ones do."""
    model = save_tiny(path, **changes)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] *= 500
        model.model.layers[1].mlp.down_proj.weight[:, 3] /= 50
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotation")
    massive(folder / "model", tie_word_embeddings=request.param)
    export_checkpoint(folder / "model", make_recipe(), folder / "onnx", report=lambda _: None)
    return folder / "onnx"


@pytest.mark.usefixtures("random_calibration")
@pytest.mark.parametrize("sections", [STATIC, TOKEN], ids=["static", "token"])
def test_rotated_graphs_compute_what_torch_does(sections, exported, tmp_path):
    sections = {**sections, "rotation": ALL}
    if sections["activations"].get("granularity") == "tensor":
        sections["activations"] = {**sections["activations"], "excess_channels": 2}
    artifact = quantize_artifact(exported, make_recipe(**sections), tmp_path / "q", report=lambda _: None)
    names = set(read_header(artifact.file("weights.safetensors")))
    assert {"rotation.stream", "rotation.feed_forward"} <= names
    assert ("model.layers.1.mlp.down_proj.excess_weight" in names) == (
        sections["activations"].get("granularity") == "tensor"
    )
    assert "model.layers.0.mlp.down_proj.excess_weight" not in names
    assert artifact.json("quantization.json")["identity_error"] < 2e-5
    ids, lengths = random_ids(5, 2, 64), [64, 41]
    ours = logits_of(open_runner(artifact.path), ids, lengths)
    theirs = logits_of(fake_quant_runner(artifact.path), ids, lengths)
    # a code on an edge may fall to the other side: most values agree far closer
    assert float(np.median(abs(ours - theirs))) < 1e-3
    assert float(abs(ours - theirs).max()) < 0.05 * float(abs(theirs).max())


@pytest.mark.usefixtures("random_calibration")
def test_rotation_alone_changes_nothing_but_rounding(exported, tmp_path):
    """Only the cache is rounded, and finely: the logits stay those of the float model."""
    recipe = make_recipe(kv_cache={"format": "int8"}, rotation=ALL)
    artifact = quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None)
    ids, lengths = random_ids(5, 2, 40), [40, 40]
    plain = quantize_artifact(exported, make_recipe(kv_cache={"format": "int8"}), tmp_path / "p", report=lambda _: None)
    float_logits = logits_of(open_runner(exported), ids, lengths)
    errors = [abs(logits_of(open_runner(a.path), ids, lengths) - float_logits).mean() for a in (artifact, plain)]
    assert errors[0] < 2 * errors[1]


@pytest.mark.usefixtures("random_calibration")
def test_a_massive_channel_costs_a_static_scale_nothing_any_more(exported, tmp_path):
    """H-09: with the excess in float the error of the logits falls more than tenfold (20 dB)."""
    ids, lengths = random_ids(5, 2, 40), [40, 40]
    float_logits = logits_of(open_runner(exported), ids, lengths)
    errors = []
    for name, extra in (("plain", {}), ("excess", {"excess_channels": 2})):
        lines = []
        recipe = make_recipe(**{**STATIC, "activations": {**STATIC["activations"], **extra}})
        artifact = quantize_artifact(exported, recipe, tmp_path / name, report=lines.append)
        errors.append(float(abs(logits_of(fake_quant_runner(artifact.path), ids, lengths) - float_logits).mean()))
        assert any("layer 1" in line and "channels reach" in line for line in lines) == (name == "excess")
    assert errors[1] < errors[0] / 3, errors


def test_excess_without_a_static_scale_is_refused():
    with pytest.raises(DtoolError, match="excess_channels"):
        make_recipe(weights={"format": "int8"}, activations={"format": "int8", "excess_channels": 4})


@pytest.mark.usefixtures("random_calibration")
def test_the_same_recipe_gives_the_same_bytes(exported, tmp_path):
    recipe = make_recipe(**TOKEN, rotation=ALL)
    one, two = (quantize_artifact(exported, recipe, tmp_path / n, report=lambda _: None) for n in ("a", "b"))
    assert {n: f.sha256 for n, f in open_artifact(one.path).manifest.files.items()} == {
        n: f.sha256 for n, f in open_artifact(two.path).manifest.files.items()
    }
