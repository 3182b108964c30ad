"""Opening a checkpoint: which files are read, what is refused, and that every parameter is filled once."""

import os
import shutil
import struct
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import save_tiny
from tests.model.checkpoint_files import (
    EMBEDDING,
    HEAD,
    IDS,
    INDEX,
    NORM,
    SINGLE,
    edit_config,
    edit_tensors,
    logits,
    notes,
    refusal,
    take_tensors,
    write_index,
    write_shards,
)
from toolchain.errors import DtoolError
from toolchain.inspection import inspect_path
from toolchain.model.checkpoint import open_checkpoint
from toolchain.tensor_file import read_header


@pytest.fixture(scope="module")
def expected(tiny):
    return logits(tiny[0])


@pytest.fixture
def copy(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path / "model")
    return tmp_path / "model"


# Which files are read


def test_a_tied_matrix_is_one_parameter_of_one_stored_tensor(tmp_path):
    save_tiny(tmp_path / "m", tie_word_embeddings=True)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert HEAD not in checkpoint.parameters
    assert checkpoint.parameters[EMBEDDING].names == (EMBEDDING,)
    ours = sum(part.length for p in checkpoint.parameters.values() for part in p.parts)
    assert ours == sum(e.length for e in read_header(tmp_path / "m" / SINGLE).values())


def test_a_tied_matrix_under_the_heads_name_fills_both(tmp_path):
    save_tiny(tmp_path / "m", tie_word_embeddings=True)
    theirs = logits(tmp_path / "m")
    edit_tensors(tmp_path / "m", lambda t: {(HEAD if n == EMBEDDING else n): v for n, v in t.items()})
    assert torch.equal(logits(tmp_path / "m"), theirs)
    edit_tensors(tmp_path / "m", lambda t: t | {EMBEDDING: t[HEAD].clone()})
    assert torch.equal(logits(tmp_path / "m"), theirs)
    assert "the stored copy, which is the same, is not used" in notes(tmp_path / "m")


