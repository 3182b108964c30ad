"""pytorch_model.bin: tensors are found without running the file, and everything else is refused."""

import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file

from tests.model.checkpoint_files import (
    BIN,
    BIN_INDEX,
    EMBEDDING,
    HEAD,
    NORM,
    SINGLE,
    logits,
    notes,
    refusal,
    take_tensors,
    write_shards,
)


@pytest.fixture(scope="module")
def expected(tiny):
    return logits(tiny[0])


@pytest.fixture
def copy(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path / "model")
    return tmp_path / "model"


def test_a_pickled_state_dict_has_the_logits_of_the_safetensors(copy, expected):
    torch.save(take_tensors(copy), copy / BIN)
    assert torch.equal(logits(copy), expected)


def test_trained_parameters_saved_from_a_gpu_are_read(copy, expected, monkeypatch):
    state = OrderedDict({n: torch.nn.Parameter(t) for n, t in take_tensors(copy).items()})
    state._metadata = OrderedDict({"": {"version": 1}})  # as Module.state_dict writes it
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(state, copy / BIN)
    monkeypatch.undo()
    assert torch.equal(logits(copy), expected)


def test_pickled_shards_are_those_of_their_index(copy, expected):
    write_shards(copy, torch.save, BIN_INDEX, "bin")
    torch.save({NORM: torch.ones(3)}, copy / "pytorch_model-00001-of-00001.bin")
    assert torch.equal(logits(copy), expected)
    (copy / "extra_part.bin").unlink()
    assert "extra_part.bin with" in refusal(copy)


def test_safetensors_are_preferred_and_it_is_said(copy, expected):
    torch.save({n: t + 1 for n, t in load_file(copy / SINGLE).items()}, copy / BIN)
    assert torch.equal(logits(copy), expected)
    assert f"weights are read from {SINGLE}, not from {BIN}" in notes(copy)


def test_views_and_shared_storages_of_a_pickle_are_their_own_bytes(copy, expected):
    tensors = take_tensors(copy)
    whole = torch.cat([tensors[EMBEDDING], tensors[HEAD]])
    torch.save(tensors | {EMBEDDING: whole[:97], HEAD: whole[97:]}, copy / BIN)
    assert torch.equal(logits(copy), expected)


def test_a_transposed_view_in_a_pickle_is_refused_by_name(copy):
    tensors = take_tensors(copy)
    torch.save(tensors | {HEAD: tensors[HEAD].T.contiguous().T}, copy / BIN)
    text = refusal(copy)
    assert HEAD in text
    assert "save tensor.contiguous() instead" in text


class Hook:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(copy, tmp_path):
    marker = tmp_path / "marker"
    tensors = take_tensors(copy)
    for document in (tensors | {"hook": Hook(marker)}, Hook(marker), {Hook(marker): 1}):
        for zipped in (True, False):
            torch.save(document, copy / BIN, _use_new_zipfile_serialization=zipped)
            text = refusal(copy)
            assert ("a call of posix.system" in text) or not zipped
            assert "nothing" in text or "safetensors" in text
            assert len(text) < 700
    done = subprocess.run(
        [sys.executable, "-m", "toolchain.cli", "export", copy, "-r", "fp32", "-o", tmp_path / "out"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    torch.load(copy / BIN, weights_only=False)
    assert marker.exists()  # so the hook works, where it is let


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (lambda t: {"state_dict": t, "epoch": 3}, "state_dict (dict), epoch (int)"),
        (lambda t: t | {"step": 7}, "step (int)"),
        (lambda t: t | {3: torch.ones(2)}, "a name that is no text"),
        (lambda t: list(t.values()), "a list instead of names and tensors"),
        (lambda t: t[NORM], "instead of names and tensors"),
        (lambda t: torch.nn.Linear(2, 2), "a call of torch.nn.modules.linear.Linear"),
    ],
)
def test_a_pickle_of_more_than_named_tensors_is_refused_with_what_it_holds(copy, wrap, text):
    torch.save(wrap(take_tensors(copy)), copy / BIN)
    assert text in refusal(copy)
    assert "save the tensors as model.safetensors" in refusal(copy)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.double(), "is stored as float64"),
        (lambda t: t.to(torch.complex64), "is stored as complex64"),
        (lambda t: t.to_sparse(), "sparse_coo"),
        (lambda t: t.to("meta"), "a tensor without data"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "is not a plain checkpoint"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_pickled_tensors_that_are_no_plain_numbers_are_refused(copy, change, text):
    tensors = take_tensors(copy)
    torch.save(tensors | {NORM: change(tensors[NORM])}, copy / BIN)
    assert text in refusal(copy)


def test_a_pickle_older_than_zip_archives_is_refused_with_the_way_out(copy):
    torch.save(take_tensors(copy), copy / BIN, _use_new_zipfile_serialization=False)
    assert "an older pickle file" in refusal(copy)
    assert "torch.load(weights_only=True) and save it as model.safetensors" in refusal(copy)


@pytest.mark.parametrize("keep", [0, 100, 5000, -1])
def test_a_cut_pickle_is_refused(copy, keep):
    torch.save(take_tensors(copy), copy / BIN)
    data = (copy / BIN).read_bytes()
    (copy / BIN).write_bytes(data[:keep])
    assert f"{BIN} cannot be read" in refusal(copy)


def rezip(path, compression=zipfile.ZIP_STORED, drop=(), **changes):
    """The archive written anew, record by record, some replaced, cut or left out."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            if name.rpartition("/")[2] in drop:
                continue
            archive.writestr(name, changes.get(name.rpartition("/")[2], lambda d: d)(data))


def test_an_archive_of_an_older_pytorch_is_read(copy, expected):
    torch.save(take_tensors(copy), copy / BIN)
    rezip(copy / BIN, drop=(".format_version", ".storage_alignment", "byteorder"))
    assert torch.equal(logits(copy), expected)


def test_records_of_another_zip_writer_are_never_misread(copy):
    torch.save(take_tensors(copy), copy / BIN)
    rezip(copy / BIN)  # torch reckons where its own writer would have put them
    assert "are not where its pickle says" in refusal(copy)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compression": zipfile.ZIP_DEFLATED}, "is compressed"),
        ({"byteorder": lambda _: b"big"}, "another byte order"),
        ({"0": lambda data: data[:-400]}, "are not where its pickle says"),
        ({"0": lambda data: data[:-400], "drop": (".format_version",)}, "found:    a record of 24432"),
        ({"data.pkl": lambda data: data[:-20]}, "is not a plain checkpoint"),
    ],
)
def test_an_archive_whose_records_are_not_the_tensors_bytes_is_refused(copy, changes, text):
    torch.save(take_tensors(copy), copy / BIN)
    rezip(copy / BIN, **changes)
    assert text in refusal(copy)


def test_two_records_of_an_archive_at_one_place_are_refused(copy):
    """The directory of the archive gives a storage the bytes of another one."""
    torch.save(take_tensors(copy), copy / BIN)
    with zipfile.ZipFile(copy / BIN) as archive:
        first, second = (next(r for r in archive.infolist() if r.filename.endswith(f"/data/{n}")) for n in (0, 1))
    data = bytearray((copy / BIN).read_bytes())
    entry = data.rfind(second.filename.encode()) - 4
    data[entry : entry + 4] = struct.pack("<I", first.header_offset)
    (copy / BIN).write_bytes(data)
    assert "records that lie one after the other" in refusal(copy)
