"""The embedded engine: the same logits as the artifact's exact arithmetic, over the same cache."""

import numpy as np
import onnx
import pytest

from tests.conftest import INTEGER_FORMATS, make_recipe, random_ids, save_tiny
from tests.rounding import assert_equal_up_to_rounding, walked
from toolchain.engine import onnxruntime as embedded
from toolchain.engine.stage import build_engine
from toolchain.errors import DtoolError
from toolchain.graph_io import PHASES
from toolchain.processor import probe_integer_products
from toolchain.quantize.stage import quantize_artifact
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import fake_quant_runner, open_runner

HEAD_LEFT = {"weights": {"format": "int8"}, "activations": {"format": "int8"}}
TOKEN_CACHE = {"format": "int8", "granularity": "token"}
TOKEN_FORMATS = {
    "token_cache": {"kv_cache": TOKEN_CACHE},
    "all_token_cache": INTEGER_FORMATS["all"] | {"kv_cache": TOKEN_CACHE},
    "mixed_cache": {"kv_cache": {"format": "int8", "skip": ["model.layers.0.self_attn"]}},
    "mixed_token_cache": {"kv_cache": TOKEN_CACHE | {"skip": ["*.1.self_attn"]}},
}
FORMATS = {"float": {}, "head_left": HEAD_LEFT} | INTEGER_FORMATS | TOKEN_FORMATS
HEAD_OF_TWO_DIGITS = {"least": 1e-3}
TWO_DIGITS = {
    "weight_only": {"times": 512.0},
    "with_head": {"times": 512.0},
    "float_head_input": HEAD_OF_TWO_DIGITS,
    "static": HEAD_OF_TWO_DIGITS,
}
"""Engines with float inputs of two int8 digits: what they may move more than the formats of one digit.

The second digit counts in amax / (127 * 254): a rounding error of 8.9e-6 * amax, or 2.7e-5 of the row's
rms where amax is three times that. This is 128 times what the sums of a product err by, so a disturbance
four times as large is one of 512 times. Where the head alone has two digits, no code follows: 2.7e-5 of
logits of rms 3, times 4 for the largest of 512, is 3e-4, and three times that are allowed.
"""
SIGNED_IS_EXACT = probe_integer_products()
needs_exact_sums = pytest.mark.skipif(not SIGNED_IS_EXACT, reason="uint8 x int8 products saturate here: no VNNI")
pytestmark = pytest.mark.usefixtures("random_calibration")


def make_engine(source, folder, name):
    recipe = make_recipe(**FORMATS[name])
    if recipe.quantizes:
        source = quantize_artifact(source, recipe, folder / "q", report=lambda _: None).path
    return source, build_engine(source, recipe, folder / "engine", report=lambda _: None)


@pytest.mark.parametrize("unsigned", [pytest.param(False, marks=needs_exact_sums), True])
@pytest.mark.parametrize("checkpoint", ["exported", "exported_tied"])
@pytest.mark.parametrize("name", FORMATS)
def test_engine_computes_the_artifacts_arithmetic(name, checkpoint, unsigned, request, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "probe_integer_products", lambda: not unsigned)
    source, engine = make_engine(request.getfixturevalue(checkpoint), tmp_path, name)
    ids = random_ids(15, 3, 40)
    plan = [(slice(0, 30), (30, 11, 1), "evaluation"), (slice(30, 36), (6, 2, 4), "prefill")]
    plan += [(slice(i, i + 1), (1, 1, 1), "decode") for i in range(36, 40)]
    more = TWO_DIGITS.get(name, {})
    assert_equal_up_to_rounding(fake_quant_runner(source), OnnxRunner(engine), ids, plan, capacity=48, **more)


def test_a_cache_with_a_scale_per_token_keeps_the_body(exported, tmp_path):
    _, engine = make_engine(exported, tmp_path, "mixed_token_cache")
    kinds = engine.json("report.json")["attention"]
    assert kinds == {"dtool.FusedAttention": 1, "com.microsoft.GroupQueryAttention": 1}
    functions = onnx.load(engine.path / "decode.onnx", load_external_data=False).functions
    assert [(function.name, function.overload) for function in functions] == [("FusedAttention", "int8_token")]


@pytest.mark.parametrize("name", ["all", "cache", "token_cache"])
def test_decode_equals_prefill_bit_for_bit_with_an_integer_cache(exported, tmp_path, name):
    _, engine = make_engine(exported, tmp_path, name)
    runner = OnnxRunner(engine)
    ids = random_ids(16, 2, 30)
    whole = runner.step(runner.new_state(2, 48), ids, np.array([30, 30]), "evaluation")
    state = runner.new_state(2, 48)
    runner.step(state, ids[:, :10], np.array([10, 10]), "prefill")
    steps = [runner.step(state, ids[:, i : i + 1], np.array([1, 1]), "decode") for i in range(10, 30)]
    bound = 0 if name == "all" else 2e-5
    assert float(abs(np.concatenate(steps, 1) - whole[:, 10:]).max()) <= bound


