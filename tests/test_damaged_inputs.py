"""What seeded mutations found: files that are no JSON, graphs or manifests, and options that nothing can take."""

import json
import shutil

import pytest

from tests.conftest import seal
from tests.test_cli import call
from toolchain.artifact import open_artifact, read_json
from toolchain.errors import DtoolError
from toolchain.graph_io import GRAPH_FILES, load_graph
from toolchain.model.config import DecoderConfig

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def export(text_export, tmp_path):
    return shutil.copytree(text_export, tmp_path / "x")


def set_field(folder, value, *path):
    """Change one value of a manifest; drop it when the value is None."""
    document = json.loads((folder / "manifest.json").read_text())
    spot = document
    for key in path[:-1]:
        spot = spot[key]
    if value is None:
        del spot[path[-1]]
    else:
        spot[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize("data", [b"\xff", b"", b"{", DEEP.encode(), b"1" * 5000])
def test_a_file_that_is_no_json_is_refused_by_name(tmp_path, data):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(DtoolError, match=r"a\.json is not JSON"):
        read_json(tmp_path / "a.json")


def test_a_byte_order_mark_is_passed_over(tiny, export):
    for path in (export / "decoder.json", export / "manifest.json"):
        if path.name == "manifest.json":
            seal(export)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert open_artifact(export).read("decoder.json", DecoderConfig).hidden_size == 64


def test_a_checkpoint_whose_config_has_a_byte_order_mark_is_read(tiny_text, tmp_path):
    folder = shutil.copytree(tiny_text, tmp_path / "model")
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + config)
    out, _ = call("inspect", folder, "--json")
    assert json.loads(out)["parameters"] > 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "manifest.json", "decoder.json"])
def test_json_that_is_nested_too_deeply_is_refused(tiny_text, export, tmp_path, name):
    folder = export if name in ("manifest.json", "decoder.json") else shutil.copytree(tiny_text, tmp_path / "model")
    (folder / name).write_text(f'{{"deep": {DEEP}}}')
    if name == "decoder.json":
        seal(folder)
    assert "nested too deeply" in call("inspect", folder, code=1)[1]


def test_a_decoder_that_contradicts_itself_is_refused_with_the_field(export):
    document = json.loads((export / "decoder.json").read_text())
    (export / "decoder.json").write_text(json.dumps(document | {"num_attention_heads": 3}))
    seal(export)
    for command in (("inspect", export), ("generate", export, "-p", "a")):
        err = call(*command, code=1)[1]
        assert "decoder.json cannot be used" in err
        assert "num_attention_heads 3" in err


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("float17", ("kv_contract", "dtype")),
        ("yes", ("kv_contract", "token_scales")),
        ({"layers": [0]}, ("kv_contract", "not_quantized")),
        ([None], ("target", "max_batch")),
        ([[1]], ("details", "quantized")),
        ("floau32", ("details", "compute_dtype")),
        ("x", ("recipe", "calibration")),
        (5, ("recipe", "engine")),
    ],
)
def test_a_field_of_a_manifest_of_another_type_is_refused_by_name(export, value, path):
    set_field(export, value, *path)
    err = call("generate", export, "-p", "a", code=1)[1]
    assert "manifest.json cannot be read" in err
    assert ".".join(path) in err


def test_a_field_that_a_manifest_lacks_is_refused_by_name_where_it_is_needed(export):
    set_field(export, None, "kv_contract", "dtype")
    err = call("inspect", export, code=1)[1]
    assert "does not say 'dtype'" in err
    assert "make the artifact again" in err


def test_fields_that_this_version_does_not_know_are_kept(export):
    set_field(export, {"a": [1]}, "details", "of_tomorrow")
    assert open_artifact(export).manifest.details["of_tomorrow"] == {"a": [1]}


@pytest.mark.parametrize("data", [b"", b"\x00\x01nothing", b"\x0a"])
def test_a_file_that_is_no_graph_is_refused_by_name(tmp_path, data):
    (tmp_path / "a.onnx").write_bytes(data)
    with pytest.raises(DtoolError, match=r"a\.onnx cannot be read"):
        load_graph(tmp_path / "a.onnx")


def test_what_onnxruntime_refuses_is_worded(export):
    """A graph that is none, and graphs for more layers than the decoder has."""
    document = json.loads((export / "decoder.json").read_text())
    (export / "decoder.json").write_text(json.dumps(document | {"num_hidden_layers": 1}))
    seal(export)
    assert "ONNX Runtime cannot run" in call("generate", export, "-p", "a", code=1)[1]
    (export / GRAPH_FILES["prefill"]).write_bytes(b"\x00\x01nothing")
    seal(export)
    err = call("generate", export, "-p", "a", code=1)[1]
    assert "ONNX Runtime cannot run" in err
    assert "prefill.onnx" in err


@pytest.mark.parametrize("value", ["[" * 3000, "9" * 5000])
def test_a_value_that_toml_cannot_hold_is_refused(tmp_path, value):
    export = ("export", tmp_path, "-o", tmp_path / "out", "-r")
    for key in ("weights.group_size", "bench.prompt_lens"):
        assert key in call(*export, "int8", "--set", f"{key}={value}", code=1)[1]
    (tmp_path / "r.toml").write_text(f"schema_version = {value}\n")
    assert "not valid TOML" in call(*export, tmp_path / "r.toml", code=1)[1]


def test_a_seed_below_zero_is_a_usage_error(tiny_text):
    assert "--seed" in call("generate", tiny_text, "-p", "a", "--seed", -1, code=2)[1]
