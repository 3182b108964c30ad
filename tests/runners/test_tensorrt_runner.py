"""The TensorRT runner against ONNX Runtime, over a stub TensorRT that computes the same graphs."""

import numpy as np
import pytest

from tests.conftest import random_ids
from tests.runners.stub_tensorrt import Specialization, Strategy, StubDevice, StubTensorRT
from tests.runners.tensorrt_engines import CAPACITY, RTX, assert_same, lengths, make_engine, make_runner, walk
from toolchain.artifact import open_artifact
from toolchain.bench.latency import compare_runners
from toolchain.errors import DtoolError
from toolchain.parity.kv_contract import check_kv_contract
from toolchain.recipe_sections import Bench
from toolchain.runners.device import DeviceCache, new_zeros
from toolchain.runners.generate import Generation, Sampler
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import eager_runner
from toolchain.runners.runner import Runner


@pytest.fixture(scope="module")
def engine(exported, tmp_path_factory):
    return make_engine(exported, tmp_path_factory.mktemp("engine") / "two")


@pytest.fixture(scope="module")
def shared_engine(exported, tmp_path_factory):
    return make_engine(exported, tmp_path_factory.mktemp("engine") / "one", shared=True)


@pytest.fixture
def onnx(exported):
    return OnnxRunner(open_artifact(exported, check_hashes=False), threads=1)


@pytest.fixture(params=["two plans", "one plan"])
def runner(request, engine, shared_engine):
    return make_runner(engine if request.param == "two plans" else shared_engine)


def test_ragged_chunked_prefill_and_decode_give_the_logits_of_onnx_runtime(runner, onnx):
    ours, our_state = walk(runner)
    theirs, their_state = walk(onnx)
    assert_same(ours, theirs)
    assert np.array_equal(our_state.lengths, their_state.lengths)


def test_two_plans_give_those_logits_bit_for_bit(engine, onnx):
    for ours, theirs in zip(walk(make_runner(engine))[0], walk(onnx)[0], strict=True):
        assert np.array_equal(ours, theirs)


def test_it_is_a_runner_and_names_its_backend(engine, exported, tmp_path):
    runner: Runner = make_runner(engine)
    assert runner.name == "tensorrt"
    rtx = make_engine(exported, tmp_path / "rtx", **RTX)
    assert make_runner(rtx, StubTensorRT("1.7.1.116", rtx=True)).name == "tensorrt-rtx"


def test_evaluation_gives_every_position_and_leaves_the_cache_as_prefill_does(runner, onnx):
    ids, new = random_ids(4, 3, 9), lengths(9, 2, 6)
    states = [r.new_state(3, CAPACITY) for r in (runner, onnx)]
    for chunk in (ids, ids[:, ::-1].copy()):
        ours, theirs = (r.step(s, chunk, new, "evaluation") for r, s in zip((runner, onnx), states, strict=True))
        assert ours.shape == (3, 9, 97)
        valid = np.arange(9) < new[:, None]
        np.testing.assert_allclose(ours[valid], theirs[valid], rtol=1e-4, atol=1e-4)
        assert np.array_equal(states[0].lengths, states[1].lengths)
    token = random_ids(5, 3, 1)
    assert_same(*([r.step(s, token, lengths(1, 1, 1), "decode")] for r, s in zip((runner, onnx), states, strict=True)))


def test_evaluation_of_a_shorter_row_touches_one_slot_behind_its_end(runner):
    state = runner.new_state(2, CAPACITY)
    runner.step(state, random_ids(4, 2, 9), lengths(9, 2), "evaluation")
    written = [cache.numpy().any(axis=(1, 3)) for cache in state.caches]
    assert all(np.array_equal(rows.sum(axis=1), [9, 3]) for rows in written)


def test_evaluation_may_fill_the_cache_to_its_last_slot(runner, onnx):
    ids, new = random_ids(4, 2, 16), lengths(16, 3)
    states = [r.new_state(2, 16) for r in (runner, onnx)]
    ours, theirs = (r.step(s, ids, new, "evaluation") for r, s in zip((runner, onnx), states, strict=True))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-4)


def test_generated_tokens_are_those_of_the_other_backends(runner, onnx, tiny):
    prompt = random_ids(1, 10).tolist()
    texts = [list(Generation(r, prompt, Sampler(), 20, CAPACITY)) for r in (runner, onnx, eager_runner(tiny[0]))]
    assert texts[0] == texts[1] == texts[2]


def test_decode_is_captured_once_and_then_replayed_with_fresh_inputs(engine, onnx):
    device = StubDevice()
    ours, _ = walk(make_runner(engine, device=device), decode_steps=8)
    assert (device.captures, device.replays) == (1, 7)
    assert_same(ours, walk(onnx, decode_steps=8)[0])
    assert not np.array_equal(ours[-1], ours[-2])


