"""What the TensorRT runner refuses: engines of other versions and GPUs, and engines other than their manifest."""

import builtins
import importlib
import json
import shutil

import pytest
import torch

from tests.runners.stub_tensorrt import StubDevice, StubRefitter, StubTensorRT
from tests.runners.tensorrt_engines import RTX, assert_same, make_engine, make_runner, walk
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.runners import tensorrt_host
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import open_runner
from toolchain.runners.tensorrt import TensorRTRunner


@pytest.fixture(scope="module")
def engine(exported, tmp_path_factory):
    return make_engine(exported, tmp_path_factory.mktemp("engine") / "two")


@pytest.fixture
def onnx(exported):
    return OnnxRunner(open_artifact(exported, check_hashes=False), threads=1)


# the manifest against this machine


def refusal(artifact, trt=None, device=None):
    """The text of the refusal; TensorRT must not have been touched."""
    trt = trt or StubTensorRT()
    with pytest.raises(DtoolError) as caught:
        make_runner(artifact, trt, device)
    assert trt.calls == []
    return str(caught.value)


def test_other_version_is_refused_with_both_and_a_way_out(engine):
    text = refusal(engine, StubTensorRT("11.5.0.1"))
    assert "11.4.0.106" in text
    assert "11.5.0.1 on this machine" in text
    assert "pip install tensorrt==11.4.0.106" in text
    assert "dtool build-engine" in text