def test_two_matrices_that_differ_are_not_tied_whatever_the_config_says(tmp_path):
    from transformers import AutoModelForCausalLM

    save_tiny(tmp_path / "m", tie_word_embeddings=True)
    edit_tensors(tmp_path / "m", lambda t: t | {HEAD: t[EMBEDDING] * 2 + 1})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    with torch.inference_mode():
        theirs = model(IDS).logits
    assert float((logits(tmp_path / "m") - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())
    assert "they are kept apart" in notes(tmp_path / "m")
    assert not open_checkpoint(tmp_path / "m").config.tie_word_embeddings


def test_an_untied_model_without_a_head_is_refused(copy):
    edit_tensors(copy, lambda t: {n: v for n, v in t.items() if n != HEAD})
    assert f"1 missing: {HEAD}" in refusal(copy)


def test_shards_are_those_of_the_index_whatever_their_names(copy, expected):
    write_shards(copy)
    save_file({n: torch.ones(3) for n in (NORM, "other")}, copy / "consolidated.safetensors")
    assert torch.equal(logits(copy), expected)
    assert "not from consolidated.safetensors" in notes(copy)


def test_consolidated_weights_beside_a_single_file_are_not_read(copy, expected):
    save_file({NORM: torch.ones(3)}, copy / "consolidated.safetensors")
    assert torch.equal(logits(copy), expected)
    assert "not from consolidated.safetensors" in notes(copy)


def test_an_index_wins_over_a_single_file(copy, expected):
    kept = load_file(copy / SINGLE)
    write_shards(copy)
    save_file({n: v + 1 for n, v in kept.items()}, copy / SINGLE)
    assert torch.equal(logits(copy), expected)
    assert f"not from {SINGLE}" in notes(copy)


def test_a_missing_shard_is_named_with_its_tensors_at_once(copy):
    second = write_shards(copy)
    (copy / "extra_part.safetensors").unlink()
    start = time.perf_counter()
    text = refusal(copy)
    assert time.perf_counter() - start < 2
    assert f"extra_part.safetensors with {len(second)} tensors" in text
    assert "1 of the 2 shards" in text


def test_a_tensor_in_two_shards_is_read_from_the_one_the_index_names(copy, expected):
    write_shards(copy)
    shards = [copy / "model-00001-of-00002.safetensors", copy / "extra_part.safetensors"]
    first, second = map(load_file, shards)
    save_file(first | {name: value + 7 for name, value in second.items()}, shards[0])
    save_file(second | {name: value + 7 for name, value in first.items()}, shards[1])
    assert torch.equal(logits(copy), expected)


def test_a_shard_without_a_tensor_of_the_index_is_refused(copy):
    second = write_shards(copy)
    save_file({n: torch.ones(2) for n in second[1:]}, copy / "extra_part.safetensors")
    assert f"lacks 1 tensors\n  expected: {second[0]}" in refusal(copy)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(copy, tmp_path, shard):
    shutil.copy(copy / SINGLE, tmp_path / SINGLE)
    names = list(take_tensors(copy))
    write_index(copy, dict.fromkeys(names, shard))
    assert "outside its folder" in refusal(copy)


@pytest.mark.parametrize("weight_map", [None, [], {NORM: 3}, {NORM: ["a"]}])
def test_an_index_without_a_map_of_file_names_is_refused(copy, weight_map):
    write_index(copy, weight_map)
    assert "no weight_map of file names" in refusal(copy)
    (copy / INDEX).write_text("{")
    assert "not JSON" in refusal(copy)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a": ' * 100_000, b"\xff", b"{"])
def test_a_config_that_is_no_json_is_said_to_be_none(copy, data):
    (copy / "config.json").write_bytes(data)
    assert "config.json is not JSON" in refusal(copy)


def test_names_without_their_root_are_those_of_a_model_saved_without_its_head(tmp_path):
    save_tiny(tmp_path / "m", tie_word_embeddings=True)
    theirs = logits(tmp_path / "m")
    edit_tensors(tmp_path / "m", lambda t: {n.removeprefix("model."): v for n, v in t.items()})
    assert torch.equal(logits(tmp_path / "m"), theirs)
    assert "names lack 'model.'" in notes(tmp_path / "m")


def test_an_untied_trunk_is_refused_for_its_missing_head(copy):
    edit_tensors(copy, lambda t: {n.removeprefix("model."): v for n, v in t.items() if n != HEAD})
    assert f"1 missing: {HEAD}" in refusal(copy)


# Every tensor is used or on the benign list


def test_an_unknown_layout_is_refused_with_counts(copy):
    edit_tensors(copy, lambda t: {n.replace("model.layers.", "transformer.h."): v for n, v in t.items()})
    text = refusal(copy)
    assert "18 missing: model.layers.0.input_layernorm.weight" in text
    assert "18 unknown: transformer.h.0." in text


def test_stored_rotary_tables_are_noted_and_not_used(copy, expected):
    edit_tensors(copy, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert notes(copy).count("inv_freq") == 1
    assert torch.equal(logits(copy), expected)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_tensor_of_no_parameter_is_named(copy, name):
    edit_tensors(copy, lambda t: t | {name: torch.ones(2, 2)})
    assert f"1 unknown: {name}" in refusal(copy)


@pytest.mark.parametrize("value", [torch.ones(63), torch.ones(64, 1), torch.tensor(1.0)])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy, value):
    edit_tensors(copy, lambda t: t | {NORM: value})
    text = refusal(copy)
    assert f"expected: {NORM} [64]\n" in text
    assert f"found:    {NORM} {list(value.shape)}\n" in text


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_weights_stored_as_codes_are_refused_by_format(copy, dtype):
    edit_tensors(copy, lambda t: t | {NORM: t[NORM].to(dtype)})
    ours = {"float8_e4m3fn": "fp8_e4m3"}.get(str(dtype)[6:], str(dtype)[6:])
    assert f"1 tensors: {NORM} {ours}" in refusal(copy)


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.float64, "F64"), (torch.float8_e5m2, "F8_E5M2"), (torch.int16, "I16")]
)
def test_a_format_dtool_cannot_read_is_named(copy, dtype, code):
    edit_tensors(copy, lambda t: t | {NORM: t[NORM].to(dtype)})
    assert f"{NORM} is stored as {code}" in refusal(copy)


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ()])
def test_stored_precision_is_read_from_either_key_or_the_tensors(copy, keys):
    edit_tensors(copy, lambda t: {n: v.bfloat16() for n, v in t.items()})
    edit_config(copy, **({"dtype": None, "torch_dtype": None} | dict.fromkeys(keys, "bfloat16")))
    checkpoint = open_checkpoint(copy)
    assert checkpoint.config.dtype == "bfloat16"
    assert {p.dtype for p in checkpoint.parameters.values()} == {"bfloat16"}


