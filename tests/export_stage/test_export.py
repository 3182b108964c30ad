"""The exported graphs: the contract, the bytes, and the same logits as torch."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.conftest import make_recipe, random_ids, save_tiny
from tests.rounding import assert_equal_up_to_rounding
from toolchain.artifact import MANIFEST, hash_file, open_artifact
from toolchain.errors import DtoolError
from toolchain.export.stage import contract_tables, export_checkpoint, export_key
from toolchain.graph_io import GRAPH_FILES, PHASES, graph_io
from toolchain.model.caches import CacheFormat
from toolchain.model.config import DecoderConfig
from toolchain.model.parameters import parameter_shapes
from toolchain.numerics import logit_tolerance
from toolchain.runners.onnx import OnnxRunner
from toolchain.runners.open import eager_runner

CONTRACT = """\
prefill
     name                     dtype    shape
in   input_ids                int64    [batch, T]
in   past_lengths             int64    [batch]
in   new_lengths              int64    [batch]
in   past_key_values.0.key    float32  [batch, 2, capacity, 16]
in   past_key_values.0.value  float32  [batch, 2, capacity, 16]
out  logits                   float32  [batch, 1, 97]
out  present.0.key            float32  [batch, 2, capacity, 16]
out  present.0.value          float32  [batch, 2, capacity, 16]

decode
     name                     dtype    shape
