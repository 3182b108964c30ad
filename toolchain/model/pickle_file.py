"""pytorch_model.bin by byte range: what lies where, with nothing of the file run and no data read.

A .bin file is a zip archive: one pickle that describes the tensors, and one record of raw bytes per
storage. `torch.load(weights_only=True)` unpickles with a machine that knows tensors and containers
alone and refuses every other callable by name. Under FakeTensorMode it leaves the storages unread
and notes where each lies, so that a .bin streams as safetensors does.

What that does not check is checked here: that records are neither compressed nor of another byte order,
and that a tensor's bytes lie within one record. Views are taken where their elements follow one another in the record.

Source: PyTorch, Serialization semantics: "Layout Control" and "torch.load with weights_only=True".
"""

import re
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from toolchain.errors import DtoolError, name_list
from toolchain.formats import BY_SAFETENSORS
from toolchain.tensor_file import TensorEntry

WAY_OUT = (
    "if you trust its source, load it with the program that wrote it and save the tensors as model.safetensors; "
    "nothing in it was run"
)
VIEW = "a transposed or strided view"


def read_pickle(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a .bin file. Raises DtoolError when it is damaged or holds anything but named tensors."""
    import torch

    records = _records(path)
    document = _load(path)
    if not isinstance(document, Mapping):
        raise _refused(path, f"a {type(document).__name__} instead of names and tensors")
    other = [f"{name} ({type(v).__name__})" for name, v in document.items() if not isinstance(v, torch.Tensor)]
    if other or not all(isinstance(name, str) for name in document):
        raise _refused(path, name_list(other) or "a name that is no text")
    return {name: _entry(path, name, tensor, records) for name, tensor in document.items()}


def _records(path: Path) -> dict[int, int]:
    """Where the archive's records begin in the file, and their bytes. Raises DtoolError for what cannot be streamed."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            records = archive.infolist()
            order = next((archive.read(r).decode() for r in records if r.filename.endswith("/byteorder")), "little")
            starts = [_data_start(stream, record.header_offset) for record in records]
    except (zipfile.BadZipFile, struct.error, OSError, ValueError, NotImplementedError) as error:
        with path.open("rb") as stream:
            old = stream.read(1) == b"\x80"
        raise DtoolError(
            f"{path} cannot be read",
            expected="a zip archive, as torch.save writes since PyTorch 1.6",
            found="an older pickle file, or a cut one" if old else str(error),
            fix="download it again; if it is whole, load it with torch.load(weights_only=True) and save it as "
            "model.safetensors",
        ) from error
    packed = [r.filename for r in records if "/data/" in r.filename and r.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise DtoolError(
            f"{path} is compressed",
            expected="records as they are",
            found=name_list(packed),
            fix="save it again with torch.save",
        )
    if order != "little":  # torch.load would swap bytes that it has not read
        raise DtoolError(
            f"{path} was written on a machine of another byte order",
            expected="little",
            found=order,
            fix="save it again on an ordinary machine",
        )
    _require_apart(path, [(start, r.compress_size) for start, r in zip(starts, records, strict=True)])
    return {start: record.file_size for start, record in zip(starts, records, strict=True)}


def _require_apart(path: Path, records: Sequence[tuple[int, int]]) -> None:
    """Refuse records (start, bytes) that share bytes: one tensor would have the numbers of another."""
    end = 0
    for start, size in sorted(records):
        if start < end:
            raise DtoolError(
                f"{path} is damaged",
                expected="records that lie one after the other",
                found=f"one from byte {start} on, where another ends at byte {end}",
                fix="download the file again",
            )
        end = start + size


def _data_start(stream: IO[bytes], header: int) -> int:
    """Where a record's data begins: behind its header of 30 bytes, its name and its extra field."""
    stream.seek(header + 26)
    return header + 30 + sum(struct.unpack("<HH", stream.read(4)))


def _load(path: Path) -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with warnings.catch_warnings(), FakeTensorMode():
            warnings.simplefilter("ignore")  # what it warns of, a TorchScript archive, is refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError, RuntimeError, EOFError and more: what the file makes it raise
        raise _refused(path, _reason(error)) from error


def _reason(error: Exception) -> str:
    """What torch.load stumbled over, in a few words."""
    text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"a call of {found.group(1)}"
    return re.split(r"\.\s|\n", text.strip() or type(error).__name__)[0][:200]


def _entry(path: Path, name: str, tensor: Any, records: dict[int, int]) -> TensorEntry:
    kind = str(tensor.dtype).removeprefix("torch.")
    formats = {f.torch: f.name for f in BY_SAFETENSORS.values()}
    if kind not in formats:
        raise DtoolError(
            f"{path}: tensor {name} is stored as {kind}",
            expected=f"one of {', '.join(sorted(formats))}",
            found=kind,
            fix="convert the checkpoint to one of these first",
        )
    shape, size = tuple(int(n) for n in tensor.shape), tensor.element_size()
    if odd := _oddity(tensor):
        raise DtoolError(
            f"{path}: tensor {name} {list(shape)} is not stored as rows of numbers",
            expected="a dense tensor, its elements one after the other",
            found=odd,
            fix="save tensor.contiguous() instead" if odd == VIEW else "save dense tensors instead",
        )
    start = tensor.untyped_storage()._checkpoint_offset  # noqa: SLF001 - the name that PyTorch documents
    begin = start + size * tensor.storage_offset()
    length = size * tensor.numel()
    if length and (start not in records or begin + length > start + records[start]):
        raise DtoolError(
            f"{path}: the bytes of {name} are not where its pickle says",
            expected=f"{length} bytes for {list(shape)}",
            found=f"a record of {records[start]}" if start in records else "no record there",
            fix="download the file again, or save it again with torch.save",
        )
    return TensorEntry(path, formats[kind], shape, begin, length)


def _oddity(tensor: Any) -> str:
    """Why a tensor is no run of bytes in the file; empty for one that is."""
    import torch

    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if not tensor.is_contiguous():
        return VIEW
    return "" if getattr(tensor.untyped_storage(), "_checkpoint_offset", None) is not None else "a tensor without data"


def _refused(path: Path, found: str) -> DtoolError:
    return DtoolError(
        f"{path} is not a plain checkpoint", expected="a dictionary of names and tensors", found=found, fix=WAY_OUT
    )
