import functools
import json

import pytest
from bench_runner_stubs import FakeClock, StubRunner, make_artifact, tiny_config

from toolchain.bench import stage
from toolchain.bench.latency import compare_runners
from toolchain.bench.memory import PeakMemory
from toolchain.errors import DtoolError
from toolchain.recipe import Recipe
from toolchain.report import render_html, render_text


def make_recipe(**bench):
    return Recipe(schema_version=1, about="test", bench={"prompt_lens": (9, 4), "new_tokens": 4, "repeats": 2} | bench)


@pytest.fixture
def bench_stubs(tmp_path, monkeypatch):
    """A bench of stubs: seconds of one step of the engine and of eager -> report and printed lines."""

    def run(engine_s=0.010, eager_s=0.020, load=0.0, **bench):
        clock = FakeClock()
        config = tiny_config()
        path = make_artifact(tmp_path / "candidate", config).path
        engine = StubRunner(clock, lambda *_: engine_s, name="onnxruntime")
        eager = StubRunner(clock, lambda *_: eager_s, name="eager")
        monkeypatch.setattr(stage, "open_runner", lambda *_, **__: engine)
        monkeypatch.setattr(stage, "eager_runner", lambda *_: eager)
        monkeypatch.setattr(stage, "measure_bandwidth", lambda *_: 0.001)
        monkeypatch.setattr(stage.os, "getloadavg", lambda: (load, 0, 0))
        small, large = (PeakMemory(peak_bytes=n, anonymous_bytes=n // 10) for n in (100, 200))
        monkeypatch.setattr(stage, "measure_peak", lambda *_, eager, **__: large if eager else small)
        timed = functools.partial(compare_runners, clock=clock, pause=clock.pause)
        monkeypatch.setattr(stage, "compare_runners", timed)
        lines = []
        return stage.bench_artifact(path, make_recipe(**bench), model=tmp_path, report=lines.append), lines

    return run


def test_the_document_has_the_promised_keys_with_the_longest_prompt_at_the_top(bench_stubs):
    document = bench_stubs()[0].document()
    json.dumps(document)
    for side in ("engine", "eager"):
        promised = {"ttft_ms", "tpot_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_memory_bytes"}
        assert promised <= set(document[side])
        assert {"p50", "p90", "p99", "min", "samples"} == set(document[side]["tpot_ms"])
        assert [c["prompt_tokens"] for c in document[side]["cases"]] == [9, 4]
        assert document[side]["first_call"]["prefill_ms"] > 0
        assert document[side]["load_ms"] >= 0
    assert document["engine"]["ttft_ms"]["p50"] == pytest.approx(10)
    assert document["engine"]["prefill_tokens_per_s"] == pytest.approx(900)
    assert document["engine"]["peak_memory_bytes"] == 100
    assert document["eager"]["peak_memory_bytes"] == 200
    assert document["speedup"] == pytest.approx({"decode": 2, "prefill": 2, "decode_best": 2, "prefill_best": 2})
    assert document["environment"]["memory_bandwidth_gb_s"] == 0.001
    step = document["engine"]["step_bytes"]
    useful = step["weight_bytes"] + step["row_bytes"] + step["kv_bytes_per_token"] * (9 + 2.5)
    assert document["environment"]["mbu"] == pytest.approx(useful / 0.010 / 1e6)
    assert {"tpot_ms", "mbu", "decode_tokens_per_s"} <= set(document["formulas"])


def test_an_engine_that_is_not_faster_is_said(bench_stubs):
    report, lines = bench_stubs(engine_s=0.030)
    assert [n for n in report.notes if "not faster than eager: decode at prompt 9" in n]
    assert [line for line in lines if "33.3 against 50.0 tok/s (0.67 x)" in line]
    assert "not faster" in render_text(report.page(), width=200)


def test_a_faster_engine_on_a_quiet_machine_needs_no_note(bench_stubs):
    assert bench_stubs()[0].notes == ()


def test_no_warm_up_and_a_busy_machine_are_said(bench_stubs):
    notes = bench_stubs(warmup=0, load=1.5)[0].notes
    assert [n for n in notes if "no warm-up" in n]
    assert [n for n in notes if "load average 1.50" in n]


def test_the_page_renders_both_ways(bench_stubs):
    page = bench_stubs()[0].page()
    text = render_text(page)
    assert "decode 2.00 x" in text
    assert "Time to the first token" in text
    assert "<svg" in render_html(page)


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(DtoolError, match="needs the checkpoint"):
        stage.bench_artifact(tmp_path, make_recipe(), model=None)


@pytest.mark.parametrize(
    ("bench", "said"),
    [
        ({"batch": 5}, "bench.batch is 5\n  expected: at most 4"),
        ({"batch": 1}, "bench.batch is 1\n  expected: at least 2"),
        ({"batch": 2, "prompt_lens": (9, 3)}, "shortest of bench.prompt_lens is 3\n  expected: at least 4"),
        ({"batch": 2, "prompt_lens": (17,)}, "longest of bench.prompt_lens is 17\n  expected: at most 16"),
        ({"batch": 2, "prompt_lens": (9,), "new_tokens": 30}, "bench.new_tokens is 39\n  expected: at most 32"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_before_anything_is_loaded(bench, said, tmp_path, monkeypatch):
    for name in ("open_runner", "eager_runner", "measure_bandwidth"):
        monkeypatch.setattr(stage, name, None)
    path = make_artifact(tmp_path / "candidate", tiny_config()).path
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["target"] = {"backend": "tensorrt", "max_batch": 4, "max_prompt": 16, "kv_capacity": 32}
    manifest["recipe"] = {"engine": {"batch": {"min": 2}, "prompt_len": {"min": 4}}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DtoolError) as error:
        stage.bench_artifact(path, make_recipe(**bench), model=tmp_path)
    assert said in str(error.value)