def test_version_compatible_engine_runs_in_later_versions_of_its_major_alone(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e", version_compatible=True)
    runner = make_runner(artifact, StubTensorRT("11.5.0.1"))
    assert all(stub.code_allowed for stub in runner.trt.engines)
    for version in ("11.3.9.9", "12.0.0.1", "10.16.1"):
        assert "11.4.0.106" in refusal(artifact, StubTensorRT(version))


def test_stripped_plans_get_their_weights_before_they_run(exported, tmp_path, monkeypatch):
    graphs = {"prefill.engine": "prefill.onnx", "decode.engine": "decode.onnx"}
    artifact = make_engine(exported, tmp_path / "e", copies=tuple(graphs.values()), weights_from=graphs)
    filled = [engine.filled_from for engine in make_runner(artifact).trt.engines]
    assert filled == [str(artifact.path / name) for name in graphs.values()]
    monkeypatch.setattr(StubRefitter, "unset", ("model.norm.weight",))
    with pytest.raises(DtoolError, match=r"cannot be filled in[\s\S]*without: model\.norm\.weight"):
        make_runner(artifact)


def test_code_in_a_plan_is_not_allowed_without_need(engine):
    assert not any(stub.code_allowed for stub in make_runner(engine).trt.engines)


def test_rtx_engine_runs_in_its_own_version_alone(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e", version_compatible=True, **RTX)
    assert "tensorrt-rtx 1.7.2.1 on this machine" in refusal(artifact, StubTensorRT("1.7.2.1", rtx=True))


def test_other_gpu_is_refused_with_both_capabilities(engine):
    text = refusal(engine, device=StubDevice("9.0"))
    assert "compute capability 8.9 (sm89)" in text
    assert "compute capability 9.0 (sm90) on this machine" in text
    assert 'engine.targets=["sm90"]' in text


@pytest.mark.parametrize(
    ("level", "capability", "runs"),
    [
        ("ampere_plus", "9.0", True),
        ("ampere_plus", "12.0", True),
        ("ampere_plus", "7.5", False),
        ("same_compute_capability", "9.0", False),
        ("same_compute_capability", "8.9", True),
        ("none", "8.6", False),
    ],
)
def test_hardware_compatibility_widens_what_an_engine_runs_on(exported, tmp_path, level, capability, runs):
    artifact = make_engine(exported, tmp_path / "e", hardware_compatibility=level)
    if runs:
        make_runner(artifact, device=StubDevice(capability))
    else:
        assert capability in refusal(artifact, device=StubDevice(capability))


def test_missing_plan_and_missing_library_are_named(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e", plugin_libraries=["plugin/libdtool_attention.so"])
    (artifact.path / "decode.engine").unlink()
    assert "the plan" in refusal(artifact)
    assert "decode.engine is missing" in refusal(artifact)
    shutil.copyfile(artifact.path / "prefill.engine", artifact.path / "decode.engine")
    (artifact.path / "plugin/libdtool_attention.so").unlink()
    assert "plugin/libdtool_attention.so is missing" in refusal(artifact)


def test_manifest_of_an_older_dtool_is_refused_by_what_it_lacks(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e")
    document = json.loads((artifact.path / "manifest.json").read_text())
    del document["target"]["engines"]
    (artifact.path / "manifest.json").write_text(json.dumps(document))
    assert "does not say its engines" in refusal(open_artifact(artifact.path))


def test_plugin_library_is_loaded_once_per_process_and_before_the_plans(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e", plugin_libraries=["plugin/libdtool_attention.so"])
    trt = StubTensorRT()
    make_runner(artifact, trt)
    make_runner(artifact, trt)
    library = ("library", str((artifact.path / "plugin/libdtool_attention.so").resolve()))
    assert trt.calls.count(library) == 1
    assert trt.calls[0] == library
    assert trt.calls.count(("deserialize",)) == 4


def test_plugin_library_that_does_not_load_is_named(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e", plugin_libraries=["plugin/libdtool_attention.so"])
    with pytest.raises(DtoolError, match=r"plugin/libdtool_attention\.so cannot be loaded"):
        make_runner(artifact, StubTensorRT(refused=("libdtool_attention.so",)))


def test_missing_package_names_its_extra(engine, monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    monkeypatch.setattr(tensorrt_host, "gpu_present", lambda: True)
    with pytest.raises(DtoolError, match=r'pip install "dtool\[trt\]"'):
        TensorRTRunner(engine)


def test_machine_without_gpu_is_told_what_the_engine_is_for(engine, monkeypatch):
    monkeypatch.setattr(tensorrt_host, "gpu_present", lambda: False)
    for trt in (None, StubTensorRT()):
        if trt is None:
            monkeypatch.setattr(importlib, "import_module", lambda _: builtins.__import__("no_such_module"))
        with pytest.raises(DtoolError, match="no GPU") as caught:
            TensorRTRunner(engine, trt=trt)
        assert "engines for sm89" in str(caught.value)
        assert "dtool inspect" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_open_runner_refuses_engines_where_there_is_no_gpu(engine):
    with pytest.raises(DtoolError, match="was compiled by tensorrt"):
        open_runner(engine.path)


# the engine against the manifest


def test_plan_that_does_not_load_gives_tensorrts_own_words(engine, tmp_path, exported):
    artifact = make_engine(exported, tmp_path / "e")
    (artifact.path / "decode.engine").write_bytes(b"not a plan")
    with pytest.raises(DtoolError, match="Magic tag does not match") as caught:
        make_runner(artifact)
    assert "decode.engine" in str(caught.value)
    assert "an information" not in str(caught.value)


def test_engine_with_another_capacity_than_its_manifest_is_refused(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e", extra={"capacity": 16})
    with pytest.raises(DtoolError, match=r"past_key_values\.0\.key of prefill"):
        make_runner(artifact)


def test_engine_with_other_inputs_is_refused_by_name(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e")
    shutil.copyfile(artifact.path / "prefill.engine", artifact.path / "decode.engine")
    with pytest.raises(DtoolError, match=r"inputs and outputs of decode[\s\S]*new_lengths"):
        make_runner(artifact)


def test_part_of_the_weights_stays_on_the_host_when_the_manifest_says_so(exported, tmp_path, onnx):
    artifact = make_engine(exported, tmp_path / "e", extra={"streamable": 1000}, weight_streaming_budget_bytes=400)
    device = StubDevice()
    runner = make_runner(artifact, device=device)
    assert [stub.budget for stub in runner.trt.engines] == [400, 400]
    assert_same(walk(runner)[0], walk(onnx)[0])
    assert device.captures == 0


def test_streaming_budget_above_the_weights_changes_nothing(exported, tmp_path):
    artifact = make_engine(exported, tmp_path / "e", extra={"streamable": 1000}, weight_streaming_budget_bytes=4000)
    device = StubDevice()
    walk(make_runner(artifact, device=device))
    assert device.captures == 1
