import onnx
import pytest

from toolchain.engine.profiles import build_profile, check_profile, dynamic_inputs, write_static_graph
from toolchain.errors import DtoolError
from toolchain.graph_io import GraphIO, TensorSpec, graph_io
from toolchain.model.caches import CacheFormat
from toolchain.model.config import DecoderConfig
from toolchain.recipe_sections import Range

PROMPT, ONE = Range(min=1, opt=32, max=64), Range(min=1, opt=1, max=1)


@pytest.fixture
def contract(fp16):
    config = DecoderConfig.model_validate(fp16.json("decoder.json"))
    return lambda phase: graph_io(config, phase, (CacheFormat("float16"),) * config.num_hidden_layers)


def test_every_dynamic_input_has_min_opt_and_max(contract, make_recipe):
    profile = build_profile(contract("prefill"), make_recipe().engine, PROMPT)
    assert set(profile) == {spec.name for spec in contract("prefill").inputs}
    assert profile["input_ids"] == ((1, 1), (1, 32), (8, 64))
    assert profile["past_key_values.1.value"] == ((1, 2, 128, 16), (1, 2, 128, 16), (8, 2, 128, 16))


def test_decode_takes_one_token(contract, make_recipe):
    profile = build_profile(contract("decode"), make_recipe().engine, ONE)
    assert profile["input_ids"] == ((1, 1), (1, 1), (8, 1))
    assert "new_lengths" not in profile


def test_an_input_left_out_of_the_profile_is_named(fp16, contract, make_recipe, tmp_path):
    profile = build_profile(contract("prefill"), make_recipe().engine, PROMPT)
    del profile["past_key_values.1.value"]
    path = write_static_graph(fp16, "prefill", make_recipe().engine, tmp_path, "prefill")
    graph = onnx.load(path, load_external_data=False).graph
    with pytest.raises(DtoolError, match=r"no range for past_key_values\.1\.value"):
        check_profile(dynamic_inputs(graph), profile)


def test_a_dimension_without_a_range_is_refused(make_recipe):
    odd = GraphIO("prefill", (TensorSpec("x", "float16", ("batch", "pages")),), ())
    with pytest.raises(DtoolError, match="'pages'"):
        build_profile(odd, make_recipe().engine, PROMPT)


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_static_graph_fixes_the_capacity_and_has_no_guard(fp16, make_recipe, tmp_path, phase, attention):
    path = write_static_graph(fp16, phase, make_recipe(attention=attention).engine, tmp_path, phase)
    model = onnx.load(path, load_external_data=False)
    caches = [v for v in (*model.graph.input, *model.graph.output) if ".key" in v.name or ".value" in v.name]
    assert len(caches) == 8
    assert all(v.type.tensor_type.shape.dim[2].dim_value == 128 for v in caches)
    bodies = [function for function in model.functions if function.name == "FusedAttention"]
    assert len(bodies) == (attention == "native"), "the plugin's graph must not fall back to a body"
    assert not any(node.op_type == "Where" for body in bodies for node in body.node)
    assert (tmp_path / "weights.safetensors").samefile(fp16.path / "weights.safetensors")
