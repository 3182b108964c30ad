"""Bars and sweeps of the GPU check, with made-up seconds."""

import json
from dataclasses import replace

import pytest

from tests.bench_stage.gpu_stand_ins import Clock, FakeTimer, definition, wrong_value
from toolchain.bench import gpu_numerics, gpu_speed, gpu_sweep
from toolchain.bench.gpu_results import Budget
from toolchain.ops.kernels.tiles import Launch


def test_decode_counts_the_bytes_it_reads():
    shape = gpu_speed.Shape("none", 64, 2, 4, 2, 16)
    decode = gpu_speed.Decode(shape, "cpu", rotate_bytes=3 * shape.cache_bytes)
    assert len(decode.caches) == 3
    assert shape.cache_bytes == sum(x.numel() * x.element_size() for x in decode.caches[0])
    calls = 3 * 11  # whole walks, 32 calls at least
    assert decode.seconds(definition, FakeTimer([calls * 0.5])) == pytest.approx(0.5)


@pytest.mark.parametrize(("bandwidth_share", "verdict"), [(0.81, "pass"), (0.79, "FAIL"), (float("nan"), "FAIL")])
def test_the_bar_of_decode(bandwidth_share, verdict, monkeypatch):
    shape = gpu_speed.Shape("int8", 64, 2, 4, 2, 16)
    monkeypatch.setattr(gpu_speed.Decode.__init__, "__kwdefaults__", {"rotate_bytes": 1})
    calls = 32
    result = gpu_speed.decode_speed(
        shape, "cpu", definition, FakeTimer([calls * 1.0]), shape.cache_bytes / bandwidth_share
    )
    assert result.verdict == verdict
    if verdict == "pass":
        assert result.value == pytest.approx(bandwidth_share)


@pytest.mark.parametrize(("tokens", "ours", "verdict"), [(8, 1.42, "pass"), (8, 1.44, "FAIL"), (9, 5.0, "info")])
def test_the_bar_of_prefill(tokens, ours, verdict, monkeypatch):
    monkeypatch.setattr(gpu_speed, "PREFILL_BAR_TOKENS", 8)
    shape = gpu_speed.Shape("none", tokens, 1, 4, 2, 16)
    result = gpu_speed.prefill_speed(shape, "cpu", definition, FakeTimer([ours, 1.0]))
    assert result.verdict == verdict
    assert result.value == pytest.approx(1 / ours)
    assert result.details["difference"] < 4e-3
    assert result.details["flash"] in {"enable_gqa", "repeated heads"}
    assert shape.flops == 4 * 4 * 16 * tokens * (tokens + 1) / 2


def test_prefill_that_differs_from_flash_fails():
    shape = gpu_speed.Shape("none", 9, 1, 4, 2, 16)
    result = gpu_speed.prefill_speed(shape, "cpu", wrong_value, FakeTimer())
    assert result.verdict == "FAIL"
    assert "differs from flash" in result.reason


def test_copy_bandwidth_counts_both_directions():
    assert gpu_speed.copy_bandwidth("cpu", FakeTimer([0.5]), count=800) == 3200.0


# sweeps


@pytest.fixture
def tuning(monkeypatch):
    compiled = []
    monkeypatch.setattr(gpu_sweep, "compile_ahead", lambda requests, _: compiled.extend(requests))
    monkeypatch.setattr(gpu_speed.Decode.__init__, "__kwdefaults__", {"rotate_bytes": 1})
    clock = Clock()
    made = gpu_sweep.Tuning("cpu", definition, FakeTimer(), Budget(60, clock), 4)
    return made, clock, compiled


def test_a_sweep_of_decode_tells_the_best_and_keeps_all_rows(tuning, monkeypatch):
    made, _, compiled = tuning
    shape = gpu_speed.Shape("none", 64, 1, 4, 2, 16)
    monkeypatch.setattr(gpu_sweep, "SPLITS", (1, 2))
    monkeypatch.setattr(gpu_sweep, "TILE_SPLITS", (2,))
    tiles = [Launch({"BLOCK_G": 16, "BLOCK_N": n}, 4, 2) for n in (32, 64, 128, 256, 512)]
    monkeypatch.setattr(gpu_sweep, "decode_tiles", lambda *_: tiles)

    def attend(*arguments, tiles=None, splits=None, **options):
        if tiles and tiles["decode_split"].tile["BLOCK_N"] == 256:
            raise RuntimeError("out of resource: shared memory\nand more")
        out = definition(*arguments, **options)
        return out + 1 if tiles and tiles["decode_split"].tile["BLOCK_N"] == 64 and splits == 2 else out

    made = replace(made, attend=attend, timer=FakeTimer([3.0, 2.0, 1.5, 1.0]))
    result = gpu_sweep.sweep_decode(shape, made)
    rows = result.details["rows"]
    assert [len(compiled), result.verdict, len(rows)] == [5, "info", 1 + 1 + 5]
    assert "shared memory" in next(row["error"] for row in rows if row["tile"]["BLOCK_N"] == 256)
    assert result.case.startswith("none: N 128 w4 s2 splits 2") or result.case.startswith("none: N 512")
    assert result.value == pytest.approx(3.0)
    assert json.dumps(result.details)


def test_a_sweep_ends_when_time_runs_out(tuning, monkeypatch):
    made, clock, _ = tuning
    shape = gpu_speed.Shape("none", 8, 1, 4, 2, 16)
    tiles = [Launch({"BLOCK_M": 16, "BLOCK_N": n}, 4, 2) for n in range(10)]
    monkeypatch.setattr(gpu_sweep, "prefill_tiles", lambda *_: tiles)
    monkeypatch.setattr(gpu_sweep, "compile_ahead", lambda *_: setattr(clock, "now", clock.now + 30))
    result = gpu_sweep.sweep_prefill(shape, made)
    assert result.reason == "time ran out after 8 of 10 tiles"
    assert result.verdict == "info"


@pytest.mark.parametrize("cache", gpu_numerics.FORMATS)
def test_swept_tiles_fit_a_hopper(cache):
    shape = gpu_speed.Shape(cache, 4096, 1)
    for tiles in (gpu_sweep.decode_tiles(shape, 90), gpu_sweep.prefill_tiles(shape, 90)):
        assert 10 < len(tiles) < 60
        assert len({repr(tile) for tile in tiles}) == len(tiles)