in   input_ids                int64    [batch, 1]
in   past_lengths             int64    [batch]
in   past_key_values.0.key    float32  [batch, 2, capacity, 16]
in   past_key_values.0.value  float32  [batch, 2, capacity, 16]
out  logits                   float32  [batch, 1, 97]
out  present.0.key            float32  [batch, 2, capacity, 16]
out  present.0.value          float32  [batch, 2, capacity, 16]"""


def config_of(folder):
    return DecoderConfig.model_validate(open_artifact(folder).json("decoder.json"))


def export(model, out, **sections):
    return export_checkpoint(model, make_recipe(**sections), out, report=lambda _: None)


def assert_equal_to_eager(model, artifact, ids, plan):
    runner = OnnxRunner(open_artifact(artifact))
    assert_equal_up_to_rounding(eager_runner(model), runner, ids, plan, capacity=64)


def test_contract_table_is_as_promised(exported):
    config = config_of(exported).model_copy(update={"num_hidden_layers": 1})
    assert contract_tables(config, {"dtype": "float32"}) == CONTRACT


@pytest.mark.parametrize("phase", PHASES)
def test_graph_has_exactly_the_contracts_inputs_and_outputs(exported, phase):
    graph = onnx.load(exported / GRAPH_FILES[phase], load_external_data=False).graph
    contract = graph_io(config_of(exported), phase, (CacheFormat("float32"),) * 2)
    for values, specs in ((graph.input, contract.inputs), (graph.output, contract.outputs)):
        found = [
            (
                v.name,
                v.type.tensor_type.elem_type,
                tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim),
            )
            for v in values
        ]
        codes = {"float32": onnx.TensorProto.FLOAT, "int64": onnx.TensorProto.INT64}
        assert found == [(s.name, codes[s.dtype], s.shape) for s in specs]


@pytest.mark.parametrize("phase", PHASES)
def test_graph_passes_the_checker_infers_shapes_and_carries_no_local_path(exported, phase):
    path = exported / GRAPH_FILES[phase]
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert {o.domain: o.version for o in model.opset_import} == {"": 24, "dtool": 1}
    assert model.ir_version == 10
    assert sum(node.op_type == "FusedAttention" for node in model.graph.node) == 2
    data = path.read_bytes()
    assert bytes(Path.cwd()) not in data
    assert b".py" not in data
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    logits = inferred.graph.output[0].type.tensor_type.shape
    assert logits.dim[2].dim_value == 97


def test_int64_constants_fit_32_bits(exported):
    for phase in PHASES:
        model = onnx.load(exported / GRAPH_FILES[phase], load_external_data=False)
        constants = [a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute if a.HasField("t")]
        for tensor in [*constants, *(t for t in model.graph.initializer if not t.external_data)]:
            if tensor.data_type == onnx.TensorProto.INT64:
                assert np.abs(onnx.numpy_helper.to_array(tensor)).max() < 2**31


def test_weights_keep_their_names_and_lie_once_in_one_file(exported_tied):
    config = config_of(exported_tied)
    for phase in PHASES:
        model = onnx.load(exported_tied / GRAPH_FILES[phase], load_external_data=False)
        external = {
            t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data
        }
        weights = {n for n, e in external.items() if e["location"] == "weights.safetensors"}
        assert weights == set(parameter_shapes(config))
        assert {e["location"] for e in external.values()} == {"weights.safetensors", "rope.safetensors"}
    parameters = sum(int(np.prod(s)) for s in parameter_shapes(config).values()) * 4
    assert (exported_tied / "weights.safetensors").stat().st_size <= 1.05 * parameters


@pytest.mark.parametrize("model_name", ["tiny", "tiny_tied"])
def test_logits_equal_eager_over_prefill_chunks_and_decode(model_name, request):
    model = request.getfixturevalue(model_name)[0]
    artifact = request.getfixturevalue({"tiny": "exported", "tiny_tied": "exported_tied"}[model_name])
    ids = random_ids(7, 3, 60)
    plan = [(slice(0, 40), (40, 17, 1), "evaluation"), (slice(40, 52), (12, 3, 9), "prefill")]
    plan += [(slice(i, i + 1), (1, 1, 1), "decode") for i in range(52, 60)]
    assert_equal_to_eager(model, artifact, ids, plan)


@pytest.mark.parametrize(
    "changes", [{"head_dim": 32}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 1}]
)
def test_other_shapes_export_alike(tmp_path, changes):
    save_tiny(tmp_path / "m", **changes)
    export(tmp_path / "m", tmp_path / "x")
    ids = random_ids(8, 2, 30)
    plan = [(slice(0, 20), (20, 7), "prefill"), *((slice(i, i + 1), (1, 1), "decode") for i in range(20, 24))]
    assert_equal_to_eager(tmp_path / "m", tmp_path / "x", ids, plan)


@pytest.mark.parametrize(("batch", "tokens", "past"), [(1, 1, 0), (1, 13, 0), (2, 7, 9), (3, 2, 1)])
def test_no_example_size_is_baked_in(tiny, exported, batch, tokens, past):
    ids = random_ids(9, batch, past + tokens)
    plan = [(slice(0, past), (past,) * batch, "prefill")] if past else []
    assert_equal_to_eager(tiny[0], exported, ids, [*plan, (slice(past, None), (tokens,) * batch, "evaluation")])


def test_half_precision_weights_are_half_the_bytes_and_say_so(tiny, exported, tmp_path):
    artifact = export(tiny[0], tmp_path / "half", compute_dtype="float16")
    sizes = [(folder / "weights.safetensors").stat().st_size for folder in (exported, tmp_path / "half")]
    assert sizes[1] / sizes[0] == pytest.approx(0.5, rel=0.05)
    assert artifact.manifest.details["compute_dtype"] == "float16"
    ids = random_ids(10, 2, 20)
    runners = eager_runner(tiny[0]), OnnxRunner(artifact)
    theirs, ours = (r.step(r.new_state(2, 32), ids, np.array([20, 20]), "evaluation") for r in runners)
    assert float(abs(ours - theirs).max()) <= logit_tolerance(
        "float16", layers=2, width=128, largest=float(abs(theirs).max())
    )


def test_norms_of_a_half_precision_graph_stay_in_float32(tiny, tmp_path):
    export(tiny[0], tmp_path / "half", compute_dtype="float16")
    model = onnx.load(tmp_path / "half" / "prefill.onnx", load_external_data=False)
    casts = {o for n in model.graph.node if n.op_type == "Cast" for o in n.output}
    norms = [n for n in model.graph.node if n.op_type == "RMSNormalization"]
    assert len(norms) == 5
    assert all(n.input[0] in casts and n.input[1] in casts for n in norms)


def test_values_that_overflow_half_precision_are_refused(tmp_path):
    model = save_tiny(tmp_path / "m")
    model.model.norm.weight.data[3] = 1e6
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(DtoolError, match="does not fit float16"):
        export(tmp_path / "m", tmp_path / "x", compute_dtype="float16")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path, dtype, value):
    model = save_tiny(tmp_path / "m")
    model.model.norm.weight.data[3] = value
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(DtoolError, match=r"model\.norm\.weight holds inf or NaN"):
        export(tmp_path / "m", tmp_path / "x", compute_dtype=dtype)


def test_second_export_is_byte_identical_and_shards_do_not_matter(tiny, exported, tmp_path):
    tiny[1].save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    folder = tmp_path / "ó dèl 模型 #1"
    shutil.copytree(tmp_path / "sharded", folder)
    again = export(folder, tmp_path / "again")
    assert (again.path / MANIFEST).read_bytes() == (exported / MANIFEST).read_bytes()
    assert export_key(folder, make_recipe()) == again.manifest.key
    assert again.manifest.files["weights.safetensors"].sha256 == hash_file(again.path / "weights.safetensors")


def test_one_changed_weight_changes_the_key(tmp_path):
    model = save_tiny(tmp_path / "m")
    before = export_key(tmp_path / "m", make_recipe())
    stat = (tmp_path / "m" / "model.safetensors").stat()
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "m")
    os.utime(tmp_path / "m" / "model.safetensors", (stat.st_atime, stat.st_mtime))
    assert export_key(tmp_path / "m", make_recipe()) != before


def test_moved_artifact_runs_from_anywhere(exported, tmp_path, monkeypatch):
    shutil.copytree(exported, tmp_path / "moved")
    monkeypatch.chdir("/")
    runner = OnnxRunner(open_artifact(tmp_path / "moved"))
    assert np.isfinite(runner.step(runner.new_state(1, 8), random_ids(1, 1, 3), np.array([3]), "prefill")).all()


def test_checkpoint_is_only_read(tiny_text, tmp_path):
    shutil.copytree(tiny_text, tmp_path / "m")
    before = {p.name: hash_file(p) for p in (tmp_path / "m").iterdir()}
    for path in (tmp_path / "m").iterdir():
        path.chmod(0o444)
    artifact = export(tmp_path / "m", tmp_path / "x")
    assert {p.name: hash_file(p) for p in (tmp_path / "m").iterdir()} == before
    assert (artifact.path / "tokenizer" / "tokenizer.json").stat().st_mode & 0o200


def test_manifest_lists_lineage_versions_and_the_cache_layout(exported):
    document = json.loads((exported / MANIFEST).read_text())
    assert set(document["lineage"]) >= {"checkpoint.tensors", "checkpoint.config.json"}
    assert {"dtool", "torch", "onnx"} <= set(document["versions"])
    assert document["kv_contract"]["layout"] == "batch, kv_heads, capacity, head_dim"
    assert document["recipe"] == {"compute_dtype": "float32", "context_len": None}


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("float16", 2)])
def test_a_disk_without_room_for_the_weights_is_refused_before_any_work(tiny, tmp_path, monkeypatch, dtype, bytes_each):
    folder, model = tiny
    needed = bytes_each * sum(p.numel() for p in model.parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))  # the header makes it too few
    with pytest.raises(DtoolError, match=r"no room for .*[\s\S]*at least [\d,]+ bytes free") as failure:
        export(folder, tmp_path / "out", compute_dtype=dtype)
    assert f"{needed:,} bytes" in failure.value.found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed + 10_000))
    export(folder, tmp_path / "out", compute_dtype=dtype)


def test_holes_of_a_sparse_checkpoint_need_no_room(tiny, tmp_path):
    """They stay holes, so an export may be larger than its disk."""
    from toolchain.tensor_file import TensorEntry, stored_bytes

    path, hole, data = tmp_path / "sparse", 1 << 20, 1 << 16
    with path.open("wb") as stream:
        stream.seek(hole)
        stream.write(bytes([1]) * data)
        stream.truncate(2 * hole)
    assert stored_bytes(TensorEntry(path, "float32", (1,), 0, 2 * hole)) == data
    assert stored_bytes(TensorEntry(path, "float32", (1,), hole + 8, 16)) == 16
    assert stored_bytes(TensorEntry(path, "float32", (1,), 0, hole // 2)) == 0
