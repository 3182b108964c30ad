import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bench_stage.gpu_stand_ins import Clock, FakeTimer, definition, wrong_value
from toolchain.bench import gpu_built, gpu_check, gpu_numerics, gpu_speed
from toolchain.bench.gpu_check import Check, run_checks
from toolchain.bench.gpu_results import Budget, Result, exit_code, judge, render_table, skipped, write_document
from toolchain.errors import DtoolError
from toolchain.ops.attention import AttentionSpec

ROOT = Path(__file__).parents[2]
NODE = AttentionSpec(4, 2, 32, 32**-0.5, 16, "none", softcap=5.0, window=9, interleaved=True)
TINY = gpu_numerics.Scenario("tiny", NODE, 5, (0, 11), (None, 1, 3))
NORMED = replace(TINY, name="normed", spec=replace(NODE, qk_norm_eps=1e-6))


def child(code, *, timeout=60, **environment):
    command = [sys.executable, "-c", code] if isinstance(code, str) else [sys.executable, *code]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)


# without a GPU


def test_without_a_gpu_there_is_one_line_and_exit_1():
    done = child(["-m", "toolchain.bench.gpu_check", "--seconds", "9"])
    assert done.returncode == 1, done.stderr
    assert done.stdout == gpu_check.NO_GPU + "\n"
    assert done.stderr == ""


BARE = """
import sys
for name in ("click rich pydantic onnx transformers onnxruntime onnxscript onnx_ir jinja2 psutil safetensors gguf "
             "tokenizers tensorrt tensorrt_rtx").split():
    sys.modules[name] = None
from toolchain.bench import gpu_check, gpu_results, gpu_numerics, gpu_speed, gpu_sweep, gpu_built
import toolchain.ops.plugin.entry, toolchain.ops.plugin.build, toolchain.ops.kernels.bindings
assert "triton" not in sys.modules
assert gpu_check.main([]) == 1
import importlib.util, pathlib
if importlib.util.find_spec("triton"):
    import toolchain.ops.kernels.launch, toolchain.ops.kernels.compile
print(gpu_built.missing_for_engine(pathlib.Path("nowhere")))
"""


def test_a_bare_machine_has_all_that_is_imported():
    done = child(BARE)
    assert done.returncode == 0, done.stderr
    assert "pydantic" in done.stdout.splitlines()[-1], "an engine asks for the rest of dtool, and says so"


# numerics


INTERPRETED = """
import json, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, "tests/bench_stage")
from test_gpu_check import NORMED, of_format
from toolchain.bench.gpu_numerics import FORMATS, check_numerics
from toolchain.ops.kernels.launch import attend
for cache in FORMATS:
    result = check_numerics(cache, "float16", "cpu", attend, scenarios=of_format(NORMED))
    print(json.dumps([result.case, result.value, result.verdict, result.reason]))
"""


def of_format(*scenarios):
    return lambda dtype, cache: [replace(s, spec=replace(s.spec, cache_format=cache)) for s in scenarios]


