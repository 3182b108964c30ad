"""Every refusal comes before any work, in under a second, and says what to change."""

import importlib.util
import time

import onnx
import pytest

from toolchain.engine import preflight as preflight_module
from toolchain.engine import rules
from toolchain.engine.stage import build_engine
from toolchain.errors import DtoolError


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Refusals other than the missing package must not depend on what is installed here."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        preflight_module.importlib.util, "find_spec", lambda name: find("json" if name == "tensorrt_rtx" else name)
    )


def refusal(source, recipe, tmp_path):
    out = tmp_path / "out"
    start = time.process_time()  # wall time would depend on what else runs
    with pytest.raises(DtoolError) as caught:
        build_engine(source.path, recipe, out, report=lambda _: None)
    assert time.process_time() - start < 1.0
    assert not list(tmp_path.glob("*out*")), "a refusal leaves nothing behind"
    return str(caught.value)


@pytest.mark.parametrize(
    ("targets", "texts"),
    [
        ([], ["needs a target", "sm89"]),
        (["sm98"], ["unknown target 'sm98'", "did you mean"]),
        (["sm90"], ["cannot compile for sm90 (H100, H200)", "which tensorrt compiles", "onnxruntime"]),
        (["sm89", "sm100"], ["cannot compile for sm100"]),
    ],
)
def test_targets_that_cannot_be_met_are_refused(fp16, make_recipe, tmp_path, targets, texts):
    text = refusal(fp16, make_recipe(targets=targets), tmp_path)
    assert all(part in text for part in texts), text


@pytest.mark.parametrize(
    ("engine", "texts"),
    [
        (
            {"kv_capacity": 256},
            ["longer than the model's positions", "256", "to do:    --set engine.kv_capacity=128"],
        ),
        (
            {"kv_capacity": 256, "prompt_len": {"min": 1, "opt": 200, "max": 256}},
            ["--set engine.kv_capacity=128 --set 'engine.prompt_len={min=1, opt=128, max=128}'"],
        ),
        (
            {"kv_capacity": 32},
            [
                "longest prompt does not fit the cache",
                "at most 32",
                "64",
                "--set 'engine.prompt_len={min=1, opt=32, max=32}'",
            ],
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fp16, make_recipe, tmp_path, engine, texts):
    text = refusal(fp16, make_recipe(**engine), tmp_path)
    assert all(part in text for part in texts), text


def test_a_float32_export_is_refused_by_native_attention(export_of, make_recipe, tmp_path):
    text = refusal(export_of("float32"), make_recipe("float32"), tmp_path)
    assert "cannot be fused in float32" in text
    assert "compute_dtype=float16" in text


def test_bfloat16_is_refused_before_ampere_only(altered, fp16, make_recipe, tmp_path):
    source = altered(fp16, manifest=lambda m: m["details"].update(compute_dtype="bfloat16"))
    assert "sm75 (T4, RTX 20) has no bfloat16" in refusal(
        source, make_recipe("bfloat16", targets=["sm89", "sm75"]), tmp_path
    )
    assert preflight_module.preflight(source, make_recipe("bfloat16", targets=["sm80"]))[0].sm == 80


def test_an_int8_cache_is_refused_by_native_attention(altered, fp16, make_recipe, tmp_path):
    source = altered(fp16, manifest=lambda m: m["kv_contract"].update(dtype="int8"))
    text = refusal(source, make_recipe(), tmp_path)
    assert "cannot keep an int8 cache" in text
    assert "engine.attention=plugin, or quantize with kv_cache.format none" in text


def test_fp8_data_is_refused_on_ampere_alone(altered, fp16, make_recipe, tmp_path):
    def store_fp8(model):
        model.graph.initializer.append(
            onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT8E4M3FN, dims=[1], raw_data=b"\0")
        )

    source = altered(fp16, graph=store_fp8)
    text = refusal(source, make_recipe(), tmp_path)
    assert "sm80 (A100, A30) has no fp8_e4m3" in text
    assert "stores w" in text
    assert len(preflight_module.preflight(source, make_recipe(targets=["sm89"]))) == 1


def test_an_attention_node_without_body_names_op_version_and_domain(altered, fp16, make_recipe, tmp_path):
    text = refusal(altered(fp16, graph=lambda model: model.ClearField("functions")), make_recipe(), tmp_path)
    assert "needs a plugin" in text
    assert "op FusedAttention, version 1, domain dtool" in text


def test_a_node_of_an_unknown_domain_is_refused(altered, fp16, make_recipe, tmp_path):
    def add(model):
        model.opset_import.append(onnx.helper.make_opsetid("acme", 7))
        model.graph.node.append(onnx.helper.make_node("Spin", ["logits"], ["y"], name="spin", domain="acme"))

    text = refusal(altered(fp16, graph=add), make_recipe(), tmp_path)
    assert "unknown domain" in text
    assert "op Spin, version 7, domain acme" in text


def test_a_misspelt_standard_op_is_refused_with_near_names(altered, fp16, make_recipe, tmp_path):
    def add(model):
        model.graph.node.append(onnx.helper.make_node("MatMull", ["logits", "logits"], ["y"], name="odd"))

    text = refusal(altered(fp16, graph=add), make_recipe(), tmp_path)
    assert "no standard op: MatMull" in text
    assert "MatMul" in text.split("to do")[1]


def test_attention_of_another_abi_is_refused(altered, fp16, make_recipe, tmp_path):
    def age(model):
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "abi":
                    attribute.i = 99

    text = refusal(altered(fp16, graph=age), make_recipe(), tmp_path)
    assert "abi 99" in text
    assert "export the model again" in text


def test_a_missing_compiler_names_the_extra(fp16, make_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight_module.importlib.util, "find_spec", lambda _: None)
    assert 'pip install "dtool[rtx]"' in refusal(fp16, make_recipe(), tmp_path)


def test_the_embedded_backend_refuses_other_compute_types(fp16, make_recipe, tmp_path):
    text = refusal(fp16, make_recipe(backend="onnxruntime", targets=[]), tmp_path)
    assert "computes in float32, not float16" in text


def test_the_abi_of_the_rule_is_the_abi_of_the_op():
    from toolchain.ops.attention import ABI

    assert ABI == rules.ATTENTION_ABI
