import onnx
import pytest

from toolchain.engine.profiles import build_profile, check_profile, dynamic_inputs, write_static_graph
from toolchain.errors import DtoolError
from toolchain.graph_io import GraphIO, TensorSpec, graph_io
from toolchain.model.config import DecoderConfig


@pytest.fixture
def contract(fp16):
    config = DecoderConfig.model_validate(fp16.json("decoder.json"))
    return lambda phase: graph_io(config, phase, "float16")


def test_every_dynamic_input_has_min_opt_and_max(contract, make_recipe):
    profile = build_profile(contract("prefill"), make_recipe().engine)
    assert set(profile) == {spec.name for spec in contract("prefill").inputs}
    assert profile["input_ids"] == ((1, 1), (1, 32), (8, 64))
    assert profile["past_key_values.1.value"] == ((1, 2, 128, 16), (1, 2, 128, 16), (8, 2, 128, 16))


def test_decode_takes_one_token(contract, make_recipe):
    profile = build_profile(contract("decode"), make_recipe().engine)
    assert profile["input_ids"] == ((1, 1), (1, 1), (8, 1))
    assert "new_lengths" not in profile


def test_an_input_left_out_of_the_profile_is_named(fp16, contract, make_recipe, tmp_path):
    profile = build_profile(contract("prefill"), make_recipe().engine)
    del profile["past_key_values.1.value"]
    graph = onnx.load(write_static_graph(fp16, "prefill", 128, tmp_path), load_external_data=False).graph
    with pytest.raises(DtoolError, match=r"no range for past_key_values\.1\.value"):
        check_profile(dynamic_inputs(graph), profile)


def test_a_dimension_without_a_range_is_refused(make_recipe):
    odd = GraphIO("prefill", (TensorSpec("x", "float16", ("batch", "pages")),), ())
    with pytest.raises(DtoolError, match="'pages'"):
        build_profile(odd, make_recipe().engine)


@pytest.mark.parametrize(("phase", "guarded"), [("prefill", True), ("decode", False)])
def test_the_static_graph_fixes_the_capacity_and_keeps_the_guard_in_prefill(fp16, tmp_path, phase, guarded):
    path = write_static_graph(fp16, phase, 128, tmp_path)
    model = onnx.load(path, load_external_data=False)
    caches = [v for v in (*model.graph.input, *model.graph.output) if ".key" in v.name or ".value" in v.name]
    assert len(caches) == 8
    assert all(v.type.tensor_type.shape.dim[2].dim_value == 128 for v in caches)
    assert any(node.op_type == "Where" for node in model.functions[0].node) is guarded
    assert (tmp_path / "weights.safetensors").samefile(fp16.path / "weights.safetensors")
