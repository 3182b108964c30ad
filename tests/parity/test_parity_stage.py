import json
import shutil

import numpy as np
import pytest
from tiny_parity import make_recipe

from tests.conftest import seal
from tests.runners.tensorrt_engines import make_engine, make_runner
from toolchain.artifact import hash_file, open_artifact
from toolchain.errors import DtoolError, GateFailed
from toolchain.parity import stage
from toolchain.parity.compare import MODEL_PHASES
from toolchain.tensor_file import read_header

TIGHT = {"max_abs_logit": 1e-4, "kl_mean": 1e-8, "top1_agreement": 0.8}


def run_parity(*arguments, **options):
    return stage.run_parity(*arguments, threads=1, **options)


def quiet(_: str) -> None:
    pass


def spoil_rows(folder, name, dtype):
    """Swap two rows of a matrix in an artifact's weights file."""
    entry = read_header(folder / "weights.safetensors")[name]
    rows = np.memmap(folder / "weights.safetensors", dtype, "r+", entry.offset, entry.shape)
    rows[[2, 9]] = rows[[9, 2]]
    rows.flush()
    seal(folder)


@pytest.fixture
def recipe(text_file):
    return make_recipe(parity={"data": str(text_file), "eager": TIGHT, "fake_quant": TIGHT})


@pytest.fixture(scope="module")
def passing(exported, checkpoint, text_file):
    recipe = make_recipe(parity={"data": str(text_file), "eager": TIGHT, "fake_quant": TIGHT})
    lines = []
    return run_parity(exported, recipe, model=checkpoint, report=lines.append), lines


def test_a_faithful_export_passes_every_gate(passing):
    report, _ = passing
    assert report.verdict == "passed", report.failure_text()
    pairs = {(row.reference, row.phase) for row in report.rows}
    wanted = {(name, phase) for name in ("eager", "fake_quant") for phase in MODEL_PHASES}
    wanted |= {(name, "prompt") for name in ("eager", "fake_quant")}
    wanted |= {("self", phase) for phase in MODEL_PHASES[1:]}
    assert pairs == wanted | {("self", "kv_contract"), ("fake_quant", "layers"), ("eager", "weights")}
    gated = {row.metric for row in report.rows if row.gate is not None and row.reference == "eager"}
    assert gated == {*TIGHT, "nonfinite_logits", "weight_gain_error", "weight_alignment_min"}


def test_only_the_two_samples_are_gated_and_the_phases_of_a_prompt_are_shown(passing):
    rows = [row for row in passing[0].rows if row.reference == "eager" and row.metric == "kl_mean"]
    assert {row.phase for row in rows if row.gate is not None} == {"prompt", "decode"}
    by_phase = {row.phase: row.value for row in rows}
    assert by_phase["prefill"] > 0
    assert min(by_phase["prefill"], by_phase["chunked_prefill"]) * 0.5 < by_phase["prompt"]


def test_decode_equals_prefill_within_rounding(passing):
    rows = {row.metric: row.value for row in passing[0].rows if (row.reference, row.phase) == ("self", "decode")}
    assert rows["max_abs_logit"] < 1e-4
    assert rows["kl_mean"] < 1e-9


def test_first_ids_begin_with_one_start_token(passing):
    report, lines = passing
    first = dict(report.facts)["first ids"].split()
    assert first[0] == "1"
    assert first[1] != "1"
    assert any(line.startswith("first ids: 1 ") for line in lines)


def test_compiled_plans_are_proved_by_the_same_phases(exported, checkpoint, text_file, tmp_path, monkeypatch):
    """On the stub of TensorRT, which runs the graphs by addresses; there are no graphs to look into."""
    engine = make_engine(exported, tmp_path / "engine")
    monkeypatch.setattr(stage, "open_runner", lambda path, **_: make_runner(open_artifact(path)))
    parity = {"data": str(text_file), "seq_len": 12, "decode_steps": 4, "eager": TIGHT, "fake_quant": TIGHT}
    report = run_parity(engine.path, make_recipe(parity=parity), model=checkpoint, source=exported, report=quiet)
    assert report.verdict == "passed", report.failure_text()
    assert {row.phase for row in report.rows if row.reference == "eager"} == {*MODEL_PHASES, "prompt", "weights"}
    assert not any(row.phase == "layers" for row in report.rows)
    gated = make_recipe(parity=parity | {"fake_quant": {"layer_error_median": 1e-6}})
    with pytest.raises(DtoolError, match="cannot be measured on a compiled engine"):
        run_parity(engine.path, gated, model=checkpoint, source=exported, report=quiet)


def test_document_is_strict_json(passing):
    text = json.dumps(passing[0].document(), allow_nan=False)
    document = json.loads(text)
    assert document["verdict"] == "passed"
    row = next(row for row in document["rows"] if row["metric"] == "kl_mean" and row["phase"] == "prompt")
    assert set(row) == {
        "reference", "phase", "metric", "value", "unit", "low", "high", "gate", "verdict", "where", "passed"
    }  # fmt: skip
    assert row["low"] < row["value"] < row["high"]
    assert (document["confidence"], document["rows_of_text"]) == (0.95, passing[0].rows_of_text)


