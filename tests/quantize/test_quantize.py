"""Quantized graphs against the exact arithmetic in torch, and what is written where."""

import json

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import INTEGER_FORMATS, OTHER_FORMATS, make_recipe, random_ids, save_tiny
from tests.rounding import assert_equal_up_to_rounding
from toolchain.artifact import MANIFEST, open_artifact
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.graph_io import GRAPH_FILES, PHASES
from toolchain.model.config import DecoderConfig
from toolchain.model.load import load_artifact_decoder
from toolchain.model.quantized import dequantize_weight
from toolchain.numerics import dequantize, pack_int4, quantize, scale_from_amax, token_scale, unpack_int4
from toolchain.quantize.job import Job
from toolchain.quantize.plan import plan_quantization
from toolchain.quantize.rounding import round_matrix
from toolchain.quantize.stage import quantize_artifact
from toolchain.quantize.walk import static_scales, walk
from toolchain.recipe_sections import Weights
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import fake_quant_runner
from toolchain.tensor_file import read_header, read_tensor

FORMATS = INTEGER_FORMATS | OTHER_FORMATS

pytestmark = pytest.mark.usefixtures("random_calibration")


def quantized(source, out, **sections):
    return quantize_artifact(source, make_recipe(**sections), out, report=lambda _: None)


# ---- arithmetic ----


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_codes_are_those_of_onnx_quantize_linear(values, scale):
    x = np.array(values, np.float32)
    theirs = np.clip(np.rint(x / np.float32(scale)), -128, 127).astype(np.int8)
    ours = quantize(torch.from_numpy(x), torch.tensor(scale, dtype=torch.float32))
    assert np.array_equal(ours.numpy(), theirs)


def round_to_nearest(weight, fmt, granularity, *, group_size=0, **options):
    """Codes and scales by the largest weight."""
    weights = Weights(format=fmt, granularity=granularity)
    rounded = round_matrix(weight, weights, group_size=group_size, **options)
    return rounded.codes, rounded.scale


@pytest.mark.parametrize("shape", [(48, 64), (64, 64)])
def test_every_output_channel_has_its_own_scale_and_error_bound(shape):
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    codes, scale = round_to_nearest(weight, "int8", "channel")
    assert scale.shape == shape[:1]
    assert ((dequantize(codes, scale[:, None]) - weight).abs() <= scale[:, None] * 0.501).all()


def test_zero_rows_stay_zero_and_leave_other_rows_alone():
    weight = torch.randn(5, 8)
    plain = round_to_nearest(weight, "int8", "channel")
    weight[2] = 0
    codes, scale = round_to_nearest(weight, "int8", "channel")
    assert bool((scale > 0).all())
    assert bool((dequantize(codes, scale[:, None])[2] == 0).all())
    others = [0, 1, 3, 4]
    assert torch.equal(codes[others], plain[0][others])


def test_tensor_granularity_has_one_scale():
    _, scale = round_to_nearest(torch.randn(5, 8), "int8", "tensor")
    assert len(scale.unique()) == 1


def test_parts_of_a_merged_matrix_have_scales_of_their_own():
    weight = torch.cat((torch.randn(4, 8), 100 * torch.randn(2, 8)))
    _, scale = round_to_nearest(weight, "int8", "tensor", parts=(4, 2))
    assert [len(part.unique()) for part in scale.split((4, 2))] == [1, 1]
    assert scale[0] < scale[-1] / 10


@pytest.mark.parametrize("value", [447.0, 464.0, 465.0, 1000.0, -1000.0])
def test_fp8_codes_never_leave_their_range(value):
    code = quantize(torch.tensor([value]), torch.tensor(1.0), "fp8_e4m3")
    assert code.float().item() == np.sign(value) * 448
    assert int(code.view(torch.uint8)[0]) & 0x7F != 0x7F


