"""Rows of a proof that an engine cannot take are refused before anything is loaded."""

import json

import numpy as np
import pytest
from tiny_parity import make_recipe

from tests.runners.tensorrt_engines import make_engine, make_runner
from toolchain.artifact import open_artifact
from toolchain.errors import DtoolError
from toolchain.parity import stage
from toolchain.parity.compare import plan_batches, run_phases
from toolchain.parity.rows import Sizes, fit_rows
from toolchain.recipe_sections import Parity
from toolchain.runners.runner import KVState, Limits, artifact_limits, recipe_limits


def fit(limits, context_len=2048, **sizes):
    return fit_rows("E", Parity(**sizes), limits, context_len)


def refusal(limits, context_len=2048, **sizes):
    with pytest.raises(DtoolError) as error:
        fit(limits, context_len, **sizes)
    assert error.value.expected
    assert error.value.found
    assert error.value.fix
    return str(error.value)


def test_rows_are_those_of_the_recipe_where_they_fit():
    assert fit(Limits()) == Sizes(256, 3, ())
    assert fit(Limits(8, 256, 256, 1, 224)) == Sizes(256, 3, ())


def test_rows_are_cut_to_prompts_cache_and_positions_and_it_is_told():
    for limits, context_len in ((Limits(8, 100, 2048), 2048), (Limits(8, 2048, 100), 2048), (Limits(), 100)):
        found = fit(limits, context_len)
        assert found.seq_len == 100
        assert found.notes[0].startswith("rows are 100 tokens, not 256")
    cut = fit(Limits(2, 256, 256))
    assert cut.batch == 2
    assert cut.notes == ("rows at once are 2, not 3: the candidate takes no more",)


def test_steps_that_the_shortest_row_has_no_room_for_are_told():
    (note,) = fit(Limits(), seq_len=30, decode_steps=12).notes
    assert note == "decode steps are 9, not 12: the shortest row has 10 tokens"


@pytest.mark.parametrize(
    ("limits", "context_len", "sizes", "said"),
    [
        (Limits(8, 8, 8), 2048, {}, "at least 16 slots"),
        (Limits(), 12, {}, "context_len 12"),
        (Limits(8, 3, 64), 2048, {}, "at least 4 tokens"),
        (Limits(8, 256, 256, 1, 225), 2048, {}, "224: rows of 256, of which 32 are decoded"),
        (Limits(8, 64, 64, 1, 40), 2048, {"batch": 1}, "32: rows of 64, of which 32 are decoded"),
        (Limits(8, 64, 64, 2), 2048, {"blocks": 4}, "1 in the smallest: parity.blocks 4, parity.batch 3"),
        (Limits(8, 64, 64, 4), 2048, {"blocks": 6}, "--set parity.batch=4 --set parity.blocks=8"),
    ],
    ids=["cache", "positions", "prompts", "decoded", "one row", "remainder", "batch"],
)
def test_what_cannot_be_proved_is_refused(limits, context_len, sizes, said):
    assert said in refusal(limits, context_len, **sizes)


class Watched:
    """Notes the shapes of what it is asked for; its logits are zeros."""

    def __init__(self):
        self.prompts, self.batches = [], set()

    def new_state(self, batch, capacity):
        self.batches.add(batch)
        return KVState(capacity, np.zeros(batch, np.int64), None)

    def step(self, state, ids, new_lengths, phase):
        if phase == "prefill":
            self.prompts.append(ids.shape[1])
        state.lengths = state.lengths + new_lengths
        return np.zeros((len(ids), ids.shape[1] if phase == "evaluation" else 1, 3), np.float32)


@pytest.mark.parametrize("sizes", [{}, {"batch": 1}, {"blocks": 7, "decode_steps": 90}, {"batch": 2, "seq_len": 20}])
def test_the_smallest_sizes_that_pass_are_those_the_phases_ask_for(sizes):
    parity, runner = Parity(**sizes), Watched()
    blocks = np.zeros((parity.blocks, parity.seq_len), np.int64)
    for batch in plan_batches(blocks, fit(Limits(), **sizes).batch):
        list(run_phases(runner, batch, parity.decode_steps))
    assert fit(Limits(min_batch=min(runner.batches), min_prompt=min(runner.prompts)), **sizes)
    refusal(Limits(min_batch=min(runner.batches) + 1), **sizes)
    refusal(Limits(min_prompt=min(runner.prompts) + 1), **sizes)


def ranges(path, **recipe):
    """Write into an engine's manifest what its recipe asked for."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["recipe"] = {"engine": {name: {"min": least} for name, least in recipe.items()}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_the_ranges_are_those_of_manifest_and_recipe(exported, tmp_path):
    engine = open_artifact(ranges(make_engine(exported, tmp_path / "e").path, batch=2, prompt_len=8))
    assert artifact_limits(engine) == Limits(4, 16, 32, 2, 8)
    assert artifact_limits(open_artifact(exported)) == Limits()
    sizes = {"batch": {"min": 2, "opt": 2, "max": 4}, "prompt_len": {"min": 8, "opt": 8, "max": 16}, "kv_capacity": 32}
    compiled = {"backend": "tensorrt-rtx", "targets": ["sm89"]}
    assert recipe_limits(make_recipe(engine=sizes | compiled).engine) == Limits(4, 16, 32, 2, 8)
    assert recipe_limits(make_recipe(engine=sizes).engine) == Limits(4, 16, 32)


def test_an_engine_with_smallest_sizes_is_proved_within_them(exported, text_file, tmp_path, monkeypatch):
    """The cache contract too: its prompts of five tokens are too short for this engine."""
    engine = make_engine(exported, tmp_path / "engine", batch=(2, 4), tokens=(8, 16))
    ranges(engine.path, batch=2, prompt_len=8)
    monkeypatch.setattr(stage, "open_runner", lambda path, **_: make_runner(open_artifact(path)))
    parity = {"data": str(text_file), "seq_len": 12, "decode_steps": 4, "blocks": 3, "fake_quant": {"kl_mean": 1e-6}}
    options = {"model": None, "source": exported, "report": lambda _: None}
    report = stage.run_parity(engine.path, make_recipe(parity=parity), **options)
    assert report.verdict == "passed", report.failure_text()
    assert any(row.metric == "overflow_refused" for row in report.rows)


@pytest.fixture
def unloaded(monkeypatch):
    """Whatever loads a model fails."""
    for name in ("open_runner", "eager_runner", "fake_quant_runner"):
        monkeypatch.setattr(stage, name, None)


@pytest.mark.usefixtures("unloaded")
def test_nothing_is_loaded_where_the_text_is_too_short(exported, text_file):
    with pytest.raises(DtoolError, match="the text is too short"):
        stage.run_parity(exported, make_recipe(parity={"data": str(text_file), "blocks": 300}), model=None)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("parity", "said"),
    [
        ({"blocks": 4}, "takes larger batches than the proof has"),
        ({"blocks": 3, "batch": 3, "seq_len": 10}, "takes longer prompts than the proof has"),
        ({"blocks": 3, "eager": {"kl_mean": 1.0}}, "no eager reference"),
        ({"blocks": 3, "fake_quant": {"kl_mean": 1.0}}, "no fake_quant reference"),
    ],
)
def test_nothing_is_loaded_for_a_proof_that_cannot_be_made(parity, said, exported, text_file, tmp_path):
    engine = ranges(make_engine(exported, tmp_path / "engine").path, batch=2, prompt_len=8)
    with pytest.raises(DtoolError, match=said):
        stage.run_parity(engine, make_recipe(parity={"data": str(text_file)} | parity), model=None)
