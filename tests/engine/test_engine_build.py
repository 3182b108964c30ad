import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from toolchain.artifact import TIMINGS, open_artifact
from toolchain.engine import compiler, stage
from toolchain.engine.report import page
from toolchain.engine.stage import build_engine, engine_key
from toolchain.errors import DtoolError
from toolchain.report import Page


def quiet(_):
    pass


@pytest.fixture(scope="module")
def built(fp16, make_recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("engine") / "engine"
    return build_engine(fp16.path, make_recipe(), out, report=quiet)


@pytest.mark.compiles
def test_both_engines_are_built_for_three_targets_with_fused_attention(built):
    report = built.json("report.json")
    assert report["targets"] == ["sm80", "sm89", "sm120"]
    for phase, kernel in (("prefill", "_gemm_mha_v2_0x"), ("decode", "_gemv_mha_v1_0x")):
        entry = report["engines"][phase]
        assert built.file(f"{phase}.engine").stat().st_size == entry["bytes"] > 100_000
        tactics = [row["tactic"] for row in entry["summary"]["attention"]["kernels"]]
        assert len(tactics) == 2
        assert all(tactic.startswith(kernel) for tactic in tactics)
        products = entry["summary"]["products"]
        assert products["in_graph"] == sum(row["products"] for row in products["precisions"]) == 9
        assert {(row["activations"], row["weights"]) for row in products["precisions"]} == {("Half", "Half")}


@pytest.mark.compiles
def test_the_manifest_says_what_a_runtime_must_know(built, fp16, make_recipe):
    manifest = open_artifact(built.path, ("engine",), check_hashes=True).manifest
    assert manifest.lineage == {"source": fp16.identity}
    assert manifest.key == engine_key(fp16, make_recipe())
    assert manifest.key != engine_key(fp16, make_recipe(kv_capacity=64))
    assert manifest.kv_contract == fp16.manifest.kv_contract | {"capacity": 128, "finite_slots": True}
    assert manifest.details == fp16.manifest.details
    target = manifest.target
    assert (target["kv_capacity"], target["max_batch"], target["max_prompt"]) == (128, 8, 64)
    assert target["compute_capabilities"] == ["8.0", "8.9", "12.0"]
    assert "tensorrt-rtx" in manifest.versions
    assert built.json("decoder.json") == fp16.json("decoder.json")
    assert not list(built.path.glob(".*"))
    timings = json.loads((built.path / TIMINGS).read_text())
    assert timings["decode"]["peak_rss_bytes"] > 10_000_000


@pytest.mark.compiles
def test_the_report_makes_a_page(built):
    shown = page(built.json("report.json"))
    assert isinstance(shown, Page)
    assert ("targets", "sm80, sm89, sm120") in shown.facts
    assert shown.parts[0].rows == (("prefill", 2, 2, "2 x _gemm_mha_v2"), ("decode", 2, 2, "2 x _gemv_mha_v1"))


def test_the_report_of_the_embedded_backend_makes_a_page_too():
    head = {"backend": "onnxruntime", "compiler": "onnxruntime 1.32.0", "targets": []}
    shown = page(head | {"products": {"float": 9}, "layers": 2})
    assert ("targets", "this machine's CPU") in shown.facts
    assert shown.parts[0].rows == (("float", 9),)


@pytest.mark.compiles
def test_a_second_build_gives_the_same_bytes(built, fp16, make_recipe, tmp_path):
    again = build_engine(fp16.path, make_recipe(), tmp_path / "again", report=quiet)
    assert again.json("report.json") == built.json("report.json")
    if fixed_addresses_allowed():  # else a few bytes of a plan follow the order of addresses
        assert again.identity == built.identity


def fixed_addresses_allowed():
    code = "import sys; from toolchain.engine.compile_child import fix_addresses; sys.exit(0 if fix_addresses() else 1)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.compiles
@pytest.mark.parametrize(("activations", "asked"), [("none", "Half"), ("int8", "Int8")])
def test_integer_products_are_compiled_as_asked(fp16, make_recipe, tmp_path, activations, asked):
    from toolchain.quantize.stage import quantize_artifact

    sections = {"weights": {"format": "int8"}, "activations": {"format": activations}}
    recipe = make_recipe(sections=sections, targets=["sm89"])
    quantize_artifact(fp16.path, recipe, tmp_path / "int8", report=quiet)
    engine = build_engine(tmp_path / "int8", recipe, tmp_path / "engine", report=quiet)
    for entry in engine.json("report.json")["engines"].values():
        rows = entry["summary"]["products"]["precisions"]
        assert {(row["activations"], row["weights"]): row["products"] for row in rows} == {
            (asked, "Int8"): 8,
            ("Half", "Half"): 1,  # lm_head
        }


@pytest.mark.compiles
def test_what_the_compiler_rejects_is_told_in_its_words(altered, fp16, make_recipe, tmp_path, monkeypatch):
    def soften(model):
        for node in model.graph.node:
            if node.op_type == "RMSNormalization":
                node.op_type = "Det"
                node.ClearField("attribute")
                del node.input[1:]

    monkeypatch.setattr(stage, "preflight", lambda _, recipe, __: stage_targets(recipe))
    with pytest.raises(DtoolError, match=r"cannot compile prefill[\s\S]*Det"):
        build_engine(altered(fp16, graph=soften).path, make_recipe(), tmp_path / "out", report=quiet)
    assert not list(tmp_path.glob("*out*"))


def stage_targets(recipe):
    from toolchain.engine.targets import targets_named

    return targets_named(recipe.engine.targets, recipe.engine.backend)


STUBS = {
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", "memory"),
    "aborted": (
        "import os, sys; sys.stderr.write(\"terminate called: 'std::bad_alloc'\\n\"); sys.stderr.flush(); os.abort()",
        "SIGABRT",
        "memory",
    ),
    "no plan": (
        "import sys; sys.stderr.write('Error Code 1: no kernel\\nthe builder returned no plan\\n'); sys.exit(3)",
        "cannot compile prefill",
        "no kernel",
    ),
    "null": (
        "import sys; sys.stderr.write('myelin_tensor.h:47: CHECK(p) failed.\\n'); sys.exit(3)",
        "cannot compile prefill",
        "memory",
    ),
    "silent": ("import sys; sys.exit(7)", "exit status 7", "no message"),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", STUBS)
def test_a_child_that_fails_is_told_truly_and_leaves_nothing(fp16, make_recipe, tmp_path, monkeypatch, name):
    code, *texts = STUBS[name]
    monkeypatch.setattr(compiler, "child_command", lambda _: [sys.executable, "-c", code])
    with pytest.raises(DtoolError) as caught:
        build_engine(fp16.path, make_recipe(), tmp_path / "out", report=quiet)
    assert all(text in str(caught.value) for text in texts), caught.value
    assert "unsupported" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.compiles
def test_an_interrupt_ends_the_child_and_leaves_nothing(fp16, make_recipe, tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(compiler, "child_command", lambda _: [sys.executable, "-c", code])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        deadline = time.monotonic() + 30
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(fp16.path, make_recipe(), tmp_path / "out", report=quiet)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIGCONT)
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]
