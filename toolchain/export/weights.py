"""The weights file of an export: every parameter once, in order, streamed and converted in pieces."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolchain.artifact import CHUNK_BYTES
from toolchain.errors import DtoolError
from toolchain.formats import FORMATS, format_named
from toolchain.model.checkpoint import Checkpoint
from toolchain.model.foreign.coded import CodedTensor, Part, part_entries, read_part
from toolchain.tensor_file import (
    Chunk,
    TensorEntry,
    build_header,
    hash_zeros,
    read_chunks,
    read_header,
    stored_bytes,
    tensor_bytes,
    write_stream,
)

INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of positive infinity; every larger code of the sign is NaN."""


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """Where each tensor lies, the file's sha256, and the identity of the checkpoint it came from."""

    entries: dict[str, TensorEntry]
    sha256: str
    source_sha256: str


def checkpoint_identity(checkpoint: Checkpoint) -> str:
    """sha256 of the checkpoint's tensors written as one file in parameter order.

    It does not depend on shards or on the order in them. Reads every byte.
    """
    header, _ = build_header({n: (p.dtype, p.shape) for n, p in checkpoint.parameters.items()})
    digest = hashlib.sha256(header)
    for parameter in checkpoint.parameters.values():
        for entry in (entry for part in parameter.parts for entry in part_entries(part)):
            for chunk in read_chunks(entry):
                _update(digest, chunk)
    return digest.hexdigest()


def weights_file_bytes(checkpoint: Checkpoint, compute_dtype: str) -> int:
    """The bytes that `write_weights` will take on the disk."""
    target = format_named(compute_dtype)
    header, ranges = build_header({n: (target.name, p.shape) for n, p in checkpoint.parameters.items()})
    unchanged = _unchanged_parts(checkpoint, target.name)
    if unchanged is None:
        return len(header) + sum(length for _, length in ranges.values())
    return len(header) + sum(stored_bytes(entry) for _, entry in unchanged)


def _unchanged_parts(checkpoint: Checkpoint, target: str) -> list[tuple[str, TensorEntry]] | None:
    """Name and place of every stored tensor, where all can be copied as they are; None where some are converted."""
    parts: list[tuple[str, TensorEntry]] = []
    for parameter in checkpoint.parameters.values():
        for name, part in zip(parameter.names, parameter.parts, strict=True):
            if parameter.arrange is not None or not isinstance(part, TensorEntry) or part.dtype != target:
                return None
            parts.append((name, part))
    return parts


def write_weights(checkpoint: Checkpoint, compute_dtype: str, path: Path) -> WrittenWeights:
    """Write all parameters in `compute_dtype`; memory stays at a few chunks.

    Without a conversion the file is the checkpoint's canonical form, so one pass of sha256 gives
    both digests. Raises DtoolError when a value is not finite in the new format.
    """
    target = format_named(compute_dtype)
    header, _ = build_header({n: (target.name, p.shape) for n, p in checkpoint.parameters.items()})
    unchanged = _unchanged_parts(checkpoint, target.name)
    if unchanged is not None:
        chunks = (chunk for name, entry in unchanged for chunk in _finite_chunks(name, entry))
        digest = write_stream(path, header, chunks)
        return WrittenWeights(read_header(path), digest, digest)
    source_header, _ = build_header({n: (p.dtype, p.shape) for n, p in checkpoint.parameters.items()})
    source = hashlib.sha256(source_header)
    digest = write_stream(path, header, _converted(checkpoint, target.name, source))
    return WrittenWeights(read_header(path), digest, source.hexdigest())


def _finite_chunks(name: str, entry: TensorEntry) -> Iterator[Chunk]:
    """The bytes as they are, each piece looked at for inf and NaN. Holes of a sparse file are zeros."""
    stat = entry.path.stat()
    sparse = stat.st_blocks * 512 < stat.st_size
    for chunk in read_chunks(entry, holes=sparse):
        if not sparse and not isinstance(chunk, int):
            _require_finite(name, chunk, entry.dtype)
        yield chunk


def _require_finite(name: str, chunk: bytes | memoryview, dtype: str) -> None:
    """Refuse inf and NaN, whose exponent bits are all ones: the largest codes of either sign."""
    bits, infinity = FORMATS[dtype].bits, INFINITY.get(dtype)
    if infinity is None:
        return
    positive = np.frombuffer(chunk, f"int{bits}").max(initial=0) >= infinity
    negative = np.frombuffer(chunk, f"uint{bits}").max(initial=0) >= infinity + (1 << (bits - 1))
    if positive or negative:
        raise DtoolError(
            f"{name} holds inf or NaN",
            expected="finite weights",
            found="a value that is not finite",
            fix="the checkpoint is broken: download it again, or train on",
        )


def _converted(checkpoint: Checkpoint, target: str, source: "hashlib._Hash") -> Iterator[Chunk]:
    for parameter in checkpoint.parameters.values():
        if parameter.arrange is not None:
            (part,) = parameter.parts
            yield from _arranged(parameter.names[0], part, target, source, parameter.arrange)
            continue
        for name, part in zip(parameter.names, parameter.parts, strict=True):
            if isinstance(part, CodedTensor):
                yield from _arranged(name, part, target, source)
                continue
            for chunk in read_chunks(part, holes=False):
                _update(source, chunk)
                yield _converted_chunk(name, chunk, part.dtype, target)


def _arranged(
    name: str, part: Part, target: str, source: "hashlib._Hash", arrange: Callable[[Any], Any] | None = None
) -> Iterator[Chunk]:
    """A part read whole: one whose rows lie otherwise in the checkpoint, put in order, or codes, as their numbers."""
    for entry in part_entries(part):
        for chunk in read_chunks(entry, holes=False):
            _update(source, chunk)
    value = read_part(part)
    data = tensor_bytes(value if arrange is None else arrange(value))
    for start in range(0, len(data), CHUNK_BYTES):
        yield _converted_chunk(name, data[start : start + CHUNK_BYTES], part.dtype, target)


def _converted_chunk(name: str, chunk: Chunk, source: str, target: str) -> Chunk:
    assert not isinstance(chunk, int)
    _require_finite(name, chunk, source)
    return chunk if source == target else _convert(name, bytes(chunk), source, target)


def _convert(name: str, chunk: bytes, source: str, target: str) -> Chunk:
    import torch

    values = torch.frombuffer(bytearray(chunk), dtype=FORMATS[source].torch_dtype)
    converted = values.to(FORMATS[target].torch_dtype)
    if not bool(torch.isfinite(converted).all()):
        worst = float(values.abs().max())
        raise DtoolError(
            f"{name} does not fit {target}",
            expected="finite values",
            found=f"a largest magnitude of {worst:g}",
            fix="choose compute_dtype bfloat16 or float32",
        )
    return tensor_bytes(converted)


def _update(digest: "hashlib._Hash", chunk: Chunk) -> None:
    if isinstance(chunk, int):
        hash_zeros(digest, chunk)
    else:
        digest.update(chunk)