@pytest.mark.parametrize("width", [32, 64, 128])
def test_int4_groups_have_their_own_scale_and_pack_low_nibble_first(width):
    weight = torch.randn(6, 128) * torch.logspace(-3, 3, 6)[:, None]
    packed, scale = round_to_nearest(weight, "int4", "group", group_size=width)
    assert (packed.shape, scale.shape) == ((6, 64), (6, 128 // width))
    values = dequantize_weight(packed, scale)
    assert ((values - weight).abs() <= scale.repeat_interleave(width, 1) * 0.501).all()
    first = round(float(weight[0, 0] / scale[0, 0]))
    assert int(packed[0, 0]) & 0xF == first % 16
    assert torch.equal(pack_int4(unpack_int4(packed)), packed)


def test_a_group_that_does_not_fit_is_made_smaller_and_told_or_refused(exported, tmp_path):
    config = DecoderConfig.model_validate(open_artifact(exported).json("decoder.json"))
    plan = plan_quantization(config, make_recipe(weights={"format": "int4"}))
    assert plan.groups["model.layers.0.mlp.down_proj"] == 64
    assert plan.groups["model.layers.0.self_attn.qkv_proj"] == 32
    assert "6 matrices in groups of 32: 128 does not cut 64 inputs in two or more" in plan.notes
    with pytest.raises(DtoolError, match="cannot be stored as int4"):
        plan_quantization(config.model_copy(update={"hidden_size": 80}), make_recipe(weights={"format": "int4"}))


def test_non_finite_statistics_are_an_error():
    with pytest.raises(ValueError, match="not finite"):
        scale_from_amax(torch.tensor([1.0, float("nan")]))


def test_a_token_of_zeros_has_a_positive_scale():
    scale = token_scale(torch.zeros(1, 2, 4))
    assert bool((scale > 0).all())
    assert bool((quantize(torch.zeros(1, 2, 4), scale) == 0).all())


# ---- plan ----


def test_patterns_that_match_nothing_are_refused_with_near_matches(tiny, exported):
    config = DecoderConfig.model_validate(open_artifact(exported).json("decoder.json"))
    with pytest.raises(DtoolError, match="lm_head"):
        plan_quantization(config, make_recipe(weights={"format": "int8", "skip": ["lm_haed"]}))
    names = plan_quantization(config, make_recipe(weights={"format": "int8", "skip": ["lm_head"]}))
    globbed = plan_quantization(config, make_recipe(weights={"format": "int8", "skip": ["lm_h*"]}))
    assert (tuple(names.weights), names.skipped) == (tuple(globbed.weights), globbed.skipped)
    assert "lm_head" not in names.weights


def test_skipping_one_name_of_a_tied_matrix_skips_it_and_says_so(exported_tied):
    config = DecoderConfig.model_validate(open_artifact(exported_tied).json("decoder.json"))
    plan = plan_quantization(config, make_recipe(weights={"format": "int8", "skip": ["lm_head"]}))
    assert "model.embed_tokens" not in plan.weights
    assert "one tied matrix" in plan.notes[0]


def test_recipe_that_quantizes_nothing_is_refused(exported, tmp_path):
    with pytest.raises(DtoolError, match="quantizes nothing"):
        quantized(exported, tmp_path / "q")


# ---- graphs ----


@pytest.mark.parametrize("source", ["exported", "exported_tied"])
@pytest.mark.parametrize("name", FORMATS)
def test_graph_computes_the_exact_arithmetic(source, name, request, tmp_path):
    artifact = quantized(request.getfixturevalue(source), tmp_path / "q", **FORMATS[name])
    for phase in PHASES:
        onnx.checker.check_model(str(artifact.path / GRAPH_FILES[phase]), full_check=True)
    ids = random_ids(12, 3, 40)
    plan = [(slice(0, 30), (30, 11, 1), "evaluation"), (slice(30, 36), (6, 2, 4), "prefill")]
    plan += [(slice(i, i + 1), (1, 1, 1), "decode") for i in range(36, 40)]
    assert_equal_up_to_rounding(fake_quant_runner(artifact.path), OnnxRunner(artifact), ids, plan, capacity=64)


@pytest.mark.parametrize("name", ["weight_only", "per_token"])
def test_products_meet_dequantized_weights_directly(exported, tmp_path, name):
    artifact = quantized(exported, tmp_path / "q", **FORMATS[name])
    model = onnx.load(artifact.path / "decode.onnx", load_external_data=False)
    producers = {output: node for node in model.graph.node for output in node.output}
    products = [n for n in model.graph.node if n.op_type == "MatMul"]
    integer = 0
    for product in products:
        stored = producers.get(producers[product.input[1]].input[0])
        integer += stored is not None and stored.op_type == "DequantizeLinear"
        if name == "per_token":
            assert producers[product.input[0]].op_type == "DequantizeLinear"
    assert (len(products), integer) == (9, 8 if name == "weight_only" else 9)
    zeros = [t for t in model.graph.initializer if t.name == "quantize.zero"]
    assert all(onnx.numpy_helper.to_array(t) == 0 for t in zeros)


def test_input_shared_by_products_is_rounded_once(exported, tmp_path):
    artifact = quantized(exported, tmp_path / "q", **FORMATS["per_token"])
    model = onnx.load(artifact.path / "decode.onnx", load_external_data=False)
    assert sum(n.op_type == "QuantizeLinear" for n in model.graph.node) == 4 * 2 + 1


def test_tied_matrix_is_stored_once_as_codes(exported_tied, tmp_path):
    artifact = quantized(exported_tied, tmp_path / "q", **FORMATS["with_head"])
    entries = read_header(artifact.path / "weights.safetensors")
    assert entries["model.embed_tokens.weight"].dtype == "int8"
    assert "lm_head.weight" not in entries
    codes = sum(e.length for e in entries.values() if e.dtype == "int8")
    assert codes == sum(np.prod(e.shape) for e in entries.values() if e.dtype == "int8")


def test_same_input_gives_the_same_bytes(exported, tmp_path):
    one, two = (quantized(exported, tmp_path / n, **FORMATS["all"]) for n in ("a", "b"))
    assert (one.path / MANIFEST).read_bytes() == (two.path / MANIFEST).read_bytes()


def test_manifest_says_what_was_done_and_what_was_left(exported, tmp_path):
    artifact = quantized(exported, tmp_path / "q", **FORMATS["weight_only"])
    details = json.loads((artifact.path / MANIFEST).read_text())["details"]
    assert len(details["quantized"]) == 8
    assert details["not_quantized"] == ["lm_head", "model.embed_tokens"]


# ---- cache ----


def test_cache_scales_are_the_measured_amax_of_keys_and_values_apart(tmp_path):
    model = save_tiny(tmp_path / "m")
    model.model.layers[1].self_attn.k_proj.weight.data *= 100
    model.save_pretrained(tmp_path / "m")
    export_checkpoint(tmp_path / "m", make_recipe(), tmp_path / "x", report=lambda _: None)
    artifact = quantized(tmp_path / "x", tmp_path / "q", **FORMATS["cache"])
    entries = read_header(artifact.path / "weights.safetensors")
    scales = [read_tensor(entries[f"model.layers.1.self_attn.{n}"]) for n in ("k_scale", "v_scale")]
    assert bool((scales[0] > 20 * scales[1]).all())
    decoder = load_artifact_decoder(open_artifact(tmp_path / "x"))
    caches = decoder.new_caches(4, 48)
    with torch.inference_mode():
        decoder(torch.from_numpy(random_ids(11, 4, 48)), torch.zeros(4, dtype=torch.int64), caches)
    amax = caches[1][0].abs().amax((0, 2, 3))
    torch.testing.assert_close(scales[0], amax / 127, rtol=1e-3, atol=0)


def test_doubled_cache_scale_changes_the_output(exported, tmp_path):
    artifact = quantized(exported, tmp_path / "q", **FORMATS["cache"])
    ids, lengths = random_ids(13, 1, 20), np.array([20])

    def logits():
        runner = OnnxRunner(artifact)
        return runner.step(runner.new_state(1, 32), ids, lengths, "prefill")

    before = logits()
    entry = read_header(artifact.path / "weights.safetensors")["model.layers.0.self_attn.v_scale"]
    with entry.path.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write((2 * read_tensor(entry)).numpy().tobytes())
    assert float(abs(logits() - before).max()) > 1e-3


def test_ranges_do_not_depend_on_the_batch_size(exported):
    artifact = open_artifact(exported)
    entries = read_header(artifact.file("weights.safetensors"))
    config = DecoderConfig.model_validate(artifact.json("decoder.json"))
    blocks = random_ids(14, 6, 30)

    def scales(batch, granularity):
        recipe = make_recipe(kv_cache={"format": "int8", "granularity": granularity}, calibration={"batch": batch})
        layers = walk(Job(entries, config, recipe, plan_quantization(config, recipe), blocks=blocks))
        return {
            n: s
            for layer in layers
            for n, s in static_scales(layer, recipe, plan_quantization(config, recipe), torch.float32).items()
        }

    one, six = scales(1, "head"), scales(6, "head")
    assert len(one) == 4
    for name, scale in one.items():
        torch.testing.assert_close(six[name], scale, rtol=1e-5, atol=0)
    assert all(len(scale.unique()) == 1 for scale in scales(6, "tensor").values())


def test_static_input_scales_are_the_measured_amax_of_each_product(exported, tmp_path):
    artifact = quantized(exported, tmp_path / "q", **FORMATS["static"])
    decoder = load_artifact_decoder(open_artifact(exported))
    seen = []
    decoder.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        ids = torch.from_numpy(random_ids(11, 4, 48))
        decoder(ids, torch.zeros(4, dtype=torch.int64), decoder.new_caches(4, 48))
    entries = read_header(artifact.path / "weights.safetensors")
    scale = read_tensor(entries["model.layers.1.mlp.down_proj.input_scale"])
    torch.testing.assert_close(scale, seen[0].abs().max() / 127, rtol=1e-6, atol=0)
    assert "lm_head.input_scale" not in entries  # activations.skip leaves the head's input in float