def test_the_kernels_pass_in_the_interpreter():
    pytest.importorskip("triton")
    done = child(INTERPRETED, timeout=120, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 3
    for case, value, verdict, reason in results:
        assert verdict == "pass", (case, reason)
        assert 1e-6 < value < 2e-3, case


def not_a_number(*arguments, **options):
    out = definition(*arguments, **options)
    out[-1, 0, 0] = float("nan")
    return out


def wrong_code(*arguments, **options):
    out = definition(*arguments, **options)
    row, slot = 1, int(arguments[3][1])
    stored = arguments[5].view(torch.int8)[row, 0, slot]
    stored[3] = stored[3] ^ 0x10
    return out


def neighbour_written(*arguments, **options):
    out = definition(*arguments, **options)
    arguments[4].view(torch.int8)[1, 0, -1, 0] ^= 1
    return out


@pytest.mark.parametrize("cache", gpu_numerics.FORMATS)
@pytest.mark.parametrize("dtype", gpu_numerics.DTYPES)
def test_the_definition_passes(cache, dtype):
    result = gpu_numerics.check_numerics(cache, dtype, "cpu", definition, scenarios=of_format(TINY, NORMED))
    assert result.verdict == "pass", result
    assert 0 < result.value < gpu_numerics.ERROR_BAR[dtype]
    assert result.details["tiny"]["stored"] == 2 * 2 * 32 * 2 * (5 + 3)


@pytest.mark.parametrize("fault", [wrong_value, not_a_number, wrong_code, neighbour_written])
def test_a_fault_fails(fault):
    result = gpu_numerics.check_numerics("int8", "float16", "cpu", fault, scenarios=of_format(TINY))
    assert result.verdict == "FAIL"
    if fault is not_a_number:
        assert math.isinf(result.value)
    if fault in (wrong_code, neighbour_written):
        assert "stored values are wrong" in result.reason


def test_the_grid_covers_what_is_promised():
    specs = [s.spec for s in gpu_numerics.SCENARIOS]
    assert {s.num_heads // s.num_kv_heads for s in specs} >= {1, 4, 8}
    assert {s.head_dim for s in specs} == {64, 80, 128, 256}
    assert all(len(set(s.past)) > 1 for s in gpu_numerics.SCENARIOS), "ragged"
    assert {n for s in gpu_numerics.SCENARIOS for n in s.splits} >= {None, 1, 3, 7, 32}
    for test in ("window", "softcap", "qk_norm_eps", "interleaved"):
        assert any(getattr(s, test) for s in specs), test
    assert any(s.rotary_dim < s.head_dim for s in specs)


# the plugin and engines


class FakeLibrary:
    def __init__(self, spec, tiles, attend=definition):
        kernels = [{"name": name, "tile": tile, "num_warps": warps} for name, (tile, warps) in tiles.items()]
        sets = [{"spec": 0, "compute_dtype": "float16", "sm": 90, "kernels": kernels}]
        self._description = {"specs": [vars_of(spec)], "sms": [90], "sets": sets}
        self.attend = attend

    def describe(self):
        return self._description


def vars_of(spec):
    return {name: getattr(spec, name) for name in AttentionSpec.__slots__}


def with_splits(*arguments, splits=None, **options):
    out = definition(*arguments, **options)
    return out + 1e-3 * (splits or 0 if arguments[0].shape[1] == 1 else 0)


@pytest.mark.parametrize("fault", ["", "bits", "tiles"])
def test_the_library_is_compared_with_triton(fault, monkeypatch):
    from toolchain.ops.kernels.bindings import plan

    spec = replace(NODE, cache_format="int8", window=0)
    tiles = {name: (one.tile, one.warps) for name, one in plan(spec, 90, "float16").items()}
    if fault == "tiles":
        tiles["prefill"] = ({"BLOCK_M": 1}, 2)
    attend = wrong_value if fault == "bits" else lambda *a, **o: with_splits(*a, splits=1, **o)
    library = FakeLibrary(spec, tiles, attend)
    monkeypatch.setattr(gpu_built, "launch_latency", lambda *_: Result("plugin launch", ""))
    monkeypatch.setattr(gpu_built, "MOST_SPLITS", 4)
    first, latency = gpu_built.check_plugin(library, "cpu", with_splits, FakeTimer())
    assert latency.check == "plugin launch"
    assert first.verdict == ("FAIL" if fault == "bits" else "pass"), first
    assert first.details["tiles_equal"] == (fault != "tiles")
    if not fault:
        assert (first.details["splits"], first.details["differing_bytes"]) == (1, 0)


def test_an_engine_is_run_and_timed(tiny):
    folder = tiny[0]
    consistency, ttft, tpot = gpu_built.check_engine(folder)
    assert consistency.verdict == "pass"
    assert consistency.value < 1e-4
    assert ttft.unit == tpot.unit == "ms"
    assert tpot.value > 0


def test_an_engine_without_its_backend_is_skipped_by_name(tmp_path, monkeypatch):
    (tmp_path / "manifest.json").write_text(json.dumps({"target": {"backend": "tensorrt"}}))
    monkeypatch.setattr(gpu_built.importlib.util, "find_spec", lambda _: None)
    (result,) = gpu_check._engine(tmp_path)
    assert (result.verdict, result.case) == ("skip", tmp_path.name)
    assert "needs tensorrt" in result.reason


# the run


def test_a_crash_is_a_failure_and_the_rest_goes_on():
    def crash():
        yield judge("second", "before the crash", 1.0, "u", most=2.0)
        raise ValueError("\n  too bad\nmore words")

    checks = [
        Check("first one", lambda: judge("first", "a", 1.0, "u", most=2.0), needs=()),
        Check("second one", crash, needs=()),
        Check("third one", lambda: None, needs=("no_such_module",)),
        Check("fourth one", lambda: Result("fourth", "b", 7.0), needs=()),
    ]
    saved = []
    results = run_checks(checks, Budget(9, Clock()), save=lambda r: saved.append(len(r)))
    assert [r.verdict for r in results] == ["pass", "pass", "FAIL", "skip", "info"]
    assert results[2].reason == "ValueError: too bad"
    assert results[3].reason == "no no_such_module here"
    assert saved == [1, 3, 4, 5]
    assert exit_code(results) == 3


def test_checks_beyond_the_budget_are_skipped_by_name():
    clock = Clock()

    def slow():
        clock.now += 6.0
        return Result("slow", "")

    results = run_checks([Check(f"slow {i}", slow, needs=()) for i in range(4)], Budget(10, clock))
    assert [(r.case, r.verdict) for r in results[2:]] == [("slow 2", "skip"), ("slow 3", "skip")]
    assert results[2].reason == "the 10 s are used up"
    assert exit_code(results) == 0


def test_a_lost_gpu_ends_the_run():
    checks = [Check(f"c {i}", lambda: judge("c", "", math.nan, "", most=1.0), needs=()) for i in range(3)]
    results = run_checks(checks, Budget(10, Clock()), gpu_lost=lambda: "illegal access")
    assert [r.verdict for r in results] == ["FAIL", "skip", "skip"]
    assert "lost since c 0" in results[1].reason


def test_formats_the_gpu_lacks_are_skipped():
    checks = [Check("c fp8", lambda: Result("c", ""), "fp8_e4m3", ())]
    (result,) = run_checks(checks, Budget(10, Clock()), unusable=lambda cache: f"no {cache}")
    assert (result.verdict, result.reason) == ("skip", "no fp8_e4m3")


def test_the_names_of_all_checks_are_distinct(monkeypatch):
    monkeypatch.setattr(gpu_speed, "CudaTimer", FakeTimer)
    names = [check.name for check in gpu_check.all_checks(gpu_check.Run(Budget(1), engines=(Path("e"),)))]
    assert len(set(names)) == len(names) > 25
    assert names[0] == "environment"
    assert names[-1] == "kernel times"


def test_the_whole_run_prints_the_table_last(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checks = [Check("a", lambda: judge("a", "b", 3.0, "u", most=2.0), needs=())]
    monkeypatch.setattr(gpu_check, "all_checks", lambda _: checks)
    monkeypatch.setattr(gpu_check, "_gpu_lost", lambda: "")
    said = []
    assert gpu_check.gpu_check(json_file=tmp_path / "out.json", seconds=5, say=said.append) == 3
    assert said[-1].splitlines()[-1] == "FAILED: 0 pass, 1 FAIL, 0 info, 0 skip"
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["exit_code"] == 3
    assert document["budget_s"] == 5
    assert document["results"][0]["bar"] == "<= 2"
    assert gpu_check.gpu_check(json_file=tmp_path / "no" / "out.json", say=said.append) == 1
    assert "cannot be written" in said[-1]


# table and document


def test_bars():
    assert judge("c", "", 2.0, "", most=2.0).verdict == "pass"
    assert judge("c", "", 2.1, "", most=2.0).verdict == "FAIL"
    assert judge("c", "", 0.8, "", least=0.8).verdict == "pass"
    assert judge("c", "", 0.7, "", least=0.8).verdict == "FAIL"
    assert judge("c", "", math.nan, "", least=0.8).reason == "not a number"
    assert judge("c", "", 0.0, "", most=2.0, failed="codes").verdict == "FAIL"


def test_the_table_is_short_and_ascii_and_keeps_what_failed():
    results = [Result("info", f"case {i}", 1.23456) for i in range(60)]
    results += [judge("bar", "caf\N{LATIN SMALL LETTER E WITH ACUTE}\nx" * 40, 1e-9, "u", most=1.0) for _ in range(9)]
    results += [judge("bar", "broken", math.inf, "u", most=1.0, failed="why " * 90), skipped("s", "for a reason", "it")]
    lines = render_table(results).splitlines()
    assert len(lines) == 40
    assert all(line.isascii() and len(line) <= 220 for line in lines)
    text = "\n".join(lines)
    assert text.count("  pass") == 9
    assert "skip: for a reason" in text
    assert "FAIL: why why" in text
    assert lines[-1] == "FAILED: 9 pass, 1 FAIL, 60 info, 1 skip (34 more in the JSON document)"


def test_passing_results_say_so():
    assert (
        render_table([judge("a", "b", 1.0, "u", most=2.0)]).splitlines()[-1] == "PASSED: 1 pass, 0 FAIL, 0 info, 0 skip"
    )


def test_the_document_is_plain_json(tmp_path):
    path = tmp_path / "x.json"
    details = {"rows": ({"a": math.inf}, Path("p")), 3: None, "t": True}
    write_document(path, [Result("c", "d", math.nan, details=details)], {"gpu": "x"})
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document["schema"] == 1
    assert document["exit_code"] == 0
    assert document["results"][0]["value"] == "nan"
    assert document["results"][0]["details"] == {"rows": [{"a": "inf"}, "p"], "3": None, "t": True}


def test_a_plugin_that_cannot_be_built_is_skipped(monkeypatch):
    def build(*_):
        raise DtoolError("the plugin cannot be built without nvcc", expected="nvcc")

    monkeypatch.setattr(gpu_built, "build_library", build)
    monkeypatch.setattr(gpu_check, "usable_caches", lambda _: ("none",))
    (result,) = gpu_check._plugin(gpu_check.Run(Budget(1)), None)
    assert result.verdict == "skip"
    assert result.reason == "no --plugin-library given; the plugin cannot be built without nvcc"