def test_page_has_a_line_per_phase_and_per_promise(passing):
    page = passing[0].page()
    gates, curve, layers, logits, _own, stored, contract = page.parts
    title = "Parity of the export artifact (onnx) with float32 torch and with its exact arithmetic in torch"
    assert (page.title, page.verdict) == (title, "passed")
    assert len(logits.rows) == 2 * 5 + 3
    assert len(stored.rows) == 2
    assert len(layers.bars) == 2
    assert len(curve.line) > 3
    assert all(len(row) == len(logits.columns) for row in logits.rows)
    assert len(contract.rows) == 6
    assert all(row.verdict == "passed" and row.value < 1 for row in gates.rows)
    assert all(row.low <= row.value <= row.high for row in gates.rows if row.high is not None)


def test_the_torch_decoder_of_an_export_against_itself_differs_in_nothing(exported, recipe, monkeypatch):
    monkeypatch.setattr(stage, "open_runner", lambda path, **_: stage.fake_quant_runner(path))
    report = run_parity(exported, make_recipe(parity={"data": recipe.parity.data}), model=None, report=quiet)
    values = {row.metric: row.value for row in report.rows if row.reference == "fake_quant"}
    assert values["kl_mean"] == values["max_abs_logit"] == values["top1_flips"] == values["perplexity_rise"] == 0