def test_another_state_is_captured_anew_and_sees_nothing_of_the_first(engine):
    device = StubDevice()
    runner = make_runner(engine, device=device)
    first, kept = walk(runner, seed=10)  # kept alive, or the next caches might lie at the same addresses
    again, other = walk(runner, seed=20)[0], walk(make_runner(engine), seed=20)[0]
    assert device.captures == 2
    assert kept.lengths.tolist() == [14, 12, 11]
    assert all(np.array_equal(a, b) for a, b in zip(again, other, strict=True))
    assert not np.array_equal(first[-1], again[-1])


def test_state_at_the_addresses_of_an_older_one_is_computed_anew(engine):
    runner = make_runner(engine)
    _, state = walk(runner, seed=10)
    for cache in state.caches:
        cache.update_inplace(np.zeros_like(cache.numpy()))
    state.lengths = np.zeros(3, np.int64)
    token, ones = random_ids(3, 3, 1), lengths(1, 1, 1)
    fresh = make_runner(engine)
    other = fresh.new_state(3, CAPACITY)
    for phase in ("prefill", "decode", "decode", "decode"):
        ours, theirs = runner.step(state, token, ones, phase), fresh.step(other, token, ones, phase)
        assert np.array_equal(ours, theirs)
        token = (token + 1) % 97


def test_states_in_turns_and_of_other_batches_do_not_mix(engine, onnx):
    runner = make_runner(engine)
    found = {}
    for name, backend in (("ours", runner), ("theirs", onnx)):
        states = [backend.new_state(batch, CAPACITY) for batch in (1, 3, 1)]
        logits = []
        for i, state in enumerate(states):
            ids = random_ids(i, state.batch, 4)
            logits.append(backend.step(state, ids, np.full(state.batch, 4), "prefill"))
        for i in range(12):
            state = states[(i // 2) % 3]
            logits.append(backend.step(state, random_ids(50 + i, state.batch, 1), np.ones(state.batch, int), "decode"))
        found[name] = logits
    assert all(np.array_equal(a, b) for a, b in zip(found["ours"], found["theirs"], strict=True))


def test_state_set_back_to_length_zero_is_as_good_as_new(runner):
    state = runner.new_state(1, CAPACITY)
    for i in range(10):
        runner.step(state, random_ids(i, 1, 1), lengths(1), "decode" if i else "prefill")
    state.lengths = np.zeros(1, np.int64)
    fresh = runner.new_state(1, CAPACITY)
    for phase, ids in (("prefill", random_ids(30, 1, 3)), ("decode", random_ids(31, 1, 1))):
        new = lengths(ids.shape[1])
        assert np.array_equal(runner.step(state, ids, new, phase), runner.step(fresh, ids, new, phase))


def test_logits_of_a_step_stay_when_the_next_one_runs(engine):
    seen, _ = walk(make_runner(engine))
    copies = [logits.copy() for logits in walk(make_runner(engine))[0]]
    assert all(np.array_equal(a, b) for a, b in zip(seen, copies, strict=True))


def test_graphs_can_be_turned_off(engine):
    device = StubDevice()
    plain, _ = walk(make_runner(engine, device=device, cuda_graphs=False))
    assert (device.captures, device.replays) == (0, 0)
    assert all(np.array_equal(a, b) for a, b in zip(plain, walk(make_runner(engine))[0], strict=True))


def test_engine_that_cannot_be_captured_runs_without_graphs_and_says_so(engine, exported, tmp_path, onnx):
    device = StubDevice()
    device.refuse_capture = True
    with pytest.warns(RuntimeWarning, match="without CUDA graphs.*not permitted"):
        plain, _ = walk(make_runner(engine, device=device))
    assert_same(plain, walk(onnx)[0])
    trt = StubTensorRT("1.7.1.116", rtx=True)
    trt.capturable = False
    rtx = make_engine(exported, tmp_path / "rtx", **RTX)
    with pytest.warns(RuntimeWarning, match="not capturable"):
        plain, _ = walk(make_runner(rtx, trt))
    assert_same(plain, walk(onnx)[0])


def test_contexts_share_one_activation_buffer_that_is_large_enough(shared_engine, exported, tmp_path):
    runner = make_runner(shared_engine)
    (stub,) = runner.trt.engines
    assert [c.active_optimization_profile for c in stub.contexts] == [0, 1]
    assert {c.memory for c in stub.contexts} == {runner.scratch.data_ptr()}
    assert runner.scratch.numel() == 2048
    rtx = make_runner(make_engine(exported, tmp_path / "rtx", **RTX), StubTensorRT("1.7.1.116", rtx=True))
    prefill, decode = (rtx.phases[name].context for name in ("prefill", "decode"))
    assert prefill.strategy is decode.strategy is Strategy.USER_MANAGED
    assert decode.settings.dynamic_shapes_kernel_specialization_strategy is Specialization.EAGER


def test_the_cache_keeps_its_promises(runner):
    rows = check_kv_contract(runner, tolerance=0.0)
    assert len(rows) == 6
    assert all(row.passed for row in rows), rows


def test_bench_runs_it_unchanged(engine, onnx):
    bench = Bench(prompt_lens=(4, 8), new_tokens=4, warmup=1, repeats=2)
    results = compare_runners({"engine": make_runner(engine), "onnx": onnx}, bench, pause=lambda _: None)
    _, cases = results["engine"]
    assert [c.cache_copy_bytes_per_step for c in cases] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["int8", "int8"]),
        ({"granularity": "token"}, ["int8_token", "int8_token"]),
        ({"granularity": "token", "skip": ["*.0.self_attn"]}, ["float32", "int8_token"]),
    ],
)
def test_int8_caches_give_the_logits_of_onnx_runtime(random_calibration, exported, tmp_path, changes, kinds):
    from tests.conftest import make_recipe
    from toolchain.quantize.stage import quantize_artifact

    recipe = make_recipe(kv_cache={"format": "int8"} | changes)
    quantize_artifact(exported, recipe, tmp_path / "q", report=lambda _: None)
    runner = make_runner(make_engine(tmp_path / "q", tmp_path / "e"))
    assert [cache.name for cache in runner.caches] == kinds
    onnx = OnnxRunner(open_artifact(tmp_path / "q"), threads=1)
    assert all(np.array_equal(a, b) for a, b in zip(walk(runner)[0], walk(onnx)[0], strict=True))
    assert all(row.passed for row in check_kv_contract(runner, tolerance=0.0))


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", np.uint16), ("fp8_e4m3", np.int8), ("float16", np.float16)])
def test_caches_of_formats_numpy_lacks_are_read_and_written_as_bits(dtype, bits):
    cache = DeviceCache(new_zeros((1, 2, 3, 4), dtype, "cpu"), StubDevice())
    values = cache.numpy()
    assert values.dtype == bits
    assert not values.any()
    values[0, 0, 0, 0] = 1
    assert not cache.numpy().any()
    cache.update_inplace(values)
    assert np.array_equal(cache.numpy(), values)


