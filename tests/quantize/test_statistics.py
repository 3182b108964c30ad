"""What calibration saw is kept by content: another recipe takes it from there and gives the bytes it gives alone."""

from pathlib import Path

import pytest
import torch

from tests.conftest import make_recipe, random_ids
from tests.quantize.test_progress import Killed, digests, loaded_layers
from toolchain.artifact import MANIFEST
from toolchain.errors import DtoolError
from toolchain.quantize import stage as stage_module
from toolchain.quantize import statistics as statistics_module
from toolchain.quantize import walk as walk_module
from toolchain.quantize.stage import quantize_artifact

GPTQ = {"weights": {"format": "int8", "algorithm": "gptq", "clip": "search"}}
CACHE = {"kv_cache": {"format": "int8"}}
STATIC = {"activations": {"format": "int8", "granularity": "tensor", "excess_channels": 2, "skip": []}}
ROTATED = {"rotation": {"stream": True, "values": True, "feed_forward": True}}
SMOOTHED = {"smoothing": {"algorithm": "smoothquant"}}
ALL = GPTQ | CACHE | STATIC | {"weights": GPTQ["weights"] | {"skip": []}}

pytestmark = pytest.mark.usefixtures("random_calibration")


@pytest.fixture
def statistics(tmp_path):
    return tmp_path / "statistics"


@pytest.fixture
def quantized(exported, tmp_path):
    """Quantize into a new folder each time; the artifact, and the lines of its report."""
    made = []

    def make(statistics=None, **sections):
        made.append(tmp_path / f"q{len(made)}")
        lines = []
        quantize_artifact(exported, make_recipe(**sections), made[-1], statistics=statistics, report=lines.append)
        return made[-1], lines

    return make


def run_texts(monkeypatch):
    """How many texts each run of a layer had, by call."""
    ran, run = [], walk_module.run_layer

    def counted(block, rope, x_BTE):
        ran.append(len(x_BTE))
        return run(block, rope, x_BTE)

    monkeypatch.setattr(walk_module, "run_layer", counted)
    return ran


def parts(statistics):
    return sorted(statistics.rglob("*.safetensors"))


@pytest.mark.parametrize("changes", [{}, ROTATED, SMOOTHED, ROTATED | SMOOTHED], ids=["plain", "rot", "smooth", "both"])
def test_the_bytes_are_those_of_a_run_without(changes, quantized, statistics, monkeypatch):
    alone, _ = quantized(**ALL, **changes)
    first, _ = quantized(statistics, **ALL, **changes)
    ran = run_texts(monkeypatch)
    second, lines = quantized(statistics, **ALL, **changes)
    assert digests(alone) == digests(first) == digests(second)
    assert (alone / MANIFEST).read_bytes() == (second / MANIFEST).read_bytes()
    assert ran == ([1] * 4 if changes else [])  # the one text of the check, in a layer as it came and as it is
    assert not any("warning" in line for line in lines)
    assert [path.name for path in parts(statistics)][-1] == "survey.safetensors"


@pytest.mark.parametrize(
    "other",
    [
        GPTQ | CACHE | SMOOTHED,
        {"weights": {"format": "int4", "group_size": 32, "algorithm": "gptq"}, "kv_cache": {"format": "fp8_e4m3"}},
        {"weights": {"format": "int8"}} | CACHE,
        {"weights": {"format": "fp8_e4m3"}, "activations": {"format": "fp8_e4m3", "granularity": "tensor"}},
    ],
    ids=["smoothed", "int4", "cache_alone", "fp8_static"],
)
def test_another_recipe_takes_what_one_left_and_gives_its_own_bytes(other, quantized, statistics, monkeypatch):
    quantized(statistics, **GPTQ, **CACHE)
    alone, _ = quantized(**other)
    ran = run_texts(monkeypatch)
    taken, _ = quantized(statistics, **other)
    assert digests(alone) == digests(taken)
    assert set(ran) <= {1}


def test_what_is_lacking_is_seen_again_and_kept_beside_the_rest(quantized, statistics, monkeypatch):
    for sections in (GPTQ, {"weights": {"format": "int8"}} | CACHE):
        with monkeypatch.context() as patch:
            ran = run_texts(patch)
            quantized(statistics, **sections)
        assert ran == [2, 2] * 2  # two batches, two layers
    alone, _ = quantized(**GPTQ, **CACHE)
    ran = run_texts(monkeypatch)
    both, _ = quantized(statistics, **GPTQ, **CACHE)
    assert ran == []
    assert digests(alone) == digests(both)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (stage_module, "_calibration_blocks", lambda *_: random_ids(12, 4, 48)),
        (stage_module, "_calibration_blocks", lambda *_: random_ids(11, 5, 48)),
        (statistics_module, "versions", lambda _: {"torch": "another"}),
    ],
    ids=["text", "samples", "version"],
)
def test_another_text_or_version_has_another_key(module, name, value, quantized, statistics, monkeypatch):
    quantized(statistics, **GPTQ)
    monkeypatch.setattr(module, name, value)
    quantized(statistics, **GPTQ)
    assert len(list(statistics.iterdir())) == 2


@pytest.mark.parametrize("sections", [ROTATED, {"calibration": {"batch": 3}}, STATIC], ids=["bases", "batch", "excess"])
def test_what_shapes_the_inputs_has_another_key(sections, quantized, statistics):
    quantized(statistics, **GPTQ)
    quantized(statistics, **GPTQ | sections)
    assert len(list(statistics.iterdir())) == 2


def tear(path):
    path.write_bytes(path.read_bytes()[:-8])