@pytest.fixture(scope="module")
def swapped(exported, checkpoint, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("swapped") / "export"
    shutil.copytree(exported, folder)
    spoil_rows(folder, "model.layers.0.self_attn.qkv_proj.weight", np.float32)
    recipe = make_recipe(parity={"data": str(text_file), "eager": TIGHT})
    return run_parity(folder, recipe, model=checkpoint, report=quiet)


def test_two_swapped_rows_of_q_proj_fail(swapped):
    assert swapped.verdict == "failed"
    assert {row.reference for row in swapped.failures} == {"eager"}
    assert "eager / decode: kl_mean" in swapped.failure_text()
    assert "gate 1e-08" in swapped.failure_text()


def test_a_failure_names_the_first_tensor_that_departs(swapped):
    assert "layers.0.qkv_proj" in swapped.divergence
    assert "layout" in swapped.divergence
    assert swapped.document()["divergence"] == swapped.divergence
    assert swapped.divergence in dict(swapped.page().facts).values()


def test_a_failed_gate_is_exit_code_three(swapped):
    assert GateFailed(swapped.failure_text()).exit_code == 3


def test_a_broken_cache_alone_fails_the_verdict(exported, recipe, monkeypatch):
    from toolchain.parity.metrics import Row

    bad = Row(reference="self", phase="kv_contract", metric="x", value=1, unit="values", gate=0, verdict="failed")
    monkeypatch.setattr(stage, "check_kv_contract", lambda *_, **__: [bad])
    report = run_parity(exported, make_recipe(parity={"data": recipe.parity.data}), model=None, report=quiet)
    assert report.verdict == "failed"
    assert report.failure_text() == "self / kv_contract: x 1 values, gate 0: failed"


def with_failures(monkeypatch, exported, text_file, *failures):
    """A report without gates, to which failed rows are added after the fact."""
    from toolchain.parity.metrics import Row

    added = [
        Row(reference=name, phase=phase, metric="kl_mean", value=1.0, unit="nats", gate=0, verdict="failed")
        for name, phase in failures
    ]
    monkeypatch.setattr(stage, "check_kv_contract", lambda *_, **__: added)
    return run_parity(exported, make_recipe(parity={"data": str(text_file)}), model=None, report=quiet)


@pytest.mark.parametrize("failures", [[("self", "decode")], [("fake_quant", "decode")]])
def test_where_only_decode_departs_the_hint_is_about_decode(failures, exported, text_file, monkeypatch):
    monkeypatch.setattr("toolchain.parity.bisect.find_divergence", lambda *_: pytest.fail("prefill was searched"))
    report = with_failures(monkeypatch, exported, text_file, *failures)
    assert report.divergence == stage.DECODE_DEPARTS
    assert report.failure_text().endswith(stage.DECODE_DEPARTS)


def test_where_prefill_departs_too_the_hint_is_bisects(exported, text_file, monkeypatch):
    failures = [("self", "decode"), ("fake_quant", "prompt")]
    report = with_failures(monkeypatch, exported, text_file, *failures)
    assert report.divergence.startswith("no tensor of the evaluation graph departs from fake_quant")


def test_eager_gates_without_a_checkpoint_are_refused(exported, recipe):
    with pytest.raises(DtoolError, match="no eager reference"):
        run_parity(exported, recipe, model=None, report=quiet)


def test_without_gates_a_missing_reference_is_skipped_by_name(exported, text_file):
    lines = []
    report = run_parity(exported, make_recipe(parity={"data": str(text_file)}), model=None, report=lines.append)
    assert any(note.startswith("eager skipped") for note in report.notes)
    assert any("eager skipped" in line for line in lines)
    assert {row.reference for row in report.rows} == {"fake_quant", "self"}


def as_engine(exported, folder, **target):
    """The export's files under the manifest of an engine built from it."""
    shutil.copytree(exported, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"stage": "engine", "target": {"backend": "onnxruntime"} | target}
    manifest["lineage"] = {"source": hash_file(exported / "manifest.json")}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_an_engine_is_held_to_the_artifact_it_was_built_from(exported, recipe, tmp_path):
    engine = as_engine(exported, tmp_path / "engine", max_batch=2, max_prompt=24, kv_capacity=28)
    recipe = make_recipe(parity={"data": recipe.parity.data, "fake_quant": TIGHT})
    with pytest.raises(DtoolError, match="no fake_quant reference"):
        run_parity(engine, recipe, model=None, report=quiet)
    report = run_parity(engine, recipe, model=None, source=exported, report=quiet)
    assert report.verdict == "passed", report.failure_text()
    assert any("rows are 24 tokens" in note for note in report.notes)


def test_an_engine_from_another_artifact_is_refused(exported, half, checkpoint, recipe, tmp_path):
    engine = as_engine(exported, tmp_path / "engine")
    with pytest.raises(DtoolError, match="was not built from"):
        run_parity(engine, recipe, model=checkpoint, source=half, report=quiet)


def test_half_precision_is_held_to_its_own_rounding(half, checkpoint, text_file):
    recipe = make_recipe(parity={"data": str(text_file), "fake_quant": {"kl_mean": 1e-3, "top1_agreement": 0.9}})
    report = run_parity(half, recipe, model=checkpoint, report=quiet)
    assert report.verdict == "passed", report.failure_text()
    assert open_artifact(half).manifest.kv_contract["dtype"] == "float16"


def test_wrong_stored_values_are_told_from_a_wrong_graph(half, checkpoint, text_file, tmp_path):
    folder = tmp_path / "spoilt"
    shutil.copytree(half, folder)
    spoil_rows(folder, "model.layers.1.self_attn.qkv_proj.weight", np.float16)
    recipe = make_recipe(parity={"data": str(text_file), "eager": TIGHT})
    report = run_parity(folder, recipe, model=checkpoint, report=quiet)
    assert report.verdict == "failed"
    assert "model.layers.1.self_attn.q_proj: row 2 holds the weights of row 9" in report.divergence


def test_without_a_tokenizer_random_ids_stand_in_and_are_named(exported, checkpoint, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(exported, bare)
    shutil.rmtree(bare / "tokenizer")
    manifest = json.loads((bare / "manifest.json").read_text())
    manifest["files"] = {k: v for k, v in manifest["files"].items() if not k.startswith("tokenizer/")}
    (bare / "manifest.json").write_text(json.dumps(manifest))
    report = run_parity(bare, make_recipe(parity={"eager": TIGHT}), model=checkpoint, report=quiet)
    assert report.verdict == "passed", report.failure_text()
    assert dict(report.facts)["text"] == "random ids, seed 0"
    assert any("no tokenizer" in note for note in report.notes)


def test_another_models_checkpoint_is_refused(exported, recipe, monkeypatch, eager):
    from toolchain.runners.eager import EagerRunner

    class Wider(EagerRunner):
        config = eager.config.model_copy(update={"vocab_size": 98})

    monkeypatch.setattr(stage, "eager_runner", lambda *_: Wider(eager.decoder))
    with pytest.raises(DtoolError, match="another model"):
        run_parity(exported, recipe, model=exported, report=quiet)


def test_an_undecided_gate_takes_more_rows_and_says_how_many_would_decide(half, checkpoint, text_file):
    first = run_parity(half, make_recipe(parity={"data": str(text_file)}), model=checkpoint, report=quiet)
    assert (first.verdict, first.rows_of_text) == ("passed", 4)
    (kl,) = (r.value for r in first.rows if (r.reference, r.phase, r.metric) == ("eager", "prompt", "kl_mean"))
    lines = []
    gates = {"data": str(text_file), "eager": {"kl_mean": kl}, "max_blocks": 8}
    report = run_parity(half, make_recipe(parity=gates), model=checkpoint, report=lines.append)
    assert (report.verdict, report.rows_of_text) == ("undecided", 8)
    assert "undecided after 4 rows" in lines
    assert "undecided after 8 rows" in report.failure_text()
    failure = report.failure("more text")
    assert (failure.exit_code, failure.problem) == (3, "parity is undecided")
    assert "parity.max_blocks" in failure.fix
    wider = make_recipe(parity=gates | {"eager": {"kl_mean": 10 * kl}})
    assert run_parity(half, wider, model=checkpoint, report=quiet).verdict == "passed"
    narrow = make_recipe(parity=gates | {"eager": {"kl_mean": kl / 10}})
    assert run_parity(half, narrow, model=checkpoint, report=quiet).verdict == "failed"
