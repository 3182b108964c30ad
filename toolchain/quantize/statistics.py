"""What the float model did on the calibration text, kept by content, so that the next recipe need not run it again.

What the walk sees of a layer depends on the weights, the ids of the text and their batches, the bases and the excess
set apart before it is seen, and the versions: all of it is the key. Formats, smoothing and rounding come after, so a
recipe that differs in those alone finds every layer here: the same numbers, so the same bytes.

    DIR/KEY/layer-3.safetensors    a part: records of tensors under NAME/FIELD, and the first text as it enters
    DIR/KEY/layer-3.sha256         its seal, of digest, key and name: a part without it was torn, altered or moved

A record is a tensor, or a dataclass of tensors, counts and None. A part serves where it has every field that is not
None in what is asked for; what it lacks is seen again and kept beside what it has. One part is in memory at a time.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from toolchain.artifact import WAYS_OUT, hash_file, hash_json, versions, write_atomic
from toolchain.errors import DtoolError
from toolchain.formats import format_of
from toolchain.tensor_file import TensorEntry, build_header, read_header, read_tensor, tensor_bytes, write_stream

SCHEMA = 2
Records = Mapping[str, Any]


class Statistics:
    """The parts under one key of a folder."""

    def __init__(self, folder: Path, key: str, report: Callable[[str], None]) -> None:
        self.folder = folder / key
        self.report = report

    def recall(self, part: str, asked: Records) -> dict[str, Any] | None:
        """The records of a part, each with the fields that `asked` has; None where one is lacking or damaged."""
        entries = self._entries(part)
        if not {field for name, record in asked.items() for field in _fields(name, record)} <= set(entries):
            return None
        return {name: _filled(name, record, entries) for name, record in asked.items()}

    def keep(self, part: str, records: Records) -> None:
        """Keep a part, with what was kept of it before. Raises DtoolError where it cannot be written."""
        tensors = _flat(records)
        before = {name: entry for name, entry in self._entries(part).items() if name not in tensors}
        layout = {name: (format_of(t), tuple(t.shape)) for name, t in tensors.items()}
        header, _ = build_header(layout | {name: (e.dtype, e.shape) for name, e in before.items()})
        path = self.folder / f"{part}.safetensors"
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")

        def chunks() -> Any:
            yield from map(tensor_bytes, tensors.values())
            for entry in before.values():
                yield tensor_bytes(read_tensor(entry))

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            digest = write_stream(partial, header, chunks())
            partial.replace(path)
            write_atomic(self.folder / f"{part}.sha256", self._seal(part, digest).encode())
        except OSError as error:
            raise DtoolError(
                f"statistics cannot be kept in {self.folder}",
                expected="a writable folder with room for them",
                found=error.strerror or str(error),
                fix=f"{WAYS_OUT.get(error.errno or 0, 'choose another folder')}, or leave --statistics out",
            ) from error
        finally:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                partial.unlink(missing_ok=True)

    def _seal(self, part: str, digest: str) -> str:
        """What proves a part whole, and in its own place."""
        return hash_json([self.folder.name, part, digest])

    def _entries(self, part: str) -> dict[str, TensorEntry]:
        """The tensors of a part by name; none where it is not there, or not whole, which is told."""
        path, digest = self.folder / f"{part}.safetensors", self.folder / f"{part}.sha256"
        if not path.is_file() and not digest.is_file():
            return {}
        try:
            if path.is_file() and self._seal(part, hash_file(path)) == digest.read_text("utf-8"):
                return read_header(path)
        except (OSError, ValueError, DtoolError):
            pass
        self.report(f"warning: the statistics in {path} are damaged: seen again")
        path.unlink(missing_ok=True)
        digest.unlink(missing_ok=True)
        return {}


def statistics_key(weights: str, config: Any, blocks: Any, bases: Mapping[str, Any]) -> str:
    """The key of what is seen.

    `weights`: the digest of the float weights; `config`: the model's, as JSON types; `blocks`: ids int64 [samples,
    seq_len]; `bases`: what else shapes the inputs of a layer's products, as JSON types.
    """
    text = hash_json({"shape": list(blocks.shape), "ids": blocks.tolist()})
    parts = {"schema": SCHEMA, "weights": weights, "config": config, "text": text, "bases": dict(bases)}
    return hash_json(parts | {"versions": versions(("torch",))})


def _fields(name: str, record: Any) -> dict[str, Any]:
    """The parts of a record under their stored names, those that are None left out."""
    if not dataclasses.is_dataclass(record):
        return {name: record}
    values = {f"{name}/{f.name}": getattr(record, f.name) for f in dataclasses.fields(record)}
    return {field: value for field, value in values.items() if value is not None}


def _flat(records: Records) -> dict[str, torch.Tensor]:
    fields = [_fields(name, record) for name, record in records.items()]
    return {field: torch.as_tensor(value) for part in fields for field, value in part.items()}


def _filled(name: str, record: Any, entries: Mapping[str, TensorEntry]) -> Any:
    """A record like `record` with what is stored."""
    asked = _fields(name, record)
    # copies of their own: at the addresses torch gives, sums come out with the same bits as at first
    found = {field: read_tensor(entries[field]).clone() for field in asked}
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return found[name]
    values = {field: int(t) if isinstance(asked[field], int) else t for field, t in found.items()}
    return dataclasses.replace(record, **{field.removeprefix(f"{name}/"): v for field, v in values.items()})