def test_products_of_one_input_are_one(exported, tmp_path):
    _, engine = make_engine(exported, tmp_path, "all")
    for phase in PHASES:
        model = onnx.load(engine.path / f"{phase}.onnx", load_external_data=False)
        kinds = [node.op_type for node in model.graph.node]
        assert kinds.count("MatMulIntegerToFloat") == 4 * 2 + 1
        assert kinds.count("GroupQueryAttention") == 2
        assert "MatMul" not in kinds
        assert "DequantizeLinear" not in kinds
        assert not model.functions


def test_tied_matrix_is_stored_once(exported_tied, tmp_path):
    for name, size in (("float", 4), ("all", 1)):
        (tmp_path / name).mkdir()
        _, engine = make_engine(exported_tied, tmp_path / name, name)
        tied = engine.path / "weights.safetensors"
        entries = embedded.read_header(tied)
        assert sum(e.length for n, e in entries.items() if e.length >= 512 * 96 * size) == 512 * 96 * size


def test_requests_outside_the_engine_are_refused_with_both_numbers(exported, tmp_path):
    recipe = make_recipe(engine={"kv_capacity": 16, "batch": {"max": 2}, "prompt_len": {"max": 8, "opt": 8}})
    runner = open_runner(build_engine(exported, recipe, tmp_path / "e", report=lambda _: None).path)
    with pytest.raises(DtoolError, match=r"batch 5 not in \[1, 2\]"):
        runner.new_state(5, 16)
    with pytest.raises(DtoolError, match=r"capacity 17 not in \[1, 16\]"):
        runner.new_state(1, 17)
    with pytest.raises(DtoolError, match=r"prompt length 9 not in \[1, 8\]"):
        runner.step(runner.new_state(1, 16), random_ids(0, 1, 9), np.array([9]), "prefill")


def test_half_precision_artifact_is_refused_for_the_embedded_backend(tiny, tmp_path):
    from toolchain.export.stage import export_checkpoint

    export_checkpoint(tiny[0], make_recipe(compute_dtype="float16"), tmp_path / "x", report=lambda _: None)
    with pytest.raises(DtoolError, match="computes in float32"):
        build_engine(tmp_path / "x", make_recipe(compute_dtype="float16"), tmp_path / "e", report=lambda _: None)
    assert not (tmp_path / "e").exists()


@needs_exact_sums
@pytest.mark.parametrize("name", ["weight_only", "per_token"])
def test_products_of_signed_and_of_unsigned_weights_are_the_same_bit_for_bit(name, exported, tmp_path, monkeypatch):
    logits = []
    for exact in (True, False):
        monkeypatch.setattr(embedded, "probe_integer_products", lambda exact=exact: exact)
        (tmp_path / str(exact)).mkdir()
        runner = OnnxRunner(make_engine(exported, tmp_path / str(exact), name)[1])
        logits.append(walked(runner, random_ids(4, 2, 30), [(slice(0, 30), (30, 12), "evaluation")], capacity=32))
    assert np.array_equal(*logits)


def test_engine_of_signed_products_is_refused_where_they_saturate(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "probe_integer_products", lambda: True)
    _, engine = make_engine(exported, tmp_path, "per_token")
    if SIGNED_IS_EXACT:
        monkeypatch.setattr("toolchain.runners.onnx.probe_integer_products", lambda: False)
    with pytest.raises(DtoolError, match="saturates"):
        OnnxRunner(engine)


@pytest.mark.parametrize("sum_of_pairs", [127 * 127 * 64, 32767 * 32])
def test_probe_tells_exact_sums_from_saturated_ones(monkeypatch, sum_of_pairs):
    import onnxruntime

    class Session:
        def __init__(self, *_, **__): ...

        def run(self, *_):
            return (np.full((2, 32), sum_of_pairs),)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    assert probe_integer_products() == (sum_of_pairs == 127 * 127 * 64)


@pytest.mark.parametrize("name", ["weight_only", "per_token"])
def test_a_token_of_zeros_stays_zero(tmp_path, name):
    from toolchain.export.stage import export_checkpoint

    model = save_tiny(tmp_path / "m")
    model.model.embed_tokens.weight.data[5] = 0
    model.save_pretrained(tmp_path / "m")
    export_checkpoint(tmp_path / "m", make_recipe(), tmp_path / "x", report=lambda _: None)
    source, engine = make_engine(tmp_path / "x", tmp_path, name)
    ids = np.array([[5, 7, 5, 5, 9]])
    theirs, ours = (
        r.step(r.new_state(1, 8), ids, np.array([5]), "evaluation")
        for r in (fake_quant_runner(source), OnnxRunner(engine))
    )
    assert np.isfinite(ours).all()
    assert float(abs(ours - theirs).max()) < 2e-2