# Damaged files and odd places


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 7, struct.pack("<Q", 1 << 40), struct.pack("<Q", 90) + b"{", struct.pack("<Q", 4) + b"[{]}", b"PK"],
)
def test_a_damaged_file_is_said_to_be_damaged(copy, data):
    (copy / SINGLE).write_bytes(data)
    assert f"{SINGLE} is damaged" in refusal(copy)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_cut_shard_is_said_to_be_damaged(copy, keep):
    write_shards(copy)
    path = copy / "extra_part.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "extra_part.safetensors is damaged" in refusal(copy)


def test_a_file_without_tensors_is_refused(copy):
    edit_config(copy, dtype=None)
    save_file({}, copy / SINGLE)
    assert "holds no tensors" in refusal(copy)


def test_what_is_no_checkpoint_is_refused_with_what_was_found(tmp_path, copy):
    assert "no such folder" in refusal(tmp_path / "absent")
    assert "a file" in refusal(copy / SINGLE)
    (tmp_path / "empty").mkdir()
    assert "an empty folder" in refusal(tmp_path / "empty")
    (copy / SINGLE).rename(copy / "weights.safetensors")
    assert "holds no weights" in refusal(copy)
    (copy / "weights.safetensors").rename(copy / "weights.Q4_0.gguf")
    assert f"give the file {copy / 'weights.Q4_0.gguf'} itself" in refusal(copy)


def test_a_checkpoint_of_symbolic_links_is_read_through_them(copy, tmp_path, expected):
    write_shards(copy)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(copy.iterdir())):  # as the hub's cache lies
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    assert torch.equal(logits(snapshot), expected)


@pytest.mark.parametrize("name", ["ó dèl 模型 #1", "with space", "-r", "a'b\"c"])
def test_any_valid_path_is_read(copy, tmp_path, name, expected):
    folder = tmp_path / name
    copy.rename(folder)
    assert torch.equal(logits(folder), expected)
    folder.joinpath(SINGLE).unlink()
    assert str(folder) in refusal(folder)


def test_nothing_is_written_to_a_checkpoint(copy, expected, monkeypatch, tmp_path):
    def state():
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in copy.iterdir()}, copy.stat().st_mtime_ns

    for path in copy.iterdir():
        path.chmod(0o444)
    copy.chmod(0o555)
    before = state()
    monkeypatch.chdir("/")
    assert torch.equal(logits(copy), expected)
    assert state() == before
    copy.chmod(0o755)


def test_opening_safetensors_does_not_import_torch(copy):
    code = "import sys; from pathlib import Path; from toolchain.model.checkpoint import open_checkpoint\n"
    code += f"open_checkpoint(Path({str(copy)!r})); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def split(copy, *counts):
    """The single file as one set of shards for each count, without any index."""
    tensors = take_tensors(copy)
    names = list(tensors)
    for count in counts:
        for i in range(count):
            shard = copy / f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            save_file({name: tensors[name] for name in names[i::count]}, shard)


def test_a_whole_set_of_shards_needs_no_index(copy, expected):
    split(copy, 3)
    assert "no model.safetensors.index.json: all 3 shards" in notes(copy)
    assert torch.equal(logits(copy), expected)


@pytest.mark.parametrize(
    ("sets", "removed", "texts"),
    [
        ((2, 3), (), ["2 of 2: model-00001-of-00002", "3 of 3: model-00001-of-00003"]),
        ((3,), (2,), ["2 of 3: model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"]),
    ],
)
def test_shards_without_an_index_that_are_no_whole_set_are_listed(copy, sets, removed, texts):
    split(copy, *sets)
    for number in removed:
        (copy / f"model-{number:05d}-of-{sets[0]:05d}.safetensors").unlink()
    with pytest.raises(DtoolError, match=r"has shards and no model\.safetensors\.index\.json") as failure:
        open_checkpoint(copy)
    assert all(text in failure.value.found for text in texts)
    document, _ = inspect_path(copy)  # a config alone will do
    assert document["bytes_by_format"] == {}
    assert "the account is of the config alone" in document["notes"][0]


def test_a_tensor_in_two_shards_without_an_index_is_refused(copy):
    split(copy, 2)
    shutil.copyfile(copy / "model-00001-of-00002.safetensors", copy / "model-00002-of-00002.safetensors")
    with pytest.raises(DtoolError, match="are in two shards"):
        open_checkpoint(copy)