def alter(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("harm", [tear, alter, lambda path: path.with_suffix(".sha256").unlink(), lambda p: p.unlink()])
@pytest.mark.parametrize("part", ["layer-1", "head", "survey"])
def test_a_damaged_part_is_told_and_made_again(harm, part, quantized, statistics, monkeypatch):
    alone, _ = quantized(statistics, **ALL, **ROTATED)
    kept = {path.name: path.read_bytes() for path in parts(statistics)}
    harm(next(path for path in parts(statistics) if path.stem == part))
    with monkeypatch.context() as patch:
        ran = run_texts(patch)
        again, lines = quantized(statistics, **ALL, **ROTATED)
    assert digests(alone) == digests(again)
    assert [line for line in lines if "damaged" in line and part in line]
    assert {path.name: path.read_bytes() for path in parts(statistics)} == kept
    assert sum(n == 2 for n in ran) == {"layer-1": 4, "head": 4, "survey": 0}[part]  # a layer's way to it, no more


def test_a_part_in_the_place_of_another_is_told_and_made_again(quantized, statistics):
    alone, _ = quantized(**GPTQ)
    quantized(statistics, **GPTQ)
    (first,) = statistics.glob("*/layer-0.safetensors")
    for end in (".safetensors", ".sha256"):
        first.with_name(f"layer-1{end}").write_bytes(first.with_suffix(end).read_bytes())
    taken, lines = quantized(statistics, **GPTQ)
    assert digests(alone) == digests(taken)
    assert any("damaged" in line for line in lines)


def test_a_killed_run_with_statistics_goes_on_where_it_was(exported, quantized, statistics, tmp_path, monkeypatch):
    alone, _ = quantized(**ALL)
    quantized(statistics, **ALL)
    for part in parts(statistics):
        if part.stem in ("layer-1", "head"):
            part.unlink()
            part.with_suffix(".sha256").unlink()
    with monkeypatch.context() as patch:
        loaded_layers(patch, kill_at=1)
        with pytest.raises(Killed):
            quantize_artifact(
                exported, make_recipe(**ALL), tmp_path / "out", statistics=statistics, report=lambda _: None
            )
    lines = []
    quantize_artifact(exported, make_recipe(**ALL), tmp_path / "out", statistics=statistics, report=lines.append)
    assert any("going on at layer 2" in line for line in lines)
    assert digests(tmp_path / "out") == digests(alone)


def test_the_quantized_models_own_inputs_are_not_shared_and_it_is_told(quantized, statistics):
    _, lines = quantized(statistics, **GPTQ, calibration={"inputs": "quantized"})
    assert [line for line in lines if line.startswith("note: statistics are neither taken nor kept: calibration")]
    _, lines = quantized(statistics, weights={"format": "int8"})
    assert [line for line in lines if line.endswith("the recipe measures nothing")]
    assert not statistics.exists()


def test_a_place_that_cannot_hold_them_is_refused_before_any_work(exported, quantized, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_module, "plan_job", None)
    (tmp_path / "file").write_text("")
    for place, found in ((tmp_path / "file", "a file"), (exported, "the artifact"), (exported / "s", "the artifact")):
        with pytest.raises(DtoolError, match=found):
            quantized(place, **GPTQ)
    for place in (tmp_path / "q", tmp_path / "q" / "s"):
        with pytest.raises(DtoolError, match="no statistics can be kept"):
            quantize_artifact(exported, make_recipe(**GPTQ), tmp_path / "q", statistics=place, report=lambda _: None)


def test_a_place_that_cannot_be_written_is_refused_before_any_work(exported, quantized, tmp_path, monkeypatch):
    """A file on the way, and a folder that takes no files even from root."""
    monkeypatch.setattr(stage_module, "plan_job", None)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "s", Path("/proc/self"), Path("/proc/self/s")):
        with pytest.raises(DtoolError, match=f"no statistics can be kept in {place}\n") as failure:
            quantized(place, **GPTQ)
        assert failure.value.found
        assert failure.value.fix
    with pytest.raises(TypeError):  # the next step
        quantized(tmp_path / "new" / "s", **GPTQ)
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up_on_the_way_is_told_of_the_statistics(quantized, statistics, monkeypatch):
    def full(path, *_):
        path.parent.rename(path.parent.with_suffix(".gone"))  # so that nothing can be removed either
        path.parent.write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statistics_module, "write_stream", full)
    with pytest.raises(DtoolError, match=f"statistics cannot be kept in {statistics}") as failure:
        quantized(statistics, **GPTQ)
    assert failure.value.found == "No space left on device"


def test_records_of_the_cache_may_be_anything_of_tensors_and_counts(tmp_path):
    """A dataclass with parts that are None where they were not asked for."""
    from toolchain.quantize.seen import nothing_seen
    from toolchain.quantize.statistics import Statistics

    kept = Statistics(tmp_path, "key", print)
    plain, whole = nothing_seen(3, center=True), nothing_seen(3, center=True, hessian=True)
    for seen in (plain, whole):
        seen.add(torch.ones(1, 5, 3))
    kept.keep("layer-0", {"cache/k": plain})
    found = kept.recall("layer-0", {"cache/k": nothing_seen(3, center=True)})
    assert found["cache/k"].tokens == 5
    assert torch.equal(found["cache/k"].center, torch.ones(3))
    assert kept.recall("layer-0", {"cache/k": nothing_seen(3, hessian=True)}) is None
    kept.keep("layer-0", {"cache/k": whole, "cache/v": torch.ones(2)})
    kept.keep("layer-0", {"sample": torch.zeros(1)})
    found = kept.recall("layer-0", {"cache/k": nothing_seen(3, hessian=True), "sample": torch.empty(0)})
    assert torch.equal(found["cache/k"].hessian, torch.full((3, 3), 5.0))
