import hashlib
import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from toolchain.errors import DtoolError
from toolchain.tensor_file import build_header, read_chunks, read_header, read_tensor, write_stream, write_tensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor([-128, 127], dtype=torch.int8),
    "empty": torch.empty(0, 4),
}


def test_what_we_write_the_library_reads_and_the_other_way_round(tmp_path):
    write_tensors(tmp_path / "ours", TENSORS)
    save_file(TENSORS, tmp_path / "theirs")
    theirs = load_file(tmp_path / "ours")
    ours = {name: read_tensor(entry) for name, entry in read_header(tmp_path / "theirs").items()}
    for name, tensor in TENSORS.items():
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(ours[name], tensor)


def test_data_starts_aligned(tmp_path):
    entries = write_tensors(tmp_path / "f", TENSORS)
    assert min(e.offset for e in entries.values()) % 64 == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=50), st.integers(1, 9000)), max_size=8))
def test_stream_digest_is_the_files_digest_and_holes_read_as_zeros(tmp_path_factory, chunks):
    path = tmp_path_factory.mktemp("s") / "f"
    digest = write_stream(path, b"head", chunks)
    expected = b"head" + b"".join(bytes(c) if isinstance(c, int) else c for c in chunks)
    assert path.read_bytes() == expected
    assert digest == hashlib.sha256(expected).hexdigest()


def test_holes_are_skipped_and_come_back_whole(tmp_path):
    shape = (1 << 20, 5)
    header, _ = build_header({"zeros": ("float32", shape), "one": ("float32", (1,))})
    write_stream(tmp_path / "f", header, [4 * 5 << 20, torch.ones(1).numpy().tobytes()])
    entry = read_header(tmp_path / "f")["zeros"]
    chunks = list(read_chunks(entry))
    assert any(isinstance(c, int) for c in chunks)
    assert sum(c if isinstance(c, int) else len(c) for c in chunks) == entry.length
    assert float(read_tensor(entry).abs().sum()) == 0.0


def cut(data):
    return data[:-1]


def longer(data):
    return data + b"x"


def no_header(data):
    return data[:4]


def huge_header(data):
    return struct.pack("<Q", 1 << 60) + data[8:]


def bad_json(data):
    return data[:8] + b"[" + data[9:]


@pytest.mark.parametrize("damage", [cut, longer, no_header, huge_header, bad_json])
def test_damaged_files_are_named(tmp_path, damage):
    write_tensors(tmp_path / "f", TENSORS)
    (tmp_path / "g").write_bytes(damage((tmp_path / "f").read_bytes()))
    with pytest.raises(DtoolError, match="g is damaged"):
        read_header(tmp_path / "g")


def test_unknown_dtype_is_refused(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    with pytest.raises(DtoolError, match="stored as F4"):
        read_header(tmp_path / "f")
