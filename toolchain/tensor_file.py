"""safetensors files by byte range: headers checked strictly, data streamed, never held whole.

The `safetensors` package hides offsets, which ONNX external data needs, and cannot write a file
larger than memory. The format is eight bytes of header length (little endian), a JSON header of
{name: {dtype, shape, data_offsets}}, then the data (github.com/huggingface/safetensors, "Format").
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from toolchain.artifact import CHUNK_BYTES
from toolchain.errors import DtoolError
from toolchain.formats import BY_SAFETENSORS, FORMATS

ALIGNMENT = 64
MAX_HEADER_BYTES = 100 << 20
_ZEROS = bytes(CHUNK_BYTES)

Chunk = bytes | memoryview | int
"""Bytes to write, or a count of zero bytes that the file may keep as a hole."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: format name, shape, and byte range from the start of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file. Raises DtoolError when it is damaged or truncated.

    As the format demands, the byte ranges cover the data once: no hole, no overlap.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if size < 8:
            raise _damaged(path, "a safetensors file", f"{size} bytes")
        if not 2 <= header_bytes <= min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(path, "a safetensors header", f"a header length of {header_bytes} in {size} bytes")
        try:
            header = json.loads(stream.read(header_bytes), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, "a JSON header", str(error)) from error
    if not isinstance(header, dict):
        raise _damaged(path, "a JSON object as the header", f"{type(header).__name__}: {header!r:.80}")
    start = 8 + header_bytes
    entries = {name: _entry(path, name, item, start) for name, item in header.items() if name != "__metadata__"}
    end = _require_cover(path, entries, start)
    if end != size:
        raise _damaged(path, f"{end} bytes by its header", f"{size} bytes")
    return entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, none of whose names stands twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two entries of the name {next(n for n in names if names.count(n) > 1)}")
    return found


def _require_cover(path: Path, entries: Mapping[str, TensorEntry], start: int) -> int:
    """Where the data ends. Refuses ranges that leave bytes out or share some, whatever order the header has."""
    end, before = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].length)):
        if entry.offset != end:
            what = "a hole" if entry.offset > end else "an overlap"
            expected = f"the bytes of {name} right after {before}, from byte {end - start} of the data"
            raise _damaged(path, expected, f"them from byte {entry.offset - start}: {what}")
        end, before = entry.offset + entry.length, name
    return end


