import numpy as np
import pytest
from bench_runner_stubs import CopyingRunner, FakeClock, QueueingRunner, StubRunner

from toolchain.bench.latency import SETTLE_S, compare_runners
from toolchain.errors import DtoolError
from toolchain.recipe_sections import Bench
from toolchain.runners.runner import Limits


def measure(runner, clock, **settings):
    bench = Bench(**{"prompt_lens": (32,), "new_tokens": 4, "repeats": 5, "warmup": 1} | settings)
    first, cases = compare_runners({"engine": runner}, bench, clock=clock, pause=clock.pause)["engine"]
    return first, cases


def test_the_first_call_is_in_its_own_field_and_in_no_other_number():
    clock = FakeClock()
    runner = StubRunner(clock, lambda _, call: 0.5 if call == 0 else 0.005)
    first, (case,) = measure(runner, clock)
    assert first.prefill_ms == pytest.approx(500)
    assert first.decode_ms == pytest.approx(5)
    for spread, samples in ((case.ttft_ms, 5), (case.tpot_ms, 20)):
        assert [spread.p50, spread.p90, spread.p99, spread.min] == pytest.approx([5] * 4)
        assert spread.samples == samples


def test_the_first_call_is_left_out_even_without_warm_up():
    clock = FakeClock()
    runner = StubRunner(clock, lambda _, call: 0.5 if call == 0 else 0.005)
    _, (case,) = measure(runner, clock, warmup=0, repeats=1)
    assert case.ttft_ms.p99 == pytest.approx(5)


def test_warm_up_rounds_are_run_and_not_counted():
    clock = FakeClock()
    first_call, warm_up, kept = 2, 3 * 5, 2 * 5
    runner = StubRunner(clock, lambda _, call: 0.1 if call < first_call + warm_up else 0.005)
    _, (case,) = measure(runner, clock, warmup=3, repeats=2)
    assert runner.calls == first_call + warm_up + kept
    assert case.ttft_ms.samples == 2
    assert case.tpot_ms.p99 == pytest.approx(5)


def test_queued_work_is_waited_for_once_in_each_timed_region():
    clock = FakeClock()
    runner = QueueingRunner(clock, lambda *_: 0.010)
    first, (case,) = measure(runner, clock)
    assert min(first.prefill_ms, case.ttft_ms.min, case.tpot_ms.min) >= 9.999999
    assert case.tpot_ms.p99 == pytest.approx(10)
    assert runner.waits == runner.calls


def test_rates_follow_their_formulas():
    clock = FakeClock()
    runner = StubRunner(clock, lambda phase, _: 0.2 if phase == "prefill" else 0.02)
    _, (case,) = measure(runner, clock, prompt_lens=(500,), new_tokens=100)
    assert case.ttft_ms.p50 == pytest.approx(200)
    assert case.tpot_mean_ms == pytest.approx(20)
    assert case.decode_tokens_per_s == pytest.approx(50)
    assert case.prefill_tokens_per_s == pytest.approx(2500)
    assert case.end_to_end_tokens_per_s == pytest.approx(45.9, abs=0.01)


def test_a_batch_multiplies_tokens_not_times():
    clock = FakeClock()
    runner = StubRunner(clock, lambda phase, _: 0.2 if phase == "prefill" else 0.02)
    _, (case,) = measure(runner, clock, prompt_lens=(500,), new_tokens=100, batch=4)
    assert case.tpot_ms.p50 == pytest.approx(20)
    assert case.decode_tokens_per_s == pytest.approx(200)
    assert case.prefill_tokens_per_s == pytest.approx(10000)


def test_percentiles_show_a_slow_tail():
    clock = FakeClock()
    runner = StubRunner(clock, lambda phase, call: 0.1 if phase == "decode" and call % 50 == 7 else 0.005)
    _, (case,) = measure(runner, clock, new_tokens=100, repeats=2)
    assert case.tpot_ms.p50 == pytest.approx(5)
    assert case.tpot_ms.p90 == pytest.approx(5)
    assert case.tpot_ms.p99 == pytest.approx(100)
    assert case.tpot_mean_ms == pytest.approx(np.mean([5] * 98 + [100] * 2))


def test_both_sides_take_turns_over_the_same_prompts():
    clock = FakeClock()
    log = []
    runners = {n: StubRunner(clock, lambda *_: 0.001, name=n, log=log) for n in ("engine", "eager")}
    bench = Bench(prompt_lens=(7, 9), new_tokens=2, repeats=3, warmup=0)
    compare_runners(runners, bench, clock=clock, pause=clock.pause)
    prefills = [(name, tokens) for name, phase, tokens in log[4:] if phase == "prefill"]
    assert prefills == [("engine", 7), ("eager", 7)] * 3 + [("engine", 9), ("eager", 9)] * 3
    assert clock.pauses == [SETTLE_S] * 12


def test_copied_cache_bytes_are_given_per_step_or_as_unknown():
    clock = FakeClock()
    for per_step in (0, 4096):
        _, (case,) = measure(CopyingRunner(clock, lambda *_: 0.001, per_step=per_step), clock)
        assert case.cache_copy_bytes_per_step == per_step
    _, (case,) = measure(StubRunner(clock, lambda *_: 0.001), clock)
    assert case.cache_copy_bytes_per_step is None


@pytest.mark.parametrize(("slots", "capacity"), [(None, 64), (40, 40)])
def test_the_cache_is_rounded_up_as_far_as_the_engine_allows(slots, capacity):
    clock = FakeClock()
    runner = StubRunner(clock, lambda *_: 0.001, limits=Limits(capacity=slots))
    _, (case,) = measure(runner, clock)
    assert case.capacity == capacity


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(max_batch=1), "bench.batch is 2"),
        (Limits(max_prompt=31), "bench.prompt_lens is 32"),
        (Limits(capacity=35), "bench.new_tokens is 36"),
    ],
)
def test_a_bench_outside_the_engines_range_is_refused_before_any_work(limits, said):
    clock = FakeClock()
    runner = StubRunner(clock, lambda *_: 0.001, limits=limits)
    with pytest.raises(DtoolError, match=said):
        measure(runner, clock, batch=2)
    assert runner.calls == 0


@pytest.mark.parametrize("lengths", [(), (0,)])
def test_prompt_lengths_must_be_there(lengths):
    clock = FakeClock()
    with pytest.raises(DtoolError, match="prompt_lens"):
        measure(StubRunner(clock, lambda *_: 0.001), clock, prompt_lens=lengths)


def test_the_speed_of_a_broken_model_is_not_reported():
    clock = FakeClock()
    with pytest.raises(DtoolError, match="not finite"):
        measure(StubRunner(clock, lambda *_: 0.001, bad_logits=True), clock)