# what is refused before it is computed


def test_full_cache_is_refused_and_keeps_its_slots(runner):
    state = runner.new_state(1, 4)
    runner.step(state, random_ids(0, 1, 4), lengths(4), "prefill")
    before = [cache.numpy() for cache in state.caches]
    with pytest.raises(DtoolError, match="5 > 4"):
        runner.step(state, random_ids(0, 1, 1), lengths(1), "decode")
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, state.caches, strict=True))
    assert state.lengths.tolist() == [4]
    assert state.caches[0].numpy().shape[2] == CAPACITY


def test_prompt_beyond_the_asked_capacity_is_refused_though_the_engine_has_room(runner):
    with pytest.raises(DtoolError, match="9 > 8"):
        runner.step(runner.new_state(1, 8), random_ids(0, 1, 9), lengths(9), "prefill")


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda r: r.new_state(5, 8), r"batch 5 not in \[1, 4\]"),
        (lambda r: r.new_state(1, 33), r"cache capacity 33 not in \[1, 32\]"),
        (lambda r: r.step(r.new_state(1, 32), random_ids(0, 1, 17), lengths(17), "prefill"), r"17 not in \[1, 16\]"),
    ],
)
def test_sizes_beyond_the_manifest_are_refused_with_the_range(engine, ask, text):
    with pytest.raises(DtoolError, match=text):
        ask(make_runner(engine))


def test_sizes_below_the_profile_are_refused_with_the_range(exported, tmp_path):
    runner = make_runner(make_engine(exported, tmp_path / "e", batch=(2, 4), tokens=(4, 16)))
    with pytest.raises(DtoolError, match=r"batch 1 not in \[2, 4\]"):
        runner.new_state(1, 8)
    with pytest.raises(DtoolError, match=r"prompt length 3 not in \[4, 16\]"):
        runner.step(runner.new_state(2, 8), random_ids(0, 2, 3), lengths(3, 3), "prefill")


def test_failed_launch_is_an_error_and_leaves_the_lengths(engine):
    trt = StubTensorRT()
    runner = make_runner(engine, trt)
    state = runner.new_state(1, 8)
    trt.launch = False
    with pytest.raises(DtoolError, match="cannot run prefill"):
        runner.step(state, random_ids(0, 1, 3), lengths(3), "prefill")
    assert state.lengths.tolist() == [0]
    trt.launch = True
    again = runner.step(state, random_ids(0, 1, 3), lengths(3), "prefill")
    fresh = make_runner(engine)
    assert np.array_equal(again, fresh.step(fresh.new_state(1, 8), random_ids(0, 1, 3), lengths(3), "prefill"))