def _entry(path: Path, name: str, item: object, start: int) -> TensorEntry:
    parts = [item.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(item, dict) else [None] * 3
    code, shape, offsets = parts
    if not isinstance(code, str) or not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        expected = f"a dtype, a shape of counts and two data_offsets, none below zero, for {name}"
        raise _damaged(path, expected, f"{item!r:.200}")
    begin, end = offsets
    if code not in BY_SAFETENSORS:
        raise DtoolError(
            f"{path}: tensor {name} is stored as {code}",
            expected=f"one of {', '.join(sorted(BY_SAFETENSORS))}",
            found=code,
            fix="convert the checkpoint to one of these first",
        )
    fmt = BY_SAFETENSORS[code]
    if end - begin != math.prod(shape) * fmt.bytes:
        raise _damaged(path, f"{math.prod(shape) * fmt.bytes} bytes for {name} {list(shape)}", f"{end - begin} bytes")
    return TensorEntry(path, fmt.name, tuple(shape), start + begin, end - begin)


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _damaged(path: Path, expected: str, found: str) -> DtoolError:
    return DtoolError(f"{path} is damaged", expected=expected, found=found, fix="download or copy the file again")


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Header bytes for {name: (format, shape)} in order, and each tensor's (file offset, length).

    The header is padded with spaces so that the data starts aligned.
    """
    items: dict[str, object] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        length = math.prod(shape) * FORMATS[dtype].bytes
        items[name] = {
            "dtype": FORMATS[dtype].safetensors,
            "shape": list(shape),
            "data_offsets": [position, position + length],
        }
        position += length
    text = json.dumps(items, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    ranges = {n: (start + i["data_offsets"][0], i["data_offsets"][1] - i["data_offsets"][0]) for n, i in items.items()}  # type: ignore[index]
    return struct.pack("<Q", len(text)) + text, ranges


def write_stream(path: Path, header: bytes, chunks: Iterable[Chunk]) -> str:
    """Write header and data; the sha256 of the whole file, computed on the way. Zero runs become holes."""
    digest = hashlib.sha256(header)
    with path.open("wb") as stream:
        stream.write(header)
        for chunk in chunks:
            if isinstance(chunk, int):
                hash_zeros(digest, chunk)
                stream.seek(chunk, os.SEEK_CUR)
            else:
                digest.update(chunk)
                stream.write(chunk)
        stream.truncate(stream.tell())
    return digest.hexdigest()


def hash_zeros(digest: "hashlib._Hash", count: int) -> None:
    """Update a digest with `count` zero bytes."""
    while count > 0:
        digest.update(memoryview(_ZEROS)[: min(count, CHUNK_BYTES)])
        count -= CHUNK_BYTES


def read_chunks(entry: TensorEntry, *, holes: bool = True) -> Iterator[Chunk]:
    """The bytes of a tensor in pieces of CHUNK_BYTES (the last one shorter).

    With `holes`, unstored ranges of a sparse file come as counts, and pieces may be shorter.
    """
    with entry.path.open("rb") as stream:
        position, end = entry.offset, entry.offset + entry.length
        while position < end:
            data_start = _next_data(stream.fileno(), position, end) if holes else position
            if data_start > position:
                yield data_start - position
                position = data_start
                continue
            stream.seek(position)
            chunk = stream.read(min(CHUNK_BYTES, end - position))
            if not chunk:
                raise _damaged(entry.path, f"data up to byte {end}", f"an end at byte {position}")
            position += len(chunk)
            yield chunk


def stored_bytes(entry: TensorEntry) -> int:
    """How many bytes of a tensor are on the disk: all of them, but for the holes of a sparse file."""
    total, position, end = 0, entry.offset, entry.offset + entry.length
    with entry.path.open("rb") as stream:
        while (position := _next_data(stream.fileno(), position, end)) < end:
            stop = min(os.lseek(stream.fileno(), position, os.SEEK_HOLE), end)
            total += stop - position
            position = stop
    return total


def _next_data(handle: int, position: int, end: int) -> int:
    """Where the next stored byte lies at or after `position`, at most `end`."""
    try:
        return min(os.lseek(handle, position, os.SEEK_DATA), end)
    except OSError:  # ENXIO: only a hole is left
        return end


def read_tensor(entry: TensorEntry):  # noqa: ANN201 - torch must not be imported to read a header
    """One tensor as torch, copied from the file."""
    import torch

    data = bytearray(entry.length)
    with entry.path.open("rb") as stream:
        stream.seek(entry.offset)
        if stream.readinto(data) != entry.length:
            raise _damaged(entry.path, f"{entry.length} bytes at {entry.offset}", "the end of the file")
    dtype = FORMATS[entry.dtype].torch_dtype
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape) if data else torch.empty(entry.shape, dtype=dtype)


def tensor_bytes(tensor) -> memoryview:  # noqa: ANN001 - torch must not be imported to read a header
    """The bytes of a contiguous torch tensor, without a copy."""
    import torch

    return memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())


def write_tensors(path: Path, tensors: Mapping[str, object]) -> dict[str, TensorEntry]:
    """Write torch tensors to a safetensors file in their order; where each lies."""
    from toolchain.formats import format_of

    header, _ = build_header({n: (format_of(t), tuple(t.shape)) for n, t in tensors.items()})  # type: ignore[attr-defined]
    write_stream(path, header, (tensor_bytes(t) for t in tensors.values()))
    return read_header(path)
