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


def write_header(path, header, data=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin, end, shape=None, **fields):
    return {"dtype": "U8", "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]} | fields


HALF = entry(0, 8)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"a": HALF, "b": entry(4, 16)}, "an overlap"),
        ({"a": HALF, "b": HALF, "c": entry(8, 16)}, "an overlap"),
        ({"a": entry(0, 16), "b": entry(4, 8)}, "an overlap"),
        ({"a": entry(0, 16), "b": entry(4, 4)}, "an overlap"),
        ({"a": HALF, "b": entry(9, 16)}, "a hole"),
        ({"a": entry(1, 16)}, "a hole"),
        ({"a": HALF}, "bytes by its header"),
        ({}, "bytes by its header"),
        ({"a": entry(-8, 8)}, "none below zero"),
        ({"a": entry(8, 0, [-8])}, "none below zero"),
        ({"a": entry(8, 0, [])}, "1 bytes for a"),
        ({"a": entry(0, 16, ["16"])}, "a shape of counts"),
        ({"a": entry(0, 16, [-4, -4])}, "a shape of counts"),
        ({"a": entry(0, 16, [16, True])}, "a shape of counts"),
        ({"a": entry(0, 16, [16.0])}, "a shape of counts"),
        ({"a": entry(0, 16, "16")}, "a shape of counts"),
        ({"a": entry(0, 16, None, data_offsets=[False, 16])}, "two data_offsets"),
        ({"a": entry(0, 16, None, data_offsets=[0.0, 16.0])}, "two data_offsets"),
        ({"a": entry(0, 16, None, data_offsets=[0, 8, 16])}, "two data_offsets"),
        ({"a": entry(0, 16, None, dtype=8)}, "a dtype"),
        ({"a": [0, 16]}, "a dtype"),
        ([], "a JSON object"),
        (["a", "b"], "a JSON object"),
        (b'"aaaaaa"', "a JSON object"),
        (b"[" * 100_000, "a JSON header"),
        (b'{"a": %(e)s, "a": %(e)s}' % {b"e": json.dumps(entry(0, 16)).encode()}, "two entries of the name a"),
        (
            b'{"a": {"dtype": "U8", "shape": [4], "shape": [16], "data_offsets": [0, 16]}}',
            "two entries of the name shape",
        ),
        (b"\xff\xfe{}", "a JSON header"),
    ],
)
def test_headers_that_do_not_cover_the_data_once_are_refused(tmp_path, header, text):
    with pytest.raises(DtoolError, match="f is damaged") as failure:
        read_header(write_header(tmp_path / "f", header))
    assert text in str(failure.value)
    assert failure.value.expected
    assert failure.value.found
    assert failure.value.fix


def test_a_header_may_list_its_tensors_in_any_order(tmp_path):
    path = write_header(tmp_path / "f", {"b": entry(8, 16), "empty": entry(8, 8), "a": HALF}, bytes(range(16)))
    entries = read_header(path)
    assert list(entries) == ["b", "empty", "a"]
    assert read_tensor(entries["b"]).tolist() == list(range(8, 16))


def test_unknown_dtype_is_refused(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + b"x")
    with pytest.raises(DtoolError, match="stored as F4"):
        read_header(tmp_path / "f")
