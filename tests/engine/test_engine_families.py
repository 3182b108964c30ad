"""The embedded engine for every mechanism of attention and feed-forward, in float and in integers."""

import onnx
import pytest

from tests.conftest import make_recipe, random_ids
from tests.model.families import CONTEXT_LEN, save_variant
from tests.rounding import assert_equal_up_to_rounding
from toolchain.engine.stage import build_engine
from toolchain.export.stage import export_checkpoint
from toolchain.graph_io import GRAPH_FILES
from toolchain.quantize.stage import quantize_artifact
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import fake_quant_runner

MECHANISMS = {
    "gemma2": "soft cap, window, query_pre_attn_scalar, 1 + w",
    "gemma3_text": "QK-norm per head, two rotations, windows",
    "cohere2": "interleaved, no rotation in some layers, parallel",
    "gpt_neox": "a rotation of fewer dims than the runtime's kernel takes, biases",
    "gpt2": "learned positions, no rotation, tied head",
    "stablelm_parallel": "LayerNorm of every head",
    "olmo2": "QK-norm over the width, output norms",
    "phi3_long": "stretched frequencies, a fused projection",
    "qwen2_moe_mixed": "experts, a shared one, dense layers among them",
    "granite": "multipliers",
}
FORMATS = {
    "float": {},
    "integers": {
        "weights": {"format": "int8", "skip": []},
        "activations": {"format": "int8", "skip": []},
        "kv_cache": {"format": "int8"},
    },
    "cache": {"kv_cache": {"format": "int8"}},
}
pytestmark = pytest.mark.usefixtures("random_calibration")


@pytest.fixture(scope="module", params=MECHANISMS)
def exported_mechanism(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mechanism")
    save_variant(folder / "model", request.param)
    recipe = make_recipe(**({"context_len": CONTEXT_LEN[request.param]} if request.param in CONTEXT_LEN else {}))
    return export_checkpoint(folder / "model", recipe, folder / "onnx", report=lambda _: None).path


@pytest.mark.parametrize("name", FORMATS)
def test_engine_computes_the_artifacts_arithmetic_for_every_mechanism(name, exported_mechanism, tmp_path):
    recipe, source = make_recipe(**FORMATS[name]), exported_mechanism
    if recipe.quantizes:
        source = quantize_artifact(source, recipe, tmp_path / "q", report=lambda _: None).path
    engine = build_engine(source, recipe, tmp_path / "engine", report=lambda _: None)
    graph = onnx.load(str(engine.file(GRAPH_FILES["decode"])), load_external_data=False)
    assert "FusedAttention" not in {node.op_type for node in graph.graph.node}
    ids = random_ids(15, 3, 56)
    plan = [(slice(0, 30), (30, 11, 1), "evaluation"), (slice(30, 52), (22, 2, 4), "prefill")]
    plan += [(slice(i, i + 1), (1, 1, 1), "decode") for i in range(52, 56)]
    assert_equal_up_to_rounding(fake_quant_runner(source), OnnxRunner(engine), ids, plan, capacity=60)
